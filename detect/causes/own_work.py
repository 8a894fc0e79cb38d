"""Who is slow now and then, by work in which nobody waits: steps, losses, lookups, output layers.

Problem: a device that is throttled now and then slows whatever runs then. Passes tell that badly:
where nobody recorded what the ranks of a group send each other, all of them wait for the slow one
inside their passes, and where only some passes of an iteration are met, their mean hardly shows it.

Idea: the optimizer step, the output layer, the loss and the lookup of tokens are each rank's own.
On sound devices they take the same time in every iteration, within a per cent. A rank of which one
of them is longer in some iterations, while no other rank's ever is, was slow then: in two of them
at least, and by more than chance at the rate of the others. What else may lengthen such work is
asked in turn:

    a pause       lasts as long whatever it meets, while a lower clock lengthens each step by one
                  factor, by twice or so at most, and passes as well
    longer data   lengthen no step, are shared by TP mates, and lengthen lookups as much as products
    a late mate   is waited for in steps and losses, by all others of a group: one that is alone in
                  it waits for nobody, unless the group has two ranks only

Example: the ranks of a TP group of eight take 1.08 times as long in 5 of 10 iterations. Steps of
rank 14 take 3.34 ms instead of 2.15 in four of them; those of the 31 others never differ by 1.5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detect.causes.device import GPU_ADVICE, beyond_others
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    answer_of_groups,
    build_finding,
    placed_at,
    saved_by_compute,
    undecided_if_free,
)
from detect.causes.hits import Tally, as_large, half_width, num_runs
from detect.causes.launching import passes_tell_of_devices, starvation
from detect.causes.pass_hits import over_quiet
from detect.observe.groups import EachRank
from detect.observe.observations import Observations
from detect.observe.operations import LOSS_OF_LOOKUPS
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course
from detect.text import counted, place, times
from detect.thresholds.bursts import BURSTS, OWN_WORK
from detect.thresholds.devices import PAIRS
from megascan.arrays import Flags, Floats
from megascan.timeline import rows_alike

BY_OWN_WORK = (
    "its {work} takes {times} as long in {num} as in its others, which no other rank's does, and "
    "in which it waits for nobody"
)
NOBODY_WAITS = (
    "nobody waits for this time, so the rank may itself wait in it for what the trace does not show"
)
OPTIMIZER, OUTPUT, LOSS, LOOKUP = "optimizer step", "output layer", "loss", "lookup of tokens"
KINDS = (OPTIMIZER, OUTPUT, LOSS, LOOKUP)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One kind of work of all ranks."""

    name: str
    over: Floats
    """(rank, iteration): log time over the rank's quiet iterations, and over what others exceed
    theirs by; minus infinity where it was not recorded."""
    hits: Flags
    """(rank, iteration): where it is longer by more than sound ranks vary."""
    longer_ns: Floats
    """(rank, iteration): by how much."""

    @property
    def known(self) -> Flags:
        """Flag the ranks that recorded it, (rank,)."""
        return np.asarray(np.isfinite(self.over).all(axis=1))

    def size(self, rank: int) -> float:
        """Return by how much it is typically longer in a rank's hits, log."""
        return float(np.median(self.over[rank][self.hits[rank]]))

    def by_chance(self, rank: int, others: Flags) -> float:
        """Return the probability of a rank's hits at the rate of the `others`, (rank,); 1 where it
        has too few, a lasting one, none of one speed, or the others have a good part of them.
        """
        hits, others = self.hits[rank], others & self.known
        goes_on = hits[-1] and num_runs(hits) == 1  # a level's to tell
        if int(hits.sum()) < BURSTS.min_hits or goes_on or not others.any():
            return 1.0
        tally = Tally.of(as_large(self.hits, self.over, rank), rank, others)
        is_alone = tally.other_hits <= BURSTS.others_share * tally.num_hits
        width, _ = half_width(self.over[rank][hits])
        is_one_speed = width <= BURSTS.one_speed_share * self.size(rank)
        return tally.by_chance if is_alone and is_one_speed else 1.0


def _kinds(every: EachRank) -> list[_Work]:
    """Return the kinds of work that were recorded of several ranks."""
    lookups = every.lookups_ns
    loss, lookup = lookups[:, :, LOSS_OF_LOOKUPS], lookups[:, :, 1 - LOSS_OF_LOOKUPS]
    times_ns = (every.optimizer_ns, every.output_ns, loss, lookup)
    found = (_work(name, one, every) for name, one in zip(KINDS, times_ns, strict=True))
    return [one for one in found if int(one.known.sum()) > 1]


def _work(name: str, time_ns: Floats, every: EachRank) -> _Work:
    """Compare each rank with itself, and with others of its stage, or of all where it has none."""
    own = _over_quiet(time_ns)
    own[~np.isfinite(own).all(axis=1)] = np.nan
    nobody = np.zeros(len(own), dtype=bool)
    beside = beyond_others(own, rows_alike(every.members.stage), nobody)
    beside_all = own - robust.expected_from_others(own, nobody)
    over = np.minimum(own, np.where(np.isfinite(beside), beside, beside_all))
    sigma = float(np.nan_to_num(robust.median(robust.spread(over, axis=1))))
    hits = over > max(BURSTS.margin_share, BURSTS.margin_sigmas * sigma)
    longer_ns = np.where(hits, np.nan_to_num(time_ns) * -np.expm1(-over), 0.0)
    return _Work(name=name, over=np.nan_to_num(over, nan=-np.inf), hits=hits, longer_ns=longer_ns)


