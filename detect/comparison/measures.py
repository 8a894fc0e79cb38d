"""The quantities that are compared: of the step, of roles, of ranks, of links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from detect.comparison.comparable import Comparable
from detect.comparison.comparison import Kind
from detect.comparison.shift import Shift, shift
from detect.comparison.side import Side
from detect.findings.wording import place, ranks_of
from detect.observations import Bools, Floats, Ints, Members, Observations, Transfers
from detect.stats import robust

LOSSES = ("data loading", "garbage collection", "time outside operations")
LEAST_SHARE = 0.002
"""Operations that take less of an iteration are not worth a line."""
ENOUGH_RANKS = 4
LINK_NOISE = 0.02
"""Two runs of a healthy job differ in their transfers by as much."""
MIN_LINK_CHANGE = 1.25
"""Transfers vary more than compute; see the detector's `min_link_slowdown`."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One quantity in both traces; `effect` and `error` are logarithms of its ratio."""

    kind: Kind
    subject: str
    effect: float
    error: float
    reach: float
    p_value: float
    before_ns: float
    after_ns: float
    ranks: tuple[int, ...] = ()
    least: float = 0.0
    """Smallest effect that counts, where it is more than what was asked for."""
    notes: tuple[str, ...] = ()


def _measures(
    moved: Shift, kind: Kind, subjects: list[str], times: tuple[Floats, Floats]
) -> list[Measure]:
    p_value, reach = moved.p_value, moved.reach
    return [
        Measure(
            kind=kind,
            subject=subject,
            effect=float(moved.effect[row]),
            error=float(moved.error[row]),
            reach=float(reach[row]),
            p_value=float(p_value[row]),
            before_ns=float(times[0][row]),
            after_ns=float(times[1][row]),
        )
        for row, subject in enumerate(subjects)
        if np.isfinite(moved.effect[row])
    ]


def step_measures(before: Side, after: Side) -> list[Measure]:
    """The iteration time."""
    old, new = (side.examined.seen.iteration_ns[None] for side in (before, after))
    times = robust.median(old, axis=1), robust.median(new, axis=1)
    return _measures(shift(_log(old), _log(new)), Kind.STEP, ["an iteration"], times)


def _log(values: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(values > 0, np.log(values), np.nan))


def role_measures(
    before: Side, after: Side, shared: Comparable, slow_ranks: set[int]
) -> Iterator[Measure]:
    """Every operation on its median rank, those that are slow by themselves left out."""
    for role, old, new in shared.roles:
        step_ns = float(np.median(before.examined.seen.iteration_ns))
        if max(old.share_ns, new.share_ns) < LEAST_SHARE * step_ns:
            continue
        series = [
            robust.median(times.time_ns[_kept(times.ranks, slow_ranks)], axis=0)[None]
            for times in (old, new)
        ]
        times = robust.median(series[0], axis=1), robust.median(series[1], axis=1)
        moved = shift(_log(series[0]), _log(series[1]))
        yield from _measures(moved, Kind.ROLE, [role.words], times)


def _kept(ranks: Ints, slow: set[int]) -> Bools:
    kept: Bools = ~np.isin(ranks, sorted(slow))
    return kept if kept.any() else np.ones(len(ranks), dtype=np.bool_)


def rank_measures(before: Side, after: Side) -> Iterator[Measure]:
    """Compute of every rank against its peers, and time lost beside it."""
    rows = _shared_rows(before, after)
    if not len(rows[0]):
        return
    old, new = before.examined, after.examined
    busy = [
        robust.median(side.seen.busy_ns[own], axis=1)
        for side, own in zip((old, new), rows, strict=True)
    ]
    names = [_name(after, row) for row in rows[1].tolist()]
    slowness = _against_fleet(old.seen, rows[0], new.seen, rows[1])
    relative = old.slowness[rows[0]], new.slowness[rows[1]]
    known = np.isfinite(robust.median(relative[0], axis=1) + robust.median(relative[1], axis=1))
    against = [
        np.where(known[:, None], one, other) for one, other in zip(relative, slowness, strict=True)
    ]
    moved = shift(against[0], against[1])
    own_effect = np.log(np.maximum(busy[1], 1.0) / np.maximum(busy[0], 1.0))
    few = _has_few_peers(new.seen.members, rows[1])
    for row, measure in _by_row(_measures(moved, Kind.RANK, names, (busy[0], busy[1])), moved):
        if not few[row] or own_effect[row] * np.sign(measure.effect) > abs(measure.effect) / 2:
            yield _ranked(measure, before, after, (int(rows[0][row]), int(rows[1][row])))
    yield from _loss_measures(before, after, rows)


