"""Where the time of each rank's iterations went, every nanosecond counted once.

Spans of a rank overlap: communication inside a forward pass, a garbage collection inside it, a
transfer beside it. Kinds are therefore laid over one another like layers, and each moment belongs
to the topmost layer that covers it:

    transfer                 ▐██▌             split of synchronous communication
    wait                 ▐███░░░▌
    unsplit                                   communication without a match
    host            ▐█▌                       on the CPU, where it interrupts the rank's one thread
    compute      ▐██░░░██░░░░░░░██▌
    host                          ░▐█▌        on a GPU, where it runs beside the device
    overlapped transfer, wait, unsplit        what of asynchronous communication nothing hides
    dispatch                ▐███▌             GPU: nothing to do, for the host launched too late
    idle         what no layer covers

The layers' visible lengths add up to the iteration exactly. Of visible compute, what its thread
did not spend on the CPU is shown apart as `preempted` (CPU runs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from aggregate.decompose import rank_blocks
from aggregate.intervals import Cover, TimeAxis, new_parts
from aggregate.keys import BoolArray, IntArray, combine, group_starts
from megascan.header import RankHeader
from megascan.pipeline import across_threads
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Kind, Track
from megascan.timeline import Timeline, equals, numbers

SHARES = ("compute", "preempted", "transfer", "wait", "unsplit", "host", "dispatch", "idle")
COMPUTE_KINDS = (Kind.COMPUTE, Kind.OPTIMIZER)
HOST_KINDS = (Kind.DATA, Kind.GC, Kind.CHECKPOINT, Kind.HOST)


def iteration_shares(timeline: Timeline) -> pa.Table:
    """One row a rank and iteration: rank, iteration, duration_ns and `<share>_ns` of SHARES.

    The shares of a row add up to its duration_ns. An iteration lasts as its span says, or from
    its first span to its last where that span is missing.
    """
    table, headers = timeline.spans, timeline.headers
    blocks = rank_blocks(numbers(table, "rank"))
    shares = across_threads(lambda rows: _block_shares(table[rows], headers), blocks)
    return pa.concat_tables(shares)


def _block_shares(table: pa.Table, headers: Mapping[int, RankHeader]) -> pa.Table:
    spans = _Spans.of(table)
    windows = _Windows.of(table, spans)
    lengths = dict.fromkeys(SHARES, np.zeros(len(windows.start), dtype=np.int64))
    covered = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    before = lengths["idle"]
    for share, start, end in _layers(headers, spans):
        if not len(start):
            continue
        covered = _united(covered, (start, end))
        visible = Cover.of(*covered).length_within(windows.start, windows.end)
        lengths[share] = lengths[share] + visible - before
        before = visible
    lengths["idle"] = windows.end - windows.start - before
    preempted = np.minimum(_preempted(headers, spans, windows), lengths["compute"])
    lengths["compute"], lengths["preempted"] = lengths["compute"] - preempted, preempted
    columns = {
        "rank": windows.rank,
        "iteration": windows.iteration,
        "duration_ns": windows.end - windows.start,
    }
    return pa.table(columns | {f"{share}_ns": lengths[share] for share in SHARES})


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """Columns that the layers need; start and end are positions on the axis."""

    axis: TimeAxis
    rank: IntArray
    start: IntArray
    end: IntArray
    cpu_ns: IntArray
    launch_ns: IntArray
    wait_ns: IntArray
    transfer_ns: IntArray
    communication: BoolArray
    overlapped: BoolArray
    compute: BoolArray
    host: BoolArray

    @classmethod
    def of(cls, table: pa.Table) -> _Spans:
        rank, start = numbers(table, "rank"), numbers(table, "start_ns")
        duration = numbers(table, "duration_ns")
        axis = TimeAxis.of(rank, start, start + duration)
        place = axis.place(rank, start)
        return cls(
            axis=axis,
            rank=rank,
            start=place,
            end=place + duration,
            cpu_ns=numbers(table, "cpu_ns"),
            launch_ns=numbers(table, "launch_ns"),
            wait_ns=numbers(table, "wait_ns"),
            transfer_ns=numbers(table, "transfer_ns"),
            communication=equals(table, "kind", *COMMUNICATION_KINDS),
            overlapped=numbers(table, "track") == Track.OVERLAPPED,
            compute=equals(table, "kind", *COMPUTE_KINDS),
            host=equals(table, "kind", *HOST_KINDS),
        )

    def chosen(self, rows: BoolArray) -> tuple[IntArray, IntArray]:
        return self.start[rows], self.end[rows]


@dataclass(frozen=True)
class _Windows:
    """Iterations of all ranks, ordered by rank and iteration; positions on the axis."""

    rank: IntArray
    iteration: IntArray
    start: IntArray
    end: IntArray

    @classmethod
    def of(cls, table: pa.Table, spans: _Spans) -> _Windows:
        iteration = numbers(table, "iteration")
        rows = np.flatnonzero(iteration >= 1)
        key = combine(spans.rank[rows], iteration[rows])
        rows = rows[np.argsort(key, kind="stable")]
        starts = group_starts(np.sort(key))
        if not len(rows):
            return cls(rows, rows, rows, rows)
        whole = equals(table, "kind", Kind.ITERATION)[rows]
        named = np.logical_or.reduceat(whole, starts)
        counted = whole | ~np.repeat(named, np.diff(np.r_[starts, len(rows)]))
        limits = np.iinfo(np.int64)
        start = np.minimum.reduceat(np.where(counted, spans.start[rows], limits.max), starts)
        end = np.maximum.reduceat(np.where(counted, spans.end[rows], limits.min), starts)
        return cls(spans.rank[rows[starts]], iteration[rows[starts]], start, end)


def _on_cpu(headers: Mapping[int, RankHeader], rank: IntArray) -> BoolArray:
    ranks = [number for number, header in headers.items() if header.device.kind == "cpu"]
    return np.isin(rank, ranks)


def _layers(
    headers: Mapping[int, RankHeader], spans: _Spans
) -> Iterator[tuple[str, IntArray, IntArray]]:
    """(share, start, end) from the topmost layer down."""
    on_cpu = _on_cpu(headers, spans.rank)
    yield from _communication_layers(spans, spans.communication & ~spans.overlapped)
    yield "host", *spans.chosen(spans.host & on_cpu)
    yield "compute", *spans.chosen(spans.compute)
    yield "host", *spans.chosen(spans.host & ~on_cpu)
    yield from _communication_layers(spans, spans.communication & spans.overlapped)
    yield "dispatch", *_dispatch_gaps(spans)


def _communication_layers(
    spans: _Spans, rows: BoolArray
) -> Iterator[tuple[str, IntArray, IntArray]]:
    split = rows & (spans.wait_ns >= 0)
    end = spans.end[split]
    yield "transfer", end - spans.transfer_ns[split], end
    yield "wait", *spans.chosen(split)
    yield "unsplit", *spans.chosen(rows)


def _dispatch_gaps(spans: _Spans) -> tuple[IntArray, IntArray]:
    """Gaps before device spans that the host launched only after the device had finished."""
    rows = np.flatnonzero((spans.launch_ns != NOT_APPLICABLE) & ~spans.overlapped)
    if len(rows) < 2:
        return rows[:0], rows[:0]
    start, rank = spans.start[rows], spans.rank[rows]
    finished = np.maximum.accumulate(spans.end[rows])[:-1]
    launched = start[1:] + np.minimum(spans.launch_ns[rows][1:], 0)
    late = (finished < start[1:]) & (launched >= finished) & (rank[1:] == rank[:-1])
    return finished[late], start[1:][late]


def _united(
    one: tuple[IntArray, IntArray], other: tuple[IntArray, IntArray]
) -> tuple[IntArray, IntArray]:
    """Disjoint parts that cover what either covers, ordered by start."""
    start, end = np.r_[one[0], other[0]], np.r_[one[1], other[1]]
    order = np.argsort(start, kind="stable")
    low, high = new_parts(start[order], end[order])
    kept = high > low
    low, high = low[kept], high[kept]
    if not len(low):
        return low, high
    opens = np.r_[True, low[1:] > high[:-1]]
    return low[opens], high[np.r_[opens[1:], True]]


def _preempted(headers: Mapping[int, RankHeader], spans: _Spans, windows: _Windows) -> IntArray:
    """(window,) ns of visible compute in which its thread was not on the CPU."""
    hidden = spans.communication & ~spans.overlapped
    hidden |= spans.host & _on_cpu(headers, spans.rank)
    above = Cover.of(*spans.chosen(hidden), np.maximum(spans.cpu_ns[hidden], 0).astype(np.float64))
    compute = np.flatnonzero(spans.compute)
    low, high = new_parts(spans.start[compute], spans.end[compute])
    kept = (high > low) & (spans.cpu_ns[compute] >= 0)
    compute, low, high = compute[kept], low[kept], high[kept]
    visible = high - low - above.length_within(low, high)
    share = (high - low) / (spans.end[compute] - spans.start[compute])
    cpu = spans.cpu_ns[compute] * share - above.amount_within(low, high)
    away = np.clip(np.rint(visible - cpu), 0, visible)
    window = np.searchsorted(windows.start, low, side="right") - 1
    inside = (window >= 0) & (high <= np.r_[windows.end, 0][window])
    total = np.bincount(window[inside], away[inside], minlength=len(windows.start))
    return total.astype(np.int64)
