"""How far two ranks' clocks may still be apart: the error bar of every comparison across ranks.

It is not the residual of all anchors together. A rank may have thousands of exact ends inside its
node and a dozen poor ones that tie the node to the others: the poor ones alone tell how far the
nodes may be apart. So classes of anchors are taken from the most exact to the least, each with the
99th percentile of its own distances, and two clocks are known to each other as well as the first
class that joins their sets:

    tp  1 µs   {0 1} {2 3}         0 and 1 within 1 µs
    dp 15 µs   {0 1 2 3}           0 and 2 within 15 µs
    mp 50 µs                       not needed: says nothing that is not known better

Percentiles, not standard errors: an end that is late by its place in a ring is late every time,
and no number of anchors averages it away. What contradicts causality on the final clocks widens
the bar further (`aggregate.causality`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from aggregate.anchors import Anchors
from aggregate.keys import BoolArray, FloatArray, IntArray, group_starts
from aggregate.robust import Lines

_QUANTILE = 0.99


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Error bars between clock domains.

    level_ns      (level,) error within the sets of a level, rising
    set_at_level  (level, domain) number of the set that a domain is in
    violation_ns  (domain,) how far causality is broken by a clock
    level_of      (domain,) the level at which a domain joins its component's reference
    level_of_class  (label,) level of each class of anchors, beyond the last if it joins nothing
    """

    level_ns: FloatArray
    set_at_level: IntArray
    violation_ns: FloatArray
    level_of: IntArray
    level_of_class: IntArray

    def between(self, one: IntArray, other: IntArray) -> FloatArray:
        """Error bar, ns, between domains; infinite where no class joins them."""
        error = np.full(np.broadcast(one, other).shape, np.inf)
        for level in range(len(self.level_ns) - 1, -1, -1):
            joined = self.set_at_level[level][one] == self.set_at_level[level][other]
            error[joined] = self.level_ns[level]
        widest = np.maximum(error, np.maximum(self.violation_ns[one], self.violation_ns[other]))
        result: FloatArray = np.where(one == other, 0.0, widest)
        return result

    def of_domains(self) -> FloatArray:
        """(domain,) error bar to the component's reference, 0 for a domain without any link."""
        levels = np.r_[self.level_ns, 0.0]
        error: FloatArray = np.maximum(levels[self.level_of], self.violation_ns)
        return error


def distances(anchors: Anchors, lines: Lines, rows: IntArray) -> FloatArray:
    """(row,) how far each end lies from the others of its event, or may lie from them."""
    return np.maximum(np.abs(lines.residual_ns[rows]), anchors.slack_ns[rows])


def assess(
    anchors: Anchors, lines: Lines, domain: IntArray, extent_ns: FloatArray, references: IntArray
) -> Accuracy:
    """Levels of a fit.

    domain      (rank,)
    extent_ns   (anchor,) from the first start to the last end of the anchor's event, which bounds
                any error where a class has too few ends for a statistic
    references  (domain,) reference of each domain's component
    """
    num_domains = len(lines.offset_ns)
    classes = sorted(
        _classes(anchors, lines, domain[anchors.rank], extent_ns), key=lambda each: each.error_ns
    )
    sets = np.arange(num_domains)
    rows: list[IntArray] = []
    level_of_class = np.full(int(anchors.label.max(initial=-1)) + 1, len(classes))
    for level, each in enumerate(classes):
        sets = _joined(sets, each.links, num_domains)
        rows.append(sets)
        level_of_class[each.label] = level
    set_at_level = np.array(rows, dtype=np.int64).reshape(len(rows), num_domains)
    return Accuracy(
        level_ns=np.array([each.error_ns for each in classes], dtype=np.float64),
        set_at_level=set_at_level,
        violation_ns=np.zeros(num_domains),
        level_of=_levels(set_at_level, references),
        level_of_class=level_of_class,
    )


@dataclass(frozen=True)
class _Class:
    """A class of anchors that links domains, in pairs (link, 2), and how well."""

    label: int
    error_ns: float
    links: IntArray


def _classes(
    anchors: Anchors, lines: Lines, domain: IntArray, extent_ns: FloatArray
) -> Iterator[_Class]:
    believed = lines.weights > 0
    num_domains = len(lines.offset_ns)
    for label in range(int(anchors.label.max(initial=-1)) + 1):
        rows = np.flatnonzero(believed & (anchors.label == label))
        links = _links(anchors.event[rows], domain[rows], num_domains)
        if len(links):
            error = _error(anchors, lines, rows, domain[rows], float(extent_ns[rows].max()))
            yield _Class(label, error, links)


def _links(event: IntArray, domain: IntArray, num_domains: int) -> IntArray:
    same = (event[1:] == event[:-1]) & (domain[1:] != domain[:-1])
    pairs = np.unique(domain[:-1][same] * num_domains + domain[1:][same])
    return np.stack([pairs // num_domains, pairs % num_domains], axis=1)


def _error(
    anchors: Anchors, lines: Lines, rows: IntArray, domain: IntArray, bound_ns: float
) -> float:
    """99th percentile of a class, widened for the parameters that its ends also had to fix.

    Where they had to fix as many as there are ends, only `bound_ns` is certain.
    """
    distance = distances(anchors, lines, rows)
    num_free = len(rows) - len(group_starts(anchors.event[rows]))
    used = np.flatnonzero(np.bincount(domain))
    num_parameters = len(used) - 1 + int(np.count_nonzero(lines.drift[used]))
    left = num_free - num_parameters
    if (anchors.slack_ns[rows] > 0).any():  # messages: the tighter a bound, the more it tells
        error = _weighted_quantile(distance, lines.weights[rows])
    else:
        place = int(np.ceil(_QUANTILE * (len(rows) - 1)))
        error = float(np.partition(distance, place)[place])
    if left <= 0:
        return max(error, bound_ns)
    return error * float(np.sqrt(num_free / left))


def _weighted_quantile(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    place = int(np.searchsorted(reached, _QUANTILE * reached[-1]))
    return float(values[order[min(place, len(order) - 1)]])


def _joined(sets: IntArray, links: IntArray, num_domains: int) -> IntArray:
    """Sets after further links (link, 2) between domains."""
    ends = sets[links]
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), (num_domains, num_domains))
    _, labels = connected_components(graph, directed=False)
    return np.asarray(labels[sets], dtype=np.int64)


def _levels(set_at_level: IntArray, references: IntArray) -> IntArray:
    """(domain,) first level that joins a domain to its reference; -1 without one.

    A reference itself counts where it first joins anybody.
    """
    num_levels, num_domains = set_at_level.shape
    level = np.full(num_domains, -1, dtype=np.int64)
    own = references == np.arange(num_domains)
    for number in range(num_levels - 1, -1, -1):
        sets = set_at_level[number]
        alone: BoolArray = np.bincount(sets, minlength=num_domains)[sets] == 1
        level[np.where(own, ~alone, sets == sets[references])] = number
    return level
