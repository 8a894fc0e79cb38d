"""Ranks whose threads had no core, or waited for others of their process: it is no longer open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Owner, Report
from detect.causes.finding import Inquiry
from detect.causes.held_up import search_held_up
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.observations import Observations
from detect.observe.warmup import steady
from megascan.simulate import Fault, FaultKind, JobModel, compute_bound, simulate_trace
from megascan.timeline import Timeline
from megascan.topology import Layout


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""


def stages(rank: int | None = 1, layout: Layout | None = None, device: str = "cuda") -> Timeline:
    """Two stages of one rank each; `rank` is 1.3 times slower, and nobody can tell why."""
    layout = layout or Layout(pp=2)
    job = JobModel(layout=layout, costs=compute_bound(layout), device=device)
    faults = [] if rank is None else [Fault(rank=rank, kind=FaultKind.COMPUTE, factor=1.3)]
    return build_timeline(simulate_trace(job, faults, seed=1))


@pytest.fixture(scope="module")
def slow_stage() -> Observations:
    return observe(stages())


def lasting(seen: Observations, *shares: float) -> dict[int, dict[int, int]]:
    """Return ns by rank and iteration, of shares of the mean iteration."""
    step_ns = float(seen.iteration_ns.mean())
    return {
        rank: dict.fromkeys(seen.iterations.tolist(), int(share * step_ns))
        for rank, share in enumerate(shares)
    }


def judged(seen: Observations, *shares: float, without: int | None = None) -> Report:
    """Judge with waits of each rank, as shares of the mean iteration."""
    waits = lasting(seen, *shares)
    if without is not None:
        del waits[without]
    return judge(replace(seen, core_waits=waits), DetectorSettings())


def judged_beside(seen: Observations, *shares: float) -> Report:
    """Judge with other threads of Python in each rank's process, and no waits for a core."""
    return judge(beside(seen, *shares), DetectorSettings())


def beside(seen: Observations, *shares: float) -> Observations:
    none = lasting(seen, *(0.0 for _ in shares))
    return replace(seen, core_waits=none, other_threads=lasting(seen, *shares))


