"""Tell slow devices from ranks that have more to do, by how much the devices have done.

Problem: a rank computes longer than others. It may have longer data or heavier layers, or a slow
device; of two replicas, and of a lone stage, passes alone do not tell.

Idea: GPUs since Hopper count for which share of all cycles their multiprocessors multiplied
matrices (NVML's GPM). All ranks do as many iterations in as much time, so that this share times the
clock compares the work of an iteration, whatever time it took: longer data and heavier layers are
more work, a slow device is not. Where the work differs by less than half of what the rank is slower
by, for sure, its device is slow; where by two thirds of it and more, the job gave it more.

Example: two replicas on one H200 each, rank 1 takes 1.29 times as long. It multiplied for 45 % of
the cycles at 1725 MHz, rank 0 for 33 % at 1875: 1.25 times the work, and it had 1.25 times the
tokens. With a quarter of its multiprocessors kept by another program it took 1.47 times as long,
and both multiplied for 28.7 %.

Limits: a stage that takes longer for what moves memory, as a loss does, multiplies no more: it must
have moved no more either, by half of what it is slower by. Where ranks wait for each other unseen,
whoever waits is slow with as much work: nobody is named. Other processes on a device count as its
own work: such devices tell nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.causes.device import DATA_ADVICE, GPU_ADVICE, STAGE_ADVICE
from detect.causes.finding import (
    Answer,
    Inquiry,
    decided,
    gain,
    rows_of_findings,
    settle,
    slowed_by,
)
from detect.causes.launching import is_host_bound
from detect.observe.machines import OTHERS_NAME
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import subject_of_ranks, times
from detect.thresholds.devices import ORDINARY, SHARED, WORK
from megascan.arrays import Floats

TOLD = (Cause.COMPUTE, Cause.STAGE_IMBALANCE)
"""What more work may be taken for, and the other way round."""


@dataclass(frozen=True, kw_only=True)
class _More:
    """How much more some ranks have done than the others, log, and by how much that may be off."""

    level: float
    reach: float

    @property
    def ratio(self) -> float:
        """Return how many times as much, 1 where it may be as much."""
        return float(np.exp(self.level)) if abs(self.level) > self.reach else 1.0

    def is_why(self, slower: float) -> bool:
        """Return whether more work makes ranks slower by so much, log."""
        return self.level - self.reach >= WORK.why_share * slower

    def is_not_why(self, slower: float) -> bool:
        """Return whether it makes them slower by less than half of that."""
        return self.level + self.reach <= WORK.not_why_share * slower


def search_work_done(inquiry: Inquiry) -> Answer:
    """Decide whether ranks that compute for longer have slow devices, or more to do."""
    seen = inquiry.seen
    found, settled = settle(inquiry, lambda one: _decision(seen, one))
    named = [one for one in found if one.owner is Owner.NODE]
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(seen.members, named),
        explains=lambda one: one in settled,
    )


def _decision(seen: Observations, of: Finding) -> Finding | None:
    """Return what work says of a finding; None where it does not tell."""
    if of.cause not in TOLD or of.owner is Owner.JOB or of.is_read:
        return None
    slower = float(np.log(of.slowdown))
    is_lasting = of.share_of_iterations >= WORK.least_lasting
    more = _more(seen, of.ranks, "tensor") if is_lasting and slower > 0.0 else None
    if more is None:
        return None
    if more.is_why(slower):
        return _as_work(seen, of, more)
    if of.owner is Owner.NODE or seen.holds_waiting or is_host_bound(seen):
        return None
    moved = _more(seen, of.ranks, "memory")
    is_told = moved is not None and moved.is_not_why(slower) and more.is_not_why(slower)
    is_told &= of.slowdown >= ORDINARY.little_ratio
    return _as_device(seen, of, more) if is_told else None


def _more(seen: Observations, ranks: tuple[int, ...], what: str) -> _More | None:
    """Return how much more the devices of some ranks have done than those of the others: of
    multiplications, or in "memory". None where that was not counted on all, in two windows at
    least, or not by these processes alone.
    """
    others = [rank for rank in seen.members.recorded if rank not in ranks]
    told = {rank: _done(seen, rank, what) for rank in (*ranks, *others)}
    windows = set[int].intersection(*(set(each) for each in told.values()))
    if not ranks or not others or len(windows) < WORK.min_windows:
        return None
    own, theirs = (
        np.median([[told[rank][window] for window in sorted(windows)] for rank in each], axis=0)
        for each in (ranks, others)
    )
    logs: Floats = np.log(own / theirs)
    return _More(
        level=float(np.median(logs)), reach=max(WORK.noise_log, float(robust.standard_error(logs)))
    )


def _done(seen: Observations, rank: int, what: str) -> dict[int, float]:
    """Return what a device has done, by window after the first, in units of its own."""
    if seen.counters.get(rank, {}).get(OTHERS_NAME, 0.0) / 100 >= SHARED.least_share:
        return {}
    return {
        one.window: one.multiplied if what == "tensor" else one.moved
        for one in seen.work_done.get(rank, ())[1:]
        if min(one.multiplied, one.moved) > 0.0
    }


def _as_device(seen: Observations, of: Finding, more: _More) -> Finding:
    """Return a finding as that of slow devices: they have done hardly more than others, and are
    slower by the rest.
    """
    first, last = of.first_iteration, of.last_iteration
    cost, factor = of.step_time_cost_ratio, of.slowdown / more.ratio
    subject = subject_of_ranks(seen.members, of.ranks)
    verb = "computes" if len(of.ranks) == 1 else "compute"
    finding = decided(
        seen,
        of,
        of.ranks,
        cause=Cause.COMPUTE,
        statement=f"{subject} {verb} {times(factor)} slower than others for as much work "
        f"({first} to {last}); "
        f"{gain(slowed_by(seen, first, last), cost, is_replayed=of.cost_is_replayed)}",
        evidence=(_evidence(more),),
        advice=GPU_ADVICE,
    )
    low, high = of.slowdown_interval
    interval = (low / more.ratio, high / more.ratio)
    return replace(finding, slowdown=factor, slowdown_interval=interval, is_read=True)


def _as_work(seen: Observations, of: Finding, more: _More) -> Finding:
    """Return a finding as the job's doing: these ranks have more to do."""
    members = seen.members
    first, last = of.first_iteration, of.last_iteration
    stages = {int(members.stage[row]) for row in members.rows_with(of.ranks)}
    is_stage = all({*members.ranks_of(members.rows_of_stage(one))} <= {*of.ranks} for one in stages)
    subject, has = subject_of_ranks(members, of.ranks), "has" if len(of.ranks) == 1 else "have"
    finding = decided(
        seen,
        of,
        of.ranks,
        cause=Cause.STAGE_IMBALANCE if is_stage else Cause.SEQUENCE_IMBALANCE,
        statement=f"{subject} {has} {times(float(np.exp(more.level)))} the work of others "
        f"({first} to {last}); "
        + gain(slowed_by(seen, first, last), of.step_time_cost_ratio, is_replayed=False),
        evidence=(_evidence(more),),
        advice=(STAGE_ADVICE if is_stage else DATA_ADVICE,),
    )
    return replace(finding, owner=Owner.JOB, is_read=True)


def _evidence(more: _More) -> str:
    ratio = float(np.exp(more.level))
    return (
        f"by NVML's count of the cycles in which matrices were multiplied {times(ratio)} the work "
        "of the others was done in the same time: more data or layers would be more work, and a "
        "slow device does no more"
    )
