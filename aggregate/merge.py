"""Build a timeline from a trace: match, put on one clock, split waits from transfers.

    shards    spans as read ─ ends ╮                                  ╭─ one clock, self times ─ …
    centre                         ╰─ match ─ restarts ─ align ─ waits ╯

Matching and alignment need all ranks at once, but few of their spans and columns: the ends
(`megascan.timeline.ends_of`). Everything else needs one rank only, and is done where the rank's
spans stay (`settle`). The centre sends a correction of the clocks there, and match and wait of each
end. A trace that this process holds as a whole goes the same way, in shards of some ranks.

**Waits.** Which member of a communication came last is only known where all ranks are seen together
(`split_waits`, for the ends of a trace):

    own start          last member's start          end
        ├──── wait ────────────┼───── transfer ──────┤

wait = last member's start − own start, never negative, never beyond the span; transfer = the rest.
For a message the other side is the only other member: a receive waits until the send started, a
send until the receive was posted. Where the last start lies on another clock and no further off
than the error bar of the two clocks, the wait is 0 and all of the span is transfer. Where nothing
links the two clocks, or the end is only a bound, neither wait nor transfer is claimed (-1).

No rank waits for a member that comes after it has left:

    send       ├──────┤                     buffered: it has not waited for the receive, but for
    receive                 ├──────────┤    room in its buffer, as far as it takes longer than it
    broadcast  ├──────────┤    ╷            the last member that came before the end counts,
    broadcast      ├──────┤    ╷            although only the root can be waited for
    broadcast                  ├───┤
    all_reduce ├──────┤                     impossible: no rank leaves before the last has come, so
    all_reduce              ├──────────┤    the match is wrong: no wait or transfer is claimed

A collective or a receive that ends before its last member starts, by no more than the error bar,
has waited all of its time.

The self time of any other span is its duration minus the union of its rank's synchronous
communication inside the span; a bracket around collectives and the collectives in it count once.

**Borders.** The spans of a rank are divided between stretches that nothing reaches across:

    stretch 1  |w1 ······|w2 ·······|                     nothing of w2 is under way when w3 begins
    stretch 2                         |w3 ······|w4 ········|
    stretch 3                                            |w5 ······|      w4 is when w5 begins: both
                                                                          stretches stay together

What is derived from a rank's spans (their order, self times, shares of an iteration, tracks) then
needs one side of a border only. One thing reaches further: the device may have had nothing to do
since before the border; `Group.busy_until_ns` tells since when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aggregate.clocks import Accuracy, Alignment, ClockLines, align_clocks, without_steps
from aggregate.match import Matches, by_rank, match_spans
from aggregate.summary import Sums, ranks_on_cpu, sums_of
from megascan.arrays import (
    Cover,
    Flags,
    Integers,
    Narrow,
    RowNumbers,
    TimeAxis,
    group_lengths,
    group_numbers,
    group_starts,
    rank_blocks,
    rows_of_runs,
)
from megascan.errors import InputError
from megascan.header import RESTARTING_CLOCK
from megascan.parallel import Here, Kept, Workers, over_blocks
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Track
from megascan.timeline import (
    ROWS_A_THREAD,
    TIMELINE_SCHEMA,
    TRACE_SCHEMA,
    Extent,
    Shard,
    ShardedTimeline,
    Stay,
    Timeline,
    Trace,
    ends_of,
    equals,
    give_back_memory,
    in_order,
    integer_column,
    is_end,
    narrow,
    numbers,
    row_order,
    shifted,
    with_column,
    without,
)
from megascan.vocabulary import ROOTED_OPS

if TYPE_CHECKING:
    from aggregate.jumps import ClockStep, Restarts

BLOCK_ROWS = 1 << 16
"""About how many spans a shard has, in whole ranks, if this process holds the whole trace."""


@dataclass(frozen=True)
class Correction:
    """What puts the times of some ranks on the common clock; arrays are (rank,), as `ranks`.

    First restarts are undone, then jumps in turn, then times are put on the `lines`. None of these
    steps changes the order of a rank's times, but times that differed may become equal.
    """

    ranks: Integers
    domain: Integers
    lines: ClockLines
    steps: tuple[ClockStep, ...]
    restarts: Restarts | None

    def only(self, ranks: Sequence[int]) -> Correction:
        """Return the correction of some ranks, ascending."""
        chosen = np.searchsorted(self.ranks, np.array(ranks, dtype=np.int64))
        return Correction(
            self.ranks[chosen],
            self.domain[chosen],
            self.lines.only(chosen),
            self.steps,
            self.restarts and self.restarts.only(chosen),
        )

    def applied(self, spans: pa.Table) -> pa.Table:
        """Return spans with start_ns and duration_ns on the common clock."""
        start_ns, duration_ns = np.empty((2, spans.num_rows), dtype=np.int64)

        def correct(low: int) -> None:
            rows = slice(low, low + ROWS_A_THREAD)
            start_ns[rows], duration_ns[rows] = self._times(spans.slice(low, ROWS_A_THREAD))

        for _ in over_blocks(correct, range(0, spans.num_rows, ROWS_A_THREAD)):
            pass
        spans = with_column(spans, "start_ns", start_ns)
        return with_column(spans, "duration_ns", duration_ns)

    def _times(self, spans: pa.Table) -> tuple[Integers, Integers]:
        """Return start and duration of spans."""
        rank, start = numbers(spans, "rank"), numbers(spans, "start_ns")
        position, duration = np.searchsorted(self.ranks, rank), numbers(spans, "duration_ns")
        if self.restarts is not None:
            start = start + self.restarts.of(rank, numbers(spans, "iteration"))
        for step in self.steps:
            start = start - step.excess_ns(self.domain[position], start)
        begin = self.lines.common(position, start)
        return begin, self.lines.common(position, start + duration) - begin


_ROUNDING_NS = 2.0
"""Two times are rounded to whole ns each."""
_BLOCK_ENDS = 1 << 16
"""About how many members (of whole matches) have their waits split together."""


@dataclass(frozen=True)
class _Ends:
    """What waits are computed from; all but `accuracy` are (end,)."""

    start_ns: Integers
    duration_ns: Integers
    domain: RowNumbers
    match: RowNumbers
    is_send: Flags
    is_rooted: Flags
    is_bound: Flags
    accuracy: Accuracy

    @classmethod
    def of(cls, ends: pa.Table, match: RowNumbers, clocks: Alignment) -> _Ends:
        return cls(
            numbers(ends, "start_ns"),
            numbers(ends, "duration_ns"),
            by_rank(clocks.ranks, clocks.domain)[narrow(ends, "rank")],
            match,
            equals(ends, "op", "send"),
            equals(ends, "op", *ROOTED_OPS),
            narrow(ends, "end_is_bound") == 1,
            clocks.accuracy,
        )

    def waits(self, rows: RowNumbers) -> Integers:
        """Return the waits, ns, of some rows, which must be whole matches in order."""
        first = group_starts(self.match[rows])
        group = group_numbers(first, len(rows))
        start_ns, duration = self.start_ns[rows], self.duration_ns[rows]
        awaited_ns = np.maximum.reduceat(start_ns, first)[group]
        came_last = np.where(start_ns == awaited_ns, rows, -1)
        awaited = np.maximum.reduceat(came_last, first)[group]
        error = self.accuracy.between(self.domain[rows], self.domain[awaited])
        comparable = np.ones(len(first), dtype=np.bool_)
        comparable[group[np.isinf(error)]] = False
        rooted = np.flatnonzero(self.is_rooted[rows])
        if len(rooted):
            earlier = self._last_before_end(rows[rooted])
            awaited_ns[rooted] = self.start_ns[earlier]
            error[rooted] = self.accuracy.between(self.domain[rows[rooted]], self.domain[earlier])
        lag = awaited_ns - start_ns
        missed = lag > duration + np.maximum(error, _ROUNDING_NS)
        sends = self.is_send[rows]
        claimed_ns = np.where(lag > error, np.minimum(lag, duration), 0)
        buffered = np.flatnonzero(sends & missed)  # behind another message that filled the buffer
        received_ns = self.duration_ns[awaited[buffered]]
        claimed_ns[buffered] = np.maximum(duration[buffered] - received_ns, 0)
        known = comparable[group] & ~self.is_bound[rows] & (sends | ~missed)
        return np.where(known, claimed_ns, NOT_APPLICABLE)

    def _last_before_end(self, rows: RowNumbers) -> RowNumbers:
        """Return for each row the row of the last member of its match that started by the row's end
        (at least the row itself did). Rows must be whole matches in order.
        """
        by_start = np.lexsort((self.start_ns[rows], self.match[rows]))
        start_ns, first = self.start_ns[rows[by_start]], group_starts(self.match[rows])
        group = group_numbers(first, len(rows))
        low, high = first[group], (first + group_lengths(first, len(rows)))[group]
        end_ns = self.start_ns[rows] + self.duration_ns[rows]
        while (low + 1 < high).any():  # binary search, of all rows together
            middle = (low + high) // 2
            came = start_ns[middle] <= end_ns
            low, high = np.where(came, middle, low), np.where(came, high, middle)
        return rows[by_start[low]]


def split_waits(ends: pa.Table, matches: Matches, clocks: Alignment) -> Integers:
    """Return (end,) wait_ns of the ends of all ranks on the common clock; -1 where none is claimed.

    Where a wait is claimed, the rest of the span is transfer.
    """
    wait = np.full(ends.num_rows, NOT_APPLICABLE, dtype=np.int64)
    columns = _Ends.of(ends, matches.match, clocks)
    match, members = matches.match, matches.members
    edges = np.searchsorted(match[members], match[members[::_BLOCK_ENDS]]).tolist()
    blocks = [members[low:high] for low, high in pairwise([*edges, len(members)]) if low < high]

    def filled(rows: RowNumbers) -> None:
        wait[rows] = columns.waits(rows)

    for _ in over_blocks(filled, blocks):
        pass
    return wait


def transfers(spans: pa.Table, wait_ns: Integers) -> Integers:
    """Return each span's duration minus its wait, (span,) ns; -1 where no wait is claimed."""
    return np.where(wait_ns >= 0, numbers(spans, "duration_ns") - wait_ns, NOT_APPLICABLE)


