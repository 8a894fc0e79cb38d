"""What else may make a rank look slow: chips that differ, its place, or a single peer.

    Case                   a slow row, as it is judged here and in `compute.py`
    ordinary_difference    slow by so little, or in such a place, that no node need be at fault
    decide_pair            with one peer: which of the two
    even_data              why longer data are not the reason
    more_tokens_for_experts    whether a router sends more of them to one rank
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
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from detect.causes.device import (
    Slowness,
    Suspicion,
    attention_residuals,
    mates_of,
    optimizer_shows,
    over_others,
    shares_its_memory,
    slow_clock,
    spares_lookups,
)
from detect.causes.finding import Inquiry
from detect.causes.searches import ComputeSearch, SlowRow
from detect.observe.observations import BACKWARD, FORWARD, Members
from detect.report import Owner
from detect.stats import robust
from detect.stats.residuals import deviations, stage_groups
from detect.text import counted, times
from detect.thresholds import DEVICE, KERNELS, ORDINARY, PAIRS, SPELLS
from megascan.arrays import Floats, mask_of

if TYPE_CHECKING:
    from detect.causes.longer_steps import LongerStep

EVEN = "its passes got as many tokens as those of its peers, so longer data are not the reason"
SPARES_MEMORY = (
    "its products of matrices are slow, and its kernels that only move memory hardly or not: more "
    "data would lengthen both, a lower clock the first"
)
MORE_FOR_EXPERTS = (
    "its all-to-alls carry {times} the bytes of its peers', so a router sends its experts more "
    "tokens, which may be the reason as well as the device"
)
DATA_OF_REPLICA = (
    "; all other stages of its replica are as slow, and longer data would show the same"
)


ONE_PEER = (
    "with one peer the trace shows that the two differ, not which one is at fault: a second "
    "replica or TP peer, a trace from before the slowdown, or a GEMM benchmark on both decides"
)


@dataclass(frozen=True, kw_only=True)
class Case(Suspicion):
    """A slow row as it is judged, with all that its search found; rows found slow are excluded."""

    inquiry: Inquiry
    found: ComputeSearch
    slow: SlowRow

    @classmethod
    def of(cls, inquiry: Inquiry, found: ComputeSearch, slow: SlowRow) -> Case:
        """Return the case of one of the rows that a search found."""
        course = slow.suspect.course
        return cls(
            seen=inquiry.seen,
            excluded=found.slow_rows,
            row=slow.suspect.row,
            active=course.active,
            effect=course.effect,
            inquiry=inquiry,
            found=found,
            slow=slow,
        )

    @cached_property
    def levels(self) -> Floats:
        """Return by how much each rank is slower than its peers all over the window, (row,) log."""
        return robust.median(self.found.residuals.value, axis=1)

    @property
    def optimizer(self) -> Floats:
        """Return log optimizer time less that of the peers, (row, iteration), while it is slow."""
        return self.found.optimizer[:, self.active]

    @property
    def optimizer_is_slow(self) -> bool:
        """Return whether the row's optimizer step, which no data can lengthen, is slow as well."""
        return optimizer_shows(self.optimizer, self.passes, self.row)

    @cached_property
    def passes(self) -> Slowness:
        """Return how slow every row is meanwhile: with the effect of data left in or taken out,
        whichever is larger.
        """
        seen, residuals, active = self.seen, self.found.residuals, self.active
        effects = np.nan_to_num(robust.median(residuals.value[:, active], axis=1))
        raw = deviations(seen.work, stage_groups(seen.members), self.excluded)
        level = np.nan_to_num(robust.centre(robust.median(raw[:, active], axis=2)))
        attention = attention_residuals(seen, self.excluded)
        return Slowness(
            effects=np.maximum(effects, level),
            slow=self.excluded,
            by_phase=robust.median(residuals.by_phase[:, :, active], axis=2),
            attention=None if attention is None else robust.median(attention[:, active], axis=1),
        )

    @cached_property
    def clock(self) -> tuple[int, str] | None:
        """Return the rank of the row whose clock explains the slowness, and a sentence; None where
        no clock does.
        """
        return slow_clock(self)

    @cached_property
    def longer_step(self) -> LongerStep | None:
        """Return the rank of a row that stands for a TP group whose optimizer step is longer."""
        every = self.seen.workers
        if every is None:
            return None
        from detect.causes.longer_steps import longer_step  # where rows stand for groups

        return longer_step(self, every, self.passes.effects)

    @property
    def is_confirmed(self) -> bool:
        """Return whether the row's clock or its optimizer step, which no data lengthen, is slow."""
        return self.clock is not None or self.optimizer_is_slow


