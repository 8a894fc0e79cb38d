"""Fit clock lines that a few wrong anchors do not move: sparse, reweighted least squares.

Every clock domain d has a line: common = local + offset_d + drift_d · (local − centre_d). Every
event c has an unknown common time T_c at which all its members m end:

    minimise  Σ_cm w_cm · (local_cm + offset_d(m) + drift_d(m) · age_cm − T_c)²  +  Σ_d (drift_d/P)²

T_c is eliminated (it is the weighted mean of its members), which leaves a graph Laplacian over the
domains, one block for offsets and one for drifts. Conjugate gradients need only its products. It is
formed where events have few members; else a product is two sparse multiplications, so that a group
of thousands of ranks costs no more than its members. P says that real clocks drift by some tens of
ppm.

Two domains, one event, w = 1, no drift: local ends 100 and 140 ns give offsets +20 and −20, so both
end at 120 ns, their mean. With the first as reference they are 0 and −40, so both end at 100 ns.

Weights w come from the residuals: Huber's first, then Tukey's biweight, which gives gross errors no
weight at all (Holland & Welsch, Comm. Statist. A6, 1977). Large problems are first solved on a
part of their events, and starting from that solution on all events. How much anchors scatter is
estimated beforehand from the median residual of each class of anchors (the collectives of one
parallel axis, operation and size): the few events that tie nodes together must not be thrown out
because the many events inside a node are more exact.

Nothing here calls BLAS, `pow` or `hypot`, whose last digits depend on the processor: where only few
events tie two hosts together, the last digit of a sum may become a nanosecond at the end of an
hour. So the same files give the same times, bit for bit, on any machine.

Rounds of fitting and weighing anew find a solution near the one they begin with, not the best of
all. They begin with the solution that believes all anchors, unless a better solution is known
(`aggregate.causality`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from aggregate.anchors import Anchors
from megascan.arrays import Flags, Floats, Integers, group_numbers, group_starts

if TYPE_CHECKING:
    from scipy.sparse import csr_array

EXPECTED_DRIFT = 100e-6
"""P: standard deviation of real clocks' drifts that the fit assumes (a ratio)."""
_TOLERANCE = 1e-10
"""Squared distance from the solution at which the solver stops, in squared standard deviations."""
_TINY = 1e-30
_FORMED_COLUMNS = 40
"""Columns of an event, on average over columns, up to which its part of a matrix is formed: that
takes some ten times their square, a hundred products twice their number each."""

Product: TypeAlias = Callable[[Floats], Floats]


