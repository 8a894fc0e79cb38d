"""Real processes on gloo: what is traced is right, and training does not notice.

Each layout is trained twice by `foreign_trainer.py`, without and with `--trace`; those of equally
many ranks in one job, which also shows that a tracer leaves nothing behind for the next.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests import ranks

pytestmark = pytest.mark.distributed

TRAINER = Path(__file__).with_name("foreign_trainer.py")
ROOT = TRAINER.parents[2]
NUM_MICROBATCHES, NUM_LAYERS = 4, 4

LAYOUTS = {
    "tp2-pp2": (4, ["--tp", "2", "--pp", "2"]),
    "pp2-interleaved": (2, ["--pp", "2", "--vpp", "2"]),
    "pp2-interleaved-overlap": (2, ["--pp", "2", "--vpp", "2", "--overlap"]),
    "dp2-distributed-optimizer": (2, ["--distributed-optimizer"]),
    "dp2-overlap-recompute": (2, ["--distributed-optimizer", "--overlap", "--recompute"]),
    "dp2-base": (2, ["--distributed-optimizer", "--trace-granularity", "base"]),
}
BASE = "dp2-base"


def train(num_ranks: int, folder: Path) -> None:
    """Trains all layouts of so many ranks, each without and with tracing, into folders by name."""
    names = [name for name, (size, _) in LAYOUTS.items() if size == num_ranks]
    plan = []
    for name in names:
        (folder / name).mkdir()
        common = [*LAYOUTS[name][1], "--losses"]
        trace = ["--trace", "--trace-dir", str(folder / name / "trace")]
        trace += ["--trace-layer-stride", "1"]
        plan.append([*common, str(folder / name / "plain")])
        plan.append([*common, str(folder / name / "traced"), *trace])
    (folder / "plan").write_text("\n".join(" ".join(words) for words in plan))
    words = (TRAINER, "--plan", folder / "plan")
    finished = ranks.run(*words, num_ranks=num_ranks, check=True)
    assert "tracing stopped" not in finished.stderr


class Run:
    """A layout trained with and without tracing."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.num_ranks = LAYOUTS[name][0]
        self.plain, self.traced = (
            [json.loads((folder / f"{kind}.{rank}.json").read_text()) for rank in self.ranks]
            for kind in ("plain", "traced")
        )
        trace = folder / "trace"
        events = [json.loads(path.read_text()) for path in sorted(trace.glob("*.json"))]
        self.headers = {
            event["pid"]: event["args"]
            for rank_events in events
            for event in rank_events
            if event["name"] == "megascan"
        }
        self.windows = [
            [event["args"] for event in rank_events if event["name"] == "megascan_window"]
            for rank_events in events
        ]
        first_ns = min(header["clock"]["origin_unix_ns"] for header in self.headers.values())
        self.spans = []
        for span in (event for rank_events in events for event in rank_events):
            if span["ph"] == "X":  # onto one origin
                origin_ns = self.headers[span["pid"]]["clock"]["origin_unix_ns"]
                span["ts"] += (origin_ns - first_ns) / 1000
                self.spans.append(span)

    @property
    def ranks(self) -> range:
        return range(self.num_ranks)

    @property
    def num_chunks(self) -> int:
        return next(iter(self.headers.values()))["layout"]["vpp"]

    def of(self, rank: int, name: str, iteration: int = 2) -> list[dict]:
        return [
            span
            for span in self.spans
            if span["pid"] == rank
            and span["name"] == name
            and span["args"]["iteration"] == iteration
        ]


@pytest.fixture
def trained(once, tmp_path_factory: pytest.TempPathFactory):
    """The folder of a layout."""

    def folder_of(name: str) -> Path:
        num_ranks, _ = LAYOUTS[name]

        def train_all() -> Path:
            folder = tmp_path_factory.mktemp("layouts")
            train(num_ranks, folder)
            return folder

        return once(num_ranks, train_all) / name

    return folder_of


