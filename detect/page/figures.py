"""Collect the numbers that the page's script draws: ranks, their compute over time, links, charts.

A finding's chart shows its ranks next to their peers, iteration by iteration (`Series`).

Everything becomes plain JSON values. The two matrices (rank, iteration) would be most of a large
page, so they are packed: 16-bit numbers, base64, and long windows as medians of neighbouring
iterations (a point). Example: 1,024 ranks and 200 iterations become 39 points, 107 kB a matrix.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from detect.detector import QUANTITIES, RANK_CAUSES, Examination
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.transfers import Transfers
from detect.report import Cause, Finding
from detect.stats import robust
from detect.text import ranks_text
from megascan.arrays import Floats, Integers
from megascan.header import Json

MOST_LINES = 4
FEW_PEERS = 5
"""With fewer peers the band spans all of them, otherwise the middle 80 %."""
NS_PER_MS = 1e6
COMPUTE_OF_A_RANK = "compute of a rank in an iteration"


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
    is_known = drawn is not None and any(np.isfinite(values).any() for _, values in drawn.lines)
    return drawn if is_known else None


def _rank(finding: Finding, examined: Examination) -> Series | None:
    """Compare a rank with the others of its stage (of all stages where it is alone there)."""
    seen = examined.seen
    rows = _rows(examined, finding.ranks)
    if not len(rows):
        return None
    # a host was found by slow passes (a starved device) if they explain most of its slowdown
    level, whole = robust.median(examined.slowness[rows]), np.log(max(finding.slowdown, 1.0 + 1e-9))
    from_passes = finding.cause == Cause.HOST and bool(level > 0.5 * whole)
    if finding.cause in QUANTITIES and not from_passes:
        values = seen.lost(finding.cause) / NS_PER_MS
        quantity, unit = QUANTITIES[finding.cause], "ms"
    else:
        values, quantity, unit = np.exp(examined.slowness), "compute, relative to its peers", "x"
    lines = _lines_of_ranks(examined, values, rows)
    return _drawn(examined, quantity, lines, values[_peers(examined, rows)], unit=unit)


def _rows(examined: Examination, ranks: tuple[int, ...]) -> Integers:
    return np.array(examined.seen.members.rows_with(ranks), dtype=np.int64)


def _peers(examined: Examination, rows: Integers) -> Integers:
    """Return the rows to compare with, none of which is a suspect."""
    members = examined.seen.members
    free = ~examined.suspects
    free[rows] = False
    same = free & np.isin(members.stage, members.stage[rows])
    return np.flatnonzero(same if same.any() and not examined.across_stages else free)


def _lines_of_ranks(
    examined: Examination, values: Floats, rows: Integers
) -> tuple[tuple[str, Floats], ...]:
    """Return the first rows' values as lines, each by the name of the row's first rank."""
    workers = examined.seen.members.workers
    return tuple((f"rank {workers[row][0]}", values[row]) for row in rows[:MOST_LINES].tolist())


def _drawn(
    examined: Examination,
    quantity: str,
    lines: Iterable[tuple[str, Floats]],
    peers: Floats,
    *,
    unit: str = "ms",
    peer: str = "peer",
) -> Series:
    """Return lines next to the median and the band of their `peers`, (peer, iteration)."""
    low, high = _band_of_peers(peers)
    return Series(
        quantity=quantity,
        unit=unit,
        iterations=examined.seen.iterations,
        lines=tuple(lines),
        peers_name=f"{len(peers)} {peer}{'' if len(peers) == 1 else 's'}",
        peers=robust.median(peers, axis=0),
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
    busy_ns = examined.seen.busy_ns
    typical = np.stack([robust.median(busy_ns[members.stage == one], axis=0) for one in stages])
    typical /= NS_PER_MS
    rows = _rows(examined, finding.ranks)
    if not len(rows) or len(stages) < 2:
        return None
    own = np.isin(stages, members.stage[rows])
    lines = zip((f"stage PP{stage}" for stage in stages[own]), typical[own], strict=True)
    return _drawn(examined, COMPUTE_OF_A_RANK, lines, typical[~own], peer="other stage")


def _replicas(examined: Examination) -> Series:
    """Compare the longest replica of each iteration with all replicas."""
    members = examined.seen.members
    busy_ns, replicas = examined.seen.busy_ns, np.unique(members.replica)
    busy = np.stack([robust.mean(busy_ns[members.replica == one], axis=0) for one in replicas])
    longest = np.nan_to_num(busy).max(axis=0) / NS_PER_MS
    lines = [("longest replica of the iteration", longest)]
    return _drawn(examined, COMPUTE_OF_A_RANK, lines, busy / NS_PER_MS, peer="replica")


def _link(finding: Finding, examined: Examination) -> Series | None:
    """Compare transfers among the finding's ranks with equal ones elsewhere."""
    transfers = examined.seen.transfers
    if transfers is None:
        return None
    slow, equal = _connections(transfers, set(finding.ranks))
    if not len(slow) or not len(equal):
        return _late_exits(finding, examined)
    values = np.asarray(transfers.transfer_ns / NS_PER_MS)
    members = [transfers.members[row] for row in slow.tolist()]
    names = [ranks_text(ranks) if len(ranks) == 2 else f"group of rank {ranks[0]}"
             for ranks in members]  # fmt: skip
    lines = zip(names, values[slow], strict=True)
    quantity = f"transfer, {transfers.kinds[int(transfers.kind[slow[0]])]}"
    return _drawn(examined, quantity, lines, values[equal], peer="equal connection")


