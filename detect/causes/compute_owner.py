"""Decide whose fault it is that a rank computes slowly: node, job, or undecided, and why.

    cause_and_owner   starved by its host? one pass only? longer data? otherwise `_decide`
    _decide           rule by rule: what else may be the reason (`_doubt`)? is it one of a pair or
                      ordinary (`ordinary.py`)? what do its clock, its peers, other stages show?
    is_one_sided      whether one pass alone is slow, which is no known fault of a device
    victims_among     slow rows that only wait for a mate

The node is at fault only where nothing else explains the slowness: neither its host, nor a pass
that alone is longer, nor what sound chips differ by, nor data that nobody else has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from detect.causes.device import (
    is_isolated,
    lookups_follow,
    mates_of,
    not_shown,
    optimizer_shows,
    stages_alike,
    stands_out_by_lookups,
    waits_beside,
    waits_for_slower_mate,
)
from detect.causes.launching import (
    half_starved,
    launched_by_slow_host,
    mate_starves,
    may_wait_for_launches,
    starvation,
)
from detect.causes.ordinary import (
    Case,
    Decision,
    decide_pair,
    distances_explain,
    even_data,
    longer_data,
    more_tokens_for_experts,
    ordinary_difference,
)
from detect.causes.readings import braked
from detect.causes.searches import SlowRow
from detect.observe.observations import Observations
from detect.observe.warmup import num_judgeable, settled
from detect.report import Cause, Owner
from detect.stats import robust
from detect.stats.residuals import deviations, stage_groups
from detect.text import ranks_text, times
from detect.thresholds.devices import COMPUTE as LIMITS
from detect.thresholds.devices import DEVICE, MEMORY, ORDINARY, PAIRS
from detect.thresholds.observing import PACE, WINDOW
from detect.thresholds.statistics import PERSISTENCE
from detect.thresholds.verdicts import IMBALANCE
from megascan.arrays import mask_of
from megascan.errors import listed

CHANGED = (
    "it changed inside the trace, in which all microbatches take about as long as each other: the "
    "data are not the reason"
)
CORES_CHANGE = (
    "it and its peers run on cores of one machine, and it was not slow all the time: "
    "which core is slow changes from second to second with what else runs there; a longer trace, "
    "or one with these ranks exchanged, decides"
)
LONE_CORE = (
    "no other rank shares its stage, and it was not slow all the time: what else runs on the cores "
    "of a CPU process for a while makes it slower by as much; a longer trace decides"
)
EQUAL_LAYERS = (
    "no other rank shares its stage, but all layers of the model are of one kind (the same "
    "modules, shapes and settings) and compute the same microbatches: slow layers are a slow device"
)
MOVES = (
    "kernels that only move memory take {times} as long, too: those of one name and launch move as "
    "much on every rank, as longer data or heavier layers launch larger ones"
)
NOT_ALIKE = (
    "its passes are not slow alike; a slow device slows both, so this is rather a difference of "
    "the work"
)
OF_ITS_REPLICA = (
    "the other stages of its replica are as slow: longer data would show the same, also in kernels "
    "that only move memory"
)
ON_THE_MEAN = (
    "its typical pass is as quick as its peers': a device that is held down for a part of each "
    "iteration, or more work in some passes, would look like this; its clock and throttle reasons "
    "decide (nvidia-smi -q -d CLOCK,PERFORMANCE)"
)
WARMING_UP = (
    "these are the run's first iterations, which still get quicker (allocation, compilation), and "
    "no rank by as much as another: a trace of later ones decides"
)
CHANGED_BESIDE_STAGES = (
    "no other rank shares its stage; against the transformer layers of the other stages it "
    "changed inside the trace, and what a stage has to do does not"
)
OTHER_LAYERS = (
    "no other rank shares its stage, and layers of one kind may be heavier than others: a "
    "benchmark of this device and of another stage's, or a second replica, decides"
)
ONE_OF_GROUP = (
    "which of these ranks is slow, or whether all are, this trace cannot tell: the others wait for "
    "it inside their passes; a trace at granularity full tells"
)


def _shared_core(case: Case) -> str:
    """Return why the neighbours on a CPU may be the reason, as a sentence; empty where they are
    not.

    CPU time grows with cold caches after sleeping, with memory shared by neighbours, and most with
    a second thread on the core. A slow core slows the optimizer as well; but of ranks of one
    machine any may have it for some seconds. A core that is slow for good is never as quick as the
    others.
    """
    slow = case.slow
    if case.seen.members.device_kind != "cpu":
        return ""
    is_one_of_two = slow.num_peers == 1
    is_alone = is_one_of_two or slow.across_stages
    was_quick = bool((case.found.residuals.value[case.row] <= 0.0).any())
    # of several peers those tell who is slow for a part of the time
    comes_and_goes = was_quick and (is_alone or bool(case.active.all()))
    if comes_and_goes and case.effect < np.log(_most_of_neighbours(is_alone=is_alone)):
        if slow.across_stages:
            return LONE_CORE
        if _shares_a_host(case):
            return CORES_CHANGE
    if case.effect >= np.log(_most_of_neighbours(is_alone=is_one_of_two)):
        return ""
    if slow.optimizer >= LIMITS.cache_share * case.effect:
        return ""
    optimizer = "was not recorded"
    if np.isfinite(slow.optimizer):
        optimizer = f"takes {np.exp(slow.optimizer):.2f}x the time of its peers'"
    return (
        f"its optimizer step {optimizer}, and neighbours on the same cores, caches and memory make "
        "the passes of a CPU process longer by as much: who shares its cores decides"
    )


def _most_of_neighbours(*, is_alone: bool) -> float:
    """Return how many times as long neighbours on a CPU may make passes take: of a row that is
    compared with a single other one, or with none of its stage, by sharing its core.
    """
    return LIMITS.shared_core_ratio if is_alone else LIMITS.mixed_ratio


def _shares_a_host(case: Case) -> bool:
    """Return whether a row and all of its peers run on one host."""
    hosts = case.seen.members.hosts
    return {hosts[peer] for peer in case.slow.peers} == {hosts[case.row]}


def _perhaps_not_slow(slow: SlowRow) -> str:
    """Say that a row's peers differ by so much that it need not be slow at all; empty if it is."""
    low, high = slow.suspect.interval
    if low >= 1.0:
        return ""
    return (
        f"its peers differ from each other by so much that it takes {low:.2f} to {high:.2f} times "
        "what a typical one does, with 95 % probability"
    )


