"""Ranks whose computation is slow: whose fault it is, and the words.

    search_compute   who is slower than its peers (`searches.py`)
    _judge           starved by its host? one pass only? otherwise `_decide`, rule by rule
    _decide          ordinary, or one of a pair (`ordinary.py`)? what do its clock and peers show?
    _victims         slow because they wait for a mate

A rank is slow where its passes take longer than those of the ranks that do the same work. The node
is at fault only where nothing else explains the slowness: neither its host, nor a pass that alone
is longer, nor what sound chips differ by, nor data that nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from detect.causes.device import (
    DATA_ADVICE,
    GPU_ADVICE,
    host_advice,
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
from detect.causes.finding import (
    UNDECIDED_WHOSE,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    devices_of,
    rows_of_findings,
    saved_by_compute,
)
from detect.causes.launching import (
    half_starved,
    is_host_bound,
    launched_by_slow_host,
    mate_starves,
    may_wait_for_launches,
    most_cost_of_host,
    of_far_later_host,
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
from detect.causes.power import Power, limits, planted_power, slowest
from detect.causes.readings import braked, reading_evidence
from detect.causes.searches import (
    ComputeSearch,
    SlowRow,
    in_all_passes,
    least_slowdown,
    search_compute,
    search_means,
)
from detect.observe.observations import (
    PHASE_NAMES,
    Members,
    Observations,
    cut,
    num_judgeable,
    settled,
)
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import compare_within, deviations, peer_groups, stage_groups
from detect.text import counted, peers_text, place, ranks_text, times
from detect.thresholds.devices import COMPUTE as LIMITS
from detect.thresholds.devices import DEVICE, MEMORY, ORDINARY, PAIRS
from detect.thresholds.observing import PACE, WINDOW
from detect.thresholds.statistics import PERSISTENCE, POWER
from detect.thresholds.verdicts import IMBALANCE
from megascan.arrays import Flags, mask_of
from megascan.errors import listed

CHANGED = (
    "it changed inside the trace, in which all microbatches take about as long as each other: the "
    "data are not the reason"
)
CORES_CHANGE = (
    "it and its only peer run on cores of one machine, and it was slow for a part of this trace: "
    "which core is slow changes from second to second with what else runs there; a longer trace, "
    "or one with these ranks exchanged, decides"
)
EQUAL_LAYERS = (
    "no other rank shares its stage, but all layers of the model are of one kind (the same "
    "modules, shapes and settings) and compute the same microbatches: slow layers are a slow device"
)
BOUND = (
    "communication within TP groups was not traced and is part of these times: the rank itself may "
    "be slower still"
)
GATHERED = (
    "parameters are gathered beside the passes, which wait for the slowest rank in it, and no "
    "layers were recorded that would tell how long (granularity full, a model that is not compiled)"
)
MOVES = (
    "kernels that only move memory take {times} as long, too: those of one name and launch move as "
    "much on every rank, as longer data or heavier layers launch larger ones"
)
NOT_ALIKE = (
    "its passes are not slow alike; a slow device slows both, so this is rather a difference of "
    "the work: compare the two ranks' modules at granularity full"
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
    a second thread on the core. A slow core slows the optimizer as well; but of two ranks of one
    machine either may have it for some seconds.
    """
    slow = case.slow
    most = LIMITS.shared_core_ratio if slow.num_peers == 1 else LIMITS.mixed_ratio
    if case.seen.members.device_kind != "cpu" or case.effect >= np.log(most):
        return ""
    if slow.num_peers == 1 and not case.active.all() and _shares_a_host(case):
        return CORES_CHANGE
    if slow.optimizer >= LIMITS.cache_share * case.effect:
        return ""
    optimizer = "was not recorded"
    if np.isfinite(slow.optimizer):
        optimizer = f"takes {np.exp(slow.optimizer):.2f}x the time of its peers'"
    return (
        f"its optimizer step {optimizer}, and neighbours on the same cores, caches and memory make "
        "the passes of a CPU process longer by as much: who shares its cores decides"
    )


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


