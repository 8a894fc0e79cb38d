"""Say that all others wait for one rank, where no other search has said why.

A rank's own time is what is left of an iteration without its waiting. It needs no passes, no
modules and no CPU time, and is plain in a few iterations on a loaded machine. A rank is suspected
when every other rank waits longer in most iterations, and when its own time is far above that of
the other ranks of its stage, by more than they differ among themselves. This shows that all wait
for one rank, and for which, but not why: the finding is undecided, and says what would decide.
Where its host stops between launches, in all iterations, for most of that excess, and the others'
do not, it is its host. What was undecided of another rank gets a word that it waits for this one.

The headline says what the rank does meanwhile, if that is most of its excess: it is busy where it
computes, and stands still where its device has nothing to do, at the begin or the end of an
iteration, between its operations or inside its passes. Where neither is known, it says only how
long the rank waits.

Example: rank 3 waits 4 % of the iteration, ranks 2, 0 and 1 wait 28, 47 and 52 %: own times 96, 72,
53 and 48 %. The peers' median is 53 %; the excess of 43 % of an iteration is beyond 10 %, and
beyond three times the peers' spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.causes.device import host_advice
from detect.causes.finding import (
    OTHERS_WAIT,
    UNDECIDED_WHOSE,
    UNDECIDED_WHY,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    more_iterations,
)
from detect.causes.launching import off_core_explains, stops_explain
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_ratio
from detect.text import milliseconds, peers_text, subject_of
from detect.thresholds.hosts import CHANGES
from detect.thresholds.observing import OCCUPANCY
from megascan.arrays import Flags, Floats

OF_PASSES = (Cause.COMPUTE, Cause.UNKNOWN)
"""Causes for which passes are longer, as those are in which a rank waits unseen."""
SHARED_CORES = (
    "another process has that core, or a quota holds this one back (top, taskset -p PID; cpu.stat "
    "of its control group): who else runs there decides"
)
WHICH_DECIDES = "whether its operations are slower, or more time lies between them, decides"
EXCHANGED = (
    "or trace again with its host and a peer's exchanged: a fault of the hardware moves with it, "
    "longer data or more work stay"
)
ADVICE_ON_STANDING = (
    "see what its process does while it stands still: py-spy dump --pid PID on its host, several "
    "times",
    "on that host: read its load, memory pressure and disks (top, vmstat 1, iostat -x 1), and what "
    "else runs there",
    "or trace again with its host and a peer's exchanged: a fault of the host moves with it, what "
    "the program does on this rank stays",
)
AT_THE_END = (
    "stands still for {own} at the end of each {step}",
    "at the end of an iteration it stands still for {own} (the others of its stage {theirs}), with "
    "nothing left to do on its device: that may be a slow disk, a collection of garbage, or "
    "logging and saving of the loop's own",
)
AT_THE_BEGIN = (
    "stands still for {own} at the begin of each {step}",
    "at the begin of an iteration its device has nothing to do for {own} (on the others of its "
    "stage {theirs}): it may load data, or do something else first",
)
BETWEEN = (
    "stands still between its operations for {own} of each {step}",
    "between operations its device has nothing to do for {own} of an iteration (on the others of "
    "its stage {theirs}): its host or its process is held up then",
)
INSIDE = (
    "stands still inside its passes for {own} of each {step}",
    "inside passes its device has nothing to do for {own} of an iteration (on the others of its "
    "stage {theirs}): its host launches too late",
)
"""Places of an iteration at which a rank stands still: for the headline, as evidence."""


@dataclass(frozen=True, kw_only=True)
class _Awaited:
    """A rank for whom all others wait."""

    row: int
    peers: Flags
    """(row,): the other rows of its stage."""
    own_ns: Floats
    """(row, iteration): what is left of an iteration without a row's waiting."""
    step_ns: float
    """Of the typical iteration."""
    waiting_ns: Floats
    """(row,): what the other rows wait, typically."""
    gap_ns: Floats
    """(iteration,): by how much each other row waits longer at least."""
    num_hits: int
    """Iterations in which that is far longer."""

    @property
    def of_peers_ns(self) -> Floats:
        """Return the own time of its typical peer, (iteration,)."""
        return robust.median(self.own_ns[self.peers], axis=0)

    @property
    def longer_ns(self) -> Floats:
        """Return how much longer it waits for nobody than its peers, (iteration,)."""
        return np.asarray(self.own_ns[self.row] - self.of_peers_ns)

    @property
    def log_ratio(self) -> Floats:
        """Return the rank's own time over its peers', log, (iteration,)."""
        return np.asarray(np.log(self.own_ns[self.row] / self.of_peers_ns))


