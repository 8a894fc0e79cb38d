"""The sparse least-squares problem behind clock alignment.

Every clock domain d has a line: common = local + offset_d + drift_d · (local − centre_d). Every
event c has an unknown common time T_c at which all its members m end:

    minimise  Σ_cm w_cm · (local_cm + offset_d(m) + drift_d(m) · age_cm − T_c)²  +  Σ_d (drift_d/P)²

T_c is eliminated (it is the weighted mean of its members), which leaves a graph Laplacian over the
domains, one block for offsets and one for drifts. It is never formed: conjugate gradients need
only its products, two sparse multiplications each, so that a group of thousands of ranks costs no
more than its members. P says that real clocks drift by some tens of ppm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.sparse import csr_array

from aggregate.anchors import Anchors
from aggregate.keys import BoolArray, FloatArray, IntArray, group_starts

EXPECTED_DRIFT = 100e-6
"""P: standard deviation of real clocks' drifts that the fit assumes (a ratio)."""
_TOLERANCE = 1e-10
"""Squared distance from the solution, in standard deviations, at which the solver stops."""
_TINY = 1e-30

Product: TypeAlias = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, kw_only=True)
class LineProblem:
    """Anchors as rows of the problem, ordered by event.

    value  (anchor,) local − centre of its domain, ns
    age    (anchor,) the same in units of span_ns, so that offsets and drifts are alike in size
    starts (event,)  first row of each event
    A solution is (2 · domain,): offsets in ns, then drifts in ns a span.
    """

    event: IntArray
    starts: IntArray
    domain: IntArray
    value: FloatArray
    age: FloatArray
    centre_ns: IntArray
    span_ns: float

    @classmethod
    def of(cls, anchors: Anchors, domain: IntArray, num_domains: int) -> LineProblem:
        """From anchors and the domain of each (anchor,), one of num_domains.

        Each domain's times are centred on their middle, which keeps offset and drift apart.
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

    def thinned(self, rows: IntArray) -> LineProblem:
        """The same problem with some anchors only, whole events."""
        starts = group_starts(self.event[rows])
        return LineProblem(
            event=np.cumsum(np.bincount(starts, minlength=len(rows))) - 1,
            starts=starts,
            domain=self.domain[rows],
            value=self.value[rows],
            age=self.age[rows],
            centre_ns=self.centre_ns,
            span_ns=self.span_ns,
        )

    def extended(self, domain: IntArray, time_ns: IntArray) -> LineProblem:
        """The problem with further events of two members each, domain and time_ns (pair, 2)."""
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

    def common(self, solution: FloatArray, domain: IntArray, time_ns: IntArray) -> FloatArray:
        """(time,) common time of each local time of a domain, up to one constant."""
        value = (time_ns - self.centre_ns[domain]).astype(np.float64)
        offset, drift = solution[: self.num_domains], solution[self.num_domains :]
        return np.asarray(value + offset[domain] + drift[domain] * (value / self.span_ns))

    def event_sums(self, values: FloatArray) -> FloatArray:
        """(event,) sum over each event's members."""
        return np.add.reduceat(values, self.starts) if len(values) else values

    def domain_sums(self, values: FloatArray) -> FloatArray:
        """(domain,) sum over each domain's anchors."""
        return np.bincount(self.domain, values, self.num_domains).astype(np.float64)

    def domain_means(self, values: FloatArray) -> FloatArray:
        """(domain,) mean over each domain's anchors, 0 without any."""
        return self.domain_sums(values) / np.maximum(self.domain_sums(np.ones_like(values)), 1.0)

    def residuals(self, solution: FloatArray, weights: FloatArray) -> FloatArray:
        """(anchor,) distance from the event's weighted mean, ns."""
        offset, drift = solution[: self.num_domains], solution[self.num_domains :]
        corrected = self.value + offset[self.domain] + drift[self.domain] * self.age
        total = np.maximum(self.event_sums(weights), _TINY)
        return corrected - (self.event_sums(weights * corrected) / total)[self.event]

    def weight_of_others(self, weights: FloatArray, rows: IntArray) -> FloatArray:
        """(row,) share of the event's weight that the other members of these anchors hold."""
        total = np.maximum(self.event_sums(weights), _TINY)[self.event[rows]]
        return np.maximum(1.0 - weights[rows] / total, 1e-6)

    def solve(self, weights: FloatArray, drifting: BoolArray, guess: FloatArray) -> FloatArray:
        """Weighted least squares; domains that are not `drifting` (domain,) keep drift 0.

        Weights (anchor,) are 1/variance in ns⁻². Domains hang together by differences only: a
        constant may be added to all of a component.
        """
        free = np.r_[np.ones(self.num_domains), drifting.astype(np.float64)]
        weighted = weights * self.residuals(np.zeros(2 * self.num_domains), weights)
        right = -np.r_[self.domain_sums(weighted), self.domain_sums(weighted * self.age)] * free
        product, diagonal = self._normal(weights, free)
        return conjugate_gradients(product, right, diagonal, guess * free)

    def _normal(self, weights: FloatArray, free: FloatArray) -> tuple[Product, FloatArray]:
        """Product with the normal matrix, and its diagonal less the events' part."""
        n = self.num_domains
        means = self._means(weights)
        w_one, w_age = self.domain_sums(weights), self.domain_sums(weights * self.age)
        prior = 1.0 / (EXPECTED_DRIFT * self.span_ns) ** 2
        w_age2 = self.domain_sums(weights * self.age**2) + prior

        def product(vector: FloatArray) -> FloatArray:
            vector = vector * free
            offset, drift = vector[:n], vector[n:]
            own = np.r_[w_one * offset + w_age * drift, w_age * offset + w_age2 * drift]
            return np.asarray((own - means.T @ (means @ vector)) * free)

        return product, np.maximum(np.r_[w_one, w_age2], _TINY)

    def _means(self, weights: FloatArray) -> csr_array:
        """(event, 2 · domain) matrix M: MᵀM is what eliminating the events' times takes away."""
        share = weights / np.sqrt(np.maximum(self.event_sums(weights), _TINY))[self.event]
        entries, columns = np.empty(2 * len(share)), np.empty(2 * len(share), dtype=np.int32)
        entries[0::2], entries[1::2] = share, share * self.age
        columns[0::2], columns[1::2] = self.domain, self.domain + self.num_domains
        first = (2 * np.r_[self.starts, len(self.event)]).astype(np.int32)
        return csr_array((entries, columns, first), shape=(len(self.starts), 2 * self.num_domains))


def conjugate_gradients(
    product: Product, right: FloatArray, diagonal: FloatArray, guess: FloatArray
) -> FloatArray:
    """Solve A x = right for a positive semidefinite A whose range holds `right`.

    Preconditioned by `diagonal`. SciPy's own solver divides by zero where rounding has left a
    part of `right` in A's null space, which every constant shift of a component is; here a step
    that A no longer sees ends the search.
    """
    solution = guess.copy()
    residual = right - product(solution)
    direction = residual / diagonal
    distance = float(residual @ direction)
    goal = max(_TOLERANCE, 1e-18 * float(right @ (right / diagonal)))
    for _ in range(10 * len(right) + 100):
        if distance <= goal:
            break
        image = product(direction)
        curvature = float(direction @ image)
        if curvature <= 1e-14 * float(direction @ (diagonal * direction)):
            break
        step = distance / curvature
        solution += step * direction
        residual -= step * image
        scaled = residual / diagonal
        previous, distance = distance, float(residual @ scaled)
        direction = scaled + (distance / previous) * direction
    return solution
