"""Perfetto protobuf: exact nanoseconds, a tree of tracks, typed arguments, interned texts.

A slice is two packets, its begin (name, category, arguments, leaving arrows) and its end (arriving
arrow: its target may have begun before the arrow's source). The engine sorts packets by time and
keeps the file's order at a tie, so within a block come first the ends, then the begins (longer
first), then the ends of slices of no length: a slice that ends where another begins is closed
before it. Blocks refer only to texts of the file's first packets, so they are made independently.
Times are ns from the timeline's origin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from megascan.export.block import BLOCK_ROWS, Block
from megascan.export.counters import Counter
from megascan.export.drawing import Drawing
from megascan.export.perfetto_head import (
    SPAN_ARGUMENTS,
    SUMMARY_ARGUMENTS,
    SUMMARY_CATEGORY,
    TEXT_ARGUMENTS,
    Interned,
    head,
    intern,
    iteration_name,
)
from megascan.export.perfetto_packets import (
    arriving_flow,
    begin,
    counter,
    end,
    int_argument,
    leaving_flow,
    packets,
    real_argument,
    text_argument,
)
from megascan.export.perfetto_summary import SummarySlices, summarise
from megascan.export.perfetto_tracks import TrackTree, build_tree
from megascan.export.wire import Part, interleaved
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import distinct, numbers

Integers = npt.NDArray[np.int64]

_ARROW_BITS = 20
"""Room for the number of arrows of one span: members of the largest group."""


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """Arrow ends on rows of the span table, sorted by row; both of shape (end,)."""

    rows: Integers
    ids: Integers

    def of_block(self, first: int, count: int) -> _BlockEnds:
        low, high = np.searchsorted(self.rows, [first, first + count])
        num = np.bincount(self.rows[low:high] - first, minlength=count).astype(np.int64)
        return _BlockEnds(num=num, before=np.cumsum(num) - num, ids=self.ids[low:high])


@dataclass(frozen=True, kw_only=True)
class _BlockEnds:
    """Arrow ends of a block: row i has `num[i]` of them, its first one is `ids[before[i]]`."""

    num: Integers
    before: Integers
    ids: Integers

    def of_rows(self, rows: Integers, place: int) -> Integers:
        return self.ids[self.before[rows] + place]


def _ends(rows: Integers, ids: Integers) -> _Ends:
    order = np.argsort(rows, kind="stable")
    return _Ends(rows=rows[order], ids=ids[order])


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """A drawing with everything that its packets refer to."""

    drawing: Drawing
    tree: TrackTree
    interned: Interned
    summary: SummarySlices
    leaving: _Ends
    """On begins."""
    arriving: _Ends
    """On ends."""
    turned: _Ends
    """Arriving on begins: arrows that clock error turned round."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A block of spans as interned numbers, every array of shape (row,)."""

    start_ns: Integers
    end_ns: Integers
    track: Integers
    name: Integers
    category: Integers
    arguments: dict[str, Integers]
    applies: dict[str, npt.NDArray[np.bool_]]


def perfetto_blocks(drawing: Drawing) -> Iterator[Block]:
    """The file piece by piece, in order. Pieces are independent and may be made in any thread."""
    scene = _scene(drawing)
    first_packets = head(drawing, scene.tree, scene.interned)
    yield Block(len(first_packets.packet), first_packets.SerializeToString)
    for first in range(0, drawing.spans.num_rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, drawing.spans.num_rows - first)
        yield Block(2 * count, partial(_span_block, scene, first, count))
    yield Block(2 * len(scene.summary.iteration), partial(_summary_block, scene))
    for curve in drawing.counters:
        yield Block(len(curve.value), partial(_counter_block, scene, curve))


def _scene(drawing: Drawing) -> _Scene:
    tree = build_tree(drawing)
    summary = summarise(drawing, tree)
    arrows = drawing.arrows
    ids = np.arange(1, len(arrows.start) + 1)  # a slice with several arrows needs as many ids
    normal, turned = ~arrows.turned, arrows.turned
    return _Scene(
        drawing=drawing,
        tree=tree,
        interned=intern(drawing.spans, summary),
        summary=summary,
        leaving=_ends(arrows.start_row, ids),
        arriving=_ends(arrows.finish_row[normal], ids[normal]),
        turned=_ends(arrows.finish_row[turned], ids[turned]),
    )


