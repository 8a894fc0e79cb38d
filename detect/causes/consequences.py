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
    is_told = link.owner == Owner.NODE or (link.host != "" and "," not in link.host)
    much_slower = link.slowdown - 1.0 >= CONSEQUENCES.awaited_ratio * (finding.slowdown - 1.0)
    return (
        link.cause == Cause.LINK
        and is_told
        and set(link.ranks) >= set(finding.ranks)
        and much_slower
    )


def _weight(finding: Finding) -> tuple[bool, float]:
    own_time = finding.cause in (Cause.COMPUTE, Cause.HOST)
    return not own_time, -finding.step_time_cost_ratio


def _explains(main: Finding, other: Finding) -> bool:
    """Return whether `other` is what the fault of `main` looks like elsewhere."""
    meets = main.first_iteration <= other.last_iteration
    if not meets or not other.first_iteration <= main.last_iteration:
        return False
    minor = _excess(other) <= CONSEQUENCES.minor_share * _excess(main)
    if minor and (_launches_late(main, other) or _is_behind(main, other)):
        return True
    if not set(main.ranks) & set(other.ranks):
        return False
    return _is_waiting(other, [main]) or _goes_with(main, other, minor=minor)


def _goes_with(main: Finding, other: Finding, *, minor: bool) -> bool:
    """Return the same of findings that share ranks."""
    same = set(main.ranks) >= set(other.ranks)
    if other.cause == Cause.LINK and main.cause == Cause.COMPUTE:
        return same or minor or other.slowdown <= CONSEQUENCES.alike_ratio * main.slowdown
    if other.cause == Cause.LOADER and main.cause == Cause.COMPUTE:
        return same and other.slowdown <= CONSEQUENCES.alike_ratio * main.slowdown
    both_links = main.cause == other.cause == Cause.LINK
    return both_links or (same and (main.cause, other.cause) in ONE_FAULT)


def _launches_late(main: Finding, other: Finding) -> bool:
    """Return whether a host that launches late holds up its partners' messages, too."""
    return main.cause == Cause.HOST and len(main.ranks) > 1 and other.cause == Cause.LINK


def _is_behind(main: Finding, other: Finding) -> bool:
    """Return whether a link between hosts may suffer from the slow network of a third one: what
    comes late from there meets other messages at the NICs behind it.
    """
    are_links = main.cause == other.cause == Cause.LINK
    is_network = len(main.ranks) > 1 and main.owner == Owner.NODE and "," not in main.host
    return are_links and is_network and "," in other.host and len(other.ranks) < len(main.ranks)


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
