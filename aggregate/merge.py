"""Build a timeline from a trace: match, put on one clock, split waits from transfers.

    shards    spans as read ─ ends ╮                                  ╭─ one clock, self times ─ …
    centre                         ╰─ match ─ restarts ─ align ─ waits ╯

Matching and alignment need all ranks at once, but few of their spans and columns: the ends
(`megascan.timeline.ends_of`). Everything else needs one rank only, and is done where the rank's
spans stay (`settle`). The centre sends a correction of the clocks there, and match and wait of each
end. A trace that this process holds as a whole goes the same way, in shards of some ranks.

**Restarts.** The original MegaScan zeroes each rank's time at the begin of each step, so that no
single offset can be right for a rank: after the barrier before a step, ranks begin within some
spread that differs from step to step. A restarted clock is a new clock. Each (rank, iteration) gets
an offset of its own from what is matched in that iteration, by the robust fit and under the
causality that hold for all clocks:

                 as read (steps laid end to end)         after
    rank 0   |step 1 ......|step 2 ......|          |step 1 ......|step 2 ......|
    rank 1   |step 1 ......|step 2 ......|           |step 1 ......|   |step 2 ......|

How long after step 1 step 2 began is lost: it is what the files' pauses say, the same for all
ranks. Drift within a step is not estimated. An iteration in which a rank has nothing matched stays
as it was read, and is counted.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aggregate.anchors import Members, Messages, joining_members, matched_messages
from aggregate.causality import components, references, tied
from aggregate.clocks import (
    Alignment,
    ClockLines,
    align_clocks,
    fit_clocks,
    relative_lines,
    without_steps,
)
from aggregate.decompose import decompose, split_waits, transfers
from aggregate.match import Matches, match_spans
from aggregate.summary import Sums, ranks_on_cpu, sums_of
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    Narrow,
    RowNumbers,
    group_starts,
    rank_blocks,
    rows_of_runs,
)
from megascan.errors import InputError
from megascan.header import RESTARTING_CLOCK, RankHeader
from megascan.parallel import Here, Kept, Workers, over_blocks
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
    give_back_memory,
    in_order,
    integer_column,
    narrow,
    numbers,
    row_order,
    shifted,
    with_column,
    without,
)

if TYPE_CHECKING:
    from aggregate.jumps import ClockStep

BLOCK_ROWS = 1 << 16
"""About how many spans a shard has, in whole ranks, if this process holds the whole trace."""


@dataclass(frozen=True)
class Restarts:
    """Shifts of restarted clocks: shift_ns (iteration, rank) is to be added to starts.

    `iterations` and `ranks`, both ascending, name the rows and columns of shift_ns.
    """

    iterations: Integers
    ranks: Integers
    shift_ns: Integers
    notes: tuple[str, ...] = ()

    def of(self, rank: Integers, iteration: Integers) -> Integers:
        """Return (span,) what to add to starts; 0 in iterations in which no rank has an end."""
        if not len(self.iterations):
            return np.zeros(len(rank), dtype=np.int64)
        place = np.minimum(np.searchsorted(self.iterations, iteration), len(self.iterations) - 1)
        shift = self.shift_ns[place, np.searchsorted(self.ranks, rank)]
        return np.where(self.iterations[place] == iteration, shift, 0)

    def only(self, chosen: Integers) -> Restarts:
        """Return the shifts of some ranks, given by their places in `ranks`."""
        return Restarts(self.iterations, self.ranks[chosen], self.shift_ns[:, chosen])


def restarts(
    spans: pa.Table, matches: Matches, headers: Mapping[int, RankHeader]
) -> Restarts | None:
    """Return the shifts that align the ranks in each iteration; None unless all clocks restart."""
    if not all(header.clock.source == RESTARTING_CLOCK for header in headers.values()):
        return None
    ranks = np.array(sorted(headers), dtype=np.int64)
    rank = np.searchsorted(ranks, numbers(spans, "rank"))
    iterations, iteration = np.unique(numbers(spans, "iteration"), return_inverse=True)
    members = Members.of(spans, matches.match, joining_members(spans, matches), ranks)
    messages = matched_messages(spans, matches, ranks, np.arange(len(ranks)))

    def clock(rank: Integers, iteration: Integers) -> Integers:
        return np.searchsorted(iterations, iteration) * len(ranks) + rank

    shift, linked = _shifts(
        replace(members, rank=clock(members.rank, members.iteration)),
        replace(
            messages,
            source=clock(messages.source, messages.iteration),
            destination=clock(messages.destination, messages.iteration),
        ),
        len(iterations) * len(ranks),
    )
    used = np.bincount(iteration * len(ranks) + rank, minlength=len(shift)) > 0
    return Restarts(
        iterations,
        ranks,
        np.rint(shift).astype(np.int64).reshape(len(iterations), len(ranks)),
        (_note(shift[linked], int(np.count_nonzero(used & ~linked))),),
    )


def _shifts(members: Members, messages: Messages, num_clocks: int) -> tuple[Floats, Flags]:
    """Return (clock,) shift to add to a clock's times, and whether other clocks are tied to it."""
    clocks = np.arange(num_clocks)
    ties = tied(members, messages, clocks)
    component = components(ties.anchors, clocks, num_clocks)
    lines = fit_clocks(ties, with_drift=False)
    shift, _ = relative_lines(lines, references(clocks, component)[component])
    linked = np.bincount(component)[component] > 1
    return np.where(linked, shift, 0.0), linked


def _note(shift_ns: Floats, num_alone: int) -> str:
    if not len(shift_ns):
        return (
            "clocks begin again at every iteration and nothing matched ties them: ranks are "
            "comparable up to the spread of their step begins only"
        )
    alone = f"; {num_alone} of a rank have nothing matched and stay as they were" * bool(num_alone)
    return (
        "clocks begin again at every iteration and were set anew in each, by up to "
        f"{np.abs(shift_ns).max() / 1e3:.1f} µs (median {np.median(np.abs(shift_ns)) / 1e3:.1f} µs)"
        f"{alone}; the time between iterations is not known better than the files' pauses say"
    )


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
    restarted = restarts(ends, matches, trace.headers)
    own = ends
    if restarted:
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
    notes = matches.notes + (restarted.notes if restarted else ()) + clocks.notes
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
    for name, values in vars(decompose(spans, sent.match, sent.wait_ns)).items():
        spans = spans.append_column(name, integer_column(values))
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
