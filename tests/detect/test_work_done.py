"""Slow devices and ranks that have more to do, told apart by how much devices have done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Finding, Owner, Report
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.machines import OTHERS_NAME, WorkDone
from detect.observe.observations import Observations
from megascan.simulate import Fault, FaultKind, JobModel, compute_bound, simulate_trace
from megascan.timeline import Timeline
from megascan.topology import Layout


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""


def simulated(layout: Layout, *ranks: int, factor: float = 1.3) -> Timeline:
    job = JobModel(layout=layout, costs=compute_bound(layout))
    faults = [Fault(rank=rank, kind=FaultKind.COMPUTE, factor=factor) for rank in ranks]
    return build_timeline(simulate_trace(job, faults, seed=1))


@pytest.fixture(scope="module")
def slow_stage() -> Observations:
    """Two stages of one rank each; the second takes 1.3 times as long."""
    return observe(simulated(Layout(pp=2), 1))


@pytest.fixture(scope="module")
def slow_replica() -> Observations:
    """Four replicas, of which one takes 1.3 times as long."""
    return observe(simulated(Layout(dp=4), 2))


def done(
    *ratios: float, memory: tuple[float, ...] = (), windows: int = 4, noise: float = 0.005
) -> dict[int, tuple[WorkDone, ...]]:
    """What devices did in each window: of the first one, in which all begins, something else."""
    draw = np.random.default_rng(1)
    counts = {}
    for rank, ratio in enumerate(ratios):
        moved = memory[rank] if memory else ratio
        each = [
            WorkDone(
                window=window,
                multiplied=ratio * 60_000 * draw.normal(1.0, noise),
                moved=moved * 30 * draw.normal(1.0, noise),
            )
            for window in range(1, windows)
        ]
        first = WorkDone(window=0, multiplied=1000.0 + 9000 * rank, moved=2.0 + rank)
        counts[rank] = (first, *each)
    return counts


def judged(seen: Observations, counts: dict[int, tuple[WorkDone, ...]]) -> Report:
    return judge(replace(seen, work_done=counts), DetectorSettings())


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def owners(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


OPEN = [((1,), Cause.STAGE_IMBALANCE, Owner.UNDECIDED)]


def test_a_stage_that_does_as_much_has_a_slow_device(slow_stage):
    assert owners(judged(slow_stage, {})) == OPEN
    (before,) = judged(slow_stage, {}).findings
    assert before.slowdown == pytest.approx(1.45, abs=0.01)  # the output layer is a tenth of it
    finding = only(judged(slow_stage, done(1.0, 1.11)))
    assert (finding.ranks, finding.cause, finding.owner) == ((1,), Cause.COMPUTE, Owner.NODE)
    assert finding.slowdown == pytest.approx(1.3, abs=0.02)
    assert finding.slowdown_interval[0] < finding.slowdown < finding.slowdown_interval[1]
    assert "computes 1.3" in finding.headline
    assert "slower than others for as much work" in finding.headline
    assert any("NVML's count of the cycles" in one for one in finding.evidence)
    assert any("left open: last stage PP1" in one for one in finding.evidence)


def test_a_stage_that_does_more_is_heavy(slow_stage):
    finding = only(judged(slow_stage, done(1.0, 1.44)))
    assert (finding.ranks, finding.cause) == ((1,), Cause.STAGE_IMBALANCE)
    assert finding.owner is Owner.JOB
    assert "has 1.43x the work of others" in finding.headline
    assert any("fewer layers" in one for one in finding.next_steps)


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (done(1.0, 1.23), "half of it: both may be"),
        (done(1.0, 1.01, memory=(1.0, 1.23)), "it moves more, as a loss does"),
        (done(1.0, 1.0, windows=2), "one window after the first"),
        ({0: done(1.0, 1.0)[0]}, "the other one does not count"),
        (done(1.0, 1.0, noise=0.4), "nobody knows"),
        (done(0.0, 0.0), "it multiplies nothing"),
    ],
)
def test_it_stays_open_where_work_does_not_tell(slow_stage, counts, why):
    assert owners(judged(slow_stage, counts)) == OPEN, why


def test_windows_that_only_some_counted_are_left_out(slow_stage):
    counts = done(1.0, 1.0, windows=6)
    counts[1] = tuple(one for one in counts[1] if one.window != 3)
    assert only(judged(slow_stage, counts)).owner is Owner.NODE
    counts[1] = counts[1][:2]
    assert owners(judged(slow_stage, counts)) == OPEN


def test_other_processes_do_not_count_as_its_work(slow_stage):
    shared = replace(slow_stage, counters={0: {OTHERS_NAME: 0.0}, 1: {OTHERS_NAME: 6.0}})
    named = only(judged(slow_stage, done(1.0, 1.0)))
    assert named.owner is Owner.NODE
    assert owners(judged(shared, done(1.0, 1.0))) == OPEN


def test_a_mate_that_may_wait_unseen_is_not_named():
    seen = observe(simulated(Layout(pp=2, tp=2), 2, 3))
    hidden = replace(seen, splits_tensor_groups=False)
    before = owners(judged(hidden, {}))
    assert before == [((2, 3), Cause.STAGE_IMBALANCE, Owner.UNDECIDED)]
    assert owners(judged(hidden, done(1.0, 1.0, 1.0, 1.0))) == before
    heavy = only(judged(hidden, done(1.0, 1.0, 1.45, 1.45)))
    assert (heavy.ranks, heavy.owner) == ((2, 3), Owner.JOB)


def test_a_named_device_that_does_more_has_longer_data(slow_replica):
    named = [((2,), Cause.COMPUTE, Owner.NODE)]
    assert owners(judged(slow_replica, done(1.0, 1.0, 1.0, 1.0))) == named
    assert owners(judged(slow_replica, done(1.0, 1.0, 1.1, 1.0))) == named
    finding = only(judged(slow_replica, done(1.0, 1.0, 1.3, 1.0)))
    assert (finding.ranks, finding.cause) == ((2,), Cause.SEQUENCE_IMBALANCE)
    assert finding.owner is Owner.JOB
    assert "balance the documents" in finding.next_steps[0]


def test_a_small_slowdown_stays_open():
    seen = observe(simulated(Layout(pp=2), 1, factor=1.06))
    before = owners(judged(seen, {}))
    assert owners(judged(seen, done(1.0, 1.0))) == before


def test_a_window_tells_what_its_device_counted():
    timeline = simulated(Layout(dp=2))
    readings = {"tensor_percent": 40.0, "dram_percent": 30.0, "sm_clock_mhz": 1800.0}
    for rank, left_out in ((0, None), (1, "dram_percent")):
        told = {name: value for name, value in readings.items() if name != left_out}
        timeline.windows[rank] = [
            replace(window, counters=told) for window in timeline.windows[rank]
        ]
    found = observe(timeline).work_done
    assert set(found) == {0}
    assert found[0][0] == WorkDone(window=0, multiplied=72_000.0, moved=30.0)
