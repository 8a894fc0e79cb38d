"""Judge a rank's device by more than its passes: is it slow, or given longer data?

Whether it waits for its host is asked in `launching.py`, what its clock says in `readings.py`.

**Is it the device?** A rank's passes are longer than its peers'. Its device may be slow; or its
data are longer (a replica that always gets the longer documents, an expert that everybody wants);
or it waits inside its passes for a mate whose communication is not in the trace.

The optimizer step touches the same parameters whatever the data were, and waits for nobody. On a
device that computes slowly it takes longer, too, though by less (it is bound by memory, which a
lower clock hardly touches). So:

* passes and optimizer slower: the device;
* passes slower, optimizer not, and all ranks that share the data or the hidden communication are
  slow alike: not shown to be the device, and undecided;
* passes slower, optimizer not, but other ranks on the same data are not slow: the device. Nor do
  data explain a TP group that is slow alike while no other stage of its replica is; nor do its
  ranks wait for each other where their communication is taken out, as in the forward passes of
  traces without that of backward ones: who is as slow as the slowest mate there is slow himself;
* passes slower, optimizer not, but all passes got as many tokens (`Observations.rules_data_out`)
  and nobody shares the rank's data, or passes hold no waiting for who does: the device;
* passes slower, optimizer not, but parts whose time grows with the tokens differ: products of
  matrices are slow, and what moves memory for each token is not. More tokens slow both, longer
  documents and more tokens for the experts neither, a lower clock the first: the device;
* where experts do part of the work, more tokens may be routed to one rank's experts: the rank's
  attention, which no routing lengthens, is then compared instead of its passes;
* one rank of a TP group slower than all its mates in the forward or the backward pass, and in both
  slower than other groups: the device, and its mates only wait for it where the trace does not
  show it. Longer data would slow all ranks of the group alike, in both passes.

Example: DP 8. Rank 3's passes take 1.30 times its peers', its optimizer 1.003 times, and the other
ranks' optimizers differ by 0.4 %: 0.003 is less than 8 % of log 1.30, and than 3 times 0.004.
Undecided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from detect.causes.finding import Answer, rows_of_findings
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, Boundness
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.noise import Usual, estimate_noise
from detect.stats.residuals import deviations, stage_groups
from detect.text import milliseconds, times
from detect.thresholds.devices import COMPUTE, DEVICE, ORDINARY, PAIRS
from detect.thresholds.observing import KERNELS
from detect.whatif.traced import joined_groups
from megascan.arrays import Flags, Floats, Integers
from megascan.timeline import rows_alike


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """How slow the passes of all rows are, and which rows were found slow."""

    effects: Floats
    """(row,): log slowdown."""
    slow: Flags
    """(row,)"""
    by_phase: Floats
    """(phase, row): log slowdown of forward and of backward."""
    attention: Floats | None = None
    """(row,): log slowdown of attention, where experts do the rest; None where it is not known."""

    def is_beyond_experts(self, row: int) -> bool:
        """Return whether the attention of a row is about as slow as its passes: neither more tokens
        for the row's experts nor waiting for other experts lengthens attention.
        """
        if self.attention is None:
            return False
        return bool(self.attention[row] >= PAIRS.agrees_share * self.effects[row])


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A row that is slow, of which more than whole passes is compared with its peers."""

    seen: Observations
    excluded: Flags
    """(row,): rows that are nobody's peers."""
    row: int
    active: Flags
    """(iteration,): those in which the row is slow."""
    effect: float
    """Log slowdown of the row."""

    def slower_products(self) -> float:
        """Return by how much the row's products of matrices are slower than those of the others of
        its stage, log; NaN where none were recorded.
        """
        if self.seen.tokenwise is None:
            return np.nan
        groups = stage_groups(self.seen.members)
        over = over_others(self.seen.tokenwise.dense_ns, groups, self.excluded)
        return float(robust.centre(over[:, self.active][self.row]))

    def lookups_over(self, groups: list[Integers]) -> list[Floats]:
        """Return log time of each kind of lookup that is long enough to tell less that of the
        others of each row's group, (row, active iteration) each.

        A lookup that is short takes as long as its launch, whatever the number of tokens.
        """
        if self.seen.tokenwise is None:
            return []
        lookups_ns = self.seen.tokenwise.lookups_ns
        lengths = robust.median(lookups_ns[self.row][self.active], axis=0)
        return [
            over_others(lookups_ns[:, :, kind], groups, self.excluded)[:, self.active]
            for kind in np.flatnonzero(lengths >= DEVICE.least_lookup_ns)
        ]


