"""The span table as arrays: each span's place in the matrices, what lies in what, what none covers.

`SpanIndex` gives every span its row (rank) and slot (iteration). Spans of all ranks are put on one
axis, one rank after the other, so that "which pass holds this collective" is one sorted search,
and so is how long a rank only waits:

    rank 0 |── forward ──|── backward ──|   rank 1 |── forward ──|── backward ──|
              └ gc: starts in the forward pass of rank 0            └ reduction: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa

from detect.observe.observations import BACKWARD, FORWARD
from detect.thresholds import WINDOW
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
class Glance:
    """What a part of a trace (a shard) says before it is observed; see `Frame`."""

    iterations: Integers
    num_passes: int
    num_passes_on_cpu: int
    """Passes whose CPU time was measured."""
    has_layers: bool
    """Some transformer layers of Megatron-Core."""
    has_modules: bool
    has_iterations: bool
    has_parts: bool
    """Something computes on the device inside passes and layers."""
    has_loss: bool
    """The loss by itself, as of jobs on megatron.core."""

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
class Frame:
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
    has_layers: bool
    has_modules: bool
    has_iterations: bool
    has_parts: bool
    has_loss: bool

    @classmethod
    def of(cls, timeline: Timeline, glances: Sequence[Glance]) -> Frame:
        """Join what was seen of the parts of a timeline, whose spans are not looked at."""
        is_cpu = all(header.device.kind == "cpu" for header in timeline.headers.values())
        num_passes = sum(glance.num_passes for glance in glances)
        on_cpu = sum(glance.num_passes_on_cpu for glance in glances)
        measured = num_passes > 0 and on_cpu / num_passes > WINDOW.cpu_time_share
        return cls(
            ranks=np.array(sorted(timeline.headers), dtype=np.int64),
            iterations=np.unique(np.concatenate([glance.iterations for glance in glances])),
            is_cpu=is_cpu,
            is_sampled=is_sampled(timeline),
            uses_cpu_time=is_cpu and measured,
            has_passes=num_passes > 0,
            has_layers=any(glance.has_layers for glance in glances),
            has_modules=any(glance.has_modules for glance in glances),
            has_iterations=any(glance.has_iterations for glance in glances),
            has_parts=any(glance.has_parts for glance in glances),
            has_loss=any(glance.has_loss for glance in glances),
        )

    def only(self, ranks: Sequence[int]) -> Frame:
        """Return the frame of a part that holds these ranks, ascending."""
        return replace(self, ranks=np.array(ranks, dtype=np.int64))


class SpanIndex:
    """Columns of the span table as arrays, with each span's row (rank) and slot (iteration)."""

    def __init__(self, table: pa.Table, frame: Frame) -> None:
        self.table = table
        self.frame = frame
        self.ranks, self.iterations = frame.ranks, frame.iterations
        self.is_cpu, self.is_sampled = frame.is_cpu, frame.is_sampled
        self.uses_cpu_time = frame.uses_cpu_time
        iteration = numbers(table, "iteration")
        self.rank = numbers(table, "rank")
        self.row = np.searchsorted(self.ranks, self.rank)
        self.slot = np.searchsorted(self.iterations, iteration)
        self.counts = iteration > 0
        self.start = numbers(table, "start_ns")
        self.duration = numbers(table, "duration_ns")

    @classmethod
    def of(cls, timeline: Timeline) -> SpanIndex:
        """Index the spans of a timeline that is here as a whole."""
        return cls(timeline.spans, Frame.of(timeline, [Glance.at(timeline.spans)]))

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of ranks, number of iterations)."""
        return len(self.ranks), len(self.iterations)

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
        """Return starts and ends of all spans on one axis, as `axis_of` lays them out."""
        return _on_one_axis(self)

    def named(self, names: Iterable[str]) -> Flags:
        """Return spans of these names that belong to an iteration."""
        return equals(self.table, "name", *names) & self.counts

    def self_time(self, rows: Flags) -> Floats:
        """Return the self time of the spans, CPU time where the ranks share cores and it was
        measured.
        """
        column = "self_cpu_ns" if self.uses_cpu_time else "self_ns"
        return np.maximum(numbers(self.table, column)[rows], 0).astype(np.float64)

    def wall_time(self, rows: Flags) -> Floats:
        """Return the self time of the spans by the wall, also where CPU time is used."""
        return np.maximum(numbers(self.table, "self_ns")[rows], 0).astype(np.float64)

    def sums(self, rows: Flags | Integers, amounts: Floats) -> Floats:
        """Return the sums of what some spans amount to, (rank, iteration); 0 without any."""
        return sums_by_cell(self.row[rows], self.slot[rows], amounts, self.shape)

    def sums_or_nan(self, rows: Flags, amounts: Floats) -> Floats:
        """Return the sums of what some spans amount to; NaN for ranks without any of them."""
        table = self.sums(rows, amounts)
        table[~(table > 0).any(axis=1)] = np.nan
        return table


def sums_by_cell(row: Integers, slot: Integers, amounts: Floats, shape: tuple[int, int]) -> Floats:
    """Return the sums of `amounts` in each (row, slot) of a matrix; 0 without any."""
    total = np.bincount(row * shape[1] + slot, weights=amounts, minlength=shape[0] * shape[1])
    return np.asarray(total.reshape(shape), dtype=np.float64)


def where_text(spans: pa.Table, column: str, test: Callable[[str], bool]) -> Flags:
    """Flag the spans whose text in a column passes a `test`, which is asked once for each text."""
    code, texts = codes(spans, column)
    passes = np.array([test(text) for text in texts] or [False], dtype=bool)
    return np.asarray(passes[code])


class SpanTimes(Protocol):
    """Arrays over all spans, ordered by (rank, start, longest first)."""

    row: Integers
    slot: Integers
    start: Integers
    duration: Integers
    counts: Flags

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of ranks, number of iterations)."""