def decomposed(spans: pa.Table, match: RowNumbers, wait_ns: Integers) -> pa.Table:
    """Return some ranks' spans, ordered by (rank, start), with their derived columns.

    `match` and `wait_ns` belong to the ends among the spans.
    """
    rows = np.flatnonzero(is_end(spans))
    wait, matches = np.full((2, spans.num_rows), NOT_APPLICABLE, dtype=np.int64)
    wait[rows], matches[rows] = wait_ns, match
    communication = equals(spans, "kind", *COMMUNICATION_KINDS)
    inside = communication & (numbers(spans, "track") != Track.OVERLAPPED)
    self_ns, self_cpu_ns = np.full((2, spans.num_rows), NOT_APPLICABLE, dtype=np.int64)
    work = np.flatnonzero(~communication)
    self_ns[work], self_cpu_ns[work] = self_times(
        numbers(spans, "rank"),
        numbers(spans, "start_ns"),
        numbers(spans, "duration_ns"),
        numbers(spans, "cpu_ns"),
        inside=inside,
        work=work,
    )
    transfer_ns = transfers(spans, wait)
    for name, values in (
        ("match", matches),
        ("wait_ns", wait),
        ("transfer_ns", transfer_ns),
        ("self_ns", self_ns),
        ("self_cpu_ns", self_cpu_ns),
    ):
        spans = spans.append_column(name, integer_column(values))
    return spans


