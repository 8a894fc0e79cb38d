"""The span table as arrays: each span's place in the matrices, what lies in what, what none covers.

`SpanIndex` gives every span its row (rank) and slot (iteration). Spans of all ranks are put on one
axis, one rank after the other, so that "which pass holds this collective" is one sorted search,
and so is how long a rank only waits:

    rank 0 |── forward ──|── backward ──|   rank 1 |── forward ──|── backward ──|
              └ gc: starts in the forward pass of rank 0            └ reduction: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from detect.observe.operations import BACKWARD, FORWARD
from detect.thresholds.observing import WINDOW
from megascan.arrays import Cover, Flags, Floats, Integers, united
from megascan.schema import COMMUNICATION_KINDS, Kind, Phase, Track
from megascan.timeline import Timeline, codes, equals, is_sampled, numbers
from megascan.vocabulary import (
    CONTAINERS,
    GRAD_SYNC,
    LOSS,
    TRANSFORMER_LAYER,
    CountsAs,
    backward_of,
    names_of,
)

WORK_NAMES = {
    name: phase
    for phase, text in ((FORWARD, Phase.FORWARD), (BACKWARD, Phase.BACKWARD))
    for name in names_of(CountsAs.PASS, phases=[text])
}
MODULES = names_of(CountsAs.MODULE, phases=(Phase.FORWARD, Phase.BACKWARD))
MEGATRON_LAYERS = (TRANSFORMER_LAYER, backward_of(TRANSFORMER_LAYER))


@dataclass(frozen=True, kw_only=True)
class _Contained:
    """What is anywhere in a trace, or in a part of it."""

    has_layers: bool
    """Some transformer layers of Megatron-Core."""
    has_modules: bool
    has_iterations: bool
    has_parts: bool
    """Something computes on the device inside passes and layers."""
    has_loss: bool
    """The loss by itself, as of jobs on megatron.core."""


@dataclass(frozen=True, kw_only=True)
class Glance(_Contained):
    """What a part of a trace (a shard) says before it is observed; see `Frame`."""

    iterations: Integers
    num_passes: int
    num_passes_on_cpu: int
    """Passes whose CPU time was measured."""

    @classmethod
    def at(cls, table: pa.Table) -> Glance:
        """Look at a table of spans."""
        iteration = numbers(table, "iteration")
        counts = iteration > 0
        passes = equals(table, "name", *WORK_NAMES) & counts
        parts = equals(table, "kind", Kind.COMPUTE) & ~equals(table, "name", *CONTAINERS) & counts
        return cls(
            iterations=np.unique(iteration[counts]),
            num_passes=int(np.count_nonzero(passes)),
            num_passes_on_cpu=int(np.count_nonzero(numbers(table, "self_cpu_ns")[passes] > 0)),
            has_layers=bool((equals(table, "name", *MEGATRON_LAYERS) & counts).any()),
            has_modules=bool((equals(table, "name", *MODULES) & counts).any()),
            has_iterations=bool((equals(table, "kind", Kind.ITERATION) & counts).any()),
            has_parts=bool((parts & (numbers(table, "track") != Track.HOST)).any()),
            has_loss=bool((equals(table, "name", LOSS) & counts).any()),
        )


@dataclass(frozen=True, kw_only=True)
class Frame(_Contained):
    """What has to be known of the whole trace before any part of it can be observed.

    Parts are then observed each by itself, for what is asked of them needs the spans of one rank.
    """

    ranks: Integers
    iterations: Integers
    is_cpu: bool
    is_sampled: bool
    """Whether modules of some layers only were recorded, of other layers in each iteration."""
    uses_cpu_time: bool
    has_passes: bool
    shares_parts: bool
    """Whether ranks share attention (CP) or experts (EP)."""

    @classmethod
    def of(cls, timeline: Timeline, glances: Sequence[Glance]) -> Frame:
        """Join what was seen of the parts of a timeline, whose spans are not looked at."""
        is_cpu = all(header.device.kind == "cpu" for header in timeline.headers.values())
        num_passes = sum(glance.num_passes for glance in glances)
        on_cpu = sum(glance.num_passes_on_cpu for glance in glances)
        names = [field.name for field in fields(_Contained)]
        contained = {name: any(getattr(one, name) for one in glances) for name in names}
        return cls(
            ranks=np.array(sorted(timeline.headers), dtype=np.int64),
            iterations=np.unique(np.concatenate([glance.iterations for glance in glances])),
            is_cpu=is_cpu,
            is_sampled=is_sampled(timeline),
            uses_cpu_time=is_cpu and on_cpu > WINDOW.cpu_time_share * num_passes,
            has_passes=num_passes > 0,
            shares_parts=timeline.layout.cp * timeline.layout.ep > 1,
            **contained,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of ranks, number of iterations)."""
        return len(self.ranks), len(self.iterations)

    def only(self, ranks: Sequence[int]) -> Frame:
        """Return the frame of a part that holds these ranks, ascending."""
        return replace(self, ranks=np.array(ranks, dtype=np.int64))