def not_shown(
    seen: Observations, optimizer: Floats, passes: Slowness, row: int, *, more_tokens: bool
) -> str | None:
    """Return why the slowness of `row` is not shown to be its device's, None where it is.

    `optimizer` (row, iteration) is the optimizer step's log time less that of the row's peers, in
    the iterations in which the row is slow. `more_tokens` says that its lookups follow
    (`lookups_follow`): then a slow device slows its optimizer by as much as them.
    """
    no_experts = passes.is_beyond_experts(row)
    has_experts = seen.members.layout.ep > 1 and not no_experts
    # tokens routed to its experts may explain the passes, and an ordinary difference of chips a
    # small share in the optimizer: so a larger share must show
    share = PAIRS.agrees_share if more_tokens else DEVICE.optimizer_share
    if has_experts and not more_tokens:
        share = min(
            DEVICE.optimizer_share_of_experts,
            max(share, DEVICE.most_step_of_chips_log / max(float(passes.effects[row]), 1e-9)),
        )
    shows = optimizer_shows(optimizer, passes, row, share)
    shows &= not _waits(seen, optimizer, passes, row)
    shows &= not _is_replicas(seen, optimizer, passes, row)
    if shows or is_isolated(seen.members, passes, row, beside=np.median):
        return None
    level = float(robust.centre(optimizer[row]))
    alike = np.array([row]) if has_experts else _slow_on_the_same_data(seen, passes, row)
    if not len(alike) or (not has_experts and _is_slow_in_its_group(seen, passes, row)):
        return None
    words = "its optimizer step, which no data can lengthen, was not recorded"
    if np.isfinite(level):
        words = (
            "its optimizer step, which no data can lengthen, takes "
            f"{np.exp(level):.2f}x the time of its peers'"
        )
    if has_experts:
        return f"{words}: tokens routed to its experts may be the reason as well as the device"
    if len(alike) > 1 and len(np.unique(seen.members.stage[alike])) == 1:
        return (
            f"{words}, and all ranks of its TP group are slow alike: waiting for a mate that the "
            "trace does not show, or their data, may be the reason as well as a device"
        )
    return f"{words}: longer data may be the reason as well as the device"


def _is_slow_in_its_group(seen: Observations, passes: Slowness, row: int) -> bool:
    """Return whether a row of a TP group that is slow alike is so by itself: no other stage of its
    replica is slow, and both of its passes are as slow as those of the slowest mate.

    Example: two of four mates take 1.17 times as long forward, the others 1.04 times, and all four
    1.17 times backward, where they wait for each other unseen. Stages before and behind: 1.00.
    """
    members, effects = seen.members, np.nan_to_num(passes.by_phase)
    elsewhere = passes.effects[members.other_stages(row)]
    if seen.hidden_axes or not len(elsewhere):
        return False
    least = PAIRS.least_as_mate * effects[:, [row, *mates_of(members, row)]].max(axis=1)
    is_alone = float(elsewhere.max()) <= PAIRS.elsewhere_share * passes.effects[row]
    return is_alone and bool((effects[:, row] >= least).all())


def optimizer_shows(
    optimizer: Floats, passes: Slowness, row: int, share: float = DEVICE.optimizer_share
) -> bool:
    """Return whether the optimizer of `row` is slower as on a slow device: by at least a `share` of
    what the row's passes are slower by, and by hardly more than they are.
    """
    level = float(robust.centre(optimizer[row]))
    if not np.isfinite(level):
        return False
    effect, error = float(passes.effects[row]), _level_error(optimizer, passes.slow, row)
    least = max(share * effect, DEVICE.sure_sigmas * error)
    return least <= level <= effect + DEVICE.most_optimizer_log


