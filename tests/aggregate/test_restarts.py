"""Clocks that begin again at every iteration are set anew in each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aggregate import build_timeline
from megascan.header import RESTARTING_CLOCK
from megascan.timeline import numbers
from megascan.topology import Layout

US, MS = 1_000, 1_000_000
LAYOUT = Layout(tp=2, dp=2)
GROUPS = {"tp@0": (0, 1), "tp@2": (2, 3), "dp@0": (0, 2), "dp@1": (1, 3)}


def restarting(trace, ranks=None):
    """The trace as of clocks that restart."""
    headers = {
        rank: replace(header, clock=replace(header.clock, source=RESTARTING_CLOCK))
        if ranks is None or rank in ranks
        else header
        for rank, header in trace.headers.items()
    }
    return replace(trace, headers=headers)


def job(build, began_ns, jitter_ns=0):
    """Ten collectives an iteration; began_ns (iteration, rank) is how late each clock began.

    Rank 3 enters all of them 300 µs after the others.
    """
    random, rows = np.random.default_rng(2), []
    for n, began in enumerate(began_ns.tolist()):
        for rank in range(4):
            rows.append(
                build.span(rank, "iteration", "iteration", 100 * MS * n, 100 * MS * n + 90 * MS,
                           iteration=n + 1)
            )  # fmt: skip
            for k in range(10):
                group = f"tp@{rank // 2 * 2}" if k % 2 else f"dp@{rank % 2}"
                entered = 100 * MS * n + 8 * MS * k + 300 * US * (rank == 3)
                left = 100 * MS * n + 8 * MS * k + MS + round(random.normal(0, 1) * jitter_ns)
                rows.append(
                    build.collective(
                        rank,
                        group,
                        round(entered - began[rank]),
                        round(left - began[rank]),
                        sequence=k,
                        iteration=n + 1,
                    )
                )
    return build.trace(rows, GROUPS, LAYOUT, device="cuda")


def spread_ns(timeline):
    """(match,) distance between the first and the last end."""
    match = numbers(timeline.spans, "match")
    end = numbers(timeline.spans, "start_ns") + numbers(timeline.spans, "duration_ns")
    return np.array([np.ptp(end[match == number]) for number in range(match.max() + 1)])


def test_every_iteration_gets_its_own_offsets(build):
    began = np.random.default_rng(0).uniform(0, 3 * MS, (8, 4))
    timeline = build_timeline(restarting(job(build, began, jitter_ns=2 * US)))
    assert np.percentile(spread_ns(timeline), 99) < 15 * US
    waits = numbers(timeline.spans, "wait_ns")
    rank, collective = numbers(timeline.spans, "rank"), numbers(timeline.spans, "match") >= 0
    assert np.median(waits[collective & (rank == 3)]) == 0
    peers = collective & np.isin(rank, (1, 2))
    assert abs(waits[peers].max() - 300 * US) < 20 * US
    told = " ".join(timeline.completeness.notes)
    assert "clocks begin again at every iteration and were set anew in each" in told
    assert "time between iterations is not known better" in told
    assert max(fit.error_ns for fit in timeline.clocks.values()) < 20 * US


def test_one_offset_a_rank_could_not_have_done_that(build):
    began = np.random.default_rng(0).uniform(0, 3 * MS, (8, 4))
    timeline = build_timeline(job(build, began, jitter_ns=2 * US))
    assert np.median(spread_ns(timeline)) > 300 * US
    assert not any("begin again" in note for note in timeline.completeness.notes)
    assert max(fit.error_ns for fit in timeline.clocks.values()) > 300 * US


def test_a_mixture_of_clocks_is_left_alone(build):
    trace = job(build, np.zeros((3, 4)))
    timeline = build_timeline(restarting(trace, ranks={0, 1}))
    assert not any("begin again" in note for note in timeline.completeness.notes)


def test_an_iteration_with_nothing_matched_stays_and_is_counted(build):
    began = np.full((4, 4), 50 * US) * np.arange(4)
    trace = restarting(job(build, began))
    rank, iteration = numbers(trace.spans, "rank"), numbers(trace.spans, "iteration")
    kind = np.array(trace.spans.column("kind").to_pylist())
    gone = (rank == 2) & (iteration == 3) & (kind == "collective")
    spans = trace.spans.filter(list(~gone))
    timeline = build_timeline(replace(trace, spans=spans))
    told = next(note for note in timeline.completeness.notes if "begin again" in note)
    assert "of a rank have nothing matched and stay as they were" in told
    kept = (numbers(timeline.spans, "rank") == 2) & (numbers(timeline.spans, "iteration") == 3)
    assert kept.sum() == 1


def test_nothing_matched_at_all_is_said(build):
    rows = [build.span(rank, "compute", "forward", 0, 100) for rank in (0, 1)]
    timeline = build_timeline(restarting(build.trace(rows)))
    assert any("spread of their step begins only" in n for n in timeline.completeness.notes)
    assert "host clocks" in timeline.clock_method
