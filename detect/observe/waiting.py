"""Time in which a rank does nothing but wait for others.

Synchronous communication keeps its rank from everything else, so all of its waiting counts. What
waits beside computing counts only where nothing is computed:

    compute       |── own ──|           |── own ──|
    synchronous             |── wait ──|
    overlapped         |────── wait ──────────────────── |
    waiting                 |▒▒▒▒▒▒▒▒▒▒|          |▒▒▒▒▒▒|
"""

from __future__ import annotations

import numpy as np

from detect.observe.spans import SpanIndex, axis_of
from megascan.arrays import Cover, Floats, Integers, united
from megascan.schema import COMMUNICATION_KINDS, Kind, Track
from megascan.timeline import equals, numbers


def waiting_time(index: SpanIndex) -> Floats | None:
    """Return the time of waiting, (rank, iteration) ns; None where no communication is split."""
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
