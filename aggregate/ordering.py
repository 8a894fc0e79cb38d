"""What causality asks of clocks beyond the fit: the smallest shifts that keep its inequalities."""

from __future__ import annotations

import numpy as np

from aggregate.accuracy import Accuracy
from aggregate.causality import BELIEVED_VIOLATION, Orders, Trust
from aggregate.keys import FloatArray, IntArray, combine, group_lengths, group_starts

_ROUNDS = 200


def ordering_shift(accuracy: Accuracy, orders: Orders, delay_ns: FloatArray) -> FloatArray:
    """(domain,) shifts of the fitted clocks; delay_ns (order,) is that on them.

    Collectives whose ends the fit believes move clocks as far as it takes: the ends must be late
    on one side every time. Messages and bounds move them within the error bars only, and what is
    known exactly as a whole: from the coarsest level to the finest, the sets of the next finer
    level move against one another within the level's error. Matches whose ends disagree move
    nothing.
    """
    num_domains = len(accuracy.violation_ns)
    usable = orders.trust > Trust.DOUBTFUL
    orders, delay_ns = orders.at(usable), delay_ns[usable]
    early, late = orders.early_domain, orders.late_domain
    firm = orders.trust == Trust.FIRM
    unlimited = np.full(num_domains, np.inf)
    shift = order_shifts(early[firm], late[firm], delay_ns[firm], unlimited)
    sets = [np.arange(num_domains), *accuracy.set_at_level[:-1]]
    for level in range(len(accuracy.level_ns) - 1, -1, -1):
        unit = sets[level]
        limit = np.full(num_domains, accuracy.level_ns[level] / 2)
        delay = delay_ns + shift[late] - shift[early]
        shift += order_shifts(unit[early], unit[late], delay, limit)[unit]
    return shift


def order_shifts(
    source: IntArray, destination: IntArray, delay_ns: FloatArray, limit_ns: FloatArray
) -> FloatArray:
    """(domain,) smallest shifts that let each late time come after its early one.

    source, destination  (order,) clock domains of the early and the late time
    delay_ns             (order,) late time less early one on the fitted clocks
    limit_ns             (domain,) error bar; no clock moves further than that

    Each pair of domains gives one bound, shift[destination] − shift[source] ≥ −delay: that of the
    third-worst, so that one or two bad matches move nothing. Bounds are met by relaxation: every
    violated one pulls both its domains by half of what is missing.
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
    source: IntArray, destination: IntArray, delay_ns: FloatArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """(source, destination, least difference of shifts) of each pair of two domains."""
    rows = np.flatnonzero(source != destination)
    pair = combine(source[rows], destination[rows]) if len(rows) else rows
    order = rows[np.lexsort((delay_ns[rows], pair))]
    starts = group_starts(np.sort(pair))
    chosen = starts + np.minimum(BELIEVED_VIOLATION, group_lengths(starts, len(rows))) - 1
    enough = group_lengths(starts, len(rows)) >= BELIEVED_VIOLATION
    worst = order[chosen[enough]]
    return source[worst], destination[worst], -delay_ns[worst].astype(np.float64)
