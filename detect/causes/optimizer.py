"""Ranks whose optimizer step is slow: their passes are quick, and all others wait for the step.

Problem: a bad PCIe slot under an optimizer that was moved to the host, rows of memory that were
remapped, a host short of memory bandwidth: the step takes two or eight times as long, and no pass
is slower. Compute is compared by passes, so the rank looks sound there.

Idea: ranks of one stage and TP rank update equally many parameters, and no data lengthen that. So
the time of the step, communication taken out, is compared among them; the search is that of
compute. What speaks against other reasons:

* the passes are slower by less than half of what the step is: else the device as a whole is slow,
  which the search for slow computing judges, unless the data vary so much that it sees nothing;
* the rank's host does not stop between launches (`stands_still`), which lengthens whatever is
  launched then: the search for hosts judges that;
* the others wait for the rank: nobody waits for a rank that itself waits inside its step, in
  communication that the trace does not show; nor do ranks of several stages of one replica whose
  steps are longer by the same time, for all of them end when the last has come. Or the replay gains
  by a step as quick as its peers', or the rank's passes are slow as well, as slow memory makes
  them, and no TP mate's are: a rank that waits in its step computes as quickly as others.

Where its passes are slower than those of all its peers, a step need not be as slow to tell. Nor
where all of its peers wait for it unseen, inside passes that are equally long then (experts of all
replicas, whose exchange nobody recorded; parameters that are gathered for each layer). Example: a
clock half as high, steps of 443, 504, 441 and 444 us, passes equal within 0.1 %. Nor where its
embedding and loss, which move memory for each token, are slower by about as much, and products of
matrices are not: longer data lengthen no step, a slow host or waiting no lookups, so the device's
memory is slow. Example: step, embedding and loss 1.32, 1.24 and 1.22 times, MLPs 1.07. The mates of
a job's only TP group, of which the first one has a little more to update, are told by that alone.

Example: rank 0 takes 1,473 ms for its step and its three peers 191 ms, in iterations of 1,829 ms,
of which the peers wait 1,099 ms: 7.7 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detect.causes.device import (
    GPU_ADVICE,
    HOST_ADVICE,
    answer_of_slow_parts,
    mates_of,
    over_others,
)
from detect.causes.finding import (
    UNDECIDED_WHOSE,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    saved_by_compute,
    undecided_if_free,
)
from detect.causes.launching import stands_still, waits_for_launches
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.noise import Usual
from detect.stats.residuals import compare_within, stage_groups
from detect.stats.search import SearchTask, Suspect, search
from detect.text import milliseconds, peers_text, place, times
from detect.thresholds.devices import COMPUTE, DEVICE, OPTIMIZER, ORDINARY, PAIRS
from detect.thresholds.observing import OCCUPANCY
from detect.whatif.traced import joined_groups
from megascan.arrays import Flags, Floats, Integers, mask_of
from megascan.timeline import rows_alike

ADVICE = (
    "read that GPU's PCIe link, memory errors and remapped rows, beside a peer's: nvidia-smi -i "
    "GPU -q -d ECC,ROW_REMAPPER and --query-gpu=pcie.link.gen.current,pcie.link.width.current",
    "measure copies to and from the host, and its memory, with the job away (nvbandwidth): on this "
    "GPU and on a peer's; where the optimizer runs on the host, its memory and cores as well",
)
NOBODY_WAITS = (
    "nobody waits for it by as much, so it may itself wait inside its step, in communication that "
    "the trace does not show"
)
AWAITED = (
    "they update as many parameters, no data lengthen that, and the other ranks wait for it, or "
    "its passes are slow as well"
)
BY_LOOKUPS = (
    "its embedding and loss, which only move memory for each token, are slower by about as much, "
    "and its passes are not: neither data nor its host make all of them so, slow memory does"
)
ONE_PEER = (
    "it has one peer only, and steps of sound devices whose hosts launch at different speeds "
    "differ by as much: a second replica, or a trace with the two exchanged, decides"
)
NOT_ALONE = (
    "it has one peer only, and another rank's step is as slow: both may wait for others in it, in "
    "communication that the trace does not show"
)
END_TOGETHER = (
    "steps of other stages of its replica are longer by the same time: all of them may wait for "
    "one rank, in communication that the trace does not show"
)

MATE = (
    "the step of a rank of its TP group is longer still: it may wait for that one inside its own, "
    "in communication that the trace does not show"
)


@dataclass(frozen=True, kw_only=True)
class _SlowStep:
    """A rank whose optimizer step is slow."""

    rank: int
    row: int
    """Row of the observations, which may stand for a TP group."""
    suspect: Suspect
    num_peers: int
    own_ns: float
    """Median time of the step in the iterations in which it is slow."""
    passes: float
    """Log slowdown of the row's passes; NaN where passes were not compared."""
    passes_ns: float
    """What its passes take longer in an iteration than those of its peers; 0 where they do not."""
    is_confirmed: bool
    """Whether slow passes say that the device is slow, and no step that waits; or none can."""
    hides_in_passes: bool
    """Whether all others wait for it inside their passes, where nobody recorded it."""
    lookups_ns: float
    """What its lookups take longer in an iteration, if they are slower by about as much, as slow
    memory makes them; else 0."""

    @property
    def excess_ns(self) -> float:
        """Return by how much the rank's step is longer than its peers', ns."""
        return self.own_ns * -float(np.expm1(-self.suspect.course.effect))


