"""Write Perfetto protobuf: exact nanoseconds, a tree of tracks, typed arguments, interned texts.

**Packets** (`protobuf.py` makes their bytes). A slice is two packets: its begin (name, category,
arguments, leaving arrows) and its end (an arriving arrow, as the slice may have begun before the
arrow's source). The engine sorts packets by time and keeps the file's order for equal times. So a
block has first the ends, then the begins (longer first), then the ends of slices of no length: a
slice that ends where another begins is closed before the other begins. Blocks refer only to texts
of the file's first packets, so blocks are made independently. The few first packets (tracks, texts,
the timeline's record, marks) are made one by one (`first_packets.py`). Times are ns from the
timeline's origin.

**Tracks.** Viewers sort tracks without an explicit order by name, so every level gives its order:

    run r-2024…                        root: its row shows the job's iterations
      DP0                              a group's row shows its iterations
        DP0 PP1
          DP0 PP1 TP0 · rank 02 · host     a rank's row shows its iterations and their wait share
            iteration, compute, collective, …, curves

Rows stay visible when collapsed, so a rank's row repeats its iterations with their wait share. A
slice in a group's row goes from its first member's start to its last member's end, cut at the
group's next iteration, and names the member that waited least: the other members waited for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from megascan.arrays import Flags, Floats, Integers, RowNumbers, group_lengths, group_starts
from megascan.export.arrows import CHAIN_TRACK
from megascan.export.protobuf import (
    Part,
    Unsigned,
    arriving_flow,
    begin,
    counter,
    end,
    int_argument,
    interleaved,
    leaving_flow,
    packets,
    real_argument,
    text_argument,
    unsigned,
)
from megascan.export.tracks import (
    CURVE_NUMBER,
    MARK_NUMBER,
    MARK_TRACK,
    WAIT_SHARE,
    Counter,
    Drawing,
    DrawnShard,
    drawn_rows,
    group_titles,
    iteration_keys,
    places_among,
    rank_order,
    rank_title,
    track_number,
    track_title,
)
from megascan.export.writing import Block, Head, row_blocks
from megascan.schema import NOT_APPLICABLE, TIMELINE_COLUMNS
from megascan.timeline import codes, distinct, numbers, rows_alike

ROOT = 1
"""Uuid of the root track; uuids of all other tracks follow in the order of the tree."""


@dataclass(frozen=True)
class TrackNode:
    """One track: its place in the tree and, for a curve, its unit."""

    uuid: int
    parent: int
    name: str
    order: int
    unit: str | None = None


@dataclass(kw_only=True)
class TrackTree:
    """All tracks, parents first, and the uuids of tracks on which something is drawn.

    `levels` has the uuid of each rank's group on each level, from the root inwards; `kinds` is
    keyed by rank and track number, `curves` by rank and the curve's name, `marks` by rank.
    """

    nodes: list[TrackNode]
    levels: list[dict[int, int]]
    ranks: dict[int, int] = field(default_factory=dict)
    kinds: dict[tuple[int, int], int] = field(default_factory=dict)
    curves: dict[tuple[int, str], int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    chain: int = 0
    """Uuid of the track of the chain, 0 without a chain."""

    def add(
        self, parent: int, name: str, *, order: int | None = None, unit: str | None = None
    ) -> int:
        """Add a track to its parent's, after all of these unless another `order` is given."""
        uuid = len(self.nodes) + 1
        self.nodes.append(TrackNode(uuid, parent, name, uuid if order is None else order, unit))
        return uuid