@dataclass(frozen=True)
class Decision:
    """Whether the slow row's node is at fault; `because` is a sentence either way."""

    decided: bool
    because: str


def even_data(case: Case) -> str:
    """Return why the data of a slow rank are as long as those of its peers, as a sentence; empty
    where that is not known, and on CPUs, whose cores processes share.
    """
    seen, members, row = case.seen, case.seen.members, case.row
    if members.device_kind == "cpu":
        return ""
    alone = int((members.replica == members.replica[row]).sum()) == 1
    tokens = seen.tokens_of(row)
    gets_no_more = tokens is not None and tokens[0] <= tokens[1]
    if (seen.rules_data_out or gets_no_more) and alone:
        return EVEN
    for same_data in (mates_of(members, row), np.flatnonzero(members.other_stages(row))):
        if len(same_data) and case.excluded[same_data].all():
            return ""  # all ranks with the same documents are slow: hardly all their devices
    return (
        spares_lookups(case)
        or shares_its_memory(case)
        or (SPARES_MEMORY if _spares_memory(case) else "")
    )


def longer_data(case: Case) -> tuple[Owner, str] | None:
    """Return whose doing it is that a row which gets more tokens than its peers is slow, with a
    sentence; None where it gets no more, where nobody recorded how many, and where it is not slow
    all the time: its passes always get as many.

    Most of a pass takes time in proportion to its tokens, attention to the square of their number:
    n times the tokens explain passes that take up to n^2 times as long. Beyond that, or where the
    optimizer step, which no data can lengthen, is slower as well, the device may be slow besides.

    Example: 2,560 tokens against 2,048, 1.25 times as many, explain up to 1.56 times the time; a
    fused attention takes 1.26 times, one that writes its scores to memory 1.44 times.
    """
    tokens = case.seen.tokens_of(case.row)
    if tokens is None or not tokens[0] > tokens[1] or not case.active.all():
        return None
    own, theirs = tokens
    words = (
        f"each of its passes gets {own:,} tokens, those of its peers {theirs:,.0f} "
        f"({times(own / theirs)} as many)"
    )
    explained = DEVICE.most_token_power * float(np.log(own / theirs))
    if case.optimizer_is_slow:
        level = float(np.exp(robust.centre(case.optimizer[case.row])))
        return Owner.UNDECIDED, (
            f"{words}, but its optimizer step, which no data can lengthen, takes {times(level)} "
            "the time of its peers': a slow device, besides, may be part of the reason"
        )
    if case.effect > explained + case.slow.suspect.course.standard_error:
        return Owner.UNDECIDED, (
            f"{words}, which explains at most {times(float(np.exp(explained)))} the time: a slow "
            "device, besides, may be part of the reason"
        )
    return Owner.JOB, f"{words}, which explains it: no device need be slow"


def more_tokens_for_experts(case: Case) -> str:
    """Say that a router sends the experts of a slow rank more tokens than those of its peers, as
    its all-to-alls tell, whatever the layout says; empty where they carry no more, where sizes are
    those of buffers, the same for all, and where attention, optimizer or clock tell of the device.

    Example: a rank's all-to-alls carry 1.62 times the bytes of its peers', and its passes take 1.25
    times as long. Beside a clock that is 1.25 times lower they carry 0.97 to 1.03 times as many.
    """
    seen, row = case.seen, case.row
    if seen.exchanged_bytes is None or case.clock is not None:
        return ""
    over = over_others(seen.exchanged_bytes, stage_groups(seen.members), case.excluded)
    level = robust.centre(over[:, case.active])
    usual = level[~case.excluded & np.isfinite(level)]
    spread = float(np.sqrt(np.mean(usual**2))) if len(usual) else 0.0
    if not level[row] >= max(PAIRS.agrees_share * case.effect, DEVICE.sure_sigmas * spread):
        return ""
    share = DEVICE.optimizer_share_of_experts
    if case.passes.is_beyond_experts(row) or optimizer_shows(
        case.optimizer, case.passes, row, share
    ):
        return ""
    return MORE_FOR_EXPERTS.format(times=times(float(np.exp(level[row]))))


