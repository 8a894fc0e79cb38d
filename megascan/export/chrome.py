"""Write Chrome JSON: an array of events, one a line, which any trace viewer opens.

    [
    {"name":"megascan_timeline","ph":"M",…}        the timeline's own record, for readers
    {"name":"process_name",…} {"name":"thread_name",…}   pid = rank, tid = a kind's track
    {"ph":"X","name":"forward","cat":"compute","pid":5,"tid":20,"ts":12.345,"dur":3.25,"args":{…}}
    {"ph":"s",…} {"ph":"f","bp":"e",…}             arrows
    {"ph":"C",…}                                   curves
    ]

Times are µs relative to the timeline's origin, so that a double keeps nanoseconds. Both `ts` and
`dur` stand for whole nanoseconds, so that nesting survives. Arguments that do not apply are left
out.

Texts are made of whole columns at once. Numbers are printed by orjson, which prints a numpy array
ten times faster than a cast to strings: the printed array becomes the data of an Arrow string
column whose entries end after each comma. Columns with few values become fragments: the text of
each combination of values that occurs is made once and then taken by code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Floats, Integers, Narrow, RowNumbers
from megascan.export.arrows import CHAIN_TRACK
from megascan.export.tracks import (
    MARK_NUMBER,
    MARK_TRACK,
    Counter,
    Drawing,
    drawn_rows,
    rank_order,
    rank_title,
    track_number,
    track_title,
)
from megascan.export.writing import Block, Head, row_blocks, timeline_record
from megascan.header import Json
from megascan.schema import NOT_APPLICABLE, TIMELINE_COLUMNS, TIMELINE_EVENT, Column
from megascan.timeline import codes, distinct, numbers, rows_alike
from megascan.topology import Layout

_MOST_CODES = 1 << 16
"""Combined columns have at most this many codes, so that counting them stays cheap."""


def number_texts(values: Narrow | Floats) -> pa.StringArray:
    """Print numbers as JSON, each followed by a comma. Floats must be finite."""
    printed = bytearray(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))
    if not len(values):
        return pa.array([], pa.string())
    printed[-1] = ord(",")
    data = np.frombuffer(printed, dtype=np.uint8)
    offsets = np.empty(len(values) + 1, dtype=np.int32)
    offsets[0] = 1  # after the opening bracket
    offsets[1:] = np.flatnonzero(data == ord(",")) + 1
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(printed))


def microsecond_texts(values_ns: Integers) -> pa.StringArray:
    """Print nanoseconds as microseconds with up to three decimals, exact below 50 days."""
    return number_texts(values_ns / 1000.0)


@dataclass(frozen=True)
class Coded:
    """A column of few values: `codes` in 0…num_codes-1, and a function from a code to its text."""

    codes: Integers
    num_codes: int
    text_of: Callable[[int], str]


def coded_numbers(values: Integers, text_of: Callable[[int], str]) -> Coded:
    """Code a column of integers by its distance from the smallest, or by its distinct values."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low < _MOST_CODES:
        return Coded(values - low, high - low + 1, lambda code: text_of(code + low))
    code, found = distinct(values)
    known = found.tolist()
    return Coded(code, len(known), lambda code: text_of(known[code]))


def coded_texts(table: pa.Table, name: str, template: str) -> Coded:
    """Code a text column as JSON strings, each put into the template's braces."""
    code, texts = codes(table, name)
    quoted = [template.format(orjson.dumps(text).decode()) for text in texts]
    return Coded(code, max(len(texts), 1), lambda number: quoted[number])


def coded_argument(table: pa.Table, column: Column) -> Coded:
    """Code a column of few values as `"name":value,`, or as "" where it does not apply."""
    if column.type == "text":
        code, texts = codes(table, column.name)
        quoted = [
            f'"{column.name}":{orjson.dumps(text).decode()},' if text else "" for text in texts
        ]
        return Coded(code, max(len(texts), 1), lambda number: quoted[number])
    return coded_numbers(
        numbers(table, column.name),
        lambda value: "" if value == NOT_APPLICABLE else f'"{column.name}":{value},',
    )


@dataclass(frozen=True)
class Fragments:
    """One text a row: the distinct `texts`, and the `code` of each row's text."""

    texts: pa.StringArray
    code: Integers

    def of(self, rows: Integers | slice = slice(None)) -> pa.StringArray:
        """Return the texts of some rows."""
        return self.texts.take(pa.array(self.code[rows]))