def _worth_saying(case: Case) -> bool:
    slow = case.slow
    if slow.across_stages and slow.suspect.course.effect < LIMITS.lone_floor_log:
        return False
    # one pass alone is no known fault of a device: only beyond all doubt, and lasting; but in a
    # profile a host that is late lengthens most the pass whose kernels are short
    lasting = bool(slow.suspect.course.active.all()) and slow.suspect.q_value < LIMITS.surely_q
    if lasting or not _one_sided(slow):
        return True
    is_profile = not case.seen.tells_passes
    return is_profile and starvation(case.seen, case.row, case.active, case.effect) is not None


def _one_sided(slow: SlowRow) -> bool:
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


def _finding(case: Case) -> Finding:
    seen, slow, row = case.seen, case.slow, case.row
    cause, owner, reasons = _judge(case)
    in_all = _slowdown_in_all(case)
    share = 1.0 - 1.0 / in_all  # of its compute time, beyond that of its peers
    excess = np.where(case.active, np.nan_to_num(seen.busy_ns[row]) * share, 0.0)
    is_bound = seen.mixes_communication or not seen.splits_tensor_groups
    members, at, ranks = _at_fault(case, owner)
    is_part = len(ranks) > 1 and members is not seen.members
    host = ", ".join(sorted(members.hosts_of(ranks))) if is_part else members.hosts[at]
    finding = build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=(row,),
            cause=cause,
            owner=owner,
            slowdown=float(np.exp(case.effect)),
            interval=_interval(slow, in_all),
            course=slow.suspect.course,
            q_value=slow.suspect.q_value,
            num_peers=slow.num_peers,
            saved_ns=saved_by_compute(seen, row, excess),
            subject=f"{ranks_text(ranks)} ({f'host {host}' if is_part else place(members, at)})",
            predicate=_predicate(slow, cause, is_bound, is_one=len(ranks) == 1),
            whose=UNDECIDED_WHOSE if owner is Owner.UNDECIDED else "",
            evidence=(
                *_evidence(seen, slow),
                *((BOUND,) if is_bound else ()),
                *reasons,
                *reading_evidence(seen, row),
            ),
            advice=_advice(seen.members, row, cause, owner),
            is_replayed=cause != Cause.UNKNOWN,
            most_cost=most_cost_of_host(seen, row, case.active) if cause == Cause.HOST else np.inf,
            is_bound=is_bound,
            is_read=case.clock is not None,
        ),
    )
    finding = replace(
        finding,
        coordinates=members.coordinates(at),
        host=host,
        device=devices_of(members, members.rows_with(ranks)),
    )
    return of_far_later_host(finding) if len(ranks) == 1 else finding


def _at_fault(case: Case, owner: Owner) -> tuple[Members, int, tuple[int, ...]]:
    """Return the ranks that a finding is about, and the row of the first of them among its members:
    those of the case, or of the group that its row stands for the ones at fault.
    """
    members, every = case.seen.members, case.seen.workers
    is_group = owner is Owner.NODE and len(members.workers[case.row]) > 1
    slowest = _slow_of_group(case) if is_group else ()
    if slowest and every is not None:
        return every.members, every.members.row(slowest[0]), slowest
    return members, case.row, slowest or members.workers[case.row]


def _slow_of_group(case: Case) -> tuple[int, ...]:
    """Return which ranks are at fault of a row that stands for several; () where none is shown."""
    if case.clock is not None:
        return (case.clock[0],)
    if case.longer_step is not None:
        return tuple(sorted(one.rank for one in case.longer_step.every))
    return () if case.longer_host is None else case.longer_host[0]


def _interval(slow: SlowRow, in_all: float) -> tuple[float, float]:
    """Return the interval of a slowdown, which holds that of all its work, and what peers hide."""
    (low, high), effect = slow.suspect.interval, slow.suspect.course.effect
    return low * in_all * float(np.exp(-effect)), high * float(np.exp(LIMITS.hidden_share * effect))


