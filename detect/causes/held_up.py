"""Name hosts whose cores others take, and processes held up by threads of their own.

Problem: a process that waits for a core, or whose interpreter another thread of its own has locked,
launches late, and computes late where it runs on the CPU. Its device looks slow, its connections,
its stage heavy; whose fault that is stays open, and of two ranks most of all.

Idea: Linux counts for how long the threads that launch a rank's work could have run and had no
core. Neither data nor layers nor the device lengthen that; only what else runs on these cores does,
or a quota of CPU time. The host is named where a rank waits in this way for far longer than others:
for a good part of the step and most of what an open finding costs, or without one for so much of
the step that nobody makes up for it. On a GPU that is half of it, as launches run ahead.

The step would be shorter by what they wait beyond the others, but no step is shorter than the
others compute. What is less than launches may run ahead by costs what the open finding says.

Example: two stages of one H200 each, in iterations of 405 ms. Stage 0 takes 3.5 times as long as
stage 1, and may be heavy. Its threads wait for 423 ms an iteration for a core, those of stage 1 for
0.01: twenty processes shared its core, and without them an iteration takes 76 ms.

**Other threads.** Linux counts as well for how long the process's other threads of Python run, and
while one of them has the interpreter's lock nothing is launched. Most release it where they wait or
compute in C, so that a thread by itself is a note; where an open finding points at a rank of which
other threads run for most of what it costs, and for several times as long as those of all others,
that is why; but slow computing of a GPU is not, since a thread may as well run in C. The process is
held up, and not its host: the advice says so.

**What all have.** Where the threads of every rank are held up, one of them is the last in each
iteration, and of few iterations it may be the same by chance. A host that was named, and loses no
more than most are held up for, is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from scipy import stats

from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
    cost_ratio,
    counted_window,
    decided,
    gain,
    rows_of_findings,
    settle,
    slowed_by,
    undecided,
)
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_share
from detect.text import milliseconds, subject_of_ranks
from detect.thresholds.hosts import CORES
from detect.thresholds.verdicts import COSTS
from megascan.arrays import Flags, Floats

OPEN_CAUSES = (
    Cause.COMPUTE,
    Cause.HOST,
    Cause.LOADER,
    Cause.LINK,
    Cause.UNKNOWN,
    Cause.STAGE_IMBALANCE,
)
"""What a rank that waits for a core may be taken for."""
OF_DEVICES = (Cause.COMPUTE, Cause.STAGE_IMBALANCE)
"""Of them, what a GPU with work before it shows, however long its host is held up."""


@dataclass(frozen=True, kw_only=True)
class _Account:
    """Something that the kernel counts of each rank's threads, ns an iteration."""

    told: Callable[[Observations], Mapping[int, Mapping[int, int]]]
    """By rank and iteration."""
    one: str
    """What is said of a rank, before the figures."""
    several: str
    noted: tuple[str, str]
    """The same, of one and of several, where nothing shows that it costs the step anything."""
    evidence: str
    advice: tuple[str, ...]
    usual: str
    """What is said of a host that loses no more than is usual."""
    is_lost: bool
    """Whether the step is longer by it wherever nothing runs ahead."""


WAITS = _Account(
    told=lambda seen: seen.core_waits,
    one="waits for cores of its host",
    several="wait for cores of their host",
    noted=("waits for cores of its host", "wait for cores of their host"),
    evidence="Linux counts for how long the threads that launch the work could have run and had no "
    "core: together {own} an iteration, those of the other ranks {others} at most; neither data "
    "nor devices lengthen that",
    advice=(
        "see what else runs on that host (top, pidstat -w), and on which cores the process may run "
        "(taskset -p)",
        "in a container, compare its quota of CPU time with what the process needs (nr_throttled "
        "in cpu.stat of its cgroup)",
    ),
    usual="the threads that launch the work of most ranks had no core for {usual} an iteration: "
    "one of them may be the last by chance",
    is_lost=True,
)
OTHER_THREADS = _Account(
    told=lambda seen: seen.other_threads,
    one="is held up by other threads of its own process",
    several="are held up by other threads of their own processes",
    noted=(
        "runs other threads of Python in its process",
        "run other threads of Python in their processes",
    ),
    evidence="Linux counts for how long other threads of Python ran in its process: together {own} "
    "an iteration, those of the other ranks {others} at most; nothing is launched while they have "
    "the interpreter's lock",
    advice=(
        "see which thread that is (py-spy dump --pid PID, py-spy top): a logger, a collector of "
        "metrics, a loader inside the process",
        "another machine would be as slow: that thread goes with the process",
    ),
    usual="other threads of Python ran for {usual} an iteration in the processes of most ranks: "
    "one of them may be the last by chance",
    is_lost=False,
)


Accounts: TypeAlias = "list[tuple[_Account, Floats]]"
"""What the kernel tells of all ranks, with (row, iteration) ns."""


