"""What else may make a rank look slow: chips that differ, its place, or a single peer.

    Case                   a slow row, as it is judged here and in `compute_owner.py`
    ordinary_difference    slow by so little, or in such a place, that no node need be at fault
    decide_pair            with one peer: which of the two
    even_data              why longer data are not the reason
    more_tokens_for_experts    whether a router sends more of them to one rank
    longer_data            whether they are, where tokens were counted

Ordinary. Two sound chips differ by a per cent or two, and the first rank of a TP group has duties
of its own. A rank may then be slower than its peers beyond doubt, and its node be as good as any.
What the other ranks show among themselves tells how much is ordinary:

* few ranks may happen to be alike: beside two or three peers what is known of chips of one model
  counts for as much as they do, and a rank must be slower than one more sound chip may be
  (`reach_of_sound`: 8.5 % of two, 4.9 % of three, 2.2 % of four that are alike). A low clock says
  nothing else, chips that differ differ in it; a slow optimizer step does from 8 % on;
* a small slowdown counts where it exceeds 4.5 times the root mean square of the other ranks'
  distances from their peers, or 3 times the largest, less what noise in time explains; ranks that
  are slow by as little are among the others;
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

from collections.abc import Sequence
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
    spares_lookups,
)
from detect.causes.finding import Inquiry
from detect.causes.readings import held_down, slow_clock
from detect.causes.searches import ComputeSearch, SlowRow
from detect.observe.machines import CLOCK_NAME
from detect.observe.members import Members
from detect.observe.operations import BACKWARD, FORWARD
from detect.report import Owner
from detect.stats import robust
from detect.stats.residuals import deviations, stage_groups
from detect.text import counted, times
from detect.thresholds.devices import DEVICE, ORDINARY, PAIRS, SPELLS
from detect.thresholds.observing import KERNELS
from megascan.arrays import Floats, Integers, mask_of

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

    @cached_property
    def pool_levels(self) -> Floats:
        """Return by how much each rank's layers are slower than those of all stages while the row
        is slow, (row,) log; NaN where these were not compared.
        """
        pool = self.found.pool
        if pool is None:
            return np.full(len(self.levels), np.nan)
        return robust.median(pool.value[:, self.active], axis=1)

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
        return slow_clock(self.seen, self.excluded, self.row, self.effect)

    @cached_property
    def longer_step(self) -> LongerStep | None:
        """Return the rank of a row that stands for a TP group whose optimizer step is longer."""
        every = self.seen.workers
        if every is None:
            return None
        from detect.causes.longer_steps import longer_step  # where rows stand for groups

        return longer_step(self, every, self.passes.effects)

    @cached_property
    def longer_host(self) -> tuple[tuple[int, ...], float] | None:
        """Return the ranks of a host that alone of a TP group have longer optimizer steps, and by
        how much, log.
        """
        every = self.seen.workers
        if every is None:
            return None
        from detect.causes.longer_steps import longer_host

        return longer_host(self, every)

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
    if (seen.rules_data_out or gets_no_more) and (alone or not seen.holds_waiting):
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
    # what sound devices differ by was asked before (`ordinary_difference`)
    if kinds is None or seen.may_have_stages or case.effect < KERNELS.least_log:
        return False  # larger matrices of another stage
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
    if as_sound := _as_sound_devices(case, small):
        return as_sound
    if effect < small:
        largest = distances_explain(case, small)
        if largest is not None:
            return (
                f"the other ranks, too, lie up to {np.expm1(largest):.1%} off their peers: this "
                "one may be no more than the slowest of sound devices"
            )
    return "" if is_pair else _within_spread(case)


def _as_sound_devices(case: Case, small: float) -> str:
    """Say that a row is slow all over the window by no more than one more sound device may be
    beside so many others; empty where it is slower than that, became slow itself, or is held down.

    A low clock shows that it is the device, not that the device is faulty: chips that differ differ
    in clocks, and by less than `steps_alike_ratio` in optimizer steps as well.
    """
    if _is_slow_in_steps(case):
        return ""
    places, num_beside = _beside(case, small)
    level = case.effect
    if _compares_with_pool(case):
        level = min(level, float(_levels(case)[case.row]))
    reach = reach_of_sound(places, num_beside, of_slowest=True)
    if level >= reach or _is_held_down(case) or _became_slow(case):
        return ""
    slower, others = times(float(np.exp(reach))), counted(sum(map(len, places)), "rank")
    shown = (
        f"beside {others} that show how they differ here one more may be {slower} slower"
        if max(map(len, places)) > 1
        else f"one of two may be {slower} slower, and no other ranks show how they differ here"
    )
    return f"sound devices may differ by as much: {shown}, its clock with it"


def _is_slow_in_steps(case: Case) -> bool:
    """Return whether the optimizer step is half as slow as the passes and more, by more than sound
    chips are: such a step moves memory, which the clock of a slower chip hardly lengthens. For one
    of two that is said from larger slowdowns on (`decide_pair`).

    Example: of four chips two are 1.09 and 1.11 times slower, their steps 1.004 and 1.014 times.
    """
    is_large = case.effect >= float(np.log(ORDINARY.steps_alike_ratio))
    if case.slow.num_peers == 1 or not is_large or not case.optimizer_is_slow:
        return False
    in_steps = float(robust.centre(case.optimizer[case.row]))
    return in_steps >= PAIRS.agrees_share * case.effect


def _became_slow(case: Case) -> bool:
    """Return whether a row itself became slow inside the window, or quick, and is slow in each
    iteration since: a few quiet ones among many are what noise and data leave by chance.
    """
    course = case.slow.suspect.course
    is_stretch = len(course.episodes) == 1 and course.share == 1.0
    return is_stretch and bool(_by_history(case, case.slow.peers))


def _is_held_down(case: Case) -> bool:
    """Return whether the clock that explains the slowness is no slower chip's: heat, a brake or a
    setting holds it down and no other, or it stands out from enough others.
    """
    if case.clock is None:
        return False
    rank = case.clock[0]
    return held_down(case.seen, case.excluded, rank) or _clock_stands_out(case, rank)


def _clock_stands_out(case: Case, rank: int) -> bool:
    """Return whether a rank's clock is lower than one more sound device's may be beside those of
    seven others and more, or of three, where it must be as low as no sound one of few was seen.

    Ranks that wait for others inside their passes blur how much devices differ; clocks do not.
    Example: 1575 MHz beside seven of 1725 to 1755, in a job whose experts wait for each other.
    """
    ranks = [one for of_row in case.seen.members.workers for one in of_row]
    clocks = {one: case.seen.counters.get(one, {}).get(CLOCK_NAME, 0.0) for one in ranks}
    own = clocks.pop(rank)
    below = np.log(np.array([one for one in clocks.values() if one > 0]) / own)
    if len(below) < ORDINARY.min_peers:
        return False
    is_few = len(below) < ORDINARY.min_ranks - 1
    least = float(np.log(ORDINARY.steps_alike_ratio)) if is_few else 0.0
    return bool(np.median(below) >= max(least, reach_of_sound([below], len(below))))


def reach_of_sound(places: Sequence[Floats], num_beside: int, *, of_slowest: bool = False) -> float:
    """Return by how much one more sound device may be slower than `num_beside` others, log, where
    ranks of each of some places are known to lie so far off their peers.

    Sound GPUs of one model differ by a sigma of up to 3 % under load, and a job shows by how much
    its own do: before anything was measured sigma is 0.56 % with the weight of one rank; each rank
    beside another says more, and Student's t with as many degrees how far one more may stray. Of
    two ranks that nobody else is compared with, nothing is known but what sound devices are known
    to differ by. `of_slowest` asks how far the slowest of so many may stray, where seven and more
    others show it: one in two hundred sound ones reaches further, and one of sixteen in thirteen.

        one of two                     8.5 %        one of eight, seven of which are alike   0.8 %
        one of three, two alike        4.9 %        of sixteen                               0.4 %
        one of four, three alike       2.2 %        of four, the others of a sigma of 3 %     18 %
    """
    degrees, sigma = _law_of_sound(places, num_beside)
    share = ORDINARY.reach_share
    if of_slowest and num_beside >= ORDINARY.min_ranks - 1:
        share = 1.0 - (1.0 - share) / (num_beside + 1)
    reach = float(special.stdtrit(degrees, share) * sigma)
    is_known = degrees > ORDINARY.usual_weight
    return min(reach, ORDINARY.most_log) if is_known else ORDINARY.most_of_two_log


def chance_of_sound(levels: Floats, own: float) -> float:
    """Return how probable it is, by the law of `reach_of_sound`, that one more sound device lies as
    far below the `levels` of others, (rank,) log, as `own` does.
    """
    degrees, sigma = _law_of_sound([levels], len(levels))
    return float(special.stdtr(degrees, -(levels.mean() - own) / sigma))


def _law_of_sound(places: Sequence[Floats], num_beside: int) -> tuple[float, float]:
    """Return the degrees of freedom, and the sigma, log, of how far one more sound device strays
    from `num_beside` others.
    """
    degrees, squares = ORDINARY.usual_weight, ORDINARY.usual_weight * ORDINARY.usual_log**2
    for levels in places:
        degrees += max(len(levels) - 1, 0)
        squares += float(((levels - levels.mean()) ** 2).sum()) if len(levels) else 0.0
    return degrees, float(np.sqrt(squares / degrees * (1.0 + 1.0 / max(num_beside, 1))))


def _compares_with_pool(case: Case) -> bool:
    """Return whether layers of all stages tell more of a row than its few peers do."""
    return bool(np.isfinite(case.pool_levels[case.row])) and not case.slow.across_stages


def _levels(case: Case) -> Floats:
    """Return by how much each rank is slower than those that it is compared with, (row,) log."""
    return case.pool_levels if _compares_with_pool(case) else case.levels


def _beside(case: Case, small: float) -> tuple[list[Floats], int]:
    """Return how far the ranks of each stage (of all stages, where their layers are compared) lie
    off their peers, log, without the row and without other faults; and how many of them the row is
    compared with.

    Other slow rows are faults where they are slower than sound devices are. Of few ranks they are
    believed to be only if no two sound devices differ so: taken out, the slowest of uneven chips
    leave those that happen to be alike.
    """
    levels = _levels(case)
    together = case.slow.across_stages or _compares_with_pool(case)
    groups = [np.arange(len(levels))] if together else stage_groups(case.seen.members)
    is_few = int(np.isfinite(levels).sum()) < ORDINARY.min_ranks
    least = max(small, PAIRS.min_effect_log) if is_few else small
    sound = np.isfinite(levels) & ~(case.excluded & (levels >= least))
    sound[case.row] = False
    places, num_beside = [], 0
    for rows in groups:
        kept = rows[sound[rows]]
        num_peers = int((~case.excluded[rows]).sum())
        # a rank beside its peers is further off than it is off the centre of all of them
        to_centre = np.where(case.excluded[kept], 1.0, 1.0 - 1.0 / max(num_peers, 1))
        places.append(levels[kept] * to_centre)
        if case.row in rows:
            num_beside = len(kept)
    return places, num_beside


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
    the row, or its clock, stands out from them, or something holds down its clock.
    """
    spread = _spread_of_devices(case)
    least = min(ORDINARY.rms_factor * spread, ORDINARY.most_log)
    shared = _of_its_replica(case)
    stands_out = case.effect - shared >= least
    stands_out |= not shared and _is_beyond_all_others(case)
    if stands_out or _is_held_down(case):
        return ""
    if shared and case.effect >= least:
        return (
            f"the other stages of its replica are as slow, by {np.exp(shared):.2f}x at least, as "
            "longer data would make them, and by what is left sound devices differ"
        )
    return (
        f"ranks of one stage differ by {np.expm1(spread):.1%} (sigma) all over the job: this one "
        "may be no more than the slowest of sound devices"
    )


