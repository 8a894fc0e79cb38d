"""Work between communications, for traces in which no passes are marked.

A trainer that marks only its communication still shows what its ranks compute: all of it lies
between one communication and the next, and ranks of one stage communicate in the same order.

    rank 0   |── 1 ──| all_reduce |── 2 ──| all_reduce |──────── 3 ────────| optimizer |
    rank 1   |─── 1 ───| all_red. |─── 2 ───| all_red. |───────── 3 ──────────| optimizer |

So the n-th stretch that nothing covers is an operation. The longest of a microbatch follows the
loss: the backward pass. Communication inside it may be hidden, and so is the waiting in it; the
stretches of the forward pass are the rank's own.

Limit: with pipeline stages a stretch may hold waiting for a message that nobody recorded. Such
traces are not read this way.
"""

from __future__ import annotations

import numpy as np

from detect.observe.observations import BACKWARD, FORWARD, Work
from detect.observe.spans import SpanIndex, axis_of
from detect.thresholds import PASSES
from megascan.arrays import Flags, Floats, Integers, group_lengths, group_starts, united
from megascan.schema import Kind
from megascan.timeline import equals


def segments_of(index: SpanIndex) -> Work | None:
    """Return the stretches between communications, (rank, iteration, number); None without any."""
    begin, end = _stretches(index)
    if not len(begin):
        return None
    cell, since = _cells(index, end)
    known = cell >= 0
    cell, length = cell[known], (end - np.maximum(begin, since))[known].astype(np.float64)
    starts = group_starts(cell)
    count = group_lengths(starts, len(cell))
    if not len(count):
        return None
    usual = int(np.median(count))  # an iteration with another number of them is not comparable
    number = np.arange(len(cell)) - np.repeat(starts, count)
    kept = np.repeat(count == usual, count)
    log_ns = np.full((index.shape[0] * index.shape[1], usual), np.nan)
    log_ns[cell[kept], number[kept]] = np.log(np.maximum(length[kept], 1.0))
    return _without_trifles(log_ns.reshape(*index.shape, usual))


def _stretches(index: SpanIndex) -> tuple[Integers, Integers]:
    """Begin and end on the axis of all ranks of what no communication or host span covers."""
    covers = index.counts & ~equals(index.table, "kind", Kind.ITERATION, Kind.COMPUTE)
    start, end = axis_of(index)
    low, high = united(start[covers], end[covers])
    return high[:-1], low[1:]


def _cells(index: SpanIndex, end: Integers) -> tuple[Integers, Integers]:
    """Rank and iteration of each stretch as one number, and when that iteration began.

    -1 for a stretch that ends between two iterations.
    """
    start, stop = axis_of(index)
    rows = np.flatnonzero(index.counts)
    cell = (index.row * index.shape[1] + index.slot)[rows]
    size = index.shape[0] * index.shape[1]
    low = np.full(size, np.iinfo(np.int64).max)
    high = np.full(size, -1, dtype=np.int64)
    np.minimum.at(low, cell, start[rows])
    np.maximum.at(high, cell, stop[rows])
    order = np.argsort(low)
    place = np.searchsorted(low[order], end, side="left") - 1
    found = order[np.maximum(place, 0)]
    inside = (place >= 0) & (end <= high[found])
    return np.where(inside, found, -1), low[found]


def _without_trifles(log_ns: Floats) -> Work | None:
    """Leave out stretches that take next to nothing, and tell backward passes by their length."""
    seen: Flags = np.asarray(np.isfinite(log_ns).any(axis=(0, 1)))
    typical = np.zeros(len(seen))
    typical[seen] = np.exp(np.nanmedian(log_ns[:, :, seen], axis=(0, 1)))
    kept = typical >= PASSES.least_segment_share * typical.sum()
    if not kept.any():
        return None
    lasting = typical[kept]
    is_backward = lasting > PASSES.backward_ratio * np.median(lasting)
    return Work(
        log_ns=log_ns[:, :, kept],
        phase=np.where(is_backward, BACKWARD, FORWARD).astype(np.int64),
        microbatch=np.cumsum(np.r_[0, is_backward[:-1]]).astype(np.int64),
    )
