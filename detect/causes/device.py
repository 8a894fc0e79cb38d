"""Judge a rank's device by more than its passes: is it slow, given long data, or kept waiting?

**Is it the device?** A rank's passes are longer than its peers'. Its device may be slow; or its
data are longer (a replica that always gets the longer documents, an expert that everybody wants);
or it waits inside its passes for a mate whose communication is not in the trace.

The optimizer step touches the same parameters whatever the data were, and waits for nobody. On a
device that computes slowly it takes longer, too, though by less (it is bound by memory, which a
lower clock hardly touches). So:

* passes and optimizer slower: the device;
* passes slower, optimizer not, and all ranks that share the data or the hidden communication are
  slow alike: not shown to be the device, and undecided;
* passes slower, optimizer not, but other ranks on the same data are not slow: the device;
* passes slower, optimizer not, but all passes got as many tokens (`Observations.rules_data_out`)
  and nobody shares the rank's data: the device;
* where experts do part of the work, more tokens may be routed to one rank's experts: the rank's
  attention, which no routing lengthens, is then compared instead of its passes;
* one rank of a TP group slower than all its mates in the forward or the backward pass, and in both
  slower than other groups: the device, and its mates only wait for it where the trace does not
  show it. Longer data would slow all ranks of the group alike, in both passes.

Example: DP 8. Rank 3's passes take 1.30 times its peers', its optimizer 1.003 times, and the other
ranks' optimizers differ by 0.4 %: 0.003 is less than 8 % of log 1.30, and than 3 times 0.004.
Undecided. In a TP group of 8, rank 6 takes 1.31 times its peers' time in both passes, its mates
1.13 times in the forward and 1.31 times in the backward pass, in which nobody recorded the
all-reduces: rank 6.

**What do its readings say?** Longer data, heavier layers or hidden waiting lower no clock. A clock
lower than those of all sound devices of the model, by about as much as the rank is slower, is why
the rank is slower. A clock that is lower by more counts only if heat or a brake, which may come and
go between readings, holds down this device and no other. At its power limit a device lowers its
clock for the work that it is given, and at rest because it has none: these readings decide nothing.
But a device that is at its limit with far less power than sound devices draw has a lower limit, and
no work lowers a limit.

Example: rank 3 computes 1.28 times slower, at 1545 MHz where all others run at 1980: log ratios
0.247 and 0.248. A clock of 1890 MHz (0.047, less than half) would leave most of it unexplained. At
its power limit with 605 W it is undecided, where others draw 610 W; with 452 W it is the device.

**Does it wait for its host?** A device is starved where most of its operations begin as soon as
they are launched: its queue is empty. A job whose hosts can hardly keep up starves first the ranks
that also load data. A starved rank is therefore compared with the most starved rank of every other
TP group; its host is at fault only if the other groups' ranks are fed.

Example: 92 % of rank 3's operations were launched just in time, and 10 % of operations of the most
starved ranks of other groups: the host of rank 3. If it were 85 %, the job would be host-bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from detect.observe.observations import (
    REASONS_NAME,
    Members,
    Observations,
    is_at_rest,
    is_capped,
    peculiar_reasons,
)
from detect.report import Cause, Owner
from detect.stats import robust
from detect.stats.noise import Usual, estimate_noise
from detect.stats.residuals import stage_groups
from detect.text import milliseconds, times
from detect.thresholds import COMPUTE, COSTS, DEVICE, PACE, PAIRS, READINGS, STARVATION
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed


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


def not_shown(seen: Observations, optimizer: Floats, passes: Slowness, row: int) -> str | None:
    """Return why the slowness of `row` is not shown to be its device's, None where it is.

    `optimizer` (row, iteration) is the optimizer step's log time less that of the row's peers, in
    the iterations in which the row is slow.
    """
    effect, no_experts = float(passes.effects[row]), passes.is_beyond_experts(row)
    has_experts = seen.members.layout.ep > 1 and not no_experts
    # tokens routed to its experts may explain the passes, and an ordinary difference of chips a
    # small share in the optimizer: so a larger share must show
    share = DEVICE.optimizer_share_of_experts if has_experts else DEVICE.optimizer_share
    shows = optimizer_shows(optimizer, passes, row, share)
    shows &= not _waits(seen, optimizer, passes, row)
    shows &= not _is_replicas(seen, optimizer, passes, row)
    if shows or is_isolated(seen.members, passes, row):
        return None
    level = float(robust.centre(optimizer[row]))
    alike = np.array([row]) if has_experts else _on_the_same_data(seen.members, row)
    effects = passes.effects if passes.attention is None else passes.attention
    if not has_experts and np.mean(effects[alike] >= 0.5 * effect) < DEVICE.alike_share:
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


def optimizer_shows(
    optimizer: Floats, passes: Slowness, row: int, share: float = DEVICE.optimizer_share
) -> bool:
    """Return whether the optimizer of `row` is slower as on a slow device: by at least a `share` of
    what the row's passes are slower by, and by hardly more than they are.
    """
    level = float(robust.centre(optimizer[row]))
    if not np.isfinite(level):
        return False
    effect, error = float(passes.effects[row]), _optimizer_error(optimizer, passes.slow, row)
    least = max(share * effect, DEVICE.sure_sigmas * error)
    return least <= level <= effect + DEVICE.most_optimizer_log


def _is_replicas(seen: Observations, optimizer: Floats, passes: Slowness, row: int) -> bool:
    """Return whether most ranks of the replica's other stages, at least two, are slow alike, and
    none of their optimizers is: longer data explain all of them, while the one optimizer of `row`
    may be slow by chance.
    """
    others = seen.members.other_stages(row)
    alike = others & (passes.effects >= DEVICE.alike_share * passes.effects[row])
    if alike.sum() < max(2, DEVICE.alike_share * others.sum()):
        return False
    rows = np.flatnonzero(alike).tolist()
    return not any(optimizer_shows(optimizer, passes, one) for one in rows)


def _waits(seen: Observations, optimizer: Floats, passes: Slowness, row: int) -> bool:
    """Return whether `row` may only wait, inside its passes, for a slow rank it exchanges with.

    That rank is slow alike, and its optimizer is slower, relative to its passes, by more than twice
    as much as that of `row`. Ranks of an EP group exchange tokens inside passes (and do not count
    where attention is as slow as the passes); ranks of a TP group exchange whatever was not
    recorded, and a rank that waits for a mate is as slow as the mate.
    """
    members, effects = seen.members, passes.effects
    rivals = np.zeros(len(members), dtype=bool)
    if not passes.is_beyond_experts(row):
        group = members.layout.group(int(members.ranks[row]), "ep")
        rivals = np.isin(members.ranks, group)
        rivals &= effects >= PAIRS.agrees_share * effects[row]
    mates = mates_of(members, row)
    rivals[mates] |= np.abs(effects[mates] - effects[row]) <= DEVICE.alike_log_share * effects[row]
    rivals &= passes.slow
    rivals[row] = False
    share = robust.centre(optimizer) / np.maximum(effects, DEVICE.least_isolated_log)
    most = float(np.nanmax(share[rivals], initial=-np.inf))
    return bool(share[row] < PAIRS.agrees_share * most)


def slowest_optimizer(seen: Observations, row: int, active: Flags) -> tuple[int, float] | None:
    """Return which of the ranks that a row stands for has a slow optimizer step, and its log
    slowdown against the others; None where no rank stands out, or optimizers were not recorded.

    Ranks of other rows show by how much sound ranks of a TP group differ.
    """
    if seen.workers is None:
        return None
    known, residuals = seen.workers.members, {}
    with np.errstate(divide="ignore"):
        log_ns = np.log(seen.workers.optimizer_ns[:, active].astype(np.float64))
    for place, ranks in enumerate(seen.members.workers):
        own = log_ns[[known.row(rank) for rank in ranks]]
        if len(ranks) > 1 and np.isfinite(own).all():
            nobody = np.zeros(len(ranks), dtype=bool)
            level = robust.centre(own - robust.expected_from_others(own, nobody))
            residuals[place] = dict(zip(ranks, level.tolist(), strict=True))
    own_levels = residuals.pop(row, {})
    others = np.array([one for levels in residuals.values() for one in levels.values()])
    if not own_levels or len(others) < DEVICE.min_other_mates:
        return None
    rank = max(own_levels, key=lambda one: own_levels[one])
    error = max(float(np.sqrt(np.mean(others**2))), DEVICE.optimizer_error_log)
    return (rank, own_levels[rank]) if own_levels[rank] >= DEVICE.sure_sigmas * error else None


def optimizer_residuals(seen: Observations, groups: list[Integers], excluded: Flags) -> Floats:
    """Return log optimizer time less that of the others of each row's group, (row, iteration)."""
    return over_others(seen.optimizer_ns, groups, excluded)