def _connections(transfers: Transfers, ranks: set[int]) -> tuple[Integers, Integers]:
    """Return the rows of the kind in which the ranks lose most, and that kind's other rows."""
    # of one rank all its connections; of several those that hold all of them, or lie among them
    alike = [ranks <= set(group) or set(group) <= ranks for group in transfers.members]
    inside = np.array(alike, dtype=bool)
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
    values = transfers.late_ns / NS_PER_MS
    lines = _lines_of_ranks(examined, values, rows)
    return _drawn(examined, QUANTITIES[Cause.LINK], lines, values[_peers(examined, rows)])


SHADE_EDGES = (0.90, 0.95, 0.97, 1.03, 1.05, 1.10, 1.20, 1.50)
"""Where one colour of the map ends and the next begins."""
ALIKE = (0.97, 1.03)
"""Within these ratios a rank computes like its peers: grey on the map."""
MOST_VALUES = 40_000
"""Most values of a packed matrix: two matrices of that size are 214 kB."""
MOST_POINTS = 400
"""Most points of a chart; more iterations are shown as medians of neighbours."""
MOST_LINKS = 40
LINK_EDGE = 1.25
"""A connection this much slower than equal ones is drawn on the map."""
RATIO_STEP = 10_000
"""A packed ratio of 1.0; the largest is 6.5."""
PACKED_LARGEST = 65_535

MEANINGS = {
    "compute": "computing",
    "preempted": "off its core while computing (CPU runs)",
    "transfer": "communicating, all members there",
    "wait": "waiting for others inside a communication",
    "unsplit": "communicating, without a partner in the trace",
    "host": "loading data, collecting garbage, saving",
    "dispatch": "device idle: launched too late",
    "idle": "in no span",
    "other": "waiting, communication and gaps",
}


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the iterations' time, (rank, share); a row adds up to 1."""

    ranks: Integers
    names: tuple[str, ...]
    ratio: Floats


def shares_of_table(table: pa.Table) -> Shares:
    """Return shares from a table with the columns rank and `<share>_ratio`, one row a rank."""
    columns = [name for name in table.column_names if name.endswith("_ratio")]
    ratio = [np.asarray(table.column(name), dtype=np.float64) for name in columns]
    return Shares(
        ranks=np.asarray(table.column("rank"), dtype=np.int64),
        names=tuple(name.removesuffix("_ratio") for name in columns),
        ratio=np.stack(ratio, axis=1),
    )


