"""Hold what an importer hands over: what one rank recorded of one run, as a table of spans.

Every importer ends here. The importer of our rank files turns event columns into span columns
(`span_columns`: microseconds to nanoseconds), all others put numpy columns together
(`timeline.span_table`); checks (`faulty_rows`) and the order of rows (`in_order`) are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Flags, Integers, Narrow, RowNumbers, rows_of_runs
from megascan.header import RankHeader, WindowRecord
from megascan.parallel import Workers, over_blocks
from megascan.schema import HEADER_EVENT, NOT_APPLICABLE, WINDOW_EVENT, Column, Kind
from megascan.timeline import (
    END_COLUMNS,
    TRACE_SCHEMA,
    Stay,
    arrow_schema,
    equals,
    in_order,
    is_end,
    narrow,
    narrow_codes,
    narrowed,
    numbers,
    text_column,
)

_JSON_TYPES = {"int8": pa.int8(), "int32": pa.int32(), "int64": pa.int64(), "text": pa.string()}
_TIMES = ("ts", "dur")
LARGEST_MICROS = 2.0**50
"""About 35 years; larger times are damage, and too large for nanoseconds in a double."""


def event_schema(columns: Sequence[Column]) -> pa.Schema:
    """Return the schema by which the JSON parser reads events with these columns."""
    top = [("ph", pa.string())]
    arguments = []
    for column in columns:
        place, _, argument = column.event_key.partition(".")
        if argument:
            arguments.append((argument, _JSON_TYPES[column.type]))
        else:
            kind = pa.float64() if place in _TIMES else _JSON_TYPES[column.type]
            top.append((place, kind))
    return pa.schema([*top, ("args", pa.struct(arguments))])


def span_columns(events: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """Turn span events, as `Templates` reads them, into a table of declared columns.

    `start_ns` is still relative to the origin.

    Start and end are rounded to whole ns each, so that spans which nest in the file nest in the
    table. A missing or non-finite time becomes a duration of NOT_APPLICABLE.
    """
    start, duration = _times(events)
    arrays = []
    for column in columns:
        if column.event_key == "ts":
            arrays.append(pa.array(start))
        elif column.event_key == "dur":
            arrays.append(pa.array(duration))
        else:
            arrays.append(events.column(column.event_key))
    return pa.Table.from_arrays(arrays, schema=arrow_schema(tuple(columns)))


def rows_of(table: pa.Table, rows: Integers) -> pa.Table:
    """Return some rows, which ascend; consecutive rows are a slice without copies."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return table.slice(int(rows[0]), len(rows))
    return table.take(pa.array(rows))


def true_rows(mask: pa.ChunkedArray) -> pa.Array:
    """Return the numbers of rows where a mask is true; null counts as false.

    This replaces `pyarrow.compute.indices_nonzero`, which in pyarrow before 26 crashes the process
    on an array without chunks (an empty slice).
    """
    return pa.array(np.flatnonzero(pc.fill_null(mask, False).to_numpy()))


def _times(events: pa.Table) -> tuple[Integers, Integers]:
    start = events.column("ts").to_numpy()
    end = start + events.column("dur").to_numpy()
    usable = (np.abs(start) < LARGEST_MICROS) & (np.abs(end) < LARGEST_MICROS)
    start_ns = np.rint(np.where(usable, start, 0.0) * 1000.0).astype(np.int64)
    end_ns = np.rint(np.where(usable, end, 0.0) * 1000.0).astype(np.int64)
    return start_ns, np.where(usable, end_ns - start_ns, NOT_APPLICABLE)


def faulty_rows(spans: pa.Table, events: pa.Table, rank: int | None) -> list[tuple[int, str]]:
    """Return the rows that cannot be used, in order, and why (a predicate: "has no name").

    `events` are the rows as parsed, `rank` the file's rank (None for files of many ranks).
    """
    micros = events.column("ts").to_numpy() + events.column("dur").to_numpy()
    ranks = numbers(spans, "rank")
    faults = {
        "has no usable ts and dur": ~(np.abs(micros) < LARGEST_MICROS),
        "has a negative duration": numbers(spans, "duration_ns") < 0,
        "has no rank": ranks < 0,
        "is of an unknown kind": ~equals(spans, "kind", *Kind),
        "has no name": equals(spans, "name", ""),
    }
    if rank is not None:
        faults[f"is a span of another rank than the file's rank {rank}"] = ranks != rank
    reasons: dict[int, str] = {}
    for reason, is_bad in faults.items():
        for row in np.flatnonzero(is_bad).tolist():
            reasons.setdefault(row, reason)
    return sorted(reasons.items())


