"""Every parallel axis, precision and recomputation on gloo: traced as untraced, spans as they run.

The jobs of a family are trained in one process group, each untraced and traced; `benchmarks.losses`
does the same on GPUs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.axes import families
from benchmarks.jobs import run_ranks
from benchmarks.losses import train
from tests import ranks

if TYPE_CHECKING:
    from benchmarks.losses import Curves

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

NUM_ITERATIONS, NUM_LAYERS = 2, 4
FAMILIES = {family.name: family for family in families("cpu")}
GLOBAL_BATCH = {name: 2 if name == "TP2" else 4 for name in FAMILIES}
"""Microbatches of a step: two on each replica, and four where stages take them in turns."""
AXES = [(family.name, axis) for family in FAMILIES.values() for axis in family.axes]

# Names that must be in the trace of an axis besides those of every job, and their group.
WANTED = {
    "TP2": {("all_reduce", "tp")},
    "TP2, sequence parallel": {("all_gather", "tp"), ("reduce_scatter", "tp")},
    "TP2, full recomputation, uniform": {("transformer_layer-recompute", None)},
    "TP2, selective recomputation": {("core_attention-recompute", None)},
    "TP2, selective recomputation of MLPs": {("mlp-recompute", None)},
    "PP2": {("send_forward", "pp"), ("recv_forward", "pp")},
    "PP2, full recomputation, block": {("transformer_layer-recompute", None)},
    "PP2 VPP2": {("send_forward", "pp"), ("recv_backward", "pp")},
    "DP2": {("all_reduce", "dp_cp")},
    "DP2, distributed optimizer": {("reduce_scatter", "dp_cp"), ("all_gather", "dp_cp")},
    "EP2, all-to-all": {("all_to_all", "ep"), ("moe", None)},
    "EP2, all-gather": {("moe", None), ("moe-backward", None)},
    "TP2 EP2, allgather, bf16": {("moe", None), ("all_gather", "tp")},
}


def with_few_samples(num_ranks: int, words: Sequence[str]) -> str:
    module, plan = words
    assert module == "benchmarks.losses_ranks"
    return run_ranks(num_ranks, ["tests.training.few_samples", plan])


class Trained:
    """One family, trained untraced and traced."""

    def __init__(self, name: str, folder: Path) -> None:
        family = FAMILIES[name]
        with ranks.forked(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHDYNAMO_DISABLE", "1")  # as in ranks.environment
            patch.setattr("benchmarks.losses.run_ranks", with_few_samples)
            curves = train(
                family,
                "cpu",
                NUM_ITERATIONS,
                folder,
                num_untraced=1,
                global_batch=GLOBAL_BATCH[name],
            )
        self.curves: dict[str, Curves] = {each.name: each for each in curves}
        self._folders = {axis: folder / str(n) for n, axis in enumerate(FAMILIES[name].axes)}

    def spans(self, axis: str) -> list[list[dict]]:
        """Spans of the second iteration, rank by rank."""
        files = sorted(self._folders[axis].glob("benchmark-data-*.json"))
        return [
            [
                event
                for event in json.loads(path.read_text())
                if event["ph"] == "X" and event["args"]["iteration"] == 2
            ]
            for path in files
        ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    done: dict[str, Trained] = {}

    def family(name: str) -> Trained:
        if name not in done:
            done[name] = Trained(name, tmp_path_factory.mktemp("family"))
        return done[name]

    return family


@pytest.mark.parametrize(("family", "axis"), AXES)
def test_tracing_changes_no_digit(trained, family, axis):
    curves = trained(family).curves[axis]
    assert curves.unchanged
    assert len(curves.traced) == NUM_ITERATIONS
    assert all(norm is not None for _, _, norm, skipped in curves.traced if skipped == "0")


@pytest.mark.parametrize(("family", "axis"), AXES)
def test_every_rank_shows_its_work(trained, family, axis):
    ranks = trained(family).spans(axis)
    assert len(ranks) == FAMILIES[family].num_ranks
    for spans in ranks:
        names = Counter(span["name"] for span in spans)
        assert names["iteration"] == names["optimizer"] == 1
        assert names["forward"] == names["backward"] > 0
        assert names["transformer_layer"] == names["transformer_layer-backward"]


@pytest.mark.parametrize(
    ("family", "axis"), [(family, axis) for family, axis in AXES if axis in WANTED]
)
def test_what_an_axis_adds_is_in_its_trace(trained, family, axis):
    for spans in trained(family).spans(axis):
        groups = {(span["name"], span["args"].get("group", "@").split("@")[0]) for span in spans}
        names = {name for name, _ in groups}
        if family.startswith("PP2"):  # the first stage sends what the last one receives
            assert names & {name for name, group in WANTED[axis] if group == "pp"} or not any(
                group == "pp" for _, group in WANTED[axis]
            )
            continue
        for name, group in WANTED[axis]:
            assert name in names
            assert group is None or (name, group) in groups


@pytest.mark.parametrize(
    ("axis", "num_recomputed"),
    [
        ("TP2, full recomputation, uniform", {"transformer_layer": 4, "attention": 4, "mlp": 4}),
        ("TP2, selective recomputation", {"core_attention": 4}),
        ("TP2, selective recomputation of MLPs", {"mlp": 4}),
        ("TP2", {}),
    ],
)
def test_a_recomputed_forward_is_marked_and_apart_from_the_first(trained, axis, num_recomputed):
    for spans in trained("TP2").spans(axis):
        repeated = Counter(
            span["name"].removesuffix("-recompute")
            for span in spans
            if span["args"].get("phase") == "recompute" and span["cat"] == "compute"
        )
        assert repeated == {name: n * GLOBAL_BATCH["TP2"] for name, n in num_recomputed.items()}
        for span in spans:
            marked = span["args"].get("phase") == "recompute"
            assert span["cat"] != "compute" or span["name"].endswith("-recompute") == marked
        first = [span for span in spans if span["name"] == "transformer_layer"]
        assert len(first) == NUM_LAYERS * GLOBAL_BATCH["TP2"]


def test_the_loss_scale_is_the_one_asked_for(trained):
    constant = trained("TP2").curves["TP2, fp16, constant loss scale"].traced
    assert {scale for _, scale, _, _ in constant} == {"1024.0"}
    dynamic = trained("DP2").curves[
        "DP2, distributed optimizer, overlapped, fp16, dynamic loss scale"
    ]
    assert dynamic.traced[0][1] == "65536.0"


def test_dispatchers_of_experts_agree(trained):
    curves = trained("EP2").curves.values()
    first_losses = {float(curve.traced[0][0]) for curve in curves}
    assert max(first_losses) == pytest.approx(min(first_losses), rel=1e-3)
