"""When a rank was slow: from which iteration, until which, all the time or on and off.

Problem: a fault may hold for 5 of 20 iterations, and an unverified change-point search finds
changes in noise in a fifth to a third of healthy series.

Idea: for each rank the best of all stretches of at least `min_iterations` (the whole window is one
of them), its p-value charged with the number of stretches that were tried, then verified: in the
original values most iterations of the stretch must exceed the peers. A two-state path (normal,
slow) found by dynamic programming then gives onset, end and flapping.

Limit: a fault that switches more often than every `min_iterations` looks like noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import Bools, Floats, Ints
from detect.stats import robust
from detect.stats.noise import Noise

MIN_INSIDE = 0.7
"""Share of a stretch's iterations that must lie above the middle between slow and normal."""
SWITCH_PENALTY = 5.0
"""Log-likelihood that each change of state must gain."""


@dataclass(frozen=True)
class Stretch:
    """Best evidence of one rank: iterations [first, last], effect in log units."""

    row: int
    first: int
    last: int
    effect: float
    p_value: float


@dataclass(frozen=True)
class Course:
    """State of a suspect over the window."""

    active: Bools
    """(iteration,)"""
    effect: float
    """Log units, median over the active iterations."""
    standard_error: float
    share: float
    """Of the iterations between onset and end, those clearly above the peers."""
    episodes: tuple[tuple[int, int], ...]
    """First and last index of each active stretch."""


def best_stretches(value: Floats, noise: Noise, min_iterations: int) -> list[Stretch]:
    """The most telling verified stretch of every row of (row, iteration)."""
    num_rows, num_iterations = value.shape
    whole = _whole_window(value, noise)
    scores, firsts = _scan(robust.three_point_median(value), noise, min_iterations)
    num_tried = max(1, num_iterations * (num_iterations + 1) // 2)
    result = []
    for row in range(num_rows):
        best = whole[row]
        for place in np.argsort(-scores[row]):
            p_value = float(noise.p_value(scores[row, place])) * num_tried * 2
            if p_value >= best.p_value / 4:
                break
            first, length = int(firsts[row, place]), min_iterations + int(place)
            if _holds(value[row], first, length):
                effect = float(robust.median(value[row, first : first + length]))
                best = Stretch(row, first, first + length - 1, effect, p_value)
                break
        result.append(best)
    return result


def _whole_window(value: Floats, noise: Noise) -> list[Stretch]:
    num_iterations = value.shape[1]
    effect = robust.median(value, axis=1)
    score = np.nan_to_num(effect / noise.standard_error(float(num_iterations)))
    p_values = np.minimum(1.0, 2 * noise.p_value(score))
    return [
        Stretch(row, 0, num_iterations - 1, float(np.nan_to_num(effect[row])), float(p_values[row]))
        for row in range(len(value))
    ]


def _scan(smooth: Floats, noise: Noise, min_iterations: int) -> tuple[Floats, Ints]:
    """Score and first iteration of each row's best stretch of every length below the window's.

    Both are (row, length - min_iterations).
    """
    filled = np.nan_to_num(smooth)
    num_rows, num_iterations = filled.shape
    total = np.concatenate([np.zeros((num_rows, 1)), np.cumsum(filled, axis=1)], axis=1)
    num_lengths = max(0, num_iterations - min_iterations)
    scores = np.full((num_rows, num_lengths), -np.inf)
    firsts = np.zeros((num_rows, num_lengths), dtype=np.int64)
    for place in range(num_lengths):
        length = min_iterations + place
        means = (total[:, length:] - total[:, :-length]) / length
        firsts[:, place] = np.argmax(means, axis=1)
        best = means[np.arange(num_rows), firsts[:, place]]
        scores[:, place] = best / noise.standard_error(float(length))
    return scores, firsts


def _holds(series: Floats, first: int, length: int) -> bool:
    """Whether the stretch is there in the original values: most of it, and above the rest."""
    inside = series[first : first + length]
    outside = np.concatenate([series[:first], series[first + length :]])
    effect = float(robust.median(inside))
    level = float(robust.median(outside)) if np.isfinite(outside).any() else 0.0
    lasts = float(robust.mean((inside > (effect + level) / 2).astype(np.float64))) >= MIN_INSIDE
    return effect > 0 and lasts and effect - level > effect / 2


def follow(series: Floats, start: Stretch, sigma: float, inflation: float) -> Course:
    """Two-state path of a suspect: where it was slow, and by how much."""
    noise = max(sigma, 1e-6)
    effect = start.effect
    active = np.zeros(len(series), dtype=bool)
    active[start.first : start.last + 1] = True
    for _ in range(4):
        path = _two_state_path(series, effect, noise)
        if not path.any():
            break
        active = path
        effect = float(robust.median(series[active]))
    num_active = int((active & np.isfinite(series)).sum())
    error = robust.MEDIAN_LOSS * noise * np.sqrt(inflation / max(num_active, 1))
    episodes = _episodes(active)
    covered = episodes[-1][1] - episodes[0][0] + 1
    inside = series[episodes[0][0] : episodes[0][0] + covered]
    share = float(robust.mean((inside > effect / 2).astype(np.float64)))
    return Course(active, effect, float(error), share, episodes)


def _two_state_path(series: Floats, effect: float, sigma: float) -> Bools:
    """Viterbi path between level 0 and level `effect`, normal noise clipped at 3 sigma."""
    cost = np.stack([_cost(series, 0.0, sigma), _cost(series, effect, sigma)], axis=1)
    num = len(series)
    best = np.zeros((num, 2))
    origin = np.zeros((num, 2), dtype=np.int64)
    best[0] = cost[0]
    for step in range(1, num):
        for state in (0, 1):
            stay, switch = best[step - 1, state], best[step - 1, 1 - state] + SWITCH_PENALTY
            origin[step, state] = state if stay <= switch else 1 - state
            best[step, state] = min(stay, switch) + cost[step, state]
    path = np.zeros(num, dtype=bool)
    state = int(np.argmin(best[-1]))
    for step in range(num - 1, -1, -1):
        path[step] = state == 1
        state = int(origin[step, state])
    return path


def _cost(series: Floats, level: float, sigma: float) -> Floats:
    """Half squared distance in sigmas; bounded, so that one odd iteration is no change of state."""
    distance = np.nan_to_num((series - level) / sigma)
    return np.minimum(0.5 * distance**2, 8.0)


def _episodes(active: Bools) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], active.astype(np.int8), [0]])))
    return tuple((int(edges[i]), int(edges[i + 1]) - 1) for i in range(0, len(edges), 2))
