"""Build a Timeline from a Trace: match, put on one clock, split waits from transfers.

    spans by own clocks ─ match ─ restarts ─ align ─ without jumps ─ one clock ─ decompose

**Restarts.** The original MegaScan zeroes each rank's time at the begin of each step, so that no
single offset can be right for a rank: behind the barrier before a step, ranks begin within some
spread, anew each time. A restarted clock is a new clock. Each (rank, iteration) gets an offset of
its own from what is matched in that iteration, by the same robust fit, under the same causality, as
all clocks:

                 as read (steps laid end to end)         after
    rank 0   |step 1 ......|step 2 ......|          |step 1 ......|step 2 ......|
    rank 1   |step 1 ......|step 2 ......|           |step 1 ......|   |step 2 ......|

What is lost is lost: how long after step 1 step 2 began is what the files' pauses say, the same
for all ranks; drift within a step is not estimated. An iteration in which a rank has nothing
matched stays as it was read, and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from aggregate.anchors import Members, Messages, matched_messages
from aggregate.causality import components, references, tied
from aggregate.clocks import Alignment, align_clocks, fit_clocks, relative_lines, without_steps
from aggregate.decompose import Parts, decompose
from aggregate.match import Matches, match_spans
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import InputError
from megascan.header import RESTARTING_CLOCK, RankHeader
from megascan.timeline import (
    TIMELINE_SCHEMA,
    Timeline,
    Trace,
    integer_column,
    numbers,
    row_order,
    shifted,
    with_column,
)


@dataclass(frozen=True)
class Restarts:
    """Shifts of restarted clocks; shift_ns (span,) is to be added to the starts of a table."""

    shift_ns: Integers
    notes: tuple[str, ...]


def restarts(
    spans: pa.Table, matches: Matches, headers: Mapping[int, RankHeader]
) -> Restarts | None:
    """Return what puts the ranks of each iteration together; None unless all clocks restart."""
    if not all(header.clock.source == RESTARTING_CLOCK for header in headers.values()):
        return None
    ranks = np.array(sorted(headers), dtype=np.int64)
    rank = np.searchsorted(ranks, numbers(spans, "rank"))
    iterations, iteration = np.unique(numbers(spans, "iteration"), return_inverse=True)
    members, messages = Members.of(spans, matches, ranks), matched_messages(spans, matches, ranks)

    def clock(rank: Integers, iteration: Integers) -> Integers:
        return np.searchsorted(iterations, iteration) * len(ranks) + rank

    shift, linked = _shifts(
        replace(members, rank=clock(members.rank, members.iteration)),
        replace(
            messages,
            source=clock(messages.source, messages.iteration),
            destination=clock(messages.destination, messages.iteration),
        ),
        len(iterations) * len(ranks),
    )
    used = np.bincount(iteration * len(ranks) + rank, minlength=len(shift)) > 0
    return Restarts(
        np.rint(shift).astype(np.int64)[iteration * len(ranks) + rank],
        (_note(shift[linked], int(np.count_nonzero(used & ~linked))),),
    )


def _shifts(members: Members, messages: Messages, num_clocks: int) -> tuple[Floats, Flags]:
    """Return (clock,) what to add to its times, and whether anything ties it to another clock."""
    clocks = np.arange(num_clocks)
    ties = tied(members, messages, clocks)
    component = components(ties.anchors, clocks, num_clocks)
    lines = fit_clocks(ties, with_drift=False)
    shift, _ = relative_lines(lines, references(clocks, component), component)
    linked = np.bincount(component)[component] > 1
    return np.where(linked, shift, 0.0), linked


def _note(shift_ns: Floats, num_alone: int) -> str:
    if not len(shift_ns):
        return (
            "clocks begin again at every iteration and nothing matched ties them: ranks are "
            "comparable up to the spread of their step begins only"
        )
    alone = f"; {num_alone} of a rank have nothing matched and stay as they were" * bool(num_alone)
    return (
        "clocks begin again at every iteration and were set anew in each, by up to "
        f"{np.abs(shift_ns).max() / 1e3:.1f} µs (median {np.median(np.abs(shift_ns)) / 1e3:.1f} µs)"
        f"{alone}; the time between iterations is not known better than the files' pauses say"
    )


def build_timeline(trace: Trace) -> Timeline:
    """Put all ranks of a trace on one clock and say which spans belong together.

    Raises InputError for a trace without spans, with spans of a rank that has no header, or with
    a negative duration.
    """
    spans = _checked(trace)
    order = row_order(spans)
    spans = spans if order is None else spans.take(order)
    trace = replace(trace, spans=spans.slice(0, 0))  # times by own clocks go when replaced
    matches = match_spans(spans, trace.headers)
    restarted = restarts(spans, matches, trace.headers)
    if restarted:
        spans = shifted(spans, restarted.shift_ns)
    clocks = align_clocks(spans, matches, trace.headers)
    if clocks.step is not None:
        spans, clocks = without_steps(spans, matches, trace.headers, clocks)
    spans = _on_common_clock(spans, clocks)
    order = row_order(spans)
    if order is not None:
        spans, matches = spans.take(order), replace(matches, match=matches.match[order])
    parts = decompose(spans, matches.match, clocks)
    origin = int(numbers(spans, "start_ns").min())
    return Timeline(
        run_id=trace.run_id,
        layout=trace.layout,
        headers=trace.headers,
        spans=_timeline_table(spans, matches, parts),
        windows=trace.windows,
        clocks=clocks.fits(origin),
        clock_method=clocks.method,
        origin_ns=origin,
        completeness=replace(
            trace.completeness,
            num_unmatched=dict(matches.num_unmatched),
            num_duplicates=matches.num_duplicates,
            notes=trace.completeness.notes
            + matches.notes
            + (restarted.notes if restarted else ())
            + clocks.notes,
        ),
    )


def _checked(trace: Trace) -> pa.Table:
    if not trace.spans.num_rows:
        raise InputError(
            f"run {trace.run_id!r} has no spans to put on a timeline; trace at least one window"
        )
    unknown = np.setdiff1d(numbers(trace.spans, "rank"), sorted(trace.headers))
    if len(unknown):
        raise InputError(
            f"run {trace.run_id!r} has spans of rank {unknown[0]}, which has no header; "
            "every rank file must begin with one"
        )
    shortest = int(numbers(trace.spans, "duration_ns").min())
    if shortest < 0:
        raise InputError(
            f"run {trace.run_id!r} has a span that lasts {shortest} ns; durations are 0 or more"
        )
    return trace.spans


def _on_common_clock(spans: pa.Table, clocks: Alignment) -> pa.Table:
    position = np.searchsorted(clocks.ranks, numbers(spans, "rank")).astype(np.int64)
    recorded = numbers(spans, "start_ns")
    start = clocks.correct(position, recorded)
    end = clocks.correct(position, recorded + numbers(spans, "duration_ns"))
    spans = with_column(spans, "start_ns", start)
    return with_column(spans, "duration_ns", end - start)


def _timeline_table(spans: pa.Table, matches: Matches, parts: Parts) -> pa.Table:
    derived = {
        "match": matches.match,
        "wait_ns": parts.wait_ns,
        "transfer_ns": parts.transfer_ns,
        "self_ns": parts.self_ns,
        "self_cpu_ns": parts.self_cpu_ns,
    }
    for name, values in derived.items():
        spans = spans.append_column(name, integer_column(values))
    return spans.select(TIMELINE_SCHEMA.names).cast(TIMELINE_SCHEMA)
