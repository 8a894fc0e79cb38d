"""A receive ends after its send started: what that asks of clocks beyond the fit."""

from __future__ import annotations

import numpy as np

from aggregate.keys import FloatArray, IntArray, combine, group_lengths, group_starts

_BELIEVED_VIOLATION = 3
"""The third-worst message of a pair of clocks counts: one or two bad matches move nothing."""
_ROUNDS = 200


def order_shifts(
    source: IntArray, destination: IntArray, delay_ns: IntArray, limit_ns: FloatArray
) -> FloatArray:
    """(domain,) smallest shifts that let messages end after they were sent.

    source, destination  (message,) clock domains
    delay_ns             (message,) receive's end less send's start on the fitted clocks
    limit_ns             (domain,) error bar; no clock moves further than that

    Each pair of domains gives one bound, shift[destination] − shift[source] ≥ −delay. They are
    met by relaxation: every violated bound pulls both its domains by half of what is missing.
    """
    shift = np.zeros(len(limit_ns))
    bounds = _bounds(source, destination, delay_ns)
    if not (bounds[2] > 0).any():
        return shift
    early, late, least = bounds
    for _ in range(_ROUNDS):
        missing = np.maximum(least - (shift[late] - shift[early]), 0.0)
        if missing.max() < 1.0:
            break
        pulled = np.flatnonzero(missing)
        ends = np.r_[late[pulled], early[pulled]]
        pull = np.bincount(ends, np.r_[missing[pulled], -missing[pulled]] / 2, len(shift))
        shift += pull / np.maximum(np.bincount(ends, minlength=len(shift)), 1)
        shift = np.clip(shift, -limit_ns, limit_ns)
    return shift


def _bounds(
    source: IntArray, destination: IntArray, delay_ns: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """(source, destination, least difference of shifts) of each pair of two domains."""
    rows = np.flatnonzero(source != destination)
    pair = combine(source[rows], destination[rows]) if len(rows) else rows
    order = rows[np.lexsort((delay_ns[rows], pair))]
    starts = group_starts(np.sort(pair))
    chosen = starts + np.minimum(_BELIEVED_VIOLATION, group_lengths(starts, len(rows))) - 1
    enough = group_lengths(starts, len(rows)) >= _BELIEVED_VIOLATION
    worst = order[chosen[enough]]
    return source[worst], destination[worst], -delay_ns[worst].astype(np.float64)
