"""Chrome JSON: an array of events, one a line, as any trace viewer takes it.

    [
    {"name":"megascan_timeline","ph":"M",…}        the timeline's own record, for readers
    {"name":"process_name",…} {"name":"thread_name",…}   pid = rank, tid = a kind's track
    {"ph":"X","name":"forward","cat":"compute","pid":5,"tid":20,"ts":12.345,"dur":3.25,"args":{…}}
    {"ph":"s",…} {"ph":"f","bp":"e",…}             arrows
    {"ph":"C",…}                                   curves
    ]

Times are µs relative to the timeline's origin, so that a double keeps nanoseconds; `ts + dur` of
a line are those of whole nanoseconds, so that nesting survives. Arguments that do not apply are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.export.block import BLOCK_ROWS, Block
from megascan.export.counters import Counter
from megascan.export.drawing import Drawing
from megascan.export.naming import (
    MARK_NUMBER,
    MARK_TRACK,
    rank_order,
    rank_title,
    track_number,
    track_title,
)
from megascan.export.text_columns import (
    Fragments,
    coded_argument,
    coded_numbers,
    coded_texts,
    fragments,
    microsecond_texts,
    number_texts,
    row_texts,
)
from megascan.export.timeline_record import timeline_record
from megascan.header import Json
from megascan.schema import NOT_APPLICABLE, TIMELINE_COLUMNS, TIMELINE_EVENT, Column
from megascan.timeline import numbers
from megascan.topology import Layout

Integers = npt.NDArray[np.int64]

_TOP_LEVEL = {"rank", "kind", "name", "start_ns", "duration_ns"}
_MANY_VALUED = (
    "sequence", "cpu_ns", "launch_ns", "match", "wait_ns", "transfer_ns", "self_ns", "self_cpu_ns",
)  # fmt: skip
"""Columns with about as many values as spans; the others come as fragments."""
_LAST = "track"
"""Always applies, so it can close the event without a comma."""


def chrome_blocks(drawing: Drawing) -> Iterator[Block]:
    """The file piece by piece, in order. Pieces are independent and may be made in any thread."""
    records = [_timeline_event(drawing), *_metadata(drawing), *_marks(drawing)]
    text = b"[\n" + b",\n".join(map(_dumps, records))
    yield Block(len(records), lambda: text)
    for first in range(0, drawing.spans.num_rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, drawing.spans.num_rows - first)
        yield Block(count, partial(_span_block, drawing, first, count))
    yield from _arrow_blocks(drawing)
    for curve in drawing.counters:
        yield Block(len(curve.value), partial(_counter_block, drawing.timeline.origin_ns, curve))
    yield Block(0, lambda: b"\n]\n")


def _dumps(record: dict[str, Json]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_NON_STR_KEYS)


def _timeline_event(drawing: Drawing) -> dict[str, Json]:
    pid = drawing.ranks[0] if drawing.ranks else 0
    args = timeline_record(drawing)
    return {"name": TIMELINE_EVENT, "ph": "M", "pid": pid, "tid": 0, "args": args}


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
    """Lifts thread ids above all ranks: a thread whose id is its process's is drawn first."""
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


def _span_block(drawing: Drawing, first: int, count: int) -> memoryview:
    """Events of `count` rows from `first`, grouped by which many-valued columns apply."""
    table = drawing.spans.slice(first, count)
    tid = _tids(drawing, slice(first, first + count))
    values = {name: numbers(table, name) for name in _MANY_VALUED}
    pattern = sum((values[name] != NOT_APPLICABLE) << bit for bit, name in enumerate(_MANY_VALUED))
    head, tail = _few_valued(table, tid)
    start_ns = numbers(table, "start_ns") - drawing.timeline.origin_ns
    duration_ns = numbers(table, "duration_ns")
    pieces = []
    for bits in np.unique(pattern).tolist():
        rows = np.flatnonzero(pattern == bits)
        parts: list[pa.StringArray | str] = [text.of(rows) for text in head]
        parts += ['"ts":', microsecond_texts(start_ns[rows])]
        parts += ['"dur":', microsecond_texts(duration_ns[rows]), '"args":{']
        for bit, name in enumerate(_MANY_VALUED):
            if bits >> bit & 1:
                parts += [f'"{name}":', number_texts(values[name][rows])]
        parts += [text.of(rows) for text in tail]
        pieces.append(_joined(parts))
    return _text_of(pieces)


def _tids(drawing: Drawing, rows: slice | Integers) -> Integers:
    tids: Integers = drawing.track[rows].astype(np.int64) + tid_base(drawing.timeline.layout)
    return tids


def _few_valued(table: pa.Table, tid: Integers) -> tuple[list[Fragments], list[Fragments]]:
    """What stands before and behind the numbers of each row's event."""
    head = [
        coded_texts(table, "name", ',\n{{"ph":"X","name":{},'),
        coded_texts(table, "kind", '"cat":{},'),
        coded_numbers(tid, lambda value: f'"tid":{value},'),
        coded_numbers(numbers(table, "rank"), lambda rank: f'"pid":{rank},'),
    ]
    tail = [coded_argument(table, column) for column in TIMELINE_COLUMNS if _is_few_valued(column)]
    tail.append(coded_numbers(numbers(table, _LAST), lambda value: f'"{_LAST}":{value}}}}}'))
    return fragments(head), fragments(tail)


def _is_few_valued(column: Column) -> bool:
    return column.name not in _TOP_LEVEL | {_LAST} and column.name not in _MANY_VALUED


def _joined(parts: list[pa.StringArray | str]) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, "")


def _text_of(pieces: list[pa.StringArray]) -> memoryview:
    whole = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
    offsets = np.frombuffer(whole.buffers()[1], dtype=np.int32)
    return memoryview(whole.buffers()[2])[: int(offsets[len(whole)])]


def _arrow_blocks(drawing: Drawing) -> Iterator[Block]:
    arrows = drawing.arrows
    starts = arrows.distinct_starts()
    yield from _phase_blocks(
        drawing, '"ph":"s"', arrows.start[starts], arrows.start_row[starts], arrows.start_ns[starts]
    )
    yield from _phase_blocks(
        drawing, '"ph":"f","bp":"e"', arrows.start, arrows.finish_row, arrows.finish_ns
    )


def _phase_blocks(
    drawing: Drawing, phase: str, ids: Integers, rows: Integers, time_ns: Integers
) -> Iterator[Block]:
    for first in range(0, len(ids), BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        work = partial(_arrow_block, drawing, phase, ids[part], rows[part], time_ns[part])
        yield Block(len(ids[part]), work)


def _arrow_block(
    drawing: Drawing, phase: str, ids: Integers, rows: Integers, time_ns: Integers
) -> memoryview:
    index = pa.array(rows)
    rank = numbers(drawing.spans.select(["rank"]).take(index), "rank")
    place = [
        coded_numbers(_tids(drawing, rows), lambda value: f'"tid":{value},'),
        coded_numbers(rank, lambda pid: f'"pid":{pid},'),
    ]
    opening = f',\n{{{phase},"cat":"match","name":"match","id":'
    times = microsecond_texts(time_ns - drawing.timeline.origin_ns)
    parts = [opening, number_texts(ids), *row_texts(place), '"ts":', times, '"args":{}}']
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
