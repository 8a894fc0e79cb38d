"""One fault, one finding: who is only late because of another, and what follows from a named fault.

A rank that leaves its communications late makes its partners look late or their common link slow; a
slow device also loads its data a little slower. Such traces of one fault are not faults of
their own: they are dropped, or become evidence of the finding that explains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from detect.causes.pauses import LossSearch
from detect.findings.wording import percent, ranks_text
from detect.observations import Bools, Observations
from detect.report import Cause, Finding
from detect.stats.search import Suspect

MOST = 0.5
"""A rank most of whose lateness lies in communications with a late rank is that rank's victim."""
ALIKE = 1.5
"""Loading, or a link of the device, that is slower by no more than this times the slowdown of
computing has one reason: the kernels that transfer run on the slow device, too."""
MINOR = 0.25
"""A link that costs less than this share of what its slow device does goes with it."""

ONE_FAULT = {
    (Cause.COMPUTE, Cause.HOST),
    (Cause.HOST, Cause.COMPUTE),
    (Cause.HOST, Cause.LINK),
    (Cause.LINK, Cause.HOST),
}
"""(heavier, lighter) of the same rank."""


def without_victims(seen: Observations, found: LossSearch, slow: Bools) -> LossSearch:
    """Late ranks, without those whose partners explain their lateness; the latest is kept.

    `slow` are the rows that compute slowly: whoever is late with them only waits for them, and
    lateness is handed on along their pipeline.
    """
    if found.loss.cause != Cause.LINK or seen.transfers is None:
        return found
    workers = seen.members.workers
    accused = {rank for row in np.flatnonzero(slow) for rank in workers[row]}
    kept: list[Suspect] = []
    for suspect in sorted(found.suspects, key=lambda one: -one.course.effect):
        own = set(workers[suspect.row])
        if _in_pipeline(seen, suspect.row, slow):
            continue
        if _share_with(seen, own, accused - own) <= MOST:
            kept.append(suspect)
            accused |= own
    return replace(found, suspects=tuple(kept))


def _in_pipeline(seen: Observations, row: int, slow: Bools) -> bool:
    """Whether a slow row shares the row's pipeline: its replica and place, at another stage."""
    members = seen.members
    same = slow & (members.stage != members.stage[row])
    for axis in ("dp", "tp", "cp"):
        same &= members.place[axis] == members.place[axis][row]
    return bool(same.any())


def _share_with(seen: Observations, own: set[int], accused: set[int]) -> float:
    """Share of a worker's lateness that arose in communications with the accused."""
    if seen.transfers is None:
        return 0.0
    mine = [one for one in seen.transfers.late_in if one.rank in own]
    total = sum(one.time_ns for one in mine)
    with_accused = sum(one.time_ns for one in mine if accused & set(one.members))
    return with_accused / total if total > 0 else 0.0


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of which none is a consequence of another; the heavier of two explains."""
    left = sorted(findings, key=_weight)
    result: list[Finding] = []
    for finding in left:
        place = next((i for i, one in enumerate(result) if _explains(one, finding)), None)
        if place is None:
            result.append(finding)
        else:
            main = result[place]
            result[place] = replace(main, evidence=(*main.evidence, _sentence(finding)))
    return result


def _weight(finding: Finding) -> tuple[bool, float]:
    own_time = finding.cause in (Cause.COMPUTE, Cause.HOST)
    return not own_time, -finding.step_time_cost_ratio


def _explains(main: Finding, other: Finding) -> bool:
    """Whether `other` is what the fault of `main` looks like elsewhere."""
    meets = main.first_iteration <= other.last_iteration
    meets = meets and other.first_iteration <= main.last_iteration
    if not meets or not set(main.ranks) & set(other.ranks):
        return False
    same = set(main.ranks) >= set(other.ranks)
    if other.cause == Cause.LINK and main.cause == Cause.COMPUTE:
        minor = _excess(other) <= MINOR * _excess(main)
        return same or minor or other.slowdown <= ALIKE * main.slowdown
    if other.cause == Cause.LOADER and main.cause == Cause.COMPUTE:
        return same and other.slowdown <= ALIKE * main.slowdown
    if main.cause == other.cause == Cause.LINK:
        return True
    return same and (main.cause, other.cause) in ONE_FAULT


def _excess(finding: Finding) -> float:
    return finding.step_time_cost_ratio - 1.0


def _sentence(finding: Finding) -> str:
    what = {
        Cause.LOADER: "its data loading is slower to match",
        Cause.COMPUTE: "what its host delays looks like slower computing, too",
        Cause.HOST: "the time lost between its operations goes with it",
        Cause.LINK: f"the communication of {ranks_text(finding.ranks)} suffers with it",
    }[finding.cause]
    return f"{what} ({percent(finding.step_time_cost_ratio)} of the step at most): no fault apart"
