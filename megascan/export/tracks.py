"""Decide what is drawn, before it is encoded: spans on tracks, arrows (`arrows.py`), curves, marks.

Titles and numbers make any viewer order ranks by DP, PP, TP. Each rank and kind has a track.

**Lanes.** A slice viewer stacks the slices of a track, so any two slices must be disjoint or
nested. Spans of one rank and kind nearly always are, except for asynchronous communication and
after clock corrections. Only where spans cross is a kind spread over several tracks (lanes):

    cluster    spans of a track that overlap in one chain (disjoint from all other spans)
    depth      number of open spans when a span begins, and just before it ends

A cluster nests if and only if every span has the same depth at both its ends. If a cluster does not
nest, the spans that end less deep than they began (they outlive an earlier span) move to further
lanes; if the rest still does not nest, the whole cluster moves. Further lanes hold disjoint spans
only: with D spans open at most, span i of the cluster takes over the lane of the span that ended
(i − D)-th, which has ended by then because at most D spans are open. All of it is sorting and
counting: a few passes over the spans, whatever their number.

    spans [0,10) [2,4) [3,6)  →  [2,4) and [3,6) cross: [3,6) begins at depth 3 and ends at 2
    lane 0: [0,10) ⊃ [2,4)        lane 1: [3,6)

**Curves**, one value a rank and iteration, standing at the iteration's start:

    wait share            Σ wait of synchronous communication / duration of the iteration, 0…100 %
    collective bandwidth  Σ size / Σ transfer of the iteration's collectives, in GB/s (decimal)
    p2p bandwidth         Σ size / Σ transfer of the iteration's sends and receives

Only iterations with an iteration span have a wait share; bandwidth counts communication with a
known size and a transfer above 0: 8 MB in 2 ms and 4 MB in 1 ms are 12 MB / 3 ms = 4 GB/s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    Narrow,
    RowNumbers,
    TimeAxis,
    group_starts,
    rank_blocks,
)
from megascan.errors import UsageError
from megascan.export.arrows import BoundArrows, Hop, bind, find_arrows, shown_hops
from megascan.header import Json, RankHeader
from megascan.parallel import Kept
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, TIMELINE_COLUMNS, Kind, Track
from megascan.timeline import ShardedTimeline, Timeline, codes, equals, is_end, numbers
from megascan.topology import Layout

AXES = ("dp", "pp", "cp", "ep", "tp")
"""Axes in the order by which ranks are sorted; replicas, which differ least, are outermost."""

KIND_NUMBERS: dict[str, int] = {str(kind): number for number, kind in enumerate(Kind, start=1)}
"""Position of each kind's track within a rank, from 1, as 0 is for findings."""
CURVE_NUMBER = len(KIND_NUMBERS) + 2
"""Position of the first curve, after all kinds."""

MARK_TRACK = "finding"
MARK_NUMBER = 0

_LANES_IN_ORDER = 10


def axis_labels(layout: Layout, rank: int, axes: Iterable[str]) -> list[str]:
    """Return a label like `DP03` for each axis, padded to the axis's size to sort like numbers."""
    place = layout.coordinates(rank)
    return [_axis_label(axis, getattr(place, axis), getattr(layout, axis)) for axis in axes]


@lru_cache(maxsize=1 << 14)  # thousands of ranks have the same few hundred
def _axis_label(axis: str, place: int, size: int) -> str:
    return f"{axis.upper()}{place:0{_digits(size)}d}"


def shown_axes(layout: Layout) -> list[str]:
    """Return the axes that titles name: DP, PP, TP, and all others of more than one rank."""
    return [axis for axis in AXES if axis in ("dp", "pp", "tp") or getattr(layout, axis) > 1]


def group_titles(layout: Layout, rank: int) -> list[str]:
    """Return the groups that a rank stands in, outermost first: `DP0`, `DP0 PP1`.

    Axes of size 1 make no group, nor do the axes within a stage's replica.
    """
    labels = axis_labels(layout, rank, layout.used("dp", "pp", "cp"))
    return [" ".join(labels[: count + 1]) for count in range(len(labels))]


