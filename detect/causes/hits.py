"""Count the iterations in which somebody loses time; several causes share them.

An iteration is a hit of a row when it loses more than a margin over its own quiet ones and over the
others. Sound rows have hits, too; so many of one row must be improbable at the others' rate
(`chance`).

Passes are counted in `pass_hits.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.observe.observations import Observations
from detect.report import Cause
from detect.stats import robust
from detect.stats.stretches import Course
from detect.thresholds.bursts import BURSTS
from detect.thresholds.devices import PAIRS
from detect.thresholds.observing import OCCUPANCY
from detect.thresholds.statistics import SEARCH
from megascan.arrays import Flags, Floats, Integers

FEW = "so few iterations may be chance: trace more of them in a row"


@dataclass(frozen=True, kw_only=True)
class Burst:
    """A row that loses time in some iterations."""

    row: int
    hits: Flags
    """(iteration,)"""
    excess: Floats
    """(iteration,): excess over the peers as a share of what is compared; 0 outside hits."""
    q_value: float
    others: Flags
    """(row,): the rows that the burst's row was compared with."""
    other_hits: int
    """Hits of the other rows."""
    is_sure: bool = True
    """Whether chance is excluded."""
    is_shared: bool = False
    """Whether most rows of the row's stage have bursts, or its others have hits nearly as often."""
    is_mates: bool = False
    """Whether a mate in the row's TP group has bursts as well, is known to be slow, or recorded
    nothing in most of the hits."""
    is_one_speed: bool = False
    """Whether all slow passes are slow by one and the same factor, as on a device with two speeds;
    noise has no second level."""
    stands_out: bool = False
    """Whether the row is slower in its hits than all other rows of its TP group."""
    is_noise: bool = False
    """Whether other rows, of the stage or of all, have hits so often that this may be noise."""
    is_noisy: bool = False
    """Whether the row's own passes vary so much all the while that this may be noise."""
    is_stops: bool = False
    """Whether its slow passes are single ones that take twice as long and more."""
    cuts_passes: bool = False
    """Whether it begins or ends inside passes, of which other modules are as quick as ever: no data
    do so, nor a router."""
    is_one_kind: bool = False
    """Whether its slow passes are all forward ones, or all backward ones, which is no accident."""
    splits_microbatches: bool = False
    """Whether of microbatches with slow passes other passes are as quick as ever: no data do so."""
    has_few_lengths: bool = False
    """Whether its slow passes are of so few microbatches that these may have one length by chance:
    both passes of one are slow by one factor where its data are longer."""
    in_modules: bool = False
    """Whether modules in a row tell it: beside those of its own rank, not of peers, and without
    waiting for mates."""
    size: float = 1.0
    """How many times as long as usual its slow passes take, typically; 1 where nobody knows."""

    @property
    def usual_rate(self) -> float:
        """Return in what share of their iterations the other rows have hits."""
        return self.other_hits / max(int(self.others.sum()) * len(self.hits), 1)

    @property
    def effect(self) -> float:
        """Return the mean slowdown of its hits, log."""
        return float(np.log1p(self.excess[self.hits]).mean())


def half_width(values: Floats) -> tuple[float, float]:
    """Return how far the densest half of the values reaches, and its mean."""
    known = np.sort(values[np.isfinite(values)])
    half = len(known) // 2
    if not half:
        return 0.0, 0.0
    width = known[half:] - known[: len(known) - half]
    first = int(np.argmin(width))
    return float(width[first]), float(np.mean(known[first : first + half + 1]))


def num_runs(hits: Flags) -> int:
    """Return how many stretches of consecutive hits there are, with all dimensions flattened."""
    return int(_begins(hits.reshape(-1)).sum())


def _begins(hits: Flags) -> Flags:
    """Flag the first of consecutive hits, (place,)."""
    return np.asarray(hits & ~np.r_[False, hits[:-1]])


def as_large(hits: Flags, size: Floats, row: int) -> Flags:
    """Return the `hits` that are at least half as large as the typical one of `row`, all (row,
    ...); those next to each other stay together where one of them is.

    What sound rows exceed each other by now and then is no event of the row's kind.
    """
    flat, sizes = hits.reshape(len(hits), -1), size.reshape(len(hits), -1)
    if not flat[row].any():
        return hits
    large = flat & (sizes >= PAIRS.agrees_share * float(np.median(sizes[row][flat[row]])))
    kept = np.zeros_like(flat)
    for number in np.flatnonzero(large.any(axis=1)):
        run = np.cumsum(_begins(flat[number]))
        kept[number] = flat[number] & np.isin(run, run[large[number]])
    return kept.reshape(hits.shape)