def attention_residuals(seen: Observations, excluded: Flags) -> Floats | None:
    """Return log attention time less that of the others of each row's stage, (row, iteration);
    None where attention was not traced, or where there is no expert parallelism.
    """
    if seen.attention_ns is None or seen.members.layout.ep < 2:
        return None
    return over_others(seen.attention_ns, stage_groups(seen.members), excluded)


def over_others(time_ns: Floats, groups: list[Integers], excluded: Flags) -> Floats:
    """Return log time less that of the others of each row's group, (row, iteration)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.where(time_ns > 0, np.log(time_ns), np.nan)
    residual = np.full_like(log_ns, np.nan)
    for rows in groups:
        expected = robust.expected_from_others(log_ns[rows], excluded[rows])
        residual[rows] = log_ns[rows] - expected
    return residual


def is_isolated(members: Members, passes: Slowness, row: int) -> bool:
    """Return whether the row stands out among the ranks that share every microbatch with it (TP,
    CP).
    """
    mates = mates_of(members, row)
    effects = np.nan_to_num(passes.by_phase)
    own = effects[:, row]
    if members.layout.ep > 1 or not len(mates) or not own.min() > PAIRS.agrees_share * own.max():
        return False
    over = own - effects[:, mates].max(axis=1)
    least = max(DEVICE.isolated_share * float(own.max()), DEVICE.least_isolated_log)
    return bool(over.max() >= least and over.min() >= -DEVICE.least_isolated_log)


def mates_of(members: Members, row: int) -> Integers:
    """Return the other rows of the row's stage and replica."""
    same = members.tensor_group == members.tensor_group[row]
    same[row] = False
    return np.flatnonzero(same)