@dataclass(frozen=True, kw_only=True)
class LineProblem:
    """Anchors as rows of the problem, ordered by event.

    value  (anchor,) local time minus the centre of its domain, ns
    age    (anchor,) `value` in units of span_ns, so that offsets and drifts are alike in size
    starts (event,)  first row of each event
    A solution is (2 · domain,): offsets in ns, then drifts in ns a span.
    """

    event: Integers
    starts: Integers
    domain: Integers
    value: Floats
    age: Floats
    centre_ns: Integers
    span_ns: float

    @classmethod
    def of(cls, anchors: Anchors, domain: Integers, num_domains: int) -> LineProblem:
        """Set the problem up from anchors; `domain` (anchor,) numbers are below num_domains.

        Each domain's times are centred on their middle, which separates offset from drift.
        """
        low = np.full(num_domains, np.iinfo(np.int64).max)
        high = np.full(num_domains, np.iinfo(np.int64).min)
        np.minimum.at(low, domain, anchors.end_ns)
        np.maximum.at(high, domain, anchors.end_ns)
        seen = high >= low
        centre = np.where(seen, low // 2 + high // 2, 0)
        span = float(max(int((high[seen] - low[seen]).max(initial=0)), 1))
        value = (anchors.end_ns - centre[domain]).astype(np.float64)
        return cls(
            event=anchors.event,
            starts=group_starts(anchors.event),
            domain=domain,
            value=value,
            age=value / span,
            centre_ns=centre,
            span_ns=span,
        )

    @property
    def num_domains(self) -> int:
        """Number of clock domains, with and without anchors."""
        return len(self.centre_ns)

    def thinned(self, rows: Integers) -> LineProblem:
        """Return the problem with the anchors of some rows only, which must be whole events."""
        starts = group_starts(self.event[rows])
        return LineProblem(
            event=group_numbers(starts, len(rows)),
            starts=starts,
            domain=self.domain[rows],
            value=self.value[rows],
            age=self.age[rows],
            centre_ns=self.centre_ns,
            span_ns=self.span_ns,
        )

    def extended(self, domain: Integers, time_ns: Integers) -> LineProblem:
        """Return the problem with further events of two members; domain and time_ns (event, 2)."""
        num_events = len(self.starts)
        value = (time_ns - self.centre_ns[domain]).astype(np.float64).ravel()
        event = np.r_[self.event, num_events + np.repeat(np.arange(len(domain)), 2)]
        return LineProblem(
            event=event,
            starts=group_starts(event),
            domain=np.r_[self.domain, domain.ravel()],
            value=np.r_[self.value, value],
            age=np.r_[self.age, value / self.span_ns],
            centre_ns=self.centre_ns,
            span_ns=self.span_ns,
        )

    def common(self, solution: Floats, domain: Integers, time_ns: Integers) -> Floats:
        """Return (time,) common time of each local time of a domain, up to one constant."""
        value = (time_ns - self.centre_ns[domain]).astype(np.float64)
        offset, drift = solution[: self.num_domains], solution[self.num_domains :]
        return np.asarray(value + offset[domain] + drift[domain] * (value / self.span_ns))

    def event_sums(self, values: Floats) -> Floats:
        """Return (event,) sum over each event's members."""
        return np.add.reduceat(values, self.starts) if len(values) else values

    def domain_sums(self, values: Floats) -> Floats:
        """Return (domain,) sum over each domain's anchors."""
        return np.bincount(self.domain, values, self.num_domains).astype(np.float64)

    def counts(self) -> Integers:
        """Return (domain,) number of each domain's anchors."""
        return np.bincount(self.domain, minlength=self.num_domains).astype(np.int64)

    def weighed(self, weights: Floats) -> Weighed:
        """Give the anchors weights (anchor,), 1/variance in ns⁻²."""
        return Weighed(self, weights, np.maximum(self.event_sums(weights), _TINY))


@dataclass(frozen=True)
class Weighed:
    """A problem whose anchors have weights; `total` (event,) are the sums of its events' weights.

    Sums over events take longer than other steps of a round, so equal ones are made once.
    """

    problem: LineProblem
    weights: Floats
    total: Floats

    def residuals(self, solution: Floats) -> Floats:
        """Return (anchor,) distance from the weighted mean of the anchor's event, ns."""
        problem, num_domains = self.problem, self.problem.num_domains
        offset, drift = solution[:num_domains], solution[num_domains:]
        corrected = problem.value + offset.take(problem.domain)
        if drift.any():
            corrected += drift.take(problem.domain) * problem.age
        return self._distances(corrected)

    def _distances(self, time_ns: Floats) -> Floats:
        mean = self.problem.event_sums(self.weights * time_ns) / self.total
        return time_ns - mean.take(self.problem.event)

    def weight_of_others(self, rows: Integers) -> Floats:
        """Return (row,) share of an event's weight that is not that of the row's own anchor."""
        total = self.total.take(self.problem.event[rows])
        return np.maximum(1.0 - self.weights[rows] / total, 1e-6)

    def solve(self, drifting: Flags, guess: Floats) -> Floats:
        """Solve weighted least squares; domains that are not `drifting` (domain,) keep drift 0.

        Only differences between domains are determined: any constant may be added to the offsets of
        a component.
        """
        problem = self.problem
        free = np.r_[np.ones(problem.num_domains), drifting.astype(np.float64)]
        weighted = self.weights * self._distances(problem.value)
        pull = [problem.domain_sums(weighted), np.zeros(problem.num_domains)]
        if drifting.any():
            pull[1] = problem.domain_sums(weighted * problem.age)
        product, diagonal = self._normal(free) if drifting.any() else self._normal_of_offsets()
        return conjugate_gradients(product, -np.concatenate(pull) * free, diagonal, guess * free)

    def _normal(self, free: Floats) -> tuple[Product, Floats]:
        """Return the product with the normal matrix, and its diagonal without the events' part."""
        problem, n = self.problem, self.problem.num_domains
        events_part = _squared(self._means())
        aged = self.weights * problem.age
        w_one, w_age = problem.domain_sums(self.weights), problem.domain_sums(aged)
        prior = 1.0 / (EXPECTED_DRIFT * problem.span_ns) ** 2
        w_age2 = problem.domain_sums(self.weights * problem.age**2) + prior

        def product(vector: Floats) -> Floats:
            vector = vector * free
            offset, drift = vector[:n], vector[n:]
            own = (w_one * offset + w_age * drift, w_age * offset + w_age2 * drift)
            return np.asarray((np.concatenate(own) - events_part(vector)) * free)

        return product, np.maximum(np.r_[w_one, w_age2], _TINY)

    def _normal_of_offsets(self) -> tuple[Product, Floats]:
        """Return what `_normal` does where no drift is free, by half of the work.

        Vectors are as long as there, for the order of adding; their half of drifts is 0.
        """
        n = self.problem.num_domains
        events_part = _squared(self._means_of_offsets())
        w_one = self.problem.domain_sums(self.weights)

        def product(vector: Floats) -> Floats:
            image, offset = np.zeros(2 * n), vector[:n]
            image[:n] = w_one * offset - events_part(offset)
            return image

        return product, np.maximum(np.r_[w_one, np.ones(n)], _TINY)

    def _means(self) -> csr_array:
        """Return (event, 2 · domain) matrix M; events' times are eliminated by subtracting MᵀM."""
        from scipy.sparse import csr_array  # half the time of all imports; see `load_solver`

        problem, share = self.problem, self._shares()
        entries, columns = np.empty(2 * len(share)), np.empty(2 * len(share), dtype=np.int32)
        entries[0::2], entries[1::2] = share, share * problem.age
        columns[0::2], columns[1::2] = problem.domain, problem.domain + problem.num_domains
        first = (2 * np.r_[problem.starts, len(problem.event)]).astype(np.int32)
        shape = (len(problem.starts), 2 * problem.num_domains)
        return csr_array((entries, columns, first), shape=shape)

    def _means_of_offsets(self) -> csr_array:
        """Return the columns of M that belong to offsets, (event, domain)."""
        from scipy.sparse import csr_array

        problem = self.problem
        first = np.r_[problem.starts, len(problem.event)].astype(np.int32)
        entries = (self._shares(), problem.domain.astype(np.int32), first)
        return csr_array(entries, shape=(len(problem.starts), problem.num_domains))

    def _shares(self) -> Floats:
        """Return (anchor,) weights over the root of their event's total."""
        return np.asarray(self.weights / np.sqrt(self.total).take(self.problem.event))


def _squared(means: csr_array) -> Product:
    """Return the product with MᵀM of M (event, column): MᵀM itself is formed where that takes less
    than the many products of a solution, which is a matter of how many columns an event has.

    Example: 30,000 events of 2 to 8 of 64 clocks are 128 · 128 numbers.
    """
    size = np.diff(means.indptr).astype(np.int64)
    if np.square(size).sum() <= _FORMED_COLUMNS * size.sum():
        square = (means.T @ means).tocsr()
        return lambda vector: np.asarray(square @ vector)
    transposed = means.T
    return lambda vector: np.asarray(transposed @ (means @ vector))


def load_solver() -> None:
    """Import the slow module that only fitting needs; call it while rank files are being read."""
    importlib.import_module("scipy.sparse")


def conjugate_gradients(product: Product, right: Floats, diagonal: Floats, guess: Floats) -> Floats:
    """Solve A x = right for a positive semidefinite A whose range holds `right`.

    `diagonal` is the preconditioner. A's null space has the constant shifts of each component.
    Where rounding has left a part of `right` in it, SciPy's own solver divides by zero; here a step
    that A maps to nothing ends the search.
    """
    solution = guess.copy()
    residual = right - product(solution)
    direction = residual / diagonal
    distance = _product(residual, direction)
    goal = max(_TOLERANCE, 1e-18 * _product(right, right / diagonal))
    for _ in range(10 * len(right) + 100):
        if distance <= goal:
            break
        image = product(direction)
        curvature = _product(direction, image)
        if curvature <= 1e-14 * _product(direction, diagonal * direction):
            break
        step = distance / curvature
        solution += step * direction
        residual -= step * image
        scaled = residual / diagonal
        previous, distance = distance, _product(residual, scaled)
        direction = scaled + (distance / previous) * direction
    return solution


def _product(one: Floats, other: Floats) -> float:
    """Return the inner product; `@` would leave the order of adding to BLAS."""
    return float(np.sum(one * other))


_HUBER, _TUKEY = 1.345, 4.685
"""Tuning constants for 95 % efficiency on normal noise, in standard deviations."""
_ROUNDS = 25
_FINEST_NOISE_NS = 50.0
"""Timers are not more exact than this; smaller residuals are rounding."""
_SETTLED = 0.05
"""Rounds end when no clock's residuals move by more than this part of the noise on average."""
_FIRST_NOISE_NS = 1e3
"""Small, so that EXPECTED_DRIFT does not influence where the rounds begin."""
_MAD_TO_SIGMA = 1.4826
_THINNED_ANCHORS = 200_000
_ENOUGH_ANCHORS = 30
_MEDIAN_OF = 50_000

_Weigh: TypeAlias = Callable[[Floats], Floats]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Fitted lines: common = local + offset_ns + drift · (local − centre_ns), plus a constant.

    offset_ns, drift, centre_ns, drift_error, num_anchors (domain,); drift_error is a standard
    error.
    weights (anchor,) are relative, 0 for rejected anchors; residual_ns (anchor,) is the distance
    from the mean of the event's other members; noise_ns is the median anchor's deviation.
    solution (2 · domain,) is as in LineProblem.
    """

    solution: Floats

    offset_ns: Floats
    drift: Floats
    centre_ns: Integers
    drift_error: Floats
    num_anchors: Integers
    weights: Floats
    residual_ns: Floats
    noise_ns: float

    def common(self, domain: Integers, time_ns: Integers) -> Floats:
        """Return (time,) common time of each local time of a domain, up to one constant."""
        value = (time_ns - self.centre_ns[domain]).astype(np.float64)
        return np.asarray(value + self.offset_ns[domain] + self.drift[domain] * value)


def _together(one: Floats, other: Floats) -> Floats:
    """Return the standard deviation of a sum from the standard deviations of its two parts."""
    return np.asarray(np.sqrt(np.square(one) + np.square(other)))


@dataclass(frozen=True)
class _Noise:
    """Estimate of anchors' standard deviations, from that of their class and their own slack.

    `samples` holds some rows of each class, enough for a median.
    """

    label: Integers
    slack_ns: Floats
    samples: tuple[Integers, ...]

    @classmethod
    def classes(cls, label: Integers, slack_ns: Floats) -> _Noise:
        rows = (np.flatnonzero(label == number) for number in range(int(label.max(initial=-1)) + 1))
        return cls(label, slack_ns, tuple(r[:: len(r) // _MEDIAN_OF + 1] for r in rows))

    def of(self, weighed: Weighed, residual: Floats) -> Floats:
        """Return (anchor,) standard deviations, of class and slack together."""
        return _together(self.of_classes(weighed, residual)[self.label], self.slack_ns)

    def of_classes(self, weighed: Weighed, residual: Floats) -> Floats:
        """Return (class,) standard deviations; an anchor's pull on its event's mean is removed."""
        deviation = np.full(len(self.samples), _FINEST_NOISE_NS)
        for number, rows in enumerate(self.samples):
            if len(rows):
                others = np.sqrt(weighed.weight_of_others(rows))
                median = float(np.median(np.abs(residual[rows]) / others))
                deviation[number] = max(_MAD_TO_SIGMA * median, _FINEST_NOISE_NS)
        return deviation


def estimate_noise(
    problem: LineProblem,
    label: Integers,
    slack_ns: Floats,
    drifting: Flags | None = None,
    start: Floats | None = None,
) -> Floats:
    """Estimate the (anchor,) standard deviation of each anchor about the lines of `problem`.

    label     (anchor,) class whose anchors have the same noise, from 0
    slack_ns  (anchor,) known further standard deviation of an anchor
    drifting  (domain,) whether the drift is free; None frees all drifts
    start     (2 · domain,) solution to begin with
    """
    rows = thin_rows(problem, label)
    part, noise = problem.thinned(rows), _Noise.classes(label[rows], slack_ns[rows])
    if drifting is None:
        drifting = np.ones(problem.num_domains, dtype=np.bool_)
    first = np.full(len(rows), _FIRST_NOISE_NS)
    solution, weighed = _reweighted(
        part, first, drifting, rounds=_BOTH, noise=noise, solution=start
    )
    deviation = noise.of_classes(weighed, weighed.residuals(solution))
    return _together(deviation[label], slack_ns)


def fit_lines(
    problem: LineProblem, deviation_ns: Floats, drifting: Flags, start: Floats | None = None
) -> Lines:
    """Fit the lines of all domains at once, by reweighted least squares.

    deviation_ns  (anchor,) standard deviations
    drifting      (domain,) whether the drift is free
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
    solution, weighed = _reweighted(
        problem, deviation_ns, drifting, rounds=rounds, solution=solution
    )
    return _lines(weighed, deviation_ns, solution)


def unmoved_lines(problem: LineProblem) -> Lines:
    """Return the lines that leave all clocks as they are, with the residuals of these clocks."""
    label, slack = np.zeros(len(problem.event), dtype=np.int64), np.zeros(len(problem.event))
    solution, weighed = np.zeros(2 * problem.num_domains), problem.weighed(np.ones(len(label)))
    deviation = _Noise.classes(label, slack).of(weighed, weighed.residuals(solution))
    return _lines(weighed, deviation, solution)


def thin_rows(problem: LineProblem, label: Integers | None = None) -> Integers:
    """Return rows of events drawn evenly: of each class all, or about _THINNED_ANCHORS."""
    if label is None:
        label = np.zeros(len(problem.event), dtype=np.int64)
    stride = np.maximum(np.bincount(label) // _THINNED_ANCHORS, 1)
    number = np.random.default_rng(0).permutation(len(problem.starts))
    drawn = number % stride[label[problem.starts]] == 0
    return np.flatnonzero(drawn[problem.event]).astype(np.int64)


def _well_covered(part: LineProblem, whole: LineProblem) -> bool:
    """Return whether `part` has enough anchors of every domain to be solved almost like `whole`."""
    some, all_of = (
        np.bincount(problem.domain, minlength=whole.num_domains) for problem in (part, whole)
    )
    return bool((some >= np.minimum(all_of, _ENOUGH_ANCHORS)).all())


def _reweighted(
    problem: LineProblem,
    deviation: Floats,
    drifting: Flags,
    *,
    rounds: tuple[_Weigh, ...],
    noise: _Noise | None = None,
    solution: Floats | None = None,
) -> tuple[Floats, Weighed]:
    """Return the solution and its weights after each kind of weights has settled.

    `deviation` (anchor,) is the standard deviation in all rounds; with `noise`, only in the first
    solution, and each round estimates it from the residuals. Without a `solution` to begin with,
    all anchors are believed first.
    """
    weighed = problem.weighed(1.0 / np.square(deviation))
    if solution is None:
        solution = weighed.solve(drifting, np.zeros(2 * problem.num_domains))
    residual = weighed.residuals(solution)
    num_anchors = np.maximum(problem.counts(), 1)
    for weigh in rounds:
        for _ in range(_ROUNDS):
            deviation = noise.of(weighed, residual) if noise else deviation
            weighed = problem.weighed(weigh(residual / deviation) / deviation**2)
            solution = weighed.solve(drifting, solution)
            before, residual = residual, weighed.residuals(solution)
            moved = problem.domain_sums(np.abs(residual - before) / deviation) / num_anchors
            if moved.max() < _SETTLED:
                break
    return solution, weighed


def _huber(score: Floats) -> Floats:
    return np.minimum(1.0, _HUBER / np.maximum(np.abs(score), _HUBER))


def _tukey(score: Floats) -> Floats:
    return np.square(np.maximum(1.0 - np.square(score / _TUKEY), 0.0))


_BOTH: tuple[_Weigh, ...] = (_huber, _tukey)


def _lines(weighed: Weighed, deviation: Floats, solution: Floats) -> Lines:
    problem, weights, residual = weighed.problem, weighed.weights, weighed.residuals(solution)
    information = problem.domain_sums(weights * problem.age**2) * problem.span_ns**2
    return Lines(
        solution=solution,
        offset_ns=solution[: problem.num_domains],
        drift=solution[problem.num_domains :] / problem.span_ns,
        centre_ns=problem.centre_ns,
        drift_error=1.0 / np.sqrt(np.maximum(information, 1e-30)),
        num_anchors=problem.counts(),
        weights=weights,
        residual_ns=residual / weighed.weight_of_others(np.arange(len(residual))),
        noise_ns=float(np.median(deviation)) if len(deviation) else 0.0,
    )