def _is_replicas(seen: Observations, optimizer: Floats, passes: Slowness, row: int) -> bool:
    """Return whether most ranks of the replica's other stages, at least two, are slow alike (beside
    one other replica only, all of its TP mates), and none of their optimizers is: longer data
    explain all of them, while the one optimizer of `row` may be slow by chance. On three hosts and
    more their optimizers need not be asked: so many devices are not slow alike, but all may wait in
    this step for the longest.

    Example: of two replicas four mates take 1.31 and 1.32 times as long, and their steps 1.03,
    1.00, 1.00 and 1.00.
    """
    rows = stages_alike(seen.members, passes.effects, row)
    if _shares_with_slow_stage(seen.members, optimizer, passes, row):
        return True
    if len({seen.members.hosts[one] for one in (row, *rows)}) >= DEVICE.min_hosts_of_replica:
        return True
    return any(
        len(alike) > 1 and not any(optimizer_shows(optimizer, passes, one) for one in alike)
        for alike in (rows, _mates_alike(seen.members, passes, row))
    )


def _shares_with_slow_stage(
    members: Members, optimizer: Floats, passes: Slowness, row: int
) -> bool:
    """Return whether a row is a little slow, and another stage of its replica by half as much or
    more, whose optimizer is not: then longer data explain most of both, and chips the rest.

    Example: two stages of one of four replicas take 1.04 and 1.06 times as long, and their steps
    1.00 and 1.02 times.
    """
    effect = float(passes.effects[row])
    others = np.flatnonzero(members.other_stages(row) & passes.slow)
    return effect < np.log(ORDINARY.little_ratio) and any(
        passes.effects[one] >= PAIRS.agrees_share * effect
        and not optimizer_shows(optimizer, passes, one)
        for one in others.tolist()
    )


def _mates_alike(members: Members, passes: Slowness, row: int) -> list[int]:
    """Return the row's TP mates if all of them are slow alike, beside one other replica only."""
    mates = mates_of(members, row)
    others = members.rows_of_stage(int(members.stage[row]))
    others = others[~passes.slow[others]]
    is_alike = (passes.effects[mates] >= DEVICE.alike_share * passes.effects[row]).all()
    is_pair = len(np.unique(members.replica[others])) < 2
    return mates.tolist() if is_alike and is_pair else []


def stages_alike(members: Members, effects: Floats, row: int) -> list[int]:
    """Return the rows of the replica's other stages that are slow alike, by `effects` (row,), if
    most of them are; none otherwise.
    """
    others = members.other_stages(row)
    alike = others & (effects >= DEVICE.alike_share * effects[row])
    is_most = alike.sum() >= DEVICE.alike_share * others.sum()
    return np.flatnonzero(alike).tolist() if is_most else []


def _waits(seen: Observations, optimizer: Floats, passes: Slowness, row: int) -> bool:
    """Return whether `row` may only wait, inside its passes, for a slow rank it exchanges with.

    That rank is slow alike, and its optimizer is slower, relative to its passes, by more than twice
    as much as that of `row`. Ranks of an EP group exchange tokens inside passes (and do not count
    where attention is as slow as the passes); ranks of a TP group exchange whatever was not
    recorded, if anything, and a rank that waits for a mate is as slow as the mate. Where two mates
    and more are as slow, one of them at most is the reason: then `row` may wait for any whose
    optimizer is slower by half as much as its own, or more.
    """
    members, effects = seen.members, passes.effects
    rivals = np.zeros(len(members), dtype=bool)
    if not passes.is_beyond_experts(row):
        group = members.layout.group(int(members.ranks[row]), "ep")
        rivals = np.isin(members.ranks, group)
        rivals &= effects >= PAIRS.agrees_share * effects[row]
    alike = np.zeros(len(members), dtype=bool)
    if seen.holds_waiting:
        alike = _wait_together(seen, passes, row) & passes.slow
        alike &= np.abs(effects - effects[row]) <= DEVICE.alike_log_share * effects[row]
    rivals = (rivals & passes.slow) | alike
    rivals[row] = False
    share = robust.centre(optimizer) / np.maximum(effects, DEVICE.least_isolated_log)
    most = float(np.nanmax(share[rivals], initial=-np.inf))
    of_mates = float(np.nanmax(share[alike], initial=-np.inf))
    is_one_of_them = int(alike.sum()) > 1 and of_mates > PAIRS.agrees_share * share[row]
    return bool(share[row] < PAIRS.agrees_share * most or is_one_of_them)


