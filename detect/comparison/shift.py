"""Whether a quantity moved between two traces, or only varies from iteration to iteration.

    effect = median(after) − median(before)                              logarithms, or shares
    standard error² = 1.57 · inflation · (σ_before² / n + σ_after² / m) + between²

1.57: medians are less efficient than means. σ comes from median absolute deviations, pooled over
the rows (ranks) of a class and never below a row's own. `inflation` is (1 + r) / (1 − r) for the
correlation r of neighbouring iterations. `between` is what two runs of a healthy job differ by
though each of them is still: devices settle at slightly different clocks.

Example: 20 iterations each, 1 % noise, standard error sqrt(1.57 · 2 · 0.01² / 20 + 0.003²) = 0.5 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.observations import Floats
from detect.stats import robust

MEDIAN_LOSS = 1.2533
"""Standard error of a median over that of a mean, sqrt(pi / 2)."""
BETWEEN_RUNS = 0.003
NOISE_FLOOR = 0.001
LEAST_ITERATIONS = 3
"""Of each trace; fewer say nothing about their own noise."""
MAX_DEGREES = 60
MAX_CORRELATION = 0.6
ENOUGH_FOR_OWN_NOISE = 8


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Of each row: effect, its standard error, and the degrees of freedom of the t law."""

    effect: Floats
    error: Floats
    degrees: float

    @property
    def p_value(self) -> Floats:
        """Probability of as large a shift, up or down, if nothing changed; NaN is 1."""
        score = np.abs(self.effect) / self.error
        return np.nan_to_num(np.asarray(2.0 * special.stdtr(self.degrees, -score)), nan=1.0)

    @property
    def reach(self) -> Floats:
        """Half the 95 % interval."""
        return np.asarray(special.stdtrit(self.degrees, 0.975) * self.error)


def shift(before: Floats, after: Floats, between: float = BETWEEN_RUNS) -> Shift:
    """Shift of every row between (row, iteration) matrices; their iterations need not match."""
    effect = robust.median(after, axis=1) - robust.median(before, axis=1)
    variance = _variance(before) + _variance(after)
    num_iterations = min(before.shape[1], after.shape[1])
    if num_iterations < LEAST_ITERATIONS:
        variance = np.full_like(effect, np.nan)
    rows = max(int(np.isfinite(effect).sum()), 1)
    degrees = (before.shape[1] + after.shape[1] - 2) * min(rows, 4)
    return Shift(
        effect=effect,
        error=np.sqrt(variance + between**2),
        degrees=float(np.clip(degrees, 2, MAX_DEGREES)),
    )


def _variance(values: Floats) -> Floats:
    """Of each row's median."""
    centred = values - robust.median(values, axis=1)[:, None]
    number = values.shape[1]
    own = robust.spread(values, axis=1) * _small_sample(number)
    pooled = float(np.nan_to_num(robust.median(own)))
    if number < ENOUGH_FOR_OWN_NOISE:
        own = np.full(len(values), pooled)
    sigma = np.fmax(np.fmax(own, pooled), NOISE_FLOOR)
    known = np.maximum(np.isfinite(values).sum(axis=1), 1)
    return np.asarray(_inflation(centred) * (MEDIAN_LOSS * sigma) ** 2 / known)


def _small_sample(number: int) -> float:
    """By how much a median absolute deviation of so few values falls short.

    Croux and Rousseeuw 1992, Time-efficient algorithms for two highly robust estimators of scale.
    """
    few = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
    return few.get(number, number / max(number - 0.8, 1.0))


def _inflation(centred: Floats) -> float:
    if centred.shape[1] < ENOUGH_FOR_OWN_NOISE:
        return 1.0
    limit = 4 * float(np.nan_to_num(robust.spread(centred))) + 1e-12
    clipped = np.nan_to_num(np.clip(centred, -limit, limit))
    energy = (clipped**2).sum(axis=1)
    lagged = (clipped[:, 1:] * clipped[:, :-1]).sum(axis=1)
    use = energy > 0
    if not use.any():
        return 1.0
    typical = float(np.clip(np.median(lagged[use] / energy[use]), 0.0, MAX_CORRELATION))
    return (1 + typical) / (1 - typical)


def q_values(p_values: Floats) -> Floats:
    """False-discovery rate of each test if all with its p or less are believed.

    Benjamini and Hochberg 1995: q of the k-th smallest p is the least p · m / j over j >= k.
    """
    order = np.argsort(p_values, kind="stable")
    number = len(p_values)
    scaled = p_values[order] * number / np.arange(1, number + 1)
    least = np.minimum.accumulate(scaled[::-1])[::-1]
    result = np.empty(number)
    result[order] = np.minimum(least, 1.0)
    return result
