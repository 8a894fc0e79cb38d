"""Statistics that a few bad samples cannot move: medians, scales, noise of sound ranks.

NaN is "not recorded" in all of them.

**Noise.** How far does a healthy rank stray from its peers, and what does that let us find? A
rank's value differs from its peers' by noise in time, which averages out over iterations, and by a
lasting difference of devices, which does not:

    level error² = inflation · (1.15 sigma)² / iterations + between²

Example: sigma 1 %, no repetition, 18 iterations, between 0.4 %: 0.27 % from time, 0.48 % together;
a level 2.4 % above the peers is 5 standard errors.

Bound. Three ranks that differ by some per cent leave the spread of sound ranks almost unknown: a
t law with one degree of freedom then calls a rank at three times its peers' time an accident. But
sound devices do differ by less than `Usual.most`, whatever these few show. So a level is no more
probable than under the largest spread that they can have:

    p = min(P(t > effect / error), P(t > effect / error with between = most))

`t_tail` and `rank_correlation` are in scipy.stats, too, but its import takes 0.7 s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.thresholds import COSTS, NOISE, ROBUST
from megascan.arrays import Flags, Floats, Integers


def median(values: Floats, axis: int | None = None) -> Floats:
    """Return the median of the values that are not NaN; NaN where there are none.

    numpy's `nanmedian` gives the same numbers, but takes ten times as long for short rows.
    """
    given = np.asarray(values, dtype=np.float64)
    ordered = np.sort(given.ravel() if axis is None else given, axis=axis or 0)  # NaN last
    axis = axis or 0
    if not ordered.size:
        return np.full(np.delete(ordered.shape, axis), np.nan)
    num = ordered.shape[axis]
    if not np.isnan(ordered.take(-1, axis)).any():  # all are there: one place for all
        low, high = (ordered.take(place, axis) for place in ((num - 1) // 2, num // 2))
        return np.asarray(np.where(low == high, low, (low + high) / 2), dtype=np.float64)
    count = np.sum(~np.isnan(ordered), axis=axis, keepdims=True)
    low, high = (
        np.take_along_axis(ordered, np.maximum(place, 0), axis=axis)
        for place in ((count - 1) // 2, np.minimum(count // 2, num - 1))
    )
    middle = np.where(low == high, low, (low + high) / 2)
    return np.asarray(np.where(count > 0, middle, np.nan).squeeze(axis), dtype=np.float64)


def mean(values: Floats, axis: int | None = None) -> Floats:
    """Return the mean of the values that are not NaN; NaN where there are none.

    numpy's `nanmean` gives the same numbers, but warns where all values are NaN.
    """
    given = np.array(values, dtype=np.float64)
    missing = np.isnan(given)
    given[missing] = 0.0
    with np.errstate(invalid="ignore"):
        return np.asarray(given.sum(axis=axis) / (~missing).sum(axis=axis))


def centre(values: Floats) -> Floats:
    """Return the mean of the middle third and a little more along the last axis, NaN left out.

    Of n samples n // 3 are left out at either end. So a third of the samples may be anything, while
    less is wasted than by a median. NaN where there are no samples.
    """
    ordered = np.sort(values, axis=-1)  # NaN last
    count = np.isfinite(ordered).sum(axis=-1, keepdims=True)
    place = np.arange(values.shape[-1])
    cut = count // ROBUST.trimmed_parts
    kept = (place >= cut) & (place < count - cut)
    return mean(np.where(kept, ordered, np.nan), axis=-1)


def beyond_most(values: Floats) -> Floats:
    """Return by how much values, (row, …), exceed the median of all rows; 0 where they do not."""
    return np.asarray(np.maximum(values - np.median(values, axis=0), 0.0))


def spread(values: Floats, axis: int | None = None) -> Floats:
    """Return the standard deviation estimated by the median absolute deviation."""
    centre = median(values, axis=axis)
    if axis is not None:
        centre = np.expand_dims(centre, axis)
    return ROBUST.mad_to_sigma * median(np.abs(values - centre), axis=axis)


def ordinary(durations: Floats, counted: Flags) -> Flags:
    """Return the counted iterations without exceptional ones, those that save a checkpoint, say.

    Both arguments are (iteration,). An iteration that takes several times the median of the counted
    ones is exceptional. Example: 52, 51 and 2,900 ms are two ordinary iterations and an exceptional
    one.
    """
    if not counted.any():
        return counted
    return counted & (durations <= COSTS.exceptional_ratio * np.median(durations[counted]))


def leave_one_out_median(values: Floats) -> Floats:
    """Return for each entry the median of the other entries of its column; NaN where there is none.

    `values` is (member, sample). A suspect is thereby never part of its own expectation, which
    with two to four members matters more than any threshold. One sort serves all members: taking
    the element at sorted place p away shifts the ranks above p by one.

    Example: column (1, 2, 9) gives (5.5, 5, 1.5).
    """
    order = np.argsort(values, axis=0)
    ordered = np.take_along_axis(values, order, axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(len(values))[:, None], axis=0)
    present = np.isfinite(values)
    if present.all() and len(values) > 1:  # one place for all
        low, high = (
            np.where(place <= index, ordered[index + 1], ordered[index])
            for index in ((len(values) - 2) // 2, (len(values) - 1) // 2)
        )
        return np.asarray((low + high) / 2, dtype=np.float64)
    others = present.sum(axis=0)[None, :] - present
    own = np.where(present, place, len(values))
    low, high = (_without(ordered, own, place) for place in ((others - 1) // 2, others // 2))
    return np.asarray(np.where(others > 0, (low + high) / 2, np.nan), dtype=np.float64)


def expected_from_others(values: Floats, excluded: Flags) -> Floats:
    """Return the median of the other members that are not `excluded`, (member, sample).

    Excluded members (known faults) are expected to be like all the others.
    """
    if not excluded.any():
        return leave_one_out_median(values)
    expected = np.full_like(values, np.nan)
    if (~excluded).any():
        expected[~excluded] = leave_one_out_median(values[~excluded])
        expected[excluded] = median(values[~excluded], axis=0)
    return expected


def _without(ordered: Floats, own: Integers, index: Integers) -> Floats:
    shifted = np.clip(index + (index >= own), 0, len(ordered) - 1)
    return np.asarray(np.take_along_axis(ordered, shifted, axis=0), dtype=np.float64)


def three_point_median(series: Floats) -> Floats:
    """Return the running median of three along the last axis: single odd iterations vanish."""
    if series.shape[-1] < 3:
        return series
    padded = np.concatenate([series[..., :1], series, series[..., -1:]], axis=-1)
    inner = np.stack([padded[..., :-2], padded[..., 1:-1], padded[..., 2:]])
    return median(inner, axis=0)


def t_tail(score: float, degrees: float) -> float:
    """Return P(T > score) of Student's law."""
    return float(special.stdtr(degrees, -score))


