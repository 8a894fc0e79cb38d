"""Unions of intervals over all ranks at once, without a loop over them.

Time of every rank is laid end to end on one axis, so that a running maximum over all rows is one
over each rank. Each interval keeps the part that no earlier one has covered:

    start ▏ ├──────┤                 keeps all
            ▏   ├─────┤                     keeps the end
            ▏  ├─┤                     keeps nothing (it lies inside)

These parts are disjoint; their summed length up to t is a piecewise linear function, and the
union's length inside any window is a difference of two of its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aggregate.keys import FloatArray, IntArray, group_starts


@dataclass(frozen=True)
class TimeAxis:
    """Maps (rank, time) to one axis on which ranks do not overlap.

    Made from the table's own rows, which are ordered by rank.
    """

    ranks: IntArray
    """(rank,) distinct ranks, ascending."""
    shift: IntArray
    """(rank,) what to add to a time of that rank."""

    @classmethod
    def of(cls, rank: IntArray, start_ns: IntArray, end_ns: IntArray) -> TimeAxis:
        """From all spans of a table ordered by rank."""
        starts = group_starts(rank)
        if not len(starts):
            return cls(rank, rank)
        first = np.minimum.reduceat(start_ns, starts)
        length = np.maximum.reduceat(end_ns, starts) - first + 1
        return cls(rank[starts], np.r_[0, np.cumsum(length[:-1])] - first)

    def place(self, rank: IntArray, time_ns: IntArray) -> IntArray:
        """Positions of times on the axis."""
        return time_ns + self.shift[np.searchsorted(self.ranks, rank)]


@dataclass(frozen=True)
class Cover:
    """Union of intervals with a quantity (CPU time) spread evenly over each.

    `low`, `high` are the disjoint parts; `length_before`, `amount_before` what precedes each.
    """

    low: IntArray
    high: IntArray
    length_before: IntArray
    amount: FloatArray
    amount_before: FloatArray

    @classmethod
    def of(cls, start: IntArray, end: IntArray, amount: FloatArray | None = None) -> Cover:
        """Union of [start, end), ordered by start, positions on a TimeAxis."""
        low, high = new_parts(start, end)
        kept = high > low
        low, high = low[kept], high[kept]
        share = np.zeros(len(low))
        if amount is not None:
            share = amount[kept] * (high - low) / (end[kept] - start[kept])
        return cls(
            low,
            high,
            np.r_[0, np.cumsum(high - low)].astype(np.int64),
            share,
            np.r_[0.0, np.cumsum(share)],
        )

    def length_within(self, start: IntArray, end: IntArray) -> IntArray:
        """Covered length inside each window [start, end)."""
        return self._length_until(end) - self._length_until(start)

    def amount_within(self, start: IntArray, end: IntArray) -> FloatArray:
        """Summed quantity inside each window, in proportion where a part is cut."""
        return self._amount_until(end) - self._amount_until(start)

    def _length_until(self, position: IntArray) -> IntArray:
        part = np.searchsorted(self.low, position, side="right")
        overshoot = np.maximum(np.r_[0, self.high][part] - position, 0)
        return self.length_before[part] - np.where(part > 0, overshoot, 0)

    def _amount_until(self, position: IntArray) -> FloatArray:
        part = np.searchsorted(self.low, position, side="right")
        length = np.r_[1, self.high - self.low][part]
        overshoot = np.clip(np.r_[0, self.high][part] - position, 0, length)
        density = np.r_[0.0, self.amount][part] / length
        return self.amount_before[part] - np.where(part > 0, overshoot * density, 0.0)


def new_parts(start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """(low, high) of what each interval adds to the union of those before it.

    Intervals are ordered by start; one that adds nothing has high <= low.
    """
    if not len(start):
        return start, end
    reached = np.r_[start[0], np.maximum.accumulate(end)[:-1]]
    return np.maximum(start, reached), end
