"""Tell how far healthy ranks stray from their peers, and what that lets a search find.

A rank's value differs from its peers' by noise in time, which averages out over iterations, and by
a lasting difference of devices, which does not:

    level error² = inflation · (1.15 sigma)² / iterations + between²

Example: sigma 1 %, no repetition, 18 iterations, between 0.4 %: 0.27 % from time, 0.48 % together;
a level 2.4 % above the peers is 5 standard errors.

Bound. Three ranks that differ by some per cent leave the spread of sound ranks almost unknown: a
t law with one degree of freedom then calls a rank at three times its peers' time an accident. But
sound devices do differ by less than `Usual.most`, whatever these few show. So a level is no more
probable than under the largest spread that they can have:

    p = min(P(t > effect / error), P(t > effect / error with between = most))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.stats import robust
from detect.thresholds.statistics import NOISE, ROBUST
from megascan.arrays import Flags, Floats, Integers


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
    between_degrees: float
    usual: Usual

    def chance(self, num_iterations: float) -> float:
        """Return the standard error of the usual rank's level, lasting differences left out."""
        in_time = robust.median(self._in_time(num_iterations))
        return float(np.sqrt(in_time + self.usual.level_error**2))

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
        """Return this noise and, if there is a bound, that of ranks that differ by as much."""
        most = float(np.hypot(self.usual.most, self.usual.level_error))
        if not np.isfinite(most):
            return (self,)
        return self, replace(self, between=most, between_degrees=NOISE.max_degrees)

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
    bent = sound if usual.bursty else _without_ramps(sound)
    again = min(repetition(bent), NOISE.max_repetition)
    pooled = _burst_size(sound) if usual.bursty else _pooled(bent, again)
    of_each = _noise_of_each_rank(value if usual.bursty else _without_ramps(value), again)
    sigma = np.fmax(np.fmax(of_each, pooled), usual.floor)
    inflation = (1.0 + again) / (1.0 - again)
    num_free = float(np.isfinite(sound).sum() - len(sound)) / 2  # leave-one-out halves it
    explained = inflation * (ROBUST.centre_loss_ratio * pooled) ** 2 / value.shape[1]
    between, between_degrees = _between(value[~excluded], explained, usual)
    degrees = num_free * (1 - again**2) / (1 + again**2)
    return Noise(
        sigma=sigma,
        between=float(np.hypot(between, usual.level_error)),
        inflation=inflation,
        degrees=float(np.clip(degrees, NOISE.min_degrees, NOISE.max_degrees)),
        between_degrees=between_degrees,
        usual=usual,
    )


def _without_ramps(value: Floats) -> Floats:
    """Return values (rank, iteration), those of ranks that rise or fall steadily as they lie beside
    their neighbours in time, scaled to vary as independent values do.

    A device that gets hotter all over the window is slower by as much again each iteration: noise
    by steps would be what it is slower by. Such steps are alike, those of noise are not. Example:
    0, 0, 0, 2.5, 5, 7, 10, 12, 14, 16 and 18 % beside a peer, within 0.1 %.
    """
    if value.shape[1] < NOISE.min_own_iterations:
        return value
    bends = np.full_like(value, np.nan)
    bends[:, 1:-1] = np.diff(value, n=2, axis=1) / np.sqrt(6)
    is_ramp = robust.spread(bends, axis=1) < NOISE.ramp_share * step_noise(value)
    return np.where(is_ramp[:, None], bends, value)


def _noise_of_each_rank(value: Floats, again: float) -> Floats:
    """Return the noise of each rank by itself, (rank,); NaN in short windows.

    It is estimated from the rank's steps, which a change hardly touches, or from distances to its
    level, which odd iterations hardly touch, whichever is less.
    """
    if value.shape[1] < NOISE.min_own_iterations:
        return np.full(len(value), np.nan)
    by_steps = step_noise(value) / np.sqrt(1.0 - again)
    return np.asarray(np.fmin(by_steps, robust.spread(value, axis=1)), dtype=np.float64)