def _rows(scene: _Scene, first: int, count: int) -> _Rows:
    table, texts = scene.drawing.spans.slice(first, count), scene.interned
    start_ns = numbers(table, "start_ns") - scene.drawing.timeline.origin_ns
    arguments, applies = {}, {}
    for name in SPAN_ARGUMENTS:
        if name in TEXT_ARGUMENTS:
            arguments[name] = texts.values.column(table, name)
            applies[name] = arguments[name] > 0
        else:
            arguments[name] = numbers(table, name)
            applies[name] = arguments[name] != NOT_APPLICABLE
    return _Rows(
        start_ns=start_ns,
        end_ns=start_ns + numbers(table, "duration_ns"),
        track=_track_uuids(scene, numbers(table, "rank"), first, count),
        name=texts.names.column(table, "name"),
        category=texts.categories.column(table, "kind"),
        arguments=arguments,
        applies=applies,
    )


def _track_uuids(scene: _Scene, rank: Integers, first: int, count: int) -> Integers:
    track = scene.drawing.track[first : first + count].astype(np.int64)
    width = int(track.max(initial=0)) + 1
    place, used = distinct(rank * width + track)
    uuids = [scene.tree.kinds[key // width, key % width] for key in used.tolist()]
    return np.array(uuids, dtype=np.int64)[place]


def _span_block(scene: _Scene, first: int, count: int) -> bytes:
    rows = _rows(scene, first, count)
    lasting = rows.end_ns > rows.start_ns
    arriving = scene.arriving.of_block(first, count)
    leaving, turned = scene.leaving.of_block(first, count), scene.turned.of_block(first, count)
    return b"".join(
        [
            _end_packets(rows, np.flatnonzero(lasting), arriving),
            _begin_packets(scene.interned, rows, leaving, turned),
            _end_packets(rows, np.flatnonzero(~lasting), arriving),
        ]
    )


def _end_packets(rows: _Rows, chosen: Integers, arriving: _BlockEnds) -> bytes | memoryview:
    """Ends of the chosen rows: in any order, they close what is innermost."""
    plain, reached = chosen[arriving.num[chosen] == 0], chosen[arriving.num[chosen] > 0]
    with_arrow = [*end(rows.track[reached]), *arriving_flow(arriving.of_rows(reached, 0))]
    return b"".join(
        [
            packets(rows.end_ns[plain], end(rows.track[plain])).tobytes(),
            packets(rows.end_ns[reached], with_arrow).tobytes(),
        ]
    )


def _begin_packets(
    interned: Interned, rows: _Rows, leaving: _BlockEnds, turned: _BlockEnds
) -> bytes | memoryview:
    """Begins of a block in the order of its rows, made pattern by pattern of what they hold."""
    pattern = turned.num << _ARROW_BITS | leaving.num
    for name in SPAN_ARGUMENTS:
        pattern = pattern << 1 | rows.applies[name]
    pieces = []
    for shape in np.unique(pattern).tolist():
        part = np.flatnonzero(pattern == shape)
        event = _begin_event(interned, rows, part)
        for place in range(int(leaving.num[part[0]])):
            event += leaving_flow(leaving.of_rows(part, place))
        for place in range(int(turned.num[part[0]])):
            event += arriving_flow(turned.of_rows(part, place))
        pieces.append((part, packets(rows.start_ns[part], event)))
    return interleaved(pieces)


def _begin_event(interned: Interned, rows: _Rows, part: Integers) -> list[Part]:
    """Begin of rows to which the same arguments apply."""
    event = begin(rows.track[part], rows.name[part], rows.category[part])
    for name in SPAN_ARGUMENTS:
        if rows.applies[name][part[0]]:
            argument = text_argument if name in TEXT_ARGUMENTS else int_argument
            event += argument(interned.arguments.number[name], rows.arguments[name][part])
    return event


def _summary_block(scene: _Scene) -> bytes:
    slices, interned = scene.summary, scene.interned
    origin_ns = scene.drawing.timeline.origin_ns
    category = np.full(len(slices.iteration), interned.categories.number[SUMMARY_CATEGORY])
    event = begin(slices.track_uuid, _summary_names(slices, interned), category)
    for name in SUMMARY_ARGUMENTS:
        values, number = getattr(slices, name), interned.arguments.number[name]
        real = values.dtype == np.float64
        event += real_argument(number, values) if real else int_argument(number, values)
    ends = packets(slices.end_ns - origin_ns, end(slices.track_uuid))
    return ends.tobytes() + packets(slices.start_ns - origin_ns, event).tobytes()


def _summary_names(slices: SummarySlices, interned: Interned) -> Integers:
    place, iterations = distinct(slices.iteration)
    names = [interned.names.number[iteration_name(each)] for each in iterations.tolist()]
    return np.array(names, dtype=np.int64)[place]


def _counter_block(scene: _Scene, curve: Counter) -> bytes:
    place, ranks = distinct(curve.rank)
    uuids = [scene.tree.curves[rank, curve.name] for rank in ranks.tolist()]
    event = counter(np.array(uuids, dtype=np.int64)[place], curve.value)
    return packets(curve.time_ns - scene.drawing.timeline.origin_ns, event).tobytes()
