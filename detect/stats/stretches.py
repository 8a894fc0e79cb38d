"""Tell when a row was slow.

A row is slow all the time, in a stretch of iterations, or on and off.

The whole window is judged by the rank's level against its peers, which sound ranks keep within a
per cent.

A stretch is judged by the change against the rank's own iterations next to it, which lasting
differences between ranks do not touch. The best of all stretches of at least `min_iterations`
counts, its p-value multiplied by the number that were tried. It is then verified, since a search
for changes finds some in the noise of healthy series: in the original values most iterations of the
stretch must exceed those next to it, and more of them than chance would give at the rate of healthy
ranks. A two-state path (normal, slow) found by dynamic programming gives onset, end and flapping.

Example: 5 of 20 iterations 6 % above the 10 next to them, noise 1 % an iteration: the change is 9.5
standard errors, and its p-value is multiplied by 210 stretches that were tried.

On and off: a rank that is slow every second iteration has no stretch, and its own noise seems as
large as the fault. But its values fall into two heaps, those of its peers into one. They are split
where that leaves the least variance (Otsu's threshold); then so many values above the middle must
be improbable at the rate of the other ranks:

    p = P(Binomial(iterations, rate of the others) >= hits) · splits tried

Example: 9 of 18 iterations 3 % slow, and 0 of 54 of the others beyond 1.5 %: p < 1e-9. Limit: fewer
slow iterations than `min_iterations` are chance.

More and more: a device that gets hotter rises to its level. Where a flat part, a steady rise and a
flat part describe the series better than a step does, it began where the rise begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.stats import robust
from detect.stats.noise import Noise
from detect.thresholds.statistics import PERSISTENCE, ROBUST
from megascan.arrays import Flags, Floats, Integers, mask_of


@dataclass(frozen=True)
class Stretch:
    """Best evidence of one rank: iterations [first, last], effect in log units."""

    row: int
    first: int
    last: int
    effect: float
    p_value: float
    normal: float = 0.0
    """The rank's level next to the stretch; for the whole window 0, the level of its peers."""
    scattered: bool = False
    """Whether the rank is slow in single iterations between first and last only."""
    sigma: float = 0.0
    """If scattered: what single iterations of sound ranks vary by."""


def scattered_stretches(
    value: Floats, noise: Noise, min_iterations: int, excluded: Flags
) -> list[Stretch | None]:
    """Return for every row the evidence for a fault that comes and goes, or None."""
    usual = float(robust.median(noise.sigma))
    spreads = robust.spread(value, axis=1)[~excluded]
    sigma = float(np.nan_to_num(np.fmin(robust.median(spreads), usual), nan=usual))
    heaps = _Heaps.of(value)
    sigmas = np.minimum(sigma, PERSISTENCE.heaps_widen_ratio * heaps.scatter)
    sound = value[~excluded]
    num_sound = int(np.isfinite(sound).sum())
    found: list[Stretch | None] = [None] * len(value)
    for row in np.flatnonzero(heaps.are_apart(sigmas, min_iterations)).tolist():
        slow, normal, num_own = float(heaps.high[row]), heaps.low[row], int(heaps.num_known[row])
        middle = float(slow + normal) / 2
        active = np.flatnonzero(value[row] > middle)
        hits, is_sound = len(active), not excluded[row]
        num_above = int((sound > middle).sum()) - is_sound * hits
        # the other rows' values; without others (a pair), the row's own iterations
        num_others = num_sound - is_sound * num_own or num_own
        rate = (num_above + 1.0) / (num_others + 2.0)
        p_value = float(special.bdtrc(hits - 1, num_own, rate)) * num_own * 2
        found[row] = Stretch(
            row=row,
            first=int(active[0]),
            last=int(active[-1]),
            effect=slow,
            p_value=min(1.0, p_value),
            normal=float(normal),
            scattered=True,
            sigma=float(sigmas[row]),
        )
    return found


