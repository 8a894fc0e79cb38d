"""A timeline file of two ranks and one iteration each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from megascan.export import write_timeline
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings
from megascan.schema import TIMELINE_COLUMNS, Granularity
from megascan.timeline import TIMELINE_SCHEMA, Completeness, Timeline
from megascan.topology import Layout

LAYOUT = Layout(dp=2, pp=6)
NUM_RANKS = LAYOUT.world_size


def _spans() -> pa.Table:
    values: dict[str, list[int] | list[str]] = {
        column.name: [""] * NUM_RANKS if column.type == "text" else [-1] * NUM_RANKS
        for column in TIMELINE_COLUMNS
    }
    values |= {
        "rank": list(range(NUM_RANKS)),
        "kind": ["iteration"] * NUM_RANKS,
        "name": ["iteration"] * NUM_RANKS,
        "track": [3] * NUM_RANKS,
        "start_ns": [1000 + 500_000 * (rank % 2) for rank in range(NUM_RANKS)],
        "duration_ns": [2_000_000] * NUM_RANKS,
        "iteration": [5 + rank % 2 for rank in range(NUM_RANKS)],
    }
    return pa.Table.from_pydict(
        {
            field.name: pa.array(values[field.name]).dictionary_encode().cast(field.type)
            if pa.types.is_dictionary(field.type)
            else pa.array(values[field.name], field.type)
            for field in TIMELINE_SCHEMA
        },
        schema=TIMELINE_SCHEMA,
    )


def _header(rank: int) -> RankHeader:
    return RankHeader(
        run_id="r1", rank=rank, world_size=NUM_RANKS, layout=LAYOUT,
        coordinates=LAYOUT.coordinates(rank), groups={}, host="a", process_id=1,
        device=Device(kind="cpu", name="cpu"), backend="gloo",
        clock=ClockOrigin(domain="a", source="monotonic", origin_unix_ns=0),
        trace=TraceSettings(granularity=Granularity.BASE, interval=1, window=1),
    )  # fmt: skip


@pytest.fixture
def timeline_file(tmp_path) -> Callable[[str], Path]:
    """Writes the timeline under a name and returns its path."""

    def write(name: str) -> Path:
        timeline = Timeline(
            run_id="r1",
            layout=LAYOUT,
            headers={rank: _header(rank) for rank in range(NUM_RANKS)},
            spans=_spans(),
            windows={},
            clocks={},
            clock_method="host clocks",
            origin_ns=1000,
            completeness=Completeness(world_size=NUM_RANKS, ranks=tuple(range(NUM_RANKS))),
        )
        write_timeline(timeline, tmp_path / name)
        return tmp_path / name

    return write
