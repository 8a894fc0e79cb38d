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
    """Segments with all their spans in one table without gaps: what goes from process to process.

    A slice of a table would take the whole table with it.
    """

    spans: pa.Table
    bare: tuple[Segment, ...]
    bounds: tuple[int, ...]
    """(segment + 1,) rows of `spans` where each segment's begin."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Packed:
        """Made of segments that were read together."""
        empty = TRACE_SCHEMA.empty_table()
        tables = [segment.spans for segment in segments]
        return cls(
            spans=pa.concat_tables(tables or [empty]).combine_chunks(),
            bare=tuple(replace(segment, spans=empty) for segment in segments),
            bounds=tuple(np.cumsum([0, *(table.num_rows for table in tables)]).tolist()),
        )

    def segments(self) -> list[Segment]:
        """What it was made of."""
        return [
            replace(segment, spans=self.spans.slice(begin, end - begin))
            for segment, (begin, end) in zip(self.bare, pairwise(self.bounds), strict=True)
        ]


Importer: TypeAlias = Callable[[Sequence[Path], Spread], list[Segment]]
"""Reads the rank files of a folder: a segment for every rank and run in them, none for a file that
ends before it says whose it is. Raises InputError for damage inside finished windows."""