def _spares_memory(case: Case) -> bool:
    """Return whether nearly all products of matrices are slow in both passes, and what is bound by
    memory is not, in nearly any part. Slow attention alone is not enough: its documents may be
    longer, which leave alone what lies outside passes, where these are not told.
    """
    seen, kinds = case.seen, case.seen.boundness
    least = PAIRS.min_effect_log if case.slow.num_peers == 1 else KERNELS.least_log
    if kinds is None or seen.may_have_stages or case.effect < least:
        return False  # larger matrices of another stage, or what sound devices differ by
    groups = stage_groups(seen.members)
    matrix, memory = (
        robust.median(deviations(work, groups, case.excluded)[case.row][case.active], axis=0)
        for work in (kinds.matrix, kinds.memory)
    )
    is_slow = matrix >= PAIRS.agrees_share * case.effect
    parts = [np.isfinite(matrix) & (kinds.matrix.phase == phase) for phase in (FORWARD, BACKWARD)]
    all_parts = all(is_slow[one].mean() >= SPELLS.parts_share for one in parts if one.any())
    known = memory[np.isfinite(memory)]
    if not all_parts or not len(known):
        return False
    most = float(np.quantile(known, DEVICE.slow_parts_quantile))
    return most < PAIRS.agrees_share * float(robust.median(matrix))


def ordinary_difference(case: Case) -> str:
    """Return why the node need not be at fault, as a sentence; empty where it must be."""
    where = _of_position(case)
    if where:
        return f"{where}: that may be the work of the place as well as the device"
    is_pair, effect = case.slow.num_peers == 1, case.effect
    small = ORDINARY.small_floors * float(np.log(case.inquiry.settings.min_slowdown))
    lasts = float(np.mean(case.active)) >= ORDINARY.mostly_share
    if is_pair and effect < small and (lasts or len(case.slow.suspect.course.episodes) > 1):
        return "two sound devices may differ by as much, and it has one peer only"
    if not lasts:
        return ""
    if few := _as_one_of_few(case, small):
        return few
    if effect < small or (is_pair and effect < PAIRS.min_effect_log):
        largest = distances_explain(case, small)
        if largest is not None:
            return (
                f"the other ranks, too, lie up to {np.expm1(largest):.1%} off their peers: this "
                "one may be no more than the slowest of sound devices"
            )
    return "" if is_pair else _within_spread(case)


def _as_one_of_few(case: Case, small: float) -> str:
    """Say that a row is slow by no more than sound devices may be, `small` (log) or a little more,
    and is one of so few ranks that nothing shows by how much these devices differ. Empty where
    there are more, or its clock confirms more than a `small` slowdown, or its optimizer (of a rank
    that is little slower, only if that of no other slow rank is as slow).

    Examples: three replicas at 0, 0.2 and 8 %, since of chips that differ by 5 % two may be alike.
    Four at 0, 1, 6.5 and 7.5 %: the third is no peer of the fourth, since it is slow itself, and
    the other two happen to be alike.
    """
    num_peers = case.slow.num_peers
    most = max(small, float(np.log(ORDINARY.little_ratio)))
    if num_peers >= ORDINARY.min_peers or case.effect >= most:
        return ""
    few_peers = f"sound devices may differ by as much, and it has {num_peers} peers only"
    is_short = len(case.seen.iterations) < case.inquiry.settings.min_iterations
    if case.effect < small or is_short:
        return few_peers
    others = [one.optimizer for one in case.found.slow if one.suspect.row != case.row]
    # chips that differ do so in steps as well, up to some size
    differ_alike = case.effect < np.log(ORDINARY.steps_alike_ratio) and any(
        one >= PAIRS.agrees_share * case.slow.optimizer for one in others
    )
    if case.clock is not None or (case.is_confirmed and not differ_alike):
        return ""
    if others:
        gaps = np.concatenate(_gaps_by_stage(case))
        if np.isfinite(gaps).sum() >= ORDINARY.min_pairs:
            return ""
        return (
            f"it has {counted(num_peers, 'peer')} only, and another of so few ranks is slow "
            "as well: these devices may differ by as much and be sound"
        )
    num_known = int(np.isfinite(case.levels).sum())
    is_pair = num_peers < ORDINARY.min_peers - 1  # the rules for pairs decide
    return few_peers if num_known < ORDINARY.min_ranks and not is_pair else ""


