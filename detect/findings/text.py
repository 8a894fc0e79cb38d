"""The report in words, for somebody who was woken up."""

from __future__ import annotations

import textwrap

from detect.findings.wording import counted, listed, milliseconds, percent
from detect.report import Finding, Owner, Report, Verdict

SHOWN_NEXT_STEPS = 4
WIDTH = 100
LABEL = 10
"""Columns of "evidence  " and the other labels."""


def render_text(report: Report) -> str:
    """First the answer, then why, then what to do, then what could not be seen."""
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
        return f"HEALTHY: no rank, link or stage stands out in {_window(report)}."
    if not report.findings:
        return f"UNDECIDED: nothing could be compared in {_window(report)}."
    first = report.findings[0]
    words = {
        Verdict.DEGRADED: "DEGRADED",
        Verdict.JOB: "JOB (no node is at fault)",
        Verdict.UNDECIDED: "UNDECIDED",
    }[report.verdict]
    more = len(report.findings) - 1
    also = f" ({counted(more, 'more finding')} below)" if more else ""
    return f"{words}: {first.headline}.{also}"


def _window(report: Report) -> str:
    first, last = report.iterations
    return f"{counted(report.num_iterations, 'iteration')} ({first} to {last})"


def _wrapped(label: str, text: str) -> list[str]:
    """Label and text, continued under the text."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _labelled(label: str, text: str) -> list[str]:
    return _wrapped(f"   {label:<{LABEL}}", text)


def _finding(finding: Finding) -> list[str]:
    low, high = finding.slowdown_interval
    least = "at least " if finding.slowdown_is_bound else ""
    owner = {
        Owner.NODE: "the node: look at this hardware",
        Owner.JOB: "the job itself: its partition, data or settings",
        Owner.UNDECIDED: "undecided",
    }[finding.owner]
    lines = [
        *_labelled("cause", f"{finding.cause}, owner: {owner}"),
        *_labelled(
            "slowdown", f"{least}{finding.slowdown:.3f} (95 % interval {low:.3f} to {high:.3f})"
        ),
        *_labelled("cost", _cost(finding)),
    ]
    if len(finding.episodes) > 1:
        spans = [f"{first}-{last}" for first, last in finding.episodes]
        lines += _labelled("episodes", f"iterations {listed(spans)}")
    for sentence in finding.evidence:
        lines += _labelled("evidence", sentence)
    for step in finding.next_steps[:SHOWN_NEXT_STEPS]:
        lines += _labelled("next", step)
    return lines


def _cost(finding: Finding) -> str:
    ratio = finding.step_time_cost_ratio
    how = "by replay of the step" if finding.cost_is_replayed else "estimate"
    if ratio < 1.001:
        return f"next to nothing: it hides in time that others spend anyway ({how})"
    return f"an iteration takes {ratio:.3f} times what it would without it ({how})"


def _could_not_show(report: Report) -> list[str]:
    lines = ["What this trace could and could not have shown:"]
    lines += _labelled(
        "window",
        f"{_window(report)} of {milliseconds(report.iteration_ns)}, "
        f"{counted(report.world_size, 'rank')}",
    )
    if report.minimum_detectable:
        parts = [f"{name} {percent(value)}" for name, value in report.minimum_detectable.items()]
        lines += _labelled(
            "power",
            "smallest lasting slowdown found with 95 % probability: "
            + ", ".join(parts)
            + "; below that, silence means nothing (host, loader, gc: share of the iteration)",
        )
    lines += _labelled(
        "rule",
        f"named from {percent(report.min_slowdown)} on, over all ranks and classes at a false-"
        f"discovery rate of {report.false_discovery_rate:.0%}: of a hundred names as unsure as "
        f"that, {report.false_discovery_rate * 100:.0f} is expected to be wrong",
    )
    if report.alignment is not None:
        lines += _labelled(
            "clocks", f"agree within {milliseconds(report.alignment.residual_p99_ns)} (p99)"
        )
    for note in report.notes:
        lines += _labelled("note", note)
    return lines
