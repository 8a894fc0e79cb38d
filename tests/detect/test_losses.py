"""Loader, collector, host: time that a rank loses beside compute."""

from __future__ import annotations

import numpy as np
import pytest

from detect import Cause, Owner, Verdict
from megascan.topology import Layout


def test_slow_loader_is_not_slow_compute(job):
    report = job(
        layout=Layout(dp=4), loading_ms=lambda slot: 6.0 if slot.rank == 1 else 1.0
    ).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((1,), Cause.LOADER, Owner.NODE)
    ]
    assert report.findings[0].slowdown == pytest.approx(6.0, rel=0.05)


def test_loading_alike_is_silent(job):
    report = job(layout=Layout(dp=4), loading_ms=lambda slot: 6.0).report()
    assert report.verdict == Verdict.HEALTHY


def test_collector_of_one_rank_is_the_jobs(job):
    report = job(layout=Layout(dp=4), gc_ms=lambda slot: 40.0 if slot.rank == 2 else 0.0).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((2,), Cause.GC, Owner.JOB)
    ]


@pytest.mark.parametrize("interval", [2, 4, 8])
def test_collectors_that_run_now_and_then_are_healthy(job, interval):
    due = np.random.default_rng(interval).integers(0, interval, (64, 64)) == 0
    report = job(
        layout=Layout(dp=4), gc_ms=lambda slot: 60.0 if due[slot.rank, slot.iteration] else 0.0
    ).report()
    assert report.verdict == Verdict.HEALTHY


def test_gaps_between_operations_are_the_hosts(job):
    report = job(layout=Layout(dp=4), gap_ms=lambda slot: 30.0 if slot.rank == 3 else 1.0).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((3,), Cause.HOST, Owner.NODE)
    ]


def test_short_gaps_in_few_of_many_iterations_are_not_worth_a_name(job):
    def short(slot):
        return 6.0 if slot.rank == 3 and 20 <= slot.iteration < 25 else 0.0

    assert job(layout=Layout(dp=8), iterations=60, gap_ms=short).report().findings == ()


def test_loaders_of_different_stages_are_undecided(job):
    def slow(slot):
        return 60.0 if slot.rank == 0 else 4.0 if slot.stage == 3 else 0.0

    report = job(layout=Layout(pp=4), device="cuda", loading_ms=slow).report()
    assert [one.owner for one in report.findings if one.cause == Cause.LOADER] == [Owner.UNDECIDED]
