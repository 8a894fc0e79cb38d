"""Which spans lie in which, and what time no span covers."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from detect.observations import Bools, Floats, Ints


class SpanTimes(Protocol):
    """Arrays over all spans, ordered by (rank, start, longest first)."""

    row: Ints
    slot: Ints
    start: Ints
    duration: Ints
    counts: Bools

    @property
    def shape(self) -> tuple[int, int]:
        """(ranks, iterations)."""


def axis_of(spans: SpanTimes) -> tuple[Ints, Ints]:
    """Starts and ends, (span,) each, on one axis on which ranks follow each other."""
    if not len(spans.start):
        return spans.start, spans.start
    origin = int(spans.start.min())
    length = int((spans.start + spans.duration).max()) - origin + 1
    start = spans.start - origin + spans.row * length
    return start, start + spans.duration


def enclosing(spans: SpanTimes, outer: Bools, inner: Bools) -> Ints:
    """For each `inner` span the number of the `outer` span it starts in, -1 for none.

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


def enclosed_time(spans: SpanTimes, outer: Bools, inner: Bools, time_ns: Floats) -> Floats:
    """For each `outer` span, the summed `time_ns` of the `inner` spans that start in it."""
    owner = enclosing(spans, outer, inner)
    total = np.zeros(int(outer.sum()))
    np.add.at(total, owner[owner >= 0], time_ns[owner >= 0])
    return total


def uncovered_time(spans: SpanTimes, iteration: Bools) -> Floats:
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