def over_own_level(value: Floats, known: Flags) -> Floats:
    """Return what `value`, (row, iteration), exceeds the other rows by, less what the row exceeds
    them by in quiet times.

    Rows differ for good, by their place or their chip: that is no burst. A quiet level is never
    below 0: a row may lie below the others only because some of them have a burst.
    """
    over = value - robust.median(value[~known], axis=0)
    seen = np.isfinite(over).any(axis=1)
    quiet = np.zeros(len(over))
    quantile = np.nanquantile if np.isnan(over[seen]).any() else np.quantile  # quantile is quicker
    quiet[seen] = quantile(over[seen], BURSTS.quiet_share, axis=1)
    quiet = np.maximum(quiet, 0.0)
    return np.asarray(np.nan_to_num(over - quiet[:, None]))


def lost_share(seen: Observations, causes: Sequence[Cause]) -> Floats:
    """Return the time lost to `causes` as a share of the iteration, (row, iteration).

    What other processes take of a CPU comes in bursts on every rank and is left out; with it the
    gaps of a profile, which does not tell the two apart.
    """
    known = [one for one in causes if one is not Cause.HOST or not _hides_what_is_stolen(seen)]
    lost = np.zeros(seen.stolen_ns.shape)
    for cause in known:
        lost += np.maximum(np.nan_to_num(seen.lost(cause)), 0.0)
    if Cause.HOST in known:
        lost = np.maximum(lost - seen.stolen_ns, 0.0)
    return np.asarray(lost / float(np.median(seen.iteration_ns)))


def _hides_what_is_stolen(seen: Observations) -> bool:
    return seen.members.device_kind == "cpu" and not seen.tells_passes


def chance(num_hits: int, num_iterations: int, other_hits: int, num_others: int) -> float:
    """Return the probability of `num_hits` or more, at the rate of hits that the others show.

    Their rate is itself known only through `num_others` iterations: the law is beta-binomial, with
    Jeffreys' prior. Example: 5 hits in 20 iterations, where the others have 1 in 60, happen by
    chance once in 630 times; were the rate known to be 1/41, once in 9,800 times.
    """
    hits = other_hits + BURSTS.prior_hits
    misses = num_others - other_hits + BURSTS.prior_hits
    counts = np.arange(num_hits, num_iterations + 1)
    log_ways = -special.betaln(counts + 1, num_iterations - counts + 1) - np.log(num_iterations + 1)
    log_odds = special.betaln(counts + hits, num_iterations - counts + misses)
    return float(np.exp(log_ways + log_odds - special.betaln(hits, misses)).sum())


@dataclass(frozen=True)
class Tally:
    """How many hits a row has in how many iterations (or passes), and how many the others have."""

    num_hits: int
    num_iterations: int
    other_hits: int
    num_others: int
    """Iterations of all other rows together."""

    @classmethod
    def of(cls, hits: Flags, row: int, others: Flags) -> Tally:
        """Count the hits, (row, iteration), of a row and those of the `others`, (row,)."""
        num_iterations = hits.shape[1]
        return cls(
            num_hits=int(hits[row].sum()),
            num_iterations=num_iterations,
            other_hits=int(hits[others].sum()),
            num_others=int(others.sum()) * num_iterations,
        )

    @property
    def by_chance(self) -> float:
        """Return the probability of so many hits at the rate of the others."""
        return chance(self.num_hits, self.num_iterations, self.other_hits, self.num_others)

    @property
    def is_alone(self) -> bool:
        """Return whether the others have hits at a far lower rate, if any."""
        most = BURSTS.others_share * self.num_hits * self.num_others
        return self.other_hits * self.num_iterations <= most


def heaviest_first(share: Floats, candidates: Flags) -> list[int]:
    """Return the flagged rows, (row,), those that lose the largest `share` first."""
    rows = np.flatnonzero(candidates)
    ordered: list[int] = rows[np.argsort(-share[rows], kind="stable")].tolist()
    return ordered


def course_of(burst: Burst, effect: float) -> Course:
    """Return the course of a burst: each hit is an episode of its own, if not every iteration is
    one.
    """
    slots, num_hits = np.flatnonzero(burst.hits), int(burst.hits.sum())
    whole = ((0, len(burst.hits) - 1),)
    return Course(
        active=burst.hits,
        effect=effect,
        standard_error=effect / float(np.sqrt(num_hits)),
        share=num_hits / float(slots[-1] - slots[0] + 1),
        episodes=whole if burst.hits.all() else tuple((int(slot), int(slot)) for slot in slots),
    )