def _wait_together(seen: Observations, passes: Slowness, row: int) -> Flags:
    """Flag the other ranks for which a row may wait unseen in its passes, (row,): its TP mates, and
    all that exchange tokens for experts with these where nobody recorded that.
    """
    members = seen.members
    group = members.tensor_group
    if "ep" in seen.hidden_axes and not passes.is_beyond_experts(row):
        group = joined_groups(members.layout, members.ranks, seen.hidden_axes)
    together = group == group[row]
    together[row] = False
    return np.asarray(together)


def optimizer_residuals(seen: Observations, groups: list[Integers], excluded: Flags) -> Floats:
    """Return log optimizer time less that of the others of each row's group, (row, iteration)."""
    return over_others(seen.optimizer_ns, groups, excluded)


def attention_residuals(seen: Observations, excluded: Flags) -> Floats | None:
    """Return log attention time less that of the others of each row's stage, (row, iteration);
    None where attention was not traced, or where there is no expert parallelism, and where TP or CP
    ranks wait for each other in it unseen: for one whose experts are busy, too.
    """
    holds_waits = not {"tp", "cp"}.isdisjoint(seen.hidden_axes)
    if seen.attention_ns is None or holds_waits or seen.members.layout.ep < 2:
        return None
    return over_others(seen.attention_ns, stage_groups(seen.members), excluded)


def over_others(time_ns: Floats, groups: list[Integers], excluded: Flags) -> Floats:
    """Return log time less that of the others of each row's group, (row, iteration)."""
    return beyond_others(robust.log_of(time_ns), groups, excluded)


def beyond_others(value: Floats, groups: list[Integers], excluded: Flags) -> Floats:
    """Return values less those of the others of each row's group, (row, iteration); NaN where there
    are none.
    """
    beyond = np.full_like(value, np.nan)
    for rows in groups:
        beyond[rows] = value[rows] - robust.expected_from_others(value[rows], excluded[rows])
    return beyond


def spares_lookups(of: Suspicion) -> str:
    """Say that products of matrices are as slow as the row, and what moves memory for each token is
    not, so that data cannot be the reason; empty where that is not so, or not known.

    Example: a clock that is 1.3 times lower. MLPs and the output layer take 1.29 times the time of
    the peers', the embedding, 210 us, 1.08 times. A replica with 1.12 times the tokens shows 1.12
    in both; one whose documents are longer, in as many tokens, 1.00 in both and 1.16 in attention.
    """
    level = of.slower_products()
    if not level >= PAIRS.agrees_share * of.effect:
        return ""
    most = [
        float(robust.centre(over[of.row]))
        + DEVICE.sure_sigmas * _level_error(over, of.excluded, of.row)
        for over in of.lookups_over(stage_groups(of.seen.members))
    ]
    if not most or not max(most) < PAIRS.agrees_share * level:
        return ""
    slowest = float(np.exp(max(most)))
    return SPARES_LOOKUPS.format(dense=times(float(np.exp(level))), lookups=times(slowest))


def lookups_follow(of: Suspicion) -> bool:
    """Return whether products of matrices are as slow as the row, and its lookups by about as much,
    as more tokens would make them.
    """
    level = of.slower_products()
    lookups = of.lookups_over(stage_groups(of.seen.members))
    least = min((float(robust.centre(over[of.row])) for over in lookups), default=-np.inf)
    return level >= PAIRS.agrees_share * of.effect and least >= DEVICE.alike_share * level


