"""Declare what packages hand to each other: a Trace (as recorded) and a Timeline (on one clock).

Both have an Arrow table of spans with the columns of `megascan.schema`, ordered by (rank, start_ns,
-duration_ns), and one header a rank. Integers are never null: `schema.NOT_APPLICABLE` stands where
a column has no meaning. Columns are read by `numbers`, `codes` and `equals`.

Of a large trace only the **ends** are handed on: the spans that other ranks must know
(communication, and iterations), in the few columns that matching and alignment need. All spans stay
in shards, each with the ranks of some files, with the workers that read them (`Stay`, `Shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from megascan.arrays import Flags, Integers, Narrow, RowNumbers, order_by, rank_blocks
from megascan.header import Json, RankHeader, WindowRecord
from megascan.parallel import Kept, Workers, over_blocks
from megascan.schema import (
    COMMUNICATION_KINDS,
    NOT_APPLICABLE,
    SPAN_COLUMNS,
    TIMELINE_COLUMNS,
    Column,
    Kind,
    Track,
)
from megascan.topology import Layout

_ARROW_TYPES = {
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "text": pa.dictionary(pa.int32(), pa.string()),
}


_PIECE_ROWS = 1 << 16
ROWS_A_THREAD = 1 << 18
"""Rows that one thread walks over at a time: more than a shard has, as shards have processes."""


def arrow_schema(columns: tuple[Column, ...]) -> pa.Schema:
    """Return the Arrow schema of declared columns; text is dictionary-encoded."""
    return pa.schema([(column.name, _ARROW_TYPES[column.type]) for column in columns])


TRACE_SCHEMA = arrow_schema(SPAN_COLUMNS)
TIMELINE_SCHEMA = arrow_schema(TIMELINE_COLUMNS)


END_COLUMNS = (
    "rank", "kind", "name", "start_ns", "duration_ns", "iteration", "microbatch", "op", "group",
    "sequence", "size_bytes", "peer", "direction", "end_is_bound",
)  # fmt: skip
"""Columns of ends, for matching, alignment and arrows between ranks.

In a large trace, ends are most of what a single process holds, so the ends it keeps are `narrowed`.
"""
_DRAWN_END_COLUMNS = ("rank", "kind", "start_ns", "duration_ns", "iteration", "op", "match")
"""Columns of ends for arrows and rows of iterations."""
_NEVER_NARROWED = ("rank", "start_ns", "duration_ns")
"""Columns that stay wide: clocks change times, and a shard's ranks need not be among its ends."""


@dataclass(frozen=True)
class Extent:
    """Times and iterations between which the spans of a stretch lie, by the rank's own clock.

    `last` is the (start_ns, duration_ns) of the span that ends last, `device` that of the last span
    among those that the host launched to its device (`is_launched`); None if there are none.
    """

    num_ends: int
    start_ns: int
    last_start_ns: int
    last: tuple[int, int]
    device: tuple[int, int] | None
    first_iteration: int
    last_iteration: int


@dataclass(frozen=True)
class Stay:
    """Where spans of a rank stay: rows of a shard, without those of iterations in `left_out`.

    These are all spans of the rank, or those of a stretch of its windows, which has an `extent`.
    """

    shard: int
    begin: int
    end: int
    left_out: frozenset[int] = frozenset()
    extent: Extent | None = None


