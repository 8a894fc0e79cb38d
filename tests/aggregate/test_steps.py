"""Clocks that do not run straight: jumps, changing drift, wrong hours, sets without a link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from aggregate import build_timeline, clocks, render_text, summarise
from aggregate.clocks import align_clocks
from megascan.timeline import numbers
from megascan.topology import Layout

LAYOUT = Layout(tp=2, dp=4)
NUM_EVENTS = 400
PERIOD_NS = 5e6
WINDOW_NS = NUM_EVENTS * PERIOD_NS
OFFSET_NS = np.array([0, 3e7, -2e7, 9e7, -5e7, 4e7, 1e7, -8e7])
DRIFT = OFFSET_NS * 4e-13


def job(build, error_of, *, domains=None, layout=LAYOUT, events=NUM_EVENTS):
    """(trace, true starts of its spans): clocks show true time plus error_of(rank, age) ns."""
    trace, _ = build.skewed_job(layout, events, jitter_ns=5e3)
    spans = trace.spans
    rank, start = numbers(spans, "rank"), numbers(spans, "start_ns")
    end = start + numbers(spans, "duration_ns")
    shown = [
        at + np.rint(error_of(rank, at - build.epoch_ns)).astype(np.int64) for at in (start, end)
    ]
    spans = spans.set_column(spans.column_names.index("start_ns"), "start_ns", pa.array(shown[0]))
    spans = spans.set_column(
        spans.column_names.index("duration_ns"), "duration_ns", pa.array(shown[1] - shown[0])
    )
    headers = trace.headers
    if domains:
        headers = {
            each: replace(header, clock=replace(header.clock, domain=domains[each]))
            for each, header in headers.items()
        }
    return replace(trace, spans=spans, headers=headers), start


def errors_us(trace, true_start):
    """({rank: 98th percentile of its error against rank 0, µs}, timeline)."""
    timeline = build_timeline(trace)
    rank = numbers(timeline.spans, "rank")
    found = numbers(timeline.spans, "start_ns")
    order = np.lexsort((true_start, numbers(trace.spans, "rank")))
    error = (found - true_start[order]).astype(np.float64)
    own = rank == 0
    error -= np.interp(true_start[order], true_start[order][own], error[own])
    return {
        each: float(np.percentile(np.abs(error[rank == each]), 98)) / 1e3
        for each in sorted(trace.headers)
    }, timeline


def straight(rank, age_ns):
    return OFFSET_NS[rank] + DRIFT[rank] * age_ns


def jump(rank, age_ns, by_ns, of=(5,), at=0.5):
    moved = np.isin(rank, of) & (age_ns > at * WINDOW_NS)
    return straight(rank, age_ns) + np.where(moved, by_ns, 0.0)


@pytest.mark.parametrize(("by_ns", "at"), [(5e6, 0.5), (-5e6, 0.5), (3e5, 0.3)])
def test_a_jump_is_found_and_taken_back(build, by_ns, at):
    error, timeline = errors_us(*job(build, lambda rank, age: jump(rank, age, by_ns, at=at)))
    assert max(error.values()) < 30
    assert all(error[rank] * 1e3 <= timeline.clocks[rank].error_ns for rank in error if rank)
    (note,) = [note for note in timeline.completeness.notes if "jumped by" in note]
    assert note.startswith("clock clock5 jumped by " + ("+" if by_ns > 0 else "-"))
    assert "jumped by" in render_text(summarise(timeline)).replace("\n ", "")


def test_what_is_too_wild_to_mend_is_in_the_error_bars(build):
    """An hour pulls all clocks away before it can be told whose it was."""
    error, timeline = errors_us(*job(build, lambda rank, age: jump(rank, age, 3.6e12, at=0.7)))
    bars = {rank: fit.error_ns / 1e3 for rank, fit in timeline.clocks.items()}
    assert all(error[rank] <= max(bars[rank], bars[0]) for rank in error)


def test_several_jumps_of_several_clocks_are_mended_or_in_the_error_bars(build):
    def shown(rank, age_ns):
        later = np.where((rank == 5) & (age_ns > 0.7 * WINDOW_NS), -2e6, 0.0)
        third = np.where((rank == 3) & (age_ns > 0.5 * WINDOW_NS), 1e6, 0.0)
        return jump(rank, age_ns, 5e6, at=0.3) + later + third

    error, timeline = errors_us(*job(build, shown))
    assert all(error[rank] * 1e3 <= timeline.clocks[rank].error_ns for rank in error if rank)
    assert max(error[rank] for rank in error if rank not in (3, 5)) < 30


def test_a_hosts_clock_jumps_for_all_its_ranks(build):
    domains = [f"host{rank // 2}" for rank in range(8)]
    trace = job(build, lambda rank, age: jump(2 * (rank // 2), age, 5e6, of=(4,)), domains=domains)
    error, timeline = errors_us(*trace)
    assert max(error.values()) < 30
    assert [
        note.split(" jumped")[0] for note in timeline.completeness.notes if "jumped" in note
    ] == ["clock host2"]


def test_clocks_of_a_host_that_jump_together_are_all_mended(build, monkeypatch):
    """Every GPU has a clock of its own, tied to its host's; on two of eight hosts these jump. Eight
    jumps are not eight fits: all clocks that seem to jump are tried together.
    """
    layout, fits = Layout(dp=32), []

    def counted(*arguments):
        fits.append(1)
        return align_clocks(*arguments)

    def shown(rank, age_ns):
        first = np.where((rank // 4 == 3) & (age_ns > 0.25 * WINDOW_NS), -2.5e6, 0.0)
        return first + np.where((rank // 4 == 5) & (age_ns > 0.75 * WINDOW_NS), 4e6, 0.0)

    monkeypatch.setattr(clocks, "align_clocks", counted)
    error, timeline = errors_us(*job(build, shown, layout=layout))
    assert max(error.values()) < 30
    assert len([note for note in timeline.completeness.notes if "jumped by" in note]) == 8
    assert 1 <= len(fits) <= 4


@pytest.mark.parametrize(
    "error_of",
    [
        straight,
        lambda rank, age: straight(rank, age) + 1e-5 * age * np.sin(3 * age / WINDOW_NS),
        lambda rank, age: straight(rank, age) + (rank == 5) * 1e-5 * age**2 / WINDOW_NS,
        lambda rank, age: straight(rank, age) + (rank == 5) * 3 * 3.6e12,
    ],
    ids=["straight", "all drifts change", "one drift rises by 20 ppm", "wrong by three hours"],
)
def test_clocks_without_a_jump_get_none(build, error_of):
    error, timeline = errors_us(*job(build, error_of))
    assert not [note for note in timeline.completeness.notes if "jumped" in note]
    assert all(error[rank] * 1e3 <= timeline.clocks[rank].error_ns for rank in error if rank)


def test_a_link_that_becomes_slow_is_no_jump(build):
    """Rank 5 leaves its DP collectives late from half time on: those spans are longer."""
    trace, true_start = job(build, straight)
    spans = trace.spans
    late = (numbers(spans, "rank") == 5) & (
        numbers(spans, "start_ns") > build.epoch_ns + WINDOW_NS / 2
    )
    late &= np.array([group.startswith("dp@") for group in spans.column("group").to_pylist()])
    longer = numbers(spans, "duration_ns") + np.where(late, 2_000_000, 0)
    at = spans.column_names.index("duration_ns")
    trace = replace(trace, spans=spans.set_column(at, "duration_ns", pa.array(longer)))
    error, timeline = errors_us(trace, true_start)
    assert not [note for note in timeline.completeness.notes if "jumped" in note]
    assert max(error.values()) < 30
    assert timeline.clocks[5].error_ns < 1e6


def test_a_clock_that_goes_to_and_fro_widens_its_error_bar(build):
    """Too many jumps to take back: what is left is said."""

    def shown(rank, age_ns):
        beats = (age_ns / (WINDOW_NS / 60)).astype(np.int64) % 2
        return straight(rank, age_ns) + np.where(rank == 5, 2e6 * beats, 0.0)

    error, timeline = errors_us(*job(build, shown))
    assert error[5] * 1e3 <= timeline.clocks[5].error_ns * 1.05
    assert max(error[rank] for rank in error if rank != 5) < 30


def test_ranks_whose_groups_share_nobody_are_not_compared(build):
    trace, true_start = job(build, straight)
    keep = [group.startswith("tp@") for group in trace.spans.column("group").to_pylist()]
    spans = trace.spans.filter(pa.array(keep))
    _, timeline = errors_us(replace(trace, spans=spans), true_start[np.array(keep)])
    assert len({fit.component for fit in timeline.clocks.values()}) == 4
    assert any("4 separate sets" in note for note in timeline.completeness.notes)


def test_messages_alone_tie_the_clocks(build):
    """A pipeline of two without a collective: bounds from both directions."""
    layout, rows = Layout(pp=2), []
    for number in range(200):
        at = number * 4_000_000
        for source, when in ((0, at), (1, at + 2_000_000)):
            other, seen = 1 - source, {0: 0, 1: 30_000_000}
            more = {"sequence": number, "iteration": 1 + number // 20}
            more["direction"] = "backward" if source else "forward"
            rows.append(
                build.send(source, other, when + seen[source], when + 40_000 + seen[source], **more)
            )
            rows.append(
                build.receive(
                    other, source, when + seen[other], when + 50_000 + seen[other], **more
                )
            )
    timeline = build_timeline(build.trace(rows, {}, layout))
    offset = timeline.clocks[1].offset_ns - timeline.clocks[0].offset_ns
    assert offset == pytest.approx(-30_000_000, abs=timeline.clocks[1].error_ns + 1)
    assert timeline.clocks[1].error_ns < 200_000
