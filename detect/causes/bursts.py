"""Find ranks that lose time now and then: pauses too rare, or too short, for a level.

Problem: a rank that stands still for 100 ms in every fourth iteration is no slower than its peers
in the median iteration, and a host under memory pressure stalls whenever it likes. Levels and
stretches see neither.

Idea: count. An iteration is a hit of a row when it loses more than a margin over its peers, in all
kinds of lost time together (collector, host, loader). Healthy rows have hits, too, at a rate that
the other rows show. So many hits in so many iterations must be improbable at that rate:

    p = P(BetaBinomial(iterations; hits of the others + 1/2, their misses + 1/2) >= hits)

and what they cost on the mean must reach the floor. The cause is the kind that most of the time was
lost to. Pauses that are too few for such a proof, but cost a tenth of all time and are one row's
alone, are a finding all the same: undecided. Computing that is slow in nearly all iterations is for
other searches to judge; pauses of any size, 90 ms now and 570 ms then, are counted here. Then the
same is asked of the mean over the passes of an iteration: their median does not see a device
that is throttled during a fifth of them, their mean does.

Two rows show no rate of sound ones: each exceeds the other. But two sound ones do so equally often,
so hits that all go one way are told by a coin, p = P(Binomial(hits of both, 1/2) >= hits); and the
one whose own passes are longer in the hits than in its other iterations is the slow one.

Example: 16 ranks, 10 iterations. Rank 5 loses more than 2 % of an iteration in 4 of 10, the others
in none of 150: p = 2.2e-6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.finding import Claim, build_finding, saved_by_compute
from detect.causes.spec import Answer, CauseSpec, Inquiry
from detect.causes.starvation import HOST_ADVICE
from detect.observe.observations import BACKWARD, FORWARD, Observations, Work
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.persistence import Course
from detect.stats.residuals import (
    compare_within,
    data_of,
    deviations,
    peer_groups,
    stage_groups,
)
from detect.text import counted, milliseconds, percent, place, ranks_of
from detect.thresholds import BURSTS, OCCUPANCY, PAIRS, SEARCH
from megascan.arrays import Flags, Floats, Integers

LOST = (Cause.GC, Cause.LOADER, Cause.HOST)
WORDS = {
    Cause.COMPUTE: "computes slowly",
    Cause.GC: "stands still for garbage collection",
    Cause.HOST: "is held up by its host",
    Cause.LOADER: "waits for its data loader",
}
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
class _Burst:
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


def lone_pause(value: Floats, places: Integers, rate: float) -> _Burst | None:
    """Return the row that alone loses a tenth of all time in pauses, few of them or of any size.

    `value` (row, iteration) is what each row loses itself, by its loader or collector; it is
    compared with rows of the same place, `places` (row,), as others may have nothing to load. One
    row's noise is no measure of another's: pauses of 90 ms now and 570 ms then are no noise.
    """
    excess = np.zeros_like(value)
    for place_number in np.unique(places):
        rows = np.flatnonzero(places == place_number)
        if len(rows) > 1:
            nobody = np.zeros(len(rows), dtype=bool)
            expected = robust.expected_from_others(value[rows], nobody)
            excess[rows] = np.nan_to_num(value[rows] - expected)
    quiet = float(np.nan_to_num(robust.spread(value, axis=1)).min())
    hits = excess > max(BURSTS.margin_share, BURSTS.margin_sigmas * quiet)
    lost = np.where(hits, excess, 0.0)
    row, (num_rows, num_iterations) = int(np.argmax(lost.mean(axis=1))), value.shape
    others = np.arange(num_rows) != row
    num_hits, other_hits = int(hits[row].sum()), int(hits[others].sum())
    num_others = int(others.sum()) * num_iterations
    is_heavy = lost[row].mean() >= OCCUPANCY.least_share and num_hits >= BURSTS.min_hits
    alone = other_hits * num_iterations <= BURSTS.others_share * num_hits * num_others
    if not alone or not is_heavy:
        return None
    q_value = min(1.0, _chance(num_hits, num_iterations, other_hits, num_others) * num_rows)
    return _Burst(
        row=row,
        hits=hits[row],
        excess=lost[row],
        q_value=q_value,
        others=others,
        other_hits=other_hits,
        is_sure=q_value <= rate,
    )


def bursts(value: Floats, known: Flags, rate: float, least_share: float) -> list[_Burst]:
    """Return the rows of (row, iteration) that exceed the others now and then, the heaviest first.

    `known` rows have been named already and are nobody's peers; `rate` is the false-discovery rate;
    a row must exceed the others by `least_share` on the mean.
    """
    num_rows, num_iterations = value.shape
    if int((~known).sum()) < BURSTS.min_rows or not np.isfinite(value[~known]).any():
        return []
    excess = np.nan_to_num(value - robust.median(value[~known], axis=0))
    usual = float(np.nan_to_num(robust.spread(excess[~known])))
    hits = excess > max(BURSTS.margin_share, BURSTS.margin_sigmas * usual)
    lost = np.where(hits, excess, 0.0)
    found: list[_Burst] = []
    excluded = known.copy()
    for row in np.argsort(-lost.mean(axis=1)).tolist():
        num_hits = int(hits[row].sum())
        is_burst = BURSTS.min_hits <= num_hits <= BURSTS.max_hit_share * num_iterations
        if excluded[row] or not is_burst or lost[row].mean() < least_share:
            continue
        others = ~excluded
        others[row] = False
        other_hits, num_others = int(hits[others].sum()), int(others.sum()) * num_iterations
        q_value = _chance(num_hits, num_iterations, other_hits, num_others)
        q_value *= num_rows / (len(found) + 1)
        if q_value <= rate:
            excluded[row] = True
            found.append(
                _Burst(
                    row=row, hits=hits[row], excess=lost[row], q_value=min(1.0, q_value),
                    others=others, other_hits=other_hits,
                )
            )  # fmt: skip
    return found


def pair_burst(value: Floats, own: Floats, rate: float, least_share: float) -> _Burst | None:
    """Return the row of two that is slow now and then, None where that is not shown.

    `value` (2, iteration) is the excess of each over the other, as a share; `own` (2, iteration)
    its own log time. Example: 17 of 38 iterations in which row 0 is 8 to 17 % above row 1, none the
    other way round: p = 2^-17.
    """
    gap = value[0] - value[1]
    quiet = float(np.quantile(np.abs(gap), BURSTS.quiet_share)) / BURSTS.quiet_quantile
    margin = max(BURSTS.margin_share, BURSTS.margin_sigmas * quiet)
    hits = np.stack([gap > margin, gap < -margin])
    row = int(hits[1].sum() > hits[0].sum())
    num_hits, num_iterations = int(hits[row].sum()), len(gap)
    if not BURSTS.min_hits <= num_hits <= BURSTS.max_hit_share * num_iterations:
        return None
    excess = np.where(hits[row], np.abs(gap), 0.0)
    changes = [
        float(robust.median(one[hits[row]]) - robust.median(one[~hits[row]]))
        for one in (own[row], own[1 - row])
    ]
    size = float(np.median(excess[hits[row]]))
    agrees = changes[0] > PAIRS.agrees_share * size > abs(changes[1])
    q_value = float(special.bdtrc(num_hits - 1, int(hits.sum()), 0.5)) * 2
    if not agrees or q_value > rate or excess.mean() < least_share:
        return None
    return _Burst(
        row=row, hits=hits[row], excess=excess, q_value=min(1.0, q_value),
        others=np.arange(2) != row, other_hits=int(hits[1 - row].sum()),
    )  # fmt: skip


def _chance(num_hits: int, num_iterations: int, other_hits: int, num_others: int) -> float:
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


def _places(seen: Observations) -> Integers:
    """Number of each row's stage and TP rank together, (row,): who has the same loading to do."""
    place = np.stack([seen.members.stage, seen.members.place["tp"]])
    return np.unique(place, axis=1, return_inverse=True)[1].reshape(-1)


