"""Ranks that are slow in scattered iterations: a fault that comes and goes faster than a stretch.

Problem: slow every second iteration, a rank has no stretch of slow iterations, and its own noise
seems as large as the fault.

Idea: its values fall into two heaps, those of its peers into one. The values are split in two where
that leaves the least variance (Otsu's threshold); then so many of them above the middle must be
improbable at the rate at which the other ranks do:

    p = P(Binomial(iterations, rate of the others) >= hits) · splits tried

Example: 9 of 18 iterations 3 % slow, and 0 of 54 of the others beyond 1.5 %: p < 1e-9.

Limit: fewer slow iterations than `min_iterations` are chance.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from detect.observations import Bools, Floats
from detect.stats import robust
from detect.stats.noise import Noise
from detect.stats.stretches import Stretch

APART = 4.0
"""Standard deviations of sound ranks by which the two heaps lie apart at least."""
HEAPS_WIDEN = 2.0
"""Times the spread within the heaps is enough where a pair has no sound rank to tell the noise: the
halves of normal noise are 2.7 of their own standard deviations apart, not 8."""
LEAST_NORMAL = 3
"""Iterations at the rank's normal level, at least."""


def scattered_stretches(
    value: Floats, noise: Noise, min_iterations: int, excluded: Bools
) -> list[Stretch | None]:
    """Of every row of (row, iteration) the evidence for a fault that comes and goes, or None."""
    usual = float(robust.median(noise.sigma))
    spreads = robust.spread(value, axis=1)[~excluded]
    sigma = float(np.nan_to_num(np.fmin(robust.median(spreads), usual), nan=usual))
    result: list[Stretch | None] = []
    for row in range(len(value)):
        others = value[~excluded & (np.arange(len(value)) != row)]
        result.append(_scattered(row, value[row], others, sigma, min_iterations))
    return result


def _scattered(
    row: int, series: Floats, others: Floats, sigma: float, min_iterations: int
) -> Stretch | None:
    known = np.sort(series[np.isfinite(series)])
    compared = int(np.isfinite(others).sum()) or len(known)  # of a pair: its own iterations
    if len(known) < min_iterations + LEAST_NORMAL:
        return None
    split = _split(known)
    normal, slow = float(np.mean(known[:split])), float(np.mean(known[split:]))
    if len(known) - split < min_iterations or split < LEAST_NORMAL:
        return None
    within = np.concatenate([known[:split] - normal, known[split:] - slow])
    sigma = min(sigma, HEAPS_WIDEN * float(np.std(within)))
    if slow <= 0 or slow - normal < max(APART * sigma, slow / 2):
        return None
    middle = (slow + normal) / 2
    hits = int((known > middle).sum())
    rate = (int((others > middle).sum()) + 1.0) / (compared + 2.0)
    p_value = float(special.bdtrc(hits - 1, len(known), rate)) * len(known) * 2
    active = np.flatnonzero(series > middle)
    return Stretch(
        row=row,
        first=int(active[0]),
        last=int(active[-1]),
        effect=slow,
        p_value=min(1.0, p_value),
        normal=normal,
        scattered=True,
        sigma=sigma,
    )


def _split(ordered: Floats) -> int:
    """Number of values in the lower of the two heaps that explain most of the variance."""
    count = np.arange(1, len(ordered))
    below = np.cumsum(ordered)[:-1]
    total = float(ordered.sum())
    gap = (total - below) / (len(ordered) - count) - below / count
    return int(count[np.argmax(count * (len(ordered) - count) * gap**2)])
