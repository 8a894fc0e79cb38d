"""One fault, one finding: what follows from a named fault becomes its evidence.

A rank that leaves its communications late makes the link to its partners look slow; a slow device
also loads its data a little slower. Such traces of one fault are no faults of their own.

Example: rank 5 computes 1.30 times slower, and its loading takes 1.35 times that of its peers: one
finding (compute), whose last sentence says that loading is slower to match. Loading that took 8
times as long would be a second fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from detect.report import Cause, Finding, Owner
from detect.text import percent, ranks_text
from detect.thresholds import CONSEQUENCES

ONE_FAULT = {
    (Cause.COMPUTE, Cause.HOST),
    (Cause.HOST, Cause.COMPUTE),
    (Cause.HOST, Cause.LINK),
    (Cause.LINK, Cause.HOST),
}
"""(heavier, lighter) of the same rank."""


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings of which none is a consequence of another; the heavier of two explains."""
    left = sorted(findings, key=lambda one: (_is_waiting(one, findings), *_weight(one)))
    result: list[Finding] = []
    for finding in left:
        place = next((i for i, one in enumerate(result) if _explains(one, finding)), None)
        if place is None:
            result.append(finding)
        else:
            main = result[place]
            result[place] = replace(main, evidence=(*main.evidence, _sentence(finding)))
    return result


def _is_waiting(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Return whether a group's slow link explains why its members look slow themselves: they wait
    for it inside their passes. A slow device would slow transfers by no more than its own work.
    """
    return (
        finding.cause in (Cause.COMPUTE, Cause.UNKNOWN)
        and finding.owner == Owner.UNDECIDED
        and any(_is_awaited(link, finding) for link in findings)
    )


def _is_awaited(link: Finding, finding: Finding) -> bool:
    much_slower = link.slowdown - 1.0 >= CONSEQUENCES.awaited_ratio * (finding.slowdown - 1.0)
    return (
        (link.cause, link.owner) == (Cause.LINK, Owner.NODE)
        and set(link.ranks) >= set(finding.ranks)
        and much_slower
    )


def _weight(finding: Finding) -> tuple[bool, float]:
    own_time = finding.cause in (Cause.COMPUTE, Cause.HOST)
    return not own_time, -finding.step_time_cost_ratio


def _explains(main: Finding, other: Finding) -> bool:
    """Return whether `other` is what the fault of `main` looks like elsewhere."""
    meets = main.first_iteration <= other.last_iteration
    meets = meets and other.first_iteration <= main.last_iteration
    minor = _excess(other) <= CONSEQUENCES.minor_share * _excess(main)
    if main.cause == Cause.HOST and len(main.ranks) > 1 and other.cause == Cause.LINK and minor:
        return meets  # whoever launches late holds up its partners' messages, too
    if not meets or not set(main.ranks) & set(other.ranks):
        return False
    if other.owner == Owner.UNDECIDED and _is_awaited(main, other):
        return other.cause in (Cause.COMPUTE, Cause.UNKNOWN)
    same = set(main.ranks) >= set(other.ranks)
    if other.cause == Cause.LINK and main.cause == Cause.COMPUTE:
        return same or minor or other.slowdown <= CONSEQUENCES.alike_ratio * main.slowdown
    if other.cause == Cause.LOADER and main.cause == Cause.COMPUTE:
        return same and other.slowdown <= CONSEQUENCES.alike_ratio * main.slowdown
    if main.cause == other.cause == Cause.LINK:
        return True
    return same and (main.cause, other.cause) in ONE_FAULT


def _excess(finding: Finding) -> float:
    return finding.step_time_cost_ratio - 1.0


def _sentence(finding: Finding) -> str:
    what = {
        Cause.LOADER: "its data loading is slower to match",
        Cause.COMPUTE: "what it delays looks like slower computing, too",
        Cause.UNKNOWN: f"{ranks_text(finding.ranks)} wait for it inside their passes",
        Cause.HOST: "the time lost between its operations goes with it",
        Cause.LINK: f"the communication of {ranks_text(finding.ranks)} suffers with it",
    }[finding.cause]
    return f"{what} ({percent(finding.step_time_cost_ratio)} of the step at most): no fault apart"