def shares_of_compute(seen: Observations) -> Shares:
    """Return shares of compute and of everything else, all that an op table tells."""
    total = float(np.sum(seen.iteration_ns))
    compute = np.nan_to_num(seen.busy_ns).sum(axis=1) / max(total, 1.0)
    compute = np.clip(compute, 0.0, 1.0)
    return Shares(
        ranks=seen.members.ranks,
        names=("compute", "other"),
        ratio=np.stack([compute, 1.0 - compute], axis=1),
    )


def slowdowns(examined: Examination) -> Floats:
    """Return how much slower each row computes than its peers, (row,); findings' own figures win.

    NaN where a row has no peers.
    """
    value = np.exp(robust.median(examined.slowness, axis=1))
    for finding in examined.report.findings:
        if finding.cause in RANK_CAUSES and finding.cause != Cause.HOST:
            rows = list(examined.seen.members.rows_with(finding.ranks))
            value[rows] = np.fmax(value[rows], finding.slowdown)
    return value


def causes_by_row(members: Members, findings: Sequence[Finding]) -> dict[int, str]:
    """Return the causes for which findings name each row; a heavy stage names no single rank."""
    causes: dict[int, list[str]] = {}
    for finding in findings:
        if finding.cause != Cause.STAGE_IMBALANCE:
            for row in members.rows_with(finding.ranks):
                causes.setdefault(row, []).append(f"{finding.cause.value} ({finding.owner.value})")
    return {row: ", ".join(dict.fromkeys(names)) for row, names in causes.items()}


def rank_columns(examined: Examination, shares: Shares, findings: Sequence[Finding]) -> Json:
    """Return the columns of the table of ranks; a row stands for a rank or an unsplit TP group."""
    members = examined.seen.members
    lines, line_names = _lines(members)
    hosts = list(dict.fromkeys(members.hosts))
    number = {host: place for place, host in enumerate(hosts)}
    used = np.flatnonzero(shares.ratio.max(axis=0, initial=0.0) >= 0.0005)
    names = [shares.names[one] for one in used]
    return {
        "names": ["+".join(map(str, workers)) for workers in members.workers],
        "first": [int(workers[0]) for workers in members.workers],
        "places": list(members.labels),
        "hosts": list(hosts),
        "host": [number[host] for host in members.hosts],
        "gpu": list(members.device_index),
        "has_gpus": members.device_kind == "cuda",
        "stage": members.stage.tolist(),
        "line": lines,
        "line_names": line_names,
        "column": members.replica.tolist(),
        "slowdown": _rounded(slowdowns(examined)),
        "compute_ms": _rounded(robust.median(examined.seen.busy_ns, axis=1) / NS_PER_MS),
        "causes": {str(row): text for row, text in causes_by_row(members, findings).items()},
        "share_names": [[name, MEANINGS[name]] for name in names],
        "shares": _packed(_of_rows(members, shares)[:, used] * 1000),
    }


def _of_rows(members: Members, shares: Shares) -> Floats:
    """Return the mean share of each row's ranks, (row, share); 0 where they were not recorded."""
    place = {int(rank): row for row, rank in enumerate(shares.ranks)}
    ratio = np.zeros((len(members), len(shares.names)))
    for row, workers in enumerate(members.workers):
        known = [place[rank] for rank in workers if rank in place]
        if known:
            ratio[row] = shares.ratio[known].mean(axis=0)
    return ratio


def _lines(members: Members) -> tuple[list[Json], list[Json]]:
    """Return each row's line in the picture of stages (stage, CP and TP rank), and line names."""
    axes = ["pp", *(axis for axis in ("cp", "tp") if len(np.unique(members.place[axis])) > 1)]
    places = np.stack([members.place[axis] for axis in axes])
    keys, line = np.unique(places, axis=1, return_inverse=True)
    names: list[Json] = [
        " ".join(f"{axis.upper()}{part}" for axis, part in zip(axes, key, strict=True))
        for key in keys.T.tolist()
    ]
    return [int(one) for one in line.reshape(-1)], names


