"""What a finding costs the step: a first estimate from the trace alone.

    saved(t)  = max(0, B_r(t) − max(B'_r(t), max over other ranks B(t)))
    cost      = mean iteration time / (mean iteration time − mean saved)

with B the compute of a rank in iteration t and B' what it would be at the peers' speed: the step
shrinks by what the suspect is above the next busiest rank. Example: 100 ms of compute against 80 ms
of its peers in a step of 110 ms saves 20 ms: cost 110 / 90 = 1.22.

Limits: a pipeline's order of operations is not replayed, so two slow ranks that hide behind each
other look cheaper than they are, and excess that lands in a bubble dearer. The replay of the
dependency graph (`megascan whatif`) has neither fault.
"""

from __future__ import annotations

import numpy as np

from detect.observations import Bools, Floats, Observations

MAX_SAVED_SHARE = 0.95


def saved_by_compute(seen: Observations, rows: tuple[int, ...], excess_ns: Floats) -> Floats:
    """Iteration time saved, (iteration,), if `rows` computed `excess_ns` less each.

    `excess_ns` is (row of rows, iteration).
    """
    busy = np.nan_to_num(seen.busy_ns)
    better = busy.copy()
    for row, excess in zip(rows, excess_ns, strict=True):
        better[_waiting_with(seen, row)] -= excess
    return np.asarray(np.maximum(busy.max(axis=0) - better.max(axis=0), 0.0))


def _waiting_with(seen: Observations, row: int) -> Bools:
    """The row, and where waiting hides in compute spans its TP group, which waits with it."""
    mine: Bools = np.arange(len(seen.members)) == row
    if not seen.entangled_phases:
        return mine
    members = seen.members
    same = members.replica == members.replica[row]
    return np.asarray(same & (members.stage == members.stage[row]))


def cost_ratio(iteration_ns: Floats, saved_ns: Floats) -> float:
    """Iteration time now over iteration time without the finding; 1 when it costs nothing."""
    total = float(np.mean(iteration_ns))
    if total <= 0:
        return 1.0
    saved = min(max(float(np.mean(saved_ns)), 0.0), MAX_SAVED_SHARE * total)
    return total / (total - saved)
