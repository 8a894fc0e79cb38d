"""Which rank of a TP group is slow: its passes end late, where the others wait for it in between.

Problem: where nobody recorded what TP ranks send each other, all of a group wait for the slowest
inside their passes, which last equally long on all of them. Where there are other groups, the group
as a whole is slow; in a job's only group nothing is.

Idea: the work after the last exchange of a pass is each rank's own, and whom the others wait for
next tells who was late. Three ends show that, in this order:

    output layer   its product is computed by each rank alone: it takes longer on a slow device
    loss           begins with an exchange: all but the slow rank wait in it for the slow rank,
                   whose backward passes end late as well
    backward pass  ends with gradients of weights, which nobody waits for: it lasts longer, and the
                   next forward pass, which begins late, less long. Only in a group that is slow

    rank 0   forward |######|output  ##|loss ####waits|backward ##########|..waits
    rank 1   forward |######|output  ######|loss      |backward ##############|     slow

All ranks of the group compute the same microbatches, so their data are not the reason.

Example: losses take 1.08 ms on rank 1 and 4.11 ms on rank 0, in forward passes of 56 ms; backward
passes 105.6 and 100.1 ms: rank 1. On sound ranks the two differ by 0.1 % of a forward pass.

Limits: how much slower the device is nobody knows but from the output layer, or from other groups.
Experts get other tokens on each rank, and CP ranks other parts of a sequence: not judged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from detect.causes.device import GPU_ADVICE, beyond_others, stages_alike
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    answer_of_groups,
    build_finding,
    placed_at,
)
from detect.causes.launching import passes_tell_of_devices
from detect.causes.ordinary import few_factor
from detect.observe.groups import EachRank
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD, LOSS_OF_LOOKUPS
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import chance_of_mean, deviations, stage_groups
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course
from detect.text import counted, milliseconds, place, times
from detect.thresholds.devices import ENDS, ORDINARY
from detect.thresholds.networks import LINKS
from megascan.arrays import Flags, Floats, Integers, mask_of
from megascan.timeline import rows_alike

BY_OUTPUT = (
    "of its TP group, whose ranks wait for each other inside their passes, its output layer, which "
    "each computes alone from the same data, takes {times} the time of its mates'"
)
BY_LOSS = (
    "of its TP group, whose ranks wait for each other inside their passes, all others wait for it "
    "in the loss, {lead} each time, and its backward passes end {later} later: all compute the "
    "same microbatches, so the data are not the reason"
)
BY_BACKWARD = (
    "of its TP group, whose ranks wait for each other inside their passes, it alone ends its "
    "backward passes {lead} later, and begins the next ones late"
)


@dataclass(frozen=True, kw_only=True)
class _LateEnd:
    """A rank whose passes end later than those of its mates."""

    rank: int
    effect: float
    """By how much its device is slower at least, log."""
    p_value: float
    words: str


def search_ends(inquiry: Inquiry) -> Answer:
    """Search TP groups of which nobody recorded the communication for a rank that ends late."""
    seen = inquiry.seen
    if seen.hidden_axes != ("tp",) or not passes_tell_of_devices(seen):
        return Answer()
    known = inquiry.blamed
    every = seen.each_rank
    findings, explained = [], set[int]()
    for own in _groups(every):
        rows = list(seen.members.rows_with(every.members.ranks[own].tolist()))
        effect = _effect_of_group(seen, rows)
        if known[rows].any() or effect is None:
            continue
        late = _late_end(every, own, effect)
        if late is not None and late.p_value * own.sum() <= inquiry.settings.false_discovery_rate:
            findings.append(_finding(seen, every, rows, late, int(own.sum())))
            explained |= set(every.members.ranks[own].tolist())
    return answer_of_groups(seen.members, findings, explained)


def _groups(every: EachRank) -> Iterator[Flags]:
    """Flag the ranks of each TP group of several, (rank,), group by group."""
    group = every.members.tensor_group
    for one in np.unique(group):
        own = group == one
        if own.sum() > 1:
            yield own


def _effect_of_group(seen: Observations, rows: list[int]) -> float | None:
    """Return by how much the rows of a group are slower than other groups of their stage, log; 0
    where there are none. None where they are not slower, or other stages of their replica are slow
    alike, as longer data make them.
    """
    own = mask_of(rows, len(seen.members))
    if not len(_rows_beside(seen, rows)):
        return 0.0
    level = robust.centre(robust.median(deviations(seen.work, stage_groups(seen.members), own), 2))
    effect = float(np.median(level[own]))
    is_slow = effect >= ENDS.least_of_group_log
    if not is_slow or stages_alike(seen.members, np.nan_to_num(level), rows[0]):
        return None
    return effect


def _late_end(every: EachRank, own: Flags, effect: float) -> _LateEnd | None:
    """Return the rank of a group that ends late, by what shows it best; None where none does."""
    if np.isfinite(every.output_ns[own]).any():
        return _by_output(every, own, effect)
    if np.isfinite(every.lookups_ns[own, :, LOSS_OF_LOOKUPS]).any():
        return _by_loss(every, own, effect)
    return _by_backward(every, own, effect) if effect else None


def _by_output(every: EachRank, own: Flags, effect: float) -> _LateEnd | None:
    found = _stands_out(every, robust.log_of(every.output_ns), own, ENDS.least_output_log)
    if found is None:
        return None
    rank, lead, p_value = found
    words = BY_OUTPUT.format(times=times(float(np.exp(lead))))
    return _LateEnd(rank=rank, effect=max(lead, effect), p_value=p_value, words=words)


def _by_loss(every: EachRank, own: Flags, effect: float) -> _LateEnd | None:
    typical_ns = float(np.nanmedian(every.passes_ns[own, :, FORWARD]))
    early = -every.lookups_ns[:, :, LOSS_OF_LOOKUPS] / typical_ns
    # a loss that is launched late takes longer, too
    least = max(ENDS.least_share, LINKS.late_launch_ns / typical_ns)
    found = _stands_out(every, early, own, least)
    if found is None:
        return None
    rank, lead, p_value = found
    later = _beside_mates(every, every.passes_ns[:, :, BACKWARD] / typical_ns, rank)
    if later < ENDS.agrees_share * lead:
        return None
    words = BY_LOSS.format(
        lead=milliseconds(lead * typical_ns), later=milliseconds(later * typical_ns)
    )
    least = max(float(np.log1p(lead)), effect)
    return _LateEnd(rank=rank, effect=least, p_value=p_value, words=words)


def _by_backward(every: EachRank, own: Flags, effect: float) -> _LateEnd | None:
    typical_ns = float(np.nanmedian(every.passes_ns[own, :, FORWARD]))
    share = every.passes_ns / typical_ns
    found = _stands_out(every, share[:, :, BACKWARD], own, ENDS.least_share, of_all_stages=True)
    if found is None:
        return None
    rank, lead, p_value = found
    if -_beside_mates(every, share[:, :, FORWARD], rank) < ENDS.agrees_share * lead:
        return None
    words = BY_BACKWARD.format(lead=milliseconds(lead * typical_ns))
    return _LateEnd(rank=rank, effect=effect, p_value=p_value, words=words)


def _beside_mates(every: EachRank, value: Floats, rank: int) -> float:
    """Return by how much a rank's `value`, (rank, iteration), exceeds those of its mates."""
    group = every.members.tensor_group
    mates = group == group[rank]
    mates[rank] = False
    return float(np.nanmedian(value[rank] - np.nanmedian(value[mates], axis=0)))


