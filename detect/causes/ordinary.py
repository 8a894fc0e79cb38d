"""What else may make a rank look slow: chips that differ, its place, or a single peer.

    ordinary_difference    slow by so little, or in such a place, that no node need be at fault
    decide_pair            with one peer: which of the two
    even_data              why longer data are not the reason
    longer_data            whether they are, where tokens were counted

Ordinary. Two sound chips differ by a per cent or two, and the first rank of a TP group has duties
of its own. A rank may then be slower than its peers beyond doubt, and its node be as good as any.
What the other ranks show among themselves tells how much is ordinary:

* a small slowdown counts where it exceeds 4.5 times the root mean square of the other ranks'
  distances from their peers, or 3 times the largest, less what noise in time explains; ranks that
  are slow by as little are among the others;
* a pair does not show what is ordinary: a small slowdown of one of two stays undecided, and so
  does one of up to 10 % where few ranks are compared and another of them is slow as well;
* if all ranks of a (TP, CP, EP) position are slow alike by a few per cent, or the first rank of the
  job's only TP group is, then that is what the position does.

Example: chips at 0, -1.2, +1.2 and 3.4 %: root mean square of the first three 1 %, largest 1.2 %.
3.4 % is below 3.6 %: undecided. Among chips within 0.2 %, the same 3.4 % is the node's.

Pairs. The residuals of two ranks are mirror images; the ratio says "one is slower than the other"
and no more. What can still decide, in the order it is tried:

1. layers of other stages (the same shape): the odd one of three or more;
2. own history: one of them changed inside the trace, the other did not;
3. the two work on the same data (TP): equal work on equal devices, so the slower one is slow;
4. other stages of the same two replicas do not differ: the data are not the reason;
5. the optimizer, which no data can lengthen, is slower, too.

Otherwise the pair stays undecided, and the reason says what would decide it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.device import (
    Slowness,
    attention_residuals,
    mates_of,
    optimizer_shows,
    shares_its_memory,
    slow_clock,
    spares_lookups,
)
from detect.causes.finding import Inquiry
from detect.causes.searches import ComputeSearch, SlowRow
from detect.observe.observations import BACKWARD, FORWARD, Members, Observations
from detect.report import Owner
from detect.stats import robust
from detect.stats.residuals import deviations, stage_groups
from detect.stats.search import Course
from detect.text import counted, times
from detect.thresholds import DEVICE, KERNELS, ORDINARY, PAIRS, SPELLS
from megascan.arrays import Floats, mask_of

EVEN = "its passes got as many tokens as those of its peers, so longer data are not the reason"
SPARES_MEMORY = (
    "its products of matrices are slow, and its kernels that only move memory hardly or not: more "
    "data would lengthen both, a lower clock the first"
)
DATA_OF_REPLICA = (
    "; all other stages of its replica are as slow, and longer data would show the same"
)


@dataclass(frozen=True)
class Decision:
    """Whether the slow row's node is at fault; `because` is a sentence either way."""

    decided: bool
    because: str


def clock_of_slow(
    seen: Observations, found: ComputeSearch, slow: SlowRow
) -> tuple[int, str] | None:
    """Return the rank of a slow row whose clock explains the slowness, and a sentence; None where
    no clock does.
    """
    return slow_clock(seen, found.slow_rows, slow.suspect.row, slow.suspect.course.effect)


def effects_beside(seen: Observations, found: ComputeSearch, slow: SlowRow) -> Slowness:
    """Return how slow every row is while `slow` is: with the effect of data left in or taken out,
    whichever is larger.
    """
    active = slow.suspect.course.active
    effects = np.nan_to_num(robust.median(found.residuals.value[:, active], axis=1))
    raw = deviations(seen.work, stage_groups(seen.members), found.slow_rows)
    level = np.nan_to_num(robust.centre(robust.median(raw[:, active], axis=2)))
    attention = attention_residuals(seen, found.slow_rows)
    return Slowness(
        effects=np.maximum(effects, level),
        slow=found.slow_rows,
        by_phase=robust.median(found.residuals.by_phase[:, :, active], axis=2),
        attention=None if attention is None else robust.median(attention[:, active], axis=1),
    )


