"""Array types, composite keys, runs of equal rows and unions of intervals, for all packages.

Composite keys (`combine`, `by_name`): several integer columns as one column, so that one sort
orders by all of them.

Runs (`group_starts` and the functions after it): rows that a sort has put together, given by where
each run starts, so that numpy's `reduceat` works on all runs at once:

    key      4 4 4 7 7 9
    starts   0     3   5         lengths 3 2 1

Unions (`united`, `Cover`): what intervals cover together, for all ranks at once and without a loop
over ranks. Times of all ranks are laid end to end on one axis (`TimeAxis`), so that a running
maximum over all rows is a running maximum of each rank. Each interval keeps the part that no
earlier interval has covered:

    start ▏ ├──────┤                 keeps all
            ▏   ├─────┤                     keeps the end
            ▏  ├─┤                     keeps nothing (it lies inside)

These parts are disjoint; their summed length up to t is a piecewise linear function of t, and the
union's length inside any window is a difference of two values of this function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RowNumbers = npt.NDArray[np.int32]
"""Rows of a table, or ids of things in rows: half the memory, and no table has 2³¹ rows."""
Narrow = npt.NDArray[np.signedinteger[Any]]
"""Integers of any width, as a column is stored."""
Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Singles = npt.NDArray[np.float32]
Number = TypeVar("Number", np.int64, np.float64, np.bool_)

_LARGEST = 2**62


def combine(*columns: Integers) -> Integers:
    """Return one int64 a row that orders rows as the columns do, by the first column first.

    The columns become digits of one number; if the number would not fit in 62 bits, the columns
    combined so far are replaced by the rank of their value among the values that occur.

    >>> combine(np.array([0, 1, 1]), np.array([7, 5, 6]))
    array([2, 3, 4])
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    if not len(key):
        return key
    size = 1
    for column in columns:
        digits, base = _digits(column)
        if size * base > _LARGEST:
            values, key = np.unique(key, return_inverse=True)
            size = len(values)
        key = key * base + digits
        size *= base
    return key


def _digits(column: Integers) -> tuple[Integers, int]:
    """Return a column as numbers from 0, and the number above all of them."""
    lowest, highest = int(column.min()), int(column.max())
    if highest - lowest < _LARGEST // len(column):
        return column - lowest, highest - lowest + 1
    values, digits = np.unique(column, return_inverse=True)
    return digits.astype(np.int64), len(values)


def numbered(*columns: Integers) -> Integers:
    """Number the combinations of values that occur, from 0, in the order of the columns.

    >>> numbered(np.array([3, 1, 3]), np.array([0, 5, 0]))
    array([1, 0, 1])
    """
    return np.unique(combine(*columns), return_inverse=True)[1].astype(np.int64)


def order_within(key: Integers, values: Floats) -> Integers:
    """Return an order of rows by key, which must be 0 or more, and by value within a key.

    It is the order of `numpy.lexsort((values, key))`, except for equal rows, in a third of the
    time: the sort of floats need not be stable, and keys of 16 bits are sorted by radix.
    """
    by_value = np.argsort(values)
    of_few = len(key) and int(key.max()) < 2**16
    narrow = key.astype(np.uint16) if of_few else key
    return by_value[np.argsort(narrow[by_value], kind="stable")]


def order_by(*columns: Integers) -> Integers:
    """Return the order of rows by columns, by the first column first, equal rows as they stand.

    For a first column that nearly is in order and has few equal values, in a third of the time of
    `numpy.lexsort`: only rows that are equal in it are sorted by the other columns.
    """
    first = columns[0]
    order = np.argsort(first, kind="stable")
    together = np.diff(first[order]) == 0
    places = np.flatnonzero(np.r_[False, together] | np.r_[together, False])
    rows = order[places]
    order[places] = rows[np.lexsort([column[rows] for column in reversed(columns)])]
    return order


