"""Tell a slow device from long data, hidden waiting and hot experts.

Problem: a rank's passes are longer than its peers'. Its device may be slow; or its data are longer
(a replica that always gets the longer documents, an expert that everybody wants); or it waits
inside its passes for a mate whose communication is not in the trace.

Idea: the optimizer step touches the same parameters whatever the data were, and waits for nobody.
A device that computes slowly is slower there, too, if less (it is bound by memory, which a lower
clock hardly touches). So:

* passes and optimizer slower: the device;
* passes slower, optimizer not, and all ranks that share the data or the hidden communication are
  slow alike: not shown to be the device, and undecided;
* passes slower, optimizer not, but other ranks on the same data are not slow: the device;
* one rank of a TP group slower than all its mates in the forward or the backward pass, and in both
  slower than other groups: the device, and its mates only wait for it where the trace does not
  show it. Longer data slow all of them alike, in both passes.

Example: DP 8. Rank 3's passes take 1.30 times its peers', its optimizer 1.003 times, and the other
ranks' optimizers differ by 0.4 %: 0.003 is less than 8 % of log 1.30, and than 3 times 0.004.
Undecided. In a TP group of 8, rank 6 takes 1.31 times its peers' time in both passes, its mates
1.13 times in the forward and 1.31 times in the backward pass, in which nobody recorded the
all-reduces: rank 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observe.observations import Members, Observations
from detect.stats import robust
from detect.stats.noise import Usual, estimate_noise
from detect.thresholds import COMPUTE, DEVICE, PAIRS
from megascan.arrays import Flags, Floats, Integers


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """How slow the passes of all rows are, and which rows were found slow."""

    effects: Floats
    """(row,): log slowdown."""
    slow: Flags
    """(row,)"""
    by_phase: Floats
    """(phase, row): log slowdown of forward and of backward."""


def not_shown(seen: Observations, optimizer: Floats, passes: Slowness, row: int) -> str | None:
    """Return why the slowness of `row` is not shown to be its device's, None where it is.

    `optimizer` (row, iteration) is the optimizer step's log time minus that of its peers, in the
    iterations in which the row is slow.
    """
    effect = float(passes.effects[row])
    shows = optimizer_shows(optimizer, passes, row) and not _waits(seen, optimizer, passes, row)
    if shows or is_isolated(seen.members, passes, row):
        return None
    level = float(robust.centre(optimizer[row]))
    alike = _on_the_same_data(seen.members, row)
    if float(np.mean(passes.effects[alike] >= 0.5 * effect)) < DEVICE.alike_share:
        return None
    words = "its optimizer step, which no data can lengthen, was not recorded"
    if np.isfinite(level):
        words = (
            "its optimizer step, which no data can lengthen, takes "
            f"{np.exp(level):.2f}x the time of its peers'"
        )
    if seen.members.layout.ep > 1:
        return f"{words}: tokens routed to its experts may be the reason as well as the device"
    if len(alike) > 1 and len(np.unique(seen.members.stage[alike])) == 1:
        return (
            f"{words}, and all ranks of its TP group are slow alike: waiting for a mate that the "
            "trace does not show, or their data, may be the reason as well as a device"
        )
    return f"{words}: longer data may be the reason as well as the device"


def optimizer_shows(optimizer: Floats, passes: Slowness, row: int) -> bool:
    """Return whether the optimizer of `row` is slower, too, as that of a slow device is."""
    level = float(robust.centre(optimizer[row]))
    if not np.isfinite(level):
        return False
    error = _optimizer_error(optimizer, passes.slow, row)
    least = DEVICE.optimizer_share * float(passes.effects[row])
    return level >= max(least, DEVICE.sure_sigmas * error)


def _waits(seen: Observations, optimizer: Floats, passes: Slowness, row: int) -> bool:
    """Return whether a rank that this one exchanges tokens with inside its passes is slow alike,
    and its optimizer by more than twice as much for that: what waits for it is no slow device.
    """
    members = seen.members
    group = members.layout.group(int(members.ranks[row]), "ep")
    rivals = np.isin(members.ranks, group) & passes.slow
    rivals &= passes.effects >= 0.5 * passes.effects[row]
    rivals[row] = False
    share = robust.centre(optimizer) / np.maximum(passes.effects, DEVICE.least_isolated_log)
    most = float(np.nanmax(share[rivals], initial=-np.inf))
    return bool(share[row] < PAIRS.agrees_share * most)


def slowest_optimizer(seen: Observations, row: int, active: Flags) -> tuple[int, float] | None:
    """Return which of the ranks that a row stands for has a slow optimizer step, and its log
    slowdown against the others; None where none stands out, or that was not recorded.

    Ranks of other rows show by how much sound ones of a TP group differ.
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
    """Return log optimizer time less that of the others of its group, (row, iteration)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.where(seen.optimizer_ns > 0, np.log(seen.optimizer_ns), np.nan)
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

    By the levels of the others, or by the noise of all iterations and what is usual, whichever is
    less: three levels may lie far apart by chance, and a starved row's own noise is large.
    """
    usual = Usual(floor=DEVICE.optimizer_error_log, spread=COMPUTE.gpu_spread_log)
    noise = estimate_noise(residual, slow, usual)
    error = float(noise.level_error(residual.shape[1])[row])
    others = robust.centre(residual)[~slow]
    others = others[np.isfinite(others)]
    if len(others) > 1:
        error = min(error, float(np.sqrt(np.mean(others**2))))
    return max(error, DEVICE.optimizer_error_log)


def _on_the_same_data(members: Members, row: int) -> Integers:
    """Return rows that long data, or hidden waiting in the TP group, would slow as well as this
    one.
    """
    if members.layout.ep > 1:
        return np.array([row])
    mates = members.replica == members.replica[row]
    of_stage = mates & (members.stage == members.stage[row])
    return np.flatnonzero(of_stage if of_stage.sum() > 1 else mates)