def even_data(seen: Observations, found: ComputeSearch, slow: SlowRow) -> str | None:
    """Return why the data of a slow rank are as long as those of its peers, as a sentence; None
    where that is not known, and on CPUs, whose cores processes share.
    """
    members, row = seen.members, slow.suspect.row
    if members.device_kind == "cpu":
        return None
    alone = int((members.replica == members.replica[row]).sum()) == 1
    tokens = seen.tokens_of(row)
    gets_no_more = tokens is not None and tokens[0] <= tokens[1]
    if (seen.rules_data_out or gets_no_more) and alone:
        return EVEN
    for same_data in (mates_of(members, row), np.flatnonzero(members.other_stages(row))):
        if len(same_data) and found.slow_rows[same_data].all():
            return None  # all ranks with the same documents are slow: hardly all their devices
    active, effect = slow.suspect.course.active, slow.suspect.course.effect
    return (
        spares_lookups(seen, found.slow_rows, row, active, effect)
        or shares_its_memory(seen, found.slow_rows, row, active)
        or (SPARES_MEMORY if _spares_memory(seen, found, slow) else None)
    )


def longer_data(
    seen: Observations, found: ComputeSearch, slow: SlowRow
) -> tuple[Owner, str] | None:
    """Return whose doing it is that a row which gets more tokens than its peers is slow, with a
    sentence; None where it gets no more, where nobody recorded how many, and where it is not slow
    all the time: its passes always get as many.

    Most of a pass takes time in proportion to its tokens, attention to the square of their number:
    n times the tokens explain passes that take up to n^2 times as long. Beyond that, or where the
    optimizer step, which no data can lengthen, is slower as well, the device may be slow besides.

    Example: 2,560 tokens against 2,048, 1.25 times as many, explain up to 1.56 times the time; a
    fused attention takes 1.26 times, one that writes its scores to memory 1.44 times.
    """
    row, course = slow.suspect.row, slow.suspect.course
    tokens = seen.tokens_of(row)
    if tokens is None or not tokens[0] > tokens[1] or not course.active.all():
        return None
    own, theirs = tokens
    words = (
        f"each of its passes gets {own:,} tokens, those of its peers {theirs:,.0f} "
        f"({times(own / theirs)} as many)"
    )
    explained = DEVICE.most_token_power * float(np.log(own / theirs))
    optimizer = found.optimizer[:, course.active]
    if optimizer_shows(optimizer, effects_beside(seen, found, slow), row):
        level = float(np.exp(robust.centre(optimizer[row])))
        return Owner.UNDECIDED, (
            f"{words}, but its optimizer step, which no data can lengthen, takes {times(level)} "
            "the time of its peers': a slow device, besides, may be part of the reason"
        )
    if course.effect > explained + course.standard_error:
        return Owner.UNDECIDED, (
            f"{words}, which explains at most {times(float(np.exp(explained)))} the time: a slow "
            "device, besides, may be part of the reason"
        )
    return Owner.JOB, f"{words}, which explains it: no device need be slow"


def _spares_memory(seen: Observations, found: ComputeSearch, slow: SlowRow) -> bool:
    """Return whether nearly all products of matrices are slow in both passes, and what is bound by
    memory is not. Slow attention alone is not enough: its documents may be longer.
    """
    kinds, effect = seen.boundness, slow.suspect.course.effect
    least = PAIRS.min_effect_log if slow.num_peers == 1 else KERNELS.least_log
    if kinds is None or seen.may_have_stages or effect < least:
        return False  # larger matrices of another stage, or what sound devices differ by
    matrix, memory = (
        robust.median(
            deviations(work, stage_groups(seen.members), found.slow_rows)[slow.suspect.row][
                slow.suspect.course.active
            ],
            axis=0,
        )
        for work in (kinds.matrix, kinds.memory)
    )
    is_slow = matrix >= PAIRS.agrees_share * effect
    parts = [np.isfinite(matrix) & (kinds.matrix.phase == phase) for phase in (FORWARD, BACKWARD)]
    all_parts = all(is_slow[one].mean() >= SPELLS.parts_share for one in parts if one.any())
    return all_parts and bool(robust.median(memory) < PAIRS.agrees_share * robust.median(matrix))


