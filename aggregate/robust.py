"""Clock lines that a few wrong anchors do not move: iteratively reweighted least squares.

Weights come from the residuals: Huber's first, then Tukey's biweight, which gives gross errors no
weight at all (Holland & Welsch, Comm. Statist. A6, 1977). Large problems are first solved on a
part of their events, and from there on all of them.

How much anchors scatter is estimated beforehand, for each class of anchors (the collectives of one
parallel axis, operation and size) from its median residual: the few events that tie nodes together
must not be thrown out because the many inside a node are more exact.

Such rounds settle near where they begin. They begin with all anchors believed, unless a better
place is known (`aggregate.causality`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from aggregate.keys import BoolArray, FloatArray, IntArray
from aggregate.line_problem import LineProblem

_HUBER, _TUKEY = 1.345, 4.685
"""Tuning for 95 % efficiency on normal noise, in standard deviations."""
_ROUNDS = 25
_FINEST_NOISE_NS = 50.0
"""Timers are not better than this; below it residuals are rounding."""
_SETTLED = 0.05
"""Rounds end when no clock's residuals move by more than this part of the noise on average."""
_FIRST_NOISE_NS = 1e3
"""Small, so that no expectation about drifts has a part in where the rounds begin."""
_MAD_TO_SIGMA = 1.4826
_THINNED_ANCHORS = 200_000
_ENOUGH_ANCHORS = 30
_MEDIAN_OF = 50_000

_Weigh: TypeAlias = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Fitted lines: common = local + offset_ns + drift · (local − centre_ns), plus a constant.

    offset_ns, drift, centre_ns, drift_error, num_anchors (domain,); drift_error is a standard
    error.
    weights (anchor,) are relative, 0 for rejected anchors; residual_ns (anchor,) is the distance
    from the mean of the event's other members; noise_ns is the median anchor's deviation.
    solution (2 · domain,) is what the problem has found.
    """

    solution: FloatArray

    offset_ns: FloatArray
    drift: FloatArray
    centre_ns: IntArray
    drift_error: FloatArray
    num_anchors: IntArray
    weights: FloatArray
    residual_ns: FloatArray
    noise_ns: float

    def common(self, domain: IntArray, time_ns: IntArray) -> FloatArray:
        """(time,) common time of each local time of a domain, up to one constant."""
        value = (time_ns - self.centre_ns[domain]).astype(np.float64)
        return np.asarray(value + self.offset_ns[domain] + self.drift[domain] * value)


@dataclass(frozen=True)
class _Noise:
    """Standard deviation of anchors: that of their class and their own slack together.

    `samples` holds some rows of each class, enough for a median.
    """

    label: IntArray
    slack_ns: FloatArray
    samples: tuple[IntArray, ...]

    @classmethod
    def classes(cls, label: IntArray, slack_ns: FloatArray) -> _Noise:
        rows = (np.flatnonzero(label == number) for number in range(int(label.max(initial=-1)) + 1))
        return cls(label, slack_ns, tuple(r[:: len(r) // _MEDIAN_OF + 1] for r in rows))

    def of(self, problem: LineProblem, residual: FloatArray, weights: FloatArray) -> FloatArray:
        """(anchor,) deviations, that of the class and the slack together."""
        total: FloatArray = np.hypot(
            self.of_classes(problem, residual, weights)[self.label], self.slack_ns
        )
        return total

    def of_classes(
        self, problem: LineProblem, residual: FloatArray, weights: FloatArray
    ) -> FloatArray:
        """(class,) deviations, from residuals freed of the anchor's own pull on the mean."""
        deviation = np.full(len(self.samples), _FINEST_NOISE_NS)
        for number, rows in enumerate(self.samples):
            if len(rows):
                others = np.sqrt(problem.weight_of_others(weights, rows))
                median = float(np.median(np.abs(residual[rows]) / others))
                deviation[number] = max(_MAD_TO_SIGMA * median, _FINEST_NOISE_NS)
        return deviation


def estimate_noise(
    problem: LineProblem,
    label: IntArray,
    slack_ns: FloatArray,
    drifting: BoolArray | None = None,
    start: FloatArray | None = None,
) -> FloatArray:
    """(anchor,) standard deviation of each anchor about the lines of `problem`.

    label     (anchor,) class whose anchors have the same noise, from 0
    slack_ns  (anchor,) further standard deviation of an anchor that is known
    drifting  (domain,) whose drift is free, all without
    start     (2 · domain,) solution to begin with
    """
    rows = thin_rows(problem, label)
    part, noise = problem.thinned(rows), _Noise.classes(label[rows], slack_ns[rows])
    if drifting is None:
        drifting = np.ones(problem.num_domains, dtype=np.bool_)
    first = np.full(len(rows), _FIRST_NOISE_NS)
    solution, weights = _reweighted(
        part, first, drifting, rounds=_BOTH, noise=noise, solution=start
    )
    deviation = noise.of_classes(part, part.residuals(solution, weights), weights)
    everywhere: FloatArray = np.hypot(deviation[label], slack_ns)
    return everywhere