def group_starts(*sorted_keys: Narrow) -> Integers:
    """Return the index of the first row of each run of rows that are equal in all columns.

    >>> group_starts(np.array([4, 4, 4, 7, 7, 9]))
    array([0, 3, 5])
    """
    first = np.ones(len(sorted_keys[0]), dtype=np.bool_)
    if len(first):
        first[1:] = False
        for key in sorted_keys:
            first[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(first)


def group_lengths(starts: Integers, num_rows: int) -> Integers:
    """Return the number of rows of each run, given where the runs start."""
    return np.diff(starts, append=num_rows)


def group_numbers(starts: Integers, num_rows: int) -> Integers:
    """Return the number of the run, from 0, that each row is in.

    >>> group_numbers(np.array([0, 3, 5]), 6)
    array([0, 0, 0, 1, 1, 2])
    """
    return np.repeat(np.arange(len(starts)), group_lengths(starts, num_rows))


def per_group(
    operation: np.ufunc, values: npt.NDArray[Number], starts: Integers
) -> npt.NDArray[Number]:
    """Return `np.add`, `np.maximum`, … of the values of each run; empty if there are no runs."""
    return np.asarray(operation.reduceat(values, starts) if len(starts) else values[:0])


def linked_sets(one: Integers, other: Integers, num: int) -> Integers:
    """Return for each of `num` things the number of its set, given pairs of linked things.

    Sets are numbered from 0 by their smallest members. In each round, every thing takes the
    smallest number among its links, and then the number of the thing with that number, so that long
    chains take few rounds.

    >>> linked_sets(np.array([1, 4]), np.array([3, 0]), 5)
    array([0, 1, 2, 1, 0])
    """
    smallest = np.arange(num)
    while True:
        before = smallest.copy()
        least = np.minimum(before[one], before[other])
        for ends in (one, other):
            np.minimum.at(smallest, before[ends], least)
            np.minimum.at(smallest, ends, least)
        smallest = smallest[smallest]
        if np.array_equal(smallest, before):
            return np.unique(smallest, return_inverse=True)[1].astype(np.int64)


def rows_of_runs(runs: Iterable[tuple[int, int]]) -> RowNumbers:
    """Return the rows of some runs (begin, end) of rows, at least one, one run after the other."""
    return np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in runs])


def running_numbers(keys: Integers) -> Integers:
    """Count for each row the earlier rows of the same key: [5, 7, 5, 5] → [0, 0, 1, 2]."""
    order = stable_order(keys)
    starts = group_starts(keys[order])
    numbers = np.empty(len(keys), dtype=np.int64)
    numbers[order] = np.arange(len(keys)) - starts[group_numbers(starts, len(keys))]
    return numbers


def stable_order(keys: Integers) -> Integers:
    """Return the order of keys, equal ones as they stand; small keys are sorted by radix."""
    are_small = keys.min(initial=0) >= 0 and keys.max(initial=0) <= np.iinfo(np.uint16).max
    return np.argsort(keys.astype(np.uint16) if are_small else keys, kind="stable")


def mask_of(rows: list[int], num_rows: int) -> Flags:
    """Return flags that are set at the given rows."""
    mask = np.zeros(num_rows, dtype=bool)
    mask[rows] = True
    return mask