def _slowdown_in_all(case: Case) -> float:
    """Return how many times as long a row computes in all, at most what its finding states.

    In a profile the two differ: what is stated is that of a typical part of a pass, and a low clock
    slows kernels that move memory by less than products of matrices. Example: 1.96 times in the
    typical part, 1.82 times in all.
    """
    seen, slow, stated = case.seen, case.slow, float(np.exp(case.effect))
    if seen.tells_passes or slow.across_stages or slow.is_mean or not len(slow.peers):
        return stated
    busy_ns = np.where(seen.busy_ns > 0, seen.busy_ns, np.nan)
    beside = busy_ns[case.row] / robust.median(busy_ns[slow.peers], axis=0)
    in_all = float(robust.median(beside[case.active]))
    return min(stated, in_all) if in_all > 1.0 else stated


def _predicate(slow: SlowRow, cause: Cause, is_bound: bool, *, is_one: bool) -> str:
    slowdown = times(float(np.exp(slow.suspect.course.effect)))
    peers = peers_text(slow.num_peers)
    verb, whose = ("computes", "its") if is_one else ("compute", "their")
    how = f"takes {slowdown} the time of its {peers}"
    if cause == Cause.COMPUTE:
        least = "at least " if is_bound else ""
        how = f"{verb} {least}{slowdown} slower than {whose} {peers}"
    elif cause == Cause.HOST:
        how = f"is starved by its host: work takes {slowdown} the time of its {peers}"
    if slow.is_mean:
        how += " on the mean, if not in its typical pass"
    return f"{how}," if slow.is_mean else how


def _judge(case: Case) -> tuple[Cause, Owner, tuple[str, ...]]:
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
    if not is_shown and (_one_sided(slow) or _is_estimated_in_one(seen, slow)):
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


def _victims(cases: Sequence[Case]) -> set[int]:
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


def _evidence(seen: Observations, slow: SlowRow) -> list[str]:
    members, row = seen.members, slow.suspect.row
    phases = [
        f"{name} {times(float(np.exp(value)))}"
        for name, value in zip(PHASE_NAMES, slow.by_phase, strict=True)
        if np.isfinite(value)
    ]
    if np.isfinite(slow.optimizer) and seen.optimizer_ns[row].max() > 0:
        phases.append(f"optimizer {times(float(np.exp(slow.optimizer)))}")
    if slow.across_stages:
        what = "transformer layers" if seen.tells_passes else "same kernels"
        against = f"of the {what} of the other stages"
    else:
        names = listed(members.workers[one][0] for one in slow.peers)
        against = f"of the same work on {'rank' if slow.num_peers == 1 else 'ranks'} {names}"
    course = slow.suspect.course
    samples = counted(int(np.isfinite(seen.work.log_ns).any(axis=(0, 1)).sum()), "pass")
    if not seen.tells_passes:
        samples = "kernels of equal name and launch"
    typical = "mean" if slow.is_mean else "median"
    return [
        f"{', '.join(phases)} {against}, waiting and communication taken out",
        f"slower than its peers in {course.share:.0%} of these "
        f"{counted(int(course.active.sum()), 'iteration')}, {typical} over {samples} each",
    ]


ADVICE = {
    Cause.SEQUENCE_IMBALANCE: (DATA_ADVICE,),
    Cause.UNKNOWN: ("trace again at granularity full, over more iterations",),
}


