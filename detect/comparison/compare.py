"""Sets two traces of a job side by side: what got slower, beyond the noise of their iterations.

Ranks are compared with their peers inside each trace, and only then between the traces: what moved
all ranks alike is a change of the operation (its role), not of a rank. Ranks that moved are left
out of their role. Significance is controlled over everything compared (false-discovery rate), and
a change below `min_change` is none.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy import special

from detect.comparison.comparable import comparable
from detect.comparison.comparison import (
    Change,
    Comparison,
    Direction,
    Kind,
    ShareChange,
)
from detect.comparison.findings import match_findings
from detect.comparison.measures import (
    Measure,
    link_measures,
    rank_measures,
    role_measures,
    step_measures,
)
from detect.comparison.shift import LEAST_ITERATIONS, q_values
from detect.comparison.side import Side

FALSE_DISCOVERY_RATE = 0.01
POWER = 0.95
DEGREES = 30
"""Of the t law in the smallest visible change; the difference to the true ones does not matter."""


def compare(before: Side, after: Side, min_change: float = 1.03) -> Comparison:
    """Everything that `after` does differently from `before`.

    `min_change` is the smallest ratio that counts. A trace of fewer than three judged iterations
    says nothing about its noise, so nothing is then called a change, and `notes` says so.
    """
    shared = comparable(before, after)
    ranks = list(rank_measures(before, after)) if shared.ranks else []
    least = float(np.log(min_change))
    slow = {rank for one in ranks if abs(one.effect) >= least for rank in one.ranks}
    slow |= {rank for side in (before, after) for rank in _suspects(side)}
    measures = step_measures(before, after) if shared.iterations else []
    measures += [*role_measures(before, after, shared, slow), *ranks]
    measures += link_measures(before, after)
    changes = _changes(measures, least)
    findings = match_findings(
        before.examined.report.findings, after.examined.report.findings, shared.ranks
    )
    return Comparison(
        before=before.name,
        after=after.name,
        min_change=min_change,
        changes=tuple(changes),
        shares=tuple(_share_changes(before, after)),
        findings=findings,
        least_visible=_least_visible(measures, least),
        not_compared=shared.reasons,
        notes=tuple(_notes(before, after)),
    )


def _suspects(side: Side) -> set[int]:
    workers = side.members.workers
    return {rank for row in np.flatnonzero(side.examined.suspects) for rank in workers[row]}


def _changes(measures: list[Measure], least: float) -> list[Change]:
    if not measures:
        return []
    q_value = q_values(np.array([one.p_value for one in measures]))
    return [
        Change(
            kind=one.kind,
            subject=one.subject,
            ratio=float(np.exp(one.effect)),
            interval=(
                float(np.exp(one.effect - np.nan_to_num(one.reach, nan=np.inf))),
                float(np.exp(min(one.effect + np.nan_to_num(one.reach, nan=np.inf), 700.0))),
            ),
            q_value=float(q),
            before_ns=one.before_ns,
            after_ns=one.after_ns,
            direction=_direction(one, float(q), max(least, one.least)),
            ranks=one.ranks,
            notes=one.notes,
        )
        for one, q in zip(measures, q_value, strict=True)
    ]


def _direction(measure: Measure, q_value: float, least: float) -> Direction:
    if q_value > FALSE_DISCOVERY_RATE or abs(measure.effect) < least:
        return Direction.SAME
    return Direction.SLOWER if measure.effect > 0 else Direction.FASTER


def _least_visible(measures: list[Measure], least: float) -> dict[Kind, float]:
    """Ratio from which on a change of a typical quantity of each kind is seen."""
    number = max(len(measures), 1)
    critical = -float(special.stdtrit(DEGREES, FALSE_DISCOVERY_RATE / number / 2))
    reserve = float(special.stdtrit(DEGREES, POWER))
    visible = {}
    for kind in Kind:
        errors = [one.error for one in measures if one.kind == kind and np.isfinite(one.error)]
        floors = [one.least for one in measures if one.kind == kind]
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
    for side, which in ((before, "before"), (after, "after")):
        number = len(side.examined.seen.iterations)
        if number < LEAST_ITERATIONS:
            yield (
                f"{which}: {number} judged iterations say nothing about their noise, so no change "
                f"can be told; trace {LEAST_ITERATIONS} at least, better 10"
            )
    old, new = before.members.device_kind, after.members.device_kind
    if old != new:
        yield f"the first trace is of {old or 'unknown'} devices, the second of {new or 'unknown'}"
    missing = {
        which: side.examined.report.completeness.get("missing_ranks")
        for side, which in ((before, "before"), (after, "after"))
    }
    for which, ranks in missing.items():
        if isinstance(ranks, list) and ranks:
            yield f"{which}: {len(ranks)} ranks were not recorded and are not compared"