def _over_quiet(time_ns: Floats) -> Floats:
    """Return log times over those of each rank's quiet iterations, both (rank, iteration)."""
    return over_quiet(robust.log_of(time_ns)[:, :, None], BURSTS.quiet_share)[:, :, 0]


def _longer_passes(every: EachRank) -> Floats:
    """Return by how much passes of each rank are longer than in its quiet iterations, beyond those
    of other TP groups of its stage, log, (rank, iteration); 0 where by no more than any may vary.
    """
    members, own = every.members, np.nan_to_num(_over_quiet(every.passes_ns.sum(axis=2)))
    beyond = np.array(own)
    for rows in rows_alike(members.tensor_group):
        others = members.stage == members.stage[rows[0]]
        others[rows] = False
        if others.any():
            beyond[rows] -= robust.median(own[others], axis=0)
    return np.where(beyond >= BURSTS.margin_share, beyond, 0.0)


def _tells_of_device(seen: Observations, kinds: Sequence[_Work], work: _Work, rank: int) -> bool:
    """Return whether neither longer data, nor a pause, a mate or a late host are why work of a rank
    is longer.
    """
    every = seen.each_rank
    mates = every.members.tensor_group == every.members.tensor_group[rank]
    is_output, num = work.name == OUTPUT, int(mates.sum())
    may_wait = not is_output and num == 2 and bool(seen.hidden_axes)
    if may_wait or work.size(rank) > np.log(OWN_WORK.most_ratio):
        return False
    (row,) = seen.members.rows_with((int(every.members.ranks[rank]),))
    if starvation(seen, row, work.hits[rank]) is not None:
        return False
    if work.name == OPTIMIZER or seen.rules_data_out or (num > 1 and every.members.layout.tp > 1):
        return True
    spared = [one for one in kinds if one.name in (LOSS, LOOKUP) and one.known[rank]]
    most = PAIRS.agrees_share * work.size(rank)
    at = work.hits[rank]
    return is_output and any(float(np.median(one.over[rank][at])) < most for one in spared)


def search_own_work(inquiry: Inquiry) -> Answer:
    """Search ranks whose own work is longer now and then, where no other rank's is."""
    seen = inquiry.seen
    if not passes_tell_of_devices(seen):
        return Answer()
    every = seen.each_rank
    ranks, group = every.members.ranks, every.members.tensor_group
    left = ~np.isin(ranks, seen.members.ranks_of(np.flatnonzero(inquiry.blamed)))
    kinds, passes = _kinds(every), _longer_passes(every)
    findings, explained = [], set[int]()
    for rank in np.flatnonzero(left).tolist():
        others = left & (np.arange(len(left)) != rank)
        told = [
            (q_value, work)
            for work in kinds
            if (q_value := work.by_chance(rank, others) * len(left) * len(KINDS))
            <= inquiry.settings.false_discovery_rate
            and _tells_of_device(seen, kinds, work, rank)
            and (work.name == OUTPUT or (passes[rank] > 0.0).sum() >= BURSTS.min_hits)
        ]
        if told:
            q_value, work = min(told, key=lambda one: one[0])
            findings.append(_finding(seen, rank, work, passes[rank], q_value))
            explained |= set(ranks[group == group[rank]].tolist())
    return answer_of_groups(seen.members, findings, explained)


def _finding(seen: Observations, rank: int, work: _Work, longer: Floats, q_value: float) -> Finding:
    """Return the finding on a rank, of which passes are `longer`, log, (iteration,)."""
    members = seen.each_rank.members
    number, hits, size = int(members.ranks[rank]), work.hits[rank], float(np.exp(work.size(rank)))
    (row,) = seen.members.rows_with((number,))
    busy_ns = np.maximum(np.nan_to_num(seen.busy_ns[row]), 1.0)
    excess_ns = np.maximum(busy_ns * -np.expm1(-longer), work.longer_ns[rank])
    share = float(np.mean(excess_ns / (busy_ns - excess_ns)))
    num = f"{int(hits.sum())} of {counted(len(hits), 'iteration')}"
    active = hits | (longer > 0.0)
    finding = build_finding(
        seen,
        Claim(
            ranks=(number,),
            rows=(row,),
            cause=Cause.COMPUTE,
            owner=Owner.NODE,
            slowdown=1.0 + share,
            interval=interval_of_ratio(float(np.log1p(share)), share / 2),
            course=Course.of(active, share, 0.0),
            q_value=min(1.0, q_value),
            num_peers=len(members) - 1,
            saved_ns=saved_by_compute(seen, row, excess_ns),
            subject=f"rank {number} ({place(members, rank)})",
            predicate=f"computes slowly in {int(active.sum())} of "
            f"{counted(len(active), 'iteration')}",
            evidence=(BY_OWN_WORK.format(work=work.name, times=times(size), num=num),),
            advice=GPU_ADVICE,
            slow_passes_ratio=size,
        ),
    )
    return placed_at(undecided_if_free(finding, NOBODY_WAITS), members, rank)