def self_times(
    rank: Integers,
    start_ns: Integers,
    duration_ns: Integers,
    cpu_ns: Integers,
    *,
    inside: Flags,
    work: Integers,
) -> tuple[Integers, Integers]:
    """Return (self_ns, self_cpu_ns) of the spans in rows `work`; all are ordered by (rank, start).

    `inside` marks the spans to be taken out of the spans around them. The CPU time of a span is
    taken to be spread evenly.
    """
    axis = TimeAxis.of(rank, start_ns, start_ns + duration_ns)
    start = axis.place(rank, start_ns)
    end = start + duration_ns
    cover = Cover.of(start[inside], end[inside], np.maximum(cpu_ns[inside], 0).astype(np.float64))
    start, end, cpu_ns = start[work], end[work], cpu_ns[work]
    self_ns = duration_ns[work] - cover.length_within(start, end)
    if (cpu_ns < 0).all():  # on a GPU
        return self_ns, np.full_like(self_ns, NOT_APPLICABLE)
    cpu_inside = np.rint(cover.amount_within(start, end)).astype(np.int64)
    self_cpu = np.where(cpu_ns >= 0, np.maximum(cpu_ns - cpu_inside, 0), NOT_APPLICABLE)
    return self_ns, self_cpu


@dataclass(frozen=True)
class Share:
    """What makes a shard: spans of some ranks, where they stay, and the rows of their ends.

    `busy_until_ns`, for one rank, is that of its `Group`.
    """

    ranks: tuple[int, ...]
    stays: tuple[Stay, ...]
    rows: RowNumbers
    busy_until_ns: int | None = None


