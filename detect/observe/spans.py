"""The span table as arrays: each span's place in the matrices, what lies in what, what none covers.

`SpanIndex` gives every span its row (rank) and slot (iteration). Spans of all ranks are put on one
axis, one rank after the other, so that "which pass holds this collective" is one sorted search,
and so is how long a rank only waits:

    rank 0 |── forward ──|── backward ──|   rank 1 |── forward ──|── backward ──|
              └ gc: starts in the forward pass of rank 0            └ reduction: ...
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

import numpy as np

from detect.observe.observations import BACKWARD, FORWARD
from detect.thresholds import WINDOW
from megascan.arrays import Cover, Flags, Floats, Integers, united
from megascan.schema import COMMUNICATION_KINDS, Kind, Phase, Track
from megascan.timeline import Timeline, equals, is_sampled, numbers
from megascan.vocabulary import CountsAs, names_of

WORK_NAMES = {
    name: phase
    for phase, text in ((FORWARD, Phase.FORWARD), (BACKWARD, Phase.BACKWARD))
    for name in names_of(CountsAs.PASS, phases=[text])
}


class SpanIndex:
    """Columns of the span table as arrays, with each span's row (rank) and slot (iteration)."""

    def __init__(self, timeline: Timeline) -> None:
        table = timeline.spans
        self.table = table
        self.ranks: Integers = np.array(sorted(timeline.headers), dtype=np.int64)
        iteration = numbers(table, "iteration")
        self.iterations: Integers = np.unique(iteration[iteration > 0])
        self.rank = numbers(table, "rank")
        self.row = np.searchsorted(self.ranks, self.rank)
        self.slot = np.searchsorted(self.iterations, iteration)
        self.counts = iteration > 0
        self.track = numbers(table, "track")
        self.start = numbers(table, "start_ns")
        self.duration = numbers(table, "duration_ns")
        self.is_cpu = all(header.device.kind == "cpu" for header in timeline.headers.values())
        self.uses_cpu_time = self._has_cpu_time()
        self.is_sampled = is_sampled(timeline)
        """Modules of some layers only were recorded, others in each iteration."""

    @property
    def shape(self) -> tuple[int, int]:
        """(ranks, iterations)."""
        return len(self.ranks), len(self.iterations)

    @cached_property
    def axis(self) -> tuple[Integers, Integers]:
        """Starts and ends of all spans on one axis, as `axis_of` lays them out."""
        return _on_one_axis(self)

    def named(self, names: Iterable[str]) -> Flags:
        """Return spans of these names that belong to an iteration."""
        return equals(self.table, "name", *names) & self.counts

    def _has_cpu_time(self) -> bool:
        if not self.is_cpu:
            return False
        cpu = numbers(self.table, "self_cpu_ns")[self.named(WORK_NAMES)]
        return len(cpu) > 0 and bool((cpu > 0).mean() > WINDOW.cpu_time_share)

    def self_time(self, rows: Flags) -> Floats:
        """Return the self time of the spans, CPU time where the ranks share cores and it was
        measured.
        """
        column = "self_cpu_ns" if self.uses_cpu_time else "self_ns"
        return np.maximum(numbers(self.table, column)[rows], 0).astype(np.float64)

    def summed(self, rows: Flags, time_ns: Floats) -> Floats:
        """Sum by (rank, iteration); NaN where a rank has no such span in any iteration."""
        flat = self.row[rows] * self.shape[1] + self.slot[rows]
        total = np.bincount(flat, weights=time_ns, minlength=self.shape[0] * self.shape[1])
        table = np.asarray(total.reshape(self.shape), dtype=np.float64)
        table[~(table > 0).any(axis=1)] = np.nan
        return table


class SpanTimes(Protocol):
    """Arrays over all spans, ordered by (rank, start, longest first)."""

    row: Integers
    slot: Integers
    start: Integers
    duration: Integers
    counts: Flags

    @property
    def shape(self) -> tuple[int, int]:
        """(ranks, iterations)."""


def axis_of(spans: SpanTimes) -> tuple[Integers, Integers]:
    """Return starts and ends, (span,) each, on one axis on which ranks follow each other."""
    return spans.axis if isinstance(spans, SpanIndex) else _on_one_axis(spans)


def _on_one_axis(spans: SpanTimes) -> tuple[Integers, Integers]:
    if not len(spans.start):
        return spans.start, spans.start
    origin = int(spans.start.min())
    length = int((spans.start + spans.duration).max()) - origin + 1
    start = spans.start - origin + spans.row * length
    return start, start + spans.duration


