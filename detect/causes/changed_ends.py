"""Which rank of a group is slow for a part of the time: its ends are late then, and only then.

Problem: where nobody recorded what the ranks of a TP or EP group send each other, all of them wait
for the slowest inside their passes, which last equally long on all. Now and then, or since some
iteration, all passes of the group are longer. One device is throttled then, or the data are longer,
or a link is slow.

Idea: a rank's own work before the first and after the last exchange of a pass, and all work in
which nobody waits for mates, takes longer on a slow device. By how much such work of a rank exceeds
that of its mates (its *lead*) follows the group's own slowness from one iteration to the next:

    lead(t) = usual lead + slope · slowness of the group(t) + noise

Whatever ranks differ by for good is in the usual lead, so leads of a thousandth show. They are:

    backward pass     ends with gradients of weights, which nobody waits for: longer
    forward pass      begins late after such a backward pass, and ends with the others: shorter
    lookups, loss, output layer, optimizer step
                      each rank's own: longer

One of them must follow the group beyond doubt (Student's law of a slope), another one must agree,
and no mate may show half of it. A pause at the end of a pass lengthens it by all that the group
loses, a slow device by what it takes for the last piece of work: half of that at most.

Example: in 8 of 40 iterations all four ranks of a group take 1.24 times as long. In these the
backward passes of the last end 371 us later than those of its mates (otherwise 0.3 us, noise 1.3),
and its forward passes begin 283 us late.

TP ranks compute the same microbatches, so their data are no reason. EP ranks get data of their own:
another stage of the replica must be as quick as ever then, or the rank's optimizer step be longer.

Limits: one rank of a group; pauses lengthen no work and show nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.causes.device import GPU_ADVICE, beyond_others
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    answer_of_groups,
    build_finding,
    placed_at,
    undecided_if_free,
)
from detect.causes.launching import passes_tell_of_devices
from detect.causes.pass_hits import over_quiet
from detect.observe.groups import EachRank
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD, LOSS_OF_LOOKUPS
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course
from detect.text import counted, milliseconds, place, times
from detect.thresholds.bursts import BURSTS
from detect.thresholds.devices import CHANGED_ENDS, ENDS, PAIRS
from megascan.arrays import Flags, Floats, Integers, mask_of
from megascan.timeline import rows_alike

BY_ENDS = (
    "of its group, whose ranks wait for each other inside their passes, it alone has {lead} longer "
    "{work} than its mates, in just the iterations in which the group is slow; so has it {other}"
)
NOBODY_WAITS = (
    "nobody waits for this time, so its whole group may itself wait in it for what the trace does "
    "not show"
)
BACKWARD_PASS, FORWARD_PASS = "backward passes", "forward passes that begin late"
OPTIMIZER, LOSS, AWAITED = "optimizer steps", "losses", "losses in which its mates wait for it"


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One kind of work of the ranks of a group, in which a slow one differs from its mates."""

    name: str
    time_ns: Floats
    """(rank, iteration); the other way round where a slow rank takes less."""
    least_ns: float
    """By how much a slow rank differs from its mates at least."""
    most_ns: float = np.inf
    """By how much it may; a pause makes more."""
    is_own: bool = True
    """Whether it may tell the rank; else it may only agree."""


