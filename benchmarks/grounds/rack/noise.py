"""Draw noise as clusters have it: heavy tails, and moments that depend on those before.

Times of kernels and messages are not normal: most lie within a fraction of a percent, a few far
off. What disturbs a chip or a host (its temperature, a neighbour's traffic, a daemon) lasts longer
than one operation, so deviations of neighbouring iterations are alike. Hoefler, Schneider and
Lumsdaine, "Characterizing the influence of system noise on large-scale applications by simulation"
(SC 2010), have the detours of hosts; "Understanding stragglers in large model training using
what-if analysis" (arXiv 2505.05713) how they add up in training jobs.
"""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.rack.hardware import Floats

_DEGREES = 4.0
"""Of Student's t: its fourth moment does not exist."""
_FARTHEST = 8.0
"""Deviations are cut here, in units of the scale: one draw in a million is no job's step."""


def tails(draws: np.random.Generator, shape: tuple[int, ...], scale: float) -> Floats:
    """Return factors around 1 whose logarithms are of Student's t."""
    deviations = np.clip(draws.standard_t(_DEGREES, shape), -_FARTHEST, _FARTHEST)
    return np.asarray(np.exp(scale * deviations), dtype=np.float64)


def wander(
    draws: np.random.Generator, shape: tuple[int, ...], scale: float, memory: float
) -> Floats:
    """Return logarithms that wander around 0 along the last axis: an autoregression of order 1.

    x_t = memory x_{t-1} + sqrt(1 - memory^2) e_t keeps the scale of e at every t.
    """
    steps = np.clip(draws.standard_t(_DEGREES, shape), -_FARTHEST, _FARTHEST)
    steps *= scale / np.sqrt(_DEGREES / (_DEGREES - 2.0))
    found = np.empty(shape)
    found[..., 0] = steps[..., 0]
    keep = np.sqrt(1.0 - memory * memory)
    for place in range(1, shape[-1]):
        found[..., place] = memory * found[..., place - 1] + keep * steps[..., place]
    return found


def detours(
    draws: np.random.Generator, shape: tuple[int, ...], chance: float, shortest_s: float
) -> Floats:
    """Return seconds that a thread or a chip stands still: mostly none, else Pareto's."""
    hit = draws.random(shape) < chance
    lengths = shortest_s * (1.0 + draws.pareto(1.8, shape))
    return np.where(hit, np.minimum(lengths, 100.0 * shortest_s), 0.0)


def telegraph(
    draws: np.random.Generator, num_places: int, share: float, mean_length: float
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which places of a time line are covered by bursts that take about this share of it.

    Lengths of bursts and of pauses are geometric; the time line begins at a random place.
    """
    mean_pause = mean_length * (1.0 - share) / share
    found = np.zeros(num_places, dtype=np.bool_)
    place = -int(draws.integers(0, max(1, round(mean_pause))))
    while place < num_places:
        place += int(draws.geometric(1.0 / max(1.0, mean_pause)))
        length = int(draws.geometric(1.0 / max(1.0, mean_length)))
        found[max(0, place) : max(0, place + length)] = True
        place += length
    return found
