"""Count the iterations and passes in which somebody loses time: of ranks, of hosts that pause.

An iteration is a hit of a row when it loses more than a margin over its own quiet ones and over the
others. Sound rows have hits, too; so many of one row must be improbable at the others' rate.

Example: 5 hits in 20 iterations, where the others have 1 in 60, are chance once in 630 times.

Single passes (`slow_passes`), for a device that is throttled now and then.

Problem: a device that is throttled for 300 ms in every few seconds slows one pass in five, or all
passes of one iteration in ten. The level of an iteration hardly shows the first, and iterations are
too few to count for the second.

Idea: count passes. Each is compared with the same pass of its peers, and with its row's own quiet
level; a hit exceeds both by far more than sound passes vary. Hits side by side are one event, for
whatever held the rank up lasts as long as it likes. So many events must be improbable at the rate
that the other rows show. A device that is throttled has a second speed: where hits are slow by one
and the same factor, and nobody else's by as much, they are no noise, and each of them counts.

Example: 16 ranks, 10 iterations of 8 passes that vary by 0.4 %. All passes of rank 8 are 1.24 times
as long in iterations 7 and 8, and no other pass of anybody is longer by 3 %: one event, by chance
once in 30 times, but 16 hits of one speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.device import HOST_ADVICE, Slowness, is_isolated, mates_of
from detect.observe.observations import BACKWARD, FORWARD, Observations
from detect.report import Cause
from detect.stats import robust
from detect.stats.persistence import Course
from detect.stats.residuals import pass_residuals, peer_groups
from detect.thresholds import BURSTS, PAIRS, SEARCH, STARVATION
from megascan.arrays import Flags, Floats, Integers

FEW = "so few iterations may be chance: trace more of them in a row"
ADVICE = {
    Cause.COMPUTE: (
        "read that GPU's clock and throttle reasons while the job runs: nvidia-smi -i GPU -q -d "
        "CLOCK,PERFORMANCE,TEMPERATURE,POWER,PIDS",
    ),
    Cause.GC: ("collect on all ranks at the same iterations (gc.disable(), then gc.collect())",),
    Cause.HOST: (
        "read that host's memory pressure and swapping (vmstat 1, /proc/pressure/memory)",
        *HOST_ADVICE,
    ),
    Cause.LOADER: ("time the data loader alone on that host; read its disk latency (iostat -x 1)",),
}


@dataclass(frozen=True, kw_only=True)
class Burst:
    """A row that loses time in some iterations."""

    row: int
    hits: Flags
    """(iteration,)"""
    excess: Floats
    """(iteration,): over the peers as a share of what is compared; 0 outside hits."""
    q_value: float
    others: Flags
    """(row,): with whom it was compared."""
    other_hits: int
    is_sure: bool = True
    """Whether chance is excluded."""
    is_shared: bool = False
    """Whether most rows of its stage have such bursts."""
    is_mates: bool = False
    """Whether a row of its TP group has some as well, is known to be slow, or recorded nothing in
    most of its hits."""
    is_one_speed: bool = False
    """Whether its slow passes are slow by one and the same factor, as of a device that has two
    speeds; noise has no such second level."""
    stands_out: bool = False
    """Whether it is slower in its hits than all rows of its TP group."""


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
    """Return how many stretches of hits there are, one after the other in all dimensions."""
    hits = hits.reshape(-1)
    return int((hits & ~np.r_[False, hits[:-1]]).sum())


def over_own_level(value: Floats, known: Flags) -> Floats:
    """Return what (row, iteration) exceeds the others by, less what the row does in quiet times.

    Rows differ for good, by their place or their chip: that is no burst. Nor is a row's quiet level
    how far it lies below the others while some of these have a burst.
    """
    over = value - robust.median(value[~known], axis=0)
    seen = np.isfinite(over).any(axis=1)
    quiet = np.zeros(len(over))
    quantile = np.nanquantile if np.isnan(over[seen]).any() else np.quantile  # that one is quick
    quiet[seen] = quantile(over[seen], BURSTS.quiet_share, axis=1)
    quiet = np.maximum(quiet, 0.0)
    return np.asarray(np.nan_to_num(over - quiet[:, None]))


def lost_share(seen: Observations, causes: Sequence[Cause]) -> Floats:
    """Time lost to these causes over the iteration's, (row, iteration)."""
    lost = np.sum([np.maximum(np.nan_to_num(seen.lost(cause)), 0.0) for cause in causes], axis=0)
    return np.asarray(lost / float(np.median(seen.iteration_ns)))


