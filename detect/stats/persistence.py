"""When a rank was slow: from which iteration, until which, all the time or on and off.

Problem: a fault may hold for 5 of 20 iterations, and an unverified change-point search finds
changes in noise in a fifth to a third of healthy series.

Idea: the whole window is judged by the rank's level against its peers, which sound ranks keep
within a per cent. A part of it is judged by the change against the rank's own iterations beside
it, which such lasting differences do not touch: of all stretches of at least `min_iterations` the
best, its p-value charged with the number of stretches that were tried, then verified: in the
original values most iterations of the stretch must exceed those beside it, and more of them than
chance would give at the rate at which healthy ranks do. A two-state path (normal, slow) found by
dynamic programming then gives onset, end and flapping.

A fault that switches more often than every `min_iterations` has no stretch; `flapping` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.observations import Bools, Floats, Ints
from detect.stats import robust
from detect.stats.flapping import scattered_stretches
from detect.stats.noise import Noise
from detect.stats.stretches import Stretch

MIN_INSIDE = 0.7
"""Share of a stretch's iterations that must lie above the middle between slow and normal."""
MIN_ABOVE = 0.25
"""Share of a change by which its slow part lies above the peers: of two ranks that mirror each
other, the one that was slower before its peer changed is not at fault."""
MIN_OUTSIDE = 3
"""Iterations beside a stretch that it is compared with, at least."""
SWITCH_PENALTY = 5.0
FLAPPING_PENALTY = 0.5
"""Log-likelihood that each change of state must gain; little where changes are the rule."""
WORTH_CHARGING = 0.01
"""Larger p-values can lead to nothing."""
PRIOR = 0.5
"""Hits and misses that healthy rows are taken to have had before any was seen (Jeffreys)."""
OWN_LEVEL = 0.02
"""A rank whose normal level is this close to its peers' (log units) is measured by its change."""


@dataclass(frozen=True)
class Course:
    """State of a suspect over the window."""

    active: Bools
    """(iteration,)"""
    effect: float
    """Log units, centre over the active iterations."""
    standard_error: float
    share: float
    """Of the iterations between onset and end, those clearly above the peers."""
    episodes: tuple[tuple[int, int], ...]
    """First and last index of each active stretch."""


