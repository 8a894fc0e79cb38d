"""Declare a piece of an output file, and the record that stands at the head of every file.

The record is JSON; from the record and the spans a reader restores the timeline
(`megascan.reader.timeline_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from megascan.arrays import group_starts
from megascan.export.tracks import Drawing, Selection
from megascan.header import Json, RankHeader, packed
from megascan.parallel import Task
from megascan.schema import SCHEMA_VERSION
from megascan.timeline import numbers

BLOCK_ROWS = 3 << 14
"""Spans of a block: enough for column operations, few enough for several blocks in memory."""


@dataclass(frozen=True)
class Block:
    """A piece of the file: its number of events, and its bytes or a function that makes them."""

    num_events: int
    made: bytes | Callable[..., bytes | memoryview]
    arguments: Task = ()


@dataclass(frozen=True)
class Head:
    """The first piece of a file, which this process makes while workers make the blocks after it.

    `make` returns the head's number of events and its bytes.
    """

    make: Callable[[], tuple[int, bytes]]


def row_blocks(num_rows: int) -> Iterator[slice]:
    """Yield the rows of a shard, one block at a time."""
    for first in range(0, num_rows, BLOCK_ROWS):
        yield slice(first, min(first + BLOCK_ROWS, num_rows))


_NOTHING = object()


def timeline_record(drawing: Drawing) -> dict[str, Json]:
    """Return what a reader needs, in addition to the spans, to restore the timeline.

    Headers, clocks and windows are those of the ranks that are shown. They stay dataclasses, which
    orjson writes as objects: for thousands of ranks, copies would cost more.
    """
    timeline = drawing.timeline
    ranks = drawing.ranks
    shown = [timeline.headers[rank] for rank in ranks if rank in timeline.headers]
    headers = [cast("dict[str, Json]", dict(vars(header))) for header in shown]
    groups = _shared_groups(shown, headers)
    common = _common_fields(headers)
    return {
        "schema": SCHEMA_VERSION,
        "run_id": timeline.run_id,
        "layout": {**timeline.layout.to_json()},
        "groups": groups,
        "common_header": common,
        "headers": [
            {name: value for name, value in header.items() if name not in common}
            for header in headers
        ],
        "clocks": cast(
            "Json", [timeline.clocks[rank] for rank in ranks if rank in timeline.clocks]
        ),
        "clock_method": timeline.clock_method,
        "origin_ns": timeline.origin_ns,
        "completeness": timeline.completeness.to_json(),
        "windows": {
            str(rank): [window.to_json() for window in timeline.windows.get(rank, ())]
            for rank in ranks
        },
        "selection": _selection_record(drawing.selection),
        "iterations": _iterations(drawing),
        "num_spans": drawing.num_spans,
    }


def _shared_groups(
    headers: Sequence[RankHeader], records: Sequence[dict[str, Json]]
) -> dict[str, Json]:
    """Return every group once, and give each header's record the ids of its groups.

    If any group of a header contradicts the groups so far, its record gets all its groups in full.
    A large group stands in the headers of all its members; so it is written only once.
    """
    shared: dict[str, tuple[int, ...]] = {}
    for header, record in zip(headers, records, strict=True):
        own = header.groups.items()
        if all(_alike(shared.setdefault(name, ranks), ranks) for name, ranks in own):
            record["groups"] = list[Json](header.groups)
        else:
            record["groups"] = {name: cast("Json", packed(ranks)) for name, ranks in own}
    return {name: cast("Json", packed(ranks)) for name, ranks in shared.items()}


def _alike(ranks: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return ranks is others or ranks == others


def _common_fields(headers: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Return the fields that are equal in all headers: run, layout, versions, …"""
    if not headers:
        return {}
    return {
        name: value
        for name, value in headers[0].items()
        if all(header.get(name, _NOTHING) == value for header in headers)
    }


def _iterations(drawing: Drawing) -> Json:
    """Return [iteration, start, end] of each iteration over all shown ranks, ns from the origin."""
    spans = drawing.iterations
    iteration = numbers(spans, "iteration")
    order = np.argsort(iteration, kind="stable")
    first = group_starts(iteration[order])
    if not len(first):
        return []
    start_ns = (numbers(spans, "start_ns") - drawing.timeline.origin_ns)[order]
    end_ns = start_ns + numbers(spans, "duration_ns")[order]
    rows = np.column_stack(
        [
            iteration[order][first],
            np.minimum.reduceat(start_ns, first),
            np.maximum.reduceat(end_ns, first),
        ]
    )
    return cast("list[Json]", rows.tolist())


def _selection_record(selection: Selection) -> Json:
    if selection.takes_all:
        return None
    record: dict[str, Json] = {
        "ranks": _in_order(selection.ranks),
        "iterations": _in_order(selection.iterations),
        "kinds": None if selection.kinds is None else list[Json](sorted(map(str, selection.kinds))),
    }
    return record


def _in_order(values: Collection[int] | None) -> Json:
    return None if values is None else list[Json](sorted(values))