def rank_correlation(one: Floats, other: Floats) -> float:
    """Return Spearman's correlation of two samples of one length; 0 where one does not vary."""
    x, y = _ranks(one), _ranks(other)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else 0.0


def _ranks(values: Floats) -> Floats:
    """Return places in order, equal values sharing their mean place."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count - 1) / 2.0)[number.reshape(-1)])


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What is known of a class before looking.

    `floor` is by how much one iteration's value always varies, `spread` by how much sound ranks
    differ for good, both in the units of the values. `level_error` is the error of a rank's level
    that comes from knowing the rank's data through few other ranks.
    """

    floor: float
    spread: float
    bursty: bool = False
    """Whether healthy ranks have rare bursts, too, which a median deviation would not see."""
    level_error: float = 0.0
    scattered: bool = True
    """Whether single odd iterations, if many, speak of a fault."""
    most: float = float("inf")
    """The most that sound ranks may differ for good, one standard deviation."""
    tail_degrees: float = 0.0
    """Degrees of freedom of the t law of single iterations beyond all that was seen; 0 where the
    law is not known, as for losses, which come in bursts of any size."""


@dataclass(frozen=True)
class Noise:
    """Noise of one class of measurements.

    The centre over k iterations of a healthy rank has the variance
    inflation · (1.15 sigma)² / k + between²; its change within the window has no `between`.
    """

    sigma: Floats
    """(rank,): standard deviation of one iteration's value."""
    between: float
    """Lasting differences between sound ranks."""
    inflation: float
    """(1 + r) / (1 − r) for a lag-1 correlation r: neighbours in time repeat each other."""
    degrees: float
    """Degrees of freedom of the t law that `sigma` was estimated with."""
    between_degrees: float = NOISE.max_degrees
    of_data: float = 0.0
    """Part of `between` that comes from data known through few ranks."""
    most: float = float("inf")
    """What `between` is at most, whatever few ranks show."""
    tail_degrees: float = 0.0
    """Degrees of freedom of the t law of single iterations; 0 where the law is not known."""

    def chance(self, num_iterations: float) -> float:
        """Return the standard error of the usual rank's level, lasting differences left out."""
        return float(np.sqrt(median(self._in_time(num_iterations)) + self.of_data**2))

    def level_error(self, num_iterations: float) -> Floats:
        """Return the standard error of each rank's level over `num_iterations` iterations."""
        return np.asarray(np.sqrt(self._in_time(num_iterations) + self.between**2))

    def change_error(self, inside: int, beside: Integers) -> Floats:
        """Return the error of changes from `beside` iterations to `inside` ones, (rank, place).

        `beside` is (place,).
        """
        share = 1.0 / inside + 1.0 / np.maximum(beside, 1)
        return np.asarray(np.sqrt(self._in_time(1)[:, None] * share))

    def level_p_value(self, effect: Floats, num_iterations: float) -> Floats:
        """Return the one-sided probability that levels of healthy ranks reach `effect`."""
        p_values = [
            special.stdtr(
                one.level_degrees(num_iterations),
                -np.nan_to_num(effect / one.level_error(num_iterations)),
            )
            for one in self._as_seen_and_bounded()
        ]
        return np.asarray(np.minimum.reduce(p_values))

    def detectable(self, num_iterations: float, p_value: float, power: float) -> float:
        """Return the least lasting effect that has this p-value with probability `power`.

            effect = (t(1 - p) + t(power)) * standard error

        the usual formula (Bloom 1995, Evaluation Review 19(5)) with the t law's quantiles.
        """
        least = float("inf")
        for one in self._as_seen_and_bounded():
            degrees = one.level_degrees(num_iterations)
            reach = special.stdtrit(degrees, power) - special.stdtrit(degrees, p_value)
            least = min(least, float(np.median(reach * one.level_error(num_iterations))))
        return least

    def _as_seen_and_bounded(self) -> tuple[Noise, ...]:
        """Return this noise and, if there is a bound, that of ranks that differ by `most`."""
        if not np.isfinite(self.most):
            return (self,)
        return self, replace(self, between=self.most, between_degrees=NOISE.max_degrees)

    def change_p_value(self, score: Floats | float) -> Floats:
        """Return the one-sided probability of changes of `score` standard errors or more."""
        return np.asarray(special.stdtr(self.degrees, -np.asarray(score)))

    def level_degrees(self, num_iterations: float) -> Floats:
        """Return the degrees of freedom of the summed variances (Welch and Satterthwaite)."""
        in_time, between = self._in_time(num_iterations), self.between**2
        parts = in_time**2 / self.degrees + between**2 / self.between_degrees
        degrees = (in_time + between) ** 2 / np.maximum(parts, 1e-300)
        return np.asarray(np.clip(degrees, 1.0, NOISE.max_degrees))

    def _in_time(self, num_iterations: float) -> Floats:
        return np.asarray(
            self.inflation * (ROBUST.centre_loss_ratio * self.sigma) ** 2 / max(num_iterations, 1)
        )


