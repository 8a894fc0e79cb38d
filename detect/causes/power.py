"""Say what a trace could have shown of computing: which slowdown would have been found.

Problem: a formula of noise knows what a test would see, not how that is judged: a slow rank of a
pair stays undecided, a small slowdown may be ordinary, a rank whose optimizer is not slower may
have longer data, a slowdown in a short window does not last.

Idea: the sound ranks of this very trace, each made slower by a factor in turn, are searched and
judged by the code that judges the trace. The power is the smallest factor of a ladder at which all
ranks that were tried are found; a second factor says from where on all of them are named.

    ladder   1.030  1.041      1.055  1.075 …  each rung is 1.35 times the last one's logarithm
    rank 0   –      named      named
    rank 5          undecided  named           so 1.041 is found, and 1.055 named

A device that computes slower by a factor takes that much longer in its passes, and a quarter of it
in the optimizer and in lookups, which are bound by memory (`POWER.optimizer_share`). Where the
communication of the device's TP, CP or EP group is not in the trace, its mates wait for it inside
their passes: these become longer by as much as it becomes slower than the slowest of the mates.
Where the communication of TP groups is in the trace in only one phase, the times themselves tell:
mates that wait for each other differ by next to nothing.

    forward    mates differ by 0.5 %      backward    by 0.05 %: they wait in it

Which ranks are tried. The quicker a chip was, the larger the factor at which it is found: so the
quickest ranks are tried, the first twentieth left out, and others from all over the job.

A rank that is not found at any factor of the ladder (it has no peer, or next to no iterations) says
nothing about the others' power: it is left out and reported, as long as others are found. A rank
that is found at one factor is found at larger ones, so only ranks that were not found are tried at
the largest.

Limits: the formula's factor is the first rung, and what is planted holds throughout the window.

Next to the power stand notes on what could not be compared at all (`limits`). They do not replace a
second trace; `slowest` says where that should look first: at the slowest rank, though sound ranks
may differ by as much here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from detect.causes.finding import Inquiry
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD, Tokenwise, Work
from detect.report import Owner
from detect.stats import robust
from detect.stats.residuals import Longest, Residuals, deviations, stage_groups
from detect.text import counted, ranks_of, times
from detect.thresholds.devices import COMPUTE
from detect.thresholds.statistics import POWER
from detect.whatif.traced import joined_groups
from megascan.arrays import Flags, Floats, Integers

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
    tried = _tried(inquiry, slow)
    trial = _Trial(inquiry, _Together.of(inquiry.seen), judged, tried.copy())
    found, effect = float("inf"), first
    while effect < LARGEST_EFFECT:
        are_found, are_named = trial.step(effect, are_found_before=bool(np.isfinite(found)))
        if not trial.rows:
            break
        if are_found:
            found = min(found, effect)
        if are_named:
            return Power(found, effect, trial.unseen(tried))
        effect *= POWER.rung_ratio
    return Power(found, float("inf"), trial.unseen(tried))


@dataclass
class _Trial:
    """Slowdowns that are planted one at a time, and what has come of them."""

    inquiry: Inquiry
    together: _Together
    judged: Judged
    rows: list[int]
    """Rows still tried: whoever was not named at the last factor first."""
    found: dict[int, bool] = field(default_factory=dict)
    """By row: whether it is found at some factor, as far as is known."""

    def step(self, effect: float, *, are_found_before: bool) -> tuple[bool, bool]:
        """Return whether all rows are found at a log slowdown, and whether all are named.

        Ask no further rows once one is not found, nor, if all `are_found_before`, once one is not
        named. Rows that are found at no factor are tried no longer.
        """
        are_named = True
        for row in self.rows.copy():
            owner = self.blamed(row, effect)
            if owner is Owner.NODE:
                continue
            if owner is None and not self.can_be_found(row):
                self.rows.remove(row)
                continue
            self.rows.remove(row)
            self.rows.insert(0, row)
            if owner is None:
                return False, False
            if are_found_before:
                return True, False
            are_named = False
        return True, are_named

    def blamed(self, row: int, effect: float) -> Owner | None:
        """Return whom the slowness of a row is blamed on, None where it is not found."""
        slowed = _slowed(self.inquiry.seen, self.together, row, effect)
        owner = self.judged(replace(self.inquiry, seen=slowed), row)
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
    """Return sound rows that have work to compare: those of the quickest chips, but for one in
    twenty, and others spread over the job.
    """
    work, members = inquiry.seen.work, inquiry.seen.members
    rows = np.flatnonzero(np.isfinite(work.log_ns).any(axis=(1, 2)) & ~slow)
    apart = deviations(work, stage_groups(members), slow)
    level = robust.median(apart.reshape(len(apart), -1), axis=1)
    most = int(np.clip(POWER.max_searched // len(members), 1, POWER.max_rows))
    num_spared = int((1.0 - inquiry.settings.power) * len(rows))
    quickest = rows[np.argsort(np.nan_to_num(level[rows]), kind="stable")]
    first = quickest[num_spared:][: -(-most // 2)]
    left = np.setdiff1d(rows, quickest[: num_spared + len(first)])
    chosen = np.linspace(0, len(left) - 1, min(most - len(first), len(left))).astype(int)
    return [int(row) for row in (*first, *left[np.unique(chosen)])]


def _slowed(seen: Observations, together: _Together, row: int, effect: float) -> Observations:
    """Return the observations with one row's device slower throughout.

    Passes hold launches and communication that no slow device lengthens, so they slow down by less.
    The row comes later by what it computes longer, and waits less beside that.
    """
    effect *= 1.0 - COMPUTE.hidden_share
    optimizer = seen.optimizer_ns.astype(np.float64)
    optimizer[row] *= np.exp(POWER.optimizer_share * effect)
    slower = partial(together.slower, row, effect)
    layers = None if seen.layers is None else slower(seen.layers)
    beside_ns = seen.beside_ns
    if beside_ns is not None:
        beside_ns = beside_ns.copy()
        later_ns = np.nan_to_num(seen.busy_ns[row]) * np.expm1(effect)
        beside_ns[row] = np.maximum(beside_ns[row] - later_ns, 0.0)
    return replace(
        seen,
        work=slower(seen.work),
        layers=layers,
        optimizer_ns=optimizer,
        beside_ns=beside_ns,
        tokenwise=None if seen.tokenwise is None else _slowed_parts(seen.tokenwise, row, effect),
    )


def _slowed_parts(parts: Tokenwise, row: int, effect: float) -> Tokenwise:
    """Return what takes time by tokens with one row's products slower, and by less its lookups."""
    dense_ns, lookups_ns = parts.dense_ns.copy(), parts.lookups_ns.copy()
    dense_ns[row] *= np.exp(effect)
    lookups_ns[row] *= np.exp(POWER.optimizer_share * effect)
    return Tokenwise(dense_ns=dense_ns, lookups_ns=lookups_ns)


