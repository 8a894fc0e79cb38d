"""How far a healthy rank strays from its peers, and what that lets us find."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.observations import Bools, Floats
from detect.stats import robust

MAX_DEGREES = 60
"""Real noise has heavier tails than a normal law; more degrees of freedom are not believed."""
HEALTHY_SPREAD = 0.003
"""Lasting differences of sound devices (log units) that are supposed where few ranks can tell."""
MIN_RANKS_FOR_SPREAD = 8
CLOSEST = 1.0 / 3.0
MAX_AUTOCORRELATION = 0.6


@dataclass(frozen=True)
class Noise:
    """Noise of one class of measurements.

    A mean over k iterations of a healthy rank has the variance inflation · sigma² · 1.57 / k +
    between² (1.57: medians are less efficient than means).
    """

    sigma: Floats
    """(rank,): of one iteration's value."""
    between: float
    """Lasting differences between sound ranks."""
    inflation: float
    """(1 + r) / (1 − r) for a lag-1 autocorrelation r: neighbours in time repeat each other."""
    degrees: float
    """Degrees of freedom of the t law."""

    def standard_error(self, num_iterations: Floats | float, row: int | None = None) -> Floats:
        """Of a rank's effect over so many iterations; for all rows or for one."""
        sigma = self.sigma if row is None else self.sigma[row]
        variance = self.inflation * (robust.MEDIAN_LOSS * sigma) ** 2 / num_iterations
        return np.asarray(np.sqrt(variance + self.between**2))

    def p_value(self, score: Floats | float) -> Floats:
        """One-sided probability of a score (effect over standard error) in a healthy rank."""
        return np.asarray(special.stdtr(self.degrees, -np.asarray(score)))


def estimate_noise(value: Floats, excluded: Bools, floor: float, bursty: bool = False) -> Noise:
    """Noise from the values (rank, iteration) of all ranks that are not known to be faulty.

    The scale is pooled, because with two to four peers a rank's own median deviation is often
    absurdly small; a rank that is noisier than the pool keeps its own. `floor` is what the timer
    and the class leave at least; `bursty` noise is measured by its mean square.
    """
    sound = value[~excluded] if (~excluded).any() else value
    centred = value - robust.median(value, axis=1)[:, None]
    pooled = _burst_size(sound) if bursty else _pooled(sound)
    own = robust.step_noise(value) if value.shape[1] >= 8 else np.full(len(value), np.nan)
    sigma = np.fmax(np.fmax(own, pooled), floor)
    num_free = float(np.isfinite(sound).sum() - len(sound)) / 2  # leave-one-out halves it
    return Noise(
        sigma=sigma,
        between=max(HEALTHY_SPREAD, _between(value, excluded, pooled)),
        inflation=_inflation(centred[~excluded]),
        degrees=float(np.clip(num_free, 3, MAX_DEGREES)),
    )


def _pooled(value: Floats) -> float:
    if value.shape[1] < 2:
        return 0.0
    centred = value - robust.median(value, axis=1)[:, None]
    num_iterations = value.shape[1]
    # n - 1: the row's median was fitted to the same few iterations
    correction = np.sqrt(num_iterations / (num_iterations - 1))
    by_level = float(robust.MAD_TO_SIGMA * robust.median(np.abs(centred))) * correction
    if num_iterations < 8:
        return by_level if np.isfinite(by_level) else 0.0
    by_steps = float(robust.median(robust.step_noise(value)))
    return float(np.nan_to_num(min(by_level, 1.2 * by_steps)))


def _burst_size(value: Floats) -> float:
    """Root mean square within a row, the median row's: large where bursts are everybody's."""
    centred = value - robust.mean(value, axis=1)[:, None]
    return float(np.nan_to_num(robust.median(np.sqrt(robust.mean(centred**2, axis=1)))))


def _between(value: Floats, excluded: Bools, pooled: float) -> float:
    """Spread of the ranks' levels beyond what noise explains; needs enough ranks.

    Taken from the third of the ranks that lie closest to their peers, since several faults move
    the peers of sound ranks as well.
    """
    level = np.abs(robust.median(value[~excluded], axis=1))
    level = level[np.isfinite(level)]
    if len(level) < MIN_RANKS_FOR_SPREAD:
        return 0.0
    seen = float(np.quantile(level, CLOSEST)) / float(special.ndtri(0.5 + CLOSEST / 2))
    explained = robust.MEDIAN_LOSS * pooled / np.sqrt(value.shape[1])
    return float(np.sqrt(max(seen**2 - explained**2, 0.0)))


def _inflation(centred: Floats) -> float:
    if centred.shape[0] < 4 or centred.shape[1] < 8:
        return 1.0
    limit = 4 * float(robust.spread(centred)) + 1e-12
    clipped = np.nan_to_num(np.clip(centred, -limit, limit))
    energy = (clipped**2).sum(axis=1)
    lagged = (clipped[:, 1:] * clipped[:, :-1]).sum(axis=1)
    rho = lagged[energy > 0] / energy[energy > 0] if (energy > 0).any() else np.zeros(1)
    typical = float(np.clip(np.median(rho), 0.0, MAX_AUTOCORRELATION))
    return (1 + typical) / (1 - typical)


def minimum_detectable_effect(
    noise: Noise, num_iterations: int, num_tests: int, rate: float, power: float
) -> float:
    """Smallest lasting effect (log units) that is found with probability `power`.

    `rate` is the false-discovery rate.

        effect = (t(1 − q / m) + t(power)) · standard error

    for m tests of which the first is judged at q / m by Benjamini-Hochberg; the usual formula for
    the minimum detectable effect (Bloom 1995, Evaluation Review 19(5)), with the t law's quantiles.
    """
    critical = -special.stdtrit(noise.degrees, rate / max(num_tests, 1))
    reserve = special.stdtrit(noise.degrees, power)
    typical = float(np.median(noise.standard_error(float(num_iterations))))
    return float((critical + reserve) * typical)