def _lost_share(seen: Observations, causes: Sequence[Cause]) -> Floats:
    """Time lost to these causes over the iteration's, (row, iteration)."""
    lost = np.sum([np.maximum(np.nan_to_num(seen.lost(cause)), 0.0) for cause in causes], axis=0)
    return np.asarray(lost / float(np.median(seen.iteration_ns)))


def _compute_excess(seen: Observations, known: Flags) -> Floats:
    """Mean of each row's passes over its peers' minus 1, (row, iteration).

    A row that is quicker than its peers for good is measured against itself; a slow one that is
    `known` is nobody's peer.
    """
    groups = peer_groups(seen.work, seen.members)
    if min(len(rows) for rows in groups) < 2:
        return np.full((len(seen.members), len(seen.iterations)), np.nan)
    work = _averaged(seen.work, groups, known)
    value = compare_within(work, seen.members, groups, known).value
    return np.asarray(np.expm1(value - robust.centre(value)[:, None].clip(max=0.0)))


def _averaged(work: Work, groups: list[Integers], known: Flags) -> Work:
    """Put the mean of each phase's passes, over their group's, in place of the passes."""
    ratio = np.exp(deviations(work, groups, known))
    phases = (FORWARD, BACKWARD)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = [np.log(robust.mean(ratio[:, :, work.phase == one], axis=2)) for one in phases]
    return Work(
        log_ns=np.stack(mean, axis=2),
        phase=np.array(phases, dtype=np.int64),
        microbatch=np.zeros(len(phases), dtype=np.int64),
    )