def distances_explain(case: Case, small: float) -> float | None:
    """Return the largest distance of another rank from its peers, log; None where the slowdown
    stands out from these distances. Ranks that are slower by `small` or more are left out.

    Few ranks may happen to be alike: the quantile of Student's t that says how far one more strays
    from so many others is 7.5 root mean squares for three of them, and 4.5 for six.
    """
    found = case.found
    large = [one.suspect.row for one in found.slow if one.suspect.course.effect >= small]
    others = ~mask_of([*large, case.row], len(case.excluded))
    if case.slow.num_peers == 1:  # the only peer is as far off, the other way
        others[case.slow.peers] = False
    levels = np.abs(case.levels[others])
    levels = levels[np.isfinite(levels)]
    if len(levels) < min(case.slow.num_peers, 2):  # one rank of another pair tells what both would
        return None
    square, largest = float(np.mean(levels**2)), float(levels.max())
    most = few_factor(len(levels)) * min(
        ORDINARY.rms_factor * np.sqrt(square), ORDINARY.largest_factor * largest
    )
    return None if case.effect >= _lasting(found, square) * most else largest


def few_factor(number: int) -> float:
    """Return how many times further one more of so few sound ranks may stray than of many."""
    if not number:
        return 1.0
    return max(1.0, float(special.stdtrit(number, ORDINARY.sound_share)) / ORDINARY.rms_factor)


def _within_spread(case: Case) -> str:
    """Say that devices of this job differ by so much that a sound one may be as slow; empty where
    the row stands out from them, or its clock was read to be low.
    """
    spread = _spread_of_devices(case)
    stands_out = case.effect >= min(ORDINARY.rms_factor * spread, ORDINARY.most_log)
    if stands_out or case.clock is not None:
        return ""
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


def _spread_of_devices(case: Case) -> float:
    """Return sigma of the levels of ranks of one stage, log, from the quarter of all their pairs
    that are nearest to each other: of all stages, or of the row's own where that is more.

    Sound devices of one job may all differ by some per cent. Taking out the slowest, one by one,
    would leave those that happen to be alike. Pairs have no centre that slow ranks could move, and
    up to half of the ranks may be slow by any amount (the estimator Qn of Rousseeuw and Croux,
    1993). Example: levels 0, 1, 5 and 9 % make pairs 1, 4, 4, 5, 8 and 9 % apart, a quarter of
    which lie within 1 %: sigma is 1 / 0.45 = 2 %.
    """
    gaps, groups = _gaps_by_stage(case), stage_groups(case.seen.members)
    own = gaps[next(place for place, rows in enumerate(groups) if case.row in rows)]
    pairs, known = np.concatenate(gaps), case.levels[np.isfinite(case.levels)]
    sigma = max(_sigma_of_pairs(pairs), _sigma_of_pairs(own))
    if len(known) >= ORDINARY.min_ranks and len(pairs) < ORDINARY.few_pairs:
        sigma = min(sigma, float(robust.spread(known)))  # of two stages of four, three may be slow
    return sigma * _lasting(case.found, sigma**2)


def _gaps_by_stage(case: Case) -> list[Floats]:
    """Return how far the levels of two ranks of a stage are apart, (pair,) log for each stage; NaN
    where one of them is not known.
    """
    return [
        np.abs(np.subtract.outer(case.levels[rows], case.levels[rows]))[
            np.triu_indices(len(rows), 1)
        ]
        for rows in stage_groups(case.seen.members)
    ]


def _sigma_of_pairs(gaps: Floats) -> float:
    """Return sigma of levels whose pairs are `gaps` apart, (pair,); 0 where too few are known."""
    known = gaps[np.isfinite(gaps)]
    if len(known) < ORDINARY.min_pairs:
        return 0.0
    nearest = np.quantile(known, ORDINARY.nearest_share, method="lower")
    share = ORDINARY.few_pairs_share if len(known) < ORDINARY.few_pairs else 1.0
    return share * float(nearest) / ORDINARY.nearest_sigmas