def _stands_out(
    every: EachRank, value: Floats, own: Flags, least: float, *, of_all_stages: bool = False
) -> tuple[int, float, float] | None:
    """Return the number of the rank of a group whose `value`, (rank, iteration), exceeds those of
    its mates in nearly all iterations by `least` and by far more than other ranks of the stage
    differ, or `of_all_stages`, whose backward passes all end with gradients of weights; with how
    much and how probable that is by chance; None where there is none.

    Example: backward passes of two mates of the last stage differ by 3 % of a forward pass, those
    of the other group there by 0.2 %, and those of groups of the other stages by up to 8 %.
    """
    group, stage = every.members.tensor_group, every.members.stage
    nobody = np.zeros(len(own), dtype=bool)
    lead = beyond_others(value, rows_alike(group), nobody)
    level = robust.centre(lead)
    known = own & np.isfinite(level)
    if known.sum() < 2:
        return None
    first = int(np.flatnonzero(known)[np.argmax(level[known])])
    mates = known & (np.arange(len(own)) != first)
    over = value[first] - np.nanmax(value[mates], axis=0)
    over = over[np.isfinite(over)]
    others = lead[~own & (stage == stage[first])]
    if mates.sum() > 1:  # without the late rank, mates are compared with each other
        of_mates = beyond_others(value, [np.flatnonzero(mates)], nobody)[mates]
        others = np.concatenate([others, of_mates])
    most = _most_of_sound(others)
    if of_all_stages:
        most = max(most, _most_of_sound(lead[~own]))
    is_always = len(over) >= 2 and float(np.mean(over > 0)) >= ENDS.always_share
    height = float(np.median(over)) if len(over) else 0.0
    if not is_always or not height >= max(least, most):
        return None
    return first, height, chance_of_mean(over)