@dataclass(frozen=True, kw_only=True)
class _Lead:
    """The rank of a group whose lead follows the group, in one kind of work."""

    work: _Work
    number: int
    """Of the rank, inside the group."""
    lead_ns: float
    """Where the group is as slow as it typically is."""
    p_value: float


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group that is slow at times."""

    every: EachRank
    own: Flags
    """(rank,)"""
    over: Floats
    """(iteration,): by how much it is slow, log."""
    spares_data: bool
    """Whether longer data are not why: TP mates share them, or other stages are quick."""

    @property
    def active(self) -> Flags:
        """Flag the iterations in which it is slow, (iteration,)."""
        return np.asarray(self.over >= ENDS.least_of_group_log)

    @property
    def effect(self) -> float:
        """Return how slow it typically is then, log."""
        return float(np.median(self.over[self.active]))

    @property
    def slower(self) -> float:
        """Return by what share of its usual time its work is longer then."""
        return float(np.expm1(self.effect))

    @property
    def is_last(self) -> bool:
        """Return whether it is of the last stage, whose forward passes end with an output layer."""
        stage = self.every.members.stage
        return bool(stage[self.own][0] == stage.max())


def search_changed_ends(inquiry: Inquiry) -> Answer:
    """Search groups that wait unseen, and are slow at times, for the rank that makes them slow."""
    seen = inquiry.seen
    if seen.hidden_axes not in (("tp",), ("ep",)) or not passes_tell_of_devices(seen):
        return Answer()
    known = inquiry.blamed
    findings, explained = [], set[int]()
    for group in _slow_at_times(seen):
        ranks = group.every.members.ranks[group.own].tolist()
        rows = list(seen.members.rows_with(ranks))
        rate = inquiry.settings.false_discovery_rate
        told = None if known[rows].any() else _told(group, _leads(group), rate)
        if told is not None:
            findings.append(_finding(seen, group, rows, *told))
            explained |= set(ranks)
    return answer_of_groups(seen.members, findings, explained)


def _slow_at_times(seen: Observations) -> Iterator[_Group]:
    """Yield the groups of several ranks that are slow in some iterations, and not in others."""
    every = seen.each_rank
    members, group = every.members, every.members.tensor_group
    if seen.hidden_axes == ("ep",):
        firsts = [members.layout.group(int(rank), "ep")[0] for rank in members.ranks]
        group = np.array(firsts, dtype=np.int64)
    slowness = _slowness(every, group)
    least = CHANGED_ENDS.least_iterations
    for rows in rows_alike(group):
        own, over = mask_of(rows.tolist(), len(group)), slowness[rows[0]]
        active = over >= ENDS.least_of_group_log
        quiet = over < PAIRS.agrees_share * ENDS.least_of_group_log
        if len(rows) > 1 and min(int(active.sum()), int(quiet.sum())) >= least:
            is_spared = "tp" in seen.hidden_axes or _spares_data(every, slowness, own, active)
            yield _Group(every=every, own=own, over=over, spares_data=is_spared)


def _slowness(every: EachRank, group: Integers) -> Floats:
    """Return how much longer the passes of each rank's group take than in its quiet iterations,
    beyond other groups of the stage, where there are any, (rank, iteration), log.
    """
    passes, stage = robust.log_of(every.passes_ns.sum(axis=2)), every.members.stage
    of_group = np.zeros_like(passes)
    for rows in rows_alike(group):
        of_group[rows] = robust.median(passes[rows], axis=0)
    own = over_quiet(of_group[:, :, None], BURSTS.quiet_share)[:, :, 0]
    beyond = np.array(own)
    for rows in rows_alike(group):
        others = (stage == stage[rows[0]]) & (group != group[rows[0]])
        if others.any():
            beyond[rows] -= robust.median(own[others], axis=0)
    return np.nan_to_num(beyond)


def _spares_data(every: EachRank, slowness: Floats, own: Flags, active: Flags) -> bool:
    """Return whether other stages of a group's replicas are as quick as ever where it is slow."""
    stage, replica = every.members.stage, every.members.replica
    same = np.isin(replica, replica[own]) & (stage != stage[own][0])
    if not same.any():
        return False
    theirs = robust.median(slowness[same][:, active])
    return float(theirs) < PAIRS.elsewhere_share * float(np.median(slowness[own][0][active]))


def _works(group: _Group) -> Iterator[_Work]:
    """Yield the kinds of work of a group's ranks."""
    every, own = group.every, group.own
    forward, backward = (every.passes_ns[own, :, one] for one in (FORWARD, BACKWARD))
    least_ns = CHANGED_ENDS.least_end_share * float(robust.median(forward))
    most_ns = CHANGED_ENDS.most_end_share * group.slower * float(robust.median(backward))
    yield _Work(name=BACKWARD_PASS, time_ns=backward, least_ns=least_ns, most_ns=most_ns)
    yield _Work(name=FORWARD_PASS, time_ns=-forward, least_ns=least_ns, is_own=False)
    loss = every.lookups_ns[own, :, LOSS_OF_LOOKUPS]
    kinds = {
        "lookups": every.lookups_ns[own, :, 1 - LOSS_OF_LOOKUPS],
        "output layers": every.output_ns[own],
        OPTIMIZER: every.optimizer_ns[own],
        LOSS: loss,
    }
    for name, time_ns in kinds.items():
        usual_ns = float(robust.median(time_ns[:, ~group.active]))
        least_ns, most_ns = CHANGED_ENDS.least_own_share * usual_ns, 2.0 * group.slower * usual_ns
        yield _Work(name=name, time_ns=time_ns, least_ns=least_ns, most_ns=most_ns)
    # mates that wait in it do so for longer than a slow device makes a loss, the last of these
    yield _Work(name=AWAITED, time_ns=-loss, least_ns=most_ns, is_own=False)


def _leads(group: _Group) -> list[_Lead]:
    """Return the leads that follow a group, of all kinds of work that tell something.

    On the last stage forward passes may end later by more than backward passes do, which then begin
    late and are shorter; only where the loss waits for that do backward passes tell.
    """
    found = (_lead(one, group.over, group.effect) for one in _works(group))
    leads = [one for one in found if one is not None]
    kinds = {one.work.name for one in leads}
    if AWAITED in kinds:
        return [one for one in leads if one.work.name != LOSS]
    silent = {BACKWARD_PASS, FORWARD_PASS} if group.is_last else {""}
    return [one for one in leads if one.work.name not in silent]