def build_tree(drawing: Drawing) -> TrackTree:
    """Build the tracks of a drawing."""
    timeline, layout = drawing.timeline, drawing.timeline.layout
    depth = len(group_titles(layout, drawing.ranks[0])) if drawing.ranks else 0
    root = TrackNode(ROOT, 0, f"run {timeline.run_id}", 0)
    tree = TrackTree(nodes=[root], levels=[{} for _ in range(1 + depth)])
    if drawing.chain:
        tree.chain = tree.add(ROOT, CHAIN_TRACK, order=0)
    tracks_of: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for track in drawing.tracks:
        tracks_of[track.rank].append((track.number, track_title(track.kind, track.lane)))
    marked = {mark.rank for mark in drawing.marks}
    group_of: dict[str, int] = {}
    for rank in sorted(drawing.ranks, key=partial(rank_order, layout)):
        parent = tree.levels[0][rank] = ROOT
        for title, level in zip(group_titles(layout, rank), tree.levels[1:], strict=True):
            if title not in group_of:
                group_of[title] = tree.add(parent, title)
            parent = level[rank] = group_of[title]
        own = tree.add(parent, rank_title(layout, rank, timeline.headers.get(rank)))
        tree.ranks[rank] = own
        if rank in marked:
            tree.marks[rank] = tree.add(own, MARK_TRACK, order=track_number(MARK_NUMBER, 0))
        for number, title in sorted(tracks_of[rank]):
            tree.kinds[rank, number] = tree.add(own, title, order=number)
        for order, curve in enumerate(drawing.counters, start=track_number(CURVE_NUMBER, 0)):
            uuid = tree.add(own, curve.name, order=order, unit=curve.unit)
            tree.curves[rank, curve.name] = uuid
    return tree


@dataclass(frozen=True, kw_only=True)
class SummarySlices:
    """Slices of one iteration on one track each, every array of shape (slice,).

    `wait_ratio` is the mean wait share of `num_ranks` ranks, `least_waiting_rank` the rank with the
    smallest wait share; both are -1 where waits are unknown.
    """

    track_uuid: Integers
    iteration: Integers
    start_ns: Integers
    end_ns: Integers
    num_ranks: Integers
    wait_ratio: Floats
    least_waiting_rank: Integers


def summarise(drawing: Drawing, tree: TrackTree) -> SummarySlices:
    """Sum up every rank and group of a drawing in summary slices."""
    ranks = _rank_iterations(drawing)
    parts = [_grouped(*ranks, level) for level in (*tree.levels, tree.ranks)]
    return SummarySlices(
        **{
            one.name: np.concatenate([getattr(part, one.name) for part in parts])
            for one in fields(SummarySlices)
        }
    )


def _rank_iterations(drawing: Drawing) -> tuple[pa.Table, Floats]:
    """Return the iteration spans and the wait share of each, -1 for an unknown share."""
    spans = drawing.iterations
    shares = np.full(spans.num_rows, float(NOT_APPLICABLE))
    for curve in drawing.counters:
        if curve.name == WAIT_SHARE and len(curve.value):
            known = iteration_keys(curve.rank, curve.iteration)
            wanted = iteration_keys(numbers(spans, "rank"), numbers(spans, "iteration"))
            place = places_among(known, wanted)
            shares = np.where(place >= 0, curve.value[place] / 100, shares)
    return spans, shares


def _grouped(spans: pa.Table, shares: Floats, uuid_of_rank: Mapping[int, int]) -> SummarySlices:
    """Make one slice for each (track, iteration); `uuid_of_rank` is the track of each rank."""
    rank, iteration = numbers(spans, "rank"), numbers(spans, "iteration")
    ranks = np.array(sorted(uuid_of_rank), dtype=np.int64)
    uuids = np.array([uuid_of_rank[each] for each in ranks.tolist()], dtype=np.int64)
    track = uuids[np.searchsorted(ranks, rank)]
    order = np.lexsort((shares, iteration, track))
    rank, iteration, track = (each[order] for each in (rank, iteration, track))
    shares = shares[order]
    start_ns = numbers(spans, "start_ns")[order]
    end_ns = start_ns + numbers(spans, "duration_ns")[order]
    first = group_starts(track, iteration)
    num_ranks = group_lengths(first, len(rank))
    known = shares[first] != NOT_APPLICABLE
    begin = np.minimum.reduceat(start_ns, first)
    return SummarySlices(
        track_uuid=track[first],
        iteration=iteration[first],
        start_ns=begin,
        end_ns=_cut(track[first], begin, np.maximum.reduceat(end_ns, first)),
        num_ranks=num_ranks,
        wait_ratio=np.where(known, np.add.reduceat(shares, first) / num_ranks, NOT_APPLICABLE),
        least_waiting_rank=np.where(known, rank[first], NOT_APPLICABLE),
    )