def _is_beyond_all_others(case: Case) -> bool:
    """Return whether a row is the only one of the job that is slow, and far beyond what all others
    differ by: none was taken out that would show more.
    """
    small = ORDINARY.small_floors * float(np.log(case.inquiry.settings.min_slowdown))
    places, num_beside = _beside(case, small)
    if case.excluded.sum() > 1 or num_beside < ORDINARY.min_peers:
        return False
    level = float(_levels(case)[case.row])
    degrees, sigma = _law_of_sound(places, num_beside)
    chance = (num_beside + 1) * float(special.stdtr(degrees, -min(level, case.effect) / sigma))
    return chance <= ORDINARY.chance_of_lone


def _of_its_replica(case: Case) -> float:
    """Return by how much all ranks of a row's replica are slow at least, its TP mates and those of
    its other stages, log, if by half as much as the row and more: what their data take all of them
    longer, which no chip does; else 0.

    Example: a rank takes 1.09 times the time of its peers, its TP mate 1.07 times, and the ranks of
    their other stages 1.06 to 1.09 times: its chip need not be slower than others by more than 3 %.
    """
    members, row = case.seen.members, case.row
    others = members.replica == members.replica[row]
    others[row] = False
    levels = case.levels[others]
    is_told = members.other_stages(row).any() and bool(np.isfinite(levels).all())
    if not is_told or case.optimizer_is_slow:  # which no data lengthen
        return 0.0
    shared = float(levels.min())
    return shared if shared >= PAIRS.agrees_share * case.effect else 0.0


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
    if any(_are_slow_alike(effects[rows]) for rows in (same, of_stage)):
        return "the ranks at its place in all TP groups are slow alike"
    return ""