@dataclass(frozen=True)
class Aligned:
    """What the centre knows of a trace when its ends are matched and on one clock.

    `ends` stand in the order of the common clock, as `matches` and `wait_ns` (end,) do. The `trace`
    has no spans: the ends with their times as recorded would use memory for nothing.
    """

    trace: Trace
    ends: pa.Table
    wait_ns: Integers
    clocks: Alignment
    correction: Correction
    matches: Matches
    notes: tuple[str, ...]

    def sent(self, share: Share) -> Settling:
        """Return what is sent to the place where the spans of a share are."""
        return Settling(
            share.stays,
            self.correction.only(share.ranks),
            self.matches.match[share.rows],
            self.wait_ns[share.rows],
            share.busy_until_ns,
        )

    def shares(self) -> list[Share]:
        """Return the shares, ordered by the first of their ranks, those of one rank by time."""
        ranks_of: dict[int, list[int]] = {}
        for rank in sorted(self.trace.stays):
            ranks_of.setdefault(self.trace.stays[rank][0].shard, []).append(rank)
        rank_of = narrow(self.ends, "rank")
        return [
            share
            for ranks in ranks_of.values()
            for share in self._shares_of(ranks, _rows_of_ranks(rank_of, ranks))
        ]

    def _shares_of(self, ranks: Sequence[int], rows: RowNumbers) -> Iterator[Share]:
        """Yield the shares of `ranks` that were read together; `rows` are the rows of their ends.

        Several ranks make one share. So does a single rank whose clock jumps or that lacks
        iterations, as a jump or a gap may reach over a border of stretches. Any other rank that was
        read in stretches makes one share for each `Group` of its stretches.
        """
        stays = tuple(stay for rank in ranks for stay in self.trace.stays[rank])
        correction = self.correction.only(ranks[:1])
        jumps = any(step.domain in correction.domain for step in correction.steps)
        if len(stays) == len(ranks) or jumps or any(stay.left_out for stay in stays):
            yield Share(tuple(ranks), stays, rows)
            return
        low = 0
        for group in groups_of(ranks[0], stays, correction.applied):
            own = rows[low : low + group.num_ends]
            yield Share(tuple(ranks), group.stays, own, group.busy_until_ns)
            low += group.num_ends

    def matched_ends(self) -> pa.Table:
        """Return the ends with two more columns: match and transfer_ns."""
        transfer_ns = transfers(self.ends, self.wait_ns)
        ends = self.ends.append_column("match", integer_column(self.matches.match))
        return ends.append_column("transfer_ns", integer_column(transfer_ns))

    def frame(self, origin_ns: int, num_spans: int) -> Timeline:
        """Return the timeline without its spans."""
        trace = self.trace
        return Timeline(
            run_id=trace.run_id,
            layout=trace.layout,
            headers=trace.headers,
            spans=TIMELINE_SCHEMA.empty_table(),
            windows=trace.windows,
            clocks=self.clocks.fits(origin_ns),
            clock_method=self.clocks.method,
            origin_ns=origin_ns,
            completeness=replace(
                trace.completeness,
                num_spans=num_spans,
                num_unmatched=dict(self.matches.num_unmatched),
                num_duplicates=self.matches.num_duplicates,
                notes=trace.completeness.notes + self.notes,
            ),
        )


def align(trace: Trace) -> Aligned:
    """Match the ends of a trace, ordered by (rank, start), and fit the clocks.

    Raises InputError for spans of a rank that has no header.
    """
    _check_ranks(trace)
    give_back_memory()
    ends = trace.spans
    matches = match_spans(ends, trace.headers)
    give_back_memory()
    own, restarted = ends, None
    if all(header.clock.source == RESTARTING_CLOCK for header in trace.headers.values()):
        from aggregate.jumps import restarts_of  # only the original MegaScan's clocks begin again

        restarted = restarts_of(ends, matches, np.array(sorted(trace.headers), dtype=np.int64))
        shift = restarted.of(numbers(ends, "rank"), numbers(ends, "iteration"))
        own = shifted(ends, shift)
    clocks = align_clocks(own, matches, trace.headers)
    steps: tuple[ClockStep, ...] = ()
    if clocks.steps:
        steps, clocks = without_steps(own, matches, trace.headers, clocks)
    give_back_memory()
    correction = Correction(clocks.ranks, clocks.domain, clocks.lines, steps, restarted)
    ends = correction.applied(ends)
    order = row_order(ends)
    if order is not None:
        ends, matches = ends.take(order), matches.reordered(order)
    notes = matches.notes + ((restarted.note,) if restarted else ()) + clocks.notes
    wait_ns = split_waits(ends, matches, clocks)
    bare = replace(trace, spans=TRACE_SCHEMA.empty_table())
    return Aligned(bare, ends, wait_ns, clocks, correction, matches, notes)