def is_one_sided(slow: SlowRow) -> bool:
    """Return whether one pass alone is slow, and the optimizer, outside both passes, is not."""
    return _in_one_pass(slow) and not _optimizer_agrees(slow)


def _optimizer_agrees(slow: SlowRow) -> bool:
    """Return whether the optimizer is slow as well, and by no more than a device explains: a step
    that takes 24 times as long waits for another rank inside it.
    """
    effect = slow.suspect.course.effect
    most = effect + DEVICE.most_optimizer_log
    return PAIRS.agrees_share * effect <= slow.optimizer <= most


def _is_estimated_in_one(seen: Observations, slow: SlowRow) -> bool:
    """Return whether only one pass is known, its time is an estimate, and no optimizer is slow.

    Pass times are estimates where waits lie inside passes: the waits are taken out by what peers
    show. Example: backward 7.8 times as long next to a slow NVLink, optimizer 1.001, forward
    unknown.
    """
    known = np.flatnonzero(np.isfinite(slow.by_phase))
    is_estimated = len(known) == 1 and int(known[0]) in seen.entangled_phases
    return is_estimated and not _optimizer_agrees(slow)


def _in_one_pass(slow: SlowRow) -> bool:
    small, large = sorted(slow.by_phase)
    return small < LIMITS.one_sided_share * large