def stands_out_by_lookups(of: Suspicion) -> str:
    """Say that of a TP group one rank alone is slow where it moves memory for each token, which all
    of the group do alike, and in which nobody waits for it as in its layers; empty where that is
    not so, or no other group shows how long it takes.

    Example: both ranks of a group take 1.25 times the time of other groups' in their layers, with
    whatever all-reduces nobody recorded. The embedding of one takes 1.09 times as long as at its
    place in other groups, that of the other 1.002 times.

    Far slower lookups than layers are those of slow memory, which slows the optimizer step as well;
    else they hold waiting: 3.5 times in a loss that adds up over the group, 1.44 in the layers.
    """
    members, row = of.seen.members, of.row
    mates = mates_of(members, row)
    if not len(mates):
        return ""
    groups = rows_alike(members.numbered("pp", "tp", "cp"))
    steps = over_others(of.seen.optimizer_ns, groups, of.excluded)[row, of.active]
    of_memory = float(np.nan_to_num(robust.centre(steps)))
    most = max(PAIRS.max_phase_ratio * of.effect, of_memory / PAIRS.agrees_share)
    levels = []
    for over in of.lookups_over(groups):
        level = np.nan_to_num(robust.centre(over), nan=np.inf)
        own, others = float(level[row]), float(np.abs(level[mates]).max())
        error = _level_error(over, of.excluded, row)
        least = max(DEVICE.least_lookups_share * of.effect, DEVICE.sure_sigmas * error)
        if not (least <= own <= most and others < PAIRS.agrees_share * own):
            return ""
        levels.append(own)
    return OF_GROUP_BY_LOOKUPS.format(times=times(float(np.exp(min(levels))))) if levels else ""


def shares_its_memory(of: Suspicion) -> str:
    """Say that kernels of a profile that only move memory are slow in some parts of a pass and as
    quick as the peers' in others; empty where they are not, or were not recorded.

    Longer data lengthen all layers of a pass alike, if not what lies between passes: nothing is
    said where operators, which tell passes, were not recorded. Another process on the device takes
    it for some time and leaves it for some, in each iteration for others. A busy expert is slow in
    the same parts of all iterations.

    Example: parts of three forward passes beside those of seven peers, log. The device is shared:

        0.00  0.15  0.40  0.12  0.00  0.39  0.41        documents 1.17 times as long:
        0.00  0.30  0.41  0.13  0.00  0.41  0.42        0.15  0.16  0.16  0.15  0.16  0.17
        0.41  0.00 -0.01  0.30  0.00 -0.01  0.00        0.14  0.16  0.15  0.14  0.14  0.16
    """
    kinds, members = of.seen.boundness, of.seen.members
    if kinds is None or members.layout.ep > 1 or not _tells_backward(kinds):
        return ""
    over = deviations(kinds.memory, stage_groups(members), of.excluded)[:, of.active]
    own, sound = over[of.row], np.abs(over[~of.excluded])
    known, known_sound = np.isfinite(own), np.isfinite(sound)
    if not known.any() or not known_sound.any():
        return ""
    high = float(np.quantile(own[known], DEVICE.slow_parts_quantile))
    noise = float(np.quantile(sound[known_sound], DEVICE.slow_parts_quantile))
    quick, slow = own < DEVICE.quick_part_share * high, own > PAIRS.agrees_share * high
    least = DEVICE.least_parts_share * known.sum(axis=1)
    is_divided = (quick.sum(axis=1) >= least) & (slow.sum(axis=1) >= least)
    ever_slow = slow.any(axis=0)
    changes = float(np.mean(quick.any(axis=0)[ever_slow])) if ever_slow.any() else 0.0
    is_clear = noise < DEVICE.quick_part_share * high and high >= KERNELS.least_log
    is_clear &= changes >= DEVICE.least_parts_share
    if not is_clear or np.mean(is_divided) < PAIRS.agrees_share:
        return ""
    return SHARES_MEMORY.format(times=times(float(np.exp(high))))


def _tells_backward(kinds: Boundness) -> bool:
    """Return whether kernels of backward passes were told from others."""
    return bool(np.isfinite(kinds.memory.log_ns[:, :, kinds.memory.phase == BACKWARD]).any())


