"""What a reader needs to have the timeline back, as one JSON record at the head of every file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import cast

import numpy as np
import pyarrow as pa

from megascan.export.drawing import Drawing
from megascan.export.selection import Selection
from megascan.header import Json
from megascan.schema import SCHEMA_VERSION, Kind
from megascan.timeline import Timeline, equals, numbers


def timeline_record(drawing: Drawing) -> dict[str, Json]:
    """What a reader needs to have the timeline back beside its spans.

    Headers, clocks and windows are those of the ranks that are shown.
    """
    timeline = drawing.timeline
    ranks = drawing.ranks
    return {
        "schema": SCHEMA_VERSION,
        "run_id": timeline.run_id,
        "layout": {**timeline.layout.to_json()},
        "headers": [timeline.headers[rank].to_json() for rank in ranks if rank in timeline.headers],
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