def how_often(burst: Burst) -> str:
    """Say in how many of all iterations a burst has a hit."""
    num_hits, num_iterations = int(burst.hits.sum()), len(burst.hits)
    if num_hits == num_iterations:
        return f"in each of {num_iterations} iterations"
    return f"in {num_hits} of {num_iterations} iterations"


def interval_of(burst: Burst, share: float) -> tuple[float, float]:
    """Return the interval of a slowdown by `share` on the mean, from the number of its hits."""
    reach = SEARCH.interval_sigmas / float(np.sqrt(int(burst.hits.sum())))
    return 1.0 + share * max(0.0, 1.0 - reach), 1.0 + share * (1.0 + reach)


def lone_pause(
    excess: Floats, margin: float, rate: float, least: float = OCCUPANCY.least_share
) -> Burst | None:
    """Return the row that alone loses a tenth of all time, or `least`, in pauses, few of them or of
    any size; or a twentieth in three iterations and more, if no other row has any.

    `excess` (row, iteration) is what each row loses more than others; a hit is more than `margin`.
    A row's own spread is no measure of noise: pauses of 90 ms now and 570 ms then are no noise. A
    single pause is never sure.
    """
    hits = excess > margin
    lost = np.where(hits, excess, 0.0)
    num_rows, row = len(lost), int(np.argmax(lost.mean(axis=1)))
    others = np.arange(num_rows) != row
    tally = Tally.of(hits, row, others)
    is_repeated = tally.num_hits >= BURSTS.min_pair and not tally.other_hits
    least = BURSTS.lone_share if is_repeated else least
    if not tally.is_alone or not lost[row].mean() >= least:
        return None
    q_value = min(1.0, tally.by_chance * num_rows)
    return Burst(
        row=row,
        hits=hits[row],
        excess=lost[row],
        q_value=q_value,
        others=others,
        other_hits=tally.other_hits,
        is_sure=q_value <= rate and tally.num_hits >= BURSTS.min_hits,
    )


def bursts(
    value: Floats,
    known: Flags,
    rate: float,
    least_hit: float = 0.0,
    *,
    group: Integers | None = None,
) -> list[Burst]:
    """Return the rows of (row, iteration) that exceed the others now and then, the heaviest first.

    `known` rows have been named already and are nobody's peers; `rate` is the false-discovery rate;
    a row must exceed the others by `least_hit` in its hits. Rows of one `group`, (row,), may wait
    for each other: a hit of a row's mate in the same iteration, but smaller, does not count towards
    the rate of sound rows.
    """
    num_rows, num_iterations = value.shape
    if int((~known).sum()) < BURSTS.min_rows or not np.isfinite(value[~known]).any():
        return []
    hits, lost = hits_of(value, known)
    counts, share = hits.sum(axis=1), lost.mean(axis=1)
    is_burst = (counts >= BURSTS.min_hits) & (counts <= BURSTS.max_hit_share * num_iterations)
    is_small = (share < BURSTS.least_share) | (lost.sum(axis=1) < least_hit * counts)
    left, found = ~known, list[Burst]()
    for row in heaviest_first(share, is_burst & ~is_small & ~known):
        others = left & (np.arange(num_rows) != row)
        counted_hits = as_large(hits, lost, row)
        if group is not None:
            mates = others & (group == group[row])
            counted_hits[mates] &= ~(hits[row] & (lost[mates] < lost[row]))
        tally = Tally.of(counted_hits, row, others)
        q_value = tally.by_chance * (num_rows / (len(found) + 1))
        if q_value > rate or not tally.is_alone:
            continue
        left = others
        found.append(
            Burst(
                row=row,
                hits=hits[row],
                excess=lost[row],
                q_value=min(1.0, q_value),
                others=others,
                other_hits=tally.other_hits,
            )
        )
    return found


def hits_of(value: Floats, known: Flags) -> tuple[Flags, Floats]:
    """Return in which iterations each row exceeds its own quiet iterations by more than sound rows
    vary, and by how much (0 elsewhere), both (row, iteration).
    """
    excess = over_own_level(value, known)
    usual = float(np.nan_to_num(robust.median(robust.spread(excess[~known], axis=1))))
    hits = excess > max(BURSTS.margin_share, BURSTS.margin_sigmas * usual)
    return hits, np.where(hits, excess, 0.0)