def fragments(columns: Sequence[Coded]) -> list[Fragments]:
    """Combine columns, in their order, into few columns of texts."""
    texts: list[Fragments] = []
    pending: list[Coded] = []
    for column in columns:
        product = column.num_codes
        for other in pending:
            product *= other.num_codes
        if pending and product > _MOST_CODES:
            texts.append(_combined(pending))
            pending = []
        pending.append(column)
    if pending:
        texts.append(_combined(pending))
    return texts


def row_texts(columns: Sequence[Coded]) -> list[pa.StringArray]:
    """Combine columns, in their order, into few columns with a text for each row."""
    return [found.of() for found in fragments(columns)]


def _combined(columns: Sequence[Coded]) -> Fragments:
    key = columns[0].codes
    for column in columns[1:]:
        key = key * column.num_codes + column.codes
    used, place = _used_codes(key)
    parts: list[list[str]] = []
    rest = used
    for column in reversed(columns):
        rest, code = np.divmod(rest, column.num_codes)
        parts.append(_texts_of(column, code))
    texts = ["".join(reversed(pieces)) for pieces in zip(*parts, strict=True)]
    return Fragments(pa.array(texts, pa.string()), place)


def _texts_of(column: Coded, code: Integers) -> list[str]:
    made = {each: column.text_of(each) for each in set(code.tolist())}
    return [made[each] for each in code.tolist()]


def _used_codes(key: Integers) -> tuple[Integers, Integers]:
    if not len(key) or int(key.max()) >= 2 * _MOST_CODES:
        used, place = np.unique(key, return_inverse=True)
        return used, place.astype(np.int64)
    present = np.zeros(int(key.max()) + 1, dtype=np.bool_)
    present[key] = True
    renumber = np.cumsum(present) - 1
    return np.flatnonzero(present), renumber[key]


_TOP_LEVEL = ("rank", "kind", "name", "start_ns", "duration_ns")
_MANY_VALUED = (
    "sequence", "cpu_ns", "launch_ns", "match", "wait_ns", "transfer_ns", "self_ns", "self_cpu_ns",
)  # fmt: skip
"""Columns with about as many values as spans; all others become fragments."""
_LAST = "track"
"""Column that applies to every span, so it can close the event without a comma."""
_FEW_VALUED = tuple(
    column for column in TIMELINE_COLUMNS if column.name not in (*_TOP_LEVEL, *_MANY_VALUED, _LAST)
)


def chrome_pieces(drawing: Drawing) -> tuple[Head, Iterator[Block]]:
    """Return the pieces of the file in order."""
    return partial(_head, drawing), _blocks(drawing)


def _head(drawing: Drawing) -> tuple[int, bytes]:
    """Make the timeline's record, names of ranks and tracks, and marks."""
    record = _meta(TIMELINE_EVENT, next(iter(drawing.ranks), 0), 0, timeline_record(drawing))
    records = [record, *_metadata(drawing), *_marks(drawing)]
    option = orjson.OPT_NON_STR_KEYS
    text = b",\n".join(orjson.dumps(record, option=option) for record in records)
    return len(records), b"[\n" + text


def _blocks(drawing: Drawing) -> Iterator[Block]:
    axes = _Axes(drawing.timeline.origin_ns, tid_base(drawing.timeline.layout))
    for shard in drawing.shards:
        for rows in row_blocks(shard.num_rows):
            count = rows.stop - rows.start
            yield Block(count, _span_block, (shard.spans, shard.laid, axes, rows))
    yield from _arrow_blocks(drawing, axes)
    for curve in drawing.counters:
        yield Block(len(curve.value), bytes(_counter_block(axes.origin_ns, curve)))
    events = [orjson.dumps(event) for event in _chain(drawing, axes)]
    yield Block(len(events), b"".join(b",\n" + event for event in events))
    yield Block(0, b"\n]\n")


@dataclass(frozen=True)
class _Axes:
    """Origins of an event's place: times count from `origin_ns`, tracks from `first_tid`."""

    origin_ns: int
    first_tid: int