def ordinary_difference(inquiry: Inquiry, found: ComputeSearch, slow: SlowRow) -> str | None:
    """Return why the node need not be at fault for the slowness, as a sentence; None if it must."""
    where = _of_position(inquiry.seen, found, slow)
    if where is not None:
        return f"{where}: that may be the work of the place as well as the device"
    floor = float(np.log(inquiry.settings.min_slowdown))
    course = slow.suspect.course
    effect = course.effect
    lasts = float(np.mean(course.active)) >= ORDINARY.mostly_share
    is_pair, is_small = slow.num_peers == 1, effect < ORDINARY.small_floors * floor
    if is_pair and is_small and (lasts or len(course.episodes) > 1):
        return "two sound devices may differ by as much, and it has one peer only"
    if not lasts:
        return None
    is_short = len(inquiry.seen.iterations) < inquiry.settings.min_iterations
    may_be_chips = is_short or _shows_no_spread(inquiry.seen, found, slow)
    is_little = is_small or (may_be_chips and effect < np.log(ORDINARY.little_ratio))
    if is_little and slow.num_peers < ORDINARY.min_peers:
        return f"sound devices may differ by as much, and it has {slow.num_peers} peers only"
    return _as_others_differ(inquiry, found, slow)


def _shows_no_spread(seen: Observations, found: ComputeSearch, slow: SlowRow) -> bool:
    """Return whether a row is compared with two others, and nothing else shows how much sound
    devices differ or that it is slow. (Of pairs the rules for pairs decide.)

    Example: three replicas at 0, 0.2 and 8 %. Of chips that differ by 5 % two may be alike.
    """
    known = int(np.isfinite(_levels(found)).sum())
    is_alone = slow.num_peers == ORDINARY.min_peers - 1 and known < ORDINARY.min_ranks
    return is_alone and len(found.slow) < 2 and not _is_confirmed(seen, found, slow)


def _is_confirmed(seen: Observations, found: ComputeSearch, slow: SlowRow) -> bool:
    """Return whether a row's clock or its optimizer step, which no data lengthen, is slow, too."""
    if clock_of_slow(seen, found, slow) is not None:
        return True
    optimizer = found.optimizer[:, slow.suspect.course.active]
    return optimizer_shows(optimizer, effects_beside(seen, found, slow), slow.suspect.row)


def _as_others_differ(inquiry: Inquiry, found: ComputeSearch, slow: SlowRow) -> str | None:
    """Return how the other ranks show that sound devices differ by as much, as a sentence; None
    where they do not.
    """
    floor, effect = float(np.log(inquiry.settings.min_slowdown)), slow.suspect.course.effect
    is_pair, is_small = slow.num_peers == 1, effect < ORDINARY.small_floors * floor
    if _is_one_of_few(inquiry.seen, found, slow):
        return (
            f"it has {counted(slow.num_peers, 'peer')} only, and another of so few ranks is slow "
            "as well: these devices may differ by as much and be sound"
        )
    if is_small or (is_pair and effect < PAIRS.min_effect_log):
        largest = _within_distances(found, slow, ORDINARY.small_floors * floor)
        if largest is not None:
            return (
                f"the other ranks, too, lie up to {np.expm1(largest):.1%} off their peers: this "
                "one may be no more than the slowest of sound devices"
            )
    return None if is_pair else _within_spread(inquiry.seen, found, slow)


