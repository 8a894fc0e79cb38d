"""On a GPU the host runs ahead: what it does beside a busy device costs nothing."""

from __future__ import annotations

import pytest

from aggregate import build_timeline
from benchmarks.grounds.yard import cases, write
from detect import Cause, Owner, Verdict, detect
from detect.observe.extract import observe
from megascan.reader import read_trace
from megascan.topology import Layout


def blocked_on(rank):
    return lambda slot: 25.0 if slot.rank == rank and slot.microbatch else 0.1


def test_loading_beside_other_passes_is_not_taken_from_their_time(job):
    """The span of microbatch 3 covers the backward pass of microbatch 2 on the device."""
    quiet = observe(job(layout=Layout(dp=4)).timeline())
    ahead = observe(job(layout=Layout(dp=4), blocked_ms=blocked_on(1)).timeline())
    assert ahead.work.log_ns == pytest.approx(quiet.work.log_ns, nan_ok=True)


def test_a_loader_that_waits_for_a_busy_device_is_not_named(job):
    report = job(layout=Layout(dp=4), blocked_ms=blocked_on(1)).report()
    assert report.verdict == Verdict.HEALTHY


def test_a_last_stage_that_loads_labels_ahead_is_not_heavy(job):
    def blocked(slot):
        return 25.0 if slot.stage == 0 and slot.microbatch else 0.1

    report = job(layout=Layout(dp=2, pp=2), blocked_ms=blocked).report()
    assert report.verdict == Verdict.HEALTHY


def test_slow_compute_is_found_beside_blocked_loading(job, slow):
    report = job(
        layout=Layout(dp=4), blocked_ms=lambda slot: 20.0 if slot.microbatch else 0.1,
        work=slow(2, 1.5),
    ).report()  # fmt: skip
    assert [(one.ranks, one.cause) for one in report.findings] == [((2,), Cause.COMPUTE)]
    assert report.findings[0].slowdown == pytest.approx(1.5, rel=0.02)


def test_on_the_cpu_loading_lies_inside_the_pass(job):
    loading = lambda slot: 6.0 if slot.rank == 1 else 1.0  # noqa: E731
    report = job(layout=Layout(dp=4), loading_ms=loading, device="cpu").report()
    assert [(one.ranks, one.cause) for one in report.findings] == [((1,), Cause.LOADER)]


def test_across_stages_only_large_differences_of_loading_count(job):
    """Lone ranks of two stages: 3 % of the iteration more on one is its place in the pipeline."""

    def loading(excess_ms):
        return lambda slot: 0.5 + (excess_ms if slot.stage == 1 else 0.0)

    small, large = (
        job(layout=Layout(tp=2, pp=2), loading_ms=loading(excess)).report() for excess in (1.0, 8.0)
    )
    assert not [one for one in small.findings if one.cause == Cause.LOADER]
    assert [one.ranks for one in large.findings if one.cause == Cause.LOADER] == [(2,)]


def test_a_collection_stops_a_device_that_runs_ahead_in_a_later_pass(tmp_path):
    """One rank collects in each iteration; its device stands still once its queue is empty.

    That time is the collector's alone: named as its host's besides, a node would be to blame.
    """
    (case,) = [one for one in cases(208) if one.name.startswith("gc-small-")]
    write(case, tmp_path)
    timeline = build_timeline(read_trace(tmp_path))
    seen, report = observe(timeline), detect(timeline)
    row = seen.members.row(case.planted[0].ranks[0])
    collected, lost = (seen.lost(cause)[row] for cause in (Cause.GC, Cause.HOST))
    paused = collected > 1e7
    assert paused.any()
    assert (lost[paused] < 0.2 * collected[paused]).all()
    assert not [one for one in report.findings if one.owner is Owner.NODE]
    assert Cause.GC in {one.cause for one in report.findings}