def is_isolated(
    members: Members, passes: Slowness, row: int, beside: Callable[..., Floats] = np.max
) -> bool:
    """Return whether the row stands out among the ranks that share every microbatch with it (TP,
    CP): `beside` the slowest of them, for which it does not wait then, or the typical one, whose
    passes the same data would lengthen: several mates may be slow by themselves.

    Example: forward passes of four mates take 1.00, 1.00, 1.19 and 1.15 times as long as others',
    backward passes, in which they wait for each other unseen, 1.16 times all.
    """
    mates = mates_of(members, row)
    effects = np.nan_to_num(passes.by_phase)
    own = effects[:, row]
    if members.layout.ep > 1 or not len(mates) or not own.min() > PAIRS.agrees_share * own.max():
        return False
    over = own - beside(effects[:, mates], axis=1)
    least = max(DEVICE.isolated_share * float(own.max()), DEVICE.least_isolated_log)
    return bool(over.max() >= least and over.min() >= -DEVICE.least_isolated_log)


def mates_of(members: Members, row: int) -> Integers:
    """Return the other rows of the row's stage and replica."""
    same = members.tensor_group == members.tensor_group[row]
    same[row] = False
    return np.flatnonzero(same)


def waits_for_slower_mate(members: Members, passes: Slowness, row: int) -> str:
    """Return why a row may only wait for a slower TP mate: in one kind of passes both are slow by
    as much, as mates are that wait for each other unseen, and in the other it is slow by far less.
    Empty where no mate is like that.

    Example: backward passes of two mates take 1.66 times as long, each, and forward passes 1.60 and
    1.21 times: the output layer's reductions are recorded no more than those of backward passes.
    """
    mates = mates_of(members, row)
    for mate in mates[passes.slow[mates]].tolist():
        less, more = np.sort(passes.by_phase[:, row] / np.maximum(passes.by_phase[:, mate], 1e-9))
        if PAIRS.least_as_mate <= more <= 1 / PAIRS.least_as_mate and less < PAIRS.most_apart:
            return (
                f"in one kind of passes rank {members.ranks[mate]} of its TP group is slow by as "
                "much, in the other by far more: waiting for it, where the trace does not show it, "
                "may be the reason as well"
            )
    return ""


def _level_error(residual: Floats, slow: Flags, row: int) -> float:
    """Return the standard error of a row's level in what no fault quickens: its optimizer step, or
    lookups. Slow rows set no scale.

    Take the spread of the other rows' levels, or the noise of the iterations with what is usual,
    whichever is less: three levels may lie far apart by chance, and a starved row's own noise is
    large; and of many levels no less than what they vary by. But slow rows whose optimizer is
    quicker show how far a level may be off.
    """
    usual = Usual(floor=DEVICE.optimizer_error_log, spread=COMPUTE.gpu_spread_log)
    noise = estimate_noise(residual, slow, usual)
    error = float(noise.level_error(residual.shape[1])[row])
    others = robust.centre(residual)[~slow]
    others = others[np.isfinite(others)]
    if len(others) > 1:
        error = min(error, float(np.sqrt(np.mean(others**2))))
    if len(others) >= ORDINARY.min_ranks:
        error = max(error, float(robust.spread(others)))
    quicker = robust.centre(residual)[slow]
    quicker = quicker[quicker < 0]
    if len(quicker):
        error = max(error, float(np.sqrt(np.mean(quicker**2))))
    return max(error, DEVICE.optimizer_error_log)


def _slow_on_the_same_data(seen: Observations, passes: Slowness, row: int) -> Integers:
    """Return rows that long data, or hidden waiting in the TP group, would slow as well as this
    one, if nearly all of them are slow alike; empty otherwise.

    Where nobody recorded what CP ranks send each other, all that are at one CP place wait for the
    one that is behind elsewhere.

        CP 0   sound  SLOW   sound  sound     wait for the slow one where TP ranks meet: recorded
        CP 1   slow   slow   slow   slow      wait in attention for keys and values of CP 0
    """
    members, effect = seen.members, passes.effects[row]
    effects = passes.effects if passes.attention is None else passes.attention
    of_group = members.tensor_group == members.tensor_group[row]
    of_replica = members.replica == members.replica[row]
    places = [of_group if of_group.sum() > 1 else of_replica]
    if "cp" in seen.hidden_axes:
        places.append(of_group & (members.place["cp"] == members.place["cp"][row]))
    for place in places:
        if np.mean(effects[place] >= 0.5 * effect) >= DEVICE.alike_share:
            return np.flatnonzero(place)
    return np.zeros(0, dtype=np.int64)


