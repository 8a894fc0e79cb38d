"""From a Trace to a Timeline: match, align, decompose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from aggregate.clocks import Alignment, align_clocks, without_steps
from aggregate.decompose import Parts, decompose
from aggregate.keys import BoolArray, IntArray
from aggregate.match import Matches, match_spans
from aggregate.restarts import restarts
from megascan.errors import InputError
from megascan.timeline import (
    TIMELINE_SCHEMA,
    Timeline,
    Trace,
    integer_column,
    numbers,
    shifted,
    with_column,
)


def build_timeline(trace: Trace) -> Timeline:
    """Put all ranks of a trace on one clock and say which spans belong together.

    Raises InputError for a trace without spans, with spans of a rank that has no header, or with
    a negative duration.
    """
    spans = _in_order(_checked(trace))
    trace = replace(
        trace, spans=spans.slice(0, 0)
    )  # times by own clocks go where they are replaced
    matches = match_spans(spans, trace.headers)
    restarted = restarts(spans, matches, trace.headers)
    if restarted:
        spans = shifted(spans, restarted.shift_ns)
    clocks = align_clocks(spans, matches, trace.headers)
    if clocks.step is not None:
        spans, clocks = without_steps(spans, matches, trace.headers, clocks)
    spans = _on_common_clock(spans, clocks)
    order = _order(spans)
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


def _in_order(spans: pa.Table) -> pa.Table:
    order = _order(spans)
    return spans if order is None else spans.take(order)


def _order(spans: pa.Table) -> IntArray | None:
    """Order by (rank, start, longest first), or None where the table is in it already."""
    rank, start = numbers(spans, "rank"), numbers(spans, "start_ns")
    duration = numbers(spans, "duration_ns")
    if _ascending(rank, start, -duration).all():
        return None
    return np.lexsort((-duration, start, rank)).astype(np.int64)


def _ascending(*columns: IntArray) -> BoolArray:
    """Whether each row is not before the one above it."""
    result = np.ones(max(len(columns[0]) - 1, 0), dtype=np.bool_)
    for column in reversed(columns):
        step = np.diff(column)
        result = (step > 0) | ((step == 0) & result)
    return result


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