@dataclass(frozen=True)
class Settled:
    """What the centre has to know of a shard's spans on the common clock; `sums` only if wanted."""

    num_spans: int
    start_ns: int
    sums: Sums | None


@dataclass(frozen=True)
class Settling:
    """What the centre sends to the place of some spans: which rows they are, the correction of
    their clocks, match and wait of each of their ends, and until when the device was busy before.
    """

    stays: tuple[Stay, ...]
    correction: Correction
    match: RowNumbers
    wait_ns: Integers
    busy_until_ns: int | None

    @property
    def shards(self) -> list[int]:
        """Return the shards that have rows of these spans, each shard once."""
        return list(dict.fromkeys(stay.shard for stay in self.stays))

    def chosen(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Return the spans in question from the tables of `shards`, ordered as recorded."""
        table_of = dict(zip(self.shards, tables, strict=True))
        parts = [
            without(table_of[stay.shard].slice(stay.begin, stay.end - stay.begin), stay.left_out)
            for stay in self.stays
        ]
        if len(parts) == 1:
            return parts[0]
        if len(tables) == 1:
            return pa.concat_tables(parts).combine_chunks()
        return in_order(pa.concat_tables(parts).unify_dictionaries().combine_chunks())


def settle(
    sent: Settling, run_id: str, on_cpu: frozenset[int] | None, *tables: pa.Table
) -> tuple[pa.Table, Settled]:
    """Put the spans that `sent` names, rows of the `tables` of its shards, on the common clock and
    derive their columns.

    If `on_cpu` (the ranks without a device) is given, the spans are summed up as well. Raises
    InputError for a negative duration.
    """
    spans = sent.chosen(tables)
    shortest = int(numbers(spans, "duration_ns").min(initial=0))
    if shortest < 0:
        raise InputError(
            f"run {run_id!r} has a span that lasts {shortest} ns; durations are 0 or more"
        )
    spans = sent.correction.applied(spans)
    order = row_order(spans)
    if order is not None:
        spans = spans.take(order)
    spans = decomposed(spans, sent.match, sent.wait_ns)
    table = spans.select(TIMELINE_SCHEMA.names).cast(TIMELINE_SCHEMA)
    sums = None if on_cpu is None else sums_of(table, on_cpu, sent.busy_until_ns)
    start_ns = int(numbers(table, "start_ns").min(initial=np.iinfo(np.int64).max))
    return table, Settled(table.num_rows, start_ns, sums)


def build_shards(
    aligned: Aligned, kept: Sequence[Kept], workers: Workers, *, summed: bool = False
) -> tuple[ShardedTimeline, list[Sums]]:
    """Put all ranks of a trace on one clock; the spans stay in shards, summed up if `summed`.

    Raises InputError for a trace without spans, or with a negative duration.
    """
    trace, shares = aligned.trace, aligned.shares()
    on_cpu = ranks_on_cpu(trace.headers) if summed else None
    tasks = (
        (sent, trace.run_id, on_cpu, *(kept[shard] for shard in sent.shards))
        for sent in map(aligned.sent, shares)
    )
    shards, sums, start_ns = [], [], []
    for (table, found), share in zip(workers.keep(settle, tasks), shares, strict=True):
        shards.append(Shard(table, found.num_spans, share.ranks, share.rows))
        start_ns.append(found.start_ns)
        sums += [found.sums] if found.sums else []
    num_spans = sum(shard.num_spans for shard in shards)
    if not num_spans:
        raise InputError(
            f"run {trace.run_id!r} has no spans to put on a timeline; trace at least one window"
        )
    timeline = ShardedTimeline(
        frame=aligned.frame(min(start_ns), num_spans),
        ends=aligned.matched_ends(),
        shards=tuple(shards),
        workers=workers,
    )
    return timeline, sums


def _rows_of_ranks(rank: Narrow, ranks: Sequence[int]) -> RowNumbers:
    """Return the rows of some ranks, ascending, in a table ordered by `rank` (row,)."""
    wanted = np.array(ranks, dtype=rank.dtype)  # another type would convert all rows
    low, high = (np.searchsorted(rank, wanted, side=side) for side in ("left", "right"))
    if len(ranks) and low[-1] - low[0] == (high - low)[:-1].sum():
        return np.arange(low[0], high[-1], dtype=np.int32)
    return rows_of_runs(zip(low.tolist(), high.tolist(), strict=True))


def build_timeline(trace: Trace) -> Timeline:
    """Put all ranks of a trace on one clock and say which spans belong together.

    Raises InputError as `align` and `build_shards`.
    """
    _check_ranks(trace)
    spans = in_order(trace.spans).unify_dictionaries()
    rank = numbers(spans, "rank")
    stays: dict[int, tuple[Stay, ...]] = {}
    here, kept = Here(), []
    for number, block in enumerate(rank_blocks(rank, BLOCK_ROWS)):
        kept.append(here.put(spans[block]))
        starts = group_starts(rank[block])
        for begin, end in pairwise([*starts.tolist(), block.stop - block.start]):
            stays[int(rank[block.start + begin])] = (Stay(number, begin, end),)
    aligned = align(replace(trace, spans=ends_of(spans), stays=stays))
    return build_shards(aligned, kept, here)[0].whole()


def _check_ranks(trace: Trace) -> None:
    rank = narrow(trace.spans, "rank")
    unknown = np.setdiff1d(rank[group_starts(rank)], sorted(trace.headers))
    if len(unknown):
        raise InputError(
            f"run {trace.run_id!r} has spans of rank {unknown[0]}, which has no header; "
            "every rank file must begin with one"
        )


@dataclass(frozen=True)
class Group:
    """Stretches of a rank that belong together, and how many ends they have.

    `busy_until_ns` is when the device had done all work of earlier stretches, None if they had no
    device work.
    """

    stays: tuple[Stay, ...]
    num_ends: int
    busy_until_ns: int | None


def groups_of(
    rank: int, stays: Sequence[Stay], corrected: Callable[[pa.Table], pa.Table]
) -> list[Group]:
    """Divide the stretches of a rank into groups, in the order of time.

    `corrected` puts the times of spans on the common clock.
    """
    extents = [stay.extent for stay in stays if stay.extent is not None]
    first_start_ns, last_start_ns, end_ns, device_end_ns = _on_common_clock(
        rank, extents, corrected
    )
    last_iteration = np.maximum.accumulate([one.last_iteration for one in extents])
    first_iteration = np.array([one.first_iteration for one in extents])
    is_border = first_start_ns[1:] >= np.maximum.accumulate(end_ns)[:-1]
    # Spans that start at the same time might otherwise change places.
    is_border &= first_start_ns[1:] > np.maximum.accumulate(last_start_ns)[:-1]
    is_border &= first_iteration[1:] > last_iteration[:-1]
    borders = (np.flatnonzero(is_border) + 1).tolist()
    return [
        Group(
            tuple(stays[low:high]),
            sum(one.num_ends for one in extents[low:high]),
            max((busy for busy in device_end_ns[:low].tolist() if busy), default=None),
        )
        for low, high in pairwise([0, *borders, len(stays)])
    ]


def _on_common_clock(
    rank: int, extents: Sequence[Extent], corrected: Callable[[pa.Table], pa.Table]
) -> Integers:
    """Return times of stretches on the common clock, (time, stretch): when the first span starts,
    the last span starts, the last span has ended, the device has done its work (0 if it has none).
    """
    spans = [
        span
        for one in extents
        for span in (
            (one.start_ns, 0),
            (one.last_start_ns, 0),
            one.last,
            one.device or (one.start_ns, 0),
        )
    ]
    start_ns, duration_ns = np.array(spans, dtype=np.int64).T
    ranks = np.full(len(spans), rank, dtype=np.int32)
    columns = {"rank": ranks, "start_ns": start_ns.copy(), "duration_ns": duration_ns.copy()}
    table = corrected(pa.table(columns))
    times = (numbers(table, "start_ns") + numbers(table, "duration_ns")).reshape(-1, 4).T.copy()
    times[-1, [one.device is None for one in extents]] = 0
    return times