@dataclass(frozen=True)
class _Heaps:
    """The two heaps that each row's known values fall into, (row,): sizes and means."""

    num_known: Integers
    num_low: Integers
    low: Floats
    high: Floats
    scatter: Floats
    """Standard deviation of the values about the mean of their heap."""

    @classmethod
    def of(cls, value: Floats) -> _Heaps:
        """Split (row, iteration) where that explains most of a row's variance."""
        ordered = np.sort(np.where(np.isfinite(value), value, np.nan), axis=1)  # NaN last
        known = np.isfinite(ordered)
        num_known = known.sum(axis=1)
        sums = np.cumsum(np.where(known, ordered, 0.0), axis=1)
        size, below, total = np.arange(1, value.shape[1]), sums[:, :-1], sums[:, -1:]
        rest = num_known[:, None] - size
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = (total - below) / rest - below / size
            explained = np.where(rest > 0, size * rest * gap**2, -np.inf)
        num_low = np.argmax(explained, axis=1) + 1 if len(size) else np.ones_like(num_known)
        of_low = np.take_along_axis(sums, num_low[:, None] - 1, axis=1)[:, 0]
        num_high = np.maximum(num_known - num_low, 1)
        low, high = of_low / num_low, (total[:, 0] - of_low) / num_high
        is_low = np.arange(value.shape[1]) < num_low[:, None]
        within = ordered - np.where(is_low, low[:, None], high[:, None])
        scatter = np.sqrt(robust.mean(within**2, axis=1))
        return cls(num_known, num_low, low, high, scatter)

    def are_apart(self, sigma: Floats, min_iterations: int) -> Flags:
        """Return which rows are slow in enough iterations, by enough, (row,).

        `sigma` (row,) is what single iterations vary by.
        """
        num_high = self.num_known - self.num_low
        enough = (num_high >= min_iterations) & (self.num_low >= PERSISTENCE.min_normal)
        least = np.maximum(PERSISTENCE.apart_sigmas * sigma, self.high / 2)
        return np.asarray(enough & (self.high > 0) & (self.high - self.low >= least))


@dataclass(frozen=True)
class Course:
    """State of a suspect over the window."""

    active: Flags
    """(iteration,)"""
    effect: float
    """Log units, centre over the active iterations."""
    standard_error: float
    share: float
    """Share of the iterations between onset and end that are clearly above the peers."""
    episodes: tuple[tuple[int, int], ...]
    """First and last index of each active stretch."""
    rise: tuple[int, int] | None = None
    """Indices of the iterations from which and until which it rose to its level, where it is not
    there at once."""

    @classmethod
    def of(cls, active: Flags, effect: float, standard_error: float) -> Course:
        """Return the course whose stretches are those of the `active` iterations."""
        episodes = episodes_of(active)
        share = int(active.sum()) / (episodes[-1][1] - episodes[0][0] + 1)
        return cls(active, effect, standard_error, share, episodes)


def active_in(course: Course | None, num_iterations: int) -> Flags:
    """Flag the iterations of a course, (iteration,); all where it is None, the whole window."""
    return np.ones(num_iterations, dtype=bool) if course is None else course.active


