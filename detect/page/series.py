"""What a finding was seen in: its ranks against their peers, iteration by iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.examination import Examination
from detect.observations import Floats, Ints, Transfers
from detect.report import Cause, Finding
from detect.stats import robust

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
    iterations: Ints
    lines: tuple[tuple[str, Floats], ...]
    peers_name: str
    peers: Floats
    peers_low: Floats
    peers_high: Floats


def series_of(finding: Finding, examined: Examination) -> Series | None:
    """What to draw for a finding; None when nothing was recorded of it."""
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
    """A rank against the other ranks of its stage (of all stages where it is alone there)."""
    seen = examined.seen
    rows = _rows(examined, finding.ranks)
    if not len(rows):
        return None
    if finding.cause in (Cause.LOADER, Cause.GC):
        values = (seen.loader_ns if finding.cause == Cause.LOADER else seen.gc_ns) / NS_PER_MS
        quantity = "data loading" if finding.cause == Cause.LOADER else "garbage collection"
        quantity, unit = f"{quantity} in an iteration", "ms"
    elif finding.cause == Cause.HOST and not _passes_are_slow(finding, examined, rows):
        values = np.nan_to_num(seen.host_ns) / NS_PER_MS
        quantity, unit = "time outside operations in an iteration", "ms"
    else:
        values, quantity, unit = np.exp(examined.slowness), "compute, relative to its peers", "x"
    peers = _peers(examined, rows)
    names = [f"rank {seen.members.workers[row][0]}" for row in rows[:MOST_LINES]]
    return _drawn(examined, values, (rows[:MOST_LINES], names), peers, (quantity, unit))


def _passes_are_slow(finding: Finding, examined: Examination, rows: Ints) -> bool:
    """Whether a host finding was made from passes (a starved device) or from gaps between them."""
    level = robust.median(examined.slowness[rows])
    return bool(level > 0.5 * np.log(max(finding.slowdown, 1.0 + 1e-9)))


def _rows(examined: Examination, ranks: tuple[int, ...]) -> Ints:
    named = set(ranks)
    workers = examined.seen.members.workers
    return np.array([row for row, own in enumerate(workers) if named & set(own)], dtype=np.int64)


def _peers(examined: Examination, rows: Ints) -> Ints:
    """Rows that the finding's are compared with: not suspected of anything themselves."""
    members = examined.seen.members
    free = ~examined.suspects
    free[rows] = False
    same = free & np.isin(members.stage, members.stage[rows])
    return np.flatnonzero(same if same.any() and not examined.across_stages else free)


def _drawn(
    examined: Examination,
    values: Floats,
    own: tuple[Ints, list[str]],
    peers: Ints,
    what: tuple[str, str],
) -> Series:
    rows, names = own
    low, high = _band(values[peers])
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


def _band(values: Floats) -> tuple[Floats, Floats]:
    """Where the peers lie in each iteration, (iteration,) twice; NaN where there are none."""
    num_iterations = values.shape[1]
    low, high = np.full(num_iterations, np.nan), np.full(num_iterations, np.nan)
    known = np.flatnonzero(np.isfinite(values).any(axis=0))
    if len(known):
        quantiles = (0.0, 1.0) if len(values) < FEW_PEERS else (0.1, 0.9)
        low[known], high[known] = np.nanquantile(values[:, known], quantiles, axis=0)
    return low, high


def _stage(finding: Finding, examined: Examination) -> Series | None:
    """Compute of a stage's median rank against the other stages'."""
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
    return _renamed(drawn, f"{len(others)} other stage{'' if len(others) == 1 else 's'}")


def _replicas(examined: Examination) -> Series:
    """The longest replica of each iteration against all replicas."""
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
    return _renamed(drawn, f"{len(replicas)} replicas")


def _renamed(series: Series, peers_name: str) -> Series:
    return Series(**(vars(series) | {"peers_name": peers_name}))


def _link(finding: Finding, examined: Examination) -> Series | None:
    """Transfers among the finding's ranks against equal ones elsewhere."""
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
    return _renamed(drawn, f"{len(equal)} equal connection{'' if len(equal) == 1 else 's'}")


def _connections(transfers: Transfers, ranks: set[int]) -> tuple[Ints, Ints]:
    """Rows of the kind in which the named ranks lose most, and the other rows of that kind."""
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
        number = np.count_nonzero(same & inside)
        share = float(np.nanmean(transfers.total_ns[same & inside])) * number
        excess = share * max(1.0 - normal / float(np.nanmax(level[same & inside])), 0.0)
        if excess > best:
            best, chosen = excess, int(kind)
    same = transfers.kind == chosen
    own = np.flatnonzero(same & inside)
    order = np.argsort(-np.nan_to_num(level[own]), kind="stable")
    return own[order][:MOST_LINES], np.flatnonzero(same & ~inside)


def _late_exits(finding: Finding, examined: Examination) -> Series | None:
    """A rank that leaves its communications late, against all others."""
    transfers, rows = examined.seen.transfers, _rows(examined, finding.ranks)
    if transfers is None or not len(rows):
        return None
    names = [f"rank {examined.seen.members.workers[row][0]}" for row in rows[:MOST_LINES]]
    what = ("late exit from communication in an iteration", "ms")
    own = (rows[:MOST_LINES], names)
    return _drawn(examined, transfers.late_ns / NS_PER_MS, own, _peers(examined, rows), what)