def _optimizer_error(residual: Floats, slow: Flags, row: int) -> float:
    """Return the standard error of a row's optimizer level; slow rows set no scale.

    Take the spread of the other rows' levels, or the noise of the iterations with what is usual,
    whichever is less: three levels may lie far apart by chance, and a starved row's own noise is
    large. But no fault makes an optimizer quicker: slow rows with a quicker optimizer show how far
    a level may be off.
    """
    usual = Usual(floor=DEVICE.optimizer_error_log, spread=COMPUTE.gpu_spread_log)
    noise = estimate_noise(residual, slow, usual)
    error = float(noise.level_error(residual.shape[1])[row])
    others = robust.centre(residual)[~slow]
    others = others[np.isfinite(others)]
    if len(others) > 1:
        error = min(error, float(np.sqrt(np.mean(others**2))))
    quicker = robust.centre(residual)[slow]
    quicker = quicker[quicker < 0]
    if len(quicker):
        error = max(error, float(np.sqrt(np.mean(quicker**2))))
    return max(error, DEVICE.optimizer_error_log)


def _on_the_same_data(members: Members, row: int) -> Integers:
    """Return rows that long data, or hidden waiting in the TP group, would slow as well as this
    one.
    """
    of_group = members.tensor_group == members.tensor_group[row]
    of_replica = members.replica == members.replica[row]
    return np.flatnonzero(of_group if of_group.sum() > 1 else of_replica)


CLOCK_NAME, POWER_NAME = "sm_clock_mhz", "power_w"


def slow_clock(seen: Observations, slow: Flags, row: int, effect: float) -> tuple[int, str] | None:
    """Return the one rank of a row whose clock is as low as its passes are slow, and a sentence.

    `effect` is the row's log slowdown; `slow` rows are no measure of a usual clock. A row may stand
    for a TP group whose ranks wait for each other unseen: None where no clock or several are low,
    and where a mate's is lower still, by more than the passes are slow: whose doing it is nobody
    knows then.
    """
    low = low_clocks(seen, slow, row, effect)
    if len(low) != 1:
        return None
    clocks = {rank: seen.counters.get(rank, {}).get(CLOCK_NAME, 0.0)
              for rank in seen.members.workers[row]}  # fmt: skip
    rank, words = next(iter(low.items()))
    is_lowest = not any(0.0 < clock < clocks[rank] for clock in clocks.values())
    return (rank, words) if is_lowest else None


