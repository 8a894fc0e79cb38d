"""Every rank as one cell, by stage and data-parallel rank, coloured by how slowly it computes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from detect.examination import RANK_CAUSES, Examination
from detect.findings.wording import listed, times
from detect.observations import Floats, Ints, Members
from detect.report import Cause
from detect.stats import robust

EDGES = (0.90, 0.95, 0.97, 1.03, 1.05, 1.10, 1.20, 1.50)
"""Where one colour ends and the next begins; the middle is what no verdict looks at."""
FOLD = 64
"""Columns of a line; a row of more ranks goes on in the next line."""
MOST_TITLES = 2048
"""Cells beyond are drawn without a word each, but for those that stand out."""
MOST_LISTED = 12
GAP, LEFT, TOP = 2, 92, 26
CELL_SIZES = ((8, 40), (24, 22), (FOLD, 12))
"""Up to so many columns, cells of so many pixels."""


@dataclass(frozen=True)
class Cell:
    """Place in the picture, colour class (0 fastest to 8 slowest, "none" without a value)."""

    x: int
    y: int
    shade: str
    title: str
    is_suspect: bool


@dataclass(frozen=True)
class Standout:
    """A rank that differs from its peers, for the table beside the picture."""

    name: str
    place: str
    host: str
    slowdown: str
    note: str


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A picture of all ranks. `legend` are (shade, words), `paths` cells without a title."""

    width: int
    height: int
    size: int
    cells: tuple[Cell, ...]
    paths: tuple[tuple[str, str], ...]
    columns: tuple[tuple[int, str], ...]
    lines: tuple[tuple[int, str], ...]
    legend: tuple[tuple[str, str], ...]
    standouts: tuple[Standout, ...]
    num_left_out: int
    summary: str
    note: str


def slowdowns(examined: Examination) -> Floats:
    """How much slower each row computes than its peers, (row,); a finding's own figure counts."""
    value = np.exp(robust.median(examined.slowness, axis=1))
    workers = examined.seen.members.workers
    for finding in examined.report.findings:
        if finding.cause in RANK_CAUSES and finding.cause != Cause.HOST:
            named = [row for row, own in enumerate(workers) if set(own) & set(finding.ranks)]
            value[named] = np.fmax(value[named], finding.slowdown)
    return value


