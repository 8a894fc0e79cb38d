"""Count the iterations in which somebody loses time: of ranks (bursts) and of hosts that pause.

An iteration is a hit of a row when it loses more than a margin over its own quiet ones and over the
others. Sound rows have hits, too; so many of one row must be improbable at the others' rate.

Example: 5 hits in 20 iterations, where the others have 1 in 60, are chance once in 630 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.device import HOST_ADVICE
from detect.observe.observations import Observations
from detect.report import Cause
from detect.stats import robust
from detect.stats.persistence import Course
from detect.thresholds import BURSTS, SEARCH
from megascan.arrays import Flags, Floats

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