@dataclass(frozen=True)
class Shard:
    """Spans of some ranks on the common clock (schema TIMELINE_SCHEMA), ordered as in a timeline.

    `ends` are the rows of the shard's ends in the table of all ends, in the order of the shard. A
    rank with many spans has several shards, one after the other in time; no span and no iteration
    lies in two of them.
    """

    spans: Kept
    num_spans: int
    ranks: tuple[int, ...]
    ends: Narrow


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """What a trace has and what is missing; `notes` are sentences for readers of a summary."""

    world_size: int
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...] = ()
    num_spans: int = 0
    num_unfinished_spans: int = 0
    """Spans after the last finished window of a rank, which are left out."""
    num_unmatched: Mapping[str, int] = field(default_factory=dict)
    """Communication spans without a counterpart, by kind (after matching)."""
    num_duplicates: int = 0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the fields as they stand in reports and timeline files."""
        record: dict[str, Json] = asdict(self)
        record["ranks"], record["missing_ranks"] = list(self.ranks), list(self.missing_ranks)
        record["num_unmatched"], record["notes"] = dict(self.num_unmatched), list(self.notes)
        return record


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run as its ranks recorded it; `start_ns` is unix time by each rank's own clock."""

    run_id: str
    layout: Layout
    headers: Mapping[int, RankHeader]
    """Headers by global rank, of the ranks that are in the trace."""
    spans: pa.Table
    """Spans, or only the ends, with schema TRACE_SCHEMA."""
    windows: Mapping[int, tuple[WindowRecord, ...]]
    """Finished windows by global rank."""
    completeness: Completeness
    stays: Mapping[int, tuple[Stay, ...]] = field(default_factory=dict)
    """Where all spans stay, by rank, if `spans` are only the ends; stretches in order of time."""