@dataclass(frozen=True, kw_only=True)
class _Apart:
    """Rows of which an account says far more than of others."""

    account: _Account
    rows: tuple[int, ...]
    own_ns: float
    """Of an iteration, of all threads together: of the row that has least."""
    others_ns: float
    step_ns: float
    saved_ns: Floats
    """(iteration,): by how much it would be shorter, where nothing runs ahead."""
    q_value: float

    @property
    def predicate(self) -> str:
        """Return what is said of them."""
        words = self.account.one if len(self.rows) == 1 else self.account.several
        return f"{words}, {self._figures}"

    @property
    def noted(self) -> str:
        """Return what is said of them where nothing shows that it costs the step anything."""
        return f"{self.account.noted[len(self.rows) > 1]}, {self._figures}"

    @property
    def _figures(self) -> str:
        own, step = milliseconds(self.own_ns), milliseconds(self.step_ns)
        together = " (all these threads together)" * (self.own_ns > self.step_ns)
        return f"{own} in iterations of {step}{together}"

    @property
    def evidence(self) -> str:
        """Return where that is from."""
        return self.account.evidence.format(
            own=milliseconds(self.own_ns), others=milliseconds(self.others_ns)
        )


def search_held_up(inquiry: Inquiry) -> Answer:
    """Name the ranks whose threads wait for a core, or for other threads of their processes: of
    undecided findings, and for a core by themselves. Doubt hosts that lose no more than is usual.
    """
    seen, members = inquiry.seen, inquiry.seen.members
    accounts = [
        (account, times_ns)
        for account in (OTHER_THREADS, WAITS)
        if (times_ns := _times_ns(seen, account)) is not None
    ]

    def decide(one: Finding) -> Finding | None:
        if one.owner is Owner.NODE and (doubts := _usual(seen, accounts, one)):
            return undecided(one, doubts)
        if one.owner is not Owner.UNDECIDED or one.cause not in OPEN_CAUSES:
            return None
        apart = next(filter(None, (_behind(inquiry, *account, one) for account in accounts)), None)
        return _decided(seen, one, apart) if apart else None

    found, settled = settle(inquiry, decide)
    named = [one for one in found if one.owner is Owner.NODE]
    blamed = inquiry.blamed | rows_of_findings(members, named)
    for account, times_ns in accounts:
        if account.is_lost:
            found += _by_themselves(inquiry, account, times_ns, blamed)
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, [one for one in found if one.owner is Owner.NODE]),
        explains=lambda one: one in settled,
        notes=tuple(_notes(inquiry, accounts, blamed)),
    )


def _usual(seen: Observations, accounts: Accounts, of: Finding) -> str:
    """Say that a host loses no more than the threads of most ranks are held up for; "" where it
    does, or is none.
    """
    if of.cause is not Cause.HOST:
        return ""
    holds = seen.within(of.stretches)
    step_ns = float(seen.iteration_ns[holds].mean()) if holds.any() else np.inf
    for account, times_ns in accounts:
        usual_ns = robust.usual(times_ns.mean(axis=1))
        if usual_ns >= max(of.lost_share, CORES.least_share) * step_ns:
            return account.usual.format(usual=milliseconds(usual_ns))
    return ""


def _times_ns(seen: Observations, account: _Account) -> Floats | None:
    """Return what an account says of each row, (row, iteration): of rows that stand for several
    ranks the longest. None where not every rank tells.
    """
    members, numbers, by_rank = seen.members, seen.iterations.tolist(), account.told(seen)
    rows = []
    for ranks in members.workers:
        told = [by_rank.get(rank, {}) for rank in ranks]
        if not all(told):
            return None
        rows.append([max(one.get(number, 0) for one in told) for number in numbers])
    return np.array(rows, dtype=np.float64) if len(rows) > 1 and numbers else None


def _behind(inquiry: Inquiry, account: _Account, times_ns: Floats, of: Finding) -> _Apart | None:
    """Return of whom an account says far more than of others while a finding holds, if that is why;
    a finding without ranks may be anybody's who has no core. None where other ranks are part of it,
    and nobody's waiting inside passes can explain them.
    """
    seen = inquiry.seen
    holds = seen.within([(of.first_iteration, of.last_iteration)])
    is_cpu = seen.members.device_kind == "cpu"
    if not holds.any() or not (is_cpu or account.is_lost or of.cause not in OF_DEVICES):
        return None
    least_share = max(CORES.least_share, CORES.most_share * of.lost_share)
    apart = _apart(inquiry, account, times_ns, holds, least_share)
    if apart is None or not of.ranks:
        return apart if account.is_lost else None
    rows = set(seen.members.rows_with(of.ranks))
    is_told = set(apart.rows) <= rows and (set(apart.rows) == rows or seen.holds_waiting)
    return apart if is_told else None