def _of_position(case: Case) -> str:
    """Return how the rank's place within its replica may explain its slowness; empty where it does
    not.

    It may if all ranks of the place, in the job or in the stage, are slow alike, by a little or
    without a slow optimizer; or it by a little, and all others by any amount. If the place occurs
    only once, it must be the first.
    """
    members, row = case.seen.members, case.row
    number = members.numbered("tp", "cp", "ep")
    same = number == number[row]
    is_little = case.effect < ORDINARY.position_reach_log
    if same.all() or not case.active.all():
        return ""
    if not is_little and case.optimizer_is_slow:
        return ""
    if int(same.sum()) == 1:
        is_first = all(int(members.place[axis][row]) == 0 for axis in ("tp", "cp", "ep"))
        words = "it is the first rank of the job's only TP group, which loads and logs"
        return words if is_little and is_first else ""
    if is_little and case.excluded[same].all():
        return (
            "the other ranks at its place are slow as well, and show no more what the place takes"
        )
    effects = np.zeros(len(members))
    for one in case.found.slow:
        effects[one.suspect.row] = one.suspect.course.effect
    of_stage = same & (members.stage == members.stage[row])
    alike = any(
        int(rows.sum()) > 1
        and float(effects[rows].min()) >= ORDINARY.alike_share * float(effects[rows].max())
        for rows in (same, of_stage)
    )
    return "the ranks at its place in all TP groups are slow alike" if alike else ""


def decide_pair(case: Case) -> Decision:
    """Judge a slow row that has a single peer."""
    members, row = case.seen.members, case.row
    rows = members.rows_of_stage(int(members.stage[row]))
    peer = int(rows[rows != row][0])
    if members.devices[row] != members.devices[peer]:
        return Decision(False, "the two ranks run on different device models, which may differ")
    by_pool = _by_pool(case, peer)
    if by_pool is not None:
        return by_pool
    why = (
        _by_history(case, peer)
        or _by_same_data(members, row, peer)
        or _by_other_stages(case)
        or _by_optimizer(case)
        # by at least what two sound ones differ by, which `ordinary_difference` has checked
        or even_data(case)
    )
    return Decision(True, why) if why else Decision(False, ONE_PEER)


def _by_pool(case: Case, peer: int) -> Decision | None:
    """Judge by the layers of all stages; None where they do not tell."""
    pool, row, effect = case.found.pool, case.row, case.effect
    if pool is None or (case.seen.members.layout.ep > 1 and not case.passes.is_beyond_experts(row)):
        return None  # each stage's experts get other tokens
    level = robust.median(pool.value[:, case.active], axis=1)
    own, other = float(level[row]), float(level[peer])
    if not np.isfinite(own + other):
        return None
    words = (
        f"against the transformer layers of all stages it is {np.exp(own):.2f}x, its peer "
        f"{np.exp(other):.2f}x"
    )
    if own >= PAIRS.agrees_share * effect and other < PAIRS.agrees_share * effect:
        if _other_stages_differ_alike(case.seen.members, level, row, peer, effect):
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


def _by_history(case: Case, peer: int) -> str:
    if (~case.active).sum() < PAIRS.min_normal_iterations:
        return ""
    level = robust.median(case.seen.work.log_ns, axis=2)
    rise = robust.median(level[:, case.active], axis=1)
    rise = rise - robust.median(level[:, ~case.active], axis=1)
    own, other = float(rise[case.row]), float(rise[peer])
    if not own > PAIRS.agrees_share * case.effect > abs(other):
        return ""
    return (
        f"its own compute time rose to {np.exp(own):.2f}x while its peer's stayed at "
        f"{np.exp(other):.2f}x"
    )


def _by_same_data(members: Members, row: int, peer: int) -> str:
    if members.tensor_group[row] != members.tensor_group[peer] or members.layout.ep > 1:
        return ""
    return "it and its peer share every microbatch (TP) and split the layers evenly"


def _by_other_stages(case: Case) -> str:
    members, active = case.seen.members, case.active
    others = members.other_stages(case.row) & ~case.excluded
    if not others.any() or members.layout.ep > 1:  # each stage's experts get other tokens
        return ""
    levels = robust.median(case.found.residuals.value[others][:, active], axis=1)
    elsewhere = float(robust.median(levels))
    if not np.isfinite(elsewhere) or elsewhere > PAIRS.elsewhere_share * case.effect:
        return ""
    return (
        f"the other stages of its replica work on the same data at {np.exp(elsewhere):.2f}x of the "
        "other replica, so the data are not the reason"
    )


def _by_optimizer(case: Case) -> str:
    slow, effect = case.slow, case.effect
    low, high = PAIRS.agrees_share * effect, PAIRS.max_phase_ratio * effect
    agree = all(low <= phase <= high for phase in slow.by_phase)
    if not agree or effect < PAIRS.min_effect_log or case.seen.members.layout.ep > 1:
        return ""
    if not slow.optimizer >= max(DEVICE.optimizer_share * effect, PAIRS.min_optimizer_log):
        return ""
    return (
        f"the optimizer step, which no data can lengthen, is {np.exp(slow.optimizer):.2f}x as well"
    )