def _awaited(seen: Observations) -> _Awaited | None:
    """Return the rank for whom all others wait, if there is one."""
    waiting_ns = seen.waiting_ns
    if waiting_ns is None or len(seen.members) < 2:
        return None
    step_ns = float(np.median(seen.iteration_ns))
    row = int(np.argmin(np.median(waiting_ns, axis=1)))
    others = np.arange(len(waiting_ns)) != row
    peers = others & (seen.members.stage == seen.members.stage[row])
    gap_ns = waiting_ns[others].min(axis=0) - waiting_ns[row]
    num_hits = int((gap_ns > OCCUPANCY.waiting_share * step_ns).sum())
    if not peers.any() or num_hits < OCCUPANCY.mostly_share * len(gap_ns):
        return None
    own_ns = np.maximum(seen.iteration_ns - waiting_ns, 1.0)
    levels = np.median(own_ns[peers], axis=1)
    over = float(np.median(own_ns[row])) - float(np.median(levels))
    spread = float(np.nan_to_num(robust.spread(levels)))
    if over < max(OCCUPANCY.least_share * step_ns, OCCUPANCY.spread_times * spread):
        return None
    typical_ns = np.median(waiting_ns[others], axis=1)
    return _Awaited(
        row=row, peers=peers, own_ns=own_ns, step_ns=step_ns, waiting_ns=typical_ns,
        gap_ns=gap_ns, num_hits=num_hits,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Idle:
    """For how long a rank stands still at one place of its iterations, ns an iteration."""

    own_ns: float
    over_ns: float
    """Beyond its peers."""
    headline: str
    """With the time and that of an iteration."""
    evidence: str
    """With the time and that of its peers."""


def _idle_parts(seen: Observations, found: _Awaited) -> list[_Idle]:
    """Return where the device of an awaited rank has nothing to do, as far as that is known: on
    CPUs, and without passes, at the end of iterations only.
    """
    row, ending_ns = found.row, np.zeros_like(found.own_ns)
    if seen.ending_ns is not None:
        ending_ns = robust.beyond_most(seen.ending_ns)
    places = [(AT_THE_END, ending_ns)]
    if Cause.HOST in seen.lost_ns and seen.members.device_kind != "cpu":
        # what a rank does at the end is a part of its gaps, unless it logs for all
        inside = np.where(seen.members.log_for_all[:, None], 0.0, ending_ns)
        gap_ns = np.nan_to_num(seen.host_gap_ns) - inside
        if seen.pauses is not None:
            places.append((AT_THE_BEGIN, seen.pauses.idle_opening_ns))
            gap_ns = gap_ns - seen.pauses.idle_opening_ns
        places += [(BETWEEN, gap_ns), (INSIDE, np.nan_to_num(seen.stalled_ns))]
    parts = []
    for (headline, evidence), time_ns in places:
        own = float(np.median(time_ns[row]))
        theirs = float(np.median(robust.median(time_ns[found.peers], axis=0)))
        parts.append(_Idle(own_ns=own, over_ns=own - theirs, headline=headline, evidence=evidence))
    return parts


def _stands_still(found: _Awaited, parts: list[_Idle]) -> str:
    """Say for how long, and where, the rank stands still, if that is most of what it takes longer
    than its peers; empty elsewhere.
    """
    most_ns = CHANGES.explains_share * float(np.median(found.longer_ns))
    largest = max(parts, key=lambda one: one.over_ns)
    step = milliseconds(found.step_ns)
    if largest.over_ns >= most_ns:
        return f"{largest.headline.format(own=milliseconds(largest.own_ns), step=step)} iteration"
    if sum(one.over_ns for one in parts) < most_ns:
        return ""
    own = milliseconds(sum(one.own_ns for one in parts))
    return f"stands still for {own} of each {step} iteration"


def _does(seen: Observations, found: _Awaited) -> str:
    """Say what a rank that does not stand still does while all others wait for it, as far as that
    is known.
    """
    own_share = float(np.median(found.own_ns[found.row])) / found.step_ns
    levels = np.median(found.own_ns[found.peers], axis=1)
    peers_share = float(np.median(levels)) / found.step_ns
    peers = peers_text(int(found.peers.sum()))
    over_ns = seen.busy_ns[found.row] - robust.median(seen.busy_ns[found.peers], axis=0)
    if np.median(over_ns) >= CHANGES.explains_share * np.median(found.longer_ns):
        return f"is busy for {own_share:.0%} of an iteration, its {peers} for {peers_share:.0%}"
    return (
        f"waits for {1.0 - own_share:.0%} of an iteration, its {peers} for {1.0 - peers_share:.0%}"
    )


def _awaited_finding(seen: Observations, found: _Awaited) -> Finding:
    members, row = seen.members, found.row
    effect = float(robust.median(found.log_ratio))
    num_iterations, num_peers = len(found.gap_ns), int(found.peers.sum())
    error = float(np.std(found.log_ratio) / np.sqrt(num_iterations))
    parts = _idle_parts(seen, found)
    still = _stands_still(found, parts)
    chance = float(special.bdtrc(found.num_hits - 1, num_iterations, 1.0 / len(members)))
    stops = stops_explain(seen, row, found.longer_ns)
    off_core = off_core_explains(seen, row, found.longer_ns)
    why = "" if stops else UNDECIDED_WHOSE if off_core else UNDECIDED_WHY
    return build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=Cause.HOST if stops or off_core else Cause.UNKNOWN,
            owner=Owner.NODE if stops else Owner.UNDECIDED,
            slowdown=float(np.exp(effect)),
            interval=interval_of_ratio(effect, error),
            course=None,
            q_value=min(1.0, chance * len(members)),
            num_peers=num_peers,
            saved_ns=np.maximum(found.gap_ns, 0.0),
            subject=subject_of(members, row),
            predicate=f"{still or _does(seen, found)}, and all others wait for it",
            whose=why,
            evidence=(
                f"{_waits_text(found.waiting_ns / found.step_ns)} of an iteration, longer than "
                f"this one in {found.num_hits} of {num_iterations} iterations",
                *_computing_beside_peers(seen, found),
                *([off_core, SHARED_CORES] if off_core else []),
                *([stops] if stops else _idle_texts(seen, parts)),
            ),
            advice=host_advice(Owner.NODE) if stops or off_core else _advice(seen, bool(still)),
            is_replayed=False,
        ),
    )