def _metadata(drawing: Drawing) -> Iterator[dict[str, Json]]:
    layout, headers = drawing.timeline.layout, drawing.timeline.headers
    for place, rank in enumerate(sorted(drawing.ranks, key=partial(rank_order, layout))):
        yield _meta("process_name", rank, 0, {"name": rank_title(layout, rank, headers.get(rank))})
        yield _meta("process_sort_index", rank, 0, {"sort_index": place})
    for track in drawing.tracks:
        title = track_title(track.kind, track.lane)
        yield from _track_metadata(track.rank, tid_base(layout) + track.number, title)
    for rank in sorted({mark.rank for mark in drawing.marks}):
        yield from _track_metadata(rank, _mark_tid(layout), MARK_TRACK)


def _track_metadata(rank: int, tid: int, title: str) -> Iterator[dict[str, Json]]:
    yield _meta("thread_name", rank, tid, {"name": title})
    yield _meta("thread_sort_index", rank, tid, {"sort_index": tid})


def _meta(name: str, pid: int, tid: int, args: dict[str, Json]) -> dict[str, Json]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def tid_base(layout: Layout) -> int:
    """Return what to add to thread ids: viewers draw a thread first whose id is its process's."""
    return 10 ** len(str(layout.world_size - 1)) if layout.world_size > 10 else 0


def _mark_tid(layout: Layout) -> int:
    return tid_base(layout) + track_number(MARK_NUMBER, 1)  # 0 would become the pid


def _marks(drawing: Drawing) -> Iterator[dict[str, Json]]:
    origin_ns = drawing.timeline.origin_ns
    for mark in drawing.marks:
        start_ns = max(mark.start_ns - origin_ns, 0)
        yield {
            "ph": "X",
            "name": mark.label,
            "cat": MARK_TRACK,
            "pid": mark.rank,
            "tid": _mark_tid(drawing.timeline.layout),
            "ts": start_ns / 1000,
            "dur": max(mark.end_ns - origin_ns - start_ns, 0) / 1000,
            "args": mark.args,
        }


def _chain(drawing: Drawing, axes: _Axes) -> Iterator[dict[str, Json]]:
    """Yield the chain's slices, on a process of the whole job, and arrows from its spans.

    An arrow lies where its slice begins, or where its span ends if that is earlier.
    """
    if not drawing.chain:
        return
    pid, tid = drawing.timeline.layout.world_size, _mark_tid(drawing.timeline.layout)  # no rank's
    yield _meta("process_name", pid, 0, {"name": CHAIN_TRACK})
    yield _meta("process_sort_index", pid, 0, {"sort_index": -1})
    yield from _track_metadata(pid, tid, CHAIN_TRACK)
    (shard,) = drawing.shards
    spans, track = drawn_rows(shard.spans.open(), shard.laid.open(), slice(0, shard.num_rows))
    rank, start_ns, duration_ns = (
        numbers(spans, name) for name in ("rank", "start_ns", "duration_ns")
    )
    first_id = int(drawing.arrows.start.max(initial=0)) + 1
    for number, hop in enumerate(drawing.chain):
        place: dict[str, Json] = {"pid": pid, "tid": tid}
        yield {
            "ph": "X",
            "name": hop.label,
            "cat": CHAIN_TRACK,
            **place,
            "ts": (hop.start_ns - axes.origin_ns) / 1000,
            "dur": (hop.end_ns - hop.start_ns) / 1000,
            "args": hop.args,
        }
        row = hop.row
        if row < 0 or not duration_ns[row]:
            continue
        end_ns = int(start_ns[row] + duration_ns[row])
        at_ns = min(max(hop.start_ns, int(start_ns[row])), end_ns - 1)
        if at_ns >= hop.end_ns:
            continue
        flow: dict[str, Json] = {
            "cat": CHAIN_TRACK,
            "name": CHAIN_TRACK,
            "id": first_id + number,
            "args": {},
        }
        source_tid = int(track[row]) + axes.first_tid
        source_us = (at_ns - axes.origin_ns) / 1000
        yield {"ph": "s", **flow, "pid": int(rank[row]), "tid": source_tid, "ts": source_us}
        target_us = (max(at_ns, hop.start_ns) - axes.origin_ns) / 1000
        yield {"ph": "f", "bp": "e", **flow, **place, "ts": target_us}


