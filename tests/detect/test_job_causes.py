"""What is the job's own doing is said so, and names no node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, Owner, Verdict
from detect.detector import judge, steady
from detect.observe.extract import observe
from detect.text import render_text
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.statistics import POWER
from megascan.topology import Layout


def heavy_last(last: int):
    """Extra work of an output layer: 7 ms forward, 6 ms backward, in a stage of 10 and 20 ms."""

    def effect(slot):
        if slot.stage != last or slot.name in ("optimizer", "transformer_layer"):
            return 1.0
        return 1.7 if slot.phase == "forward" else 1.3

    return effect


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=4), Layout(tp=2, pp=4), Layout(dp=4, pp=2)])
def test_heavy_last_stage(job, layout):
    report = job(layout=layout, work=heavy_last(layout.pp - 1)).report()
    assert report.verdict == Verdict.JOB
    finding = report.findings[0]
    assert (finding.cause, finding.owner) == (Cause.STAGE_IMBALANCE, Owner.JOB)
    last = [r for r in range(layout.world_size) if layout.coordinates(r).pp == layout.pp - 1]
    assert list(finding.ranks) == last
    assert finding.coordinates["pp"] == layout.pp - 1
    assert finding.slowdown == pytest.approx(1.43, abs=0.03)


def test_heavy_stage_does_not_hide_a_fault_on_it(job, slow, together):
    effects = together(heavy_last(1), slow(6, 1.1))
    report = job(layout=Layout(dp=4, pp=2), work=effects).report()
    assert report.verdict == Verdict.DEGRADED
    assert report.findings[0].ranks == (6,)
    assert {finding.cause for finding in report.findings} == {
        Cause.COMPUTE,
        Cause.STAGE_IMBALANCE,
    }


@pytest.mark.parametrize(("layers", "owner"), [(1.0, Owner.JOB), (1.2, Owner.UNDECIDED)])
def test_layers_that_are_slow_in_a_heavy_stage_may_be_a_hot_host(job, layers, owner):
    """However heavy the output layer is; the last stage has a host of its own."""

    def effect(slot):
        if slot.stage != 2 or slot.name == "optimizer":
            return 1.0
        return layers if slot.name == "transformer_layer" else 2.0

    report = job(layout=Layout(pp=3, dp=4), hosts=4, layers=4, work=effect).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((8, 9, 10, 11), owner)]


def test_heavy_stage_of_lone_ranks_is_additive_work(job):
    report = job(layout=Layout(pp=4), layers=2, work=heavy_last(3)).report()
    assert [(finding.cause, finding.owner) for finding in report.findings] == [
        (Cause.STAGE_IMBALANCE, Owner.JOB)
    ]


@pytest.mark.parametrize(
    ("stage", "backward", "owner"),
    [
        (1, 1.1, Owner.NODE),  # 5 ms forward, 2 ms backward: late launches
        (1, 1.5, Owner.UNDECIDED),  # 10 ms: more work, or a slow device
        (1, 1.0, Owner.UNDECIDED),  # none at all: work without a backward
        (2, 1.1, Owner.UNDECIDED),  # of an end, which has passes of its own
    ],
)
def test_a_stage_that_is_longer_forward_than_backward_has_a_late_host(job, stage, backward, owner):
    def late(slot):
        factor = {"forward": 1.5, "backward": backward}.get(slot.phase, 1.0)
        return factor if slot.stage == stage and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(pp=3, dp=4), hosts=4, work=late).report()
    (finding,) = report.findings
    assert finding.owner is owner and finding.ranks == tuple(range(4 * stage, 4 * stage + 4))
    assert (finding.cause is Cause.HOST) == (owner is Owner.NODE)


def on_first_host(factor, optimizer):
    """Slow all that ranks 0 to 3 compute, a stage of three and a rank of the next one."""

    def effect(slot):
        if slot.rank > 3:
            return 1.0
        return optimizer if slot.name == "optimizer" else factor

    return effect


PP2_OF_THREE = Layout(pp=2, dp=3)


def test_a_slow_rank_of_another_stage_does_not_acquit_the_host_of_a_heavy_stage(job):
    """Ranks 0 to 2 are a stage, rank 3 of their host is of the next, and as slow beside its peers:
    whatever forward and backward say, that stage need not have more work.
    """
    slow = job(layout=PP2_OF_THREE, hosts=4, work=on_first_host(2.0, 1.0)).report()
    assert slow.verdict is not Verdict.JOB
    (stage,) = (one for one in slow.findings if one.ranks == (0, 1, 2))
    assert stage.owner is Owner.UNDECIDED
    assert any("others that are slow as well" in one for one in stage.evidence)
    sound = job(layout=PP2_OF_THREE, hosts=4, work=lambda slot: 2.0 if slot.rank < 3 else 1.0)
    assert [(one.ranks, one.owner) for one in sound.report().findings] == [((0, 1, 2), Owner.JOB)]


@pytest.mark.parametrize(
    ("elsewhere", "optimizer", "is_named"),
    [(0.1, 3.0, True), (0.8, 3.0, False), (0.1, 1.0, False)],
    ids=["a late host", "all hosts are late", "its passes are of many small kernels"],
)  # fmt: skip
def test_a_heavy_stage_that_waits_for_its_launches_has_a_late_host(
    job, elsewhere, optimizer, is_named
):
    """More work keeps devices busy."""
    heavy = job(layout=PP2_OF_THREE, hosts=4, work=on_first_host(2.0, optimizer), iterations=8)
    settings = DetectorSettings()
    seen = steady(observe(heavy.timeline()), settings)
    starved = np.full(seen.iteration_ns.shape, elsewhere)[None].repeat(6, axis=0)
    starved[:4] = 0.9
    report = judge(replace(seen, starved_share=starved), settings)
    hosts = [one for one in report.findings if one.cause is Cause.HOST and one.owner is Owner.NODE]
    assert [one.ranks for one in hosts] == [(0, 1, 2, 3)] * is_named
    if is_named:
        assert any("90% of the operations" in one for one in hosts[0].evidence)


def skewed(seed: int, spread: float):
    lengths = np.exp(spread * np.random.default_rng(seed).standard_normal((8, 64, 64)))

    def effect(slot):
        if slot.name == "optimizer":
            return 1.0
        return float(lengths[slot.replica, slot.iteration, slot.microbatch])

    return effect


@pytest.mark.parametrize("spread", [0.2, 0.4, 0.8])
@pytest.mark.parametrize("layout", [Layout(dp=4, pp=2), Layout(dp=2, tp=2), Layout(dp=4)])
def test_uneven_sequences(job, layout, spread):
    report = job(layout=layout, work=skewed(3, spread)).report()
    (finding,) = report.findings
    assert (finding.cause, finding.owner) == (Cause.SEQUENCE_IMBALANCE, Owner.JOB)
    assert finding.ranks == ()
    is_blind = report.minimum_detectable_slowdown >= POWER.healthy_ratio
    assert is_blind == (layout == Layout(dp=4) and spread > 0.2)
    assert report.verdict == (Verdict.UNDECIDED if is_blind else Verdict.JOB)
    answer = render_text(report).splitlines()[0]
    assert ("no node is at fault" in answer) == (not is_blind)
    assert ("would not have been found" in answer) == is_blind


def test_one_sequence_length_for_a_whole_iteration_is_not_shown_to_be_data(job):
    """A core that others use now and then shows the same, microbatch by microbatch."""
    speeds = np.exp(0.2 * np.random.default_rng(4).standard_normal((4, 64)))

    def changing(slot):
        return float(speeds[slot.rank, slot.iteration])

    (finding,) = job(layout=Layout(dp=4), work=changing).report().findings
    assert (finding.cause, finding.owner) == (Cause.UNKNOWN, Owner.UNDECIDED)
    assert any("microbatches of an iteration are slow together" in one for one in finding.evidence)


@pytest.mark.parametrize("along", [True, False])
def test_an_optimizer_that_is_slow_in_the_same_iterations_speaks_for_the_devices(job, along):
    """One microbatch an iteration: its length, or the speed of what computes it."""
    speeds = np.exp(0.2 * np.random.default_rng(4).standard_normal((4, 64)))

    def changing(slot):
        return float(speeds[slot.rank, slot.iteration]) if along or slot.phase else 1.0

    (finding,) = job(layout=Layout(dp=4), microbatches=1, work=changing).report().findings
    expected = (Cause.UNKNOWN, Owner.UNDECIDED) if along else (Cause.SEQUENCE_IMBALANCE, Owner.JOB)
    assert (finding.cause, finding.owner) == expected
    assert any("optimizer step" in one for one in finding.evidence) == along


@pytest.mark.parametrize("seed", range(6))
def test_uneven_sequences_never_name_a_node(job, seed):
    for layout in (Layout(dp=2, pp=2), Layout(dp=2)):
        report = job(layout=layout, work=skewed(seed, 0.4)).report()
        assert not [one for one in report.findings if one.owner != Owner.JOB]


def test_other_stages_tell_the_data_from_the_device(job, slow, together):
    effects = together(skewed(1, 0.3), slow(5, 1.1))
    report = job(layout=Layout(dp=4, pp=2), work=effects).report()
    named = [finding for finding in report.findings if finding.owner == Owner.NODE]
    assert [finding.ranks for finding in named] == [(5,)]
    assert named[0].slowdown == pytest.approx(1.1, rel=0.02)
