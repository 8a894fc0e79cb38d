"""Time lost beside compute (loader, collector, host, late exits) as findings."""

from __future__ import annotations

import numpy as np

from detect.causes.pauses import LossSearch
from detect.findings.finding import Claim, build_finding
from detect.findings.of_compute import hosts_are_all_late
from detect.findings.wording import counted, milliseconds, percent, place, ranks_of
from detect.observations import Bools, Observations
from detect.report import Cause, Finding, Owner
from detect.stats.search import Suspect

OWNERS = {
    Cause.LOADER: Owner.NODE,
    Cause.GC: Owner.JOB,
    Cause.HOST: Owner.NODE,
    Cause.LINK: Owner.NODE,
}
"""A collector pauses for what the process allocates: the job's own doing, whatever the node."""
IN_DOUBT = (
    "another rank computes slowly, and others wait for it: mend that first, then trace again and "
    "see whether this remains"
)
PREDICATES = {
    Cause.LOADER: "waits {time} an iteration for its data loader, {over} over its peers",
    Cause.GC: "stands still {time} an iteration for garbage collection, {over} over its peers",
    Cause.HOST: "loses {time} an iteration to its host, {over} over its peers",
    Cause.LINK: "leaves its communications {time} an iteration later than the other members do",
}


def loss_findings(seen: Observations, found: LossSearch, slow: Bools) -> list[Finding]:
    """One finding a rank that loses time; `slow` are the rows that compute slowly."""
    return [_finding(seen, found, one, slow) for one in found.suspects]


def _finding(seen: Observations, found: LossSearch, suspect: Suspect, slow: Bools) -> Finding:
    row, course, cause = suspect.row, suspect.course, found.loss.cause
    in_doubt = cause == Cause.LINK and bool(slow.any()) and not slow[row]
    active = course.active
    own = float(np.nanmedian(found.loss.time_ns[row][active]))
    excess = np.where(active, np.maximum(found.excess_ns[row], 0.0), 0.0)
    typical = float(np.median(excess[active]))
    base = _base(seen, found, row, own, typical)
    reach = 1.96 * course.standard_error / max(course.effect, 1e-9)
    slowdown = 1.0 + typical / base
    members = seen.members
    over = f"{milliseconds(typical)} ({percent(1 + course.effect)[:-2]} % of the iteration)"
    return build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=cause,
            owner=Owner.UNDECIDED if in_doubt else _owner(seen, cause, suspect),
            slowdown=slowdown,
            interval=(
                max(1.0, 1 + (slowdown - 1) * (1 - reach)),
                1 + (slowdown - 1) * (1 + reach),
            ),
            course=course,
            q_value=suspect.q_value,
            num_peers=_num_peers(found, row),
            saved_ns=excess,
            subject=f"{ranks_of(members, row)} ({place(members, row)})",
            predicate=PREDICATES[cause].format(time=milliseconds(own), over=over),
            evidence=(*_evidence(seen, found, suspect), *((IN_DOUBT,) if in_doubt else ())),
        ),
    )


def _owner(seen: Observations, cause: Cause, suspect: Suspect) -> Owner:
    """Hosts that are late everywhere are the job's, as with devices that they starve."""
    if cause == Cause.HOST and hosts_are_all_late(seen, suspect.row, suspect.course.active):
        return Owner.JOB
    return OWNERS[cause]


def _base(seen: Observations, found: LossSearch, row: int, own: float, excess: float) -> float:
    """What the slowdown refers to, ns an iteration.

    The peers' loading time, the transfers of the quickest members of the rank's communications,
    else the rank's own compute.
    """
    if found.loss.cause == Cause.LOADER:
        return max(own - excess, 1.0)
    if found.loss.cause == Cause.LINK and seen.transfers is not None:
        return max(float(np.median(seen.transfers.quick_ns[row])), 1.0)
    return max(float(np.median(seen.busy_ns[row])), 1.0)


def _num_peers(found: LossSearch, row: int) -> int:
    return next(len(rows) - 1 for rows in found.loss.groups if row in rows)


def _evidence(seen: Observations, found: LossSearch, suspect: Suspect) -> tuple[str, ...]:
    row, active = suspect.row, suspect.course.active
    own = float(np.nanmedian(found.loss.time_ns[row][active]))
    excess = float(np.median(found.excess_ns[row][active]))
    peers = counted(_num_peers(found, row), "peer")
    sentences = [
        f"{found.loss.name}: {milliseconds(own)} an iteration against "
        f"{milliseconds(max(own - excess, 0.0))} of its {peers}",
        f"above them in {suspect.course.share:.0%} of these "
        f"{counted(int(active.sum()), 'iteration')}",
    ]
    if found.loss.cause == Cause.HOST:
        sentences.append(_parts(seen, row, active))
    return tuple(sentences)


def _parts(seen: Observations, row: int, active: Bools) -> str:
    gap = f"{milliseconds(float(np.median(seen.host_gap_ns[row][active])))} between operations"
    if seen.members.device_kind == "cpu":
        stolen = milliseconds(float(np.median(seen.stolen_ns[row][active])))
        return (
            f"of it {stolen} while computing (wall less CPU time: the thread was taken off its "
            f"core) and {gap}"
        )
    stalled = milliseconds(float(np.median(seen.stalled_ns[row][active])))
    return (
        f"of it {stalled} inside passes whose modules mostly run as fast as ever (the device had "
        f"nothing to do: its host launched too late) and {gap}"
    )
