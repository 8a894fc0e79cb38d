"""Name hosts whose cores others take, by the kernel's account.

Problem: a process that waits for a core launches late, and computes late where it runs on the CPU.
Its device looks slow, its connections, its stage heavy; whose fault that is stays open, and of two
ranks most of all.

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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    slowed_by,
)
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_share
from detect.text import milliseconds, ranks_text, subject_of
from detect.thresholds.hosts import CORES
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
ADVICE = (
    "see what else runs on that host (top, pidstat -w), and on which cores the process may run "
    "(taskset -p)",
    "in a container, compare its quota of CPU time with what the process needs (nr_throttled in "
    "cpu.stat of its cgroup)",
)


@dataclass(frozen=True, kw_only=True)
class _Short:
    """Rows that wait for a core for far longer than others."""

    rows: tuple[int, ...]
    own_ns: float
    """The wait of an iteration, of all threads together: of the row that waits least."""
    others_ns: float
    step_ns: float
    saved_ns: Floats
    """(iteration,): by how much it would be shorter, where nothing runs ahead."""
    q_value: float

    @property
    def predicate(self) -> str:
        """Return what is said of them."""
        waits, whose = ("waits", "its") if len(self.rows) == 1 else ("wait", "their")
        own, step = milliseconds(self.own_ns), milliseconds(self.step_ns)
        return f"{waits} for cores of {whose} host, {own} in iterations of {step}"

    @property
    def evidence(self) -> str:
        """Return where that is from."""
        return (
            "Linux counts for how long the threads that launch the work could have run and had no "
            f"core: together {milliseconds(self.own_ns)} an iteration, those of the other ranks "
            f"{milliseconds(self.others_ns)} at most; neither data nor devices lengthen that"
        )


def search_short_of_cores(inquiry: Inquiry) -> Answer:
    """Name the ranks whose threads wait for a core: of undecided findings, and by themselves."""
    seen, members = inquiry.seen, inquiry.seen.members
    waits_ns = _waits_ns(seen)
    if waits_ns is None:
        return Answer()
    blamed, found, settled = inquiry.blamed, list[Finding](), list[Finding]()
    for one in inquiry.found:
        if one.owner is not Owner.UNDECIDED or one.cause not in OPEN_CAUSES:
            continue
        short = _behind(inquiry, waits_ns, one)
        if short is None:
            continue
        if not blamed[list(short.rows)].any():
            found.append(_decided(seen, one, short))
            blamed = blamed | rows_of_findings(members, found)
        settled.append(one)
    found += _by_themselves(inquiry, waits_ns, blamed)
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, found),
        explains=lambda one: one in settled,
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
    return np.array(rows, dtype=np.float64) if len(rows) > 1 and numbers else None


def _behind(inquiry: Inquiry, waits_ns: Floats, of: Finding) -> _Short | None:
    """Return who waits for a core while a finding holds, if that is why; a finding without ranks
    may be anybody's. None where ranks that do not wait are part of it, and nobody's waiting inside
    passes can explain them.
    """
    seen = inquiry.seen
    holds = (seen.iterations >= of.first_iteration) & (seen.iterations <= of.last_iteration)
    if not holds.any():
        return None
    least_share = max(CORES.least_share, CORES.most_share * of.lost_share)
    short = _short_of_cores(inquiry, waits_ns, holds, least_share)
    if short is None or not of.ranks:
        return short
    rows = set(seen.members.rows_with(of.ranks))
    is_told = set(short.rows) <= rows and (set(short.rows) == rows or seen.holds_waiting)
    return short if is_told else None


def _short_of_cores(
    inquiry: Inquiry, waits_ns: Floats, holds: Flags, least_share: float
) -> _Short | None:
    """Return the rows that wait for a core in the iterations `holds`, on the mean, for
    `least_share` of these longer than usual, and for several times what is usual; None where it
    may be chance that they do.
    """
    seen = inquiry.seen
    mean_ns, step_ns = waits_ns[:, holds].mean(axis=1), float(seen.iteration_ns[holds].mean())
    usual_ns = float(np.sort(mean_ns)[(len(mean_ns) - 1) // 4])  # of a half a host may be all
    is_short = mean_ns >= max(CORES.far_ratio * usual_ns, usual_ns + least_share * step_ns)
    if not is_short.any():
        return None
    beyond_ns = waits_ns[is_short].max(axis=0) - np.median(waits_ns[~is_short], axis=0)
    computing_ns = np.nan_to_num(seen.busy_ns[~is_short]).max(axis=0)
    longest = is_short[waits_ns.argmax(axis=0)][holds]
    q_value = _chance(longest, is_short)
    if q_value > inquiry.settings.false_discovery_rate:
        return None
    return _Short(
        rows=tuple(np.flatnonzero(is_short).tolist()),
        own_ns=float(mean_ns[is_short].min()),
        others_ns=float(mean_ns[~is_short].max()),
        step_ns=step_ns,
        saved_ns=np.clip(beyond_ns, 0.0, np.maximum(seen.iteration_ns - computing_ns, 0.0)),
        q_value=q_value,
    )


def _chance(longest: Flags, is_short: Flags) -> float:
    """Return the chance that as many rows, chosen afterwards, would wait longest as often, if all
    waited alike: on cores that all share now this one waits and now that.

    `longest` (iteration,) flags where one of the rows `is_short` does.
    """
    share = float(is_short.mean())
    chance = stats.binom.sf(int(longest.sum()) - 1, len(longest), share)
    return min(1.0, float(chance) * len(is_short))


def _decided(seen: Observations, of: Finding, short: _Short) -> Finding:
    """Return a finding as that of the host on which its ranks have no core."""
    rows = short.rows
    first, last = of.first_iteration, of.last_iteration
    is_all_lost = short.own_ns >= _runs_ahead(seen) * short.step_ns
    estimate = cost_ratio(seen, short.saved_ns, counted_window(seen, first, last))
    cost = max(estimate if is_all_lost else 1.0, of.step_time_cost_ratio)
    is_replayed = of.cost_is_replayed and cost == of.step_time_cost_ratio
    finding = decided(
        seen,
        of,
        seen.members.ranks_of(rows),
        cause=Cause.HOST,
        statement=f"{_subject(seen, rows)} {short.predicate} ({first} to {last}); "
        f"{gain(slowed_by(seen, first, last), cost, is_replayed=is_replayed)}",
        evidence=(short.evidence,),
        advice=ADVICE,
    )
    return replace(
        finding,
        step_time_cost_ratio=cost,
        cost_is_replayed=is_replayed,
        is_pair=False,
        is_inside=False,
    )


def _by_themselves(inquiry: Inquiry, waits_ns: Floats, blamed: Flags) -> Iterator[Finding]:
    """Yield the finding on ranks, named for nothing yet, that wait for so long that the step is
    longer by it.
    """
    seen, everywhere = inquiry.seen, np.ones(len(inquiry.seen.iterations), dtype=bool)
    short = _short_of_cores(inquiry, waits_ns, everywhere, _runs_ahead(seen))
    if short is None or blamed[list(short.rows)].any():
        return
    share = short.saved_ns / seen.iteration_ns
    if float(share.mean()) < CORES.least_share:
        return
    yield build_finding(
        seen,
        Claim(
            ranks=seen.members.ranks_of(short.rows),
            rows=short.rows,
            cause=Cause.HOST,
            owner=Owner.NODE,
            slowdown=1.0 + float(share.mean()),
            interval=interval_of_share(float(share.mean()), robust.standard_error(share)),
            course=None,
            q_value=short.q_value,
            num_peers=len(seen.members) - len(short.rows),
            saved_ns=short.saved_ns,
            subject=_subject(seen, short.rows),
            predicate=short.predicate,
            evidence=(short.evidence,),
            advice=ADVICE,
            is_replayed=False,
        ),
    )


def _runs_ahead(seen: Observations) -> float:
    """Return which share of an iteration a thread may wait for without making the step longer."""
    is_cpu = seen.members.device_kind == "cpu"
    return CORES.slack_share if is_cpu else CORES.longest_ahead_share


def _subject(seen: Observations, rows: tuple[int, ...]) -> str:
    members = seen.members
    return subject_of(members, rows[0]) if len(rows) == 1 else ranks_text(members.ranks_of(rows))
