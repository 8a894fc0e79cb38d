"""Choose what a finding's chart shows: its ranks next to their peers, iteration by iteration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.causes.registry import QUANTITIES
from detect.detector import Examination
from detect.observe.observations import Transfers
from detect.report import Cause, Finding
from detect.stats import robust
from megascan.arrays import Floats, Integers

MOST_LINES = 4
FEW_PEERS = 5
"""Of fewer peers the band is all of them; of more the middle 80 %."""
NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class Series:
    """Lines of a finding's ranks, and median and band of their peers; all (iteration,).

    `quantity` says what is measured, `unit` is "x" (times the peers) or "ms".
    """

    quantity: str
    unit: str
    iterations: Integers
    lines: tuple[tuple[str, Floats], ...]
    peers_name: str
    peers: Floats
    peers_low: Floats
    peers_high: Floats


def series_of(finding: Finding, examined: Examination) -> Series | None:
    """Return what to draw for a finding; None when nothing was recorded of it."""
    if finding.cause == Cause.LINK:
        drawn = _link(finding, examined)
    elif finding.cause == Cause.STAGE_IMBALANCE:
        drawn = _stage(finding, examined)
    elif finding.cause == Cause.SEQUENCE_IMBALANCE:
        drawn = _replicas(examined)
    else:
        drawn = _rank(finding, examined)
    return drawn if drawn is not None and _has_values(drawn) else None


def _has_values(series: Series) -> bool:
    return any(np.isfinite(values).any() for _, values in series.lines)


def _rank(finding: Finding, examined: Examination) -> Series | None:
    """Compare a rank with the others of its stage (of all stages where it is alone there)."""
    seen = examined.seen
    rows = _rows(examined, finding.ranks)
    if not len(rows):
        return None
    from_passes = finding.cause == Cause.HOST and _passes_are_slow(finding, examined, rows)
    if finding.cause in QUANTITIES and not from_passes:
        values = seen.lost(finding.cause) / NS_PER_MS
        quantity, unit = QUANTITIES[finding.cause], "ms"
    else:
        values, quantity, unit = np.exp(examined.slowness), "compute, relative to its peers", "x"
    peers = _peers(examined, rows)
    names = [f"rank {seen.members.workers[row][0]}" for row in rows[:MOST_LINES]]
    return _drawn(examined, values, (rows[:MOST_LINES], names), peers, (quantity, unit))


def _passes_are_slow(finding: Finding, examined: Examination, rows: Integers) -> bool:
    """Return whether a host finding came from slow passes (a starved device), not from gaps."""
    level = robust.median(examined.slowness[rows])
    return bool(level > 0.5 * np.log(max(finding.slowdown, 1.0 + 1e-9)))


def _rows(examined: Examination, ranks: tuple[int, ...]) -> Integers:
    named = set(ranks)
    workers = examined.seen.members.workers
    return np.array([row for row, own in enumerate(workers) if named & set(own)], dtype=np.int64)


def _peers(examined: Examination, rows: Integers) -> Integers:
    """Return the rows to compare with: none of them is suspected of anything."""
    members = examined.seen.members
    free = ~examined.suspects
    free[rows] = False
    same = free & np.isin(members.stage, members.stage[rows])
    return np.flatnonzero(same if same.any() and not examined.across_stages else free)


def _drawn(
    examined: Examination,
    values: Floats,
    own: tuple[Integers, list[str]],
    peers: Integers,
    what: tuple[str, str],
) -> Series:
    rows, names = own
    low, high = _band_of_peers(values[peers])
    return Series(
        quantity=what[0],
        unit=what[1],
        iterations=examined.seen.iterations,
        lines=tuple((name, values[row]) for row, name in zip(rows, names, strict=True)),
        peers_name=f"{len(peers)} peer{'' if len(peers) == 1 else 's'}",
        peers=robust.median(values[peers], axis=0),
        peers_low=low,
        peers_high=high,
    )


def _band_of_peers(values: Floats) -> tuple[Floats, Floats]:
    """Return where the peers lie, (iteration,) twice; NaN where there are none."""
    num_iterations = values.shape[1]
    low, high = np.full(num_iterations, np.nan), np.full(num_iterations, np.nan)
    known = np.flatnonzero(np.isfinite(values).any(axis=0))
    if len(known):
        quantiles = (0.0, 1.0) if len(values) < FEW_PEERS else (0.1, 0.9)
        low[known], high[known] = np.nanquantile(values[:, known], quantiles, axis=0)
    return low, high


def _stage(finding: Finding, examined: Examination) -> Series | None:
    """Compare the compute of a stage's median rank with that of the other stages."""
    members = examined.seen.members
    stages = np.unique(members.stage)
    busy = np.stack(
        [
            robust.median(examined.seen.busy_ns[members.rows_of_stage(int(stage))], axis=0)
            for stage in stages
        ]
    )
    rows = _rows(examined, finding.ranks)
    if not len(rows) or len(stages) < 2:
        return None
    own = np.flatnonzero(np.isin(stages, members.stage[rows]))
    names = [f"stage PP{int(stages[row])}" for row in own]
    others = np.setdiff1d(np.arange(len(stages)), own)
    drawn = _drawn(
        examined,
        busy / NS_PER_MS,
        (own, names),
        others,
        ("compute of a rank in an iteration", "ms"),
    )
    return replace(drawn, peers_name=f"{len(others)} other stage{'' if len(others) == 1 else 's'}")


