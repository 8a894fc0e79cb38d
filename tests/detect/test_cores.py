"""Ranks whose threads could have run and had no core: what was open is their host's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Owner, Report
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.observations import Observations
from megascan.simulate import Fault, FaultKind, JobModel, compute_bound, simulate_trace
from megascan.timeline import Timeline
from megascan.topology import Layout


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""


def stages(rank: int | None = 1, layout: Layout | None = None) -> Timeline:
    """Two stages of one rank each; `rank` is 1.3 times slower, and nobody can tell why."""
    layout = layout or Layout(pp=2)
    job = JobModel(layout=layout, costs=compute_bound(layout))
    faults = [] if rank is None else [Fault(rank=rank, kind=FaultKind.COMPUTE, factor=1.3)]
    return build_timeline(simulate_trace(job, faults, seed=1))


@pytest.fixture(scope="module")
def slow_stage() -> Observations:
    return observe(stages())


def judged(seen: Observations, *shares: float, without: int | None = None) -> Report:
    """Judge with waits of each rank, as shares of the mean iteration."""
    step_ns = float(seen.iteration_ns.mean())
    waits = {
        rank: dict.fromkeys(seen.iterations.tolist(), int(share * step_ns))
        for rank, share in enumerate(shares)
        if rank != without
    }
    return judge(replace(seen, core_waits=waits), DetectorSettings())


def owners(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


OPEN = [((1,), Cause.STAGE_IMBALANCE, Owner.UNDECIDED)]


def test_a_stage_that_waits_for_a_core_has_a_crowded_host(slow_stage):
    assert owners(judged(slow_stage)) == OPEN
    report = judged(slow_stage, 0.001, 0.3)
    assert owners(report) == [((1,), Cause.HOST, Owner.NODE)]
    (finding,) = report.findings
    assert finding.host == "n00"
    assert finding.step_time_cost_ratio == pytest.approx(1.16, abs=0.02)
    assert "rank 1 (PP1, host n00, GPU 1) could have run and had no core for 459 ms of 1.53 s" in (
        finding.headline
    )
    assert any("the other ranks wait for 1.53 ms at most" in one for one in finding.evidence)
    assert any("left open: last stage PP1" in one for one in finding.evidence)
    assert any("taskset -p" in one for one in finding.next_steps)


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ((0.3, 0.3), "both wait, as on cores that all share"),
        ((0.15, 0.3), "the other one waits for half as long"),
        ((0.0, 0.04), "so short a wait is lost between launches"),
        ((0.0, 0.06), "less than half of what the finding costs"),
        ((0.3, 0.001), "the other one waits"),
    ],
)
def test_it_stays_open_where_waiting_does_not_tell(slow_stage, shares, why):
    assert owners(judged(slow_stage, *shares)) == OPEN, why


def test_it_stays_open_where_a_rank_does_not_tell(slow_stage):
    assert owners(judged(slow_stage, 0.0, 0.3, without=0)) == OPEN


def test_waiting_for_a_core_alone_is_no_finding():
    """A queue of launches may run ahead: nothing is lost, and nobody is named."""
    seen = observe(stages(rank=None, layout=Layout(dp=4)))
    assert not judged(seen, 0.001, 0.3, 0.001, 0.001).findings


def test_who_is_named_already_is_not_named_again():
    seen = observe(stages(rank=2, layout=Layout(pp=2, dp=2)))
    assert owners(judged(seen, 0.0, 0.0, 0.3, 0.0)) == owners(judged(seen))