def slow_steps(inquiry: Inquiry) -> list[_SlowStep]:
    """Return the ranks whose optimizer step is slow, while their passes are not by as much."""
    seen = inquiry.seen
    every = seen.each_rank
    members, time_ns = every.members, every.optimizer_ns
    # they update equally many parameters; ranks of one TP group nearly as many
    alike, mates = (rows_alike(members.numbered(*axes)) for axes in (("pp", "tp"), ("pp",)))
    groups = [rows for rows in alike if len(rows) > 1]
    are_mates = not groups
    groups = groups or [rows for rows in mates if len(rows) > 1]
    suspects = _suspects(inquiry, members, time_ns, groups) if groups else ()
    if not suspects:
        return []
    passes = compare_within(seen.work, seen.members, stage_groups(seen.members), inquiry.slow).value
    # a slow one of three would be half of what its sound peers are measured by
    excluded = mask_of([one.row for one in suspects], len(members))
    over = over_others(time_ns, groups, excluded)
    found = []
    for one in suspects:
        rank, active = int(members.ranks[one.row]), one.course.active
        (row,) = seen.members.rows_with((rank,))
        group = next(rows for rows in groups if one.row in rows)
        level = robust.median(passes[:, active], axis=1)
        # a step that is longer by far is slow memory's, and says nothing of passes
        hides = one.course.effect < OPTIMIZER.floor_log and _all_wait_unseen(seen, row)
        is_slowest = hides or _is_slowest_in_passes(seen.members, row, level)
        slow = _SlowStep(
            rank=rank,
            row=row,
            suspect=one,
            num_peers=len(group) - 1,
            own_ns=float(np.nanmedian(time_ns[one.row][active])),
            passes=float(level[row]),
            passes_ns=_excess_of_passes(
                seen, row, active, one.course.effect if hides else float(level[row])
            ),
            is_confirmed=is_slowest and _stands_out(over[:, active], one, group, excluded),
            hides_in_passes=hides,
            lookups_ns=_excess_of_lookups(seen, one, groups, excluded, float(level[row])),
        )
        if _is_worth_saying(inquiry, slow) and (slow.lookups_ns > 0 or not are_mates):
            found.append(slow)
    return found


def _is_worth_saying(inquiry: Inquiry, slow: _SlowStep) -> bool:
    """Return whether a step is slow enough, by itself or with its passes, and no other search
    judges why.
    """
    seen, course = inquiry.seen, slow.suspect.course
    is_device = slow.passes >= OPTIMIZER.most_passes_share * course.effect
    is_known = slow.is_confirmed or slow.lookups_ns > 0
    # one of a pair that is slow throughout is judged as a device
    is_known &= not (is_device and slow.num_peers == 1)
    is_judged = is_device and (inquiry.slow[slow.row] or not is_known)
    if is_judged or stands_still(seen, slow.row, course.active):
        return False
    least_ns = OPTIMIZER.least_share * float(np.median(seen.iteration_ns))
    is_large = course.effect >= OPTIMIZER.floor_log and slow.excess_ns >= least_ns
    in_all_ns = slow.excess_ns + max(slow.passes_ns, slow.lookups_ns)
    return is_large or (is_known and in_all_ns >= least_ns)