def low_clocks(seen: Observations, slow: Flags, row: int, effect: float) -> dict[int, str]:
    """Return the ranks of a row whose clocks are as low as its passes are slow, with a sentence."""
    members, ranks = seen.members, seen.members.workers[row]
    sound = [
        seen.counters.get(rank, {})
        for place, of_row in enumerate(members.workers)
        if place != row and not slow[place] and members.devices[place] == members.devices[row]
        for rank in of_row
    ]
    found = {}
    for rank in ranks:
        words = _low_clock(seen.counters.get(rank, {}), sound, effect)
        if words:
            whose = "its clock" if len(ranks) == 1 else f"of rank {rank} alone the clock"
            found[rank] = f"{whose}, which neither data nor layers lower, is {words}"
    return found


def _low_clock(
    own: Mapping[str, float], sound: Sequence[Mapping[str, float]], effect: float
) -> str:
    """Say how low a clock is next to those of sound devices; "" where it is not low, where it is
    low by much more or less than `effect`, or where the device's work may be what lowers it.
    """
    others = [readings.get(CLOCK_NAME, 0.0) for readings in sound]
    lowest, clock = min(others, default=0.0), own.get(CLOCK_NAME, 0.0)
    reasons = int(own.get(REASONS_NAME, 0))
    if min(clock, lowest) <= 0 or is_at_rest(reasons):
        return ""
    if is_capped(reasons) and not _draws_less(own, sound):
        return ""
    ratio, apart = np.log(float(np.median(others)) / clock), np.log(lowest / clock)
    if apart < -np.log1p(-READINGS.clock_share):
        return ""
    theirs = [int(readings.get(REASONS_NAME, 0)) for readings in sound]
    most = np.inf if peculiar_reasons(reasons, theirs) else effect / PAIRS.agrees_share
    if not PAIRS.agrees_share * effect <= ratio <= most:
        return ""
    return (
        f"{clock:.0f} MHz against {np.median(others):.0f} MHz of sound devices "
        f"({times(float(np.exp(ratio)))})"
    )


def _draws_less(own: Mapping[str, float], sound: Sequence[Mapping[str, float]]) -> bool:
    """Return whether a device draws far less power than all sound ones."""
    least = min((readings.get(POWER_NAME, 0.0) for readings in sound), default=0.0)
    return 0.0 < own.get(POWER_NAME, 0.0) <= (1.0 - READINGS.power_share) * least


def reading_evidence(seen: Observations, row: int) -> list[str]:
    """Return sentences about a rank's device readings next to its stage peers' medians."""
    members = seen.members
    own = seen.counters.get(int(members.ranks[row]), {})
    peers = [
        seen.counters[int(members.ranks[other])]
        for other in members.rows_of_stage(int(members.stage[row]))
        if other != row and int(members.ranks[other]) in seen.counters
    ]
    sentences = []
    for name in sorted(own):
        theirs = [readings[name] for readings in peers if name in readings]
        if theirs:
            sentences += _reading_beside_peers(name, own[name], theirs)
    if peers and own and not sentences:
        sentences.append(
            "the device readings of the window (clock, reasons to lower it, power, temperature) "
            "equal its peers': it was not throttled when they were taken"
        )
    return sentences


def _reading_beside_peers(name: str, own: float, peers: Sequence[float]) -> list[str]:
    theirs = float(np.median(peers))
    if name == REASONS_NAME:
        special = peculiar_reasons(int(own), [int(mask) for mask in peers])
        words = f"its clock is held down by {listed(special)} (NVML), its peers' is not"
        return [words] if special else []
    if "temperature" in name:
        notable = abs(own - theirs) > READINGS.temperature_degrees
    elif "power" in name:
        notable = theirs > 0 and abs(own / theirs - 1) > READINGS.power_share
    elif "clock" in name:
        notable = theirs > 0 and abs(own / theirs - 1) > READINGS.clock_share
    else:
        return []
    return [f"counter {name} is {own:.0f} against its peers' {theirs:.0f}"] if notable else []


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
JOB_ADVICE = (
    "the hosts launch too late everywhere: fewer and larger kernels (fused layers and optimizer, "
    "torch.compile, CUDA graphs), less Python between them",
    "on this rank, see what its process does besides (logging, loading)",
)


def host_advice(owner: Owner) -> tuple[str, ...]:
    """Return what to do about devices that wait for their hosts: on that host, or in the job."""
    return JOB_ADVICE if owner == Owner.JOB else HOST_ADVICE