def _has_few_peers(members: Members, rows: Ints) -> Bools:
    """Rows of stages so small that one rank moves what the others are compared with."""
    size = np.bincount(members.stage)
    return np.asarray(size[members.stage[rows]] < ENOUGH_RANKS)


def _by_row(measures: list[Measure], moved: Shift) -> Iterator[tuple[int, Measure]]:
    return zip(np.flatnonzero(np.isfinite(moved.effect)).tolist(), measures, strict=True)


def _ranked(measure: Measure, before: Side, after: Side, rows: tuple[int, int]) -> Measure:
    old_host, new_host = before.members.hosts[rows[0]], after.members.hosts[rows[1]]
    moved = f"it ran on host {old_host} before" if old_host != new_host and old_host else ""
    values = vars(measure) | {"ranks": after.members.workers[rows[1]]}
    return Measure(**(values | {"notes": (moved,) if moved else ()}))


def _name(side: Side, row: int) -> str:
    return f"{ranks_of(side.members, row)} ({place(side.members, row)})"


def _shared_rows(before: Side, after: Side) -> tuple[Ints, Ints]:
    """Rows of the same workers in both."""
    old = {ranks: row for row, ranks in enumerate(before.members.workers)}
    pairs = [(old[ranks], row) for row, ranks in enumerate(after.members.workers) if ranks in old]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _against_fleet(
    old: Observations, old_rows: Ints, new: Observations, new_rows: Ints
) -> tuple[Floats, Floats]:
    """Log compute of each rank, the second trace's less what all ranks changed by."""
    before, after = _log(old.busy_ns[old_rows]), _log(new.busy_ns[new_rows])
    change = robust.median(after, axis=1) - robust.median(before, axis=1)
    return before, after - float(np.nan_to_num(robust.median(change)))


def _loss_measures(before: Side, after: Side, rows: tuple[Ints, Ints]) -> Iterator[Measure]:
    """Loading, collection and gaps as shares of the iteration, rank by rank and for all."""
    for number, name in enumerate(LOSSES):
        lost = [
            _losses(side.examined.seen)[number][own]
            for side, own in zip((before, after), rows, strict=True)
        ]
        steps = [float(np.median(side.examined.seen.iteration_ns)) for side in (before, after)]
        if not all(np.isfinite(one).any() for one in lost):
            continue
        shares = [one / step for one, step in zip(lost, steps, strict=True)]
        fleet = [robust.median(one, axis=0) for one in shares]
        times = [robust.mean(one, axis=1) for one in lost]
        yield from _fleet_loss(name, fleet, steps)
        if len(rows[0]) < 2:
            continue
        moved = _mean_shift(shares[0] - fleet[0], shares[1] - fleet[1])
        names = [f"{name} of {_name(after, row)}" for row in rows[1].tolist()]
        found = _measures(moved, Kind.LOSS, names, (times[0], times[1]))
        for row, measure in _by_row(found, moved):
            yield _ranked(measure, before, after, (int(rows[0][row]), int(rows[1][row])))


def _losses(seen: Observations) -> tuple[Floats, Floats, Floats]:
    collected = seen.gc_ns if seen.gc_traced else np.full_like(seen.gc_ns, np.nan)
    return seen.loader_ns, collected, seen.host_ns


def _fleet_loss(name: str, fleet: list[Floats], steps: list[float]) -> list[Measure]:
    moved = _mean_shift(fleet[0][None], fleet[1][None])
    times = [robust.mean(one[None], axis=1) * step for one, step in zip(fleet, steps, strict=True)]
    return _measures(moved, Kind.LOSS, [f"{name} of all ranks"], (times[0], times[1]))