def cause_and_owner(case: Case) -> tuple[Cause, Owner, tuple[str, ...]]:
    """Return cause and owner, with the sentences that carry them."""
    seen, slow = case.seen, case.slow
    has_low_clock = case.clock is not None
    starved = starvation(seen, case.row, case.active, case.effect)
    # all devices may wait for their hosts; that one of them is hot, or braked, is no host's doing
    if starved is not None and not (case.clock and braked(seen, case.excluded, case.clock[0])):
        owner, because = starved
        return Cause.HOST, owner, (because,)
    # whoever waits for a late mate in forward passes may wait in its step as well
    has_longer_step = case.longer_step is not None and not _in_one_pass(slow)
    is_shown = has_low_clock or has_longer_step
    if not is_shown and (is_one_sided(slow) or _is_estimated_in_one(seen, slow)):
        return Cause.UNKNOWN, Owner.UNDECIDED, (NOT_ALIKE,)
    data = None if has_low_clock else longer_data(case)
    if data is not None:
        owner, because = data
        cause = Cause.SEQUENCE_IMBALANCE if owner == Owner.JOB else Cause.COMPUTE
        return cause, owner, (because,)
    decision = _decide(case)
    is_group = len(seen.members.workers[case.row]) > 1
    if decision.decided and is_group and not has_low_clock:
        decision = _one_of_group(case)
    owner = Owner.NODE if decision.decided else Owner.UNDECIDED
    # a device, or the host that launches for it: the node in either case
    launches = may_wait_for_launches(seen) if decision.decided else ""
    return Cause.COMPUTE, owner, tuple(one for one in (decision.because, launches) if one)


def _decide(case: Case) -> Decision:
    """Return whether a slow row's node is at fault: what the first rule says that applies."""
    doubt = _doubt(case)
    if doubt:
        return Decision(False, doubt)
    if case.clock is not None:
        return Decision(True, case.clock[1])
    if case.slow.is_mean:
        return _slow_on_the_mean(case)
    return Decision(False, WARMING_UP) if _warms_up(case) else _beside_others(case)


def _beside_others(case: Case) -> Decision:
    """Judge a row by whom it is compared with."""
    if case.longer_step is not None:
        return _one_of_group(case)
    if case.slow.across_stages:
        return _alone_on_its_stage(case)
    return decide_pair(case) if case.slow.num_peers == 1 else _by_its_peers(case)


def _doubt(case: Case) -> str:
    """Return why something else than the node may be the reason, as a sentence; empty if not."""
    seen, row, active, effect = case.seen, case.row, case.active, case.effect
    return (
        _shared_core(case)
        or more_tokens_for_experts(case)
        or ordinary_difference(case)
        or half_starved(seen, row, active)
        or mate_starves(seen, row, active)
        or waits_for_slower_mate(seen.members, case.passes, row)
        or launched_by_slow_host(seen, row, active, effect)
        or _perhaps_not_slow(case.slow)
        or _may_be_slowed(case)
    )


def _may_be_slowed(case: Case) -> str:
    """Return why others, or its host's launches, may slow a row's passes; empty where its optimizer
    step, for which it waits for nobody, is slow as well.
    """
    seen = case.seen
    if seen.tells_passes and _optimizer_agrees(case.slow):
        return ""
    own = mask_of([case.row], len(seen.members))
    others = ~own & (seen.members.stage == seen.members.stage[case.row])
    waits = waits_beside(seen, own, others, case.active, case.effect)
    return waits or ("" if _is_slow_for_its_place(case) else may_wait_for_launches(seen))