def is_host_bound(seen: Observations) -> bool:
    """Return whether devices wait for their hosts nearly all the time, on the usual rank."""
    if seen.starved_share is None:
        return False
    share = float(np.nan_to_num(np.nanmedian(seen.starved_share)))
    return share >= STARVATION.host_bound_share


def hosts_are_all_late(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether a starved device is nothing special: other TP groups have one as well."""
    if seen.starved_share is None:
        return False
    others = _starved_groups(seen, seen.starved_share, row, active)
    own = float(robust.median(seen.starved_share[row][active]))
    return own >= STARVATION.starved_share and _are_starved(others)


def launches_slowly(seen: Observations, row: int) -> bool:
    """Return whether the row's host takes longer from launch to launch than those of all others."""
    if seen.launch_pace is None or len(seen.launch_pace) < 2:
        return False
    level = robust.centre(seen.launch_pace)
    others = np.delete(level, row)
    known = np.isfinite(others)
    return bool(known.any() and level[row] - others[known].max() >= PACE.slow_log)


def starvation(
    seen: Observations, row: int, active: Flags, effect: float = 0.0
) -> tuple[Owner, str] | None:
    """Return owner and sentence where the device waits for its host; None where it does not.

    If its peers are well fed, half of the work launched just in time is enough: a slow device would
    let its host get ahead. A host that stands still need not be late for most of the work. `effect`
    is by how much longer the device's work takes, log; 0 where that is not known.
    """
    if seen.starved_share is None:
        return None
    if stands_still(seen, row, active) and _is_lost_to_its_host(seen, row, active, effect):
        return Owner.NODE, _stops_text(seen, row, active)
    own, theirs = _just_in_time(seen, seen.starved_share, row, active)
    if not own >= _least_starved(theirs):
        return None
    others = _starved_groups(seen, seen.starved_share, row, active)
    words = (
        f"{own:.0%} of its operations were launched only just in time, so the device waited for "
        f"the host; of its peers' {theirs:.0%}"
    )
    if _are_starved(others):
        return Owner.JOB, (
            f"{words}; but other TP groups have a starved rank too: the job is host-bound, "
            "whatever the node"
        )
    words += _idle_beyond_launching(seen, row, active)
    doubt = _doubt(seen, row, num_others=len(others)) or _hardly_slower_host(
        seen, row, active, STARVATION.slower_share * effect
    )
    if not len(others) and theirs > STARVATION.fed_share:
        return Owner.JOB, f"{words}: the job is host-bound, whatever the node"
    return (Owner.UNDECIDED, f"{words}; {doubt}") if doubt else (Owner.NODE, words)


def may_wait_for_launches(seen: Observations) -> str:
    """Say that passes take about as long as launching them, of which nothing was recorded; empty
    where passes are longer, or where launches tell who waits.

    Example: a layer's forward of 50 us; its 20 kernels take a host 100 us to launch.
    """
    if seen.starved_share is not None or not seen.tells_passes:
        return ""
    typical_ns = float(np.exp(np.nanmedian(seen.work.log_ns)))
    if seen.members.device_kind == "cpu" or typical_ns >= STARVATION.launched_ns:
        return ""
    return (
        f"what is compared takes {milliseconds(typical_ns)}, about as long as launching it, and "
        "launches were not recorded: a host that is late shows the same"
    )


def waits_for_launches(seen: Observations, row: int, active: Flags) -> str:
    """Say that a device waits for its host's launches half of the time and more, so that many short
    kernels, or slow passes now and then, may show the host; empty where it does not.

    Example: the optimizer step of an FSDP job, in which the rank whose host is the last by a little
    never waits for others: 7.2 ms in place of 3.5, all of its kernels launched just in time.
    """
    if seen.starved_share is None:
        return ""
    own, theirs = _just_in_time(seen, seen.starved_share, row, active)
    if not own >= STARVATION.fed_share:
        return ""
    return (
        f"{own:.0%} of its operations were launched only just in time (of its peers' "
        f"{theirs:.0%}), so its host may be the reason as well as the device"
    )


def launched_by_slow_host(seen: Observations, row: int, active: Flags, effect: float) -> str:
    """Say that half of a device's operations come just in time, from a host that launches more
    slowly than its peers' hosts by as much as the device's work is slower, by the log slowdown
    `effect`: its host may be the reason. Empty elsewhere.

    Example: passes and optimizer 1.10 times as long, 62 % just in time (of its peers' 47 %), and
    1.27 times the time from launch to launch. A slow device lets its host get ahead.
    """
    if seen.starved_share is None or seen.held_pace is None:
        return ""
    own, theirs = _just_in_time(seen, seen.starved_share, row, active)
    over = _slower_to_launch(seen, seen.held_pace, row, active)
    if not (own >= STARVATION.fed_share and over >= effect):
        return ""
    return (
        f"{own:.0%} of its operations were launched only just in time (of its peers' {theirs:.0%}),"
        f" by a host that takes {np.exp(over):.2f}x the time of its peers' from launch to launch: "
        "that may be the reason as well as the device"
    )


def half_starved(seen: Observations, row: int, active: Flags) -> str:
    """Say that a device waits for its host half of the time, and its peers' devices somewhat less:
    some host is always the slowest then. Empty where the device waits less, or starves.

    Example: 69 % of a device's operations come just in time, of its peers' 40 %; it takes 1.2x
    their time while its host launches 4 % more slowly.
    """
    if seen.starved_share is None or launches_slowly(seen, row):
        return ""
    own, theirs = _just_in_time(seen, seen.starved_share, row, active)
    waits_more = own - theirs >= STARVATION.more_share
    if not waits_more or not STARVATION.fed_share <= own < _least_starved(theirs):
        return ""
    return (
        f"{own:.0%} of its operations were launched only just in time, and of its peers' "
        f"{theirs:.0%}: where all hosts can hardly keep up, the slowest by a little is the one "
        "that its device waits for"
    )


def _just_in_time(
    seen: Observations, starved: Floats, row: int, active: Flags
) -> tuple[float, float]:
    """Return what share of the row's work comes just in time, and what share of its peers'."""
    theirs = starved[_stage_peers(seen, row)][:, active]
    return float(robust.median(starved[row][active])), float(robust.median(theirs))


def _least_starved(theirs: float) -> float:
    """Return the least share of just-in-time work at which a device counts as waiting for its host,
    if its peers' share is `theirs`.
    """
    is_fed = theirs <= STARVATION.well_fed_share
    return STARVATION.fed_share if is_fed else STARVATION.starved_share


def _doubt(seen: Observations, row: int, *, num_others: int) -> str:
    """Return why a starved device need not be its host's fault; empty where it is."""
    if not num_others and _loads_most(seen, row):
        return (
            "it alone loads data for its TP group, which delays its launches too: a second "
            "replica, or a trace with data loaded beforehand, decides"
        )
    if _are_incomplete(seen):
        return (
            "of the other TP groups some ranks were not recorded, which may be starved as well: a "
            "trace of all ranks decides"
        )
    return ""


def _hardly_slower_host(
    seen: Observations, row: int, active: Flags, least: float, *, least_starved: float = 0.0
) -> str:
    """Say why a starved device's host need not be to blame: it is hardly slower than its peers'
    hosts. Empty where that is not so.

    Problem: where hosts can hardly keep up, the one that is a little slower falls behind until its
    device waits for launches. The other ranks then wait for that device, which gives their hosts
    time to run ahead, and the device's work looks slower by all that it stands still. Example: two
    hosts take 106 and 100 ms to launch an iteration of 30 ms of work. The first device then
    seems to compute 3.5 times as long as the second, although its host is 6 % slower.

    So the host is to blame only where it launches slower than its peers' by `least` (log), a good
    part of what its device loses; 0 where that is not known. Empty then, too, where the trace does
    not tell launches, where the host stops now and then (`stands_still`) or does something else for
    longer than all its launching takes, and where the device is not starved (less than
    `least_starved` of its work comes just in time, by default `_least_starved`).
    """
    over = _behind_by_launching(seen, row, active, least_starved) if least else np.nan
    if not over < least:
        return ""
    return (
        f"but from launch to launch its host takes {np.exp(over):.2f}x the time of its peers': "
        "theirs are nearly as slow, or are held back, and a host that is a little slower than all "
        "others is the one that its device waits for"
    )


def _behind_by_launching(
    seen: Observations, row: int, active: Flags, least_starved: float = 0.0
) -> float:
    """Return how much longer the host of a starved device takes from launch to launch than its
    peers' (log), if nothing else holds the device up; NaN where something may, where the device is
    not starved (`least_starved`, by default `_least_starved`), and where launches are not told.
    """
    if seen.held_pace is None or seen.starved_share is None:
        return np.nan
    own, theirs = _just_in_time(seen, seen.starved_share, row, active)
    if not own >= (least_starved or _least_starved(theirs)):
        return np.nan
    if stands_still(seen, row, active) or _idle_beyond_launching(seen, row, active):
        return np.nan
    return _slower_to_launch(seen, seen.held_pace, row, active)


def _slower_to_launch(seen: Observations, paces: Floats, row: int, active: Flags) -> float:
    """Return how much longer the row's host takes from launch to launch than its peers', log."""
    pace = robust.median(paces[:, active], axis=1)
    return float(pace[row] - robust.median(pace[_stage_peers(seen, row)]))


def most_by_launching(seen: Observations, row: int, active: Flags) -> float:
    """Return what an iteration may take at most, as a multiple of what it would take if the row's
    host launched as quickly as its peers'; infinite where something else may hold up the device.

    A replay brings the operations of a device that waits for its host to its peers' times. But the
    peers' hosts launch too, and are ahead only as long as they wait for this one: the step becomes
    shorter by what this host is slower, and no more. Example: operations five times as long, by
    replay 49 % of the step; its host takes 1.11 times its peers' from launch to launch: 11 %.
    """
    over = _behind_by_launching(seen, row, active)
    return float(np.exp(max(over, 0.0))) if np.isfinite(over) else np.inf


def launches_as_quickly(
    seen: Observations, row: int, active: Flags, share: float, *, least_starved: float
) -> str:
    """Say why a host need not be to blame for gaps of its device, a `share` of the iteration: it
    launches hardly more slowly than its peers' hosts. Empty where that is not so, and where less
    than `least_starved` of the device's work comes just in time, since pauses are then few.

    What launching takes longer is a part of what it takes at all. Example: gaps of 16.3 ms of 81,
    and 49 ms to launch all passes, are 1.5 times the time; the host takes 1.1 times its peers'.
    Where that time is not known (profiles), it is the iteration's. The host is to blame only if it
    is slower by more than processors of one model differ (`PACE.slow_log`): where all devices wait
    for their hosts, somebody's host is the last, and looks as slow as all the others' waiting.
    """
    iteration_ns = float(np.median(seen.iteration_ns[active]))
    launching_ns = 0.0
    if seen.launching_ns is not None:
        launching_ns = float(robust.median(seen.launching_ns[row][active]))
    of_launching = min(share * iteration_ns / (launching_ns or iteration_ns), COSTS.max_saved_share)
    least = max(STARVATION.slower_share * -float(np.log1p(-of_launching)), PACE.slow_log)
    return _hardly_slower_host(seen, row, active, least, least_starved=least_starved)


def stands_still(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether the row's host stops between launches while its device waits for the next one,
    for a noticeable part of the iteration, and those of its peers do not.

    Another process has its core then: whatever the rank's process does takes longer, its loading
    and its optimizer as well, while each launch in between is as quick as ever.

    Stops are seen between modules, and where few modules were recorded by how long the host takes
    from the first to the last launch of its passes (`_stops_in_passes`).
    """
    return _stops_between_modules(seen, row, active) or _stops_in_passes(seen, row, active)


def _stops_between_modules(seen: Observations, row: int, active: Flags) -> bool:
    if seen.stopped_ns is None:
        return False
    stopped = robust.median(seen.stopped_ns[:, active], axis=1)
    own, theirs = stopped[row], float(robust.median(stopped[_stage_peers(seen, row)]))
    return own >= PACE.stop_ratio * theirs and _is_noticeable(seen, own - theirs, active)


def _stops_in_passes(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether the row's host takes much longer to launch the same passes as its peers do,
    and its device waits more often for it than theirs.

    A device that is slow, or a full queue, holds up a host as well, but does not wait for it.
    Example: 553 ms an iteration against 81 to 91 ms of the three other replicas, and half of the
    operations launched just in time against none.
    """
    peers = seen.members.stage == seen.members.stage[row]
    peers[row] = False
    if seen.launching_ns is None or seen.starved_share is None or not peers.any():
        return False
    own, theirs = _just_in_time(seen, seen.starved_share, row, active)
    if not own - theirs >= STARVATION.more_share:
        return False
    launching = robust.median(seen.launching_ns[:, active], axis=1)
    own_ns, theirs_ns = launching[row], float(launching[peers].max())
    return own_ns >= PACE.held_up_ratio * theirs_ns and _is_noticeable(
        seen, own_ns - theirs_ns, active
    )


def _is_noticeable(seen: Observations, time_ns: float, active: Flags) -> bool:
    return bool(time_ns >= PACE.least_share * float(np.median(seen.iteration_ns[active])))


def _idle_beyond_launching(seen: Observations, row: int, active: Flags) -> str:
    """Say that a device has nothing to do for so much longer than its peers' that launching all
    passes, at twice the time of their hosts, would not explain it; empty where it would.

    Example: 108 ms an iteration against 2, where launching its passes takes a host 14: batches that
    come late, and that no span shows.
    """
    lost = seen.lost_ns.get(Cause.HOST)
    if lost is None or seen.launching_ns is None:
        return ""
    peers = _stage_peers(seen, row)
    level = robust.median(lost[:, active], axis=1)
    idle_ns = float(level[row] - robust.median(level[peers]))
    launching_ns = float(np.median(seen.launching_ns[peers][:, active]))
    if not launching_ns > 0 or not idle_ns >= PACE.held_up_ratio * launching_ns:
        return ""
    return (
        f"; it has nothing to do for {milliseconds(idle_ns)} an iteration longer than theirs, and "
        f"launching all passes takes them {milliseconds(launching_ns)}"
    )


def _is_lost_to_its_host(seen: Observations, row: int, active: Flags, effect: float) -> bool:
    """Return whether a device stands still for most of the time that its work takes longer, by the
    log slowdown `effect`.

    Example: 153 ms an iteration, and passes that take 500 ms in place of 385.
    """
    lost = seen.lost_ns.get(Cause.HOST)
    if lost is None:
        return False
    longer_ns = float(np.median(seen.busy_ns[row][active])) * -float(np.expm1(-effect))
    return float(np.nanmedian(lost[row][active])) >= STARVATION.stopped_share * longer_ns


def _stops_text(seen: Observations, row: int, active: Flags) -> str:
    """Say how a host's stops show, where `stands_still` is true."""
    if seen.stopped_ns is not None and _stops_between_modules(seen, row, active):
        stopped_ns = float(np.median(seen.stopped_ns[row][active]))
        return (
            f"its host stopped between launches for {milliseconds(stopped_ns)} an iteration while "
            "its device waited for the next one, and those of its peers did not: something else "
            "has its cores"
        )
    assert seen.launching_ns is not None
    launching = robust.median(seen.launching_ns[:, active], axis=1)
    theirs_ns = float(robust.median(launching[_stage_peers(seen, row)]))
    return (
        f"its host takes {milliseconds(float(launching[row]))} an iteration to launch its passes, "
        f"those of its peers {milliseconds(theirs_ns)}, and its device waits for it: something "
        "else has its cores"
    )


def _are_incomplete(seen: Observations) -> bool:
    """Return whether there are other TP groups, of each of which some rank was not recorded."""
    num_rows = np.bincount(seen.members.tensor_group)
    return len(num_rows) > 1 and int((num_rows == num_rows.max()).sum()) < 2


def _are_starved(groups: Floats) -> bool:
    return len(groups) > 0 and float(np.median(groups)) > STARVATION.fed_share


def _starved_groups(seen: Observations, starved: Floats, row: int, active: Flags) -> Floats:
    """Return the starved share of the most starved rank of every other TP group, (group,)."""
    group = seen.members.tensor_group
    level = robust.median(starved[:, active], axis=1)
    return np.array(
        [np.nanmax(level[group == one]) for one in np.unique(group[group != group[row]])]
    )


def _stage_peers(seen: Observations, row: int) -> Flags:
    """Flag the other rows of the stage, or all other rows where the stage has none."""
    everyone: Flags = np.arange(len(seen.members)) != row
    others = everyone & (seen.members.stage == seen.members.stage[row])
    return others if others.any() else everyone


def _loads_most(seen: Observations, row: int) -> bool:
    """Return whether the first rank of a TP group, which may load for all, loads longest in it.

    Another rank's loading is its wait for what the first hands on.
    """
    if seen.members.place["tp"][row] != 0:
        return False
    loading = np.nan_to_num(robust.median(seen.lost(Cause.LOADER), axis=1))
    mates = loading[mates_of(seen.members, row)]
    return bool(len(mates) and loading[row] > STARVATION.loads_most_ratio * mates.max())