def _pooled(value: Floats, again: float) -> float:
    num_iterations = value.shape[1]
    if num_iterations < 2:
        return 0.0
    centred = value - robust.median(value, axis=1)[:, None]
    # n - 1: the row's median was fitted to the same few iterations
    correction = np.sqrt(num_iterations / (num_iterations - 1))
    by_level = float(ROBUST.mad_to_sigma * robust.median(np.abs(centred))) * correction
    if num_iterations < NOISE.min_own_iterations:
        return by_level if np.isfinite(by_level) else 0.0
    by_steps = float(robust.median(step_noise(value))) / np.sqrt(1.0 - again)
    return float(np.nan_to_num(min(by_level, NOISE.max_step_ratio * by_steps)))


def _burst_size(value: Floats) -> float:
    """Return the median row's standard deviation: large where most rows have bursts."""
    centred = value - robust.mean(value, axis=1)[:, None]
    deviation = np.sqrt(robust.mean(centred**2, axis=1))
    return float(np.nan_to_num(robust.median(np.fmin(deviation, _about_one_step(value)))))


def _about_one_step(value: Floats) -> Floats:
    """Return the standard deviation of each row about its levels before and since its largest step,
    (row,); NaN of rows that have no two such levels, or vary about them as bursts do.

    Of two ranks, one that loses more time for good since some iteration would else hide behind its
    own change. Example: 0, 0, -0.01, 0.58, 0.57, 0.57, 0.57 of an iteration beside its only peer.
    """
    found, least = np.full(len(value), np.nan), NOISE.min_side_iterations
    for row, series in enumerate(value):
        steps = np.abs(np.diff(series))[least - 1 : len(series) - least]
        if not len(steps) or not np.isfinite(series).all():
            continue
        first = least + int(np.argmax(steps))
        before, since = series[:first], series[first:]
        within = np.concatenate([before - before.mean(), since - since.mean()])
        deviation = float(np.sqrt(np.mean(within**2)))
        if deviation <= NOISE.level_share * abs(since.mean() - before.mean()):
            found[row] = deviation
    return found


def _between(sound: Floats, explained: float, usual: Usual) -> tuple[float, float]:
    """Return the lasting spread of sound ranks and its degrees of freedom.

    What the ranks show beyond their noise in time is weighed against what is usual, since the
    variance of few ranks says little (a moderated variance, Smyth 2004, Stat. Appl. Genet. Mol.
    Biol. 3(1)).
    """
    level = robust.centre(sound)
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
    typical = ROBUST.mad_to_sigma * robust.median(steps, axis=1)
    squares = robust.mean(np.minimum(steps, ROBUST.step_cut_sigmas * typical[:, None]) ** 2, axis=1)
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
    limit = ROBUST.cut_sigmas * ROBUST.mad_to_sigma * float(robust.median(np.abs(one)))
    lasting = _lasting(series, one, limit)
    one, two = np.clip(one, -limit, limit), np.clip(two, -limit, limit)
    one[lasting] = np.nan
    two[lasting[:, 1:] | lasting[:, :-1]] = np.nan
    near, far = float(robust.mean(one**2)), float(robust.mean(two**2))
    if not near > 0 or not np.isfinite(far):
        return 0.0
    again = float(np.clip(far / near - 1.0, 0.0, 1.0))
    by_chance = 2.0 * ROBUST.repetition_error / np.sqrt(max(int(np.isfinite(one).sum()), 1))
    return float(again * min(1.0, again / by_chance))


def _lasting(series: Floats, steps: Floats, limit: float) -> Flags:
    """Mark large steps that lead to another level: the medians of three on either side differ."""
    smooth = np.pad(robust.three_point_median(series), ((0, 0), (1, 1)), mode="edge")
    change = np.abs(smooth[:, 3:] - smooth[:, :-3])
    return np.asarray((np.abs(steps) > limit) & (change > limit))