def enclosing(spans: SpanTimes, outer: Flags, inner: Flags) -> Integers:
    """Return for each `inner` span the number of the `outer` span it starts in, -1 for none.

    Numbers count the `outer` spans in the order of the table; those of one rank must not overlap.
    """
    start, end = axis_of(spans)
    outer_start, outer_end = start[outer], end[outer]
    if not len(outer_start):
        return np.full(int(inner.sum()), -1, dtype=np.int64)
    order = np.argsort(outer_start, kind="stable")
    place = np.searchsorted(outer_start[order], start[inner], side="right") - 1
    inside = (place >= 0) & (start[inner] < outer_end[order][np.maximum(place, 0)])
    return np.where(inside, order[np.maximum(place, 0)], -1)


def enclosed_time(spans: SpanTimes, outer: Flags, inner: Flags, time_ns: Floats) -> Floats:
    """Return for each `outer` span, the summed `time_ns` of the `inner` spans that start in it."""
    owner = enclosing(spans, outer, inner)
    total = np.zeros(int(outer.sum()))
    np.add.at(total, owner[owner >= 0], time_ns[owner >= 0])
    return total


def uncovered_time(spans: SpanTimes, iteration: Flags) -> Floats:
    """Time within iterations that lies in no span, (rank, iteration).

    Gaps are counted from the start of the iteration up to its last span: what follows is the
    trainer's own end of the iteration (logging).
    """
    start, end = axis_of(spans)
    end = np.where(iteration, start, end)  # an iteration span only marks where it begins
    use = np.flatnonzero(spans.counts)
    order = use[np.argsort(start[use], kind="stable")]
    reached = np.maximum.accumulate(end[order]) if len(order) else end[order]
    gap = np.maximum(start[order][1:] - reached[:-1], 0)
    row, slot = spans.row[order], spans.slot[order]
    same = (row[1:] == row[:-1]) & (slot[1:] == slot[:-1])
    num_ranks, num_iterations = spans.shape
    flat = row[1:][same] * num_iterations + slot[1:][same]
    total = np.bincount(flat, weights=gap[same], minlength=num_ranks * num_iterations)
    return np.asarray(total.reshape(num_ranks, num_iterations), dtype=np.float64)


def waiting_time(index: SpanIndex) -> Floats | None:
    """Return the time in which a rank does nothing but wait for others, (rank, iteration) ns.

    Synchronous communication keeps its rank from everything else, so all of its waiting counts.
    What waits beside computing counts only where nothing is computed:

        compute       |── own ──|           |── own ──|
        synchronous             |── wait ──|
        overlapped         |────── wait ──────────────────── |
        waiting                 |▒▒▒▒▒▒▒▒▒▒|          |▒▒▒▒▒▒|

    None where no communication is split.
    """
    wait = numbers(index.table, "wait_ns")
    waits = equals(index.table, "kind", *COMMUNICATION_KINDS) & (wait >= 0) & index.counts
    if not waits.any():
        return None
    start, end = axis_of(index)
    beside = numbers(index.table, "track") == Track.OVERLAPPED
    works = equals(index.table, "kind", Kind.COMPUTE, Kind.OPTIMIZER) & index.counts
    alone = _Layer(start[waits & ~beside], (start + wait)[waits & ~beside])
    busy = _Layer(start[works], end[works])
    covered = alone.with_more(busy)
    either = covered.with_more(_Layer(start[waits & beside], (start + wait)[waits & beside]))
    low, high = _iterations(index, start, end)
    length = alone.within(low, high) + either.within(low, high) - covered.within(low, high)
    return np.asarray(length.reshape(index.shape), dtype=np.float64)


class _Layer:
    """A union of intervals."""

    def __init__(self, start: Integers, end: Integers) -> None:
        self._start, self._end = united(start, end)

    def with_more(self, other: _Layer) -> _Layer:
        return _Layer(np.r_[self._start, other._start], np.r_[self._end, other._end])

    def within(self, low: Integers, high: Integers) -> Integers:
        return Cover.of(self._start, self._end).length_within(low, high)


def _iterations(index: SpanIndex, start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Begin and end of each (rank, iteration), flat; the same moment where nothing was recorded."""
    cell = (index.row * index.shape[1] + index.slot)[index.counts]
    low = np.full(index.shape[0] * index.shape[1], np.iinfo(np.int64).max)
    high = np.zeros(len(low), dtype=np.int64)
    np.minimum.at(low, cell, start[index.counts])
    np.maximum.at(high, cell, end[index.counts])
    return np.minimum(low, high), high
