"""Which track each span stands on: one a rank and kind, and further lanes where they overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.export.lanes import assign_lanes
from megascan.export.naming import kind_number, track_number
from megascan.pipeline import across_threads
from megascan.schema import COMMUNICATION_KINDS
from megascan.timeline import codes, numbers

Integers = npt.NDArray[np.int64]

_PART_ROWS = 1 << 17
"""Spans worked on at a time, in whole ranks: bounds the memory that sorting takes."""


@dataclass(frozen=True, kw_only=True)
class TrackKey:
    """A track that has spans: a lane of a kind on a rank."""

    rank: int
    kind: str
    lane: int

    @property
    def number(self) -> int:
        """Its number within the rank."""
        return track_number(kind_number(self.kind), self.lane)


def lay_tracks(spans: pa.Table) -> tuple[npt.NDArray[np.int32], tuple[TrackKey, ...]]:
    """Track number of every span within its rank, and the tracks there are, ordered."""
    spans = spans.select(["rank", "kind", "start_ns", "duration_ns"])
    parts = across_threads(_lay_part, _whole_ranks(spans))
    track = np.empty(spans.num_rows, dtype=np.int32)
    used: list[TrackKey] = []
    place = 0
    for part_track, part_used in parts:
        track[place : place + len(part_track)] = part_track
        place += len(part_track)
        used += part_used
    return track, tuple(used)


def _whole_ranks(spans: pa.Table) -> Iterator[pa.Table]:
    """The table in slices that hold whole ranks."""
    rank = numbers(spans, "rank")
    starts = np.flatnonzero(np.diff(rank, prepend=-1, append=-1))
    first = 0
    for start in starts[1:].tolist():
        if start - first >= _PART_ROWS or start == len(rank):
            yield spans.slice(first, start - first)
            first = start


def _lay_part(spans: pa.Table) -> tuple[npt.NDArray[np.int32], list[TrackKey]]:
    kind, kinds = codes(spans, "kind")
    rank = numbers(spans, "rank")
    start_ns = numbers(spans, "start_ns")
    end_ns = start_ns + numbers(spans, "duration_ns")
    group = (rank - rank[0]) * len(kinds) + kind
    talk = np.isin(kinds, [str(each) for each in COMMUNICATION_KINDS])
    lanes = assign_lanes(group, start_ns, end_ns, disjoint=talk[kind])
    width = int(lanes.max()) + 1
    used = np.unique(group * width + lanes).tolist()
    table = [[track_number(kind_number(name), lane) for lane in range(width)] for name in kinds]
    first_rank = int(rank[0])
    return np.array(table, dtype=np.int32)[kind, lanes], [
        TrackKey(
            rank=first_rank + key // width // len(kinds),
            kind=kinds[key // width % len(kinds)],
            lane=key % width,
        )
        for key in used
    ]