def is_mark(events: pa.Table) -> Flags:
    """Mark the events of a rank file that open a run or close a window."""
    return equals(events, "ph", "M") & equals(events, "name", HEADER_EVENT, WINDOW_EVENT)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Finished windows of one rank and run, from one file.

    `spans` has `start_ns` in unix time by the rank's clock. At first `spans` are all spans of the
    windows, in TRACE_SCHEMA and any order. Once `stays` says where all spans are kept, `spans` has
    only the ends among them, ordered by start (`settled_shard`). `notes` are sentences about what
    was left out.
    """

    path: Path
    header: RankHeader
    windows: tuple[WindowRecord, ...]
    spans: pa.Table
    num_unfinished_spans: int = 0
    notes: tuple[str, ...] = ()
    stays: tuple[Stay, ...] = ()
    """Where all spans are kept, stretches in the order of time; () as long as `spans` has them."""


def settled_shard(segments: Sequence[Segment], number: int) -> tuple[pa.Table, Packed]:
    """Make shard `number` of segments with all their spans: one table of these spans, for the
    worker to keep, and the segments with only the ends, which say where all spans stay.

    Example: segments of 10 and 20 spans with 2 and 3 ends give a table of 30 rows, and segments
    with `spans` of 2 and 3 rows that stay at rows 0 to 10 and 10 to 30 of the shard.
    """
    ordered = sorted(segments, key=lambda one: (one.header.run_id, one.header.rank))
    several = ordered and ordered[0].header.run_id != ordered[-1].header.run_id
    tables = [in_order(one.spans) if several else one.spans for one in ordered]
    bounds = np.cumsum([0, *(table.num_rows for table in tables)])
    spans = pa.concat_tables(tables or [TRACE_SCHEMA.empty_table()])
    spans = spans.unify_dictionaries().combine_chunks()
    if not several:  # all ranks in one go: there may be hundreds
        spans = in_order(spans)
    rows = np.flatnonzero(is_end(spans))
    ends = narrowed(spans.select(END_COLUMNS).take(pa.array(rows)))
    handed = []
    for one, (begin, end), (low, high) in zip(
        ordered,
        pairwise(bounds.tolist()),
        pairwise(np.searchsorted(rows, bounds).tolist()),
        strict=True,
    ):
        stay = Stay(number, begin, end)
        handed.append(replace(one, spans=ends.slice(low, high - low), stays=(stay,)))
    return spans, Packed(tuple(handed))


def joined_ends(segments: Sequence[Segment]) -> pa.Table:
    """Return the ends of all ranks in their order, each column as wide as its widest piece.

    Threads copy pieces to their rows, a column each, so memory holds no more than the pieces and
    the joined table. Ranks that share a shard share their texts and are taken together.
    """
    bounds = np.cumsum([0, *(one.spans.num_rows for one in segments)]).tolist()
    shards = [one.stays[0].shard if one.stays else -1 for one in segments]
    parts, places = [], []
    by_shard = np.argsort(shards, kind="stable").tolist()
    for _, group in groupby(by_shard, key=shards.__getitem__):
        own = list(group)
        parts.append(pa.concat_tables([segments[rank].spans for rank in own]))
        places.append(_places([(bounds[rank], bounds[rank + 1]) for rank in own]))
    names = parts[0].column_names
    columns = over_blocks(partial(_joined_column, parts, places), names)
    return pa.table(list(columns), names=names)


_Rows: TypeAlias = slice | RowNumbers


def _places(runs: Sequence[tuple[int, int]]) -> _Rows:
    """Return the rows of runs (begin, end) of rows; a slice if the runs are contiguous."""
    if all(one[1] == other[0] for one, other in pairwise(runs)):
        return slice(runs[0][0], runs[-1][1])
    return rows_of_runs(runs)


def _joined_column(parts: Sequence[pa.Table], places: Sequence[_Rows], name: str) -> pa.Array:
    """Return a column of all tables; the rows of parts[i] go to places[i]."""
    if not pa.types.is_dictionary(parts[0].schema.field(name).type):
        pieces = [narrow(part, name) for part in parts]
        return pa.array(_placed(pieces, places, np.result_type(*{one.dtype for one in pieces})))
    numbered: dict[str, int] = {}
    pieces = []
    for part in parts:
        row_codes, texts = narrow_codes(part, name)
        code = [numbered.setdefault(text, len(numbered)) for text in texts] or [0]
        pieces.append(np.array(code, dtype=np.int32)[row_codes])
    width = np.min_scalar_type(~len(numbered))  # ~ makes it negative, so a signed type
    return text_column(_placed(pieces, places, width), list(numbered))


def _placed(pieces: Sequence[Narrow], places: Sequence[_Rows], width: np.dtype[Any]) -> Narrow:
    column: Narrow = np.empty(sum(map(len, pieces)), dtype=width)
    for piece, rows in zip(pieces, places, strict=True):
        column[rows] = piece
    return column


@dataclass(frozen=True)
class Packed:
    """Segments that were read together, cheap to send to another process.

    Segments are pickled with all their spans in one table: pickling a slice of a table would take
    the whole table with each slice.
    """

    segments: tuple[Segment, ...]

    def __reduce__(self) -> tuple[object, ...]:
        tables = [segment.spans for segment in self.segments]
        empty = tables[0].slice(0, 0) if tables else TRACE_SCHEMA.empty_table()
        bare = [replace(segment, spans=empty) for segment in self.segments]
        bounds = np.cumsum([0, *(table.num_rows for table in tables)]).tolist()
        spans = pa.concat_tables(tables or [empty]).unify_dictionaries().combine_chunks()
        return _unpacked, (spans, bare, bounds)


def _unpacked(spans: pa.Table, bare: Sequence[Segment], bounds: Sequence[int]) -> Packed:
    """Cut segments out of one table; `bounds` say where the spans of each begin and end."""
    return Packed(
        tuple(
            replace(segment, spans=spans.slice(begin, end - begin))
            for segment, (begin, end) in zip(bare, pairwise(bounds), strict=True)
        )
    )


Importer: TypeAlias = Callable[[Sequence[Path], Workers], list[Segment]]
"""Function that reads the rank files of a folder: a segment for every rank and run in them, none
for a file that ends before it names its rank. Raises InputError for damage in finished windows."""
