"""Name hosts whose cores others take: let the kernel's account decide what is open.

Problem: a process that waits for a core launches late, and computes late where it runs on the CPU.
Its device looks slow, its connections, its stage heavy; whose fault that is stays open, and of two
ranks most of all.

Idea: Linux counts for how long the threads that launch a rank's work could have run and had no
core. Neither data nor layers nor the device lengthen that; only what else runs on these cores does,
or a quota of CPU time. What is open is the host's where a rank waits in this way for far longer
than others, for a good part of the step, and for most of what the finding costs.

Example: two stages of one GPU each, in iterations of 334 ms. Stage 0 takes 3 times as long as its
launches have it, and may be heavy. Its threads wait 240 ms an iteration for a core, stage 1's 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.causes.finding import (
    LEFT_OPEN,
    Answer,
    Inquiry,
    devices_of,
    gain,
    rows_of_findings,
    shared_place,
    slowed_by,
)
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.text import milliseconds, ranks_text, subject_of
from detect.thresholds.hosts import CORES
from megascan.arrays import Floats

OPEN_CAUSES = (
    Cause.COMPUTE,
    Cause.HOST,
    Cause.LOADER,
    Cause.LINK,
    Cause.UNKNOWN,
    Cause.STAGE_IMBALANCE,
)
"""What a rank that waits for a core may be taken for."""
ADVICE = (
    "see what else runs on that host (top, pidstat -w), and on which cores the process may run "
    "(taskset -p)",
    "in a container, compare its quota of CPU time with what the process needs (nr_throttled in "
    "cpu.stat of its cgroup)",
)


@dataclass(frozen=True, kw_only=True)
class _Short:
    """Rows that wait for a core for far longer than others, while a finding holds."""

    rows: tuple[int, ...]
    own_ns: float
    """The wait of an iteration: of the row that waits least."""
    others_ns: float
    step_ns: float


def search_short_of_cores(inquiry: Inquiry) -> Answer:
    """Name the ranks of undecided findings whose threads wait for a core for most of what the
    finding costs.
    """
    seen, members = inquiry.seen, inquiry.seen.members
    waits_ns = _waits_ns(seen)
    if waits_ns is None:
        return Answer()
    blamed, found, decided = inquiry.blamed, list[Finding](), list[Finding]()
    for one in inquiry.found:
        if one.owner is not Owner.UNDECIDED or one.cause not in OPEN_CAUSES:
            continue
        short = _short_of_cores(seen, waits_ns, one)
        if short is None:
            continue
        if not blamed[list(short.rows)].any():
            found.append(_finding(seen, one, short))
            blamed = blamed | rows_of_findings(members, found)
        decided.append(one)
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, found),
        explains=lambda one: one in decided,
    )


def _waits_ns(seen: Observations) -> Floats | None:
    """Return for how long each row's threads had no core, (row, iteration): of rows that stand for
    several ranks the longest. None where not every rank tells.
    """
    members, numbers = seen.members, seen.iterations.tolist()
    rows = []
    for ranks in members.workers:
        told = [seen.core_waits.get(rank, {}) for rank in ranks]
        if not all(told):
            return None
        rows.append([max(one.get(number, 0) for one in told) for number in numbers])
    return np.array(rows, dtype=np.float64) if rows and numbers else None


def _short_of_cores(seen: Observations, waits_ns: Floats, of: Finding) -> _Short | None:
    """Return who waits for a core while a finding holds, if that is why; a finding without ranks
    may be anybody's. None where ranks that do not wait are part of it, and nobody's waiting inside
    passes can explain them.
    """
    members = seen.members
    holds = (seen.iterations >= of.first_iteration) & (seen.iterations <= of.last_iteration)
    if not holds.any():
        return None
    mean_ns, step_ns = waits_ns[:, holds].mean(axis=1), float(seen.iteration_ns[holds].mean())
    usual_ns = float(np.median(mean_ns)) if len(members) > 2 else float(mean_ns.min())
    lost_ns = step_ns * of.lost_share
    least_ns = max(
        CORES.least_share * step_ns,
        CORES.far_ratio * usual_ns,
        usual_ns + CORES.most_share * lost_ns,
    )
    among = members.rows_with(of.ranks) if of.ranks else range(len(members))
    rows = tuple(row for row in among if mean_ns[row] >= least_ns)
    others = [row for row in range(len(members)) if row not in rows]
    if not rows or not others or (of.ranks and len(rows) < len(among) and not seen.holds_waiting):
        return None
    return _Short(
        rows=rows,
        own_ns=float(mean_ns[list(rows)].min()),
        others_ns=float(mean_ns[others].max()),
        step_ns=step_ns,
    )


def _finding(seen: Observations, of: Finding, short: _Short) -> Finding:
    """Return a finding as that of the host on which its ranks have no core."""
    members, ranks = seen.members, seen.members.ranks_of(short.rows)
    rows = short.rows
    subject = subject_of(members, rows[0]) if len(rows) == 1 else ranks_text(ranks)
    slowed, cost = slowed_by(seen, of.first_iteration, of.last_iteration), of.step_time_cost_ratio
    return replace(
        of,
        ranks=ranks,
        cause=Cause.HOST,
        owner=Owner.NODE,
        statement=f"{subject} could have run and had no core for "
        f"{milliseconds(short.own_ns)} of {milliseconds(short.step_ns)} an iteration "
        f"({of.first_iteration} to {of.last_iteration}); "
        f"{gain(slowed, cost, is_replayed=of.cost_is_replayed)}",
        evidence=(
            "Linux counts this wait of the threads that launch its work; the other ranks wait for "
            f"{milliseconds(short.others_ns)} at most, and neither data nor devices lengthen it",
            LEFT_OPEN.format(statement=of.statement),
        ),
        next_steps=ADVICE,
        coordinates=shared_place(seen, rows),
        host=", ".join(sorted(members.hosts_of(ranks))),
        device=devices_of(members, rows),
        is_pair=False,
        is_inside=False,
    )
