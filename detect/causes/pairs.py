"""With one peer, which of the two is slow?

Problem: the residuals of two ranks are mirror images; the ratio says "one is slower than the other"
and no more. What can still decide, in the order it is tried:

1. layers of other stages (the same shape): the odd one of three or more;
2. own history: one of them changed inside the trace, the other did not;
3. the two work on the same data (TP): equal work on equal devices, so the slower one is slow;
4. other stages of the same two replicas do not differ: the data are not the reason;
5. the optimizer, which no data can lengthen, is slower by as much as forward and backward.

Otherwise the pair stays undecided, and the reason says what would decide it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.causes.compute import ComputeSearch, SlowRow
from detect.observations import Bools, Observations
from detect.stats import robust
from detect.stats.persistence import Course

HALF = 0.5


@dataclass(frozen=True)
class PairDecision:
    """Whether the slower of two is at fault; `because` is a sentence either way."""

    decided: bool
    because: str


def decide_pair(seen: Observations, found: ComputeSearch, slow: SlowRow) -> PairDecision:
    """Judge a slow row that has a single peer."""
    row = slow.suspect.row
    peer = _peer(seen, row)
    if len({seen.members.devices[row], seen.members.devices[peer]}) > 1:
        return PairDecision(False, "the two ranks run on different device models, which may differ")
    for rule in (_by_pool, _by_history, _by_same_data, _by_other_stages, _by_optimizer):
        decision = rule(seen, found, slow, peer)
        if decision is not None:
            return decision
    return PairDecision(
        False,
        "with one peer the trace shows that the two differ, not which one is at fault: a second "
        "replica or TP peer, a trace from before the slowdown, or a GEMM benchmark on both decides",
    )


def _peer(seen: Observations, row: int) -> int:
    rows = seen.members.rows_of_stage(int(seen.members.stage[row]))
    return int(rows[rows != row][0])


def _by_pool(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> PairDecision | None:
    if found.pool is None:
        return None
    active, effect = slow.suspect.course.active, slow.suspect.course.effect
    own = float(robust.median(found.pool.value[slow.suspect.row][active]))
    other = float(robust.median(found.pool.value[peer][active]))
    if not np.isfinite(own + other):
        return None
    words = (
        f"against the transformer layers of all stages it is {np.exp(own):.2f}x, its peer "
        f"{np.exp(other):.2f}x"
    )
    if own >= HALF * effect and other < HALF * effect:
        return PairDecision(True, words)
    if own < HALF * effect and other <= -HALF * effect:
        return PairDecision(False, words + ": the peer is faster than everybody else")
    return None


def _by_history(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> PairDecision | None:
    del found
    course = slow.suspect.course
    if course.active.all() or (~course.active).sum() < 2:
        return None
    own, other = (_change(seen, row, course) for row in (slow.suspect.row, peer))
    if own > HALF * course.effect and abs(other) < HALF * course.effect:
        return PairDecision(
            True,
            f"its own compute time rose to {np.exp(own):.2f}x while its peer's stayed at "
            f"{np.exp(other):.2f}x",
        )
    return None


def _change(seen: Observations, row: int, course: Course) -> float:
    level = robust.median(seen.work.log_ns[row], axis=1)
    return float(robust.median(level[course.active]) - robust.median(level[~course.active]))


def _by_same_data(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> PairDecision | None:
    del found
    members, row = seen.members, slow.suspect.row
    if members.replica[row] != members.replica[peer] or members.layout.ep > 1:
        return None
    if members.stage[row] != members.stage[peer]:
        return None
    return PairDecision(
        True, "it and its peer share every microbatch (TP) and split the layers evenly"
    )


def _by_other_stages(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> PairDecision | None:
    members, row = seen.members, slow.suspect.row
    course = slow.suspect.course
    faulty = _faulty(found, len(members))
    others = (members.replica == members.replica[row]) & (members.stage != members.stage[row])
    others &= ~faulty
    if not others.any():
        return None
    elsewhere = float(
        robust.median(robust.median(found.residuals.value[others][:, course.active], axis=1))
    )
    if not np.isfinite(elsewhere) or elsewhere > 0.3 * course.effect:
        return None
    return PairDecision(
        True,
        f"the other stages of its replica work on the same data at {np.exp(elsewhere):.2f}x of the "
        "other replica, so the data are not the reason",
    )


def _faulty(found: ComputeSearch, num_rows: int) -> Bools:
    mask = np.zeros(num_rows, dtype=bool)
    mask[[one.suspect.row for one in found.slow]] = True
    return mask


def _by_optimizer(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> PairDecision | None:
    del seen, found, peer
    effect = slow.suspect.course.effect
    agree = all(HALF * effect <= phase <= 1.5 * effect for phase in slow.by_phase)
    if not agree or not np.isfinite(slow.optimizer):
        return None
    if not 0.6 * effect <= slow.optimizer <= 1.6 * effect + 0.05:
        return None
    return PairDecision(
        True,
        f"the optimizer step, which no data can lengthen, is {np.exp(slow.optimizer):.2f}x as well",
    )
