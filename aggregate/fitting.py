"""From anchors to clock lines that causality allows, and how far they may be off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aggregate.accuracy import Accuracy, assess
from aggregate.causality import Causality, believed_gap, bounded_solution
from aggregate.keys import BoolArray, FloatArray, IntArray, group_starts
from aggregate.line_problem import LineProblem
from aggregate.robust import Lines, estimate_noise, fit_lines, unmoved_lines
from aggregate.ties import Ties, references

LARGEST_DRIFT_ERROR = 10e-6
"""A drift whose standard error is larger is not claimed but set to 0 (a ratio)."""
_GROSS_SIGMAS = 5.0


def fit_clocks(ties: Ties, *, with_drift: bool = True) -> Lines:
    """Lines of all domains; a drift that the window cannot determine is left out.

    Where they break causality grossly, the robust fit has settled on wrong ends (half of a class
    may be late by a slow link). It is then begun again where causality is kept, and that result is
    taken if it makes the anchors agree better. So a handful of wrong matches cannot force it.
    """
    anchors = ties.anchors
    problem = LineProblem.of(anchors, ties.domain[anchors.rank], ties.num_domains)
    if ties.num_domains == 1 or not len(anchors.event):
        return unmoved_lines(problem)
    drifting = np.full(ties.num_domains, with_drift)
    noise = _noise(ties, problem, drifting)
    lines = _certain_lines(problem, noise, drifting)
    orders = ties.causality.orders(lines.common)
    if believed_gap(orders, orders.delay_ns(lines.common)) <= _GROSS_SIGMAS * lines.noise_ns:
        return lines
    drifting = lines.drift != 0
    start = bounded_solution(problem, noise, drifting, lines.solution, ties.causality)
    noise_there = _noise(ties, problem, drifting, start)
    if np.log(noise_there).sum() >= np.log(noise).sum():
        return lines
    return _certain_lines(problem, noise_there, drifting, start)


def _certain_lines(
    problem: LineProblem,
    noise: FloatArray,
    drifting: BoolArray,
    start: FloatArray | None = None,
) -> Lines:
    """Fitted lines with those of the drifts only that are known well enough."""
    drifting = drifting & (np.bincount(problem.domain, minlength=problem.num_domains) > 2)
    while True:
        lines = fit_lines(problem, noise, drifting, start)
        certain = drifting & (lines.drift_error <= LARGEST_DRIFT_ERROR)
        if (certain == drifting).all():
            return lines
        drifting = certain


def _noise(
    ties: Ties,
    problem: LineProblem,
    drifting: BoolArray,
    start: FloatArray | None = None,
) -> FloatArray:
    """(anchor,) deviations: of collectives about common lines, of messages about their own.

    The messages of each pair of domains have two lines to themselves, so that a slow link does not
    make collectives look inexact.
    """
    anchors, num_collective = ties.anchors, ties.num_collective
    parts = []
    if num_collective:
        rows = np.arange(num_collective)
        collectives = problem.thinned(rows) if num_collective < len(anchors.event) else problem
        label, slack = anchors.label[rows], anchors.slack_ns[rows]
        parts.append(estimate_noise(collectives, label, slack, drifting, start))
    if num_collective < len(anchors.event):
        messages = anchors.rows(np.arange(num_collective, len(anchors.event)))
        pairs = ties.domain[messages.rank].reshape(-1, 2)
        _, pair = np.unique(pairs[:, 0] * ties.num_domains + pairs[:, 1], return_inverse=True)
        own: IntArray = (2 * pair[:, None] + np.arange(2)).ravel()
        apart = LineProblem.of(messages, own, int(own.max()) + 1)
        parts.append(estimate_noise(apart, messages.label, messages.slack_ns))
    return np.concatenate(parts)


def relative_lines(
    lines: Lines, reference_of: IntArray, component: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Offset (at each domain's centre) and drift of each domain against its reference's clock."""
    reference = reference_of[component]
    rate = 1.0 + lines.drift[reference]
    drift = (1.0 + lines.drift) / rate - 1.0
    offset = (lines.offset_ns - lines.offset_ns[reference]) / rate
    offset += lines.centre_ns[reference] - lines.centre_ns
    return offset, drift


def causality_of(ties: Ties, lines: Lines) -> Causality:
    """With what a fit believes of the collectives' ends."""
    believed = np.zeros(len(ties.causality.members.event), dtype=np.bool_)
    believed[ties.member_rows] = lines.weights[: ties.num_collective] > 0
    return replace(ties.causality, believed=believed)


def accuracy_of(ties: Ties, lines: Lines, component: IntArray) -> Accuracy:
    """Error bars of a fit, before contradictions."""
    reference = references(ties.domain, component)[component]
    return assess(ties.anchors, lines, ties.domain, _extents_ns(ties, lines), reference)


def _extents_ns(ties: Ties, lines: Lines) -> FloatArray:
    """(anchor,) from the first start to the last end of its event."""
    anchors = ties.anchors
    if not len(anchors.event):
        return np.zeros(0)
    domain, starts = ties.domain[anchors.rank], group_starts(anchors.event)
    first = np.minimum.reduceat(lines.common(domain, ties.start_ns), starts)
    last = np.maximum.reduceat(lines.common(domain, anchors.end_ns), starts)
    return np.asarray(last - first)[anchors.event]
