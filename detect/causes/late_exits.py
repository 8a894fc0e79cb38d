"""Ranks that leave their communications late.

The transfer of an operation is that of its quickest member; what one member takes beyond that is
its lateness: its own NIC, or its host that launches what follows too late. Most late ranks are
victims: who communicates with a late rank is late with it, and along a pipeline everybody waits for
the slow stage. So the latest rank is kept first, and each further rank only if most of its lateness
arose in communications without the ranks kept so far. Example: rank 2 is 9 ms late, rank 6 4 ms, of
which 3.5 ms arose in messages with rank 2: only rank 2 is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from detect.causes.device import host_advice
from detect.causes.finding import (
    NO_GAIN,
    OTHERS_WAIT,
    Answer,
    CauseSpec,
    Inquiry,
    connection_advice,
    undecided_if_free,
)
from detect.causes.searches import Loss, lost_time, stage_peers
from detect.observe.observations import Observations, Transfers
from detect.report import Cause, Finding
from detect.stats.search import Suspect
from detect.text import milliseconds
from detect.thresholds import CONSEQUENCES, LINKS
from megascan.arrays import Flags


def _search_late_exits(inquiry: Inquiry) -> Answer:
    """Compare the ranks of a stage by how late they leave their communications."""
    seen, slow, transfers = inquiry.seen, inquiry.slow | inquiry.named, inquiry.seen.transfers
    if transfers is None or Cause.LINK not in seen.lost_ns:
        return Answer()

    late: list[int] = []  # rows that leave late, and not because of each other

    def without(suspects: tuple[Suspect, ...]) -> tuple[Suspect, ...]:
        kept = _without_victims(seen, transfers, suspects, slow)
        late.extend(one.row for one in kept)
        return kept

    def doubt(suspect: Suspect) -> str:
        if slow.any() and not slow[suspect.row]:
            return OTHERS_WAIT
        return (
            _late_as_all(seen, suspect)
            or _late_with_many(seen, suspect, late)
            or _within_clocks(seen, suspect)
            or _of_its_experts(seen, suspect)
            or _woken_late(seen, suspect.row)
        )

    answer = lost_time(
        inquiry,
        Loss(
            cause=Cause.LINK,
            name="late exit from communication",
            groups=stage_peers(seen),
            bursty=seen.members.device_kind == "cpu",
            excuses_slow=True,
            doubt=doubt,
            base_ns=lambda row, own, excess: float(np.median(transfers.quick_ns[row])),
            without=without,
            predicate="leaves its communications {time} an iteration later than the other "
            "members do",
            advice=lambda suspect, owner: connection_advice(
                seen, seen.members.workers[suspect.row]
            ),
        ),
    )
    findings = tuple(undecided_if_free(_of_its_host(seen, one), NO_GAIN) for one in answer.findings)
    return replace(answer, findings=findings, least_slowdown=None, least_because="")


def _of_its_host(seen: Observations, finding: Finding) -> Finding:
    """Return the finding, with the host as its cause if all processes of a CPU job run on one host:
    no network lies between any two of them, and it is the host that wakes a process late.
    """
    members = seen.members
    if members.device_kind != "cpu" or len(set(members.hosts)) > 1 or not members.hosts[0]:
        return finding
    row = next(number for number, ranks in enumerate(members.workers) if ranks == finding.ranks)
    stolen = np.median(seen.stolen_ns, axis=1)
    theirs = float(np.median(np.delete(stolen, row)))
    off_core = (
        f"while it computes, its thread is off its core for {milliseconds(float(stolen[row]))} an "
        f"iteration, the others' for {milliseconds(theirs)}"
    )
    return replace(
        finding,
        cause=Cause.HOST,
        evidence=(*finding.evidence, off_core),
        next_steps=host_advice(finding.owner),
    )


def _late_as_all(seen: Observations, suspect: Suspect) -> str:
    """Say that a suspect's peers are late as well, which no connection of its own explains; empty
    where they are not.
    """
    active = suspect.course.active
    own = float(np.nanmedian(seen.lost(Cause.LINK)[suspect.row][active]))
    over = suspect.course.effect * float(np.median(seen.iteration_ns))
    if own >= LINKS.late_ratio * (own - over):
        return ""
    return (
        "its peers leave theirs late as well, if less: a slow stage that all wait for, or clocks "
        "that agree badly, may be the reason as well as its connection"
    )


def _late_with_many(seen: Observations, suspect: Suspect, late: Sequence[int]) -> str:
    """Say that many ranks of a stage leave late, each by itself; empty where few do. `late` are the
    rows that do.

    Example: three of seven replicas, 55 to 59 ms an iteration, the other four 1.2 ms.
    """
    stage = seen.members.stage
    num_late = int((stage[list(late)] == stage[suspect.row]).sum())
    num_ranks = int((stage == stage[suspect.row]).sum())
    if num_late < 2 or num_late < LINKS.many_late_share * num_ranks:
        return ""
    return (
        f"{num_late} of the {num_ranks} ranks of its stage leave theirs late, which no fault of a "
        "single connection explains: something that they share, or an order of operations that the "
        "others do not have, may be the reason"
    )


def _within_clocks(seen: Observations, suspect: Suspect) -> str:
    """Say that the clocks may be off by as much as a suspect is late; empty where they are not.

    Clocks that miss each other by a good part of an iteration were not put together at all, and no
    lateness by them is believed. Example: 340 ms of 883, and a rank that is 722 ms late.
    """
    error_ns = seen.alignment.residual_p99_ns if seen.alignment else 0.0
    step_ns = float(np.median(seen.iteration_ns))
    over = suspect.course.effect * step_ns
    are_together = error_ns < LINKS.most_clock_share * step_ns
    if are_together and over > LINKS.clock_errors * error_ns:
        return ""
    return (
        f"clocks agree within {milliseconds(error_ns)} only (p99), and one that is off by as much "
        "makes its rank look late"
    )


def _of_its_experts(seen: Observations, suspect: Suspect) -> str:
    """Say that a suspect's experts may receive more tokens; empty where the suspect is late by too
    much for that, or has no experts of its own.
    """
    assert seen.transfers is not None
    quick_ns = float(np.median(seen.transfers.quick_ns[suspect.row]))
    over_ns = suspect.course.effect * float(np.median(seen.iteration_ns))
    if seen.members.layout.ep < 2 or over_ns >= (LINKS.named_slowdown - 1.0) * quick_ns:
        return ""
    return "experts that are sent more tokens receive for longer, and leave later by as much"


def _woken_late(seen: Observations, row: int) -> str:
    """Return why a late exit need not be the connection's on CPUs of one host; empty elsewhere."""
    members = seen.members
    others = {members.hosts[one] for one in members.rows_of_stage(int(members.stage[row]))}
    if members.device_kind != "cpu" or others != {members.hosts[row]}:
        return ""
    return (
        "all ranks of its stage run on one host, so no network lies between them: a process that "
        "is woken late from its wait, because its cores are busy, shows the same"
    )