def rank_title(layout: Layout, rank: int, header: RankHeader | None) -> str:
    """Return `DP0 PP1 TP0 · rank 02 · host`; alphabetical order is the order of the axes."""
    axes = " ".join(axis_labels(layout, rank, shown_axes(layout)))
    title = f"{axes} · rank {rank:0{_digits(layout.world_size)}d}"
    return f"{title} · {header.host}" if header and header.host else title


def rank_order(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return a key that sorts ranks as their titles do."""
    place = layout.coordinates(rank)
    return (*(getattr(place, axis) for axis in AXES), rank)


def kind_number(kind: str) -> int:
    """Return the position of a kind's track; unknown kinds share one position after all others."""
    return KIND_NUMBERS.get(kind, len(KIND_NUMBERS) + 1)


def track_number(kind_number: int, lane: int) -> int:
    """Return a track's number within its rank: 20 for compute, 21 for the second lane of it, …

    Viewers show tracks in the order of their numbers. The eleventh and further lanes stand after
    all other tracks, where there is room for any number of lanes.
    """
    if lane < _LANES_IN_ORDER:
        return kind_number * _LANES_IN_ORDER + lane
    return 1000 * (lane + 1 - _LANES_IN_ORDER) + kind_number


def track_title(kind: str, lane: int) -> str:
    """Return a track's title: `collective`, or `collective (lane 2)` for the second lane."""
    return kind if lane == 0 else f"{kind} (lane {lane + 1})"


def _digits(count: int) -> int:
    return len(str(count - 1))


def assign_lanes(
    group: Integers, start_ns: Integers, end_ns: Integers, disjoint: Flags | None = None
) -> Integers:
    """Assign every span a lane, from 0, shape (span,).

    `group` numbers the tracks; within a group spans stand in the order of (start, -end). Where
    `disjoint` holds, spans must not be nested either: flow arrows bind to the innermost slice, so
    slices with arrows must not cover each other. Spans of no length fit anywhere and get lane 0.
    """
    lanes = np.zeros(len(group), dtype=np.int64)
    rows = np.flatnonzero(end_ns > start_ns)
    rows = rows[np.argsort(_narrow(group[rows]), kind="stable")]
    axis = TimeAxis.of(group[rows], start_ns[rows], end_ns[rows])
    start, end = axis.place(group[rows], start_ns[rows]), axis.place(group[rows], end_ns[rows])
    depth, bad = _nesting(start, end)
    if disjoint is not None:
        bad |= disjoint[rows] & (depth > 1)
    if bad.any():
        lanes[rows] = _spread(start, end, bad)
    return lanes


def _narrow(group: Integers) -> npt.NDArray[np.integer]:
    """Convert to 16 bits if they suffice: numpy then sorts by radix, ten times faster."""
    return group.astype(np.uint16) if len(group) and group.max() < 2**16 else group


def _nesting(start: Integers, end: Integers) -> tuple[Integers, Flags]:
    """Return (span,) the number of open spans once each ordered span has begun, itself included,
    and which spans are less deep at their end than at their begin, as they outlive an earlier span.

    In any set of crossing spans at least one is marked; in a set that nests, none.
    """
    number = np.arange(len(start))
    by_end = number[::-1][np.argsort(end[::-1], kind="stable")]  # of equal ends the inner one first
    both = np.argsort(np.concatenate((end[by_end], start)), kind="stable")  # merges two runs
    place = np.empty_like(both)
    place[both] = np.arange(len(both))
    depth = 2 * number + 1 - place[len(start) :]
    depth_at_end = np.empty_like(depth)
    depth_at_end[by_end] = place[: len(start)] - 2 * number
    return depth, depth_at_end < depth


def _spread(start: Integers, end: Integers, bad: Flags) -> Integers:
    """Assign lanes to ordered spans of which `bad` cannot stay on lane 0."""
    cluster = _clusters(start, end)
    moved = bad.copy()
    kept = np.flatnonzero(~moved)
    still_bad = cluster[kept][_nesting(start[kept], end[kept])[1]]
    moved |= np.isin(cluster, still_bad)
    lanes = np.zeros(len(start), dtype=np.int64)
    rows = np.flatnonzero(moved)
    stays = np.bincount(cluster[~moved], minlength=cluster[-1] + 1) > 0
    lanes[rows] = _disjoint_lanes(start[rows], end[rows]) + stays[cluster[rows]]
    return lanes


def _clusters(start: Integers, end: Integers) -> Integers:
    """Number the clusters of overlapping ordered spans, (span,)."""
    reach = np.maximum.accumulate(end)
    return np.concatenate([[0], np.cumsum(start[1:] >= reach[:-1])]).astype(np.int64)


def _disjoint_lanes(start: Integers, end: Integers) -> Integers:
    """Assign lanes to ordered spans, cluster by cluster, so that spans of a lane are disjoint."""
    cluster = _clusters(start, end)
    first = group_starts(cluster)
    lanes_needed = np.maximum.reduceat(_nesting(start, end)[0], first)[cluster]
    number = np.arange(len(start))
    place = number - first[cluster]
    heir = np.argsort(end, kind="stable")  # clusters stay in order: they are disjoint
    follows = place >= lanes_needed
    source = np.where(follows, heir[number - np.where(follows, lanes_needed, 0)], number)
    while True:  # to the first span of each lane, by doubling: log2(spans) steps
        further = source[source]
        if np.array_equal(further, source):
            return place[source]
        source = further


_PART_ROWS = 1 << 17
"""Spans to lay at a time, in whole ranks; this bounds the memory for sorting."""


@dataclass(frozen=True, kw_only=True)
class TrackKey:
    """A track that has spans: a lane of a kind on a rank."""

    rank: int
    kind: str
    lane: int

    @property
    def number(self) -> int:
        """Return the track's number within its rank."""
        return track_number(kind_number(self.kind), self.lane)


def lay_tracks(spans: pa.Table) -> tuple[npt.NDArray[np.int32], tuple[TrackKey, ...]]:
    """Return the track number of every span within its rank, and all tracks in order."""
    spans = spans.select(["rank", "kind", "start_ns", "duration_ns"])
    track = np.empty(spans.num_rows, dtype=np.int32)
    used: list[TrackKey] = []
    for rows in rank_blocks(numbers(spans, "rank"), _PART_ROWS):
        track[rows], part_used = _lay_part(spans[rows])
        used += part_used
    return track, tuple(used)


def _lay_part(spans: pa.Table) -> tuple[npt.NDArray[np.int32], list[TrackKey]]:
    kind, kinds = codes(spans, "kind")
    rank = numbers(spans, "rank")
    start_ns = numbers(spans, "start_ns")
    end_ns = start_ns + numbers(spans, "duration_ns")
    group = (rank - rank[0]) * len(kinds) + kind
    talk = np.isin(kinds, [str(each) for each in COMMUNICATION_KINDS])
    lanes = assign_lanes(group, start_ns, end_ns, disjoint=talk[kind])
    width = int(lanes.max()) + 1
    used = np.flatnonzero(np.bincount(group * width + lanes)).tolist()
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


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which spans to write; None stands for all.

    `iterations` leaves out spans without an iteration (a checkpoint after the last iteration).
    """

    ranks: Collection[int] | None = None
    iterations: Collection[int] | None = None
    kinds: Collection[Kind] | None = None

    @property
    def takes_all(self) -> bool:
        """Return whether nothing is left out."""
        return all(values is None for values in vars(self).values())

    def words(self) -> str:
        """Say what is selected, for a message: "ranks 3, 5 and kinds gc"."""
        return " and ".join(
            f"{name} {', '.join(map(str, sorted(values)))}"
            for name, values in vars(self).items()
            if values is not None
        )

    def mask(self, spans: pa.Table) -> Flags:
        """Mark the rows of `spans` that are written, shape (span,)."""
        chosen = np.ones(spans.num_rows, dtype=np.bool_)
        if self.ranks is not None:
            chosen &= np.isin(numbers(spans, "rank"), sorted(self.ranks))
        if self.iterations is not None:
            chosen &= np.isin(numbers(spans, "iteration"), sorted(self.iterations))
        if self.kinds is not None:
            chosen &= equals(spans, "kind", *(str(kind) for kind in self.kinds))
        return chosen


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A finding to draw: a slice on the rank's track for findings, on the common clock."""

    rank: int
    start_ns: int
    end_ns: int
    label: str
    args: dict[str, Json] = field(default_factory=dict)


WAIT_SHARE = "wait share"


_COLUMNS = (
    "rank", "kind", "track", "start_ns", "duration_ns", "iteration", "size_bytes", "wait_ns",
    "transfer_ns",
)  # fmt: skip


@dataclass(frozen=True)
class Counter:
    """A named curve on every rank: arrays of shape (value,), all values finite."""

    name: str
    unit: str
    rank: Integers
    iteration: Integers
    time_ns: Integers
    value: Floats

    def at(self, chosen: Flags | Integers) -> Counter:
        """Return the curve with the chosen values only, in the order in which they are chosen."""
        return replace(
            self,
            rank=self.rank[chosen],
            iteration=self.iteration[chosen],
            time_ns=self.time_ns[chosen],
            value=self.value[chosen],
        )


def make_counters(spans: pa.Table) -> tuple[Counter, ...]:
    """Make the curves of some ranks' spans, including curves without values."""
    spans = spans.select(_COLUMNS)
    marked = spans.filter(pa.array(equals(spans, "kind", str(Kind.ITERATION))))
    keys, first = np.unique(_keys(marked), return_index=True)
    iterations = marked.take(pa.array(first))
    talk = spans.filter(pa.array(equals(spans, "kind", *map(str, COMMUNICATION_KINDS))))
    place = places_among(keys, _keys(talk))
    curves = [_wait_share(talk, place, iterations)]
    curves += [_bandwidth(talk, place, iterations, kind) for kind in COMMUNICATION_KINDS]
    return tuple(curves)


def joined_counters(parts: Sequence[tuple[Counter, ...]]) -> tuple[Counter, ...]:
    """Join the curves of all shards, ordered by rank; curves without values are left out."""
    found = []
    for curves in zip(*parts, strict=True):
        columns = (
            np.concatenate([getattr(one, name) for one in curves])
            for name in ("rank", "iteration", "time_ns", "value")
        )
        whole = Counter(curves[0].name, curves[0].unit, *columns)
        if len(whole.value):
            found.append(whole.at(np.lexsort((whole.iteration, whole.rank))))
    return tuple(found)


def iteration_keys(rank: Integers, iteration: Integers) -> Integers:
    """Return one number for each rank and iteration, in the order of both."""
    return (rank << 32) + iteration


def places_among(known: Integers, wanted: Integers) -> Integers:
    """Return the place of each wanted key among the known keys, ascending; -1 for none."""
    if not len(known):
        return np.full(len(wanted), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[place] == wanted, place, -1)


def _keys(spans: pa.Table) -> Integers:
    return iteration_keys(numbers(spans, "rank"), numbers(spans, "iteration"))


def _wait_share(talk: pa.Table, place: Integers, iterations: pa.Table) -> Counter:
    waits = numbers(talk, "wait_ns")
    counted = (place >= 0) & (waits > 0) & (numbers(talk, "track") != Track.OVERLAPPED)
    total = np.bincount(place[counted], waits[counted], minlength=iterations.num_rows)
    duration_ns = numbers(iterations, "duration_ns")
    lasting = duration_ns > 0
    share = total[lasting] / duration_ns[lasting]
    return _counter(WAIT_SHARE, "%", iterations, lasting, 100 * np.minimum(share, 1.0))


def _bandwidth(talk: pa.Table, place: Integers, iterations: pa.Table, kind: Kind) -> Counter:
    size, transfer = numbers(talk, "size_bytes"), numbers(talk, "transfer_ns")
    counted = (place >= 0) & (size > 0) & (transfer > 0) & equals(talk, "kind", str(kind))
    moved, spent = (
        np.bincount(place[counted], amounts[counted], minlength=iterations.num_rows)
        for amounts in (size, transfer)
    )
    known = spent > 0  # bytes a nanosecond are GB/s
    return _counter(f"{kind} bandwidth", "GB/s", iterations, known, moved[known] / spent[known])


def _counter(name: str, unit: str, iterations: pa.Table, chosen: Flags, value: Floats) -> Counter:
    rank, iteration, time_ns = (
        numbers(iterations, column)[chosen] for column in ("rank", "iteration", "start_ns")
    )
    return Counter(name, unit, rank, iteration, time_ns, value)


TEXT_COLUMNS = tuple(column.name for column in TIMELINE_COLUMNS if column.type == "text")


@dataclass(frozen=True, kw_only=True)
class Laid:
    """What the centre has to know of a shard whose spans are laid on tracks.

    `end_rows` (end,) is the row of each end among the drawn rows, -1 if it is not drawn. `texts`
    are the texts that each text column may hold.
    """

    num_rows: int
    tracks: tuple[TrackKey, ...]
    curves: tuple[Counter, ...]
    end_rows: npt.NDArray[np.int32]
    texts: Mapping[str, list[str]]


def lay(spans: pa.Table, selection: Selection) -> tuple[pa.Table, Laid]:
    """Select spans of a shard and lay them on tracks.

    The table has the track of each drawn row and, if not all rows are drawn, the row's number.
    """
    curves = make_counters(spans)
    chosen = selection.mask(spans)
    columns = {}
    drawn = spans
    if not selection.takes_all:
        rows = np.flatnonzero(chosen)
        columns["row"] = rows.astype(np.int32)
        drawn = spans.take(pa.array(rows))
    track, tracks = lay_tracks(drawn)
    ends = np.flatnonzero(is_end(spans))
    end_rows = np.where(chosen, np.cumsum(chosen) - 1, NOT_APPLICABLE)[ends].astype(np.int32)
    return pa.table(columns | {"track": track}), Laid(
        num_rows=len(track),
        tracks=tracks,
        curves=curves,
        end_rows=end_rows,
        texts={name: codes(spans, name)[1] for name in TEXT_COLUMNS},
    )


def drawn_rows(
    spans: pa.Table, laid: pa.Table, rows: slice | Integers | RowNumbers
) -> tuple[pa.Table, Integers]:
    """Return some of a shard's drawn rows, and their tracks."""
    track = numbers(laid, "track")[rows]
    if "row" in laid.column_names:
        return spans.take(pa.array(numbers(laid, "row")[rows])), track
    if isinstance(rows, slice):
        return spans[rows], track
    return spans.take(pa.array(rows)), track


@dataclass(frozen=True)
class DrawnShard:
    """Spans of some ranks and what `lay` made of them; both stay with the workers."""

    spans: Kept
    laid: Kept
    num_rows: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A timeline ready for any encoder.

    `timeline` has no spans: the drawn spans stay in `shards`; `iterations` are the iteration spans
    among them. Arrows name ends: `end_shard` and `end_row` say where each end stands. `marks`,
    `counters` and hops of the `chain` are those of selected ranks; `texts` are by column, in the
    order of shards. If there is a chain, a single shard holds all spans, and hops name its rows.
    """

    timeline: Timeline
    shards: tuple[DrawnShard, ...]
    num_spans: int
    iterations: pa.Table
    tracks: tuple[TrackKey, ...]
    arrows: BoundArrows
    end_shard: npt.NDArray[np.unsignedinteger[Any]]
    end_row: RowNumbers
    counters: tuple[Counter, ...]
    marks: tuple[Mark, ...]
    ranks: tuple[int, ...]
    selection: Selection
    texts: Mapping[str, list[str]]
    chain: tuple[Hop, ...] = ()

    def by_shard(
        self, ends: RowNumbers, arrows: Narrow | None = None
    ) -> Iterator[tuple[DrawnShard, RowNumbers, RowNumbers]]:
        """Yield for each shard the arrows that have an end there, and the rows of these ends.

        `ends` (arrow,) are rows of the table of ends; if `arrows` are given, only these count, in
        their order.
        """
        shard = self.end_shard[ends if arrows is None else ends[arrows]]
        bounds = np.cumsum([0, *np.bincount(shard, minlength=len(self.shards))]).tolist()
        order = np.argsort(shard, kind="stable").astype(np.int32)
        own = order if arrows is None else arrows[order].astype(np.int32)
        del shard, order, arrows  # else they stay until the last shard is written
        for each, (low, high) in zip(self.shards, pairwise(bounds), strict=True):
            yield each, own[low:high], self.end_row[ends[own[low:high]]]


def make_drawing(
    sharded: ShardedTimeline,
    selection: Selection,
    marks: Sequence[Mark],
    chain: Sequence[Hop] = (),
) -> Drawing:
    """Select spans, lay them on tracks, and connect them by arrows.

    Arrows and curves are computed from the whole timeline: a selection shows fewer, but does not
    change any. A `chain` needs a timeline of one shard. Raises UsageError for an empty selection.
    """
    timeline, ends = sharded.frame, sharded.ends
    end_shard = np.empty(ends.num_rows, np.min_scalar_type(len(sharded.shards)))  # sorted by radix
    end_row = np.empty(ends.num_rows, dtype=np.int32)
    shards, found = [], []
    laying = sharded.workers.keep(lay, ((shard.spans, selection) for shard in sharded.shards))
    arrows = find_arrows(ends)  # while workers lay spans
    bound = bind(arrows, ends) if selection.takes_all else None
    for number, (shard, (table, laid)) in enumerate(zip(sharded.shards, laying, strict=True)):
        end_shard[shard.ends], end_row[shard.ends] = number, laid.end_rows
        shards.append(DrawnShard(shard.spans, table, laid.num_rows, shard.ranks))
        found.append(laid)
    num_spans = sum(laid.num_rows for laid in found)
    if not num_spans and not selection.takes_all:
        raise UsageError(
            f"nothing to write: the selected {selection.words()} hold none of the "
            f"{sum(shard.num_spans for shard in sharded.shards):,} spans of "
            f"{len(timeline.headers)} ranks; select others"
        )
    used = dict.fromkeys(one for laid in found for one in laid.tracks)
    tracks = tuple(sorted(used, key=lambda one: one.rank))
    shown = _shown_ranks(timeline, selection, tracks)
    curves = joined_counters([laid.curves for laid in found])
    iterations = equals(ends, "kind", Kind.ITERATION) & (end_row >= 0)
    return Drawing(
        timeline=timeline,
        shards=tuple(shards),
        num_spans=num_spans,
        iterations=ends.filter(pa.array(iterations)),
        tracks=tracks,
        arrows=bound or bind(arrows.within(end_row >= 0), ends),
        end_shard=end_shard,
        end_row=end_row,
        counters=tuple(_selected(curve, selection) for curve in curves),
        marks=tuple(mark for mark in marks if mark.rank in shown),
        ranks=tuple(sorted(shown)),
        selection=selection,
        texts=_joined_texts(found),
        chain=_drawn_hops(chain, selection, shown, shards) if chain else (),
    )


def _joined_texts(found: Sequence[Laid]) -> dict[str, list[str]]:
    """Return the texts of each text column in all shards, each text once."""
    return {
        name: list(dict.fromkeys(text for laid in found for text in laid.texts[name]))
        for name in TEXT_COLUMNS
    }


def _drawn_hops(
    chain: Sequence[Hop],
    selection: Selection,
    ranks: Collection[int],
    shards: Sequence[DrawnShard],
) -> tuple[Hop, ...]:
    """Return the hops that are shown; their rows count the drawn rows of the only shard."""
    (shard,) = shards
    laid, chosen = shard.laid.open(), None
    if "row" in laid.column_names:
        chosen = np.zeros(shard.spans.open().num_rows, dtype=np.bool_)
        chosen[numbers(laid, "row")] = True
    return shown_hops(chain, selection.iterations, ranks, chosen)


def _shown_ranks(
    timeline: Timeline, selection: Selection, tracks: tuple[TrackKey, ...]
) -> set[int]:
    """Return the ranks that are drawn, including ranks that recorded nothing."""
    ranks = set(timeline.headers) if selection.ranks is None else set(selection.ranks)
    return ranks & set(timeline.headers) | {track.rank for track in tracks}


def _selected(curve: Counter, selection: Selection) -> Counter:
    chosen = np.ones(len(curve.value), dtype=np.bool_)
    if selection.ranks is not None:
        chosen &= np.isin(curve.rank, sorted(selection.ranks))
    if selection.iterations is not None:
        chosen &= np.isin(curve.iteration, sorted(selection.iterations))
    return curve.at(chosen)
