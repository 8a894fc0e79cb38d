"""Ranks of a group that are slow alike, where nobody recorded what they send each other.

All of them wait for the slowest inside their passes. If no other rank of the stage is slow, nor the
rest of the replica, it is one device or their data, a link or an expert; the optimizer step, which
waits for no mate and which only a slow device lengthens, tells whether and which (see
`longer_steps.py`). Rows that stand for a whole group are judged in `compute_owner.py`.

Example: passes of ranks 2 and 3 of two groups of two take 1.44 times as long as those of 0 and 1;
steps take 3.00, 3.01, 3.46 and 2.98 ms: rank 2.
"""

from __future__ import annotations

import numpy as np

from detect.causes.device import GPU_ADVICE, stages_alike
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    answer_of_groups,
    build_finding,
    saved_by_compute,
)
from detect.causes.longer_steps import LongerStep, Steps
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import deviations, stage_groups
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course
from detect.text import counted, milliseconds, place, times
from detect.thresholds.devices import DEVICE, PAIRS
from megascan.arrays import Flags, Integers

OF_ITS_MATES = (
    "of its group, whose ranks wait for each other inside their passes, it alone has a slower "
    "optimizer step ({times}, {lead} longer than its mates), beside those at its place in other "
    "groups: neither data nor links lengthen that"
)


def _groups(seen: Observations) -> Integers | None:
    """Return a number of each row's group, (row,), whose communication nobody recorded; None where
    rows stand for groups, or passes are not told.
    """
    members, hidden = seen.members, seen.hidden_axes
    are_groups = any(len(ranks) > 1 for ranks in members.workers)
    if are_groups or not seen.tells_passes:
        return None
    if "tp" in hidden or "cp" in hidden:
        return members.tensor_group
    firsts = [members.layout.group(int(rank), "ep")[0] for rank in members.ranks]
    return np.array(firsts, dtype=np.int64)


def _slow_alike(seen: Observations, own: Flags) -> float:
    """Return the log slowdown of `own` rows, (row,), beside the others of their stage; 0 where they
    are not slow alike, another row is slow by half of that, or so is the rest of their replica.
    """
    of_stage = seen.members.stage == seen.members.stage[own][0]
    others = of_stage & ~own
    level = robust.centre(robust.median(deviations(seen.work, stage_groups(seen.members), own), 2))
    if not others.any() or not np.isfinite(level[of_stage]).all():
        return 0.0
    least, most = float(level[own].min()), float(level[own].max())
    is_alike = least >= DEVICE.alike_share * most
    is_lone = float(level[others].max()) < PAIRS.agrees_share * least
    is_replicas = stages_alike(seen.members, np.nan_to_num(level), int(np.argmax(own)))
    return float(np.median(level[own])) if is_alike and is_lone and not is_replicas else 0.0


def search_mates(inquiry: Inquiry) -> Answer:
    """Search groups that are slow alike throughout, of which one rank has a longer step."""
    seen, members = inquiry.seen, inquiry.seen.members
    groups = _groups(seen)
    if groups is None or members.device_kind == "cpu":
        return Answer()
    known = inquiry.blamed
    findings, explained = [], set[int]()
    for group in np.unique(groups).tolist():
        own = groups == group
        if own.sum() < 2 or known[own].any():
            continue
        effect = _slow_alike(seen, own)
        if effect < np.log(inquiry.settings.min_slowdown):
            continue
        steps = Steps(
            members=members,
            time_ns=seen.optimizer_ns,
            lookups_ns=seen.each_rank.lookups_ns,
            group=groups,
            slow=known | own,
        )
        has_experts = seen.hidden_axes == ("ep",)
        share = DEVICE.optimizer_share_of_experts if has_experts else DEVICE.optimizer_share
        longer = steps.longest(group, effect, share)
        rate = inquiry.settings.false_discovery_rate
        if longer is not None and longer.p_value * own.sum() <= rate:
            findings.append(_finding(seen, own, longer, effect))
            explained |= set(members.ranks_of(np.flatnonzero(own)))
    return answer_of_groups(members, findings, explained)


def _finding(seen: Observations, own: Flags, longer: LongerStep, effect: float) -> Finding:
    members, num_iterations = seen.members, len(seen.iterations)
    row = members.row(longer.rank)
    num_peers = int((members.stage == members.stage[row]).sum() - own.sum())
    level = robust.median(deviations(seen.work, stage_groups(members), own)[row], axis=1)
    excess_ns = np.nan_to_num(seen.busy_ns[row]) * -float(np.expm1(-effect))
    return build_finding(
        seen,
        Claim(
            ranks=(longer.rank,),
            rows=(row,),
            cause=Cause.COMPUTE,
            owner=Owner.NODE,
            slowdown=float(np.exp(effect)),
            interval=interval_of_ratio(effect, robust.standard_error(level)),
            course=Course.of(np.ones(num_iterations, dtype=bool), effect, 0.0),
            q_value=longer.p_value * int(own.sum()),
            num_peers=num_peers,
            saved_ns=saved_by_compute(seen, row, excess_ns),
            subject=f"rank {longer.rank} ({place(members, row)})",
            predicate=f"computes at least {times(float(np.exp(effect)))} slower than its "
            f"{counted(num_peers, 'peer')}",
            evidence=(
                f"its passes and those of {counted(int(own.sum()) - 1, 'mate')} are longer alike",
                OF_ITS_MATES.format(
                    times=times(float(np.exp(longer.slower_log))),
                    lead=milliseconds(longer.lead_ns),
                ),
            ),
            advice=GPU_ADVICE,
            is_bound=True,
        ),
    )