def _without_victims(
    seen: Observations, transfers: Transfers, suspects: tuple[Suspect, ...], slow: Flags
) -> tuple[Suspect, ...]:
    """Leave out late ranks whose partners explain their lateness; the latest is kept.

    `slow` are the rows that compute slowly, or lose time to loader, collector or host: a rank that
    is late with them only waits for them, and lateness is handed on along their pipeline.
    """
    workers = seen.members.workers
    accused = {rank for row in np.flatnonzero(slow) for rank in workers[row]}
    kept: list[Suspect] = []
    for suspect in sorted(suspects, key=lambda one: -one.course.effect):
        own = set(workers[suspect.row])
        if _in_pipeline(seen, suspect.row, slow):
            continue
        if _share_with(transfers, own, accused - own) <= CONSEQUENCES.victim_share:
            kept.append(suspect)
            accused |= own
    return tuple(kept)


def _in_pipeline(seen: Observations, row: int, slow: Flags) -> bool:
    """Return whether a slow row shares the row's pipeline: its replica and place, another stage."""
    members = seen.members
    same = slow & (members.stage != members.stage[row])
    for axis in ("dp", "tp", "cp"):
        same &= members.place[axis] == members.place[axis][row]
    return bool(same.any())


def _share_with(transfers: Transfers, own: set[int], accused: set[int]) -> float:
    """Return the share of a worker's lateness that arose in communications with the accused."""
    mine = [one for one in transfers.late_in if one.rank in own]
    total = sum(one.time_ns for one in mine)
    with_accused = sum(one.time_ns for one in mine if accused & set(one.members))
    return with_accused / total if total > 0 else 0.0


LATE_EXITS = CauseSpec(
    cause=Cause.LINK,
    search=_search_late_exits,
    tests_rows=lambda seen: Cause.LINK in seen.lost_ns,
    quantity="late exit from communication in an iteration",
)