def _main_cause(lost_ns: Mapping[Cause, Floats], burst: _Burst) -> Cause:
    """Return what most of the time was lost to, above the others."""

    def total(cause: Cause) -> float:
        time_ns = np.nan_to_num(lost_ns[cause])
        over = time_ns[burst.row] - robust.median(time_ns[burst.others], axis=0)
        return float(np.maximum(over, 0.0)[burst.hits].sum())

    return max((cause for cause in LOST if cause in lost_ns), key=total)


def _finding(seen: Observations, burst: _Burst, cause: Cause) -> Finding:
    members, row = seen.members, burst.row
    num_hits, num_iterations = int(burst.hits.sum()), len(burst.hits)
    if cause == Cause.COMPUTE:
        excess_ns = np.nan_to_num(seen.busy_ns[row]) * burst.excess / (1.0 + burst.excess)
        saved_ns = saved_by_compute(seen, row, excess_ns)
    else:
        excess_ns = saved_ns = burst.excess * float(np.median(seen.iteration_ns))
    share = float(burst.excess.mean())
    slots = np.flatnonzero(burst.hits)
    reach = SEARCH.interval_sigmas / float(np.sqrt(num_hits))
    course = Course(
        active=burst.hits,
        effect=share,
        standard_error=share / float(np.sqrt(num_hits)),
        share=num_hits / float(slots[-1] - slots[0] + 1),
        episodes=tuple((int(slot), int(slot)) for slot in slots),
    )
    what = "its passes" if cause == Cause.COMPUTE else "the window"
    owner = Owner.JOB if cause == Cause.GC else Owner.NODE
    doubt = _doubt(seen, burst, cause)
    return build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=cause,
            owner=Owner.UNDECIDED if doubt else owner,
            slowdown=1.0 + share,
            interval=(1.0 + share * max(0.0, 1.0 - reach), 1.0 + share * (1.0 + reach)),
            course=course,
            q_value=burst.q_value,
            num_peers=int(burst.others.sum()),
            saved_ns=saved_ns,
            subject=f"{ranks_of(members, row)} ({place(members, row)})",
            predicate=f"{WORDS[cause]} in {num_hits} of {num_iterations} iterations, "
            f"{milliseconds(float(excess_ns[burst.hits].mean()))} each on the mean,",
            evidence=(
                f"that is {percent(1 + share)[:-2]} % of {what}; of "
                f"{counted(int(burst.others.sum()) * num_iterations, 'iteration')} of the other "
                f"ranks {burst.other_hits} lost as much",
                *doubt,
            ),
            advice=ADVICE[cause],
        ),
    )


def _doubt(seen: Observations, burst: _Burst, cause: Cause) -> tuple[str, ...]:
    """Return what else may be the reason of a burst, in a sentence; nothing when nothing is."""
    if not burst.is_sure:
        return ("so few iterations may be chance: trace more of them in a row",)
    groups = stage_groups(seen.members)
    if cause == Cause.COMPUTE and data_of(seen.work, seen.members, groups).used:
        return ("its microbatches vary in length, and longer ones may be the reason as well",)
    return ()


def _pauses(seen: Observations, known: Flags, rate: float) -> list[_Burst]:
    found = bursts(_lost_share(seen, LOST), known, rate, BURSTS.least_share)
    if found or known.any():
        return found
    lone = lone_pause(_lost_share(seen, (Cause.GC, Cause.LOADER)), _places(seen), rate)
    return [lone] if lone else []


def _search(inquiry: Inquiry) -> Answer:
    """Count on GPUs only: on CPUs, processes take time from each other in bursts all the while."""
    seen, rate = inquiry.seen, inquiry.settings.false_discovery_rate
    if seen.members.device_kind == "cpu" or len(seen.iterations) < BURSTS.min_hits:
        return Answer()
    known = inquiry.slow | inquiry.named
    paused = _pauses(seen, known, rate) if seen.lost_ns else []
    known = known.copy()
    known[[one.row for one in paused]] = True
    excess, floor = _compute_excess(seen, known), inquiry.settings.min_slowdown - 1.0
    if len(seen.members) == 2 and not known.any():
        own = robust.median(seen.work.log_ns, axis=2)
        lone = pair_burst(excess, own, rate, floor)
        throttled = [lone] if lone else []
    else:
        throttled = bursts(excess, known, rate, floor)
    return Answer(
        findings=(
            *(_finding(seen, one, _main_cause(seen.lost_ns, one)) for one in paused),
            *(_finding(seen, one, Cause.COMPUTE) for one in throttled),
        )
    )


BURST = CauseSpec(cause=Cause.HOST, search=_search)