def _lead(work: _Work, over: Floats, effect: float) -> _Lead | None:
    """Return the rank whose lead grows with how slow its group is, `over` (iteration,), by more
    than in proportion, as chips' do on longer data, while no mate's does by half of it; None where
    none does, or the work was not recorded.

    Example: leads of 1, 370, 2 and 372 us where a group is slow by 0, 0.24, 0 and 0.24.
    """
    num_ranks, num_iterations = work.time_ns.shape
    if not np.isfinite(work.time_ns).all() or not work.time_ns.any():
        return None
    nobody = np.zeros(num_ranks, dtype=bool)
    leads = beyond_others(work.time_ns, [np.arange(num_ranks)], nobody)
    centred, degrees = over - over.mean(), num_iterations - 2
    weight = float((centred**2).sum())
    slopes = (leads * centred).sum(axis=1) / weight
    number = int(np.argmax(slopes))
    lead_ns, of_mates = slopes[number] * effect, np.delete(slopes, number)
    usual_ns = max(0.0, leads[number].mean() - slopes[number] * over.mean())
    grown_ns = lead_ns - 2.0 * float(np.expm1(effect)) * usual_ns
    if not (work.least_ns <= grown_ns and lead_ns <= work.most_ns):
        return None
    if of_mates.max() > PAIRS.agrees_share * slopes[number]:
        return None
    left = leads[number] - leads[number].mean() - slopes[number] * centred
    error = float(np.sqrt((left**2).sum() / degrees / weight))
    p_value = float(special.stdtr(degrees, -slopes[number] / error)) if error > 0 else 0.0
    return _Lead(work=work, number=number, lead_ns=float(lead_ns), p_value=p_value)


def _told(group: _Group, leads: list[_Lead], rate: float) -> tuple[_Lead, _Lead] | None:
    """Return the surest lead of a group, with another one that agrees; None where there are no two,
    two ranks have sure ones, or data may be why.
    """
    tests = int(group.own.sum()) * CHANGED_ENDS.kinds
    sure = [one for one in leads if one.work.is_own and tests * one.p_value <= rate]
    if len({one.number for one in sure}) != 1:
        return None
    first = min(sure, key=lambda one: one.p_value)
    agree = [
        one
        for one in leads
        if one is not first
        and one.number == first.number
        and one.p_value <= CHANGED_ENDS.agrees_p_value
    ]
    if not group.spares_data and first.work.name != OPTIMIZER:
        agree = [one for one in agree if one.work.name == OPTIMIZER]
    return (replace(first, p_value=tests * first.p_value), agree[0]) if agree else None


def _saved(seen: Observations, rows: list[int], group: _Group) -> Floats:
    """Return the time saved, (iteration,), if all of a group, who wait for the slow one, were as
    quick as in its quiet iterations.
    """
    busy_ns = np.nan_to_num(seen.busy_ns)
    better_ns = busy_ns.copy()
    better_ns[rows] *= np.exp(-np.where(group.active, group.over, 0.0))
    return np.asarray(np.maximum(busy_ns.max(axis=0) - better_ns.max(axis=0), 0.0))


def _finding(
    seen: Observations, group: _Group, rows: list[int], first: _Lead, other: _Lead
) -> Finding:
    members = group.every.members
    at = int(np.flatnonzero(group.own)[first.number])
    rank, size = int(members.ranks[at]), int(group.own.sum())
    (row,) = seen.members.rows_with((rank,))
    factor, active = float(np.exp(group.effect)), group.active
    error = robust.standard_error(group.over[active])
    beside = seen.members.stage == seen.members.stage[row]
    beside[rows] = False
    finding = build_finding(
        seen,
        Claim(
            ranks=(rank,),
            rows=(row,),
            cause=Cause.COMPUTE,
            owner=Owner.NODE,
            slowdown=factor,
            interval=interval_of_ratio(group.effect, error),
            course=Course.of(active, group.effect, error),
            q_value=first.p_value,
            num_peers=size - 1,
            saved_ns=_saved(seen, rows, group),
            # a job's only group is brought to nobody's times by a replay
            is_replayed=bool(beside.any()),
            subject=f"rank {rank} ({place(members, at)})",
            predicate=f"computes at least {times(factor)} slower than its "
            f"{counted(size - 1, 'mate')}",
            evidence=(
                BY_ENDS.format(
                    lead=milliseconds(first.lead_ns), work=first.work.name, other=other.work.name
                ),
            ),
            advice=GPU_ADVICE,
            is_bound=True,
            slow_passes_ratio=factor,
        ),
    )
    return placed_at(undecided_if_free(finding, NOBODY_WAITS), members, at)