def heat_map(examined: Examination) -> HeatMap:
    """The picture of an examination."""
    members, value = examined.seen.members, slowdowns(examined)
    line, column, lines, num_columns = _places(members)
    size = next(pixels for most, pixels in CELL_SIZES if num_columns <= most)
    named = _named(examined)
    x, y = LEFT + column * size, TOP + line * size
    shades = [shade(one) for one in value.tolist()]
    spoken = _spoken(value, named)
    width = LEFT + num_columns * size + 10
    return HeatMap(
        width=max(width, 300),
        height=TOP + len(lines) * size + 6,
        size=size - GAP,
        cells=tuple(
            Cell(
                int(x[row]),
                int(y[row]),
                shades[row],
                _title(members, row, float(value[row]), named.get(row, "")),
                row in named,
            )
            for row in np.flatnonzero(spoken).tolist()
        ),
        paths=_paths(x, y, shades, np.flatnonzero(~spoken), size - GAP),
        columns=_column_labels(num_columns, size),
        lines=tuple(
            (TOP + number * size + size // 2 + 3, text) for number, text in enumerate(lines) if text
        ),
        legend=_legend(shades),
        standouts=_standouts(members, value, named),
        num_left_out=max(0, _num_standing_out(value, named) - MOST_LISTED),
        summary=_summary(members, value, named),
        note=_note(examined),
    )


def shade(value: float) -> str:
    """Colour class of a slowdown."""
    if not np.isfinite(value):
        return "none"
    return str(int(np.searchsorted(EDGES, value, side="right")))


def _places(members: Members) -> tuple[Ints, Ints, list[str], int]:
    """Line and column of each row, the name of each line, the number of columns."""
    inner = [axis for axis in ("cp", "tp") if len(np.unique(members.place[axis])) > 1]
    axes = ["pp", *inner]
    keys, of_row = np.unique(
        np.stack([members.place[axis] for axis in axes]), axis=1, return_inverse=True
    )
    of_row = of_row.reshape(-1)
    num_replicas = int(members.replica.max()) + 1
    folds = -(-num_replicas // FOLD)
    names = [
        " ".join(f"{axis.upper()}{part}" for axis, part in zip(axes, key, strict=True))
        for key in keys.T.tolist()
    ]
    lines = [
        name if folds == 1 else f"{name} +{fold * FOLD}" for name in names for fold in range(folds)
    ]
    line = of_row * folds + members.replica // FOLD
    return line, members.replica % FOLD, lines, min(num_replicas, FOLD)


def _named(examined: Examination) -> dict[int, str]:
    """Rows that a finding names one by one, and the cause."""
    workers = examined.seen.members.workers
    named: dict[int, str] = {}
    for finding in reversed(examined.report.findings):
        if finding.cause == Cause.STAGE_IMBALANCE:
            continue
        for row, own in enumerate(workers):
            if set(own) & set(finding.ranks):
                named[row] = f"{finding.cause.value} ({finding.owner.value})"
    return named


def _spoken(value: Floats, named: dict[int, str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if len(value) <= MOST_TITLES:
        return np.ones(len(value), dtype=np.bool_)
    deviation = np.abs(np.log(np.nan_to_num(value, nan=1.0)))
    spoken = np.zeros(len(value), dtype=np.bool_)
    spoken[np.argsort(-deviation, kind="stable")[: MOST_TITLES // 4]] = True
    spoken[list(named)] = True
    return spoken


def _title(members: Members, row: int, value: float, cause: str) -> str:
    text = f"{_who(members, row)} ({members.labels[row]})"
    if members.hosts[row]:
        text += f", {members.hosts[row]}"
    text += f": {times(value)}" if np.isfinite(value) else ": no peer to compare with"
    return f"{text}, {cause}" if cause else text


def _who(members: Members, row: int) -> str:
    workers = members.workers[row]
    return f"rank {workers[0]}" if len(workers) == 1 else f"ranks {listed(workers)}"


def _paths(
    x: Ints, y: Ints, shades: list[str], rows: Ints, size: int
) -> tuple[tuple[str, str], ...]:
    """Cells without words, one path a colour."""
    drawn: dict[str, list[str]] = {}
    for row in rows.tolist():
        drawn.setdefault(shades[row], []).append(f"M{x[row]} {y[row]}h{size}v{size}h-{size}z")
    return tuple((name, "".join(parts)) for name, parts in sorted(drawn.items()))


def _column_labels(num_columns: int, size: int) -> tuple[tuple[int, str], ...]:
    every = max(1, 40 // size)
    return tuple(
        (LEFT + column * size + size // 2, str(column)) for column in range(0, num_columns, every)
    )


def _legend(shades: list[str]) -> tuple[tuple[str, str], ...]:
    words = [f"below {EDGES[0]:.2f}"]
    words += [f"{low:.2f}–{high:.2f}" for low, high in pairwise(EDGES)]
    words.append(f"{EDGES[-1]:.2f} and more")
    used = [(str(number), text) for number, text in enumerate(words)]
    return (*used, ("none", "no peer")) if "none" in shades else tuple(used)


def _order(value: Floats, named: dict[int, str]) -> list[int]:
    """Rows that stand out: those named first, then by how far they are from their peers."""
    away = np.abs(np.log(np.nan_to_num(value, nan=1.0)))
    out = [row for row in np.argsort(-away, kind="stable").tolist() if shade(value[row]) != "3"]
    rest = [row for row in out if row not in named and np.isfinite(value[row])]
    return [*sorted(named, key=lambda row: -float(np.nan_to_num(value[row]))), *rest]


def _num_standing_out(value: Floats, named: dict[int, str]) -> int:
    return len(_order(value, named))


def _standouts(members: Members, value: Floats, named: dict[int, str]) -> tuple[Standout, ...]:
    return tuple(
        Standout(
            name=_who(members, row),
            place=members.labels[row],
            host=members.hosts[row],
            slowdown=times(float(value[row])) if np.isfinite(value[row]) else "–",
            note=named.get(row, "not significant, or too short"),
        )
        for row in _order(value, named)[:MOST_LISTED]
    )


def _summary(members: Members, value: Floats, named: dict[int, str]) -> str:
    known = np.flatnonzero(np.isfinite(value))
    if not len(known):
        return f"{len(members)} ranks, none of which has a peer to compare with."
    worst = int(known[np.argmax(value[known])])
    inside = int(np.sum([shade(one) == "3" for one in value.tolist()]))
    return (
        f"{inside} of {len(members)} recorded ranks compute within 3 % of their peers; the slowest "
        f"is {_who(members, worst)} ({members.labels[worst]}) at {times(float(value[worst]))}"
        + (f"; {len(named)} named by findings, outlined." if named else ".")
    )


def _note(examined: Examination) -> str:
    missing = examined.report.completeness.get("missing_ranks")
    parts = []
    if isinstance(missing, list) and missing:
        parts.append(f"Not recorded and not drawn: ranks {listed(missing)}.")
    if examined.across_stages:
        parts.append("No rank shares its stage: compared are transformer layers of all stages.")
    return " ".join(parts)