def chance(num_hits: int, num_iterations: int, other_hits: int, num_others: int) -> float:
    """Return the probability of so many hits and more, at a rate that the others show.

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


def course_of(burst: Burst, effect: float) -> Course:
    """Return the course of a burst: each hit is an episode of its own."""
    slots, num_hits = np.flatnonzero(burst.hits), int(burst.hits.sum())
    return Course(
        active=burst.hits,
        effect=effect,
        standard_error=effect / float(np.sqrt(num_hits)),
        share=num_hits / float(slots[-1] - slots[0] + 1),
        episodes=tuple((int(slot), int(slot)) for slot in slots),
    )


def interval_of(burst: Burst, share: float) -> tuple[float, float]:
    """Return the interval of a slowdown by `share` on the mean: so many hits were counted."""
    reach = SEARCH.interval_sigmas / float(np.sqrt(int(burst.hits.sum())))
    return 1.0 + share * max(0.0, 1.0 - reach), 1.0 + share * (1.0 + reach)


@dataclass(frozen=True)
class _Passes:
    """All rows' passes in the order in which they run, (row, iteration, operation) or (row,)."""

    over: Floats
    """Log time over the peers' and the row's own quiet level; 0 where nothing was recorded."""
    hits: Flags
    phase: Integers
    own: Floats
    """Log time over what the row itself takes for the same operation in quiet iterations."""
    num_known: Integers

    @classmethod
    def of(cls, seen: Observations, known: Flags) -> _Passes | None:
        """Compare all passes; None where some row has no peer."""
        groups = peer_groups(seen.work, seen.members)
        if min(len(rows) for rows in groups) < 2 or not (~known).any():
            return None
        order = np.argsort(seen.work.microbatch, kind="stable")
        phase = seen.work.phase[order]
        residual, _ = pass_residuals(seen.work, seen.members, groups, known)
        over, sigma = residual[:, :, order], np.zeros((len(known), len(phase)))
        for one in (FORWARD, BACKWARD):
            ops = np.flatnonzero(phase == one)
            for row in range(len(over)):
                width, level = half_width(over[row][:, ops])
                over[row][:, ops] -= level
                sigma[row, ops] = width / 2 / BURSTS.half_sigmas
        usual = robust.median(sigma[~known], axis=0)
        margin = np.maximum(BURSTS.margin_share, BURSTS.margin_sigmas * np.fmax(sigma, usual))
        num_known = np.isfinite(over).sum(axis=(1, 2))
        over = np.nan_to_num(over)
        hits = over > margin[:, None, :]
        if seen.starved_share is not None:
            hits &= ~(seen.starved_share > STARVATION.fed_share)[:, :, None]
        log_ns = seen.work.log_ns[:, :, order]
        low = int(BURSTS.quiet_share * (log_ns.shape[1] - 1))
        own = log_ns - np.sort(log_ns, axis=1)[:, low : low + 1]
        return cls(over, hits, phase, np.nan_to_num(own), num_known)

    def excess(self) -> Floats:
        """Return what the hits lose, as a share of the passes, (row, iteration)."""
        lost = np.where(self.hits, np.expm1(self.over), 0.0)
        kinds = [lost[:, :, self.phase == one] for one in (FORWARD, BACKWARD)]
        return np.asarray(np.mean([one.mean(axis=2) for one in kinds if one.shape[2]], axis=0))

    def counted(self, row: int, mates: Integers) -> Flags:
        """Return the hits of all rows that tell of this row, (row, iteration, operation).

        Where it and one of its `mates` have a hit in the same pass, either may wait for the other:
        neither counts, unless this row's is twice as large.
        """
        hits = self.hits.copy()
        together = hits[mates] & hits[row]
        larger = self.over[mates] >= PAIRS.agrees_share * self.over[row]
        hits[row] &= ~(together & larger).any(axis=0)
        hits[mates] &= ~together
        return hits

    def rose(self, row: int) -> bool:
        """Return whether the row's own times rose in its hits: else it is its peers' that fell."""
        hits = self.hits[row]
        change = float(np.median(self.own[row][hits]))
        return change >= PAIRS.agrees_share * float(np.median(self.over[row][hits]))

    def is_one_speed(self, row: int) -> bool:
        """Return whether the hits of a row are slow by one and the same factor."""
        sizes = self.over[row][self.hits[row]]
        if len(sizes) < BURSTS.least_of_one_speed:
            return False
        return half_width(sizes)[0] <= BURSTS.one_speed_share * float(np.median(sizes))

    def is_of_others(self, row: int, others: Flags) -> bool:
        """Return whether other rows have hits about as large: then such events come to anybody."""
        size = PAIRS.agrees_share * float(np.median(self.over[row][self.hits[row]]))
        return bool((self.hits[others] & (self.over[others] >= size)).any())

    def stands_out(self, seen: Observations, row: int) -> bool:
        """Return whether the row is slower in its hits than all of its TP group."""
        by_phase = np.stack(
            [
                robust.median(self.over[:, self.hits[row] & (self.phase == one)], axis=1)
                for one in (FORWARD, BACKWARD)
            ]
        )
        slow = np.zeros(len(self.over), dtype=bool)
        passes = Slowness(effects=robust.mean(by_phase, axis=0), slow=slow, by_phase=by_phase)
        return is_isolated(seen.members, passes, row)