def best_stretches(
    value: Floats, noise: Noise, min_iterations: int, excluded: Bools, *, scattered: bool = True
) -> list[Stretch]:
    """The most telling verified stretch of every row of (row, iteration).

    Rows that are `excluded` do not speak for what healthy rows do. `scattered` looks for rows that
    are slow in single iterations, too.
    """
    num_rows, num_iterations = value.shape
    whole = _whole_window(value, noise)
    scores, firsts = _scan(robust.three_point_median(value), noise, min_iterations)
    num_tried = max(1, num_iterations * (num_iterations + 1) // 2)
    p_values = noise.change_p_value(scores) * num_tried * 2
    result = []
    for row in range(num_rows):
        best = whole[row]
        for place in np.argsort(p_values[row]):
            p_value = float(p_values[row, place])
            if p_value >= best.p_value / 4:
                break
            found = _verified(value[row], int(firsts[row, place]), min_iterations + int(place))
            if found is not None:
                effect, normal = found
                first = int(firsts[row, place])
                last = first + min_iterations + int(place) - 1
                best = Stretch(row, first, last, effect, p_value, normal)
                break
        result.append(best)
    charged = [_charged(one, value, excluded, num_tried) for one in result]
    if not scattered:
        return charged
    flapping = scattered_stretches(value, noise, min_iterations, excluded)
    return [
        other if other is not None and other.p_value < one.p_value / 4 else one
        for one, other in zip(charged, flapping, strict=True)
    ]


def _charged(stretch: Stretch, value: Floats, excluded: Bools, num_tried: int) -> Stretch:
    """The stretch with its p-value raised to what bursts of healthy rows may feign.

    Healthy rows exceed the middle between normal and slow in a share of their iterations, whatever
    the law of their noise. So many hits in so many iterations must be improbable at that rate.
    """
    if stretch.p_value > WORTH_CHARGING:
        return stretch
    middle = (stretch.effect + stretch.normal) / 2
    inside = value[stretch.row, stretch.first : stretch.last + 1]
    others = value[~excluded & (np.arange(len(value)) != stretch.row)]
    if not np.isfinite(others).any():  # of a pair: its own iterations beside
        others = np.delete(value[stretch.row], slice(stretch.first, stretch.last + 1))
    if not np.isfinite(others).any():
        return stretch
    hits, length = int((inside > middle).sum()), int(np.isfinite(inside).sum())
    tried, above = 1, others > middle
    if length < value.shape[1]:  # a change: of the others, too, what exceeds their own level
        tried, above = num_tried, _changes(others) > middle - stretch.normal
    rate = (int(above.sum()) + PRIOR) / (int(np.isfinite(others).sum()) + 2 * PRIOR)
    by_chance = float(special.bdtrc(hits - 1, length, rate)) * tried * 2
    return replace(stretch, p_value=max(stretch.p_value, min(1.0, by_chance)))


def _changes(values: Floats) -> Floats:
    """Values less the median of their row."""
    return np.asarray(values - np.expand_dims(robust.median(values, axis=-1), -1))


def _whole_window(value: Floats, noise: Noise) -> list[Stretch]:
    num_iterations = value.shape[1]
    effect = np.nan_to_num(robust.centre(value))
    p_values = np.minimum(1.0, 2 * noise.level_p_value(effect, float(num_iterations)))
    lasts = robust.mean((value > effect[:, None] / 2).astype(np.float64), axis=1) >= MIN_INSIDE
    p_values = np.where(lasts, p_values, 1.0)
    return [
        Stretch(row, 0, num_iterations - 1, float(effect[row]), float(p_values[row]))
        for row in range(len(value))
    ]


def _scan(smooth: Floats, noise: Noise, min_iterations: int) -> tuple[Floats, Ints]:
    """Score and first iteration of each row's best stretch of every length below the window's.

    Both are (row, length - min_iterations); the score counts standard errors of the change.
    """
    filled = np.nan_to_num(smooth)
    num_rows, num_iterations = filled.shape
    total = np.concatenate([np.zeros((num_rows, 1)), np.cumsum(filled, axis=1)], axis=1)
    num_lengths = max(0, num_iterations - MIN_OUTSIDE - min_iterations + 1)
    scores = np.full((num_rows, num_lengths), -np.inf)
    firsts = np.zeros((num_rows, num_lengths), dtype=np.int64)
    for place in range(num_lengths):
        length = min_iterations + place
        first = np.arange(num_iterations - length + 1)
        low, high = _neighbourhood(first, length, num_iterations)
        num_beside = high - low - length
        inside = total[:, first + length] - total[:, first]
        beside = total[:, high] - total[:, low] - inside
        change = inside / length - beside / np.maximum(num_beside, 1)
        score = change / noise.change_error(length, num_beside)
        score[:, num_beside < MIN_OUTSIDE] = -np.inf
        firsts[:, place] = np.argmax(score, axis=1)
        scores[:, place] = score[np.arange(num_rows), firsts[:, place]]
    return scores, firsts


def _neighbourhood(first: Ints, length: int, num_iterations: int) -> tuple[Ints, Ints]:
    """[low, high) around stretches: as long again on either side, as far as the window goes."""
    reach = max(length, MIN_OUTSIDE)
    return np.maximum(first - reach, 0), np.minimum(first + length + reach, num_iterations)


def _verified(series: Floats, first: int, length: int) -> tuple[float, float] | None:
    """Levels (inside, beside) of a stretch that the original values confirm, None otherwise.

    It must be above the peers, most of it above the middle, and most of it new.
    """
    low, high = _neighbourhood(np.array([first]), length, len(series))
    inside = series[first : first + length]
    beside = np.concatenate([series[low[0] : first], series[first + length : high[0]]])
    effect = float(robust.centre(inside))
    level = float(robust.centre(beside)) if np.isfinite(beside).any() else 0.0
    lasts = float(robust.mean((inside > (effect + level) / 2).astype(np.float64))) >= MIN_INSIDE
    change = effect - level
    above = effect > 0 and effect >= MIN_ABOVE * change  # else it is its peers that changed
    return (effect, level) if above and lasts and change > effect / 2 else None


def follow(series: Floats, start: Stretch, noise: Noise) -> Course:
    """Two-state path of a suspect: where it was slow, and by how much."""
    sigma = max(float(noise.sigma[start.row]), 1e-6)
    penalty = SWITCH_PENALTY
    if start.scattered:  # the rank's own noise is mostly the fault
        sigma = max(min(sigma, start.sigma), 1e-6)
        penalty = FLAPPING_PENALTY
    normal, slow = start.normal, start.effect
    active = np.zeros(len(series), dtype=bool)
    active[start.first : start.last + 1] = True
    for _ in range(4):
        path = _two_state_path(series, normal, slow, sigma, penalty)
        if not path.any():
            break
        active = path
        slow = float(robust.centre(series[active]))
        if start.normal and (~active).any():
            normal = float(robust.centre(series[~active]))
    own = normal if abs(normal) < OWN_LEVEL else 0.0
    num_active = int((active & np.isfinite(series)).sum())
    error = robust.CENTRE_LOSS * sigma * np.sqrt(noise.inflation / max(num_active, 1))
    episodes = _episodes(active)
    inside = series[episodes[0][0] : episodes[-1][1] + 1]
    share = float(robust.mean((inside > (slow + own) / 2).astype(np.float64)))
    return Course(active, slow - own, float(error), share, episodes)


def _two_state_path(
    series: Floats, normal: float, slow: float, sigma: float, penalty: float
) -> Bools:
    """Viterbi path between two levels, normal noise clipped at 4 sigma."""
    cost = np.stack([_cost(series, normal, sigma), _cost(series, slow, sigma)], axis=1)
    num = len(series)
    best = np.zeros((num, 2))
    origin = np.zeros((num, 2), dtype=np.int64)
    best[0] = cost[0]
    for step in range(1, num):
        for state in (0, 1):
            stay, switch = best[step - 1, state], best[step - 1, 1 - state] + penalty
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