def _replicas(examined: Examination) -> Series:
    """Compare the longest replica of each iteration with all replicas."""
    members = examined.seen.members
    replicas = np.unique(members.replica)
    busy = np.stack(
        [
            robust.mean(examined.seen.busy_ns[members.replica == replica], axis=0)
            for replica in replicas
        ]
    )
    values = np.vstack([np.nanmax(np.nan_to_num(busy), axis=0)[None], busy]) / NS_PER_MS
    rows = np.arange(1, len(values))
    own = (np.zeros(1, dtype=np.int64), ["longest replica of the iteration"])
    drawn = _drawn(examined, values, own, rows, ("compute of a rank in an iteration", "ms"))
    return replace(drawn, peers_name=f"{len(replicas)} replicas")


def _link(finding: Finding, examined: Examination) -> Series | None:
    """Compare transfers among the finding's ranks with equal ones elsewhere."""
    transfers = examined.seen.transfers
    if transfers is None:
        return None
    slow, equal = _connections(transfers, set(finding.ranks))
    if not len(slow) or not len(equal):
        return _late_exits(finding, examined)
    values = np.asarray(transfers.transfer_ns / NS_PER_MS)
    names = [f"ranks {' and '.join(map(str, transfers.members[row][:2]))}" for row in slow]
    names = [
        name if len(transfers.members[row]) == 2 else f"group of rank {transfers.members[row][0]}"
        for name, row in zip(names, slow, strict=True)
    ]
    kind = transfers.kinds[int(transfers.kind[slow[0]])]
    drawn = _drawn(examined, values, (slow, names), equal, (f"transfer, {kind}", "ms"))
    return replace(
        drawn, peers_name=f"{len(equal)} equal connection{'' if len(equal) == 1 else 's'}"
    )


def _connections(transfers: Transfers, ranks: set[int]) -> tuple[Integers, Integers]:
    """Return the rows of the kind in which the ranks lose most, and that kind's other rows."""
    inside = np.array(
        [bool(ranks & set(group)) if len(ranks) == 1 else ranks <= set(group) or set(group) <= ranks
         for group in transfers.members], dtype=bool,
    )  # fmt: skip
    level = robust.median(transfers.transfer_ns, axis=1)
    best, chosen = 0.0, -1
    for kind in np.unique(transfers.kind[inside]):
        same = transfers.kind == kind
        if not (same & ~inside).any():
            continue
        normal = float(robust.median(level[same & ~inside]))
        slowest = float(np.nanmax(level[same & inside]))
        if not slowest > normal:
            continue
        number = np.count_nonzero(same & inside)
        share = float(np.nanmean(transfers.total_ns[same & inside])) * number
        excess = share * (1.0 - normal / slowest)
        if excess > best:
            best, chosen = excess, int(kind)
    same = transfers.kind == chosen
    own = np.flatnonzero(same & inside)
    order = np.argsort(-np.nan_to_num(level[own]), kind="stable")
    return own[order][:MOST_LINES], np.flatnonzero(same & ~inside)


def _late_exits(finding: Finding, examined: Examination) -> Series | None:
    """Compare a rank that leaves its communications late with all others."""
    transfers, rows = examined.seen.transfers, _rows(examined, finding.ranks)
    if transfers is None or not len(rows):
        return None
    names = [f"rank {examined.seen.members.workers[row][0]}" for row in rows[:MOST_LINES]]
    what = (QUANTITIES[Cause.LINK], "ms")
    own = (rows[:MOST_LINES], names)
    return _drawn(examined, transfers.late_ns / NS_PER_MS, own, _peers(examined, rows), what)