def best_stretches(
    value: Floats,
    noise: Noise,
    min_iterations: int,
    excluded: Flags,
    *,
    scattered: bool = True,
    groups: Sequence[Integers] = (),
) -> list[Stretch]:
    """Return the most telling verified stretch of every row of (row, iteration).

    Rows that are `excluded` do not count as healthy, nor, of `groups` that have two others, the one
    for the other, whose values it mirrors. With `scattered`, look for rows that are slow in single
    iterations, too.
    """
    num_iterations = value.shape[1]
    whole = _whole_window(value, noise)
    scores, firsts = _scan(robust.three_point_median(value), noise, min_iterations)
    num_tried = max(1, num_iterations * (num_iterations + 1) // 2)
    p_values = noise.change_p_value(scores) * num_tried * 2
    found = [
        _part_of_window(one, value[one.row], p_values[one.row], firsts[one.row], min_iterations)
        for one in whole
    ]
    pairs = [pair for rows in groups if len(pair := rows[~excluded[rows]]) == 2]
    beside = {
        row: excluded | mask_of(pair.tolist(), len(value))
        for pair in pairs
        for row in pair.tolist()
    }
    charged = [
        _charged(one, value, beside.get(one.row, excluded), num_tried, noise) for one in found
    ]
    if not scattered:
        return charged
    flapping = scattered_stretches(value, noise, min_iterations, excluded)
    return [
        other if other and other.p_value < PERSISTENCE.clearer_p_ratio * one.p_value else one
        for one, other in zip(charged, flapping, strict=True)
    ]


def _part_of_window(
    whole: Stretch, series: Floats, p_values: Floats, firsts: Integers, min_iterations: int
) -> Stretch:
    """Return the least probable stretch of a row that its original values confirm and that is
    clearer than the `whole` window; the whole window where there is none.

    `p_values` and `firsts` are those of the best stretch of each length from `min_iterations` on.
    """
    least = PERSISTENCE.clearer_p_ratio * whole.p_value
    if not (p_values < least).any():
        return whole
    for place in np.argsort(p_values).tolist():
        if p_values[place] >= least:
            break
        first, length = int(firsts[place]), min_iterations + place
        levels = _verified(series, first, length)
        if levels is not None:
            effect, normal = levels
            last = first + length - 1
            return Stretch(whole.row, first, last, effect, float(p_values[place]), normal)
    return whole


def least_beyond_bursts(noise: Noise, num_iterations: int, p_value: float) -> float:
    """Return the least lasting effect that bursts of healthy rows cannot feign at this p-value.

    All iterations must lie above half of the effect, which those of healthy rows do so rarely that
    all of them together have the p-value. Example: 2 iterations, noise of 1 % and p = 1e-4: of a
    law with 3 degrees of freedom one in 140 lies beyond 5 sigma: 10 %.
    """
    if not noise.usual.tail_degrees:
        return 0.0
    rate = (p_value / 2) ** (1.0 / max(num_iterations, 1))
    sigma = float(np.median(noise.sigma))
    return max(0.0, -2.0 * float(special.stdtrit(noise.usual.tail_degrees, rate)) * sigma)


def _charged(
    stretch: Stretch, value: Floats, excluded: Flags, num_tried: int, noise: Noise
) -> Stretch:
    """Return the stretch with its p-value raised to what bursts of healthy rows may feign.

    Healthy rows exceed the middle between normal and slow in a share of their iterations, whatever
    the law of their noise. So many hits in so many iterations must be improbable at that rate.
    Where healthy rows never exceed it, a law with heavy tails says how rarely they would: n
    iterations show no rate below 1 / n, but two of two iterations at three times the peers' time
    are no accident.
    """
    if stretch.p_value > PERSISTENCE.worth_charging_p:
        return stretch
    middle = (stretch.effect + stretch.normal) / 2
    inside = value[stretch.row, stretch.first : stretch.last + 1]
    others = value[~excluded & (np.arange(len(value)) != stretch.row)]
    if not np.isfinite(others).any():  # a pair: the row's own iterations next to the stretch
        others = np.delete(value[stretch.row], slice(stretch.first, stretch.last + 1))
    if not np.isfinite(others).any():
        return stretch
    hits, length = int((inside > middle).sum()), int(np.isfinite(inside).sum())
    height, tried = middle, 1
    if length < value.shape[1]:  # a change: the others, too, are measured from their own level
        height, tried = middle - stretch.normal, num_tried
        others = others - np.expand_dims(robust.median(others, axis=-1), -1)
    num_above = int((others > height).sum())
    rate = (num_above + PERSISTENCE.prior_hits) / (
        int(np.isfinite(others).sum()) + 2 * PERSISTENCE.prior_hits
    )
    if not num_above and noise.usual.tail_degrees:
        sigmas = height / max(float(np.median(noise.sigma)), 1e-6)
        rate = min(rate, float(special.stdtr(noise.usual.tail_degrees, -sigmas)))
    by_chance = float(special.bdtrc(hits - 1, length, rate)) * tried * 2
    return replace(stretch, p_value=max(stretch.p_value, min(1.0, by_chance)))


def _whole_window(value: Floats, noise: Noise) -> list[Stretch]:
    num_iterations = value.shape[1]
    effect = np.nan_to_num(robust.centre(value))
    p_values = np.minimum(1.0, 2 * noise.level_p_value(effect, float(num_iterations)))
    inside_share = robust.mean((value > effect[:, None] / 2).astype(np.float64), axis=1)
    p_values = np.where(inside_share >= PERSISTENCE.min_inside_share, p_values, 1.0)
    return [
        Stretch(row, 0, num_iterations - 1, float(effect[row]), float(p_values[row]))
        for row in range(len(value))
    ]


def _scan(smooth: Floats, noise: Noise, min_iterations: int) -> tuple[Floats, Integers]:
    """Return score and first iteration of each row's best stretch, by length below the window's.

    Both are (row, length - min_iterations); the score counts standard errors of the change.
    """
    filled = np.nan_to_num(smooth)
    num_rows, num_iterations = filled.shape
    total = np.concatenate([np.zeros((num_rows, 1)), np.cumsum(filled, axis=1)], axis=1)
    num_lengths = max(0, num_iterations - PERSISTENCE.min_outside - min_iterations + 1)
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
        score[:, num_beside < PERSISTENCE.min_outside] = -np.inf
        firsts[:, place] = np.argmax(score, axis=1)
        scores[:, place] = score[np.arange(num_rows), firsts[:, place]]
    return scores, firsts


def _neighbourhood(first: Integers, length: int, num_iterations: int) -> tuple[Integers, Integers]:
    """Return [low, high) around stretches: as long again on either side, within the window."""
    reach = max(length, PERSISTENCE.min_outside)
    return np.maximum(first - reach, 0), np.minimum(first + length + reach, num_iterations)


def _verified(series: Floats, first: int, length: int) -> tuple[float, float] | None:
    """Return levels (inside, beside) of a stretch that the original values confirm, None otherwise.

    The stretch must be above the peers, most of its iterations above the middle between the levels,
    and most of its effect new.
    """
    low, high = _neighbourhood(np.array([first]), length, len(series))
    inside = series[first : first + length]
    beside = np.concatenate([series[low[0] : first], series[first + length : high[0]]])
    effect = float(robust.centre(inside))
    level = float(robust.centre(beside)) if np.isfinite(beside).any() else 0.0
    change, middle = effect - level, (effect + level) / 2
    inside_share = float(robust.mean((inside > middle).astype(np.float64)))
    if not inside_share >= PERSISTENCE.min_inside_share:
        return None
    # where the row is hardly above its peers, it is they that changed
    if not (effect > 0 and effect >= PERSISTENCE.min_above_share * change):
        return None
    return (effect, level) if change > effect / 2 else None


def follow(series: Floats, start: Stretch, noise: Noise) -> Course:
    """Follow a suspect through the window: where it was slow, and by how much."""
    sigma = max(float(noise.sigma[start.row]), 1e-6)
    penalty = PERSISTENCE.switch_penalty
    if start.scattered:  # the rank's own noise is mostly the fault
        sigma = max(min(sigma, start.sigma), 1e-6)
        penalty = PERSISTENCE.flapping_penalty
    normal, slow = start.normal, start.effect
    active = np.zeros(len(series), dtype=bool)
    active[start.first : start.last + 1] = True
    for _ in range(PERSISTENCE.num_refits):
        path = _two_state_path(series, normal, slow, sigma, penalty)
        if not path.any():
            break
        active = path
        slow = float(robust.centre(series[active]))
        if start.normal and (~active).any():
            normal = float(robust.centre(series[~active]))
    own = normal if abs(normal) < PERSISTENCE.own_level_log else 0.0
    num_active = int((active & np.isfinite(series)).sum())
    error = ROBUST.centre_loss_ratio * sigma * np.sqrt(noise.inflation / max(num_active, 1))
    episodes = episodes_of(active)
    inside = series[episodes[0][0] : episodes[-1][1] + 1]
    share = float(robust.mean((inside > (slow + own) / 2).astype(np.float64)))
    return Course(active, slow - own, float(error), share, episodes)


def rise_to(series: Floats, course: Course) -> tuple[int, int] | None:
    """Return the indices from which and until which a suspect rose steadily, through where its
    course begins; None where it came to its level in one step, or was never seen below it.

    A device that gets hotter is slower by a little more each iteration, and stands out, where its
    course begins, long after it began. Of all ways to describe the series as
    flat, then rising by as much each iteration, then flat, the one with the least squares is
    compared with a step at the course's begin: two numbers more must be worth it (F test).

    Example: 0, -0.1, 0, 1.6, 2.3, 3.5, 4.9, 5.7, 6.6, 8 % and on: since the fourth iteration, not
    since the seventh, from which on it lies clearly apart.
    """
    first, last = course.episodes[0]
    window = series[: last + 1]
    length = len(window)
    if len(course.episodes) > 1 or first == 0 or not np.isfinite(window).all():
        return None
    free = length - PERSISTENCE.numbers_of_rise
    if free < 1 or first + 1 >= length:
        return None
    step = _squares(window, first, first)
    starts, levels = _spread_over(1, first + 1), _spread_over(first + 1, length)
    level = min(levels, key=lambda one: min(_squares(window, start, one) for start in starts))
    start = min(range(1, first + 1), key=lambda one: _squares(window, one, level))
    squares = max(_squares(window, start, level), 1e-12)
    ratio = (step - squares) / 2 / (squares / free)
    is_rise = special.fdtrc(2, free, max(ratio, 0.0)) <= PERSISTENCE.rise_p
    return (start, level) if is_rise and start < first else None


def _spread_over(first: int, end: int) -> list[int]:
    """Return the numbers from `first` to before `end`, or some of them where they are many."""
    step = max(1, -(-(end - first) // PERSISTENCE.most_tried))
    return list(range(first, end, step))


def _squares(series: Floats, start: int, level: int) -> float:
    """Return the sum of squares about a series that is flat before `start`, rises by as much each
    iteration until `level`, and is flat from there on.
    """
    shape = np.clip((np.arange(len(series)) - start + 1.0) / (level - start + 1.0), 0.0, 1.0)
    centred, values = shape - shape.mean(), series - series.mean()
    slope = max(0.0, float(centred @ values) / max(float(centred @ centred), 1e-12))
    rest = values - slope * centred
    return float(rest @ rest)


def _two_state_path(
    series: Floats, normal: float, slow: float, sigma: float, penalty: float
) -> Flags:
    """Return the Viterbi path between two levels, normal noise clipped at 4 sigma."""
    distances = np.nan_to_num((series - np.array([[normal], [slow]])) / sigma)
    # bounded, so that one odd iteration is no change of state
    bounded = np.minimum(0.5 * distances**2, PERSISTENCE.max_cost)
    costs = zip(*bounded.tolist(), strict=True)  # plain numbers: quicker to ask one by one
    low, high = next(costs)
    stays = [(True, True)]  # whether the best way to (normal, slow) comes from the same state
    for cost_low, cost_high in costs:
        to_low, to_high = high + penalty, low + penalty
        stays.append((low <= to_low, high <= to_high))
        low, high = min(low, to_low) + cost_low, min(high, to_high) + cost_high
    path = np.zeros(len(series), dtype=bool)
    state = int(high < low)
    for step in range(len(series) - 1, -1, -1):
        path[step] = state == 1
        state = state if stays[step][state] else 1 - state
    return path


def episodes_of(active: Flags) -> tuple[tuple[int, int], ...]:
    """Return the first and last slot of each stretch of active iterations."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], active.astype(np.int8), [0]])))
    return tuple((int(edges[i]), int(edges[i + 1]) - 1) for i in range(0, len(edges), 2))