def _are_slow_alike(effects: Floats) -> bool:
    """Return whether all ranks of a place are slow by as much, log, 0 where they are not slow.

    Of two, either may be slow for a reason of its own. That all of several faults meet one place is
    no chance, so they need not be as slow as each other. Example: of four TP groups of eight ranks
    the first ones are 1.75, 1.83, 2.32 and 2.55 times slower, and nobody else.
    """
    several = len(effects) >= ORDINARY.several_at_place
    share = PAIRS.agrees_share if several else ORDINARY.alike_share
    return len(effects) > 1 and float(effects.min()) >= share * float(effects.max())


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
        _by_history(case, np.array([peer]))
        or _by_same_data(members, row, peer)
        or _by_other_stages(case)
        or _by_optimizer(case)
        # by at least what two sound ones differ by, which `ordinary_difference` has checked
        or even_data(case)
    )
    return Decision(True, why) if why else Decision(False, ONE_PEER)


def _by_pool(case: Case, peer: int) -> Decision | None:
    """Judge by the layers of all stages; None where they do not tell."""
    row, effect = case.row, case.effect
    has_other_tokens = case.seen.members.layout.ep > 1 and not case.passes.is_beyond_experts(row)
    if case.found.pool is None or has_other_tokens:
        return None  # each stage's experts get other tokens
    level = case.pool_levels
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