def _is_slow_for_its_place(case: Case) -> bool:
    """Return whether a row is slower than those at its place (stage and TP rank) by more than
    hosts of one model differ in launching: then it is the node, its device or its host.

    Where all wait for their launches, a place that launches more than others takes longer.
    """
    seen, row = case.seen, case.row
    place = seen.members.numbered("pp", "tp", "cp")
    same = np.flatnonzero(place == place[row])
    level = robust.centre(robust.median(seen.work.log_ns[same][:, case.active], axis=2))
    others = level[same != row]
    if not np.isfinite(others).any():
        return case.effect >= PACE.slow_log
    return float(level[same == row][0] - np.nanmedian(others)) >= PACE.slow_log


def _slow_on_the_mean(case: Case) -> Decision:
    """Judge a row whose typical pass is as quick as its peers', by its kernels. Lookups that are as
    quick do not tell: chips whose clocks come and go, by a tenth, look like that.
    """
    if stages_alike(case.seen.members, case.passes.effects, case.row):
        return Decision(False, OF_ITS_REPLICA)
    why = _by_what_it_moves(case)
    return Decision(bool(why), why or ON_THE_MEAN)


def _by_its_peers(case: Case) -> Decision:
    """Blame the node where the other ranks show it, or where longer data are not the reason."""
    more_tokens = lookups_follow(case)
    doubt = not_shown(case.seen, case.optimizer, case.passes, case.row, more_tokens=more_tokens)
    if doubt is None:
        return Decision(True, "")
    why = stands_out_by_lookups(case)
    why = why or (CHANGED if _changed_on_even_data(case) else even_data(case))
    return Decision(bool(why), why or doubt)


def _one_of_group(case: Case) -> Decision:
    """Judge a slow row that stands for a TP group: its optimizer steps wait for nobody."""
    longer, host = case.longer_step, case.longer_host
    if longer is None and host is not None:
        ranks, slower = host
        return Decision(
            True,
            f"of its TP group, whose ranks wait for each other inside their passes, "
            f"{ranks_text(ranks)}, all of one host, have slower optimizer steps "
            f"({times(float(np.exp(slower)))}) than those at their places in other groups",
        )
    if longer is None:
        return Decision(False, ONE_OF_GROUP)
    have = "alone has a slower optimizer step"
    if longer.further is not None:
        have = "have slower optimizer steps"
    by = listed(times(float(np.exp(one.slower_log))) for one in longer.every)
    return Decision(
        True,
        "of its TP group, whose ranks wait for each other inside their passes, "
        f"{ranks_text(tuple(one.rank for one in longer.every))} {have} ({by}), beside those of its "
        "mates and of the ranks at its place in other groups",
    )


def _warms_up(case: Case) -> bool:
    """Return whether nearly all iterations to judge are the run's first ones, and those in which
    the row is slow still get quicker. A single one is judged by its passes.
    """
    seen, settings = case.seen, case.inquiry.settings
    if len(seen.iterations) == 1:
        return False
    if num_judgeable(seen, settings) >= WINDOW.min_iterations:
        return False
    of_row = case.active & settled(seen, settings)
    return int(of_row.sum()) < WINDOW.min_iterations


def _changed_on_even_data(case: Case) -> bool:
    """Return whether a rank that shares its data with nobody, or waits for nobody in its passes,
    became slow inside the trace, while all microbatches of the job, its own among them, take about
    as long as each other: then no document is longer.

    Example: four passes of either kind that take 1.40, 1.04, 1.11 and 1.04 times the peers' time,
    forward as backward, have documents of their own each; a device makes all of them 1.24 times.
    """
    members, row = case.seen.members, case.row
    shares = members.replica == members.replica[row]
    is_own = int(shares.sum()) == 1 or not case.seen.holds_waiting
    others_vary = any(
        not one.suspect.course.active.all()
        for one in case.found.slow
        if not shares[one.suspect.row]
    )
    has_changed = int((~case.active).sum()) >= PAIRS.min_normal_iterations
    if not is_own or members.layout.ep > 1 or not has_changed or others_vary:
        return False
    if stages_alike(members, case.passes.effects, row):
        return False  # hardware chooses no replica
    deviation = deviations(case.seen.work, stage_groups(members), case.excluded)
    own, others = deviation[row][case.active], deviation[~case.excluded]
    are_even = float(robust.spread(others)) < IMBALANCE.min_sequence_spread_log
    most = min(IMBALANCE.min_sequence_spread_log, PAIRS.agrees_share * case.effect)
    return are_even and float(robust.spread(own)) < most