def answer_of_slow_parts(seen: Observations, found: tuple[Finding, ...]) -> Answer:
    """Return the answer of a search that found what of some ranks' work is slow: with it, slow
    passes of the same ranks are explained.
    """
    ranks = [one.ranks for one in found]
    return Answer(
        findings=found,
        slow=rows_of_findings(seen.members, found),
        explains=lambda one: one.cause in (Cause.COMPUTE, Cause.UNKNOWN) and one.ranks in ranks,
    )


SPARES_LOOKUPS = (
    "its MLPs and output layer take {dense} the time of its peers', its embedding and loss at most "
    "{lookups}: more tokens would lengthen both, longer documents neither, a lower clock the first"
)
OF_GROUP_BY_LOOKUPS = (
    "of its TP group, whose ranks wait for each other inside their layers, it alone takes {times} "
    "the time where it only moves memory for each token (embedding, loss), as all of them do alike"
)
SHARES_MEMORY = (
    "its kernels that only move memory take {times} as long in some layers, and no longer than "
    "those of its peers in others of the same passes: longer data would slow all layers alike"
)
UNKNOWN_ROLES = (
    "no communication was matched, so nobody knows what each rank has to do (stage, TP group, "
    "loading for others): what its place asks of it may be the reason as well"
)
HOST_ADVICE = (
    "on that host: read the load (top, pidstat -t), CPU frequency and affinity of the "
    "rank's process, and what else runs there",
    "if nothing else runs there, restart the rank on another host",
)

GPU_ADVICE = (
    "read that GPU's clock and throttle reasons, and whether another process is on it: nvidia-smi "
    "-i GPU -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER,PIDS, beside a peer's",
    "measure it against the node's other GPUs with the job away: python scripts/healthcheck.py "
    "--sweep; replace the node when it is slow alone",
)
DATA_ADVICE = (
    "balance the documents of a global batch over the data-parallel ranks by their cost (length "
    "squared for attention)"
)
STAGE_ADVICE = (
    "give the heavy stage fewer layers (--decoder-first-pipeline-num-layers, "
    "--decoder-last-pipeline-num-layers) or split the output layer"
)
JOB_ADVICE = (
    "the hosts launch too late everywhere: fewer and larger kernels (fused layers and optimizer, "
    "torch.compile, CUDA graphs), less Python between them",
    "on this rank, see what its process does besides (logging, loading)",
)


def host_advice(owner: Owner) -> tuple[str, ...]:
    """Return what to do about devices that wait for their hosts: on that host, or in the job."""
    return JOB_ADVICE if owner == Owner.JOB else HOST_ADVICE


def waits_beside(
    seen: Observations, own: Flags, others: Flags, active: Flags, effect: float
) -> str:
    """Say that `own` rows wait for others beside their compute for longer than that is slow by the
    log slowdown `effect`: NCCL's kernels hold multiprocessors while they wait. Empty elsewhere.

    In rank files it is the waiting beyond that of the `others`, whose passes are slow beside it,
    too. Kernels of a profile that run beside others are not compared.

    Example: HSDP, with longer data on one rank: the other one of its group waits 33 ms beside its
    passes, ranks of another group 14, and its passes take 47 ms for their 44.
    """
    if seen.beside_ns is None or (seen.tells_passes and not others.any()):
        return ""
    beside = robust.median(seen.beside_ns[:, active], axis=1)
    waits_ns = float(np.median(beside[own]))
    usual_ns = float(np.median(beside[others])) if seen.tells_passes else 0.0
    busy_ns = float(np.median(seen.busy_ns[own][:, active]))
    if waits_ns - usual_ns < busy_ns * -float(np.expm1(-effect)):
        return ""
    return (
        f"collectives wait for others beside its kernels, {milliseconds(waits_ns)} an iteration, "
        "and hold multiprocessors meanwhile: whoever waits for the last rank looks like this"
    )