def _advice(members: Members, row: int, cause: Cause, owner: Owner) -> tuple[str, ...]:
    has_gpu, is_group = members.device_kind != "cpu", len(members.workers[row]) > 1
    if cause == Cause.HOST:
        return host_advice(owner)
    if cause in ADVICE:
        return ADVICE[cause]
    if owner == Owner.UNDECIDED and has_gpu and is_group:
        return (
            "measure the GPUs of these ranks' host against each other, with the job away: python "
            "scripts/healthcheck.py --sweep",
            "or trace again at granularity full, which tells these ranks apart",
        )
    if owner == Owner.UNDECIDED:
        return (
            "run the same GEMM benchmark on this rank's device and on a peer's: slower there, too, "
            "means the device; as fast means the work or the place",
            "or trace again with the two hosts exchanged: a fault of the hardware moves with it",
        )
    if not has_gpu:
        return (
            "on that host: read CPU frequency and throttling (turbostat, or /proc/cpuinfo), and "
            "which cores the rank's process may use (taskset -p PID)",
            "run the same matrix product alone on that host and on a peer's",
        )
    return GPU_ADVICE


def _search(inquiry: Inquiry) -> Answer:
    seen = inquiry.seen
    found = search_compute(inquiry)
    reach = _reach(inquiry, found) if found.num_compared else Answer()
    least = reach.least_slowdown
    is_blind = least is not None and (least >= POWER.healthy_ratio or bool(reach.unseen))
    floor, cases = least_slowdown(seen, inquiry.settings), _cases(inquiry, found)
    return replace(
        reach,
        findings=tuple(_finding(one) for one in _reported(cases)),
        least_because=_why_no_less(inquiry, found, least),
        slow=found.slow_rows & ~_unsaid(cases, len(found.slow_rows)),
        notes=(
            *reach.notes,
            *(slowest(seen, found.residuals, floor) if is_blind and not found.slow else ()),
            *limits(seen, found.residuals),
        ),
    )


def _cases(inquiry: Inquiry, found: ComputeSearch) -> list[Case]:
    return [Case.of(inquiry, found, one) for one in found.slow]


def _reported(cases: Sequence[Case]) -> list[Case]:
    """Return those of the slow rows that a finding is made of."""
    victims = _victims(cases)
    return [one for one in cases if one.row not in victims and _worth_saying(one)]


def _unsaid(cases: Sequence[Case], num_rows: int) -> Flags:
    """Flag the rows that are slow by too little, or in one pass only: they may have bursts."""
    return mask_of([one.row for one in cases if not _worth_saying(one)], num_rows)


def _reach(inquiry: Inquiry, found: ComputeSearch) -> Answer:
    """Return which slowdowns would have been found and named: tried on the ranks of this trace,
    where its noise and its waits let any be seen.
    """
    effect = inquiry.detectable_effect(found.noise)
    effect = max(float(np.log(least_slowdown(inquiry.seen, inquiry.settings))), effect)
    if effect >= np.log(POWER.blind_ratio):
        return Answer(least_slowdown=float(np.exp(effect)))
    if is_host_bound(inquiry.seen) or inquiry.seen.hides_waiting:
        return Answer(least_slowdown=POWER.blind_ratio)
    power = planted_power(inquiry, effect, found.slow_rows, _owner_of)
    if not np.isfinite(power.found):
        return Answer(least_slowdown=POWER.blind_ratio)
    unseen = inquiry.seen.members.ranks_of(power.unseen)
    return Answer(
        least_slowdown=float(np.exp(power.found)),
        least_named=float(np.exp(power.named)) if np.isfinite(power.named) else None,
        unseen=unseen,
        notes=tuple(_notes_on(power, unseen)),
    )


def _notes_on(power: Power, unseen: tuple[int, ...]) -> Iterator[str]:
    """Say where a slow rank is found and its node not named, or where it is not found at all."""
    least = times(float(np.exp(power.found)))
    if not np.isfinite(power.named):
        yield (
            f"a rank that computes {least} slower would be found, but not said to be its node's "
            "fault: ranks of this trace that were slowed by up to a factor of "
            f"{POWER.blind_ratio:.0f} stayed undecided"
        )
    elif power.named > power.found:
        yield (
            f"a rank that computes {least} slower is found, but its node is sure to be named only "
            f"from {times(float(np.exp(power.named)))} on: of the ranks of this trace that were "
            "slowed by less, some stayed undecided"
        )
    if unseen:
        yield (
            f"{ranks_text(unseen)}: {POWER.blind_ratio:.0f} times slower would not be found there "
            "(few iterations, or no peer)"
        )