def _excess_of_lookups(
    seen: Observations, suspect: Suspect, groups: list[Integers], excluded: Flags, passes: float
) -> float:
    """Return what a rank's lookups take longer in an iteration, ns, if all of them that are long
    enough to tell are slower by about as much as its step, and far more than its passes; else 0.
    """
    row, active, effect = suspect.row, suspect.course.active, suspect.course.effect
    if passes >= OPTIMIZER.most_passes_share * effect:
        return 0.0
    excess_ns, every = 0.0, seen.each_rank
    for kind in range(every.lookups_ns.shape[2]):
        time_ns = every.lookups_ns[:, active, kind]
        own_ns = float(robust.median(time_ns[row]))
        if not own_ns >= DEVICE.least_lookup_ns:
            continue
        over = robust.centre(over_others(time_ns, groups, excluded))
        slower, peers = float(over[row]), over[~excluded]
        is_known = bool(np.isfinite(peers).any())
        if not is_known and slower < PAIRS.min_effect_log:
            return 0.0  # two sound devices may differ by as much
        spread = float(np.sqrt(np.nanmean(peers**2))) if is_known else 0.0
        is_alike = PAIRS.agrees_share * effect <= slower <= effect / PAIRS.agrees_share
        if not (is_alike and slower >= ORDINARY.rms_factor * spread):
            return 0.0
        num_passes = int(seen.work.microbatch.max()) + 1
        excess_ns += num_passes * own_ns * -float(np.expm1(-slower))
    return excess_ns


def _excess_of_passes(seen: Observations, row: int, active: Flags, slowdown: float) -> float:
    """Return what a row's passes take longer in an iteration by this slowdown, log; at least 0."""
    passes_ns = seen.busy_ns[row] - np.nan_to_num(seen.optimizer_ns[row])
    excess_ns = float(robust.median(passes_ns[active])) * -float(np.expm1(-slowdown))
    return max(excess_ns, 0.0) if np.isfinite(excess_ns) else 0.0


def _all_wait_unseen(seen: Observations, row: int) -> bool:
    """Return whether all of a row's stage exchange something with each other inside their passes
    that nobody recorded, or parameters for which passes wait: each pass is as long as that of the
    slowest rank.
    """
    if seen.hides_waiting or seen.waits_between_layers:
        return True
    members = seen.members
    group = joined_groups(members.layout, members.ranks, seen.hidden_axes)
    of_stage = members.rows_of_stage(int(members.stage[row]))
    return len(of_stage) > 1 and bool((group[of_stage] == group[row]).all())


def _is_slowest_in_passes(members: Members, row: int, level: Floats) -> bool:
    """Return whether no peer's passes are as slow as the row's, which are noticeably slow; `level`
    (row,) is what passes take over those of peers, log. Of a pair, whose levels mirror each other,
    other pairs are asked, which differ by less than half of that.
    """
    of_stage = members.rows_of_stage(int(members.stage[row]))
    is_slow = bool(level[row] >= OPTIMIZER.least_passes_log)
    if len(of_stage) != 2:
        peers = of_stage[of_stage != row]
        return is_slow and len(peers) > 1 and bool(level[row] > np.nan_to_num(level[peers]).max())
    others = np.delete(level, of_stage)
    others = np.abs(others[np.isfinite(others)])
    is_told = len(others) >= ORDINARY.min_peers
    return is_slow and is_told and bool(others.max() < PAIRS.agrees_share * level[row])


def _stands_out(over: Floats, suspect: Suspect, group: Integers, excluded: Flags) -> bool:
    """Return whether a step is longer than those of its peers by far more than these differ, but
    not by so much that it must wait inside; `over` (row, iteration) is the time of steps over those
    of peers, log.
    """
    level = robust.median(over, axis=1)
    # the one peer of a pair shows nothing: other pairs tell how steps differ
    peers = np.delete(level, group) if len(group) == 2 else level[group[~excluded[group]]]
    spread = float(np.sqrt(np.nanmean(peers**2))) if np.isfinite(peers).any() else np.inf
    least = OPTIMIZER.confirmed_sigmas * max(spread, OPTIMIZER.noise_log / 2)
    return least <= float(level[suspect.row]) <= DEVICE.most_optimizer_log


