"""Say which slowdown would have been found, by planting it into what was observed.

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
nothing of the others' power: it is left out and told, as long as others are found.

Limits: the formula's factor is the first rung, and what is planted holds throughout the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from detect.causes.device import mates_of
from detect.causes.spec import Inquiry
from detect.observe.observations import Observations
from detect.report import Owner
from detect.thresholds import POWER
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


def planted_power(inquiry: Inquiry, first: float, slow: Flags, judged: Judged) -> Power:
    """Climb the ladder from log slowdown `first`; `slow` rows (row,) are not sound, nor tried."""
    largest = float(np.log(POWER.blind_ratio))
    tried = _tried(inquiry, slow)
    rows = [row for row in tried if _blamed_at(inquiry, row, largest, judged) is not None]
    unseen = tuple(row for row in tried if row not in rows) if rows else ()
    found, effect = float("inf"), first
    while rows and effect < largest:
        is_named = True
        for row in list(rows):
            owner = _blamed_at(inquiry, row, effect, judged)
            if owner is Owner.NODE:
                continue
            rows.sort(key=lambda one: one != row)  # who is not named now is tried first next time
            is_named = False
            if owner is None or np.isfinite(found):
                break
        else:
            found = min(found, effect)
        if is_named:
            return Power(found, effect, unseen)
        effect *= POWER.rung_ratio
    return Power(found, float("inf"), unseen)


def _blamed_at(inquiry: Inquiry, row: int, effect: float, judged: Judged) -> Owner | None:
    return judged(replace(inquiry, seen=_slowed(inquiry.seen, row, effect)), row)


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
