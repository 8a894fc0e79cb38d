"""A stage that nobody shares is judged by its layers, where all layers were said to be alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.compute_owner import EQUAL_LAYERS
from detect.detector import judge
from detect.observe.extract import observe
from megascan.topology import Layout


def owners(report):
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


@pytest.mark.parametrize(
    ("kinds", "owner"),
    [
        (lambda rank: {"5f1c09ab": (rank,)}, Owner.NODE),
        (None, Owner.UNDECIDED),  # an older trace
        (lambda rank: {"5f1c09ab": (rank,)} if rank else {}, Owner.UNDECIDED),
        (lambda rank: {"c07d51e2" if rank == 2 else "5f1c09ab": (rank,)}, Owner.UNDECIDED),
        (lambda rank: {"5f1c09ab": (rank,), "": (9,)}, Owner.UNDECIDED),  # layers of experts
    ],
    ids=["alike", "unsaid", "partly said", "hybrid", "experts"],
)
def test_a_slow_rank_alone_on_its_stage(job, slow, kinds, owner):
    run = job(layout=Layout(pp=4), layers=2, kinds=kinds, work=slow(2, 1.3))
    assert observe(run.timeline()).has_equal_layers == (owner is Owner.NODE)
    report = run.report()
    is_known_as_unlike = kinds is not None and kinds(2).keys() != kinds(1).keys()
    cause = Cause.STAGE_IMBALANCE if is_known_as_unlike else Cause.COMPUTE
    assert owners(report) == [((2,), cause, owner)]
    assert (EQUAL_LAYERS in report.findings[0].evidence) == (owner is Owner.NODE)


@pytest.mark.parametrize(("backward", "owner"), [(1.25, Owner.NODE), (1.75, Owner.UNDECIDED)])
def test_equal_layers_that_are_not_slow_alike_are_no_slow_device(job, backward, owner):
    """Forward layers take 1.3 times as long as elsewhere. A schedule that computes gradients of
    weights later on one stage than on the other makes backward layers longer by far.
    """

    def longer(slot):
        factor = {"forward": 1.3, "backward": backward}.get(slot.phase, 1.0)
        return factor if slot.rank == 2 else 1.0

    run = job(layout=Layout(pp=4), layers=2, kinds=lambda rank: {"5f": (rank,)}, work=longer)
    found = {one.ranks: one.owner for one in run.report().findings if one.cause is Cause.COMPUTE}
    assert found == {(2,): owner}


def test_layers_of_unlike_kinds_are_not_compared_across_stages(job):
    """The first stage's layers are dense and take three times as long, as those with experts; its
    devices wait for their launches.
    """
    layout = Layout(pp=4, dp=4, ep=2)

    def longer(slot):
        return 3.0 if slot.stage == 0 and slot.name != "optimizer" else 1.0

    run = job(
        layout=layout, layers=2, hosts=4, work=longer,
        kinds=lambda rank: {"5f1c09ab" if rank < 4 else "": (rank // 4,)},
    )  # fmt: skip
    seen = observe(run.timeline())
    assert seen.layers is None
    starved = np.full(seen.busy_ns.shape, 0.3)
    starved[:4] = 0.8
    report = judge(replace(seen, starved_share=starved), DetectorSettings())
    assert Owner.NODE not in {one.owner for one in report.findings}


def test_of_two_stages_the_slower_one(job, slow):
    run = job(layout=Layout(pp=2), layers=2, kinds=lambda rank: {"5f1c09ab": (rank,)})
    assert owners(run.but(work=slow(1, 1.2)).report()) == [((1,), Cause.COMPUTE, Owner.NODE)]
    assert Owner.NODE not in {one for _, _, one in owners(run.but(work=slow(1, 1.045)).report())}


def test_a_heavy_last_stage_of_equal_layers_is_the_jobs(job):
    """Its head takes 4 ms of each pass; its layers are as quick as others'."""

    def with_head(slot):
        return 1.4 if slot.rank == 3 and slot.name in ("forward", "backward") else 1.0

    run = job(layout=Layout(pp=4), layers=2, kinds=lambda rank: {"5f1c09ab": (rank,)})
    report = run.but(work=with_head).report()
    assert report.verdict is Verdict.JOB
    assert [one.cause for one in report.findings] == [Cause.STAGE_IMBALANCE]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_host_that_is_a_stage_and_slow_as_a_whole(job, is_known):
    """Two hosts of four replicas, a stage each."""
    run = job(
        layout=Layout(dp=4, pp=3), hosts=4, layers=2,
        work=lambda slot: 1.3 if 4 <= slot.rank < 8 and slot.name != "optimizer" else 1.0,
        kinds=(lambda rank: {"5f1c09ab": (rank,)}) if is_known else None,
    )  # fmt: skip
    named = [one.ranks for one in run.report().findings if one.owner is Owner.NODE]
    assert named == ([(4, 5, 6, 7)] if is_known else [])


@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(dp=4, pp=2), Layout(dp=4, pp=3)])
def test_a_stage_that_is_slow_forward_only_may_be_launched_late(job, layout):
    """Kernels of the forward are shorter than those of the backward, their launches are not."""

    def late(slot):
        return 1.8 if layout.coordinates(slot.rank).pp == 1 and slot.phase == "forward" else 1.0

    run = job(layout=layout, hosts=layout.dp, layers=2, work=late,
              kinds=lambda rank: {"5f1c09ab": (rank,)})  # fmt: skip
    assert Owner.NODE not in {one.owner for one in run.report().findings}


@pytest.mark.parametrize(
    ("mlp", "attention", "owner"),
    [
        (1.41, 1.28, Owner.NODE),
        (1.31, 1.30, Owner.UNDECIDED),
        (1.41, 1.0, Owner.UNDECIDED),
        (1.28, 1.36, Owner.UNDECIDED),
    ],
    ids=["a low clock", "heavier layers", "wider MLPs", "longer attention"],
)
def test_attention_tells_a_low_clock_from_heavier_layers(job, slow, mlp, attention, owner):
    """Nobody said that layers are alike; modules of the other stages take as long as each other."""
    seen = observe(job(layout=Layout(pp=4), layers=2, work=slow(2, 1.3)).timeline())
    modules_ns = np.full((*seen.busy_ns.shape, 3), 1e7)
    modules_ns *= np.array([1.0, 1.002, 1.0, 0.999])[:, None, None]
    modules_ns[2] *= np.array([mlp, attention, 1.0])
    report = judge(replace(seen, modules_ns=modules_ns), DetectorSettings())
    assert owners(report) == [((2,), Cause.COMPUTE, owner)]


@pytest.mark.parametrize(("other", "owner"), [(1.0, Owner.NODE), (1.05, Owner.UNDECIDED)])
def test_equal_layers_that_differ_little_tell_a_small_difference(job, slow, together, other, owner):
    run = job(layout=Layout(pp=8), layers=2, kinds=lambda rank: {"5f1c09ab": (rank,)})
    report = run.but(work=together(slow(2, 1.08), slow(5, other))).report()
    assert {one.owner for one in report.findings if one.ranks == (2,)} == {owner}
