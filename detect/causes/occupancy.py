"""Name the rank for whom all others wait, where no other search has said why.

Problem: every search here looks at one kind of time, against one kind of noise. Six iterations on a
loaded machine may leave each of them without a name, while the sums are plain: one rank is busy
96 % of every iteration, and all the others wait for it. Such a job is not healthy.

Idea: a rank's own time is what is left of an iteration without its waiting. It needs no passes, no
modules and no CPU time. A rank is suspected when, in most iterations, every other rank waits longer
than it does, and its own time lies far above that of its stage's others, further than those differ
among themselves. Which of them, and that it is one, is then shown; why it is busy is not: the
finding is undecided, and says what would decide.

Example: rank 3 waits 4 % of the iteration, ranks 2, 0 and 1 wait 28, 47 and 52 %: own times 96, 72,
53 and 48 %. Its peers' median is 53 %; 0.43 of an iteration is beyond 0.1, and beyond three times
their spread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.finding import Answer, CauseSpec, Claim, Inquiry, build_finding
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import stage_groups
from detect.text import counted, milliseconds, place, ranks_of
from detect.thresholds import OCCUPANCY, SEARCH
from megascan.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class _Awaited:
    """A rank for whom all others wait; shares of the median iteration."""

    row: int
    own_share: float
    peers_share: float
    """Of the other rows of its stage."""
    least_waiting: float
    most_waiting: float
    """Of all other rows."""
    num_hits: int
    """Iterations in which it waits least by far."""
    q_value: float
    saved_ns: Floats
    """(iteration,)"""
    log_ratio: Floats
    """(iteration,): its own time over its peers'."""
    num_peers: int


def awaited(seen: Observations) -> _Awaited | None:
    """Return the rank for whom all others wait, if there is one."""
    if seen.waiting_ns is None or len(seen.members) < 2:
        return None
    step_ns = float(np.median(seen.iteration_ns))
    waiting = seen.waiting_ns
    row = int(np.argmin(np.median(waiting, axis=1)))
    others = np.arange(len(waiting)) != row
    peers = others & (seen.members.stage == seen.members.stage[row])
    gap = waiting[others].min(axis=0) - waiting[row]
    hits = int((gap > OCCUPANCY.waiting_share * step_ns).sum())
    if not peers.any() or hits < OCCUPANCY.mostly_share * len(gap):
        return None
    own = np.maximum(seen.iteration_ns - waiting, 1.0)
    levels = np.median(own[peers], axis=1)
    over = float(np.median(own[row])) - float(np.median(levels))
    spread = float(np.nan_to_num(robust.spread(levels)))
    if over < max(OCCUPANCY.least_share * step_ns, OCCUPANCY.spread_times * spread):
        return None
    typical = np.median(waiting[others], axis=1) / step_ns
    chance = float(special.bdtrc(hits - 1, len(gap), 1.0 / len(waiting)))
    return _Awaited(
        row=row,
        own_share=float(np.median(own[row])) / step_ns,
        peers_share=float(np.median(levels)) / step_ns,
        least_waiting=float(typical.min()),
        most_waiting=float(typical.max()),
        num_hits=hits,
        q_value=min(1.0, chance * len(waiting)),
        saved_ns=np.maximum(gap, 0.0),
        log_ratio=np.log(own[row] / robust.median(own[peers], axis=0)),
        num_peers=int(peers.sum()),
    )


def _finding(seen: Observations, found: _Awaited) -> Finding:
    members, row = seen.members, found.row
    effect = float(robust.median(found.log_ratio))
    error = float(np.std(found.log_ratio) / np.sqrt(len(found.log_ratio)))
    low, high = (effect + sign * SEARCH.interval_sigmas * error for sign in (-1, 1))
    peers = counted(found.num_peers, "peer")
    return build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=Cause.UNKNOWN,
            owner=Owner.UNDECIDED,
            slowdown=float(np.exp(effect)),
            interval=(float(np.exp(low)), float(np.exp(high))),
            course=None,
            q_value=found.q_value,
            num_peers=found.num_peers,
            saved_ns=found.saved_ns,
            subject=f"{ranks_of(members, row)} ({place(members, row)})",
            predicate=f"is busy for {found.own_share:.0%} of an iteration, its {peers} for "
            f"{found.peers_share:.0%}, and all others wait for it, undecided why",
            evidence=(
                f"the other ranks wait {found.least_waiting:.0%} to {found.most_waiting:.0%} of an "
                f"iteration; in {found.num_hits} of {len(found.log_ratio)} iterations each of them "
                "waits longer than this one",
                *_parts(seen, row),
            ),
            advice=(
                "trace more iterations in a row (--continuous-trace-iterations 10) at granularity "
                "full: whether its operations are slower, or more time lies between them, decides",
                "or trace again with its host and a peer's exchanged: a fault of the hardware "
                "moves with it, longer data or more work stay",
            ),
            is_replayed=False,
        ),
    )


def _parts(seen: Observations, row: int) -> tuple[str, ...]:
    """Say what of the rank's own time is computing, and what its peers compute."""
    if not seen.busy_ns.any():
        return ()
    rows = next(rows for rows in stage_groups(seen.members) if row in rows)
    computing = np.median(seen.busy_ns, axis=1)
    peers = milliseconds(float(np.median(computing[rows[rows != row]])))
    return (
        f"it computes {milliseconds(float(computing[row]))} an iteration and its peers {peers}, "
        f"in iterations of {milliseconds(float(np.median(seen.iteration_ns)))}",
    )


def _search(inquiry: Inquiry) -> Answer:
    """Leave out whoever was named already, being why the others wait, and what is small."""
    found = awaited(inquiry.seen)
    if found is None or inquiry.named[found.row] or inquiry.slow[found.row]:
        return Answer()
    if robust.median(found.log_ratio) < np.log(inquiry.settings.min_slowdown):
        return Answer()
    return Answer(findings=(_finding(inquiry.seen, found),))


AWAITED = CauseSpec(cause=Cause.UNKNOWN, search=_search)
