"""A place in a timeline, as the Perfetto UI's address takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from megascan.errors import ConfigError, InputError, UsageError
from megascan.export.naming import group_titles
from megascan.header import Json, layout_from_json
from megascan.topology import Layout
from megascan.viewer.record import read_record

_MARGIN_RATIO = 0.1
_EXPAND = "dev.perfetto.ExpandTracksByRegex"
_PIN = "dev.perfetto.PinTracksByRegex"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A rank in an iteration."""

    rank: int
    iteration: int


@dataclass(frozen=True, kw_only=True)
class View:
    """What part of a file to show: a range of time, and the tracks of one rank."""

    start_ns: int
    end_ns: int
    rank_pattern: str
    """Regular expression that matches the rank's name."""
    group_titles: tuple[str, ...]
    """Groups that the rank stands in, which must be open to see it."""


def view_of(path: Path, spot: Spot) -> View:
    """Where a spot lies in a timeline file. Raises UsageError when the file does not hold it."""
    record = read_record(path)
    ranks = sorted(_ranks(record))
    if spot.rank not in ranks:
        raise UsageError(
            f"{path}: holds no rank {spot.rank}; it has {len(ranks)} ranks"
            + (f", {ranks[0]} to {ranks[-1]}" if ranks else "")
        )
    times = _iterations(record)
    if spot.iteration not in times:
        known = ", ".join(map(str, sorted(times)[:8])) + (", …" if len(times) > 8 else "")
        raise UsageError(f"{path}: holds no iteration {spot.iteration}; it has {known or 'none'}")
    start_ns, end_ns = times[spot.iteration]
    margin_ns = int((end_ns - start_ns) * _MARGIN_RATIO)
    return View(
        start_ns=max(start_ns - margin_ns, 0),
        end_ns=end_ns + margin_ns,
        rank_pattern=rf"rank 0*{spot.rank}\b",
        group_titles=tuple(group_titles(_layout(record, path), spot.rank)),
    )


def _layout(record: Mapping[str, Json], path: Path) -> Layout:
    try:
        return layout_from_json(record["layout"])
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise InputError(
            f"{path}: its record has no usable layout ({error}); write it "
            "again with megascan aggregate"
        ) from error


def _ranks(record: Mapping[str, Json]) -> set[int]:
    ranks: set[int] = set()
    headers = record.get("headers")
    for header in headers if isinstance(headers, list) else []:
        match header:
            case {"rank": int(rank)}:
                ranks.add(rank)
    return ranks


def _iterations(record: Mapping[str, Json]) -> dict[int, tuple[int, int]]:
    """Start and end of each iteration, ns from the origin."""
    rows = record.get("iterations")
    times: dict[int, tuple[int, int]] = {}
    for row in rows if isinstance(rows, list) else []:
        match row:
            case [int(iteration), int(start_ns), int(end_ns)]:
                times[iteration] = (start_ns, end_ns)
    return times


def address(ui: str, file_url: str, view: View | None) -> str:
    """Address of the UI at `ui` that opens a file and lands on a view of it."""
    query = {"url": file_url}
    if view is not None:
        query["visStart"], query["visEnd"] = str(view.start_ns), str(view.end_ns)
        groups = "".join(f"|^{re.escape(title)}$" for title in view.group_titles)
        commands = [
            {"id": _EXPAND, "args": [view.rank_pattern + groups]},
            {"id": _PIN, "args": [view.rank_pattern]},
        ]
        query["startupCommands"] = json.dumps(commands, separators=(",", ":"))
    return f"{ui}/#!/?{urlencode(query, quote_via=quote)}"