def _by_history(case: Case, peers: Integers) -> str:
    """Say that a row itself became slow inside the window, and its peers did not; empty where that
    is not so, or where a router may send its experts more tokens since then.
    """
    members = case.seen.members
    if members.layout.ep > 1 and not case.passes.is_beyond_experts(case.row):
        return ""
    if (~case.active).sum() < PAIRS.min_normal_iterations or not len(peers):
        return ""
    level = robust.median(case.seen.work.log_ns, axis=2)
    rise = robust.median(level[:, case.active], axis=1)
    rise = rise - robust.median(level[:, ~case.active], axis=1)
    own, other = float(rise[case.row]), float(robust.median(rise[peers]))
    if not own > PAIRS.agrees_share * case.effect > abs(other):
        return ""
    return (
        f"its own compute time rose to {np.exp(own):.2f}x while its peer's stayed at "
        f"{np.exp(other):.2f}x"
    )


def _by_same_data(members: Members, row: int, peer: int) -> str:
    if members.tensor_group[row] != members.tensor_group[peer] or members.layout.ep > 1:
        return ""
    axis = "CP" if members.place["cp"][row] != members.place["cp"][peer] else "TP"
    return f"it and its peer share every microbatch ({axis}) and split the layers evenly"


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
    known = [phase for phase in slow.by_phase if np.isfinite(phase)]
    agree = all(low <= phase <= high for phase in known)
    if not agree or effect < PAIRS.min_effect_log or case.seen.members.layout.ep > 1:
        return ""
    if not slow.optimizer >= max(DEVICE.optimizer_share * effect, PAIRS.min_optimizer_log):
        return ""
    return (
        f"the optimizer step, which no data can lengthen, is {np.exp(slow.optimizer):.2f}x as well"
    )