def owners(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


OPEN = [((1,), Cause.STAGE_IMBALANCE, Owner.UNDECIDED)]


def test_a_stage_that_waits_for_a_core_has_a_crowded_host(slow_stage):
    assert owners(judged(slow_stage)) == OPEN
    report = judged(slow_stage, 0.001, 0.3)
    assert owners(report) == [((1,), Cause.HOST, Owner.NODE)]
    (finding,) = report.findings
    assert finding.host == "n00"
    assert (
        "rank 1 (PP1, host n00, GPU 1) waits for cores of its host, 459 ms in iterations of 1.53 s"
        in finding.headline
    )
    assert any("those of the other ranks 1.53 ms at most" in one for one in finding.evidence)
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


def test_a_wait_that_launches_may_run_ahead_of_costs_what_the_passes_show(slow_stage):
    (open_one,), (finding,) = judged(slow_stage).findings, judged(slow_stage, 0.0, 0.3).findings
    assert finding.step_time_cost_ratio == open_one.step_time_cost_ratio
    assert finding.cost_is_replayed == open_one.cost_is_replayed


@pytest.mark.parametrize("share", [0.6, 3.0])
def test_a_longer_wait_costs_all_of_it_but_what_the_others_compute_stays(slow_stage, share):
    (finding,) = judged(slow_stage, 0.0, share).findings
    step_ns, others_ns = slow_stage.iteration_ns[2:].mean(), slow_stage.busy_ns[0, 2:].mean()
    left = max(1.0 - share, others_ns / step_ns)
    assert finding.step_time_cost_ratio == pytest.approx(1.0 / left, rel=0.02)
    assert not finding.cost_is_replayed


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def sound(request) -> Observations:
    """Four sound replicas, on GPUs and on CPUs."""
    layout = Layout(dp=4)
    job = JobModel(layout=layout, costs=compute_bound(layout), device=request.param)
    seen = observe(build_timeline(simulate_trace(job, seed=1)))
    return replace(seen, busy_ns=seen.busy_ns * 0.3)  # they would be quicker without the wait


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_nobody_is_named_for_a_wait_that_launches_run_ahead_of(sound, share):
    report = judged(sound, 0.001, share, 0.001, 0.002)
    if share < (0.15 if sound.members.device_kind == "cpu" else 0.5):
        assert not report.findings
        return
    (finding,) = report.findings
    assert owners(report) == [((1,), Cause.HOST, Owner.NODE)]
    assert finding.step_time_cost_ratio == pytest.approx(1.0 / (1.0 - share), rel=0.02)
    assert finding.q_value < 1e-6
    assert "waits for cores of its host" in finding.headline


@pytest.mark.parametrize(("another", "is_named"), [(0.08, True), (0.12, False)])
def test_who_waits_less_than_twice_as_long_as_somebody_else_has_no_name(sound, another, is_named):
    """Most wait for next to nothing, and both are far from that."""
    on_cpu = sound.members.device_kind == "cpu"
    own = 0.2 if on_cpu else 0.6
    report = judged(sound, 0.001, own, another * own / 0.2, 0.002)
    assert owners(report) == ([((1,), Cause.HOST, Owner.NODE)] if is_named else [])


@pytest.mark.parametrize(("num_long", "is_named"), [(18, True), (8, False)])
def test_who_waits_now_and_then_shares_cores_with_all(num_long, is_named):
    """Of two ranks the one has no core in few iterations, for as long altogether."""
    layout = Layout(dp=2)
    job = JobModel(layout=layout, costs=compute_bound(layout), device="cpu")
    seen = observe(build_timeline(simulate_trace(job, seed=1)))
    step_ns = float(seen.iteration_ns.mean())
    numbers = seen.iterations.tolist()
    long = dict.fromkeys(numbers[2 : 2 + num_long], int(0.3 * 18 / num_long * step_ns))
    waits = {0: dict.fromkeys(numbers, 1000), 1: dict.fromkeys(numbers, 0) | long}
    crowded = replace(seen, busy_ns=seen.busy_ns * 0.1, core_waits=waits)
    named = [((1,), Cause.HOST, Owner.NODE)] if is_named else []
    assert owners(judge(crowded, DetectorSettings())) == named


def test_two_of_one_host_are_one_finding(sound):
    assert owners(judged(sound, 0.01, 0.6, 0.7, 0.02)) == [((1, 2), Cause.HOST, Owner.NODE)]


def test_a_wait_that_no_step_is_longer_by_is_no_finding(sound):
    """The others compute for as long as the step takes."""
    busy = replace(sound, busy_ns=np.broadcast_to(sound.iteration_ns, sound.busy_ns.shape))
    assert not judged(busy, 0.001, 0.9, 0.001, 0.001).findings


def test_who_is_named_already_is_not_named_again():
    seen = observe(stages(rank=2, layout=Layout(pp=2, dp=2)))
    assert owners(judged(seen, 0.0, 0.0, 0.3, 0.0)) == owners(judged(seen))


@pytest.fixture(scope="module")
def on_cores() -> Observations:
    """The same on the CPU, where a thread that waits for the interpreter computes late as well."""
    return observe(stages(device="cpu"))


def test_a_process_in_which_other_python_runs_is_held_up(on_cores):
    (before,) = judged(on_cores).findings
    assert before.owner is Owner.UNDECIDED
    report = judged_beside(on_cores, 0.001, 0.3)
    assert owners(report) == [((1,), Cause.HOST, Owner.NODE)]
    (finding,) = report.findings
    assert "rank 1 (PP1, host n00) is held up by other threads of its own" in finding.headline
    assert any("py-spy dump" in one for one in finding.next_steps)
    assert any("interpreter's lock" in one for one in finding.evidence)
    assert finding.step_time_cost_ratio == before.step_time_cost_ratio


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (1.2, "is held up by other threads of its own process"),
        (1.0, "runs other threads of Python in its process"),
    ],
)
def test_who_is_held_up_at_no_cost_that_is_seen_is_not_said_to_be(on_cores, cost, words):
    (before,) = judged(on_cores).findings
    found = replace(before, step_time_cost_ratio=cost, cost_is_replayed=False)
    inquiry = Inquiry(
        seen=steady(beside(on_cores, 0.001, 0.3), DetectorSettings()), settings=DetectorSettings(),
        num_tests=1, slow=np.zeros(2, dtype=bool), found=(found,),
    )  # fmt: skip
    (finding,) = search_held_up(inquiry).findings
    assert f"rank 1 (PP1, host n00) {words}" in finding.statement
    assert "from iteration 3 to " in finding.statement


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ((0.3, 0.3), "both have such threads"),
        ((0.15, 0.3), "the other one's run for half as long"),
        ((0.0, 0.06), "less than half of what the finding costs"),
        ((0.3, 0.001), "the other one has them"),
    ],
)
def test_it_stays_open_where_other_threads_do_not_tell(on_cores, shares, why):
    assert owners(judged_beside(on_cores, *shares)) == owners(judged(on_cores)), why


def test_a_gpu_that_computes_slowly_is_held_up_by_no_thread(slow_stage):
    """A thread may run in C, and its interpreter be free."""
    assert owners(judged_beside(slow_stage, 0.001, 0.8)) == OPEN


def test_threads_that_cost_nothing_are_a_note(sound):
    report = judged_beside(sound, 0.001, 0.4, 0.001, 0.002)
    assert not report.findings
    (note,) = [note for note in report.notes if "other threads" in note]
    assert note.startswith("rank 1 (DP1, host n00")
    assert "runs other threads of Python in its process" in note and "held up" not in note
    assert note.endswith("whether that costs the step anything is not seen")
    assert not any("other threads" in note for note in judged_beside(sound, *4 * [0.4]).notes)


@pytest.mark.parametrize("judge_with", [judged, judged_beside])
@pytest.mark.parametrize(("usual", "owner"), [(0.0, Owner.NODE), (0.3, Owner.UNDECIDED)])
def test_a_late_host_is_open_where_all_are_held_up_for_as_long(judge_with, usual, owner):
    layout = Layout(dp=4)
    job = JobModel(layout=layout, costs=compute_bound(layout))
    late = Fault(rank=2, kind=FaultKind.HOST, factor=1.2)
    seen = observe(build_timeline(simulate_trace(job, [late], seed=1)))
    report = judge_with(seen, *4 * [usual])
    assert owners(report) == [((2,), Cause.HOST, owner)]
    (finding,) = report.findings
    doubts = [one for one in finding.evidence if "the last by chance" in one]
    assert len(doubts) == (owner is Owner.UNDECIDED)
