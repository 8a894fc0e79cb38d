"""What the host does while the device stands still: loading data, collecting garbage.

On the CPU such a span lies inside the pass that it interrupts, and all of it counts. On a GPU the
host runs ahead of the device: while it loads the data of one microbatch the device computes an
earlier one, and a copy that waits for the device to catch up makes the span long without costing
anything. Only the time during which the device has nothing to do is lost:

    host      |── loading of microbatch 3 ──────────|
    device  ── backward 1 ──|   idle    | broadcast |── forward 3 ──
                            |── lost ───|

A forward pass holds the loading of its own microbatch: the device passes its beginning and waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import FORWARD, Bools, Floats, Ints
from detect.observe.cover import axis_of, enclosed_time
from detect.observe.span_index import SpanIndex
from megascan.schema import Kind, Track
from megascan.timeline import equals, numbers

CONTAINERS = (
    "forward",
    "backward",
    "transformer_layer",
    "transformer_layer-backward",
)
"""Spans that hold others; they last on while the device waits inside them."""


@dataclass(frozen=True)
class HostTime:
    """Time lost to spans of the host."""

    lost_ns: Floats
    """(host span,)"""
    inside_ns: Floats
    """(pass,): the part that lies within the pass's own span."""


def loading_time(index: SpanIndex, passes: Bools, phase: Ints, data: Bools) -> HostTime:
    """What the loading of data costs; `phase` is that of each pass."""
    if index.is_cpu:
        inside = enclosed_time(index, passes, data, index.self_time(data))
        return HostTime(_wall_time(index, data), inside)
    owner = _own_passes(index, passes, phase, data)
    start, end = axis_of(index)
    covered_from = start.copy()
    pass_spans = np.flatnonzero(passes)
    owned = owner >= 0
    mine = pass_spans[owner[owned]]
    np.maximum.at(covered_from, mine, end[data][owned])
    cover = _Cover(covered_from, end, _on_device(index))
    within = np.zeros(len(pass_spans))
    since = np.maximum(start[data][owned], start[mine])
    np.add.at(within, owner[owned], cover.idle(since, end[data][owned]))
    return HostTime(cover.idle(start[data], end[data]), within)


def collecting_time(index: SpanIndex, passes: Bools, gc: Bools) -> HostTime:
    """What garbage collection costs."""
    lost = index.duration[gc].astype(np.float64)
    if not index.is_cpu:
        start, end = axis_of(index)
        busy = _on_device(index) & ~equals(index.table, "name", *CONTAINERS)
        if (busy & equals(index.table, "kind", Kind.COMPUTE)).any():
            lost = _Cover(start, end, busy).idle(start[gc], end[gc])
    return HostTime(lost, enclosed_time(index, passes, gc, lost))


def _wall_time(index: SpanIndex, rows: Bools) -> Floats:
    return np.maximum(numbers(index.table, "self_ns")[rows], 0).astype(np.float64)


def _on_device(index: SpanIndex) -> Bools:
    is_iteration = equals(index.table, "kind", Kind.ITERATION)
    on_host = numbers(index.table, "track") == Track.HOST
    return np.asarray(index.counts & ~is_iteration & ~on_host)


def _own_passes(index: SpanIndex, passes: Bools, phase: Ints, data: Bools) -> Ints:
    """Number of the forward pass whose microbatch each data span loads; -1 for none.

    None also where the device reaches the pass only after the loading: nothing was lost in it.
    """
    key = _key(index)
    start, end = axis_of(index)
    forward = np.flatnonzero(phase == FORWARD)
    order = forward[np.argsort(key[passes][forward], kind="stable")]
    if not len(order):
        return np.full(int(data.sum()), -1, dtype=np.int64)
    keys = key[passes][order]
    place = np.minimum(np.searchsorted(keys, key[data]), len(keys) - 1)
    owner = order[place]
    known = (keys[place] == key[data]) & (numbers(index.table, "microbatch")[data] >= 0)
    reached = (start[passes][owner] < end[data]) & (end[data] < end[passes][owner])
    return np.where(known & reached, owner, -1)


def _key(index: SpanIndex) -> Ints:
    """Rank, iteration, chunk and microbatch as one number, for every span."""
    chunk = np.maximum(numbers(index.table, "chunk"), 0)
    microbatch = np.maximum(numbers(index.table, "microbatch"), 0)
    key = index.row * index.shape[1] + index.slot
    key = key * (int(chunk.max(initial=0)) + 1) + chunk
    return np.asarray(key * (int(microbatch.max(initial=0)) + 1) + microbatch)


class _Cover:
    """Union of spans of one axis, asked for what it leaves free."""

    def __init__(self, start: Ints, end: Ints, use: Bools) -> None:
        begins, ends = start[use], end[use]
        order = np.argsort(begins, kind="stable")
        begins, reached = begins[order], np.maximum.accumulate(ends[order])
        opens = np.flatnonzero(np.concatenate([[True], begins[1:] > reached[:-1]]))
        self._begin = begins[opens] if len(begins) else begins
        last = np.concatenate([opens[1:], [len(begins)]]) - 1
        self._end = reached[last] if len(begins) else begins
        length = self._end - self._begin
        self._before = np.cumsum(length) - length

    def idle(self, start: Ints, end: Ints) -> Floats:
        """Time of each stretch that no span covers."""
        free = (end - start) - (self._covered(end) - self._covered(start))
        return np.maximum(free, 0).astype(np.float64)

    def _covered(self, at: Ints) -> Ints:
        """Covered time from the beginning up to `at`."""
        if not len(self._begin):
            return np.zeros_like(at)
        place = np.searchsorted(self._begin, at, side="right") - 1
        known = np.maximum(place, 0)
        inside = np.minimum(at, self._end[known]) - self._begin[known]
        return np.where(place >= 0, self._before[known] + inside, 0)
