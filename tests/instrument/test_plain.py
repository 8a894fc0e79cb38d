"""Plain PyTorch on two gloo ranks: DDP, FSDP2, a pipeline and tensor parallelism, by hooks and
collectives alone.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from megascan.timeline import numbers
from tests import ranks

TRAINER = Path(__file__).with_name("plain_trainer.py")
ROOT = TRAINER.parents[2]
KINDS = ("ddp", "fsdp", "pipeline", "tensor")
NUM_MICROBATCHES, NUM_LAYERS, BATCH = 2, 4, 96
EVERY = ("--trace-interval", "6", "--continuous-trace-iterations", "6")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def launch(*words: str) -> None:
    done = ranks.run(TRAINER, *words, num_ranks=2, check=True)
    assert "tracing stopped" not in done.stderr


class Run:
    """One kind trained with and without tracing."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.trace = folder / "trace"
        self.plain, self.traced = (
            [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]
            for name in ("plain", "traced")
        )
        events = [json.loads(path.read_text()) for path in sorted(self.trace.glob("*.json"))]
        self.headers = [rank_events[0]["args"] for rank_events in events]
        self.tokens = [
            event["args"]["tokens"]
            for rank_events in events
            for event in rank_events
            if event["name"] == "megascan_window"
        ]
        self.spans = [
            [event for event in rank_events if event["ph"] == "X"] for rank_events in events
        ]

    def of(self, rank: int, name: str, iteration: int = 2) -> list[dict]:
        return [
            span
            for span in self.spans[rank]
            if span["name"] == name and span["args"]["iteration"] == iteration
        ]


def train_all(folder: Path) -> Path:
    """All kinds in one job, each without and with tracing, into folders by their names."""
    plan = []
    for kind in KINDS:
        (folder / kind).mkdir()
        plan.append([kind, "--losses", str(folder / kind / "plain")])
        trace = ["--trace", "--trace-dir", str(folder / kind / "trace"), *EVERY]
        plan.append([kind, "--losses", str(folder / kind / "traced"), *trace])
    (folder / "plan").write_text("\n".join(" ".join(words) for words in plan))
    launch("--plan", str(folder / "plan"))
    return folder


