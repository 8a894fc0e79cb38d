"""What of two traces may be compared: the same work, done by the same number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.comparison.roles import LAYER, Role, RoleTimes, layers_of_all_stages
from detect.comparison.side import Side
from detect.findings.wording import listed
from megascan.topology import Layout

AXES = ("dp", "pp", "vpp", "cp", "ep", "tp")
DEPENDS_ON_REPLICAS = ("optimizer",)
"""A distributed optimizer steps a share of the parameters that shrinks with DP."""
COUNTS_ALIKE = 1e-6


@dataclass(frozen=True)
class Comparable:
    """Roles that both did alike, and whether iterations and ranks may be set side by side."""

    roles: tuple[tuple[Role, RoleTimes, RoleTimes], ...]
    iterations: bool
    ranks: bool
    reasons: tuple[str, ...]
    """What cannot be compared, and why; sentences."""


def comparable(before: Side, after: Side) -> Comparable:
    """Find out what the two have in common."""
    old, new = before.members.layout, after.members.layout
    differing = [axis for axis in AXES if getattr(old, axis) != getattr(new, axis)]
    reasons = []
    if differing:
        reasons.append(
            f"iterations and ranks: the layouts differ ({_sizes(old)} before, {_sizes(new)} after)"
        )
    elif old.order != new.order:
        reasons.append(f"ranks: their order differs ({old.order} before, {new.order} after)")
    same_passes = _same_passes(before, after)
    if not same_passes:
        reasons.append(
            f"iterations: {_num_passes(before)} microbatches before, {_num_passes(after)} after"
        )
    old_roles, new_roles = (_roles(side, differing) for side in (before, after))
    heavier = _other_layers(old_roles, new_roles)
    if heavier:
        reasons.append(
            "iterations and passes of "
            + listed(f"stage PP{stage} ({then:g} layers before, {now:g} after)"
                     for stage, then, now in heavier)
        )  # fmt: skip
    changed_stages = {stage for stage, _, _ in heavier}
    shared = [
        (role, old_roles[role], new_roles[role])
        for role in sorted(set(old_roles) & set(new_roles))
        if not (role.stage in changed_stages and role.name in ("forward", "backward", "optimizer"))
    ]
    only = sorted({role.name for role in set(old_roles) ^ set(new_roles)})
    if only:
        reasons.append(f"operations that only one trace holds: {listed(only)}")
    if differing and not shared:
        reasons.append("operations: ranks of the two jobs do different shares of the work")
    same_ranks = not differing and old.order == new.order
    return Comparable(
        roles=tuple(shared),
        iterations=not differing and same_passes and not heavier,
        ranks=same_ranks and not heavier,
        reasons=tuple(reasons),
    )


def _sizes(layout: Layout) -> str:
    used = [f"{axis.upper()}{getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    return " ".join(used) or "one rank"


def _num_passes(side: Side) -> int:
    microbatch = side.examined.seen.work.microbatch
    return int(microbatch.max()) + 1 if len(microbatch) else 0


def _same_passes(before: Side, after: Side) -> bool:
    return _num_passes(before) == _num_passes(after)


def _roles(side: Side, differing: list[str]) -> dict[Role, RoleTimes]:
    """Roles that mean the same work in both layouts."""
    if not differing:
        return side.roles
    if differing == ["dp"]:
        return {
            role: times
            for role, times in side.roles.items()
            if role.name not in DEPENDS_ON_REPLICAS
        }
    return layers_of_all_stages(side.roles) if set(differing) <= {"dp", "pp", "vpp"} else {}


def _other_layers(
    old: dict[Role, RoleTimes], new: dict[Role, RoleTimes]
) -> list[tuple[int, float, float]]:
    """Stages that have another number of layers: (stage, before, after)."""
    found = []
    for role in sorted(set(old) & set(new)):
        if role.name != LAYER or role.stage < 0:
            continue
        passes = Role(role.stage, role.chunk, "forward")
        if passes not in old or passes not in new:
            continue
        then = old[role].count / old[passes].count
        now = new[role].count / new[passes].count
        if not np.isclose(then, now, rtol=COUNTS_ALIKE):
            found.append((role.stage, then, now))
    return found
