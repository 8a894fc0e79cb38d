"""Devices whose clocks are far below those of all others, and stages that such clocks make slow.

Problem: how slow a device is may not be seen beside its peers. Documents differ in length from one
iteration to the next, mates wait for each other where nobody recorded it, or too few iterations
were traced. Its clock says it at once.

Idea: sound devices of one model run the same job at clocks that differ by a per cent. One that lies
below the lowest of them by more than one more sound device may (`ordinary.reach_of_sound`) computes
as much more slowly, whatever its passes show; unless they show that it does not.

* A device that has no work, or is at its power limit because it has more to do than the others,
  has a lower clock, too. At its limit its clock counts only where it draws less than each of them,
  or where they run below their highest clocks as well (`device.work_lowers_clock`).
* Several devices, and one beside one or two others, count where they are of one host, and a reason
  that no other device has holds all of them down (heat, a brake).
* Of as many devices as were read the lowest one is judged: so low a clock must be improbable on any
  of them, if no brake holds it down and it lies less than a tenth below them.
* Where fewer than seven others were read, or its passes do not show that they are slower, it must
  lie a tenth below them.

Example: passes of eight replicas vary by 20 % with their documents, and rank 0's are as long as any
on the median. It runs at 1725 MHz and draws 525 W, seven others run at 1980 MHz and draw 584 W and
more.

Limits: clocks are read at a window's end. What holds a device down for a part of the time is seen
where it holds it down in most readings.

**Stages.** A stage that takes 1.2 times the time of the others may have more to do, or run on
devices whose clocks are held down. More work holds no clock down: clocks that lie by a tenth and
more below the lowest of all other devices of the model, by about as much as the finding says, are
why. At its power limit a device lowers its clock for the work that it is given, and stages have
different work: then only a reason that no other device has (a brake, heat) or far less power than
all others draw counts (`readings.low_clocks`). Where only some of the ranks have low clocks, the
others must be able to wait for them unseen, and none of them may have a clock that is lower still.

Example: a stage takes 1.20 times the time of the other one. Its four devices, all of one host, run
at 1470 MHz under a hardware slowdown, those of the other host at 1710 to 1755 MHz: they are slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from detect.causes.device import GPU_ADVICE
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
    decided,
    placed_at,
    rows_of_findings,
    saved_by_compute,
    settle,
)
from detect.causes.launching import is_host_bound
from detect.causes.ordinary import chance_of_sound, reach_of_sound
from detect.causes.readings import held_down, low_clocks, work_lowers_clock
from detect.observe.machines import CLOCK_NAME, REASONS_NAME, is_at_rest, peculiar_reasons
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import compare_within, peer_groups
from detect.stats.search import interval_of_ratio
from detect.text import counted, ranks_text, times
from detect.thresholds.devices import DEVICE, ORDINARY, PAIRS
from detect.thresholds.observing import READINGS
from megascan.arrays import Flags, Floats, Integers, mask_of

WHY = (
    "its clock is {clock:.0f} MHz, beside {others} of its model at {sound} MHz: neither data nor "
    "layers hold a clock down"
)


@dataclass(frozen=True, kw_only=True)
class _Low:
    """A device whose clock is held down."""

    rank: int
    clock: float
    others: Floats
    """(device,): clocks of the sound ones."""
    p_value: float
    """How probable so low a clock is on a sound device."""

    @property
    def extremes(self) -> tuple[float, float]:
        """Return the lowest and the highest clock of the sound devices."""
        return float(self.others.min()), float(self.others.max())

    @property
    def ratio_log(self) -> float:
        return float(np.log(np.median(self.others) / self.clock))


def search_low_clocks(inquiry: Inquiry) -> Answer:
    """Name the devices whose clocks are far below all others, and that nobody else has named."""
    seen, members = inquiry.seen, inquiry.seen.members
    if members.device_kind == "cpu" or not seen.counters or is_host_bound(seen):
        return Answer()
    low = [one for model in _models(seen) for one in _held_down(seen, model)]
    rows = {one.rank: members.rows_with([one.rank])[0] for one in low}
    excluded = inquiry.slow | mask_of(list(rows.values()), len(members))
    level, error = _levels(seen, excluded)
    findings = []
    for one in low:
        row = rows[one.rank]
        may_be = level[row] + DEVICE.sure_sigmas * error[row]
        if inquiry.blamed[row] or may_be < PAIRS.agrees_share * one.ratio_log:
            continue
        is_chance = one.p_value * (len(one.others) + 1) > inquiry.settings.false_discovery_rate
        if is_chance and not held_down(seen, excluded, one.rank):
            continue
        shows = level[row] >= PAIRS.agrees_share * one.ratio_log
        if not shows and one.ratio_log < np.log(ORDINARY.little_ratio):
            continue
        findings.append(_finding(seen, row, one, float(level[row]) if shows else one.ratio_log))
    return Answer(
        findings=tuple(findings),
        slow=rows_of_findings(members, findings),
        explains=lambda one: _explains(findings, one),
    )


def _explains(found: list[Finding], other: Finding) -> bool:
    """Return whether a finding of passes is no more than what others wait for a device that was
    found: undecided, or a stage that takes longer by no more than one of its devices does.
    """
    within = [one.slowdown for one in found if {*one.ranks} & {*other.ranks}]
    if not within or other.owner is Owner.NODE:
        return False
    if other.cause is Cause.STAGE_IMBALANCE and other.slowdown <= max(within):
        return True
    is_of_rank = other.cause in (Cause.COMPUTE, Cause.UNKNOWN, Cause.STAGE_IMBALANCE)
    return is_of_rank and other.owner is Owner.UNDECIDED


def _models(seen: Observations) -> Iterator[list[int]]:
    """Yield the ranks of each model of device whose clocks were read at work."""
    members = seen.members
    for model in dict.fromkeys(members.devices):
        ranks = [
            rank
            for row, name in enumerate(members.devices)
            if name == model
            for rank in members.workers[row]
            if seen.counters.get(rank, {}).get(CLOCK_NAME, 0.0) > 0
            and not is_at_rest(int(seen.counters[rank].get(REASONS_NAME, 0)))
        ]
        if len(ranks) > 1:
            yield ranks


def _held_down(seen: Observations, ranks: list[int]) -> list[_Low]:
    """Return those of some ranks whose clocks lie far below all others, as many as do."""
    ranks = sorted(ranks, key=lambda rank: seen.counters[rank][CLOCK_NAME])
    clocks = np.array([seen.counters[rank][CLOCK_NAME] for rank in ranks])
    for number in range(len(ranks) // 2, 0, -1):
        own, others = ranks[:number], ranks[number:]
        if _are_apart(seen, own, others):
            sound = clocks[number:]
            logs = np.log(sound)
            return [
                _Low(
                    rank=rank, clock=clock, others=sound,
                    p_value=chance_of_sound(logs, float(np.log(clock))),
                )
                for rank, clock in zip(own, clocks[:number].tolist(), strict=True)
            ]  # fmt: skip
    return []


def _are_apart(seen: Observations, own: list[int], others: list[int]) -> bool:
    """Return whether the clocks of some ranks all lie far below those of all others, and their own
    work does not hold them down.
    """
    readings = [seen.counters[rank] for rank in others]
    sound = np.log([one[CLOCK_NAME] for one in readings])
    highest = float(np.log(max(seen.counters[rank][CLOCK_NAME] for rank in own)))
    reach = max(reach_of_sound([sound], len(sound)), -float(np.log1p(-READINGS.clock_share)))
    if len(others) < ORDINARY.min_ranks - 1:
        reach = max(reach, float(np.log(ORDINARY.little_ratio)))
    is_far = float(np.median(sound)) - highest >= reach
    if not is_far or float(sound.min()) - highest < PAIRS.agrees_share * reach:
        return False
    theirs = [int(one.get(REASONS_NAME, 0)) for one in readings]
    reasons = [int(seen.counters[rank].get(REASONS_NAME, 0)) for rank in own]
    if len(own) > 1 or len(others) < ORDINARY.min_peers:
        is_one_host = len(seen.members.hosts_of(own)) == 1
        return is_one_host and all(peculiar_reasons(one, theirs) for one in reasons)
    return not work_lowers_clock(seen.counters[own[0]], readings)


def _levels(seen: Observations, excluded: Flags) -> tuple[Floats, Floats]:
    """Return by how much rows are slower than their peers, (row,) log, and how far that may be off:
    infinitely far where nobody knows, or passes hold waiting for others, which makes mates alike.
    A row that stands for a group is as slow as the slowest of it.
    """
    groups: list[Integers] = peer_groups(seen.work, seen.members)
    value = compare_within(seen.work, seen.members, groups, excluded).value
    known = np.maximum(np.isfinite(value).sum(axis=1), 1)
    error = robust.spread(value, axis=1) / np.sqrt(known)
    level = robust.median(value, axis=1)
    are_groups = np.array([len(ranks) > 1 for ranks in seen.members.workers])
    holds_waiting = seen.holds_waiting or seen.waits_between_layers
    is_known = np.isfinite(level) & (are_groups | (not holds_waiting))
    return np.where(is_known, level, 0.0), np.where(is_known, np.nan_to_num(error), np.inf)


def _finding(seen: Observations, row: int, low: _Low, slower_log: float) -> Finding:
    members, ranks = seen.members, (low.rank,)
    busy_ns = np.nan_to_num(seen.busy_ns[row])
    factor, others = float(np.exp(slower_log)), counted(len(low.others), "device")
    finding = build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=(row,),
            cause=Cause.COMPUTE,
            owner=Owner.NODE,
            slowdown=factor,
            interval=interval_of_ratio(slower_log, PAIRS.agrees_share * slower_log / 2),
            course=None,
            q_value=low.p_value,
            num_peers=len(low.others),
            saved_ns=saved_by_compute(seen, row, busy_ns * -np.expm1(-slower_log)),
            subject=ranks_text(ranks),
            predicate=f"computes {times(factor)} slower than {others} of its model: its clock is "
            "held down",
            evidence=(
                WHY.format(
                    clock=low.clock,
                    others=others,
                    sound=" to ".join(dict.fromkeys(f"{one:.0f}" for one in low.extremes)),
                ),
            ),
            advice=GPU_ADVICE,
            is_read=True,
        ),
    )
    return placed_at(finding, members, row)


def search_held_clocks(inquiry: Inquiry) -> Answer:
    """Name the ranks of stages that may be heavy or slow whose clocks are held down."""
    seen, members = inquiry.seen, inquiry.seen.members
    if members.device_kind == "cpu" or not seen.counters:
        return Answer()

    def decide(one: Finding) -> Finding | None:
        is_open = one.owner is Owner.UNDECIDED and one.cause is Cause.STAGE_IMBALANCE
        if not is_open or inquiry.blamed[list(members.rows_with(one.ranks))].any():
            return None
        low = _held(seen, one)
        return _finding_of_stage(seen, one, low) if low else None

    found, settled = settle(inquiry, decide)
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, found),
        explains=lambda one: one in settled,
    )


def _held(seen: Observations, of: Finding) -> dict[int, str]:
    """Return the ranks of a finding whose clocks are held down, with a sentence each; none where
    the others cannot be waiting for them.
    """
    members = seen.members
    rows = list(members.rows_with(of.ranks))
    own, low = mask_of(rows, len(members)), dict[int, str]()
    if own.all():
        return low
    for row in rows:
        low |= low_clocks(seen, own, row, float(np.log(of.slowdown)))
    low = {rank: words for rank, words in low.items() if held_down(seen, own, rank)}
    others = [rank for rank in of.ranks if rank not in low]
    clocks = [seen.counters.get(rank, {}).get(CLOCK_NAME, np.inf) for rank in others]
    highest = max((seen.counters[rank][CLOCK_NAME] for rank in low), default=np.inf)
    can_wait = bool(seen.hidden_axes) and min(clocks, default=np.inf) > highest
    return low if can_wait or not others else {}


def _finding_of_stage(seen: Observations, of: Finding, low: dict[int, str]) -> Finding:
    """Return a finding as that of the devices whose clocks are low."""
    ranks = tuple(sorted(low))
    verb, whose = ("computes", "its clock is") if len(ranks) == 1 else ("compute", "clocks are")
    finding = decided(
        seen,
        of,
        ranks,
        cause=Cause.COMPUTE,
        statement=f"{ranks_text(ranks)} {verb} {times(of.slowdown)} slower than others: {whose} "
        f"held down; without that the job would be "
        f"{times(of.step_time_cost_ratio)} as fast",
        evidence=tuple(dict.fromkeys(low.values())),
        advice=GPU_ADVICE,
    )
    return replace(finding, is_read=True)