def _cut(track: Integers, begin: Integers, end: Integers) -> Integers:
    """Cut ends so that each slice is over when the next slice of its track begins."""
    limit = np.append(np.where(np.diff(track) == 0, begin[1:], end[:-1]), end[-1:])
    cut: Integers = np.maximum(np.minimum(end, limit), begin)
    return cut


SUMMARY_CATEGORY = "summary"
"""Category of slices that are not spans: iterations of ranks and groups."""
RECORD_CATEGORY = "megascan"
RECORD_ARGUMENT = "json"
"""The timeline's record is the text of this argument of an instant on the root track."""

SPAN_ARGUMENTS = tuple(
    column.name
    for column in TIMELINE_COLUMNS
    if column.name not in {"kind", "name", "start_ns", "duration_ns"}
)
TEXT_ARGUMENTS = tuple(
    column.name
    for column in TIMELINE_COLUMNS
    if column.type == "text" and column.name in SPAN_ARGUMENTS
)
SUMMARY_ARGUMENTS = ("iteration", "num_ranks", "wait_ratio", "least_waiting_rank")


class Texts:
    """Texts of one kind that packets refer to by number, from 1."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.number = {text: place for place, text in enumerate(dict.fromkeys(texts), start=1)}

    def column(self, table: pa.Table, name: str) -> Integers:
        """Return the numbers of a text column of the span table, 0 for an empty text."""
        code, row_texts = codes(table, name)
        numbers = [self.number[text] if text else 0 for text in row_texts]
        return np.array(numbers or [0], dtype=np.int64)[code]


@dataclass(frozen=True, kw_only=True)
class Interned:
    """All texts of a file."""

    names: Texts
    categories: Texts
    arguments: Texts
    values: Texts


def intern(texts: Mapping[str, list[str]], summary: SummarySlices) -> Interned:
    """Number the texts of the spans, by column, and of the summary slices."""
    iterations = map(iteration_name, np.unique(summary.iteration).tolist())
    return Interned(
        names=Texts([*texts["name"], *iterations]),
        categories=Texts([*texts["kind"], SUMMARY_CATEGORY]),
        arguments=Texts([*SPAN_ARGUMENTS, *SUMMARY_ARGUMENTS]),
        values=Texts([text for name in TEXT_ARGUMENTS for text in texts[name]]),
    )


def iteration_name(iteration: int) -> str:
    """Return the name of a summary slice."""
    return f"iteration {iteration}"


def chain_flow(drawing: Drawing, number: int) -> int:
    """Return the id of the arrow to a hop; these ids follow those of matched communication."""
    return 1 + len(drawing.arrows.start) + number


_ARROW_BITS = 20
"""Bits for the number of arrows of one span, up to the members of the largest group."""


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """Arrow ends on rows of a shard or of a block, counted from its first row; both of shape
    (end,), ends of one row in the order in which they are written.
    """

    rows: RowNumbers
    ids: RowNumbers | Integers

    def of_blocks(self, blocks: Sequence[slice]) -> Iterator[_Ends]:
        """Yield the ends of each block of rows; all but the last block are as long as the first."""
        number = (self.rows // blocks[0].stop).astype(np.min_scalar_type(len(blocks)))
        order = np.argsort(number, kind="stable")  # up to 16 bits: sorted by radix
        bounds = np.cumsum([0, *np.bincount(number, minlength=len(blocks))]).tolist()
        rows, ids = self.rows[order], self.ids[order]
        for block, (low, high) in zip(blocks, pairwise(bounds), strict=True):
            yield _Ends(rows=rows[low:high] - block.start, ids=ids[low:high])

    def by_row(self, num_rows: int) -> _BlockEnds:
        """Return the ends of a block of so many rows by row."""
        order = np.argsort(self.rows.astype(np.min_scalar_type(num_rows)), kind="stable")
        num = np.bincount(self.rows, minlength=num_rows).astype(np.int64)
        return _BlockEnds(num=num, before=np.cumsum(num) - num, ids=self.ids[order])


@dataclass(frozen=True, kw_only=True)
class _BlockEnds:
    """Arrow ends of a block: row i has `num[i]` ends, with ids from `ids[before[i]]` on."""

    num: Integers
    before: Integers
    ids: RowNumbers | Integers

    def of_rows(self, rows: Integers, place: int) -> Integers:
        """Return the id of the end at a place among the ends of each row."""
        return self.ids[self.before[rows] + place].astype(np.int64)


_Arrows: TypeAlias = tuple[_Ends, _Ends, _Ends]
"""Arrows at the rows of a shard or of a block: those that leave begins of rows, those that arrive
at ends of rows, and those turned round for clock error, which arrive at begins."""


def _arrows_of_shards(drawing: Drawing) -> Iterator[_Arrows]:
    arrows = drawing.arrows
    leaving = _ends_of_shards(drawing.by_shard(arrows.start_row))
    if drawing.chain:
        leaving = (_with_chain(drawing, ends) for ends in leaving)  # of the only shard
    straight = np.flatnonzero(~arrows.turned) if arrows.turned.any() else None  # mostly all
    arriving, turned = (
        _ends_of_shards(drawing.by_shard(arrows.finish_row, chosen))
        for chosen in (straight, np.flatnonzero(arrows.turned))
    )
    yield from zip(leaving, arriving, turned, strict=True)


def _ends_of_shards(
    by_shard: Iterator[tuple[DrawnShard, RowNumbers, RowNumbers]],
) -> Iterator[_Ends]:
    """Yield the ends of arrows in each shard.

    Every arrow has an id of its own, from 1, as a slice may have several arrows.
    """
    for _, arrows, rows in by_shard:
        yield _Ends(rows=rows, ids=arrows + 1)


def _with_chain(drawing: Drawing, leaving: _Ends) -> _Ends:
    """Add the arrows that lead to hops of the chain to the arrows that leave the only shard."""
    reached = [number for number, hop in enumerate(drawing.chain) if hop.row >= 0]
    rows = np.array([drawing.chain[number].row for number in reached], dtype=np.int32)
    flows = np.array([chain_flow(drawing, number) for number in reached], dtype=np.int64)
    ids = np.concatenate((leaving.ids.astype(np.int64), flows))
    return _Ends(rows=np.concatenate((leaving.rows, rows)), ids=ids)


@dataclass(frozen=True)
class _Sheet:
    """What packets of a shard refer to: texts, and uuids of tracks by rank and number."""

    origin_ns: int
    interned: Interned
    uuids: Mapping[tuple[int, int], int]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A block of spans as interned numbers, every array of shape (row,)."""

    start_ns: Integers
    end_ns: Integers
    track: Unsigned
    name: Unsigned
    category: Unsigned
    arguments: dict[str, Unsigned]
    applies: dict[str, Flags]