def _suspects(
    inquiry: Inquiry, members: Members, time_ns: Floats, groups: list[Integers]
) -> tuple[Suspect, ...]:
    task = SearchTask(
        compare=lambda excluded: over_others(time_ns, groups, excluded),
        num_rows=len(members),
        num_tests=inquiry.num_tests,
        floor=OPTIMIZER.confirmed_floor_log,
        usual=Usual(
            floor=OPTIMIZER.noise_log,
            spread=COMPUTE.gpu_spread_log,
            most=COMPUTE.gpu_most_log,
            tail_degrees=COMPUTE.tail_degrees,
        ),
        forbidden=np.zeros(len(members), dtype=bool),
        groups=tuple(groups),
        own=robust.log_of(time_ns),
        by_majority=True,
    )
    return search(task, inquiry.settings).suspects


def _doubt(seen: Observations, slow: _SlowStep, steps: Sequence[_SlowStep]) -> str:
    """Return why no node is at fault for sure, as a sentence; empty where one is. `steps` are all
    slow ones.

    Example: of two pairs of replicas one step each takes 1.59 and 1.62 times the other's. Beside
    them the NVLink of a pair is slow, through which they reduce a norm.
    """
    launches = waits_for_launches(seen, slow.row, slow.suspect.course.active)
    if launches or slow.lookups_ns > 0:
        return launches
    is_small = slow.suspect.course.effect < OPTIMIZER.pair_floor_log
    if slow.num_peers == 1 and is_small and not slow.is_confirmed:
        return ONE_PEER
    least = PAIRS.agrees_share * slow.suspect.course.effect
    if slow.num_peers == 1 and any(
        one.suspect.course.effect >= least for one in steps if one is not slow
    ):
        return NOT_ALONE
    if any(_ends_with(seen.members, slow, one) for one in steps):
        return END_TOGETHER
    if any(_may_wait_for(seen.members, slow, one) for one in steps):
        return MATE
    # waiting for parameters that arrive beside passes is never waiting alone: so try both
    waits = seen.waiting_ns, seen.split_wait_ns
    others = np.arange(len(seen.members)) != slow.row
    is_awaited = any(_is_awaited(seen, slow, one, others) for one in waits if one is not None)
    return "" if is_awaited or slow.is_confirmed else NOBODY_WAITS


def _ends_with(members: Members, slow: _SlowStep, other: _SlowStep) -> bool:
    """Return whether another stage of the rank's replica takes longer for its step by as much time.

    Example: the last to reduce its gradients holds up the norm of a replica. The steps of its TP
    mates are longer by 15.4, 15.3 and 15.3 ms on three stages: 1.24, 4.5 and 3.7 times.
    """
    same_replica = members.replica[slow.row] == members.replica[other.row]
    less, more = sorted((slow.excess_ns, other.excess_ns))
    agrees = less >= OPTIMIZER.together_share * more
    return bool(same_replica and members.stage[slow.row] != members.stage[other.row] and agrees)


def _may_wait_for(members: Members, slow: _SlowStep, other: _SlowStep) -> bool:
    """Return whether a TP mate's step is longer by twice as much and more: it may be waited for.

    Example: of two mates one takes 13.6 ms for its step and one 6.6 ms, all others 5.3 ms.
    """
    if other is slow or other.excess_ns * PAIRS.agrees_share < slow.excess_ns:
        return False
    return other.row == slow.row or other.row in mates_of(members, slow.row)


def _advice(inquiry: Inquiry, slow: _SlowStep) -> tuple[str, ...]:
    """Return what to look at: memory and PCIe, before them the host for whose launches the device
    waits, or the device as a whole where passes are slow as well.
    """
    if waits_for_launches(inquiry.seen, slow.row, slow.suspect.course.active):
        return (HOST_ADVICE[0], *ADVICE)
    if slow.passes >= float(np.log(inquiry.settings.min_slowdown)):
        return (GPU_ADVICE[0], *ADVICE)
    return ADVICE


def _is_awaited(seen: Observations, slow: _SlowStep, waiting_ns: Floats, others: Flags) -> bool:
    """Return whether the `others` (row,), on the median, wait longer than the slow row in most of
    its slow iterations, by as much as its step is longer; `waiting_ns` is (row, iteration).

    Who waits for an optimizer step does so in the next iteration. Of windows of two traced
    iterations that is the second one only.
    """
    if not others.any():
        return False
    follows = slow.suspect.course.active & np.isin(seen.iterations - 1, seen.iterations)
    compared = follows if follows.any() else slow.suspect.course.active
    lead_ns = np.median(waiting_ns[others], axis=0) - waiting_ns[slow.row]
    hits = lead_ns[compared] >= OPTIMIZER.awaited_share * slow.excess_ns
    return float(np.mean(hits)) >= OCCUPANCY.mostly_share