def _has_changed(case: Case) -> bool:
    """Return whether the row was as quick as its peers in enough iterations to tell a change."""
    return int((~case.active).sum()) >= PERSISTENCE.min_normal


def _alone_on_its_stage(case: Case) -> Decision:
    """Judge a row that was compared with the layers of other stages."""
    if _has_changed(case):
        return Decision(True, CHANGED_BESIDE_STAGES)
    # stages differ a little anyway: what they run besides their layers differs
    if case.effect < np.log(ORDINARY.little_ratio) and not _stands_out_of_equal_layers(case):
        return Decision(False, OTHER_LAYERS)
    if case.seen.has_equal_layers:
        is_alike = min(case.slow.by_phase) >= PAIRS.agrees_share * max(case.slow.by_phase)
        return Decision(is_alike, EQUAL_LAYERS if is_alike else NOT_ALIKE)
    why = _by_what_it_moves(case)
    return Decision(bool(why), why or OTHER_LAYERS)


def _stands_out_of_equal_layers(case: Case) -> bool:
    """Return whether layers of one kind differ by far less between the other stages.

    Example: layers of four stages at 0.2, -0.3, 0.1 and 9 %.
    """
    if not case.seen.has_equal_layers or case.slow.num_peers < ORDINARY.min_peers:
        return False
    return distances_explain(case, case.effect) is None


def _by_what_it_moves(case: Case) -> str:
    """Say that kernels of a profile that only move memory are slow as well; empty where they are
    not, or were not recorded, and where a router may send one rank's experts more to move.

    Example: another process has a stage's GPU for half of the time. Its products of matrices take
    2.3 times as long, as those of heavier layers would, but its additions of as many elements 2.2.
    """
    seen, slow = case.seen, case.slow
    if seen.boundness is None or seen.members.layout.ep > 1:
        return ""
    time = np.exp(seen.boundness.memory.log_ns[:, case.active])
    known = np.isfinite(time[[case.row, *slow.peers]]).all(axis=(0, 1))
    moving = time[:, :, known].sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        slower = np.log(moving[case.row] / robust.median(moving[slow.peers], axis=0))
    effect = float(robust.median(slower))
    if not effect >= MEMORY.agrees_share * case.effect:
        return ""
    return MOVES.format(times=times(float(np.exp(effect))))


def victims_among(cases: Sequence[Case]) -> set[int]:
    """Return slow rows that wait for a mate that stands out, and are slow for no other reason.

    The optimizer waits for nobody: a mate whose optimizer is slower is a slow device itself, unless
    only one of the mate's passes is slow.
    """
    victims: set[int] = set()
    slow = {one.row: one.slow for one in cases}
    for case in cases:
        members, row = case.seen.members, case.row
        by_lookups = bool(stands_out_by_lookups(case))
        by_passes = is_isolated(members, case.passes, row)
        if case.slow.across_stages or not (by_lookups or by_passes):
            continue
        victims |= {
            mate for mate in mates_of(members, row).tolist()
            if mate in slow
            and (
                (by_passes and slow[mate].suspect.course.effect < case.effect)
                or (by_lookups and _as_slow(slow[mate], case.slow))
            )
            and (_in_one_pass(slow[mate]) or not optimizer_shows(case.optimizer, case.passes, mate))
        }  # fmt: skip
    return victims


def _as_slow(slow: SlowRow, other: SlowRow) -> bool:
    """Return whether a row is as slow as another one, for which it may wait inside its passes."""
    effect = other.suspect.course.effect
    return abs(slow.suspect.course.effect - effect) <= DEVICE.alike_log_share * effect