def _most_of_sound(leads: Floats) -> float:
    """Return how far sound ranks may stray from their mates, by `leads`, (rank, iteration)."""
    sound = robust.centre(leads) if len(leads) else np.zeros(0)
    sound = sound[np.isfinite(sound)]
    spread = float(np.sqrt(np.mean(sound**2))) if len(sound) else 0.0
    return ORDINARY.rms_factor * few_factor(len(sound)) * spread


def _rows_beside(seen: Observations, rows: list[int]) -> Integers:
    """Return the rows of other groups on the stage of a group's `rows`."""
    of_stage = seen.members.stage == seen.members.stage[rows[0]]
    return np.flatnonzero(of_stage & ~mask_of(rows, len(seen.members)))


def _saved(seen: Observations, rows: list[int], excess_ns: Floats) -> Floats:
    """Return the time saved, (iteration,), if all of a group, who wait for the slow one, computed
    `excess_ns` less.
    """
    busy_ns = np.nan_to_num(seen.busy_ns)
    better_ns = busy_ns.copy()
    better_ns[rows] -= excess_ns
    return np.asarray(np.maximum(busy_ns.max(axis=0) - better_ns.max(axis=0), 0.0))


def _finding(
    seen: Observations, every: EachRank, rows: list[int], late: _LateEnd, size: int
) -> Finding:
    members, num_iterations = every.members, len(seen.iterations)
    at = late.rank
    rank = int(members.ranks[at])
    (row,) = seen.members.rows_with((rank,))
    excess_ns = np.nan_to_num(seen.busy_ns[row]) * -float(np.expm1(-late.effect))
    factor = times(float(np.exp(late.effect)))
    mates = counted(size - 1, "mate")
    finding = build_finding(
        seen,
        Claim(
            ranks=(rank,),
            rows=(row,),
            cause=Cause.COMPUTE,
            owner=Owner.NODE,
            slowdown=float(np.exp(late.effect)),
            interval=interval_of_ratio(late.effect, ENDS.agrees_share * late.effect / 2),
            course=Course.of(np.ones(num_iterations, dtype=bool), late.effect, 0.0),
            q_value=late.p_value * size,
            num_peers=size - 1,
            saved_ns=_saved(seen, rows, excess_ns),
            # a job's only group is brought to nobody's times by a replay
            is_replayed=len(_rows_beside(seen, rows)) > 0,
            subject=f"rank {rank} ({place(members, at)})",
            predicate=f"computes at least {factor} slower than its {mates}",
            evidence=(late.words,),
            advice=GPU_ADVICE,
            is_bound=True,
        ),
    )
    return placed_at(finding, members, at)