class SpanIndex:
    """Columns of the span table as arrays, with each span's row (rank) and slot (iteration).

    Spans are ordered by (rank, start, longest first).
    """

    def __init__(self, table: pa.Table, frame: Frame) -> None:
        self.table = table
        self.frame = frame
        self.ranks, self.iterations, self.shape = frame.ranks, frame.iterations, frame.shape
        self.is_cpu, self.is_sampled = frame.is_cpu, frame.is_sampled
        self.uses_cpu_time = frame.uses_cpu_time
        iteration = numbers(table, "iteration")
        self.rank = numbers(table, "rank")
        self.row = np.searchsorted(self.ranks, self.rank)
        self.slot = np.searchsorted(self.iterations, iteration)
        self.in_iteration = iteration > 0
        self.start = numbers(table, "start_ns")
        self.duration = numbers(table, "duration_ns")

    @classmethod
    def of(cls, timeline: Timeline) -> SpanIndex:
        """Index the spans of a timeline that is here as a whole."""
        return cls(timeline.spans, Frame.of(timeline, [Glance.at(timeline.spans)]))

    @property
    def cell(self) -> Integers:
        """Return each span's rank and iteration as one number: row * num_iterations + slot."""
        return self.row * self.shape[1] + self.slot

    @property
    def num_cells(self) -> int:
        """Return the number of ranks times iterations."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def track(self) -> Integers:
        """Return the track of each span."""
        return numbers(self.table, "track")

    @cached_property
    def axis(self) -> tuple[Integers, Integers]:
        """Return starts and ends, (span,) each, on one axis on which ranks follow each other."""
        if not len(self.start):
            return self.start, self.start
        origin = int(self.start.min())
        length = int((self.start + self.duration).max()) - origin + 1
        start = self.start - origin + self.row * length
        return start, start + self.duration

    @cached_property
    def extent(self) -> tuple[Integers, Integers]:
        """Return begin and end of each (rank, iteration), flat, on the axis of all ranks.

        An iteration is where its own span is: a host may load for it seconds before its device,
        which still waits in the iteration before. Where there is none, all spans of the iteration
        count; begin = end if nothing was recorded.
        """
        start, end = self.axis
        cell = self.cell
        low = np.full(self.num_cells, np.iinfo(np.int64).max)
        high = np.zeros(len(low), dtype=np.int64)
        own = self.of_kind(Kind.ITERATION)
        has_own = np.zeros(len(low), dtype=bool)
        has_own[cell[own]] = True
        for spans in (own, self.in_iteration & ~has_own[cell]):
            np.minimum.at(low, cell[spans], start[spans])
            np.maximum.at(high, cell[spans], end[spans])
        return np.minimum(low, high), high

    @cached_property
    def is_split(self) -> Flags:
        """Flag the communication that could be split into waiting and transfer."""
        waits = numbers(self.table, "wait_ns") >= 0
        return np.asarray(self.of_kind(*COMMUNICATION_KINDS) & waits)

    def named(self, names: Iterable[str]) -> Flags:
        """Flag the spans of these names that belong to an iteration."""
        return equals(self.table, "name", *names) & self.in_iteration

    def of_kind(self, *kinds: Kind) -> Flags:
        """Flag the spans of these kinds that belong to an iteration."""
        return equals(self.table, "kind", *kinds) & self.in_iteration

    def blocking(self) -> Flags:
        """Flag the communication that keeps its rank from everything else."""
        is_beside = self.track == Track.OVERLAPPED
        return np.asarray(self.of_kind(*COMMUNICATION_KINDS) & ~is_beside)

    def self_time(self, rows: Flags) -> Floats:
        """Return the self time of the spans, ns; CPU time where the frame uses that."""
        column = "self_cpu_ns" if self.uses_cpu_time else "self_ns"
        return np.maximum(numbers(self.table, column)[rows], 0).astype(np.float64)

    def wall_time(self, rows: Flags) -> Floats:
        """Return the self time of the spans by the wall, also where CPU time is used."""
        return np.maximum(numbers(self.table, "self_ns")[rows], 0).astype(np.float64)

    def sums(self, rows: Flags | Integers, amounts: Floats | Integers) -> Floats:
        """Return the sums of what some spans amount to, (rank, iteration); 0 without any."""
        return sums_by_cell(self.row[rows], self.slot[rows], amounts, self.shape)

    def sums_or_nan(self, rows: Flags, amounts: Floats | Integers) -> Floats:
        """Return the sums of what some spans amount to; NaN for ranks without any of them."""
        table = self.sums(rows, amounts)
        table[~(table > 0).any(axis=1)] = np.nan
        return table


def sums_by_cell(
    row: Integers, slot: Integers, amounts: Floats | Integers, shape: tuple[int, int]
) -> Floats:
    """Return the sums of `amounts` in each (row, slot) of a matrix; 0 without any."""
    total = np.bincount(row * shape[1] + slot, weights=amounts, minlength=shape[0] * shape[1])
    return np.asarray(total.reshape(shape), dtype=np.float64)


def cover_of(start: Integers, end: Integers, use: Flags) -> Cover:
    """Return the union of the spans that `use` flags."""
    return Cover.of(*united(start[use], end[use]))


def idle_within(cover: Cover, start: Integers, end: Integers) -> Floats:
    """Return how much of each stretch no span covers, ns; 0 where it ends before it begins."""
    free = end - start - cover.length_within(start, end)
    return np.asarray(np.maximum(free, 0), dtype=np.float64)


def known_or_none(values: Floats) -> Floats | None:
    """Return the values; None where none of them is known."""
    return values if np.isfinite(values).any() else None


def where_text(spans: pa.Table, column: str, test: Callable[[str], bool]) -> Flags:
    """Flag the spans whose text in a column passes a `test`, which is asked once for each text."""
    code, texts = codes(spans, column)
    passes = np.array([test(text) for text in texts] or [False], dtype=bool)
    return np.asarray(passes[code])


def enclosing(index: SpanIndex, outer: Flags, inner: Flags) -> Integers:
    """Return for each `inner` span the number of the `outer` span it starts in, -1 for none.

    Numbers count the `outer` spans in the order of the table; those of one rank must not overlap.
    """
    start, end = index.axis
    outer_start, outer_end = start[outer], end[outer]
    if not len(outer_start):
        return np.full(int(inner.sum()), -1, dtype=np.int64)
    order = np.argsort(outer_start, kind="stable")
    place = np.searchsorted(outer_start[order], start[inner], side="right") - 1
    inside = (place >= 0) & (start[inner] < outer_end[order][np.maximum(place, 0)])
    return np.where(inside, order[np.maximum(place, 0)], -1)


def enclosed_time(
    index: SpanIndex, outer: Flags, inner: Flags, time_ns: Floats | Integers
) -> Floats:
    """Return for each `outer` span the summed `time_ns` of the `inner` spans that start in it."""
    owner = enclosing(index, outer, inner)
    total = np.zeros(int(outer.sum()))
    np.add.at(total, owner[owner >= 0], time_ns[owner >= 0])
    return total


def uncovered_time(index: SpanIndex) -> Floats:
    """Return the time within iterations that lies in no span, (rank, iteration) ns.

    Gaps are counted from the start of the iteration up to its last span: what follows is the
    trainer's own end of the iteration (logging). A host may load while its device is still busy
    with the iteration before: that is no gap of this iteration.
    """
    start, end = index.axis
    iteration = index.of_kind(Kind.ITERATION)
    end = np.where(iteration, start, end)  # an iteration span only marks where it begins
    begin = np.full(index.shape, np.iinfo(np.int64).min)
    begin[index.row[iteration], index.slot[iteration]] = start[iteration]
    use = np.flatnonzero(index.in_iteration)
    order = use[np.argsort(start[use], kind="stable")]
    row, slot = index.row[order], index.slot[order]
    reached = np.maximum(np.maximum.accumulate(end[order])[:-1], begin[row, slot][1:])
    gap = np.maximum(start[order][1:] - reached, 0)
    same = (row[1:] == row[:-1]) & (slot[1:] == slot[:-1])
    return sums_by_cell(row[1:][same], slot[1:][same], gap[same], index.shape)


def ending_time(index: SpanIndex) -> Floats:
    """Return the time from the last span of an iteration to its end, (rank, iteration) ns: what the
    trainer does there (logging), while a device has nothing to do.

    0 where the rank's device is still busy when its host begins the next iteration.
    """
    end = index.axis[1]
    whole = index.of_kind(Kind.ITERATION)
    inside = index.in_iteration & ~whole
    last = np.full(index.shape, np.iinfo(np.int64).min)
    np.maximum.at(last, (index.row[inside], index.slot[inside]), end[inside])
    last[last < 0] = np.iinfo(np.int64).max  # nothing was recorded in the iteration
    return index.sums(whole, np.maximum(end[whole] - last[index.row[whole], index.slot[whole]], 0))


def waiting_time(index: SpanIndex) -> Floats:
    """Return the time in which a rank does nothing but wait for others, (rank, iteration) ns.

    Synchronous communication keeps its rank from everything else, so all of its waiting counts.
    What waits beside computing counts only where nothing is computed; in `grad-sync` a rank waits
    for what travels beside it:

        compute       |── own ──|           |── own ──|
        synchronous             |── wait ──|
        overlapped         |────── wait ──────────────────── |
        waiting                 |▒▒▒▒▒▒▒▒▒▒|          |▒▒▒▒▒▒|

    0 where no communication is split.
    """
    waits, is_beside = index.is_split, index.track == Track.OVERLAPPED
    if not waits.any():
        return np.zeros(index.shape)
    alone = _waits(index, waits & ~is_beside)
    covered = _union(alone, _computing(index))
    either = _union(covered, _waits(index, waits & is_beside))
    return _within(index, alone) + _within(index, either) - _within(index, covered)


def waiting_beside(index: SpanIndex) -> Floats:
    """Return the time in which a rank computes while a collective of it waits for others beside
    that, (rank, iteration) ns; 0 where no communication is split.

        compute       |── own ──|        |── own ──|
        collective         |────── wait ──────|
        beside             |▒▒▒▒|        |▒▒▒▒|
    """
    waits = index.is_split & index.of_kind(Kind.COLLECTIVE) & (index.track == Track.OVERLAPPED)
    if not waits.any():
        return np.zeros(index.shape)
    beside, busy = _waits(index, waits), _computing(index)
    return _within(index, beside) + _within(index, busy) - _within(index, _union(beside, busy))


def unsplit_time(index: SpanIndex) -> Floats:
    """Return the time in which a rank does nothing but communicate, and waiting cannot be told from
    transfer, (rank, iteration) ns: what computing or other communication covers is left out.
    """
    unknown = index.of_kind(*COMMUNICATION_KINDS) & ~index.is_split
    if not unknown.any():
        return np.zeros(index.shape)
    covered = _union(_computing(index), _covered(index, index.is_split))
    return _within(index, _union(covered, _covered(index, unknown))) - _within(index, covered)


Parts = tuple[Integers, Integers]
"""Begins and ends, on the axis of all ranks, of disjoint parts in the order of time."""


def _covered(index: SpanIndex, rows: Flags) -> Parts:
    start, end = index.axis
    return united(start[rows], end[rows])


def _waits(index: SpanIndex, rows: Flags) -> Parts:
    start = index.axis[0]
    return united(start[rows], (start + numbers(index.table, "wait_ns"))[rows])


def _computing(index: SpanIndex) -> Parts:
    """Return when ranks compute; in `grad-sync` they wait for what travels beside it."""
    works = index.of_kind(Kind.COMPUTE, Kind.OPTIMIZER)
    return _covered(index, works & ~equals(index.table, "name", GRAD_SYNC))


def _union(one: Parts, other: Parts) -> Parts:
    return united(np.r_[one[0], other[0]], np.r_[one[1], other[1]])


def _within(index: SpanIndex, parts: Parts) -> Floats:
    """Return how much of each iteration some parts cover, (rank, iteration) ns."""
    length = Cover.of(*parts).length_within(*index.extent)
    return np.asarray(length.reshape(index.shape), dtype=np.float64)