def _judged(inquiry: Inquiry, slow: _SlowStep, steps: Sequence[_SlowStep]) -> Finding:
    """Return the finding of a slow step: undecided where something else may be the reason, nobody
    waits for it, or the job is as fast without it.
    """
    doubt = _doubt(inquiry.seen, slow, steps)
    finding = _finding(inquiry, slow, doubt)
    if doubt == NOBODY_WAITS and _holds_up_some(inquiry.seen, slow, finding):
        finding = _finding(inquiry, slow, "")
    return undecided_if_free(finding, NOBODY_WAITS)


def _holds_up_some(seen: Observations, slow: _SlowStep, finding: Finding) -> bool:
    """Return whether some rank waits for the slow one by as much, and the replay gains without it.
    In a pipeline a few that wait are enough, of which their median says nothing.

    Example: a step is 315 ms longer, two of 15 others wait for it, and the job is a sixth faster
    without it.
    """
    waiting_ns, rows = seen.waiting_ns, np.arange(len(seen.members))
    if waiting_ns is None or finding.step_time_cost_ratio < OPTIMIZER.least_gain_ratio:
        return False
    others = rows[rows != slow.row]
    return any(_is_awaited(seen, slow, waiting_ns, rows == one) for one in others)


def _finding(inquiry: Inquiry, slow: _SlowStep, doubt: str) -> Finding:
    seen, course, members = inquiry.seen, slow.suspect.course, inquiry.seen.members
    factor, peers = float(np.exp(course.effect)), peers_text(slow.num_peers)
    in_all_ns = slow.excess_ns + max(slow.passes_ns, slow.lookups_ns)
    lost = np.where(course.active, in_all_ns, 0.0)
    also, passes = "", ""
    hides = slow.is_confirmed and slow.hides_in_passes
    if hides:
        passes = "; all ranks of its stage wait for it inside their passes, where it is not seen"
    elif slow.is_confirmed:
        also = f" and for its passes {times(float(np.exp(slow.passes)))}"
    elif np.isfinite(slow.passes):
        passes = f"; its passes take {times(float(np.exp(slow.passes)))} those of its peers"
    return build_finding(
        seen,
        Claim(
            ranks=(slow.rank,),
            rows=(slow.row,),
            cause=Cause.COMPUTE,
            owner=Owner.UNDECIDED if doubt else Owner.NODE,
            slowdown=factor,
            interval=slow.suspect.interval,
            course=course,
            q_value=slow.suspect.q_value,
            num_peers=slow.num_peers,
            saved_ns=lost if hides else saved_by_compute(seen, slow.row, lost),
            is_replayed=not hides,
            is_bound=hides,
            subject=f"rank {slow.rank} ({place(members, slow.row)})",
            predicate=f"takes {times(factor)} the time of its {peers} for its optimizer step{also}",
            whose=UNDECIDED_WHOSE if doubt else "",
            evidence=(
                f"optimizer step: {milliseconds(slow.own_ns)} an iteration against "
                f"{milliseconds(slow.own_ns - slow.excess_ns)} of its {peers}, communication taken "
                f"out{passes}",
                doubt or (BY_LOOKUPS if slow.lookups_ns > 0 else AWAITED),
            ),
            advice=_advice(inquiry, slow),
        ),
    )


def _search(inquiry: Inquiry) -> Answer:
    """Search devices only: on shared cores the step of a sound process varies as its passes do.
    Profiles are left to the search for slow memory, which looks at all kernels.
    """
    seen = inquiry.seen
    if not _is_compared(seen):
        return Answer()
    steps = slow_steps(inquiry)
    return answer_of_slow_parts(seen, tuple(_judged(inquiry, one, steps) for one in steps))


def _is_compared(seen: Observations) -> bool:
    is_device = seen.members.device_kind != "cpu" and seen.boundness is None
    return is_device and bool((seen.optimizer_ns > 0).any())


SLOW_OPTIMIZER = CauseSpec(cause=Cause.COMPUTE, search=_search, tests_rows=_is_compared)