def estimate_noise(value: Floats, excluded: Flags, usual: Usual) -> Noise:
    """Estimate the noise from the values (rank, iteration) of all ranks that are not `excluded`.

    The scale is pooled, because with two to four peers a rank's own median deviation is often
    absurdly small; a rank that is noisier than the pool keeps its own scale.
    """
    sound = value[~excluded]
    if not np.isfinite(sound).any():  # a suspect and nobody else to compare
        sound = value
    again = min(repetition(sound), NOISE.max_repetition)
    pooled = _burst_size(sound) if usual.bursty else _pooled(sound, again)
    sigma = np.fmax(np.fmax(_noise_of_each_rank(value, again), pooled), usual.floor)
    inflation = (1.0 + again) / (1.0 - again)
    num_free = float(np.isfinite(sound).sum() - len(sound)) / 2  # leave-one-out halves it
    explained = inflation * (ROBUST.centre_loss_ratio * pooled) ** 2 / value.shape[1]
    between, between_degrees = _between(value[~excluded], explained, usual)
    return Noise(
        sigma=sigma,
        between=float(np.hypot(between, usual.level_error)),
        inflation=inflation,
        degrees=float(
            np.clip(
                num_free * (1 - again**2) / (1 + again**2), NOISE.min_degrees, NOISE.max_degrees
            )
        ),
        between_degrees=between_degrees,
        of_data=usual.level_error,
        most=float(np.hypot(usual.most, usual.level_error)),
        tail_degrees=usual.tail_degrees,
    )


def _noise_of_each_rank(value: Floats, again: float) -> Floats:
    """Return the noise of each rank by itself, (rank,); NaN in short windows.

    It is estimated from the rank's steps, which a change hardly touches, or from distances to its
    level, which odd iterations hardly touch, whichever is less.
    """
    if value.shape[1] < NOISE.min_own_iterations:
        return np.full(len(value), np.nan)
    by_steps = step_noise(value) / np.sqrt(1.0 - again)
    return np.asarray(np.fmin(by_steps, spread(value, axis=1)), dtype=np.float64)


