"""What a trace cannot show of computing, and where to look first if it cannot show enough.

A note on what could not be compared spares nobody a second trace; one that says which rank is the
slowest, if by no more than sound ranks may differ here, tells where that trace should look.
"""

from __future__ import annotations

import numpy as np

from detect.observe.observations import Observations
from detect.stats import robust
from detect.stats.residuals import Residuals
from detect.text import counted, ranks_of, times
from detect.thresholds import COMPUTE, OCCUPANCY


def slowest(seen: Observations, residuals: Residuals, floor: float) -> tuple[str, ...]:
    """Say who is slower than its peers by `floor` and more, for a trace too blind to name anybody.

    Cold caches and shared memory make processes on CPUs differ: less than that is not worth a word.
    """
    level = np.nan_to_num(robust.centre(residuals.value))
    row = int(np.argmax(level))
    if seen.members.device_kind == "cpu":
        floor = max(floor, COMPUTE.cache_ratio)
    known = residuals.value[row][np.isfinite(residuals.value[row])]
    above = int((known > 0).sum())
    if level[row] < np.log(floor) or above < OCCUPANCY.mostly_share * len(known):
        return ()
    return (
        f"the slowest beside its peers is {ranks_of(seen.members, row)}: "
        f"{times(float(np.exp(level[row])))} their time, and above it in {above} of "
        f"{counted(len(known), 'iteration')}; what sound ranks differ by here may explain it, or "
        "not: look there first",
    )


def limits(seen: Observations, residuals: Residuals) -> list[str]:
    """Return what this trace could not have shown, whatever its noise."""
    notes = []
    if not (residuals.num_peers > 0).any():
        notes.append(
            f"no two ranks were recorded at the same work{_why_nobody_compares(seen)}: compute "
            "cannot be judged; compare with an earlier trace"
        )
    elif int(np.median(residuals.num_peers)) == 1:
        notes.append("each rank has one peer only: a slowdown of both alike cannot be seen")
    if seen.mixes_communication:
        notes.append(
            "communication inside TP groups was not traced (granularity base) and is part of the "
            "CPU time: only large compute faults can be told; trace at granularity full"
        )
    return notes


def _why_nobody_compares(seen: Observations) -> str:
    """Return why, as part of a sentence."""
    layout = seen.members.layout
    if layout.world_size == 1:
        return " (the job has one rank)"
    if layout.world_size > layout.pp or len(np.unique(seen.members.stage)) == 1:
        return " (of its peers' work nothing was recorded, or other work)"
    if seen.layers is None:
        return " (one rank a stage, and no transformer layers traced: granularity full has them)"
    return " (one rank a stage, and their transformer layers cannot be compared)"