@dataclass(frozen=True, kw_only=True)
class ClockFit:
    """Correction of one rank's clock.

    common = local + offset_ns + drift_ppm · 1e-6 · (local − the timeline's origin_ns)

    The residual says how far matched ends still lie apart, median and 99th percentile. `error_ns`
    is the error bar of comparing this rank's times with those of its component's reference (0 if
    nothing ties it to another clock); the error bar of two ranks is at most the larger one.
    `component` numbers the sets of ranks that share collectives.
    """

    rank: int
    domain: str
    offset_ns: float
    drift_ppm: float
    residual_median_ns: float
    residual_p99_ns: float
    num_anchors: int
    component: int = 0
    error_ns: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A run on one clock, with matches, waits and self times, for exporters and the detector.

    `origin_ns` is the unix time of the earliest span. `clock_method` is one sentence on how
    clocks were aligned.
    """

    run_id: str
    layout: Layout
    headers: Mapping[int, RankHeader]
    spans: pa.Table
    """Schema TIMELINE_SCHEMA."""
    windows: Mapping[int, tuple[WindowRecord, ...]]
    clocks: Mapping[int, ClockFit]
    clock_method: str
    origin_ns: int
    completeness: Completeness


def is_sampled(timeline: Timeline) -> bool:
    """Return whether in any iteration modules of only some layers were recorded."""
    return any(window.layers for windows in timeline.windows.values() for window in windows)


@dataclass(frozen=True, kw_only=True)
class ShardedTimeline:
    """A timeline whose spans stay with the `workers`, in shards.

    `frame` is the timeline without spans; `ends` has the ends of all ranks on the common clock,
    ordered as spans are, with match and transfer_ns.
    """

    frame: Timeline
    ends: pa.Table
    shards: tuple[Shard, ...]
    workers: Workers

    def whole(self, chosen: Callable[[pa.Table], pa.Table] | None = None) -> Timeline:
        """Return the timeline with its spans in this process, in the order of a timeline.

        These are all spans, or the spans that `chosen` returns for each shard.
        """
        kept = [shard.spans for shard in self.shards]
        if chosen is not None:
            tasks = [(spans, chosen) for spans in kept]
            kept = [one for one, _ in self.workers.keep(_chosen, tasks)]
        parts: dict[int, list[pa.Table]] = {}
        for shard, handle in zip(self.shards, kept, strict=True):
            spans = handle.open()
            bounds = np.searchsorted(numbers(spans, "rank"), [*shard.ranks, shard.ranks[-1] + 1])
            for rank, low, high in zip(shard.ranks, bounds[:-1], bounds[1:], strict=True):
                parts.setdefault(rank, []).append(spans.slice(int(low), int(high - low)))
        ordered = [one for rank in sorted(parts) for one in parts[rank]]
        spans = pa.concat_tables(ordered).unify_dictionaries()
        # in one piece, as otherwise each look at a column would join its pieces again
        return replace(self.frame, spans=spans.combine_chunks())

    def for_drawing(self) -> ShardedTimeline:
        """Return the timeline with only the columns of ends for drawing, half of their bytes."""
        return replace(self, ends=self.ends.select(_DRAWN_END_COLUMNS))

    def by_ranks(self) -> list[tuple[tuple[int, ...], list[Kept]]]:
        """Return (ranks, shards) for each set of ranks that share shards, in order of shards."""
        found: dict[tuple[int, ...], list[Kept]] = {}
        for shard in self.shards:
            found.setdefault(shard.ranks, []).append(shard.spans)
        return list(found.items())


def _chosen(spans: pa.Table, chosen: Callable[[pa.Table], pa.Table]) -> tuple[pa.Table, None]:
    return chosen(spans), None


def is_end(spans: pa.Table) -> Flags:
    """Mark the spans that other ranks must know, or that say where iterations are."""
    return equals(spans, "kind", *COMMUNICATION_KINDS, Kind.ITERATION)


def is_launched(spans: pa.Table) -> Flags:
    """Mark the spans that the host launched to its device, where they run one after the other."""
    launched: Flags = numbers(spans, "launch_ns") != NOT_APPLICABLE
    beside: Flags = numbers(spans, "track") == Track.OVERLAPPED
    return launched & ~beside


def ends_of(spans: pa.Table) -> pa.Table:
    """Return the ends among spans, narrowed."""
    return narrowed(spans.select(END_COLUMNS).filter(pa.array(is_end(spans))))


def narrowed(ends: pa.Table) -> pa.Table:
    """Return ends with each column's numbers and codes in as few bytes as its largest needs.

    Microbatches, sequences and codes of texts rarely exceed a byte or two.
    """
    columns = [
        ends.column(name) if name in _NEVER_NARROWED else _narrowed(ends, name)
        for name in ends.column_names
    ]
    return pa.table(columns, names=ends.column_names)


def _narrowed(table: pa.Table, name: str) -> pa.Array:
    if not pa.types.is_dictionary(table.schema.field(name).type):
        return pa.array(_in_fewest_bytes(narrow(table, name)))
    row_codes, texts = narrow_codes(table, name)
    return text_column(_in_fewest_bytes(row_codes), texts)


def text_column(row_codes: Narrow, texts: Sequence[str]) -> pa.DictionaryArray:
    """Make a column of texts whose codes are as wide as `row_codes`."""
    return pa.DictionaryArray.from_arrays(pa.array(row_codes), pa.array(texts, type=pa.string()))


def span_table(
    num_rows: int,
    integers: Mapping[str, Integers | int],
    texts: Mapping[str, tuple[Integers, Sequence[str]]],
    schema: pa.Schema = TRACE_SCHEMA,
) -> pa.Table:
    """Make a table of spans; `texts` are (code of each row, text of each code).

    Columns that are not given are filled with NOT_APPLICABLE or "".
    """
    arrays = []
    for column in schema:
        if pa.types.is_dictionary(column.type):
            row_codes, values = texts.get(column.name, (np.zeros(num_rows, np.int64), [""]))
            arrays.append(_encoded(row_codes, values))
        else:
            value = integers.get(column.name, NOT_APPLICABLE)
            if isinstance(value, int):
                value = np.full(num_rows, value, dtype=number_type(column.type))
            arrays.append(pa.array(value).cast(column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _encoded(row_codes: Integers, values: Sequence[str]) -> pa.DictionaryArray:
    """Make a dictionary column whose dictionary has every text once."""
    unique = list(dict.fromkeys(values)) or [""]
    position = {text: place for place, text in enumerate(unique)}
    renumbered = np.array([position[text] for text in values] or [0], dtype=np.int32)
    return text_column(renumbered[row_codes], unique)


def _in_fewest_bytes(values: Narrow) -> Narrow:
    least, most = int(values.min(initial=0)), int(values.max(initial=0))
    return values.astype(np.min_scalar_type(min(least, ~most)))  # below 0, so a signed type


def sharded(timeline: Timeline, workers: Workers) -> ShardedTimeline:
    """Return a timeline, whose spans this process holds, as a single shard."""
    spans = timeline.spans.unify_dictionaries()
    rows = pa.array(np.flatnonzero(is_end(spans)))
    ranks = tuple(np.unique(numbers(spans, "rank")).tolist())
    return ShardedTimeline(
        frame=replace(timeline, spans=spans.slice(0, 0)),
        ends=spans.select([*END_COLUMNS, "match", "transfer_ns"]).take(rows),
        shards=(Shard(workers.put(spans), spans.num_rows, ranks, np.arange(len(rows))),),
        workers=workers,
    )


def give_back_memory() -> None:
    """Return freed memory to the system.

    Memory that a step frees lies in pieces that are too small for the next step's arrays.
    """
    pa.default_memory_pool().release_unused()


def integer_column(values: Narrow) -> pa.ChunkedArray:
    """Make a column of integers; if all are equal, one short piece is repeated."""
    if not len(values) or (values != values[0]).any():
        return pa.chunked_array([pa.array(values)])
    piece = pa.array(values[:_PIECE_ROWS].copy())
    num_whole, rest = divmod(len(values), _PIECE_ROWS)
    return pa.chunked_array([piece] * num_whole + [piece.slice(0, rest)])


def numbers(table: pa.Table, name: str) -> Integers:
    """Return an integer column as int64."""
    return np.asarray(narrow(table, name), dtype=np.int64)


def narrow(table: pa.Table, name: str) -> Narrow:
    """Return an integer column as wide as it is stored, without a copy if it is in one piece."""
    return np.asarray(_whole(table.column(name)).to_numpy(zero_copy_only=False))


def number_type(kind: pa.DataType) -> np.dtype[Any]:
    """Return numpy's type for Arrow's type of integers or floats.

    Arrow's own answer (`to_pandas_dtype`) fails before its version 26 where pandas is not there.
    """
    is_unsigned = pa.types.is_unsigned_integer(kind)
    letter = "f" if pa.types.is_floating(kind) else "u" if is_unsigned else "i"
    return np.dtype(f"{letter}{kind.bit_width // 8}")


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece; Arrow's own function copies even a column in one piece."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def with_column(table: pa.Table, name: str, values: Integers) -> pa.Table:
    """Return a table with a column's integers replaced."""
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values))