def rank_blocks(rank: Narrow, num_rows: int) -> list[slice]:
    """Cut rows ordered by rank into slices of whole ranks: about `num_rows` rows, or one rank."""
    starts = group_starts(rank)
    firsts = starts[group_starts(starts // num_rows)].tolist()
    return [slice(low, high) for low, high in pairwise([*firsts, len(rank)])]


def parted(part: npt.NDArray[np.uint16]) -> list[RowNumbers]:
    """Return the rows, ascending, of each part that has rows, in the order of `part` numbers.

    >>> parted(np.array([1, 0, 1], dtype=np.uint16))
    [array([1], dtype=int32), array([0, 2], dtype=int32)]
    """
    order = np.argsort(part, kind="stable").astype(np.int32)  # 16 bits: sorted by radix
    edges = np.cumsum(np.bincount(part)).tolist()
    return [order[low:high] for low, high in pairwise([0, *edges]) if low < high]


def by_name(row_codes: Narrow, texts: list[str]) -> Integers:
    """Renumber codes by the alphabetic order of their texts.

    A key of such codes does not depend on the order in which a reader met the texts.
    """
    position: Integers = np.zeros(max(len(texts), 1), dtype=np.int64)
    position[np.argsort(np.array(texts, dtype=np.str_))] = np.arange(len(texts))
    renumbered: Integers = position[row_codes]
    return renumbered


@dataclass(frozen=True)
class TimeAxis:
    """Map (rank, time) to one axis on which ranks do not overlap.

    The axis is made from the rows of a table ordered by rank.
    """

    ranks: Integers
    """(rank,) distinct ranks, ascending."""
    shift: Integers
    """(rank,) what to add to a time of that rank."""

    @classmethod
    def of(cls, rank: Integers, start_ns: Integers, end_ns: Integers) -> TimeAxis:
        """Lay out the ranks of a table ordered by rank."""
        starts = group_starts(rank)
        if not len(starts):
            return cls(rank, rank)
        first = np.minimum.reduceat(start_ns, starts)
        length = np.maximum.reduceat(end_ns, starts) - first + 1
        return cls(rank[starts], np.r_[0, np.cumsum(length[:-1])] - first)

    def place(self, rank: Integers, time_ns: Integers) -> Integers:
        """Return the positions of times on the axis."""
        return time_ns + self.shift[np.searchsorted(self.ranks, rank)]


@dataclass(frozen=True)
class Cover:
    """Union of intervals with a quantity (CPU time) spread evenly over each.

    `low` and `high` are the disjoint parts; `length_before` and `amount_before` are the sums over
    all parts before each.
    """

    low: Integers
    high: Integers
    length_before: Integers
    amount: Floats
    amount_before: Floats

    @classmethod
    def of(cls, start: Integers, end: Integers, amount: Floats | None = None) -> Cover:
        """Unite intervals [start, end), ordered by start, given as positions on a TimeAxis."""
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

    def length_within(self, start: Integers, end: Integers) -> Integers:
        """Return the covered length inside each window [start, end)."""
        return self._length_until(end) - self._length_until(start)

    def amount_within(self, start: Integers, end: Integers) -> Floats:
        """Return the summed quantity inside each window; parts that are cut count in proportion."""
        return self._amount_until(end) - self._amount_until(start)

    def _length_until(self, position: Integers) -> Integers:
        part = np.searchsorted(self.low, position, side="right")
        overshoot = np.maximum(np.r_[0, self.high][part] - position, 0)
        return self.length_before[part] - np.where(part > 0, overshoot, 0)

    def _amount_until(self, position: Integers) -> Floats:
        part = np.searchsorted(self.low, position, side="right")
        length = np.r_[1, self.high - self.low][part]
        overshoot = np.clip(np.r_[0, self.high][part] - position, 0, length)
        density = np.r_[0.0, self.amount][part] / length
        return self.amount_before[part] - np.where(part > 0, overshoot * density, 0.0)


def united(start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Return (low, high) of the union of intervals in any order, as disjoint parts in order.

    Parts that touch are joined. Example: [0, 4) [8, 9) [3, 6) [6, 8) → [0, 9).
    """
    order = np.argsort(start, kind="stable")
    low, high = new_parts(start[order], end[order])
    kept = high > low
    low, high = low[kept], high[kept]
    if not len(low):
        return low, high
    opens = np.r_[True, low[1:] > high[:-1]]
    return low[opens], high[np.r_[opens[1:], True]]


def new_parts(start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Return (low, high) of the part that each interval adds to the union of earlier intervals.

    Intervals are ordered by start; for an interval that adds nothing, high <= low.
    """
    if not len(start):
        return start, end
    reached = np.r_[start[0], np.maximum.accumulate(end)[:-1]]
    return np.maximum(start, reached), end


def median_by(key: Integers, values: Floats) -> Floats:
    """Return for each value the median of the values of its key."""
    order = order_within(key, values)
    ordered = key[order]
    first = group_starts(ordered)
    last = first + group_lengths(first, len(key))
    sorted_values = values[order]
    middle = 0.5 * (sorted_values[(first + last - 1) // 2] + sorted_values[(first + last) // 2])
    result = np.empty(len(values))
    result[order] = np.repeat(middle, last - first)
    return result


def lower_medians(key: Integers, values: Floats) -> tuple[Integers, Floats]:
    """Return the keys that occur, ascending, and the lower median of each one's values.

    >>> lower_medians(np.array([7, 4, 7]), np.array([0.5, 2.0, 0.25]))
    (array([4, 7]), array([2.  , 0.25]))
    """
    order = order_within(key, values)
    ordered = key[order]
    first = group_starts(ordered)
    middle = first + (group_lengths(first, len(key)) - 1) // 2
    return ordered[first], values[order][middle]
