"""Where the time of ranks went, as rows of stacked bars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from detect.observations import Floats, Ints, Observations

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
MOST_ROWS = 24
"""A page shows so many ranks: those named, then those that wait least, then others in order."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the iterations' time, (rank, share); a row adds up to 1."""

    ranks: Ints
    names: tuple[str, ...]
    ratio: Floats


@dataclass(frozen=True)
class Part:
    """One piece of a bar."""

    name: str
    percent: float


@dataclass(frozen=True)
class Bar:
    """A rank, or all ranks together."""

    name: str
    place: str
    parts: tuple[Part, ...]
    is_suspect: bool


@dataclass(frozen=True, kw_only=True)
class ShareTable:
    """`names` are the shares that occur, with their meaning; `left_out` says what is not shown."""

    names: tuple[tuple[str, str], ...]
    bars: tuple[Bar, ...]
    left_out: str


def shares_of_table(table: pa.Table) -> Shares:
    """From a table with the columns rank and `<share>_ratio`, one row a rank."""
    names = tuple(
        name.removesuffix("_ratio") for name in table.column_names if name.endswith("_ratio")
    )
    columns = [np.asarray(table.column(f"{name}_ratio"), dtype=np.float64) for name in names]
    return Shares(
        ranks=np.asarray(table.column("rank"), dtype=np.int64),
        names=names,
        ratio=np.stack(columns, axis=1),
    )


def shares_of_compute(seen: Observations) -> Shares:
    """Compute and everything else, where a trace tells no more (op tables)."""
    total = float(np.sum(seen.iteration_ns))
    compute = np.nan_to_num(seen.busy_ns).sum(axis=1) / max(total, 1.0)
    compute = np.clip(compute, 0.0, 1.0)
    return Shares(
        ranks=seen.members.ranks,
        names=("compute", "other"),
        ratio=np.stack([compute, 1.0 - compute], axis=1),
    )


def share_table(shares: Shares, labels: dict[int, str], suspects: set[int]) -> ShareTable:
    """Rows to show: the mean of all, and the ranks that matter."""
    used = np.flatnonzero(shares.ratio.max(axis=0, initial=0.0) >= 0.0005)
    chosen = _chosen(shares, suspects)
    mean = shares.ratio.mean(axis=0)
    bars = [Bar("all ranks", "mean", _parts(shares, used, mean), False)]
    for row in chosen:
        rank = int(shares.ranks[row])
        parts = _parts(shares, used, shares.ratio[row])
        bars.append(Bar(f"rank {rank}", labels.get(rank, ""), parts, rank in suspects))
    hidden = len(shares.ranks) - len(chosen)
    return ShareTable(
        names=tuple((shares.names[one], MEANINGS[shares.names[one]]) for one in used.tolist()),
        bars=tuple(bars),
        left_out=""
        if not hidden
        else f"{hidden:,} of {len(shares.ranks):,} ranks are left out: shown are the ranks that "
        "findings name and those that wait least, for whom the others wait.",
    )


def _parts(shares: Shares, used: Ints, ratio: Floats) -> tuple[Part, ...]:
    return tuple(Part(shares.names[one], round(100 * float(ratio[one]), 2)) for one in used)


def _chosen(shares: Shares, suspects: set[int]) -> list[int]:
    """Rows in the order of ranks; all of them when they fit."""
    if len(shares.ranks) <= MOST_ROWS:
        return [int(row) for row in np.argsort(shares.ranks)]
    named = [row for row, rank in enumerate(shares.ranks.tolist()) if rank in suspects]
    waiting = "wait" if "wait" in shares.names else shares.names[-1]
    wait = shares.ratio[:, shares.names.index(waiting)]
    order = [row for row in np.argsort(wait, kind="stable").tolist() if row not in set(named)]
    return sorted((named + order)[:MOST_ROWS], key=lambda row: int(shares.ranks[row]))