def _apart(
    inquiry: Inquiry, account: _Account, times_ns: Floats, holds: Flags, least_share: float
) -> _Apart | None:
    """Return the rows of which an account says in the iterations `holds`, on the mean, more than
    usual by `least_share` of these, several times what is usual, and twice what any other does;
    None where it may be chance.
    """
    seen = inquiry.seen
    mean_ns, step_ns = times_ns[:, holds].mean(axis=1), float(seen.iteration_ns[holds].mean())
    usual_ns = robust.usual(mean_ns)
    is_far = mean_ns >= max(CORES.far_ratio * usual_ns, usual_ns + least_share * step_ns)
    if not is_far.any() or mean_ns[is_far].min() < CORES.beside_ratio * mean_ns[~is_far].max():
        return None
    beyond_ns = times_ns[is_far].max(axis=0) - np.median(times_ns[~is_far], axis=0)
    computing_ns = np.nan_to_num(seen.busy_ns[~is_far]).max(axis=0)
    longest = is_far[times_ns.argmax(axis=0)][holds]
    q_value = _chance(longest, is_far)
    if q_value > inquiry.settings.false_discovery_rate:
        return None
    return _Apart(
        account=account,
        rows=tuple(np.flatnonzero(is_far).tolist()),
        own_ns=float(mean_ns[is_far].min()),
        others_ns=float(mean_ns[~is_far].max()),
        step_ns=step_ns,
        saved_ns=np.clip(beyond_ns, 0.0, np.maximum(seen.iteration_ns - computing_ns, 0.0)),
        q_value=q_value,
    )


def _chance(longest: Flags, is_far: Flags) -> float:
    """Return the chance that as many rows, chosen afterwards, would be longest as often if all were
    alike: on cores that all share now this one waits and now that.

    `longest` (iteration,) flags where one of the rows `is_far` is.
    """
    share = float(is_far.mean())
    chance = stats.binom.sf(int(longest.sum()) - 1, len(longest), share)
    return min(1.0, float(chance) * len(is_far))


def _decided(seen: Observations, of: Finding, apart: _Apart) -> Finding:
    """Return a finding as that of the host on which its ranks have no core, or are held up."""
    ranks, account = seen.members.ranks_of(apart.rows), apart.account
    first, last = of.first_iteration, of.last_iteration
    is_all_lost = account.is_lost and apart.own_ns >= _runs_ahead(seen) * apart.step_ns
    estimate = cost_ratio(seen, apart.saved_ns, counted_window(seen, first, last))
    cost = max(estimate if is_all_lost else 1.0, of.step_time_cost_ratio)
    is_replayed = of.cost_is_replayed and cost == of.step_time_cost_ratio
    is_shown = is_replayed or cost >= COSTS.next_to_nothing_ratio
    finding = decided(
        seen,
        of,
        ranks,
        cause=Cause.HOST,
        statement=f"{subject_of_ranks(seen.members, ranks)} "
        f"{apart.predicate if is_shown else apart.noted}, from iteration {first} to {last}; "
        f"{gain(slowed_by(seen, first, last), cost, is_replayed=is_replayed)}",
        evidence=(apart.evidence,),
        advice=account.advice,
    )
    return replace(
        finding,
        step_time_cost_ratio=cost,
        cost_is_replayed=is_replayed,
        is_pair=False,
        is_inside=False,
    )


def _by_themselves(
    inquiry: Inquiry, account: _Account, times_ns: Floats, blamed: Flags
) -> Iterator[Finding]:
    """Yield the finding on ranks, named for nothing yet, of which an account says so much that the
    step is longer by it.
    """
    seen, everywhere = inquiry.seen, np.ones(len(inquiry.seen.iterations), dtype=bool)
    apart = _apart(inquiry, account, times_ns, everywhere, _runs_ahead(seen))
    if apart is None or blamed[list(apart.rows)].any():
        return
    share = apart.saved_ns / seen.iteration_ns
    if float(share.mean()) < CORES.least_share:
        return
    yield build_finding(
        seen,
        Claim(
            ranks=seen.members.ranks_of(apart.rows),
            rows=apart.rows,
            cause=Cause.HOST,
            owner=Owner.NODE,
            slowdown=1.0 + float(share.mean()),
            interval=interval_of_share(float(share.mean()), robust.standard_error(share)),
            course=None,
            q_value=apart.q_value,
            num_peers=len(seen.members) - len(apart.rows),
            saved_ns=apart.saved_ns,
            subject=subject_of_ranks(seen.members, seen.members.ranks_of(apart.rows)),
            predicate=apart.predicate,
            evidence=(apart.evidence,),
            advice=account.advice,
            is_replayed=False,
        ),
    )


def _notes(inquiry: Inquiry, accounts: Accounts, blamed: Flags) -> Iterator[str]:
    """Yield what an account says of ranks that are not named, where launches may run ahead of it or
    nobody knows whether it costs the step anything.
    """
    everywhere = np.ones(len(inquiry.seen.iterations), dtype=bool)
    for account, times_ns in accounts:
        apart = _apart(inquiry, account, times_ns, everywhere, CORES.slack_share)
        if apart is not None and not blamed[list(apart.rows)].any():
            subject = subject_of_ranks(
                inquiry.seen.members, inquiry.seen.members.ranks_of(apart.rows)
            )
            yield f"{subject} {apart.noted}; whether that costs the step anything is not seen"


def _runs_ahead(seen: Observations) -> float:
    """Return for which share of an iteration a thread may be held up and the step not be longer."""
    is_cpu = seen.members.device_kind == "cpu"
    return CORES.slack_share if is_cpu else CORES.longest_ahead_share