def slow_passes(seen: Observations, known: Flags, rate: float, floor: float) -> list[Burst]:
    """Return rows of which single passes are slow, the heaviest first.

    `known` rows have been named already and are nobody's peers; `rate` is the false-discovery rate;
    hits must be slower by `floor` on the mean.
    """
    passes = _Passes.of(seen, known)
    if passes is None or int((~known).sum()) < BURSTS.min_rows:
        return []
    excess, num_rows = passes.excess(), len(known)
    share = excess.mean(axis=1)
    sizes = np.where(passes.hits, np.expm1(passes.over), 0.0).sum(axis=(1, 2))
    is_large = sizes >= floor * passes.hits.sum(axis=(1, 2))
    often = passes.hits.mean(axis=(1, 2)) > BURSTS.max_pair_share
    candidates = np.flatnonzero(~known & ~often & (share >= BURSTS.least_share) & is_large)
    left, found = ~known, list[Burst]()
    for row in candidates[np.argsort(-share[candidates], kind="stable")].tolist():
        hits = passes.counted(row, mates_of(seen.members, row))
        others = left & (np.arange(num_rows) != row)
        is_one_speed = passes.is_one_speed(row) and not passes.is_of_others(row, others)
        count = hits.sum(axis=(1, 2)) if is_one_speed else np.array([num_runs(one) for one in hits])
        num_own, num_others = int(passes.num_known[row]), int(passes.num_known[others].sum())
        own, theirs = int(count[row]), int(count[others].sum())
        q_value = chance(own, num_own, theirs, num_others) * num_rows / (len(found) + 1)
        alone = theirs * num_own <= BURSTS.others_share * own * num_others
        num_events = min(num_runs(hits[row]), int(hits[row].any(axis=1).sum()))
        if num_events < BURSTS.min_hits or q_value > rate or not alone or not passes.rose(row):
            continue
        left = others
        of_row = hits[row].any(axis=1)
        found.append(
            Burst(
                row=row, hits=of_row, excess=excess[row], q_value=min(1.0, q_value),
                others=others, other_hits=int(hits[others].any(axis=2).sum()),
                is_one_speed=is_one_speed, stands_out=passes.stands_out(seen, row),
            )
        )  # fmt: skip
    return found