@pytest.fixture(params=[name for name in LAYOUTS if name != BASE])
def run(request: pytest.FixtureRequest, trained, once) -> Run:
    return once(request.param, lambda: Run(request.param, trained(request.param)))


def test_losses_and_weights_are_bit_identical(run):
    assert run.traced == run.plain


def test_one_run_id_one_clock_and_every_rank(run):
    assert sorted(run.headers) == list(range(run.num_ranks))
    assert len({header["run_id"] for header in run.headers.values()}) == 1
    assert len({header["clock"]["domain"] for header in run.headers.values()}) == 1
    assert [[(w["first_iteration"], w["last_iteration"]) for w in ws] for ws in run.windows] == [
        [(1, 2)]
    ] * run.num_ranks


def test_nothing_was_dropped(run):
    assert {window["num_dropped"] for windows in run.windows for window in windows} == {0}


def nesting_errors(spans):
    """Pairs of spans of one track that overlap without one holding the other."""
    stack = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start = round(span["ts"] * 1000)
        end = start + round(span["dur"] * 1000)
        while stack and stack[-1][0] <= start:
            stack.pop()
        if stack and end > stack[-1][0]:
            yield stack[-1][1], span["name"]
        stack.append((end, span["name"]))


def test_synchronous_spans_nest_on_their_tracks(run):
    for rank in range(run.num_ranks):
        for track in (1, 2, 3):
            spans = [s for s in run.spans if s["pid"] == rank and s["tid"] == track]
            assert list(nesting_errors(spans)) == []


def test_everything_lies_in_its_iteration(run):
    for rank in range(run.num_ranks):
        for iteration in (1, 2):
            (whole,) = run.of(rank, "iteration", iteration)
            end = whole["ts"] + whole["dur"] + 0.001
            for span in run.spans:
                if span["pid"] == rank and span["args"]["iteration"] == iteration:
                    assert whole["ts"] <= span["ts"] and span["ts"] + span["dur"] <= end, span


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_every_microbatch_passes_every_chunk_once(run, name):
    expected = {
        (microbatch, chunk)
        for microbatch in range(NUM_MICROBATCHES)
        for chunk in range(run.num_chunks)
    }
    for rank in range(run.num_ranks):
        slots = Counter(
            (span["args"]["microbatch"], span["args"]["chunk"]) for span in run.of(rank, name)
        )
        assert slots == dict.fromkeys(expected, 1)


def test_backward_of_a_microbatch_follows_its_forward(run):
    for rank in range(run.num_ranks):
        ends = {
            (span["args"]["microbatch"], span["args"]["chunk"]): span["ts"] + span["dur"]
            for span in run.of(rank, "forward")
        }
        for span in run.of(rank, "backward"):
            assert span["ts"] >= ends[span["args"]["microbatch"], span["args"]["chunk"]]


def test_the_last_chunk_holds_the_loss_and_the_first_the_embedding(run):
    stages = {rank: header["coordinates"]["pp"] for rank, header in run.headers.items()}
    for rank, stage in stages.items():
        losses = {span["args"]["chunk"] for span in run.of(rank, "loss")}
        embeddings = {span["args"]["chunk"] for span in run.of(rank, "embedding")}
        assert losses == ({run.num_chunks - 1} if stage == max(stages.values()) else set())
        assert embeddings == ({0} if stage == 0 else set())


@pytest.mark.parametrize("module", ["transformer_layer", "attention", "mlp"])
def test_modules_forward_and_backward(run, module):
    num_stages = run.headers[0]["layout"]["pp"]
    repeated = "recompute" in run.name
    for rank in range(run.num_ranks):
        for suffix, wanted in (("", True), ("-backward", True), ("-recompute", repeated)):
            spans = run.of(rank, module + suffix)
            counts = Counter((span["args"]["layer"], span["args"]["microbatch"]) for span in spans)
            num_expected = NUM_LAYERS // num_stages * NUM_MICROBATCHES if wanted else 0
            assert len(counts) == len(spans) == num_expected
            phase = {"": "forward", "-backward": "backward", "-recompute": "recompute"}[suffix]
            assert {span["args"]["phase"] for span in spans} <= {phase}


