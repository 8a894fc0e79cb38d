"""What a reader needs to have the timeline back, as one JSON record at the head of every file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import cast

import numpy as np
import pyarrow as pa

from megascan.export.drawing import Drawing
from megascan.export.selection import Selection
from megascan.header import Json
from megascan.schema import SCHEMA_VERSION, Kind
from megascan.timeline import Timeline, equals, numbers

_NOTHING = object()


def timeline_record(drawing: Drawing) -> dict[str, Json]:
    """What a reader needs to have the timeline back beside its spans.

    Headers, clocks and windows are those of the ranks that are shown.
    """
    timeline = drawing.timeline
    ranks = drawing.ranks
    headers = [timeline.headers[rank].to_json() for rank in ranks if rank in timeline.headers]
    groups = _shared_groups(headers)
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
        "clocks": [asdict(timeline.clocks[rank]) for rank in ranks if rank in timeline.clocks],
        "clock_method": timeline.clock_method,
        "origin_ns": timeline.origin_ns,
        "completeness": _completeness(timeline),
        "windows": {
            str(rank): [window.to_json() for window in timeline.windows.get(rank, ())]
            for rank in ranks
        },
        "selection": _selection_record(drawing.selection),
        "iterations": _iterations(drawing),
    }


def _shared_groups(headers: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Every group once; the headers keep the ids of theirs, or all where one contradicts."""
    shared: dict[str, Json] = {}
    for header in headers:
        own = cast("dict[str, Json]", header["groups"])
        if all(shared.setdefault(name, ranks) == ranks for name, ranks in own.items()):
            header["groups"] = list(own)
    return shared


def _common_fields(headers: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """What all headers say alike: run, layout, versions, …"""
    if not headers:
        return {}
    return {
        name: value
        for name, value in headers[0].items()
        if all(header.get(name, _NOTHING) == value for header in headers)
    }


def _completeness(timeline: Timeline) -> dict[str, Json]:
    record: dict[str, Json] = asdict(timeline.completeness)
    for name in ("ranks", "missing_ranks", "notes"):
        record[name] = list(getattr(timeline.completeness, name))
    record["num_unmatched"] = dict(timeline.completeness.num_unmatched)
    return record


def _iterations(drawing: Drawing) -> Json:
    """[iteration, start, end] in ns from the origin, over all ranks shown: where to look."""
    spans = drawing.spans
    spans = spans.filter(pa.array(equals(spans, "kind", str(Kind.ITERATION))))
    iteration = numbers(spans, "iteration")
    order = np.argsort(iteration, kind="stable")
    first = np.flatnonzero(np.diff(iteration[order], prepend=-2))
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
        "ranks": _listed(selection.ranks),
        "iterations": _listed(selection.iterations),
        "kinds": None if selection.kinds is None else list[Json](sorted(map(str, selection.kinds))),
    }
    return record


def _listed(values: Collection[int] | None) -> Json:
    return None if values is None else list[Json](sorted(values))