@pytest.fixture(params=KINDS)
def run(once, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = once("all", lambda: train_all(tmp_path_factory.mktemp("kinds")))
    return once(request.param, lambda: Run(request.param, folder / request.param))


def test_losses_and_weights_are_bit_identical(run):
    assert run.traced == run.plain


def test_every_microbatch_passes_forward_and_backward_once(run):
    """The evaluation at the end of every step is none."""
    for rank in range(2):
        for name in ("forward", "backward"):
            spans = run.of(rank, name)
            assert [span["args"]["microbatch"] for span in spans] == [*range(NUM_MICROBATCHES)]
            assert {span["args"]["phase"] for span in spans} == {name}


def test_windows_tell_how_many_samples_a_pass_gets(run):
    size = BATCH // NUM_MICROBATCHES if run.kind == "pipeline" else BATCH
    assert run.tokens == [[size, size]] * len(run.tokens) and run.tokens


def test_layers_lie_in_their_pass(run):
    num_layers = NUM_LAYERS // (2 if run.kind == "pipeline" else 1)
    for rank in range(2):
        for name, outer in (("layer", "forward"), ("layer-backward", "backward")):
            spans = run.of(rank, name)
            places = Counter((span["args"]["microbatch"], span["args"]["layer"]) for span in spans)
            assert len(places) == len(spans) == NUM_MICROBATCHES * num_layers
            passes = {span["args"]["microbatch"]: span for span in run.of(rank, outer)}
            for span in spans:
                whole = passes[span["args"]["microbatch"]]
                assert whole["ts"] <= span["ts"]
                assert span["ts"] + span["dur"] <= whole["ts"] + whole["dur"] + 0.001


def test_optimizer_and_data_once_each(run):
    for rank in range(2):
        assert len(run.of(rank, "optimizer")) == 1
        num_batches = NUM_MICROBATCHES if run.kind in ("ddp", "fsdp") else 0
        assert len(run.of(rank, "batch-generator")) == num_batches


def test_gradients_travel_over_a_data_parallel_group(run):
    sums = Counter(span["name"] for span in run.spans[0] if span["cat"] == "collective")
    if run.kind in ("pipeline", "tensor"):
        assert not [span for span in run.spans[0] if span["args"].get("group", "").startswith("dp")]
        return
    wanted = {"ddp": {"all_reduce"}, "fsdp": {"all_gather", "reduce_scatter"}}[run.kind]
    assert set(sums) == wanted
    for rank in range(2):
        spans = [span for span in run.spans[rank] if span["cat"] == "collective"]
        assert {span["args"]["group"] for span in spans} == {"dp@0"}
        # DDP reduces with the last microbatch only
        num_reductions = 1 if run.kind == "ddp" else NUM_MICROBATCHES
        assert len(run.of(rank, "grad-sync")) == num_reductions
    if run.kind == "ddp":  # in C++, unless somebody looks
        assert {span["tid"] for span in run.spans[0] if span["name"] == "all_reduce"} == {4}


def test_what_dtensor_communicates_lies_in_its_layer(run):
    """Forward the sum of `outer`'s parts, backward that of `inner`'s input but for the first."""
    if run.kind != "tensor":
        return
    for rank in range(2):
        sums = run.of(rank, "all_reduce")
        places = Counter((one["args"]["microbatch"], one["args"]["phase"]) for one in sums)
        assert places == {
            (microbatch, phase): number
            for microbatch in range(NUM_MICROBATCHES)
            for phase, number in (("forward", NUM_LAYERS), ("backward", NUM_LAYERS - 1))
        }
        assert {(one["args"]["group"], one["tid"]) for one in sums} == {("tp@0", 2)}
        for name in ("layer", "layer-backward"):
            for layer in run.of(rank, name):
                end = layer["ts"] + layer["dur"]
                inside = [one for one in sums if layer["ts"] <= one["ts"] < end]
                is_first = name == "layer-backward" and layer["args"]["layer"] == 1
                assert len(inside) == (0 if is_first else 1)
                assert all(one["ts"] + one["dur"] <= end + 0.001 for one in inside)


def test_the_layout_is_that_of_the_mesh(run):
    layout = run.headers[0]["layout"]
    if run.kind == "pipeline":
        assert (layout["pp"], layout["dp"]) == (2, 1)
        assert [header["coordinates"]["pp"] for header in run.headers] == [0, 1]
    elif run.kind == "tensor":
        assert (layout["tp"], layout["dp"]) == (2, 1)
    else:
        assert (layout["pp"], layout["dp"]) == (1, 2)
    assert {header["trainer"] for header in run.headers} == {"torch"}


def test_messages_have_their_counterparts(run):
    messages = [
        (rank, span["args"])
        for rank in range(2)
        for span in run.spans[rank]
        if span["cat"] == "p2p"
    ]
    assert bool(messages) == (run.kind == "pipeline")
    ends = Counter(
        (a["iteration"], a["direction"], a["sequence"], a["size_bytes"],
         (rank, a["peer"]) if a["op"] == "send" else (a["peer"], rank))
        for rank, a in messages
    )  # fmt: skip
    assert set(ends.values()) <= {2}
    assert {a["direction"] for rank, a in messages if a["op"] == "send" and rank == 0} <= {
        "forward"
    }


def test_the_aggregated_timeline_knows_waits_and_work(run):
    from aggregate import build_timeline
    from megascan.reader import read_trace

    spans = build_timeline(read_trace(run.trace)).spans
    # In its first step torch's pipeline passes once more through each stage, to learn its shapes.
    later = spans.filter(pa.array(numbers(spans, "iteration") > 1))
    named = later.column("name").to_pylist()
    assert named.count("iteration") == 2 * 3
    assert named.count("forward") == 2 * 3 * NUM_MICROBATCHES
    assert (numbers(spans, "duration_ns") >= 0).all()


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_grows_slow_is_named(kind, tmp_path):
    """With one peer only an onset inside the trace tells which of the two is at fault."""
    slow = ("--slow", "1", "--slow-from", "13", "--iterations", "24")
    trace, verdict = tmp_path / "trace", tmp_path / "verdict.json"
    slow += ("--trace", "--trace-dir", str(trace), *EVERY)
    launch(kind, "--losses", str(tmp_path / "losses"), *slow)
    ranks.run("-m", "megascan", "detect", trace, "--json", verdict, check=True)
    findings = json.loads(verdict.read_text())["findings"]
    accused = [(each["ranks"], each["cause"], each["owner"]) for each in findings]
    assert ([1], "compute", "node") in accused
    assert not [each for each in findings if each["ranks"] != [1] and each["owner"] == "node"]