def perfetto_pieces(drawing: Drawing) -> tuple[Head, Iterator[Block]]:
    """Return the pieces of the file in order."""
    tree = build_tree(drawing)
    summary = summarise(drawing, tree)
    interned = intern(drawing.texts, summary)

    def make_head() -> tuple[int, bytes]:
        from megascan.export.first_packets import head

        trace = head(drawing, tree, interned)
        return len(trace.packet), bytes(trace.SerializeToString())

    return make_head, _blocks(drawing, tree, summary, interned)


def _blocks(
    drawing: Drawing, tree: TrackTree, summary: SummarySlices, interned: Interned
) -> Iterator[Block]:
    origin_ns = drawing.timeline.origin_ns
    of_rank: dict[int, dict[tuple[int, int], int]] = {}
    for key, uuid in tree.kinds.items():
        of_rank.setdefault(key[0], {})[key] = uuid
    for shard, ends in zip(drawing.shards, _arrows_of_shards(drawing), strict=True):
        uuids = {key: uuid for rank in shard.ranks for key, uuid in of_rank.get(rank, {}).items()}
        sheet = _Sheet(origin_ns, interned, uuids)
        blocks = list(row_blocks(shard.num_rows))
        of_blocks = (each.of_blocks(blocks) for each in ends if blocks)
        for rows, *arrows in zip(blocks, *of_blocks, strict=True):
            arguments = (shard.spans, shard.laid, sheet, tuple(arrows), rows)
            yield Block(2 * (rows.stop - rows.start), _span_block, arguments)
    yield Block(2 * len(summary.iteration), _summary_block(summary, interned, origin_ns))
    for curve in drawing.counters:
        yield Block(len(curve.value), _counter_block(tree, curve, origin_ns))
    if drawing.chain:
        from megascan.export.first_packets import chain_block

        yield Block(2 * len(drawing.chain), chain_block(drawing, tree.chain))


