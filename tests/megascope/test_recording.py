"""Recording in real trainings: files, requests, joined numbers, the first NaN, no disturbance."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detect.causes.corruption import deviations
from megascan.errors import ConfigError, InputError
from megascan.probes import read_probes
from megascan.topology import Layout
from megascope.folder_page import Recordings
from megascope.frames import decode, encode, whole_frames
from megascope.recorder import DataFile, data_file_name
from megascope.request import (
    FILE_NAME,
    Intervention,
    Request,
    RequestFile,
    read_request,
    write_request,
)
from tests import ranks

FLAGS = [
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "60"),
    *("--make-vocab-size-divisible-by", "16", "--num-layers", "4", "--hidden-size", "32"),
    *("--num-attention-heads", "4", "--seq-length", "16", "--micro-batch-size", "1"),
    *("--global-batch-size", "4", "--lr", "5e-3", "--log-interval", "1", "--num-workers", "0"),
    *("--distributed-backend", "gloo", "--train-iters", "4", "--eval-iters", "0"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SCOPE = ["--scope", "--scope-budget", "100"]
"""Of these small models every iteration, although looking costs more than computing."""
LAYOUTS = {
    "off": (1, []),
    "plain": (1, SCOPE),
    "sequence": (2, [*SCOPE, "--tensor-model-parallel-size", "2", "--sequence-parallel",
                     *RECOMPUTE.split()]),
    "interleaved": (2, [*SCOPE, "--pipeline-model-parallel-size", "2",
                        "--num-layers-per-virtual-pipeline-stage", "1", *RECOMPUTE.split()]),
    "experts": (2, [*SCOPE, "--num-experts", "4", "--expert-model-parallel-size", "2",
                    "--probe-interval", "2", "--disable-bias-linear"]),
    "changed": (1, [*SCOPE, "--scope-interventions"]),
}  # fmt: skip
REQUEST = Request(
    identifier="test", first=2, gradients=True,
    places=("embedding", "residual", "neurons", "fc1", "qkv", "attention", "loss", "logits"),
    reductions=("rms", "max", "entropy", "pixels", "top", "histogram", "finite"),
)  # fmt: skip


REQUESTS = {
    "experts": Request(places=("residual", "router", "experts", "expert_load"), gradients=True),
    "changed": Request(
        places=("residual",), weights=False,
        interventions=(
            Intervention(place="residual", kind="scale", amount=0.5, layers=(2,), first=3, last=3),
        ),
    ),
}  # fmt: skip


def train(num_ranks: int, *flags: object, program: str = "") -> subprocess.CompletedProcess[str]:
    words = ["-m", "training.pretrain_gpt"] if not program else [program]
    return ranks.run(*words, *FLAGS, *flags, num_ranks=num_ranks, check=True)


def losses(output: str) -> list[str]:
    return re.findall(r"lm loss: (\S+) .* grad norm: (\S+)", output)


@pytest.fixture
def trained(
    once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, str, str]]:
    """Folder and output of a training in a layout, each run once."""

    def run(name: str) -> tuple[Path, str, str]:
        folder = tmp_path_factory.mktemp(name)
        write_request(folder, REQUESTS.get(name, REQUEST))
        num_ranks, flags = LAYOUTS[name]
        done = train(num_ranks, "--trace-dir", folder, *flags)
        return folder, done.stdout, done.stderr

    return lambda name: once(name, lambda: run(name))


def opened(folder: Path) -> Recordings:
    found = Recordings(folder)
    assert found.refresh() and not found.problems
    assert not found.refresh()
    return found


@pytest.mark.distributed
def test_recording_changes_no_digit_and_off_leaves_nothing(trained: Any) -> None:
    folder, off, _ = trained("off")
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]
    _, on, _ = trained("plain")
    assert losses(on) == losses(off) and len(losses(on)) == 4


@pytest.mark.distributed
def test_a_request_holds_from_its_first_iteration(trained: Any) -> None:
    """Before it nothing is due; files of every rank hold the same iterations."""
    for name in ("plain", "sequence", "interleaved"):
        found = opened(trained(name)[0])
        assert found.iterations == [2, 3, 4]
        assert found.model["num_layers"] == 4


@pytest.mark.distributed
@pytest.mark.parametrize("place", ["embedding", "residual", "neurons", "fc1", "qkv", "loss"])
@pytest.mark.parametrize("reduction", REQUEST.reductions)
def test_shares_of_a_sequence_parallel_run_are_those_of_one_rank(
    place: str, reduction: str, trained: Any
) -> None:
    """Two ranks with recomputation and sequence parallelism, and one without: the same numbers."""
    alone, both = opened(trained("plain")[0]), opened(trained("sequence")[0])
    layers, expected = alone.table(2, place, reduction)
    found_layers, found = both.table(2, place, reduction)
    assert layers == found_layers == ([0] if place in ("embedding", "loss") else [1, 2, 3, 4])
    assert found.shape[1] == 4  # microbatches
    if reduction == "top":  # which is the eighth of nearly equals may differ
        found, expected = found[..., :4], expected[..., :4]
    if reduction == "histogram":
        assert np.abs(found - expected).max() < 0.02
    elif reduction == "pixels" and place == "fc1":
        assert np.mean(found) == pytest.approx(np.mean(expected), rel=1e-3)
    else:
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.distributed
def test_attention_entropy_has_every_head(trained: Any) -> None:
    layers, alone = opened(trained("plain")[0]).table(3, "attention", "entropy")
    _, both = opened(trained("sequence")[0]).table(3, "attention", "entropy")
    assert layers == [1, 2, 3, 4] and alone.shape[-1] == both.shape[-1] == 4
    np.testing.assert_allclose(both, alone, rtol=1e-3)
    assert alone.min() > 0 and alone.max() < np.log(16)


@pytest.mark.distributed
def test_gradients_are_recorded_once_a_microbatch_with_recomputation_too(trained: Any) -> None:
    alone, both = opened(trained("plain")[0]), opened(trained("sequence")[0])
    _, expected = alone.table(2, "residual", "rms", gradient=True)
    _, found = both.table(2, "residual", "rms", gradient=True)
    assert expected.shape[:2] == found.shape[:2] == (4, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.distributed
def test_an_interleaved_schedule_with_recomputation_shows_each_microbatch_once(
    trained: Any,
) -> None:
    found = opened(trained("interleaved")[0])
    for place in ("residual", "neurons", "attention"):
        reduction = "entropy" if place == "attention" else "rms"
        layers, table = found.table(4, place, reduction)
        assert layers == [1, 2, 3, 4] and table.shape[:2] == (4, 4)
        assert np.isfinite(table).all()
    layers, table = found.table(4, "loss", "rms")
    mean = float(losses(trained("interleaved")[1])[3][0])
    assert table.mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.distributed
def test_series_run_over_iterations(trained: Any) -> None:
    iterations, layers, values = opened(trained("plain")[0]).series("residual", "rms")
    assert iterations == [2, 3, 4] and layers == [1, 2, 3, 4] and np.isfinite(values).all()


@pytest.mark.distributed
def test_every_expert_has_its_load_and_size(trained: Any) -> None:
    """Of two expert-parallel ranks both hold two of four experts; each token goes to two."""
    found = opened(trained("experts")[0])
    layers, load = found.table(3, "expert_load", "mean")
    assert layers == [1, 2, 3, 4] and load.shape == (4, 2, 1, 1, 4)
    assert (load.sum(-1) == 2 * 2 * 16).all()  # two ranks' microbatches of 16 tokens, twice each
    for gradient in (False, True):
        layers, sizes = found.table(3, "experts", "rms", gradient=gradient)
        assert layers == [1, 2, 3, 4] and sizes.shape == load.shape
        assert ((sizes > 0) == (load > 0)).all()
    probes = read_probes(trained("experts")[0])
    assert probes is not None and probes.iterations == (2, 4) and deviations(probes) == []
    assert {"experts", "router"} <= {point.name for point in probes.probers[1].points}


@pytest.mark.distributed
def test_a_change_that_is_asked_for_holds_in_its_iterations(trained: Any) -> None:
    before, after = losses(trained("off")[1]), losses(trained("changed")[1])
    assert before[:2] == after[:2] and before[2] != after[2]
    _, table = opened(trained("changed")[0]).table(3, "residual", "rms")
    _, plain = opened(trained("plain")[0]).table(3, "residual", "rms")
    np.testing.assert_allclose(table[1], plain[1] / 2, rtol=1e-5)
    assert opened(trained("changed")[0]).may_change and not opened(trained("plain")[0]).may_change


class Slow:
    """A recorder over one module, whose looking takes as long as told, on a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from megascope import recorder
        from megascope.capture import BY_NAME, Share, Sight, Spot
        from megascope.interventions import TensorShares

        self.now = 0.0
        monkeypatch.setattr(recorder.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(recorder.Recorder, "_spots_of", lambda *_: [])
        file = DataFile(folder, 0, max_bytes=1 << 20)
        file.open(run_header(), continued=b"")
        self.recorder = recorder.Recorder(
            [], file, RequestFile(folder), shares=TensorShares(rank=0, size=1),
            limits=recorder.Limits(budget_ratio=0.05),
        )  # fmt: skip
        spot = Spot(place=BY_NAME["residual"], layer=1, chunk=0, module=torch.nn.Identity(),
                    share=Share.WHOLE)  # fmt: skip
        self._sight = Sight(spot, 0, torch.ones(2, 1, 4), Share.WHOLE)
        look = recorder.Recorder._look_at

        def looking(one: Any, sight: Sight) -> None:
            self.now += self.cost_s
            look(one, sight)

        monkeypatch.setattr(recorder.Recorder, "_look_at", looking)

    def iteration(self, number: int, cost_s: float, num_sights: int = 20) -> float:
        """Train for a second, be looked at in between; how long the looking has taken."""
        self.cost_s, begun = cost_s, self.now
        self.recorder.begin(number)
        for _ in range(num_sights):
            self.now += 1 / num_sights
            if self.recorder._is_due:
                self.recorder._take(self._sight)
        self.recorder.end()
        return self.now - begun - 1


def test_looking_keeps_its_budget_whatever_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks of 0.2 s, twenty a second: the first iteration is cut, later ones are rare."""
    slow = Slow(tmp_path, monkeypatch)
    spent = [slow.iteration(number, 0.2) for number in range(1, 257)]
    assert spent[0] < 1.75  # of 4: a second, half of what was computed, and a look
    assert sum(spent) < 0.05 * len(spent) + spent[0]
    frames = opened(tmp_path)
    assert len(frames.iterations) < 12 and frames.iterations[1] % 16 == 0


def test_cheap_looks_go_on_in_every_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(tmp_path, monkeypatch)
    assert sum(slow.iteration(number, 0.001) for number in range(1, 33)) < 0.05 * 32
    assert opened(tmp_path).iterations == list(range(1, 33))


BROKEN = """
import os, sys
from contextlib import contextmanager
import torch
from training import scope
from training.distributed import read_launch
from training.job import parse_job

class Breaking(scope.ScopeCallback):
    def __init__(self, settings, sizes, chunks, **options):
        from megatron.core.utils import unwrap_model
        super().__init__(settings, sizes, chunks, **options)
        layers = {one.layer_number: one for model in unwrap_model(list(chunks))
                  for one in model.decoder.layers}
        self.calls, self.now = 0, 0
        if 3 in layers:
            layers[3].mlp.linear_fc1.register_forward_hook(self.spoil, prepend=True)

    @contextmanager
    def iteration(self, iteration):
        self.calls, self.now = 0, iteration
        with super().iteration(iteration):
            yield

    def spoil(self, module, inputs, output):
        self.calls += 1
        if self.now == 3 and self.calls == 3:
            output[0].view(-1)[5] = float("nan")

scope.ScopeCallback = Breaking
parse_job(sys.argv[1:], read_launch(os.environ)).run()
"""


@pytest.mark.distributed
def test_the_first_nan_is_named_with_layer_module_rank_and_microbatch(tmp_path: Path) -> None:
    program = tmp_path / "breaking.py"
    program.write_text(BROKEN)
    flags = ["--trace-dir", tmp_path, "--scope", "--pipeline-model-parallel-size", "2"]
    write_request(tmp_path, Request(places=("residual", "fc1", "neurons", "loss")))
    done = train(2, *flags, program=str(program))
    broken = opened(tmp_path).first_broken()
    assert broken == {
        "layer": 3, "place": "fc1", "microbatch": 2, "gradient": False, "iteration": 3,
        "rank": 1, "label": "PP1",
    }  # fmt: skip
    assert "microbatch 2: the first number that is not finite is in layer 3 fc1" in done.stderr


@pytest.mark.distributed
def test_norms_of_parameters_gradients_and_updates(tmp_path: Path) -> None:
    train(1, "--trace-dir", tmp_path, "--scope", "--train-iters", "9", "--scope-budget", "100")
    iteration, names, table = opened(tmp_path).weights()
    assert iteration == 8 and "layer.4.mlp.linear_fc2.weight" in names
    weight, gradient, update = table[names.index("layer.1.self_attention.linear_qkv.weight")]
    assert 0.01 < weight < 0.1 and gradient > 0 and 0 < update / weight < 1
    assert opened(tmp_path).iterations == list(range(1, 10))


# Without a training.


def test_frames_are_read_back() -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, -2]),
              "c": np.array([0.5], dtype=np.float16)}  # fmt: skip
    content = encode({"kind": "x", "text": "ü"}, arrays)
    frame = decode(content)
    assert frame.header["text"] == "ü"
    for name, array in arrays.items():
        assert np.array_equal(frame.arrays[name], array)
    assert [*whole_frames(content * 2 + content[:9])] == [
        (0, len(content)), (len(content), 2 * len(content)),
    ]  # fmt: skip


def test_damaged_frames_are_errors_of_ours() -> None:
    content = encode({"kind": "x"}, {"a": np.arange(40.0)})
    random = np.random.default_rng(5)
    for _ in range(3000):
        damaged = bytearray(content)
        for place in random.integers(0, len(damaged), size=3):
            damaged[place] = random.integers(0, 256)
        damaged = damaged[: random.integers(0, len(damaged) + 1)]
        try:
            decode(bytes(damaged))
            list(whole_frames(bytes(damaged)))
        except InputError:
            pass


def run_header(rank: int = 0, *, is_continued: bool = False, first: int = 1) -> bytes:
    return encode(
        {"kind": "run", "schema": 1, "rank": rank, "layout": Layout(dp=2).to_json(),
         "model": {"num_layers": 1}, "first_iteration": first, "is_continued": is_continued}
    )  # fmt: skip


def data_frame(iteration: int, value: float = 1.0) -> bytes:
    item = {"place": "residual", "reduction": "max", "gradient": False, "share": "whole",
            "width": 4, "layers": [1], "microbatches": [0]}  # fmt: skip
    array = np.full((1, 1, 1, 1, 1), value, dtype=np.float32)
    return encode(
        {"kind": "data", "iteration": iteration, "per_token": False, "items": [item]}, {"0": array}
    )


def test_a_file_grows_to_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    file = DataFile(tmp_path, 0, max_bytes=20_000)
    file.open(run_header(), continued=run_header(is_continued=True))
    for iteration in range(1, 201):
        file.append(data_frame(iteration))
    sizes = [path.stat().st_size for path in tmp_path.glob("scope-data-*")]
    assert len(sizes) == 2 and sum(sizes) <= 20_000
    iterations = opened(tmp_path).iterations
    assert iterations == list(range(iterations[0], 201)) and len(iterations) > 30


def test_a_viewer_follows_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / data_file_name(0)
    frame = data_frame(1)
    path.write_bytes(run_header() + frame[:20])
    found = Recordings(tmp_path)
    assert found.refresh() and found.iterations == []
    path.write_bytes(run_header() + frame)
    assert found.refresh() and found.iterations == [1]
    with path.open("ab") as file:
        file.write(data_frame(2, 5.0))
    assert found.refresh()
    assert found.table(2, "residual", "max")[1].item() == 5.0


def test_a_resumed_run_counts_from_where_it_resumed(tmp_path: Path) -> None:
    file = DataFile(tmp_path, 0, max_bytes=1 << 20)
    file.open(run_header(), continued=b"")
    for iteration in (1, 2, 3):
        file.append(data_frame(iteration))
    path = tmp_path / data_file_name(0)
    path.write_bytes(path.read_bytes()[:-3])  # killed while it wrote
    again = DataFile(tmp_path, 0, max_bytes=1 << 20)
    again.open(run_header(first=2), continued=b"")
    again.append(data_frame(2, 7.0))
    found = opened(tmp_path)
    assert found.iterations == [1, 2] and found.table(2, "residual", "max")[1].item() == 7.0


def test_a_foreign_file_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    (tmp_path / data_file_name(1)).write_bytes(b"no frames at all, surely")
    (tmp_path / data_file_name(0)).write_bytes(run_header() + data_frame(1))
    found = Recordings(tmp_path)
    found.refresh()
    assert found.iterations == [1] and "scope-data-00001.bin" in found.problems[0]
    with pytest.raises(ConfigError, match="was not captured"):
        found.table(1, "fc1", "rms")


def test_a_rank_that_has_not_written_yet_is_waited_for(tmp_path: Path) -> None:
    """Half of the features would be joined to wrong numbers."""
    item = {"place": "fc1", "reduction": "rms", "gradient": False, "share": "features",
            "width": 4, "layers": [1], "microbatches": [0]}  # fmt: skip
    for rank in (0, 1):
        header = {"kind": "run", "schema": 1, "rank": rank, "layout": Layout(tp=2).to_json(),
                  "model": {}, "first_iteration": 1, "is_continued": False}  # fmt: skip
        content = encode(header)
        for iteration in (1, 2)[: 2 - rank]:
            data = {"kind": "data", "iteration": iteration, "per_token": False, "items": [item]}
            content += encode(data, {"0": np.full((1, 1, 1, 1, 1), 16.0 * (rank + 1))})
        (tmp_path / data_file_name(rank)).write_bytes(content)
    found = opened(tmp_path)
    assert found.table(1, "fc1", "rms")[1].item() == pytest.approx(np.sqrt(48 / 8))
    with pytest.raises(ConfigError, match="was not captured"):
        found.table(2, "fc1", "rms")
    assert found.series("fc1", "rms")[0] == [1]


def test_requests_are_written_read_and_seen_once(tmp_path: Path) -> None:
    watched = RequestFile(tmp_path)
    assert watched.changed() is None
    request = Request(identifier="a", places=("fc1",), layers=(2,), every=3, per_token=True)
    write_request(tmp_path, request)
    assert watched.changed() == request and watched.changed() is None
    write_request(tmp_path, Request())
    assert watched.changed() == Request()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"places": ["__import__('os')"]}, "places has"),
        ({"reductions": "rms"}, "reductions must be a list"),
        ({"every": 0}, "every is '0'"),
        ({"every": True}, "every is 'True'"),
        ({"first": 1e9}, "first is"),
        ({"layers": [0]}, "layers is '0'"),
        ({"layers": list(range(1, 5000))}, "layers must be"),
        ({"identifier": "a" * 65}, "identifier must be"),
        ({"per_token": 1}, "per_token is '1'"),
        ({"schema": 2}, "schema 2"),
        ({"method": "data.mean()"}, "'method' is no part"),
        ({"interventions": [{"place": "residual", "kind": "lambda"}]}, "kind is 'lambda'"),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_request(json.dumps({"schema": 1, **change}))


def test_any_bytes_are_a_request_or_a_sentence() -> None:
    random = np.random.default_rng(6)
    text = Request().to_json().encode()
    for _ in range(5000):
        damaged = bytearray(text)
        for place in random.integers(0, len(damaged), size=2):
            damaged[place] = random.integers(0, 256)
        with suppress(ConfigError):
            read_request(bytes(damaged))
    for text_ in ("[" * 100_000, "null", '{"schema":1,"every":' + "9" * 5000 + "}"):
        with pytest.raises(ConfigError):
            read_request(text_)


def test_a_large_request_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(" " * 70_000)
    with pytest.raises(ConfigError, match="larger than"):
        RequestFile(tmp_path).changed()