def fit_lines(
    problem: LineProblem,
    deviation_ns: FloatArray,
    drifting: BoolArray,
    start: FloatArray | None = None,
) -> Lines:
    """Solve for all domains at once.

    deviation_ns  (anchor,) standard deviations
    drifting      (domain,) whose drift is free
    start         (2 · domain,) solution to begin with
    """
    solution, rounds = start, _BOTH
    rows = thin_rows(problem)
    if len(rows) < len(problem.event):
        part = problem.thinned(rows)
        solution, _ = _reweighted(
            part, deviation_ns[rows], drifting, rounds=rounds, solution=solution
        )
        rounds = _BOTH[1:] if _well_covered(part, problem) else _BOTH
    solution, weights = _reweighted(
        problem, deviation_ns, drifting, rounds=rounds, solution=solution
    )
    return _lines(problem, deviation_ns, solution, weights)


def unmoved_lines(problem: LineProblem) -> Lines:
    """Lines that change nothing, with the residuals that the clocks have as they are."""
    label, slack = np.zeros(len(problem.event), dtype=np.int64), np.zeros(len(problem.event))
    solution, weights = np.zeros(2 * problem.num_domains), np.ones(len(problem.event))
    noise = _Noise.classes(label, slack)
    deviation = noise.of(problem, problem.residuals(solution, weights), weights)
    return _lines(problem, deviation, solution, weights)


def thin_rows(problem: LineProblem, label: IntArray | None = None) -> IntArray:
    """Rows of evenly drawn events, about _THINNED_ANCHORS of each class or all there are."""
    if label is None:
        label = np.zeros(len(problem.event), dtype=np.int64)
    stride = np.maximum(np.bincount(label) // _THINNED_ANCHORS, 1)
    number = np.random.default_rng(0).permutation(len(problem.starts))
    drawn = number % stride[label[problem.starts]] == 0
    return np.flatnonzero(drawn[problem.event]).astype(np.int64)


def _well_covered(part: LineProblem, whole: LineProblem) -> bool:
    """Whether a part has enough anchors of every domain for its solution to be near the whole's."""
    some, all_of = (
        np.bincount(problem.domain, minlength=whole.num_domains) for problem in (part, whole)
    )
    return bool((some >= np.minimum(all_of, _ENOUGH_ANCHORS)).all())


def _reweighted(
    problem: LineProblem,
    deviation: FloatArray,
    drifting: BoolArray,
    *,
    rounds: tuple[_Weigh, ...],
    noise: _Noise | None = None,
    solution: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Solution and its weights after each kind of weights has settled.

    `deviation` (anchor,) is that of all rounds, or of the first only where `noise` finds the
    others from the residuals. Without a `solution` to begin with, all anchors are believed first.
    """
    weights = deviation**-2.0
    if solution is None:
        solution = problem.solve(weights, drifting, np.zeros(2 * problem.num_domains))
    residual = problem.residuals(solution, weights)
    for weigh in rounds:
        for _ in range(_ROUNDS):
            deviation = noise.of(problem, residual, weights) if noise else deviation
            weights = weigh(residual / deviation) / deviation**2
            solution = problem.solve(weights, drifting, solution)
            before, residual = residual, problem.residuals(solution, weights)
            moved = problem.domain_means(np.abs(residual - before) / deviation)
            if moved.max() < _SETTLED:
                break
    return solution, weights


def _huber(score: FloatArray) -> FloatArray:
    return np.minimum(1.0, _HUBER / np.maximum(np.abs(score), _HUBER))


def _tukey(score: FloatArray) -> FloatArray:
    return np.square(np.maximum(1.0 - np.square(score / _TUKEY), 0.0))


_BOTH: tuple[_Weigh, ...] = (_huber, _tukey)


def _lines(
    problem: LineProblem, deviation: FloatArray, solution: FloatArray, weights: FloatArray
) -> Lines:
    residual = problem.residuals(solution, weights)
    information = problem.domain_sums(weights * problem.age**2) * problem.span_ns**2
    return Lines(
        solution=solution,
        offset_ns=solution[: problem.num_domains],
        drift=solution[problem.num_domains :] / problem.span_ns,
        centre_ns=problem.centre_ns,
        drift_error=1.0 / np.sqrt(np.maximum(information, 1e-30)),
        num_anchors=np.bincount(problem.domain, minlength=problem.num_domains).astype(np.int64),
        weights=weights,
        residual_ns=residual / problem.weight_of_others(weights, np.arange(len(residual))),
        noise_ns=float(np.median(deviation)) if len(deviation) else 0.0,
    )