def _waits_text(waiting: Floats) -> str:
    """Say how long the others wait, as shares of an iteration, (row,)."""
    if len(waiting) == 1:
        return f"the other rank waits for {waiting[0]:.0%}"
    return f"the other ranks wait for {waiting.min():.0%} to {waiting.max():.0%}"


def _computing_beside_peers(seen: Observations, found: _Awaited) -> tuple[str, ...]:
    """Say what of the rank's own time is computing, and what its peers compute."""
    if not seen.busy_ns.any():
        return ()
    computing = np.median(seen.busy_ns, axis=1)
    theirs = milliseconds(float(np.median(computing[found.peers])))
    return (
        f"it computes for {milliseconds(float(computing[found.row]))} of an iteration of "
        f"{milliseconds(found.step_ns)}, its {peers_text(int(found.peers.sum()))} for {theirs}",
    )


def _idle_texts(seen: Observations, parts: list[_Idle]) -> list[str]:
    """Say where in an iteration the rank's device has nothing to do for long."""
    least_ns = CHANGES.lost_share * float(seen.iteration_ns.mean())
    return [
        one.evidence.format(
            own=milliseconds(one.own_ns), theirs=milliseconds(max(one.own_ns - one.over_ns, 0.0))
        )
        for one in parts
        if one.over_ns >= least_ns
    ]


def _advice(seen: Observations, is_still: bool) -> tuple[str, ...]:
    """Return what would decide why all others wait for a rank."""
    if is_still:
        return ADVICE_ON_STANDING
    full = " at granularity full" * seen.tells_passes
    return f"{more_iterations(seen)}{full}: {WHICH_DECIDES}", EXCHANGED


def _search_awaited(inquiry: Inquiry) -> Answer:
    """Report the rank that all wait for, unless it was named already or exceeds them by little."""
    found = _awaited(inquiry.seen)
    if found is None or inquiry.named[found.row] or inquiry.slow[found.row]:
        return Answer()
    if robust.median(found.log_ratio) < np.log(inquiry.settings.min_slowdown):
        return Answer()
    waiting = [
        one for one in inquiry.found
        if one.owner is Owner.UNDECIDED and one.cause in OF_PASSES and one.ranks
    ]  # fmt: skip
    return Answer(
        findings=(
            _awaited_finding(inquiry.seen, found),
            *(replace(one, evidence=(*one.evidence, OTHERS_WAIT)) for one in waiting),
        ),
        explains=lambda one: one in waiting,
    )


AWAITED = CauseSpec(cause=Cause.UNKNOWN, search=_search_awaited)
