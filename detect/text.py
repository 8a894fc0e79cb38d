"""The report in words, for somebody who was woken up; names, numbers and lists as they are read.

`render_text` says first the answer, then why, then what to do, then what could not be seen.
"""

from __future__ import annotations

import math
import textwrap

from detect.observe.members import Members
from detect.report import Cause, Finding, Owner, Report, Verdict
from detect.thresholds.statistics import POWER
from detect.thresholds.verdicts import COSTS
from megascan.errors import listed


def percent(ratio: float) -> str:
    """Return 1.098 as "9.8 %"; small values keep a digit."""
    value = (ratio - 1.0) * 100
    return f"{value:.0f} %" if value >= 20 else f"{value:.1f} %"


def milliseconds(time_ns: float) -> str:
    """Return a time in ms, µs or s, three digits."""
    for limit, unit, size in ((1e6, "µs", 1e3), (1e9, "ms", 1e6)):
        if abs(time_ns) < limit:
            return f"{time_ns / size:.3g} {unit}"
    return f"{time_ns / 1e9:.3g} s"


def times(slowdown: float) -> str:
    """Return 1.31 as "1.31x"."""
    return f"{slowdown:.3f}x" if slowdown < 1.1 else f"{slowdown:.2f}x"


def counted(number: int, noun: str) -> str:
    """Return "1 peer", "3 peers", "8 passes"."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}{ending}"


def peers_text(number: int) -> str:
    """Return "only peer", "3 peers": what "its" is said before."""
    return "only peer" if number == 1 else counted(number, "peer")


def place(members: Members, row: int) -> str:
    """Return "DP1 PP0 TP1, host n03, GPU 5"."""
    parts = [members.labels[row]]
    if members.hosts[row]:
        parts.append(f"host {members.hosts[row]}")
    if members.device_kind == "cuda":
        parts.append(f"GPU {members.device_index[row]}")
    return ", ".join(parts)


def ranks_of(members: Members, row: int) -> str:
    """Return "rank 5", or "ranks 4 and 5" for a row that stands for a TP group."""
    return ranks_text(members.workers[row])


def subject_of(members: Members, row: int) -> str:
    """Return "rank 5 (DP1 PP0 TP1, host n03)", or "the group of ranks 4 and 5 (…)": what a sentence
    in the singular begins with.
    """
    is_group = len(members.workers[row]) > 1
    return f"{'the group of ' * is_group}{ranks_of(members, row)} ({place(members, row)})"


def subject_of_ranks(members: Members, ranks: tuple[int, ...]) -> str:
    """Return what a sentence about some ranks begins with: with their place if they are one row."""
    rows = members.rows_with(ranks)
    is_row = len(rows) == 1 and members.ranks_of(rows) == ranks
    return subject_of(members, rows[0]) if is_row else ranks_text(ranks)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return "rank 5", or "ranks 4 and 5"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


HIDES = "it hides in time that others spend anyway"
"""Why a finding costs the step next to nothing, by replay."""
NOT_SHOWN = "what it costs the step this trace does not show"
"""The same where no replay tells."""
OWNER_WORDS = {
    Owner.NODE: "the node: look at this hardware",
    Owner.JOB: "the job itself: its partition, data or settings",
    Owner.UNDECIDED: "undecided",
}
OF_HOSTS = (Cause.HOST, Cause.LOADER)
"""Causes that a host has, not a device."""
FAR_SLOWER = 1_000
"""Of a slowdown: more is that of what takes no time on sound ranks, and no number to read."""
SHOWN_NEXT_STEPS = 4
WIDTH = 100
LABEL = 10
"""Columns of "evidence  " and the other labels."""


def render_text(report: Report) -> str:
    """Return the report in words, a hundred columns wide."""
    lines = [_answer(report), ""]
    several = len(report.findings) > 1
    for number, finding in enumerate(report.findings, 1):
        if several:
            lines += _wrapped(f"{number}. ", finding.headline)
        lines += [*_finding(finding), ""]
    lines += _could_not_show(report)
    return "\n".join(lines).rstrip() + "\n"


def _answer(report: Report) -> str:
    if report.verdict == Verdict.HEALTHY:
        but = "".join(f"; but {caveat}" for caveat in report.caveats)
        if missing := report.unrecorded_ranks:
            are = "is" if len(missing) == 1 else "are"
            but = f"; nothing is known of {ranks_text(missing)}, which {are} missing{but}"
        return f"HEALTHY: no rank, link or stage stands out in {_window(report)}{but}."
    if not report.findings:
        if report.minimum_detectable_slowdown is None:
            return f"UNDECIDED: nothing could be compared in {_window(report)}."
        return f"UNDECIDED: nothing stands out in {_window(report)}, but {_blindness(report)}."
    first = report.findings[0]
    words = {
        Verdict.DEGRADED: "DEGRADED",
        Verdict.JOB: "JOB (no node is at fault)",
        Verdict.UNDECIDED: "UNDECIDED",
    }[report.verdict]
    more = len(report.findings) - 1
    also = f" ({counted(more, 'more finding')} below)" if more else ""
    answer = f"{words}: {first.headline}.{also}"
    if report.verdict == Verdict.UNDECIDED and first.owner == Owner.JOB:
        is_open = any(one.owner is Owner.UNDECIDED for one in report.findings)
        why = "some of what costs less is undecided" if is_open else _blindness(report)
        answer += f" Whether a node is at fault besides, this trace cannot tell: {why}."
    return answer


def _blindness(report: Report) -> str:
    """Say what a trace in which nothing stands out could not have shown, as part of a sentence."""
    least = report.minimum_detectable_slowdown
    if least is None:
        return "nobody's computing could be compared"
    if least >= POWER.blind_ratio:
        return out_of_reach(report, Cause.COMPUTE)
    if not report.shows_enough:
        why = report.limited_by.get(Cause.COMPUTE, "")
        what = f"a rank that computes less than {times(least)} slower would not have been found"
        return f"{what}: {why}" if why else what
    if not report.unseen_ranks:
        return report.hides[0]
    return (
        f"{ranks_text(report.unseen_ranks)} would not have been found at "
        f"{POWER.blind_ratio:.0f} times {'its' if len(report.unseen_ranks) == 1 else 'their'} time"
    )


def _window(report: Report) -> str:
    first, last = report.iterations
    return f"{counted(report.num_iterations, 'iteration')} ({first} to {last})"


def _wrapped(label: str, text: str) -> list[str]:
    """Return the lines of label and text; further lines are indented to where the text begins."""
    indent = " " * len(label)
    return textwrap.wrap(
        text, WIDTH, initial_indent=label, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def labelled(label: str, *texts: str) -> list[str]:
    """Return the lines of texts, each behind the label, in one column of labels for all."""
    return [line for text in texts for line in _wrapped(f"   {label:<{LABEL}}", text)]


def _finding(finding: Finding) -> list[str]:
    lines = labelled("cause", f"{finding.cause}, owner: {owner_text(finding)}")
    if finding.cause != Cause.CORRUPTION:
        lines += [*labelled("slowdown", slowdown_text(finding)), *labelled("cost", _cost(finding))]
        if len(finding.episodes) > 1:
            spans = [
                f"{first}-{last}" if last > first else f"{first}"
                for first, last in finding.episodes
            ]
            lines += labelled("episodes", f"iterations {listed(spans)}")
    lines += labelled("evidence", *finding.evidence)
    return lines + labelled("next", *finding.next_steps[:SHOWN_NEXT_STEPS])


def slowdown_text(finding: Finding) -> str:
    """Return a slowdown with its interval."""
    if finding.slowdown >= FAR_SLOWER:
        return f"more than {FAR_SLOWER:,}"
    low, high = finding.slowdown_interval
    least = "at least " if finding.slowdown_is_bound else ""
    return f"{least}{finding.slowdown:.3f} (95 % interval {low:.3f} to {high:.3f})"


def owner_text(finding: Finding) -> str:
    """Say who can mend a finding, and where to look."""
    if finding.owner is Owner.NODE and finding.cause in OF_HOSTS:
        return "the node: look at this host"
    return OWNER_WORDS[finding.owner]


def _cost(finding: Finding) -> str:
    ratio = finding.step_time_cost_ratio
    how = "by replay of the step" if finding.cost_is_replayed else "estimate"
    what = "one of these iterations" if len(finding.episodes) > 1 else "an iteration"
    alone = f"{what} takes {ratio:.3f} times what it would without it ({how})"
    if ratio < COSTS.next_to_nothing_ratio:
        alone = f"next to nothing: {HIDES} ({how})" if finding.cost_is_replayed else NOT_SHOWN
    others = tuple(rank for rank in finding.joint_ranks if rank not in finding.ranks)
    if not others:
        return alone
    return (
        f"{alone}; {finding.joint_cost_ratio:.3f} times what it would without it and what is found "
        f"on {ranks_text(others)}"
    )


def _power(report: Report) -> list[str]:
    """Say what would have been found; for classes out of reach say why, without a percentage."""
    least = report.minimum_detectable
    blind = [name for name, ratio in least.items() if ratio >= POWER.blind_ratio]
    seen = ", ".join(f"{one} {percent(least[one])}" for one in least if one not in blind)
    texts = [f"{name}: {out_of_reach(report, name)}" for name in blind]
    if seen:
        texts.insert(
            0,
            f"smallest lasting slowdown found with {report.power * 100:.0f} % probability: {seen}; "
            "below that, silence means nothing (host, loader, gc: share of the iteration)",
        )
    return labelled("power", *texts)


def out_of_reach(report: Report, name: str) -> str:
    """Say what a window that is nearly blind for a class can still show, and what blinds it."""
    factor = report.minimum_detectable[name]
    what = f"nothing below a factor of {math.ceil(factor)} can be seen here"
    if factor >= POWER.hopeless_ratio:
        what = f"not even a factor of {POWER.hopeless_ratio:.0f} can be seen here"
    why = report.limited_by.get(name, "")
    return f"{what}: {why}" if why else what


def _could_not_show(report: Report) -> list[str]:
    lines = ["What this trace could and could not have shown:"]
    lines += labelled(
        "window",
        f"{_window(report)} of {milliseconds(report.iteration_ns)}, "
        f"{counted(report.world_size, 'rank')}",
    )
    lines += _power(report)
    lines += labelled(
        "rule",
        f"named if the 95 % interval reaches {percent(report.min_slowdown)}, over all ranks and "
        f"classes at a false-discovery rate of {report.false_discovery_rate:.0%}: of a hundred "
        f"names as unsure as that, {report.false_discovery_rate * 100:.0f} is expected to be wrong",
    )
    if report.alignment is not None:
        agree = f"agree within {milliseconds(report.alignment.residual_p99_ns)} (p99)"
        if not report.alignment.is_measured:
            agree = "nothing in this trace was matched that would show how well they agree"
        lines += labelled("clocks", agree)
    return lines + labelled("note", *report.notes)