def axis_of(spans: SpanTimes) -> tuple[Integers, Integers]:
    """Return starts and ends, (span,) each, on one axis on which ranks follow each other."""
    return spans.axis if isinstance(spans, SpanIndex) else _on_one_axis(spans)


def _on_one_axis(spans: SpanTimes) -> tuple[Integers, Integers]:
    if not len(spans.start):
        return spans.start, spans.start
    origin = int(spans.start.min())
    length = int((spans.start + spans.duration).max()) - origin + 1
    start = spans.start - origin + spans.row * length
    return start, start + spans.duration


def enclosing(spans: SpanTimes, outer: Flags, inner: Flags) -> Integers:
    """Return for each `inner` span the number of the `outer` span it starts in, -1 for none.

    Numbers count the `outer` spans in the order of the table; those of one rank must not overlap.
    """
    start, end = axis_of(spans)
    outer_start, outer_end = start[outer], end[outer]
    if not len(outer_start):
        return np.full(int(inner.sum()), -1, dtype=np.int64)
    order = np.argsort(outer_start, kind="stable")
    place = np.searchsorted(outer_start[order], start[inner], side="right") - 1
    inside = (place >= 0) & (start[inner] < outer_end[order][np.maximum(place, 0)])
    return np.where(inside, order[np.maximum(place, 0)], -1)


def enclosed_time(spans: SpanTimes, outer: Flags, inner: Flags, time_ns: Floats) -> Floats:
    """Return for each `outer` span the summed `time_ns` of the `inner` spans that start in it."""
    owner = enclosing(spans, outer, inner)
    total = np.zeros(int(outer.sum()))
    np.add.at(total, owner[owner >= 0], time_ns[owner >= 0])
    return total


def uncovered_time(spans: SpanTimes, iteration: Flags) -> Floats:
    """Return the time within iterations that lies in no span, (rank, iteration).

    Gaps are counted from the start of the iteration up to its last span: what follows is the
    trainer's own end of the iteration (logging). A host may load while its device is still busy
    with the iteration before: that is no gap of this iteration.
    """
    start, end = axis_of(spans)
    end = np.where(iteration, start, end)  # an iteration span only marks where it begins
    marks = np.flatnonzero(spans.counts & iteration)
    begin = np.full(spans.shape, np.iinfo(np.int64).min)
    begin[spans.row[marks], spans.slot[marks]] = start[marks]
    use = np.flatnonzero(spans.counts)
    order = use[np.argsort(start[use], kind="stable")]
    reached = np.maximum.accumulate(end[order]) if len(order) else end[order]
    row, slot = spans.row[order], spans.slot[order]
    gap = np.maximum(start[order][1:] - np.maximum(reached[:-1], begin[row, slot][1:]), 0)
    same = (row[1:] == row[:-1]) & (slot[1:] == slot[:-1])
    return sums_by_cell(row[1:][same], slot[1:][same], gap[same], spans.shape)


def ending_time(spans: SpanTimes, iteration: Flags) -> Floats:
    """Return the time from the last span of an iteration to its end, (rank, iteration): what the
    trainer does there (logging), while a device has nothing to do.

    0 where the rank's device is still busy when its host begins the next iteration.
    """
    end = axis_of(spans)[1]
    whole, inside = np.flatnonzero(spans.counts & iteration), spans.counts & ~iteration
    last = np.full(spans.shape, np.iinfo(np.int64).min)
    np.maximum.at(last, (spans.row[inside], spans.slot[inside]), end[inside])
    last[last < 0] = np.iinfo(np.int64).max  # nothing was recorded in the iteration
    place = spans.row[whole], spans.slot[whole]
    return sums_by_cell(*place, np.maximum(end[whole] - last[place], 0), spans.shape)