def _is_one_of_few(seen: Observations, found: ComputeSearch, slow: SlowRow) -> bool:
    """Return whether a row is slow by no more than sound devices may be, and one of so few ranks
    that nothing shows how much they differ, while another one is slow as well. Neither its clock
    nor its optimizer step, which no data lengthen, confirms that it is slow.

    Example: four replicas at 0, 1, 6.5 and 7.5 %. The third is no peer of the fourth, since it is
    slow itself, and the other two happen to be alike.
    """
    is_little = slow.suspect.course.effect < np.log(ORDINARY.little_ratio)
    if not is_little or slow.num_peers >= ORDINARY.min_peers or len(found.slow) < 2:
        return False
    gaps = np.concatenate(_gaps_by_stage(seen, found))
    is_known = np.isfinite(gaps).sum() >= ORDINARY.min_pairs
    return not is_known and not _is_confirmed(seen, found, slow)


def _within_distances(found: ComputeSearch, slow: SlowRow, small: float) -> float | None:
    """Return the largest distance of another rank from its peers, log; None where the slowdown
    stands out from these distances. Ranks that are slower by `small` or more are left out.

    Few ranks may happen to be alike: the quantile of Student's t that says how far one more strays
    from so many others is 7.5 root mean squares for three of them, and 4.5 for six.
    """
    large = [one.suspect.row for one in found.slow if one.suspect.course.effect >= small]
    others = ~mask_of([*large, slow.suspect.row], len(found.slow_rows))
    if slow.num_peers == 1:  # the only peer is as far off, the other way
        others[slow.peers] = False
    levels = np.abs(robust.median(found.residuals.value[others], axis=1))
    levels = levels[np.isfinite(levels)]
    if len(levels) < min(slow.num_peers, 2):  # one rank of another pair tells what both would
        return None
    square, largest = float(np.mean(levels**2)), float(levels.max())
    few = max(1.0, float(special.stdtrit(len(levels), ORDINARY.sound_share)) / ORDINARY.rms_factor)
    most = few * min(ORDINARY.rms_factor * np.sqrt(square), ORDINARY.largest_factor * largest)
    return None if slow.suspect.course.effect >= _lasting(found, square) * most else largest


def _within_spread(seen: Observations, found: ComputeSearch, slow: SlowRow) -> str | None:
    """Say that devices of this job differ by so much that a sound one may be as slow as `slow`;
    None where `slow` stands out from them, or its clock was read to be low.
    """
    spread = _spread_of_devices(seen, found, slow.suspect.row)
    stands_out = slow.suspect.course.effect >= min(ORDINARY.rms_factor * spread, ORDINARY.most_log)
    if stands_out or clock_of_slow(seen, found, slow) is not None:
        return None
    return (
        f"ranks of one stage differ by {np.expm1(spread):.1%} (sigma) all over the job: this one "
        "may be no more than the slowest of sound devices"
    )


def _lasting(found: ComputeSearch, square: float) -> float:
    """Return the share of a root mean square distance between ranks that noise in time does not
    explain.
    """
    chance = found.noise.chance(found.residuals.value.shape[1])
    return float(np.sqrt(max(0.0, 1.0 - chance**2 / square))) if square > 0 else 0.0


def _spread_of_devices(seen: Observations, found: ComputeSearch, row: int) -> float:
    """Return sigma of the levels of ranks of one stage, log, from the quarter of all their pairs
    that are nearest to each other: of all stages, or of the row's own where that is more.

    Sound devices of one job may all differ by some per cent. Taking out the slowest, one by one,
    would leave those that happen to be alike. Pairs have no centre that slow ranks could move, and
    up to half of the ranks may be slow by any amount (the estimator Qn of Rousseeuw and Croux,
    1993). Example: levels 0, 1, 5 and 9 % make pairs 1, 4, 4, 5, 8 and 9 % apart, a quarter of
    which lie within 1 %: sigma is 1 / 0.45 = 2 %.
    """
    level, groups = _levels(found), stage_groups(seen.members)
    gaps = _gaps_by_stage(seen, found)
    own = gaps[next(place for place, rows in enumerate(groups) if row in rows)]
    pairs, known = np.concatenate(gaps), level[np.isfinite(level)]
    sigma = max(_sigma_of_pairs(pairs), _sigma_of_pairs(own))
    if len(known) >= ORDINARY.min_ranks and len(pairs) < ORDINARY.few_pairs:
        sigma = min(sigma, float(robust.spread(known)))  # of two stages of four, three may be slow
    return sigma * _lasting(found, sigma**2)


