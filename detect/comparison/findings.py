"""Findings of two traces matched: new, gone, still there."""

from __future__ import annotations

from collections.abc import Sequence

from detect.comparison.comparison import FindingChanges
from detect.report import Finding


def match_findings(
    before: Sequence[Finding], after: Sequence[Finding], same_ranks: bool
) -> FindingChanges:
    """Same cause, and ranks in common (any ranks where the layouts differ)."""
    left = list(before)
    new, same = [], []
    for finding in after:
        earlier = next((one for one in left if _alike(one, finding, same_ranks)), None)
        if earlier is None:
            new.append(finding)
        else:
            left.remove(earlier)
            same.append((earlier, finding))
    return FindingChanges(new=tuple(new), gone=tuple(left), same=tuple(same))


def _alike(one: Finding, other: Finding, same_ranks: bool) -> bool:
    if one.cause != other.cause:
        return False
    if not same_ranks or not (one.ranks or other.ranks):
        return len(one.ranks) == len(other.ranks) or one.owner == other.owner
    return bool(set(one.ranks) & set(other.ranks))
