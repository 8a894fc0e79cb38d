"""Slow rows of the compute search as findings: cause, owner, evidence."""

from __future__ import annotations

import numpy as np

from detect.causes.compute import ComputeSearch, SlowRow, excess_compute_ns
from detect.causes.ordinary import ordinary_difference
from detect.causes.pairs import PairDecision, decide_pair
from detect.findings.cost import saved_by_compute
from detect.findings.counters import counter_evidence
from detect.findings.finding import Claim, build_finding
from detect.findings.wording import counted, listed, place, ranks_of, times
from detect.observations import PHASE_NAMES, Bools, Floats, Ints, Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust

ONE_SIDED = 0.3
"""A pass that is slower by less than this share of the other's effect is not slow."""
SURELY = 1e-6
STARVED, FED = 0.7, 0.5
"""Share of operations that waited for their launch: a starved device, and one that is fed."""
BOUND = (
    "communication within TP groups was not traced and is part of these times: the rank itself may "
    "be slower still"
)
LONE_FLOOR = 0.04
"""Stages may differ by this much (log units) in their layers for reasons of their own."""


def compute_findings(seen: Observations, found: ComputeSearch) -> list[Finding]:
    """One finding a slow row; rows that the pool of layers clears are left out."""
    return [_finding(seen, found, slow) for slow in found.slow if _worth_saying(slow)]


def _worth_saying(slow: SlowRow) -> bool:
    if slow.across_stages and slow.suspect.course.effect < LONE_FLOOR:
        return False
    # one pass alone is no known fault of a device: only beyond all doubt, and lasting
    lasting = bool(slow.suspect.course.active.all()) and slow.suspect.q_value < SURELY
    return lasting or not _one_sided(slow)


def _one_sided(slow: SlowRow) -> bool:
    small, large = sorted(slow.by_phase)
    return small < ONE_SIDED * large


def _finding(seen: Observations, found: ComputeSearch, slow: SlowRow) -> Finding:
    row, course = slow.suspect.row, slow.suspect.course
    cause, owner, reasons = _judge(seen, found, slow)
    slowdown = float(np.exp(course.effect))
    low, high = slow.suspect.interval
    saved = saved_by_compute(seen, (row,), excess_compute_ns(seen, row, course)[None])
    members = seen.members
    peers = counted(slow.num_peers, "peer")
    is_bound = seen.mixes_communication or not seen.splits_tensor_groups
    least = "at least " if is_bound else ""
    verb, whose = ("computes", "its") if len(members.workers[row]) == 1 else ("compute", "their")
    how = {
        Cause.COMPUTE: f"{verb} {least}{times(slowdown)} slower than {whose} {peers}",
        Cause.HOST: f"is starved by its host: work takes {times(slowdown)} the time of its {peers}",
    }.get(cause, f"takes {times(slowdown)} the time of its {peers}")
    if owner == Owner.UNDECIDED:
        how = f"{how}, undecided whose fault that is"
    return build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=cause,
            owner=owner,
            slowdown=slowdown,
            interval=(float(np.exp(low)), float(np.exp(high))),
            course=course,
            q_value=slow.suspect.q_value,
            num_peers=slow.num_peers,
            saved_ns=saved,
            subject=f"{ranks_of(members, row)} ({place(members, row)})",
            predicate=how,
            evidence=(
                *_evidence(seen, slow),
                *((BOUND,) if is_bound else ()),
                *reasons,
                *counter_evidence(seen, row),
            ),
            is_bound=is_bound,
        ),
    )


def _judge(
    seen: Observations, found: ComputeSearch, slow: SlowRow
) -> tuple[Cause, Owner, tuple[str, ...]]:
    """Cause and owner, with the sentences that carry them."""
    starved = _starved(seen, slow)
    if starved is not None:
        return Cause.HOST, starved[0], (starved[1],)
    if _one_sided(slow):
        return (
            Cause.UNKNOWN,
            Owner.UNDECIDED,
            (
                "only one pass is slow; a slow device slows both alike, so this is rather a "
                "difference of the work: compare the two ranks' modules at granularity full",
            ),
        )
    ordinary = ordinary_difference(seen, found, slow)
    if ordinary is not None:
        decision = PairDecision(False, ordinary)
    elif slow.across_stages:
        decision = _alone_on_its_stage(slow)
    elif slow.num_peers == 1:
        decision = decide_pair(seen, found, slow)
    else:
        decision = PairDecision(True, "")
    owner = Owner.NODE if decision.decided else Owner.UNDECIDED
    return Cause.COMPUTE, owner, (decision.because,) if decision.because else ()