def is_split(index: SpanIndex) -> Flags:
    """Flag the communication that could be split into waiting and transfer."""
    split = equals(index.table, "kind", *COMMUNICATION_KINDS) & index.counts
    return np.asarray(split & (numbers(index.table, "wait_ns") >= 0))


def split_waits(index: SpanIndex) -> Floats:
    """Return the waiting in all communication that is split, (rank, iteration) ns."""
    waits = is_split(index)
    return index.sums(waits, numbers(index.table, "wait_ns")[waits].astype(np.float64))


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
    wait, waits = numbers(index.table, "wait_ns"), is_split(index)
    if not waits.any():
        return np.zeros(index.shape)
    start, end = axis_of(index)
    beside = index.track == Track.OVERLAPPED
    alone = _Layer(start[waits & ~beside], (start + wait)[waits & ~beside])
    covered = alone.with_more(_computing(index))
    either = covered.with_more(_Layer(start[waits & beside], (start + wait)[waits & beside]))
    low, high = _iterations(index, start, end)
    length = alone.within(low, high) + either.within(low, high) - covered.within(low, high)
    return np.asarray(length.reshape(index.shape), dtype=np.float64)


def waiting_beside(index: SpanIndex) -> Floats:
    """Return the time in which a rank computes while a collective of it waits for others beside
    that, (rank, iteration) ns; 0 where no communication is split.

        compute       |── own ──|        |── own ──|
        collective         |────── wait ──────|
        beside             |▒▒▒▒|        |▒▒▒▒|
    """
    waits = is_split(index) & equals(index.table, "kind", Kind.COLLECTIVE)
    waits &= index.track == Track.OVERLAPPED
    if not waits.any():
        return np.zeros(index.shape)
    start, end = axis_of(index)
    beside = _Layer(start[waits], (start + numbers(index.table, "wait_ns"))[waits])
    busy = _computing(index)
    low, high = _iterations(index, start, end)
    length = beside.within(low, high) + busy.within(low, high)
    length -= beside.with_more(busy).within(low, high)
    return np.asarray(length.reshape(index.shape), dtype=np.float64)


def _computing(index: SpanIndex) -> _Layer:
    """Return when ranks compute; in `grad-sync` they wait for what travels beside it."""
    works = equals(index.table, "kind", Kind.COMPUTE, Kind.OPTIMIZER) & index.counts
    works &= ~equals(index.table, "name", GRAD_SYNC)
    start, end = axis_of(index)
    return _Layer(start[works], end[works])


def unmatched_time(index: SpanIndex) -> Floats:
    """Return the time in which a rank does nothing but communicate without a match, (rank,
    iteration) ns: what computing or matched communication covers is left out.
    """
    start, end = axis_of(index)
    split = is_split(index)
    unknown = equals(index.table, "kind", *COMMUNICATION_KINDS) & index.counts & ~split
    known = equals(index.table, "kind", Kind.COMPUTE, Kind.OPTIMIZER) & index.counts | split
    covered = _Layer(start[known], end[known])
    either = covered.with_more(_Layer(start[unknown], end[unknown]))
    low, high = _iterations(index, start, end)
    length = either.within(low, high) - covered.within(low, high)
    return np.asarray(length.reshape(index.shape), dtype=np.float64)


class _Layer:
    """A union of intervals."""

    def __init__(self, start: Integers, end: Integers) -> None:
        self._start, self._end = united(start, end)

    def with_more(self, other: _Layer) -> _Layer:
        return _Layer(np.r_[self._start, other._start], np.r_[self._end, other._end])

    def within(self, low: Integers, high: Integers) -> Integers:
        return Cover.of(self._start, self._end).length_within(low, high)


def _iterations(index: SpanIndex, start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Return begin and end of each (rank, iteration), flat; begin = end if nothing was recorded.

    These are those of the iteration's own span: a host may load for an iteration seconds before its
    device, which still waits in the iteration before. Where there is none, all its spans count.
    """
    cell = index.cell
    low = np.full(index.num_cells, np.iinfo(np.int64).max)
    high = np.zeros(len(low), dtype=np.int64)
    own = equals(index.table, "kind", Kind.ITERATION) & index.counts
    has_own = np.zeros(len(low), dtype=bool)
    has_own[cell[own]] = True
    for spans in (own, index.counts & ~has_own[cell]):
        np.minimum.at(low, cell[spans], start[spans])
        np.maximum.at(high, cell[spans], end[spans])
    return np.minimum(low, high), high