def shifted(spans: pa.Table, by_ns: int | Integers) -> pa.Table:
    """Return spans with start times moved, all by one integer or each by its own."""
    return with_column(spans, "start_ns", numbers(spans, "start_ns") + by_ns)


def distinct(values: Integers) -> tuple[Integers, Integers]:
    """Return each value's number, and the distinct values, in the order of first appearance."""
    encoded = pa.array(values).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_numpy()


def rows_alike(values: Integers) -> list[Integers]:
    """Return the rows, ascending, of each distinct value, in the order of first appearance."""
    code, found = distinct(values)
    few = len(found) < 2**16  # numpy then sorts by radix, ten times faster
    order = np.argsort(code.astype(np.uint16) if few else code, kind="stable")
    bounds = [0, *np.cumsum(np.bincount(code, minlength=len(found))).tolist()]
    return [order[low:high] for low, high in pairwise(bounds)]


def first_rows(code: Integers, num_codes: int) -> Integers:
    """Return (code,) the first row with each code; all codes must occur."""
    first = np.empty(num_codes, dtype=np.int64)
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    return first


def codes(table: pa.Table, name: str) -> tuple[Integers, list[str]]:
    """Return a text column as (code of each row, text of each code)."""
    row_codes, texts = narrow_codes(table, name)
    return row_codes.astype(np.int64), texts