def _mean_shift(before: Floats, after: Floats) -> Shift:
    """Shift of means: such times come in bursts, which a median does not see."""
    usual = shift(before, after, between=0.0)
    effect = robust.mean(after, axis=1) - robust.mean(before, axis=1)
    variance = _variance_of_mean(before) + _variance_of_mean(after)
    return Shift(
        effect=np.log1p(np.maximum(effect, -0.99)),
        error=np.sqrt(variance + usual.error**2),
        degrees=usual.degrees,
    )


def _variance_of_mean(values: Floats) -> Floats:
    centred = values - robust.mean(values, axis=1)[:, None]
    return np.asarray(np.nan_to_num(robust.mean(centred**2, axis=1)) / max(values.shape[1] - 1, 1))


def link_measures(before: Side, after: Side) -> Iterator[Measure]:
    """Transfers of every edge and group, by operation and bytes; whole kinds first."""
    old, new = before.examined.seen.transfers, after.examined.seen.transfers
    if old is None or new is None:
        return
    error_ns = max(_clock_error_ns(side) for side in (before, after))
    least_ns = LEAST_SHARE * float(np.median(before.examined.seen.iteration_ns))
    for kind in sorted(set(_kinds(old)) & set(_kinds(new))):
        rows = _kinds(old)[kind], _kinds(new)[kind]
        largest = max(float(old.total_ns[rows[0]].max()), float(new.total_ns[rows[1]].max()))
        if largest >= least_ns:
            yield from _of_kind(kind, (old, new), rows, error_ns)


def _kinds(transfers: Transfers) -> dict[str, Ints]:
    rows: dict[str, list[int]] = {}
    for row, kind in enumerate(transfers.kind.tolist()):
        rows.setdefault(transfers.kinds[kind], []).append(row)
    return {name: np.array(found) for name, found in rows.items()}


def _of_kind(
    name: str, transfers: tuple[Transfers, Transfers], rows: tuple[Ints, Ints], error_ns: float
) -> Iterator[Measure]:
    times = [one.transfer_ns[own] for one, own in zip(transfers, rows, strict=True)]
    fleet = [robust.median(one, axis=0)[None] for one in times]
    members = [[one.members[row] for row in own.tolist()]
               for one, own in zip(transfers, rows, strict=True)]  # fmt: skip
    if len(members[0]) == 1 and members[0] == members[1]:
        only = members[0][0]
        yield from _linked([f"{name} among ranks {_members(only)}"], fleet, [only], error_ns)
        return
    yield from _linked([f"{name}, all connections"], fleet, [()], error_ns)
    both = [ranks for ranks in members[0] if ranks in set(members[1])]
    if len(both) < 2:
        return
    own = [one[[list(names).index(ranks) for ranks in both]]
           for one, names in zip(times, members, strict=True)]  # fmt: skip
    levels = [robust.median(one) for one in own]
    names = [f"{name} among ranks {_members(ranks)}" for ranks in both]
    relative = own[1] * float(levels[0] / levels[1])
    yield from _linked(names, [own[0], relative], both, error_ns, shown=own)


def _members(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _linked(
    subjects: list[str],
    values: list[Floats],
    ranks: list[tuple[int, ...]],
    error_ns: float,
    shown: list[Floats] | None = None,
) -> Iterator[Measure]:
    """Only where times differ by more than what the clocks can tell."""
    level = [robust.median(one, axis=1) for one in shown or values]
    moved = shift(_log(values[0]), _log(values[1]), between=LINK_NOISE)
    least = float(np.log(MIN_LINK_CHANGE))
    for row, measure in _by_row(_measures(moved, Kind.LINK, subjects, (level[0], level[1])), moved):
        difference = abs(float(robust.median(values[1][row]) - robust.median(values[0][row])))
        seen = difference > 2 * error_ns
        p_value = measure.p_value if seen else 1.0
        extra = {"ranks": ranks[row], "least": least, "p_value": p_value}
        yield Measure(**(vars(measure) | extra))


def _clock_error_ns(side: Side) -> float:
    alignment = side.examined.report.alignment
    return 0.0 if alignment is None else alignment.residual_p99_ns