def _span_block(spans: pa.Table, laid: pa.Table, axes: _Axes, rows: slice) -> memoryview:
    """Make the events of some rows of a shard, grouped by which many-valued columns apply."""
    table, track = drawn_rows(spans, laid, rows)
    values = {name: numbers(table, name) for name in _MANY_VALUED}
    pattern = sum((values[name] != NOT_APPLICABLE) << bit for bit, name in enumerate(_MANY_VALUED))
    head, tail = _few_valued(table, track + axes.first_tid)
    start_ns = numbers(table, "start_ns") - axes.origin_ns
    duration_ns = numbers(table, "duration_ns")
    pieces = []
    for bits, alike in sorted((int(pattern[rows[0]]), rows) for rows in rows_alike(pattern)):
        parts: list[pa.StringArray | str] = [text.of(alike) for text in head]
        parts += ['"ts":', microsecond_texts(start_ns[alike])]
        parts += ['"dur":', microsecond_texts(duration_ns[alike]), '"args":{']
        for bit, name in enumerate(_MANY_VALUED):
            if bits >> bit & 1:
                parts += [f'"{name}":', number_texts(values[name][alike])]
        parts += [text.of(alike) for text in tail]
        pieces.append(_joined(parts))
    return _text_of(pieces)


def _few_valued(table: pa.Table, tid: Integers) -> tuple[list[Fragments], list[Fragments]]:
    """Return the texts before and after the many-valued numbers of each row's event."""
    head = [
        coded_texts(table, "name", ',\n{{"ph":"X","name":{},'),
        coded_texts(table, "kind", '"cat":{},'),
        coded_numbers(tid, lambda value: f'"tid":{value},'),
        coded_numbers(numbers(table, "rank"), lambda rank: f'"pid":{rank},'),
    ]
    tail = [coded_argument(table, column) for column in _FEW_VALUED]
    tail.append(coded_numbers(numbers(table, _LAST), lambda value: f'"{_LAST}":{value}}}}}'))
    return fragments(head), fragments(tail)


def _joined(parts: list[pa.StringArray | str]) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, "")


def _text_of(pieces: list[pa.StringArray]) -> memoryview:
    whole = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
    offsets = np.frombuffer(whole.buffers()[1], dtype=np.int32)
    return memoryview(whole.buffers()[2])[: int(offsets[len(whole)])]


def _arrow_blocks(drawing: Drawing, axes: _Axes) -> Iterator[Block]:
    """Yield all arrows' starts, then all finishes, so that of equal times a start comes first."""
    arrows = drawing.arrows
    for phase, shards, time_of in (
        ('"ph":"s"', drawing.by_shard(arrows.start_row, arrows.distinct_starts()), arrows.start_ns),
        ('"ph":"f","bp":"e"', drawing.by_shard(arrows.finish_row), arrows.finish_ns),
    ):
        for shard, own, row in shards:
            for part in row_blocks(len(own)):
                here = own[part]
                ends = _ArrowEnds(phase, arrows.start[here], row[part], time_of(here))
                yield Block(len(here), _arrow_block, (shard.spans, shard.laid, axes, ends))


@dataclass(frozen=True)
class _ArrowEnds:
    """Starts or finishes of arrows on rows of a shard, every array of shape (end,)."""

    phase: str
    ids: RowNumbers
    rows: RowNumbers
    time_ns: Integers


def _arrow_block(spans: pa.Table, laid: pa.Table, axes: _Axes, ends: _ArrowEnds) -> memoryview:
    table, track = drawn_rows(spans.select(["rank"]), laid, ends.rows)
    place = [
        coded_numbers(track + axes.first_tid, lambda value: f'"tid":{value},'),
        coded_numbers(numbers(table, "rank"), lambda pid: f'"pid":{pid},'),
    ]
    opening = f',\n{{{ends.phase},"cat":"match","name":"match","id":'
    times = microsecond_texts(ends.time_ns - axes.origin_ns)
    parts = [opening, number_texts(ends.ids), *row_texts(place), '"ts":', times, '"args":{}}']
    return _text_of([_joined(parts)])


def _counter_block(origin_ns: int, curve: Counter) -> memoryview:
    place = [coded_numbers(curve.rank, lambda pid: f'"pid":{pid},')]
    opening = f',\n{{"ph":"C","name":"{curve.name}",'
    values = number_texts(np.round(curve.value, 6))
    times = microsecond_texts(curve.time_ns - origin_ns)
    stripped = pc.binary_slice(values.cast(pa.binary()), 0, -1).cast(pa.string())
    parts = [opening, *row_texts(place), '"ts":', times]
    parts += [f'"args":{{"{curve.unit}":', stripped, "}}"]
    return _text_of([_joined(parts)])
