"""Devices on which other processes compute, by what NVML counts: what was open is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Owner, Report
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.machines import OTHERS_NAME, typical_readings
from detect.observe.observations import Observations
from megascan.simulate import Fault, FaultKind, JobModel, compute_bound, simulate_trace
from megascan.topology import Layout


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""


def observed(layout: Layout, rank: int | None, factor: float = 1.3) -> Observations:
    job = JobModel(layout=layout, costs=compute_bound(layout))
    faults = [] if rank is None else [Fault(rank=rank, kind=FaultKind.COMPUTE, factor=factor)]
    return observe(build_timeline(simulate_trace(job, faults, seed=1)))


@pytest.fixture(scope="module")
def slow_stage() -> Observations:
    """Two stages of one rank each; the second is 1.3 times slower, and nobody can tell why."""
    return observed(Layout(pp=2), 1)


def shared(seen: Observations, *percents: float | None) -> Observations:
    """Give each rank's device a share of other processes, per cent; None: not read."""
    readings: dict[int, Mapping[str, float]] = {
        rank: {OTHERS_NAME: each} for rank, each in enumerate(percents) if each is not None
    }
    return replace(seen, counters=readings)


def judged(seen: Observations, *percents: float | None) -> Report:
    return judge(shared(seen, *percents), DetectorSettings())


def owners(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


OPEN = [((1,), Cause.STAGE_IMBALANCE, Owner.UNDECIDED)]
NAMED = [((1,), Cause.COMPUTE, Owner.NODE)]


def test_a_stage_whose_device_is_shared_is_slow_and_not_heavy(slow_stage):
    assert owners(judged(slow_stage)) == OPEN
    report = judged(slow_stage, 0.0, 32.0)
    assert owners(report) == NAMED
    (finding,) = report.findings
    assert (
        "rank 1 (PP1, host n00, GPU 1) shares its device with another process, whose kernels ran "
        "for 32 % of the time" in finding.headline
    )
    assert any("on the other ranks' 0.0 % at most" in one for one in finding.evidence)
    assert any("left open: last stage PP1" in one for one in finding.evidence)
    assert any("nvidia-smi pmon" in one for one in finding.next_steps)
    (before,) = judged(slow_stage).findings
    assert finding.step_time_cost_ratio == before.step_time_cost_ratio


@pytest.mark.parametrize(
    ("percents", "why"),
    [
        ((0.0, 4.0), "too little to be worth a word"),
        ((0.0, 5.1), "less than half of what the finding costs"),
        ((30.0, 32.0), "all are shared, as by jobs side by side"),
        ((12.0, 32.0), "the other one's is shared by a third as much"),
        ((32.0, 0.0), "the other one's is shared"),
        ((None, 32.0), "of the other one nothing was read"),
    ],
)
def test_it_stays_open_where_sharing_does_not_tell(slow_stage, percents, why):
    assert owners(judged(slow_stage, *percents)) == OPEN, why


@pytest.mark.parametrize("waits_unseen", [False, True])
def test_of_a_slow_stage_one_device_is_shared(waits_unseen):
    """Its other rank is as slow: it waits inside its passes, or must be slow itself."""
    layout = Layout(pp=2, tp=2)
    job = JobModel(layout=layout, costs=compute_bound(layout))
    faults = [Fault(rank=rank, kind=FaultKind.COMPUTE, factor=1.3) for rank in (2, 3)]
    seen = observe(build_timeline(simulate_trace(job, faults, seed=1)))
    hidden = replace(seen, splits_tensor_groups=not waits_unseen)
    (before,) = judged(hidden).findings
    assert before.ranks == (2, 3)
    assert before.owner is (Owner.UNDECIDED if waits_unseen else Owner.JOB)
    expected = [((3,), Cause.COMPUTE, Owner.NODE)] if waits_unseen else owners(judged(hidden))
    assert owners(judged(hidden, 0.0, 0.0, 0.0, 40.0)) == expected


def test_a_shared_device_that_costs_nothing_is_a_note():
    seen = observed(Layout(dp=4), None)
    report = judged(seen, 0.0, 0.0, 40.0, 0.0)
    assert not report.findings
    assert (
        "rank 2: kernels of other processes ran on its device for 40 % of the time; no cost of it "
        "is seen" in report.notes
    )
    assert not any("other processes" in note for note in judged(seen, 0.0, 0.0, 3.0, 0.0).notes)


def test_who_is_named_already_is_not_named_again():
    seen = observed(Layout(dp=4), 2)
    report = judged(seen, 0.0, 0.0, 30.0, 0.0)
    assert owners(report) == [((2,), Cause.COMPUTE, Owner.NODE)]
    assert not any("other processes" in note for note in report.notes)
    assert report.findings[0].headline == judged(seen).findings[0].headline


def test_a_share_that_comes_and_goes_is_its_mean(make_windows):
    readings = typical_readings(make_windows({0: [0.0, 33.0, 0.0], 1: [0.0, 0.0, 0.0]}))
    assert readings[0][OTHERS_NAME] == pytest.approx(11.0)
    assert readings[1][OTHERS_NAME] == 0.0


@pytest.fixture
def make_windows():
    """Make a trace whose windows have these shares, by rank."""

    def make(percents: dict[int, list[float]]):
        layout = Layout(dp=2)
        timeline = build_timeline(
            simulate_trace(JobModel(layout=layout, costs=compute_bound(layout)), seed=1)
        )
        for rank, each in percents.items():
            (window,) = timeline.windows[rank][:1]
            timeline.windows[rank] = [
                replace(window, counters={OTHERS_NAME: share}) for share in each
            ]
        return timeline

    return make