def _levels(found: ComputeSearch) -> Floats:
    """Return by how much each rank is slower than its peers all over the window, (row,) log."""
    return robust.median(found.residuals.value, axis=1)


def _gaps_by_stage(seen: Observations, found: ComputeSearch) -> list[Floats]:
    """Return how far the levels of two ranks of a stage are apart, (pair,) log for each stage; NaN
    where one of them is not known.
    """
    level = _levels(found)
    return [
        np.abs(np.subtract.outer(level[rows], level[rows]))[np.triu_indices(len(rows), 1)]
        for rows in stage_groups(seen.members)
    ]


def _sigma_of_pairs(gaps: Floats) -> float:
    """Return sigma of levels whose pairs are `gaps` apart, (pair,); 0 where too few are known."""
    known = gaps[np.isfinite(gaps)]
    if len(known) < ORDINARY.min_pairs:
        return 0.0
    nearest = np.quantile(known, ORDINARY.nearest_share, method="lower")
    share = ORDINARY.few_pairs_share if len(known) < ORDINARY.few_pairs else 1.0
    return share * float(nearest) / ORDINARY.nearest_sigmas


def _of_position(seen: Observations, found: ComputeSearch, slow: SlowRow) -> str | None:
    """Return how the rank's place within its replica may explain its slowness; None where it does
    not.

    It may if all ranks of the place, in the job or in the stage, are slow alike, by a little or
    without a slow optimizer; or it by a little, and all others by any amount. If the place occurs
    only once, it must be the first.
    """
    members = seen.members
    coordinates, row = members.place, slow.suspect.row
    effect = slow.suspect.course.effect
    same = np.ones(len(members), dtype=bool)
    for axis in ("tp", "cp", "ep"):
        same &= coordinates[axis] == coordinates[axis][row]
    is_little = effect < ORDINARY.position_reach_log
    if same.all() or not slow.suspect.course.active.all():
        return None
    if not is_little and optimizer_shows(found.optimizer, effects_beside(seen, found, slow), row):
        return None
    effects = np.zeros(len(members))
    for one in found.slow:
        effects[one.suspect.row] = one.suspect.course.effect
    if int(same.sum()) == 1:
        first = is_little and all(int(coordinates[axis][row]) == 0 for axis in ("tp", "cp", "ep"))
        words = "it is the first rank of the job's only TP group, which loads and logs"
        return words if first else None
    if is_little and found.slow_rows[same].all():
        return (
            "the other ranks at its place are slow as well, and show no more what the place takes"
        )
    of_stage = same & (members.stage == members.stage[row])
    alike = any(
        int(rows.sum()) > 1
        and float(effects[rows].min()) >= ORDINARY.alike_share * float(effects[rows].max())
        for rows in (same, of_stage)
    )
    return "the ranks at its place in all TP groups are slow alike" if alike else None


def decide_pair(seen: Observations, found: ComputeSearch, slow: SlowRow) -> Decision:
    """Judge a slow row that has a single peer."""
    row = slow.suspect.row
    rows = seen.members.rows_of_stage(int(seen.members.stage[row]))
    peer = int(rows[rows != row][0])
    if len({seen.members.devices[row], seen.members.devices[peer]}) > 1:
        return Decision(False, "the two ranks run on different device models, which may differ")
    rules = (
        _by_pool, _by_history, _by_same_data, _by_other_stages, _by_optimizer, _by_even_data
    )  # fmt: skip
    for rule in rules:
        decision = rule(seen, found, slow, peer)
        if decision is not None:
            return decision
    return Decision(
        False,
        "with one peer the trace shows that the two differ, not which one is at fault: a second "
        "replica or TP peer, a trace from before the slowdown, or a GEMM benchmark on both decides",
    )


