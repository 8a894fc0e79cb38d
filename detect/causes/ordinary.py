"""Slow by so little, or in such a place, that no node need be at fault.

Two sound chips differ by a per cent or two, and the first rank of a TP group has duties of its own.
A rank may then be slower than its peers beyond doubt, and its node be as good as any. What the
ranks that are not suspected show among themselves tells how much is ordinary:

* a small slowdown counts where it exceeds 4.5 times the root mean square of their distances from
  their peers, or 3 times the largest, less what noise in time explains;
* a pair shows no such thing: a small slowdown of one of two stays undecided;
* all ranks of a (TP, CP, EP) position slow alike by a few per cent, or the first rank of the job's
  only TP group: that is what the position does.
"""

from __future__ import annotations

import numpy as np

from detect.causes.compute import ComputeSearch, SlowRow
from detect.observations import Members, Observations
from detect.settings import DetectorSettings
from detect.stats import robust

SMALL = 1.5
"""Times the effect floor: more is no ordinary difference between chips."""
TIMES_SPREAD, TIMES_LARGEST = 4.5, 3.0
MOSTLY = 0.7
"""Share of the window from which on a slowdown is a level, no change."""
ALIKE = 0.7
POSITION_REACH = float(np.log(1.07))
"""What the duties of a TP group's first rank may cost it (log units)."""


def ordinary_difference(seen: Observations, found: ComputeSearch, slow: SlowRow) -> str | None:
    """Why the slowness need not be the node's, as a sentence; None where it is."""
    place = _of_position(seen.members, found, slow)
    if place is not None:
        return f"{place}: that may be the work of the place as well as the device"
    floor = float(np.log(DetectorSettings().min_slowdown))
    effect = slow.suspect.course.effect
    if effect >= SMALL * floor or float(np.mean(slow.suspect.course.active)) < MOSTLY:
        return None
    if slow.num_peers == 1:
        return "two sound devices may differ by as much, and it has one peer only"
    levels = np.abs(robust.median(found.residuals.value[~found.slow_rows], axis=1))
    levels = levels[np.isfinite(levels)]
    if len(levels) < 2:
        return None
    chance = found.noise.chance(found.residuals.value.shape[1])
    square = float(np.mean(levels**2))
    lasting = float(np.sqrt(max(0.0, 1.0 - chance**2 / square))) if square > 0 else 0.0
    largest = float(levels.max())
    if effect >= lasting * min(TIMES_SPREAD * np.sqrt(square), TIMES_LARGEST * largest):
        return None
    return (
        f"the other ranks, too, lie up to {np.expm1(largest):.1%} off their peers: this one may be "
        "no more than the slowest of sound devices"
    )


def _of_position(members: Members, found: ComputeSearch, slow: SlowRow) -> str | None:
    """How the place of the rank within its replica may explain it, None where it does not.

    All ranks of the place, in the job or in the stage, are slow alike by a little; of a place that
    occurs once, only the first counts.
    """
    place, row = members.place, slow.suspect.row
    effect = slow.suspect.course.effect
    same = np.ones(len(members), dtype=bool)
    for axis in ("tp", "cp", "ep"):
        same &= place[axis] == place[axis][row]
    if same.all() or effect >= POSITION_REACH or not slow.suspect.course.active.all():
        return None
    effects = np.zeros(len(members))
    for one in found.slow:
        effects[one.suspect.row] = one.suspect.course.effect
    if int(same.sum()) == 1:
        first = all(int(place[axis][row]) == 0 for axis in ("tp", "cp", "ep"))
        words = "it is the first rank of the job's only TP group, which loads and logs"
        return words if first else None
    of_stage = same & (members.stage == members.stage[row])
    alike = any(
        int(rows.sum()) > 1 and float(effects[rows].min()) >= ALIKE * float(effects[rows].max())
        for rows in (same, of_stage)
    )
    return "the ranks at its place in all TP groups are slow alike" if alike else None