def _why_no_less(inquiry: Inquiry, found: ComputeSearch, least: float | None) -> str:
    """Say what keeps the smallest slowdown found from being smaller, as part of a sentence."""
    if is_host_bound(inquiry.seen):
        return "the devices wait for their hosts, whose pace hides their own"
    if inquiry.seen.hides_waiting:
        return GATHERED
    if least == POWER.blind_ratio:
        return "none of the ranks that were slowed to try it was found"
    by_noise = float(np.exp(inquiry.detectable_effect(found.noise)))
    floor = least_slowdown(inquiry.seen, inquiry.settings)
    if least is not None and least > max(by_noise, floor) ** POWER.rung_ratio:
        return "ranks of this trace that were slowed by less, to try it, were not found"
    return inquiry.limited_by(found.noise)


def _owner_of(inquiry: Inquiry, row: int) -> Owner | None:
    """Return who owns the slowness of a row; None where it is not found, or is no slow compute."""
    found = search_compute(inquiry)
    case = next((one for one in _reported(_cases(inquiry, found)) if one.row == row), None)
    if case is None:
        return None
    cause, owner, _ = _judge(case)
    return owner if cause == Cause.COMPUTE else None


COMPUTE = CauseSpec(
    cause=Cause.COMPUTE,
    search=_search,
    tests_rows=lambda seen: True,
    power_words="a rank computes slower than its peers",
)


def _search_means(inquiry: Inquiry) -> Answer:
    """Search ranks that are slow on the mean, only where nobody has been named: a rank that stands
    still now and then has longer passes as well.
    """
    if inquiry.seen.members.device_kind == "cpu" or inquiry.named.any():
        return Answer()
    found = search_means(inquiry)
    if found is None:
        return Answer()
    return Answer(findings=tuple(_finding(one) for one in _reported(_cases(inquiry, found))))


SLOW_ON_THE_MEAN = CauseSpec(cause=Cause.COMPUTE, search=_search_means)


def _search_end(inquiry: Inquiry) -> Answer:
    """Search the last two iterations of the window as a window of their own, for a rank that was as
    quick as its peers before.

    Two slow iterations are too few among many to be told from bursts of noise or data, unless they
    are the last, nearly all of their passes are slow alike, and all that is asked of a window of
    two is true of them. Example: a rank's passes beside its peers' in six iterations, log: 0.002,
    0.002, 0.000, -0.001, 0.187, 0.187.
    """
    seen = inquiry.seen
    num, num_last = len(seen.iterations), WINDOW.min_iterations
    if seen.members.device_kind == "cpu" or num < num_last + PAIRS.min_normal_iterations:
        return Answer()
    is_last = np.arange(num) >= num - num_last
    end = replace(inquiry, seen=cut(seen, "iteration", is_last))
    found = search_compute(end)
    if not found.slow:
        return Answer()
    groups = peer_groups(seen.work, seen.members)
    before = compare_within(seen.work, seen.members, groups, found.slow_rows).value[:, ~is_last]
    cases = [
        one
        for one in _reported(_cases(end, found))
        if not (inquiry.blamed[one.row] or one.slow.across_stages)
        and one.effect >= np.log(WINDOW.one_iteration_ratio)
        and np.abs(before[one.row]).max() <= PAIRS.elsewhere_share * one.effect
        and in_all_passes(end.seen, [one.row], one.effect, found.slow_rows)
    ]
    findings = tuple(one for one in map(_finding, cases) if one.owner is Owner.NODE)
    ranks = {one.ranks for one in findings}
    return Answer(
        findings=findings,
        slow=rows_of_findings(seen.members, findings),
        explains=lambda one: one.owner is Owner.UNDECIDED and one.ranks in ranks,
    )


SLOW_AT_THE_END = CauseSpec(cause=Cause.COMPUTE, search=_search_end)