def _rows(table: pa.Table, track: Integers, sheet: _Sheet) -> _Rows:
    texts = sheet.interned
    start_ns = numbers(table, "start_ns") - sheet.origin_ns
    arguments, applies = {}, {}
    for name in SPAN_ARGUMENTS:
        if name in TEXT_ARGUMENTS:
            values = texts.values.column(table, name)
            applies[name] = values > 0
        else:
            values = numbers(table, name)
            applies[name] = values != NOT_APPLICABLE
        arguments[name] = unsigned(values)
    return _Rows(
        start_ns=start_ns,
        end_ns=start_ns + numbers(table, "duration_ns"),
        track=unsigned(_track_uuids(sheet, numbers(table, "rank"), track)),
        name=unsigned(texts.names.column(table, "name")),
        category=unsigned(texts.categories.column(table, "kind")),
        arguments=arguments,
        applies=applies,
    )


def _track_uuids(sheet: _Sheet, rank: Integers, track: Integers) -> Integers:
    width = int(track.max(initial=0)) + 1
    place, used = distinct(rank * width + track)
    uuids = [sheet.uuids[key // width, key % width] for key in used.tolist()]
    return np.array(uuids, dtype=np.int64)[place]


def _span_block(
    spans: pa.Table, laid: pa.Table, sheet: _Sheet, arrows: _Arrows, chosen: slice
) -> bytes:
    rows = _rows(*drawn_rows(spans, laid, chosen), sheet)
    lasting = rows.end_ns > rows.start_ns
    leaving, arriving, turned = (each.by_row(len(lasting)) for each in arrows)
    return b"".join(
        [
            _end_packets(rows, np.flatnonzero(lasting), arriving),
            _begin_packets(sheet.interned, rows, leaving, turned),
            _end_packets(rows, np.flatnonzero(~lasting), arriving),
        ]
    )


def _end_packets(rows: _Rows, chosen: Integers, arriving: _BlockEnds) -> bytes | memoryview:
    """Make the end packets of the chosen rows, in any order: an end closes the innermost slice."""
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
    """Make the begin packets of a block in the order of its rows.

    Rows with the same arguments and numbers of arrows are made together.
    """
    pattern = turned.num << _ARROW_BITS | leaving.num
    for name in SPAN_ARGUMENTS:
        pattern = pattern << 1 | rows.applies[name]
    pieces = []
    for part in rows_alike(pattern):
        event = _begin_event(interned, rows, part)
        for place in range(int(leaving.num[part[0]])):
            event += leaving_flow(leaving.of_rows(part, place))
        for place in range(int(turned.num[part[0]])):
            event += arriving_flow(turned.of_rows(part, place))
        pieces.append((part, packets(rows.start_ns[part], event)))
    return interleaved(pieces)


def _begin_event(interned: Interned, rows: _Rows, part: Integers) -> list[Part]:
    """Make the begin events of rows to which the same arguments apply."""
    event = begin(rows.track[part], rows.name[part], rows.category[part])
    for name in SPAN_ARGUMENTS:
        if rows.applies[name][part[0]]:
            argument = text_argument if name in TEXT_ARGUMENTS else int_argument
            event += argument(interned.arguments.number[name], rows.arguments[name][part])
    return event


def _summary_block(slices: SummarySlices, interned: Interned, origin_ns: int) -> bytes:
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


def _counter_block(tree: TrackTree, curve: Counter, origin_ns: int) -> bytes:
    place, ranks = distinct(curve.rank)
    uuids = [tree.curves[rank, curve.name] for rank in ranks.tolist()]
    event = counter(np.array(uuids, dtype=np.int64)[place], curve.value)
    return packets(curve.time_ns - origin_ns, event).tobytes()