def test_backward_of_modules_lies_in_the_backward_of_their_layer(run):
    for rank in range(run.num_ranks):
        layers = {
            (span["args"]["layer"], span["args"]["microbatch"]): span
            for span in run.of(rank, "transformer_layer-backward")
        }
        for inner in run.of(rank, "attention-backward") + run.of(rank, "mlp-backward"):
            outer = layers[inner["args"]["layer"], inner["args"]["microbatch"]]
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.001
            assert inner["args"]["chunk"] == outer["args"]["chunk"]


def test_collectives_agree_across_their_members(run):
    members = defaultdict(list)
    for span in run.spans:
        if span["cat"] == "collective":
            a = span["args"]
            members[a["iteration"], a["group"], a["op"], a["sequence"]].append(
                (span["pid"], a["size_bytes"])
            )
    assert members
    for (_, group, _, _), entries in members.items():
        expected = run.headers[entries[0][0]]["groups"][group]
        assert sorted(rank for rank, _ in entries) == sorted(expected)
        assert len({size for _, size in entries}) == 1


def test_messages_have_their_counterparts(run):
    pairs = defaultdict(list)
    for span in run.spans:
        a = span["args"]
        if span["cat"] == "p2p":
            ends = (span["pid"], a["peer"]) if a["op"] == "send" else (a["peer"], span["pid"])
            pairs[a["iteration"], *ends, a["direction"], a["sequence"]].append(span)
    assert bool(pairs) == (run.headers[0]["layout"]["pp"] > 1)
    for pair in pairs.values():
        one, other = sorted(pair, key=lambda span: span["args"]["op"], reverse=True)
        assert (one["args"]["op"], other["args"]["op"]) == ("send", "recv")
        assert one["args"]["microbatch"] == other["args"]["microbatch"]
        assert one["args"]["size_bytes"] == other["args"]["size_bytes"] == 16 * 2 * 32 * 4
        assert one["ts"] <= other["ts"] + other["dur"]  # one host, one clock


def test_messages_name_the_receiver_s_own_chunk(run):
    layout = run.headers[0]["layout"]
    for span in run.spans:
        a = span["args"]
        if span["cat"] == "p2p" and a["op"] == "recv" and a["direction"] == "forward":
            stage = run.headers[span["pid"]]["coordinates"]["pp"]
            assert a["chunk"] * layout["pp"] + stage > 0  # the very first has nobody before it


def test_data_and_optimizer_once(run):
    for rank in range(run.num_ranks):
        assert len(run.of(rank, "optimizer")) == 1
        assert len(run.of(rank, "grad-sync")) == 1
        data = run.of(rank, "batch-generator")
        assert len(data) == NUM_MICROBATCHES * run.num_chunks
        assert {span["tid"] for span in data} == {3}


def test_data_parallel_collectives(run):
    spans = [s for s in run.spans if s["args"].get("group") == "dp_cp@0"]
    if run.headers[0]["layout"]["dp"] == 1:
        assert spans == []
        return
    sizes = defaultdict(set)
    for span in spans:
        assert span["tid"] == (4 if "overlap" in run.name else 2)
        sizes[span["name"]].add(span["args"]["size_bytes"])
    (gradients,), (shard,) = sizes["reduce_scatter"], sizes["all_gather"]
    assert gradients == 2 * shard > 0


def test_base_has_the_passes_and_data_parallel_collectives_only(trained):
    for path in (trained(BASE) / "trace").glob("*.json"):
        names = {event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"}
        assert names == {
            *("iteration", "forward", "backward", "loss", "batch-generator"),
            *("grad-sync", "optimizer", "all_reduce", "reduce_scatter", "all_gather"),
        }