def _by_pool(seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int) -> Decision | None:
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
    if own >= PAIRS.agrees_share * effect and other < PAIRS.agrees_share * effect:
        level = robust.median(found.pool.value[:, active], axis=1)
        if _other_stages_differ_alike(seen.members, level, slow.suspect.row, peer, effect):
            return Decision(False, words + DATA_OF_REPLICA)
        return Decision(True, words)
    if own < PAIRS.agrees_share * effect and other <= -PAIRS.agrees_share * effect:
        return Decision(False, words + ": the peer is faster than everybody else")
    return None


def _other_stages_differ_alike(
    members: Members, level: Floats, row: int, peer: int, effect: float
) -> bool:
    """Return whether other stages of the row's replica are slower than those of the peer's replica
    by about as much as the row is, as longer data of the whole replica make them.

    `level` (row,) is what layers take over those of all stages, log. Example: 0.06 and -0.04 in the
    last stage; 0.03 and -0.01, 0.04 and -0.03, 0.04 and -0.01 in the others.
    """
    of_peer = members.replica == members.replica[peer]
    over = [
        float(level[mate] - robust.median(level[of_peer & (members.stage == members.stage[mate])]))
        for mate in np.flatnonzero(members.other_stages(row))
    ]
    return bool(over) and float(robust.median(np.array(over))) >= PAIRS.agrees_share * effect


def _by_history(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> Decision | None:
    del found
    course = slow.suspect.course
    if (~course.active).sum() < PAIRS.min_normal_iterations:
        return None
    own, other = (_own_rise(seen, row, course) for row in (slow.suspect.row, peer))
    if own > PAIRS.agrees_share * course.effect and abs(other) < PAIRS.agrees_share * course.effect:
        return Decision(
            True,
            f"its own compute time rose to {np.exp(own):.2f}x while its peer's stayed at "
            f"{np.exp(other):.2f}x",
        )
    return None


def _own_rise(seen: Observations, row: int, course: Course) -> float:
    level = robust.median(seen.work.log_ns[row], axis=1)
    return float(robust.median(level[course.active]) - robust.median(level[~course.active]))


def _by_same_data(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> Decision | None:
    del found
    members, row = seen.members, slow.suspect.row
    if members.replica[row] != members.replica[peer] or members.layout.ep > 1:
        return None
    if members.stage[row] != members.stage[peer]:
        return None
    return Decision(True, "it and its peer share every microbatch (TP) and split the layers evenly")


def _by_other_stages(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> Decision | None:
    course = slow.suspect.course
    others = seen.members.other_stages(slow.suspect.row) & ~found.slow_rows
    if not others.any() or seen.members.layout.ep > 1:  # each stage's experts get other tokens
        return None
    elsewhere = float(
        robust.median(robust.median(found.residuals.value[others][:, course.active], axis=1))
    )
    if not np.isfinite(elsewhere) or elsewhere > PAIRS.elsewhere_share * course.effect:
        return None
    return Decision(
        True,
        f"the other stages of its replica work on the same data at {np.exp(elsewhere):.2f}x of the "
        "other replica, so the data are not the reason",
    )


def _by_optimizer(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> Decision | None:
    del found, peer
    effect = slow.suspect.course.effect
    low, high = PAIRS.agrees_share * effect, PAIRS.max_phase_ratio * effect
    agree = all(low <= phase <= high for phase in slow.by_phase)
    if not agree or effect < PAIRS.min_effect_log or seen.members.layout.ep > 1:
        return None
    least = max(DEVICE.optimizer_share * effect, PAIRS.min_optimizer_log)
    if not slow.optimizer >= least:
        return None
    return Decision(
        True,
        f"the optimizer step, which no data can lengthen, is {np.exp(slow.optimizer):.2f}x as well",
    )


def _by_even_data(
    seen: Observations, found: ComputeSearch, slow: SlowRow, peer: int
) -> Decision | None:
    """Blame the slow row if data are even: no device is quicker than a sound one, and two sound
    ones differ by less than `min_effect_log`, which `ordinary_difference` has checked.
    """
    del peer
    even = even_data(seen, found, slow)
    return None if even is None else Decision(True, even)
