"""Compare two traces of a job: what got slower, beyond the noise of their iterations.

Ranks are compared with their peers inside each trace, and only then between the traces: what moved
all ranks alike is a change of the operation (its role), not of a rank. Ranks that moved are left
out of their role. Significance is controlled over everything compared (false-discovery rate), and
a change below `min_change` does not count. Findings of the two traces are paired by cause and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from scipy import special

from detect.comparison import measures
from detect.comparison.changes import (
    Change,
    Comparison,
    Direction,
    FindingChanges,
    Quantity,
    ShareChange,
)
from detect.comparison.measures import SETTINGS, Measure, Side
from detect.report import Finding
from detect.thresholds.comparison import COMPARISON

LARGEST_LOG = float(np.floor(np.log(np.finfo(np.float64).max)))
"""Log of the largest ratio: the exponential of little more is no number."""


def compare(before: Side, after: Side, min_change: float = SETTINGS.min_slowdown) -> Comparison:
    """Return everything that `after` does differently from `before`.

    `min_change` is the smallest ratio that counts. A trace of fewer than three judged iterations
    says nothing about its noise, so nothing is then called a change, and `notes` says so.
    """
    shared = measures.comparable(before, after)
    ranks = list(measures.rank_measures(before, after)) if shared.ranks else []
    least = float(np.log(min_change))
    slow = {rank for one in ranks if abs(one.effect) >= least for rank in one.ranks}
    for side in (before, after):
        slow.update(side.members.ranks_of(np.flatnonzero(side.examined.suspects)))
    measured = measures.step_measures(before, after) if shared.iterations else []
    measured += [*measures.role_measures(before, after, shared, slow), *ranks]
    measured += measures.link_measures(before, after)
    findings = match_findings(
        before.examined.report.findings, after.examined.report.findings, shared.ranks
    )
    return Comparison(
        before=before.name,
        after=after.name,
        min_change=min_change,
        changes=tuple(_changes(measured, least)),
        shares=tuple(_share_changes(before, after)),
        findings=findings,
        least_visible=_least_visible(measured, least),
        not_compared=shared.reasons,
        notes=tuple(_notes(before, after)),
        strangers=tuple(measures.differences(before, after)),
    )


def _changes(measured: list[Measure], least: float) -> list[Change]:
    if not measured:
        return []
    q_value = measures.q_values(np.array([one.p_value for one in measured]))
    return [
        Change(
            kind=one.kind,
            subject=one.subject,
            ratio=float(np.exp(one.effect)),
            interval=_interval(one),
            q_value=float(q),
            before_ns=one.before_ns,
            after_ns=one.after_ns,
            direction=_direction(one, float(q), max(least, one.least)),
            ranks=one.ranks,
            notes=one.notes,
        )
        for one, q in zip(measured, q_value, strict=True)
    ]


def _interval(measure: Measure) -> tuple[float, float]:
    """Return the 95 % interval of the ratio; all ratios where the reach is not known."""
    reach = float(np.nan_to_num(measure.reach, nan=np.inf))
    highest = min(measure.effect + reach, LARGEST_LOG)
    return float(np.exp(measure.effect - reach)), float(np.exp(highest))


def _direction(measure: Measure, q_value: float, least: float) -> Direction:
    if q_value > SETTINGS.false_discovery_rate or abs(measure.effect) < least:
        return Direction.SAME
    return Direction.SLOWER if measure.effect > 0 else Direction.FASTER


def _least_visible(measured: list[Measure], least: float) -> dict[Quantity, float]:
    """Return, by kind, the smallest ratio at which a typical quantity's change is seen."""
    number = max(len(measured), 1)
    degrees, rate = COMPARISON.visible_degrees, SETTINGS.false_discovery_rate / number
    critical = -float(special.stdtrit(degrees, rate / 2))
    reserve = float(special.stdtrit(degrees, SETTINGS.power))
    visible = {}
    for kind in Quantity:
        errors = [one.error for one in measured if one.kind == kind and np.isfinite(one.error)]
        floors = [one.least for one in measured if one.kind == kind]
        if errors:
            effect = (critical + reserve) * float(np.median(errors))
            visible[kind] = float(np.exp(max(effect, least, *floors)))
    return visible


def _share_changes(before: Side, after: Side) -> Iterable[ShareChange]:
    if before.shares is None or after.shares is None:
        return
    for name in before.shares.column_names:
        if name.endswith("_ratio") and name in after.shares.column_names:
            old, new = (
                float(np.mean(np.asarray(side.column(name), dtype=np.float64)))
                for side in (before.shares, after.shares)
            )
            yield ShareChange(name.removesuffix("_ratio"), old, new)


def _notes(before: Side, after: Side) -> Iterable[str]:
    sides = {"before": before, "after": after}
    for which, side in sides.items():
        number = len(side.examined.seen.iterations)
        if number < COMPARISON.min_iterations:
            yield (
                f"{which}: {number} judged iterations say nothing about their noise, so no change "
                f"can be told; trace {COMPARISON.min_iterations} at least, better 10"
            )
    for which, side in sides.items():
        ranks = side.examined.report.completeness.get("missing_ranks")
        if isinstance(ranks, list) and ranks:
            yield f"{which}: {len(ranks)} ranks were not recorded and are not compared"


def match_findings(
    before: Sequence[Finding], after: Sequence[Finding], same_ranks: bool
) -> FindingChanges:
    """Pair findings of the same cause with ranks in common (any ranks where the layouts differ)."""
    left = list(before)
    new, same = [], []
    for finding in after:
        earlier = next((one for one in left if _are_of_one_fault(one, finding, same_ranks)), None)
        if earlier is None:
            new.append(finding)
        else:
            left.remove(earlier)
            same.append((earlier, finding))
    return FindingChanges(new=tuple(new), gone=tuple(left), same=tuple(same))


def _are_of_one_fault(one: Finding, other: Finding, same_ranks: bool) -> bool:
    if one.cause != other.cause:
        return False
    if not same_ranks or not (one.ranks or other.ranks):
        return len(one.ranks) == len(other.ranks) or one.owner == other.owner
    return bool(set(one.ranks) & set(other.ranks))