def narrow_codes(table: pa.Table, name: str) -> tuple[Narrow, list[str]]:
    """Return a text column as `codes` does, with codes as wide as they are stored."""
    column = _whole(table.column(name))
    if isinstance(column, pa.ChunkedArray):  # an empty table keeps its chunks
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column.indices.to_numpy(zero_copy_only=False), column.dictionary.to_pylist()


def equals(table: pa.Table, name: str, *values: str) -> Flags:
    """Mark the rows whose text column is one of `values`."""
    row_codes, texts = narrow_codes(table, name)
    wanted = np.array([text in values for text in texts] or [False], dtype=np.bool_)
    return wanted.take(row_codes)


def row_order(spans: pa.Table) -> RowNumbers | None:
    """Return the order by (rank, start, longest first); None if rows stand in that order already.

    Equal rows keep their order. If ranks ascend already, blocks of ranks are sorted one after the
    other, which takes little memory.
    """
    if _is_in_order(spans):
        return None
    rank, start = narrow(spans, "rank"), numbers(spans, "start_ns")
    duration = numbers(spans, "duration_ns")
    blocks = [slice(0, len(rank))]
    if (rank[1:] >= rank[:-1]).all():
        blocks = rank_blocks(rank, _PIECE_ROWS)
    order = np.empty(len(rank), dtype=np.int32)
    for rows in blocks:
        order[rows] = rows.start + _block_order(rank[rows], start[rows], -duration[rows])
    return order


def _block_order(rank: Narrow, start: Integers, longest_first: Integers) -> Integers:
    """Return the order of a block, of many ranks or of a single one."""
    if rank[0] != rank[-1] or (rank != rank[0]).any():
        return np.lexsort((longest_first, start, rank)).astype(np.int64)
    return order_by(start, longest_first)


def _is_in_order(spans: pa.Table) -> bool:
    """Return whether spans are in order; pieces are checked by threads, without whole copies."""
    batches = spans.select(["rank", "start_ns", "duration_ns"]).to_batches()
    pieces = [
        batch.slice(low, ROWS_A_THREAD)
        for batch in batches
        for low in range(0, batch.num_rows, ROWS_A_THREAD)
    ]
    edges = list(over_blocks(_edges_in_order, pieces))
    return all(edges) and all(one[1] <= other[0] for one, other in pairwise(edges) if one and other)


_Place = tuple[int, int, int]


def _edges_in_order(piece: pa.RecordBatch) -> tuple[_Place, _Place] | None:
    """Return (rank, start, minus the duration) of a piece's first and last span; None if its spans
    are not in order.
    """
    rank, start, duration = (np.asarray(column) for column in piece.columns)
    ranks, steps = np.diff(rank), np.diff(start)
    follows = (steps > 0) | ((steps == 0) & (np.diff(duration) <= 0))
    if not np.all((ranks > 0) | ((ranks == 0) & follows)):
        return None
    first, last = ((int(rank[at]), int(start[at]), -int(duration[at])) for at in (0, -1))
    return first, last


def in_order(spans: pa.Table) -> pa.Table:
    """Put rows in the order of (rank, start_ns, -duration_ns), without a copy if they are."""
    order = row_order(spans)
    if order is None:
        return spans
    spans, rows = spans.unify_dictionaries(), pa.array(order)
    columns = [column.combine_chunks().take(rows) for column in spans.columns]  # one by one: memory
    return pa.Table.from_arrays(columns, schema=spans.schema)


def without(spans: pa.Table, iterations: Collection[int]) -> pa.Table:
    """Return spans without those of some iterations."""
    if not iterations:
        return spans
    kept = np.isin(narrow(spans, "iteration"), sorted(iterations), invert=True)
    return spans.filter(pa.array(kept))
