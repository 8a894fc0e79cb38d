"""Say what a trace could have shown of computing: which slowdown would have been found.

Problem: a formula of noise knows what a test would see, not what becomes of it: a slow rank of a
pair stays undecided, a small one is as good as ordinary, one whose optimizer is not slower may
have longer data, one in a short window does not last.

Idea: the sound ranks of this very trace, each made slower by a factor in turn, are searched and
judged by the code that judges the trace. The power is the smallest factor of a ladder at which all
that were tried are found; another one says from where on all are named.

    ladder   1.030  1.041      1.055  1.075 …  each rung is 1.35 times the last one's logarithm
    rank 0   –      named      named
    rank 5          undecided  named           so 1.041 is found, and 1.055 named

A device that computes slower by a factor takes that much longer in its passes, and a quarter of it
in the optimizer, which is bound by memory (`POWER.optimizer_share`). Where its TP group's
communication is not in the trace, its mates wait for it inside their passes: these are as slow.

A rank that is not found at any factor of the ladder (it has no peer, or next to no iterations) says
nothing of the others' power: it is left out and told, as long as others are found. Who is found at
one factor is found at larger ones, so only a rank that is not found is tried at the largest.

Limits: the formula's factor is the first rung, and what is planted holds throughout the window.

Beside the power stand notes on what could not be compared at all (`limits`). These spare nobody a
second trace; where it should look says `slowest`: the slowest rank, if by no more than sound ranks
may differ here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from detect.causes.device import mates_of
from detect.causes.spec import Inquiry
from detect.observe.observations import Observations
from detect.report import Owner
from detect.stats import robust
from detect.stats.residuals import Residuals
from detect.text import counted, ranks_of, times
from detect.thresholds import COMPUTE, OCCUPANCY, POWER
from megascan.arrays import Flags, Integers

TP = "tp"
"""The axis that a kind of transfers names first: "tp all_reduce of 4 MB"."""
Judged = Callable[[Inquiry, int], Owner | None]
"""Who a row's slowness is blamed on; None where the row is not found."""


@dataclass(frozen=True)
class Power:
    """Smallest log slowdowns that are found, of whatever owner, and that a node is named for.

    Infinite where none below `POWER.blind_ratio` is.
    """

    found: float
    named: float
    unseen: tuple[int, ...] = ()
    """Rows that were tried and are found at no factor, where others are."""


LARGEST_EFFECT = float(np.log(POWER.blind_ratio))
"""Log slowdown at the end of the ladder."""


def planted_power(inquiry: Inquiry, first: float, slow: Flags, judged: Judged) -> Power:
    """Climb the ladder from log slowdown `first`; `slow` rows (row,) are not sound, nor tried."""
    trial, tried = _Trial(inquiry, judged), _tried(inquiry, slow)
    rows, found, effect = tried.copy(), float("inf"), first
    while rows and effect < LARGEST_EFFECT:
        is_named = True
        for row in list(rows):
            owner = trial.blamed(row, effect)
            if owner is Owner.NODE:
                continue
            if owner is None and not trial.can_be_found(row):
                rows.remove(row)
                continue
            rows.sort(key=lambda one: one != row)  # who is not named now is tried first next time
            is_named = False
            if owner is None or np.isfinite(found):
                break
        else:
            found = min(found, effect) if rows else found
        if rows and is_named:
            return Power(found, effect, trial.unseen(tried))
        effect *= POWER.rung_ratio
    return Power(found, float("inf"), trial.unseen(tried))


@dataclass
class _Trial:
    """Slowdowns that are planted one at a time, and what has come of them."""

    inquiry: Inquiry
    judged: Judged
    found: dict[int, bool] = field(default_factory=dict)
    """By row: whether it is found at some factor, as far as is known."""

    def blamed(self, row: int, effect: float) -> Owner | None:
        """Return whom the slowness of a row is blamed on, None where it is not found."""
        owner = self.judged(
            replace(self.inquiry, seen=_slowed(self.inquiry.seen, row, effect)), row
        )
        if owner is not None:
            self.found[row] = True
        return owner

    def can_be_found(self, row: int) -> bool:
        """Return whether a row is found at any factor: at the largest, if at none before."""
        if row not in self.found:
            self.found[row] = self.blamed(row, LARGEST_EFFECT) is not None
        return self.found[row]

    def unseen(self, rows: list[int]) -> tuple[int, ...]:
        """Return the rows that are found at no factor; none where nobody is found."""
        unseen = tuple(row for row in rows if not self.can_be_found(row))
        return unseen if len(unseen) < len(rows) else ()