@dataclass(frozen=True)
class _Together:
    """Which rows wait for each other inside their passes, and in which phases."""

    phases: tuple[int, ...]
    group: Integers
    """(row,): a number; rows whose ranks wait for each other have the same."""
    lead: Floats
    """(row,): by how much the row is quicker than the slowest row of its group, log."""

    @classmethod
    def of(cls, seen: Observations) -> _Together:
        """Find who waits: groups without communication in the trace; otherwise TP groups
        whose mates differ by far less in one phase than in the other.
        """
        members = seen.members
        nobody = cls((), np.arange(len(members)), np.zeros(len(members)))
        if members.device_kind == "cpu" or not seen.tells_passes:
            return nobody  # a profile's kernels hold no waiting
        hidden = seen.hidden_axes
        if hidden:
            lead = np.full(len(members), POWER.hidden_lead_log)
            groups = joined_groups(members.layout, members.ranks, hidden)
            return cls((FORWARD, BACKWARD), groups, lead)
        apart = [_over_group_mean(seen, phase) for phase in (FORWARD, BACKWARD)]
        differ = [float(robust.median(np.abs(one))) for one in apart]
        for phase, other in ((FORWARD, BACKWARD), (BACKWARD, FORWARD)):
            if differ[phase] * POWER.together_ratio < differ[other]:
                group, level = members.tensor_group, np.nan_to_num(robust.median(apart[other], 1))
                slowest = np.array([level[group == own].max() for own in group])
                return cls((phase,), group, slowest - level)
        return nobody

    def slower(self, row: int, effect: float, work: Work) -> Work:
        """Return the work with one row slower by `effect`, and so are the rows that wait for it."""
        log_ns, shared = work.log_ns.copy(), np.isin(work.phase, self.phases)
        waited = max(effect - float(self.lead[row]), 0.0)
        log_ns[self.group == self.group[row]] += np.where(shared, waited, 0.0)
        log_ns[row] += np.where(shared, 0.0, effect)
        return replace(work, log_ns=log_ns)


def _over_group_mean(seen: Observations, phase: int) -> Floats:
    """Return by how much the passes of a phase exceed the mean of their TP group's, (row, pass)."""
    log_ns = seen.work.log_ns[:, :, seen.work.phase == phase]
    flat = log_ns.reshape(len(log_ns), -1)
    apart = np.full_like(flat, np.nan)
    for group in np.unique(seen.members.tensor_group):
        rows = np.flatnonzero(seen.members.tensor_group == group)
        if len(rows) > 1:
            apart[rows] = flat[rows] - flat[rows].mean(axis=0)
    return apart


def slowest(seen: Observations, residuals: Residuals, floor: float) -> tuple[str, ...]:
    """Say who is slower than its peers by `floor` and more, for a trace too blind to name anybody.

    Cold caches and shared memory make processes on CPUs differ: smaller differences are left out.
    """
    longest = Longest.of(residuals.value)
    if seen.members.device_kind == "cpu":
        floor = max(floor, COMPUTE.cache_ratio)
    if longest.level < np.log(floor) or not longest.lasts:
        return ()
    return (
        f"by its passes the slowest beside its peers is {ranks_of(seen.members, longest.row)}: "
        f"{times(float(np.exp(longest.level)))} their time, and above it in {longest.num_above} of "
        f"{counted(longest.num_known, 'iteration')}; what sound ranks differ by here may explain "
        "it, or not: look there first, if nothing above says more",
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
        return (
            " (one rank a stage, and no transformer layers that are alike: rank files at "
            "granularity full hold them, experts next to dense ones cannot be compared)"
        )
    return " (one rank a stage, and their transformer layers cannot be compared)"