def _alone_on_its_stage(slow: SlowRow) -> PairDecision:
    if slow.num_peers >= 2:
        return PairDecision(
            True,
            "no other rank shares its stage; its transformer layers were compared with those of "
            "the other stages, which have the same shape",
        )
    return PairDecision(
        False,
        "only one other stage exists to compare layers with: a benchmark of both devices decides",
    )


def _starved(seen: Observations, slow: SlowRow) -> tuple[Owner, str] | None:
    """Owner and sentence when the device waits for its host; None when it does not.

    A job whose hosts can hardly keep up starves first the ranks that also load data. They are
    compared with the same position of other replicas: a host is at fault only if those are fed.
    """
    if seen.starved_share is None:
        return None
    row, active = slow.suspect.row, slow.suspect.course.active
    own = float(robust.median(seen.starved_share[row][active]))
    if not own >= STARVED:
        return None
    others = starved_groups(seen, row, active)
    fed = _stage_peers(seen, row)
    theirs = float(robust.median(seen.starved_share[fed][:, active]))
    words = (
        f"{own:.0%} of its operations were launched only just in time, so the device waited for "
        f"the host; of its peers' {theirs:.0%}"
    )
    if len(others) and float(np.median(others)) > FED:
        return Owner.JOB, (
            f"{words}; but other TP groups have a starved rank too: the job is host-bound, "
            "whatever the node"
        )
    if not len(others) and theirs > FED:
        return Owner.JOB, f"{words}: the job is host-bound, whatever the node"
    if not len(others) and _loads_most(seen, row):
        return Owner.UNDECIDED, (
            f"{words}; it alone loads data for its TP group, which delays its launches too: a "
            "second replica, or a trace with data loaded beforehand, decides"
        )
    return Owner.NODE, words


def hosts_are_all_late(seen: Observations, row: int, active: Bools) -> bool:
    """Whether a starved device is nothing special: other TP groups have one as well."""
    if seen.starved_share is None:
        return False
    others = starved_groups(seen, row, active)
    own = float(robust.median(seen.starved_share[row][active]))
    return own >= STARVED and len(others) > 0 and float(np.median(others)) > FED


def _stage_peers(seen: Observations, row: int) -> Ints:
    """Rows of the same stage, or without any all others."""
    members = seen.members
    everyone = np.arange(len(members)) != row
    others = everyone & (members.stage == members.stage[row])
    return np.flatnonzero(others if others.any() else everyone)


def starved_groups(seen: Observations, row: int, active: Bools) -> Floats:
    """Starved share of the most starved rank of every other TP group of the job."""
    if seen.starved_share is None:
        return np.zeros(0)
    members = seen.members
    group = members.stage * (int(members.replica.max()) + 1) + members.replica
    level = robust.median(seen.starved_share[:, active], axis=1)
    others = np.unique(group[group != group[row]])
    return np.array([np.nanmax(level[group == one]) for one in others])


def _loads_most(seen: Observations, row: int) -> bool:
    """Whether the rank's loading takes most of its TP group's."""
    members = seen.members
    group = (members.stage == members.stage[row]) & (members.replica == members.replica[row])
    loading = np.nan_to_num(robust.median(seen.loader_ns, axis=1))
    others = group & (np.arange(len(members)) != row)
    return bool(others.any() and loading[row] > 2 * loading[others].max())


def _evidence(seen: Observations, slow: SlowRow) -> list[str]:
    members, row = seen.members, slow.suspect.row
    phases = [
        f"{name} {times(float(np.exp(value)))}"
        for name, value in zip(PHASE_NAMES, slow.by_phase, strict=True)
        if np.isfinite(value)
    ]
    if np.isfinite(slow.optimizer) and seen.optimizer_ns[row].max() > 0:
        phases.append(f"optimizer {times(float(np.exp(slow.optimizer)))}")
    if slow.across_stages:
        against = "of the transformer layers of the other stages"
    else:
        peers = members.rows_of_stage(int(members.stage[row]))
        names = listed(members.workers[one][0] for one in peers if one != row)
        against = f"of the same work on {'rank' if len(peers) == 2 else 'ranks'} {names}"
    course = slow.suspect.course
    num_microbatches = int(seen.work.microbatch.max()) + 1
    return [
        f"{', '.join(phases)} {against}, waiting and communication taken out",
        f"slower than its peers in {course.share:.0%} of these "
        f"{counted(int(course.active.sum()), 'iteration')}, median over "
        f"{counted(2 * num_microbatches, 'pass')} each",
    ]