def _tried(inquiry: Inquiry, slow: Flags) -> list[int]:
    """Return sound rows that have work to compare, spread over the job."""
    known = np.isfinite(inquiry.seen.work.log_ns).any(axis=(1, 2))
    rows = np.flatnonzero(known & ~slow)
    most = int(np.clip(POWER.max_searched // len(inquiry.seen.members), 1, POWER.max_rows))
    chosen = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)
    return [int(row) for row in rows[np.unique(chosen)]]


def _slowed(seen: Observations, row: int, effect: float) -> Observations:
    """Return the observations with one row's device slower throughout."""
    rows = np.append(_waiting_for(seen, row), row)
    work, layers = seen.work.log_ns.copy(), None
    work[rows] += effect
    if seen.layers is not None:
        slower = seen.layers.log_ns.copy()
        slower[rows] += effect
        layers = replace(seen.layers, log_ns=slower)
    optimizer = seen.optimizer_ns.astype(np.float64)
    optimizer[row] *= np.exp(POWER.optimizer_share * effect)
    return replace(
        seen, work=replace(seen.work, log_ns=work), layers=layers, optimizer_ns=optimizer
    )


def _waiting_for(seen: Observations, row: int) -> Integers:
    """Return the rows whose passes get longer with this one's: those of its TP group, where the
    trace shows none of the communication in which they wait for it.
    """
    kinds = () if seen.transfers is None else seen.transfers.kinds
    # a profile's kernels hold no waiting
    is_shown = not seen.tells_passes or any(kind.split()[0] == TP for kind in kinds)
    if is_shown or seen.members.layout.tp < 2 or seen.members.device_kind == "cpu":
        return np.zeros(0, dtype=np.int64)
    return mates_of(seen.members, row)


def slowest(seen: Observations, residuals: Residuals, floor: float) -> tuple[str, ...]:
    """Say who is slower than its peers by `floor` and more, for a trace too blind to name anybody.

    Cold caches and shared memory make processes on CPUs differ: less than that is not worth a word.
    """
    level = np.nan_to_num(robust.centre(residuals.value))
    row = int(np.argmax(level))
    if seen.members.device_kind == "cpu":
        floor = max(floor, COMPUTE.cache_ratio)
    known = residuals.value[row][np.isfinite(residuals.value[row])]
    above = int((known > 0).sum())
    if level[row] < np.log(floor) or above < OCCUPANCY.mostly_share * len(known):
        return ()
    return (
        f"the slowest beside its peers is {ranks_of(seen.members, row)}: "
        f"{times(float(np.exp(level[row])))} their time, and above it in {above} of "
        f"{counted(len(known), 'iteration')}; what sound ranks differ by here may explain it, or "
        "not: look there first",
    )


def limits(seen: Observations, residuals: Residuals) -> list[str]:
    """Return what this trace could not have shown, whatever its noise."""
    notes = []
    if not (residuals.num_peers > 0).any():
        notes.append(
            f"no two ranks were recorded at the same work{_why_nobody_compares(seen)}: compute "
            "cannot be judged; compare with an earlier trace"
        )
    elif int(np.median(residuals.num_peers)) == 1:
        notes.append("each rank has one peer only: a slowdown of both alike cannot be seen")
    if seen.mixes_communication:
        notes.append(
            "communication inside TP groups was not traced (granularity base) and is part of the "
            "CPU time: only large compute faults can be told; trace at granularity full"
        )
    return notes


def _why_nobody_compares(seen: Observations) -> str:
    """Return why, as part of a sentence."""
    layout = seen.members.layout
    if layout.world_size == 1:
        return " (the job has one rank)"
    if layout.world_size > layout.pp or len(np.unique(seen.members.stage)) == 1:
        return " (of its peers' work nothing was recorded, or other work)"
    if seen.layers is None:
        return " (one rank a stage, and no transformer layers traced: granularity full has them)"
    return " (one rank a stage, and their transformer layers cannot be compared)"
