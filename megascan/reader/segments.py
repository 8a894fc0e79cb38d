"""What an importer hands over: what one rank recorded of one run in one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from megascan.header import RankHeader, WindowRecord
from megascan.pipeline import Spread
from megascan.timeline import TRACE_SCHEMA


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Finished windows of one rank and run, from one file.

    `spans` has schema TRACE_SCHEMA with `start_ns` in unix time by the rank's clock, in any order.
    `notes` are sentences about what was left out.
    """

    path: Path
    header: RankHeader
    windows: tuple[WindowRecord, ...]
    spans: pa.Table
    num_unfinished_spans: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packed:
    """Segments that were read together, fit to go from process to process.

    They are pickled with all their spans in one table: a slice of a table would take the whole
    table with it.
    """

    segments: tuple[Segment, ...]

    def __reduce__(self) -> tuple[object, ...]:
        empty = TRACE_SCHEMA.empty_table()
        tables = [segment.spans for segment in self.segments]
        bare = [replace(segment, spans=empty) for segment in self.segments]
        bounds = np.cumsum([0, *(table.num_rows for table in tables)]).tolist()
        return _unpacked, (pa.concat_tables(tables or [empty]).combine_chunks(), bare, bounds)


def _unpacked(spans: pa.Table, bare: Sequence[Segment], bounds: Sequence[int]) -> Packed:
    """Segments and where the spans of each begin in the table; the last bound is its end."""
    return Packed(
        tuple(
            replace(segment, spans=spans.slice(begin, end - begin))
            for segment, (begin, end) in zip(bare, pairwise(bounds), strict=True)
        )
    )


Importer: TypeAlias = Callable[[Sequence[Path], Spread], list[Segment]]
"""Reads the rank files of a folder: a segment for every rank and run in them, none for a file that
ends before it says whose it is. Raises InputError for damage inside finished windows."""