def _pooled(value: Floats, again: float) -> float:
    num_iterations = value.shape[1]
    if num_iterations < 2:
        return 0.0
    centred = value - median(value, axis=1)[:, None]
    # n - 1: the row's median was fitted to the same few iterations
    correction = np.sqrt(num_iterations / (num_iterations - 1))
    by_level = float(ROBUST.mad_to_sigma * median(np.abs(centred))) * correction
    if num_iterations < NOISE.min_own_iterations:
        return by_level if np.isfinite(by_level) else 0.0
    by_steps = float(median(step_noise(value))) / np.sqrt(1.0 - again)
    return float(np.nan_to_num(min(by_level, NOISE.max_step_ratio * by_steps)))


def _burst_size(value: Floats) -> float:
    """Return the root mean square of the median row about its mean: large where most rows have
    bursts.
    """
    centred = value - mean(value, axis=1)[:, None]
    return float(np.nan_to_num(median(np.sqrt(mean(centred**2, axis=1)))))


def _between(sound: Floats, explained: float, usual: Usual) -> tuple[float, float]:
    """Return the lasting spread of sound ranks and its degrees of freedom.

    What the ranks show beyond their noise in time is weighed against what is usual, since the
    variance of few ranks says little (a moderated variance, Smyth 2004, Stat. Appl. Genet. Mol.
    Biol. 3(1)).
    """
    level = centre(sound)
    level = level[np.isfinite(level)]
    seen = weight = 0.0
    if len(level) > 2:  # two ranks mirror each other: their one distance is what is in question
        inner = float(np.quantile(np.abs(level), NOISE.inner_share))
        seen = inner / float(special.ndtri(0.5 + NOISE.inner_share / 2))
        weight = max(0.0, NOISE.inner_efficiency * len(level) - 1.0)
    own = max(seen**2 - explained, 0.0)
    # where ranks differ by far more than is usual, what is usual says little
    far = (NOISE.believed_times * usual.spread) ** 2 / max(own, 1e-12)
    belief = NOISE.usual_degrees * min(1.0, far)
    degrees = max(belief + weight, 1.0)
    variance = (belief * usual.spread**2 + weight * own) / degrees
    return float(np.sqrt(variance)), degrees


def step_noise(series: Floats) -> Floats:
    """Return the noise of each row of (row, iteration) from differences of neighbours.

    A step in the series (a fault that begins) touches one difference only. A mean of squares, large
    ones cut, is twice as exact as a median deviation, which bounds the mean where steps are many.
    """
    steps = np.abs(np.diff(series, axis=1))
    typical = ROBUST.mad_to_sigma * median(steps, axis=1)
    squares = mean(np.minimum(steps, ROBUST.step_cut_sigmas * typical[:, None]) ** 2, axis=1)
    return np.asarray(
        np.minimum(np.sqrt(squares), ROBUST.step_bound_ratio * typical) / np.sqrt(2.0)
    )


def repetition(series: Floats) -> float:
    """Return the lag-1 correlation r of noise in (row, iteration), 0 to 1, of all rows together.

    For noise that repeats itself from one iteration to the next, squared differences over two
    iterations are (1 + r) times those over one. Large differences are cut. Changes that last are
    left out: a change is one large difference over one iteration, but two over two iterations, and
    would look like an r. An r that may be chance (within two standard errors) is drawn to 0.
    """
    if series.shape[1] < ROBUST.min_repetition_iterations:
        return 0.0
    one, two = (series[:, lag:] - series[:, :-lag] for lag in (1, 2))
    limit = ROBUST.cut_sigmas * ROBUST.mad_to_sigma * float(median(np.abs(one)))
    lasting = _lasting(series, one, limit)
    one, two = np.clip(one, -limit, limit), np.clip(two, -limit, limit)
    one[lasting] = np.nan
    two[lasting[:, 1:] | lasting[:, :-1]] = np.nan
    near, far = float(mean(one**2)), float(mean(two**2))
    if not near > 0 or not np.isfinite(far):
        return 0.0
    again = float(np.clip(far / near - 1.0, 0.0, 1.0))
    by_chance = 2.0 * ROBUST.repetition_error / np.sqrt(max(int(np.isfinite(one).sum()), 1))
    return float(again * min(1.0, again / by_chance))


def _lasting(series: Floats, steps: Floats, limit: float) -> Flags:
    """Mark large steps that lead to another level: the medians of three on either side differ."""
    smooth = np.pad(three_point_median(series), ((0, 0), (1, 1)), mode="edge")
    change = np.abs(smooth[:, 3:] - smooth[:, :-3])
    return np.asarray((np.abs(steps) > limit) & (change > limit))