def time_matrices(examined: Examination) -> Json:
    """Return iteration times and every row's compute, in ms and relative to its peers."""
    seen = examined.seen
    most = max(2, min(MOST_POINTS, MOST_VALUES // max(len(seen.members), 1)))
    edges = point_edges(len(seen.iterations), most)
    busy = medians_between(seen.busy_ns / NS_PER_MS, edges)
    largest = float(np.nanmax(busy, initial=0.0)) or 1.0
    return {
        "iterations": _spans_of_points(seen.iterations, edges),
        "iteration_ms": _rounded(medians_between(seen.iteration_ns[None] / NS_PER_MS, edges)[0]),
        "largest_ms": largest,
        "compute": _packed(busy * PACKED_LARGEST / largest),
        "relative": _packed(np.exp(medians_between(examined.slowness, edges)) * RATIO_STEP),
        "ratio_step": RATIO_STEP,
        "by_layers": examined.across_stages,
    }


def point_edges(number: int, most: int) -> Integers:
    """Return where each of at most `most` points begins among `number` iterations."""
    if number <= most:
        return np.arange(number)
    return np.unique(np.linspace(0, number, most + 1).astype(np.int64)[:-1])


def medians_between(values: Floats, edges: Integers) -> Floats:
    """Return medians of neighbouring iterations, (row, point)."""
    if len(edges) == values.shape[-1]:
        return values
    parts = np.split(values, edges[1:], axis=-1)
    return np.stack([robust.median(part, axis=-1) for part in parts], axis=-1)


def _spans_of_points(iterations: Integers, edges: Integers) -> list[Json]:
    """Return each point's first and last iteration."""
    last = np.r_[edges[1:], len(iterations)] - 1
    return [[int(iterations[a]), int(iterations[b])] for a, b in zip(edges, last, strict=True)]


def _packed(values: Floats) -> str:
    """Return numbers as base64 of little-endian 16-bit integers; 0 where a value is not known."""
    whole = np.clip(np.rint(np.nan_to_num(values)), 0, PACKED_LARGEST)
    return base64.b64encode(whole.astype("<u2").tobytes()).decode()


def _rounded(values: Floats) -> list[Json]:
    """Return four significant digits; None where a value is not known."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.tolist()]


def slow_links(transfers: Transfers | None, findings: Sequence[Finding]) -> list[Json]:
    """Return connections slower than equal ones, those that findings name first."""
    if transfers is None:
        return []
    level = robust.median(transfers.transfer_ns, axis=1)
    ratio = np.full(len(level), np.nan)
    for kind in np.unique(transfers.kind):
        rows = np.flatnonzero(transfers.kind == kind)
        if len(rows) > 1:
            ratio[rows] = level[rows] / max(float(robust.median(level[rows])), 1.0)
    named = [set(one.ranks) for one in findings if one.cause == Cause.LINK]
    is_named = [any(ranks <= set(own) for ranks in named) for own in transfers.members]
    drawn = [row for row in range(len(level)) if ratio[row] >= LINK_EDGE]
    drawn.sort(key=lambda row: (not is_named[row], -ratio[row]))
    return [
        {
            "ranks": list(transfers.members[row]),
            "kind": transfers.kinds[int(transfers.kind[row])],
            "ratio": round(float(ratio[row]), 3),
            "named": is_named[row],
        }
        for row in drawn[:MOST_LINKS]
    ]


def chart_of(series: Series) -> Json:
    """Return a finding's series as lines for a chart."""
    edges = point_edges(len(series.iterations), MOST_POINTS)

    def values(line: Floats) -> list[Json]:
        return _rounded(medians_between(line[None], edges)[0])

    return {
        "quantity": series.quantity,
        "unit": series.unit,
        "iterations": _spans_of_points(series.iterations, edges),
        "lines": [{"name": name, "values": values(line)} for name, line in series.lines],
        "peers": {
            "name": series.peers_name,
            "middle": values(series.peers),
            "low": values(series.peers_low),
            "high": values(series.peers_high),
        },
    }
