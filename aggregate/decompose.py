"""Split communication into wait and transfer, and take it out of the spans around it.

    own start          last member's start          end
        ├──── wait ────────────┼───── transfer ──────┤

wait = last member's start − own start, never negative, never beyond the span; transfer = the rest.
For a message the other side is the only other member: a receive waits until the send started, a
send until the receive was posted. Where the last start lies on another clock and no further off
than the error bar of the two clocks, no wait is claimed and all of the span is transfer; where
nothing links the two clocks, or the end is only a bound, neither is claimed (-1).

Nobody waits for a member that comes after he has left:

    send       ├──────┤                     buffered: it has not waited for the receive at all
    receive                 ├──────────┤
    broadcast  ├──────────┤    ╷            the last member that came before the end counts,
    broadcast      ├──────┤    ╷            although only the root can be waited for
    broadcast                  ├───┤
    all_reduce ├──────┤                     impossible: nobody leaves before the last has come, so
    all_reduce              ├──────────┤    the match is wrong; neither is claimed

A collective or a receive that ends before its last member starts, by no more than the error bar,
has waited all of its time.

The self time of any other span is its duration minus the union of the synchronous communication
of its rank inside it; a bracket around collectives and the collectives in it count once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa

from aggregate.clocks import Alignment
from megascan.arrays import Cover, Flags, Integers, TimeAxis, rank_blocks
from megascan.parallel import across_threads
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Track
from megascan.timeline import equals, numbers
from megascan.vocabulary import ROOTED_OPS

BLOCK_ROWS = 1 << 16
"""Spans worked on at a time, in whole ranks."""
_ROUNDING_NS = 2.0
"""Two times are rounded to whole ns each."""


@dataclass(frozen=True)
class Parts:
    """Derived columns of a span table, (span,) each, ns; -1 where they do not apply."""

    wait_ns: Integers
    transfer_ns: Integers
    self_ns: Integers
    self_cpu_ns: Integers


def decompose(spans: pa.Table, match: Integers, clocks: Alignment) -> Parts:
    """Split every span of a table whose times are on the common clock, ordered by (rank, start).

    match (span,) as `aggregate.match` gives it. Works on some ranks at a time, so that what it
    needs next to its result does not grow with the table.
    """
    blocks = rank_blocks(numbers(spans, "rank"), BLOCK_ROWS)
    last = _LastMembers.of(spans, match, clocks, blocks)
    whole = Parts(*(np.empty(spans.num_rows, dtype=np.int64) for _ in fields(Parts)))

    def split(rows: slice) -> None:
        part = _decompose_block(spans[rows], match[rows], clocks, last)
        for field in fields(Parts):
            getattr(whole, field.name)[rows] = getattr(part, field.name)

    for _ in across_threads(split, blocks):
        pass
    return whole


@dataclass(frozen=True)
class _LastMembers:
    """Of each match: when its last member starts, and where that rank stands in `clocks.ranks`.

    `comparable` is false where nothing links the clocks of two members. `rooted` are all members of
    operations with a root, which some leave before others come.
    """

    start_ns: Integers
    position: Integers
    comparable: Flags
    rooted: _Arrivals

    @classmethod
    def of(
        cls, spans: pa.Table, match: Integers, clocks: Alignment, blocks: list[slice]
    ) -> _LastMembers:
        num_matches = int(match.max(initial=-1)) + 1
        start_ns = np.full(num_matches, np.iinfo(np.int64).min)
        position = np.zeros(num_matches, dtype=np.int64)
        comparable = np.ones(num_matches, dtype=np.bool_)
        for block in blocks:
            own, own_start, own_position = _matched(spans[block], match[block], clocks)
            later = own_start > start_ns[own]
            np.maximum.at(start_ns, own[later], own_start[later])
            holds = own_start == start_ns[own]
            position[own[holds]] = own_position[holds]
        for block in blocks:
            own, _, own_position = _matched(spans[block], match[block], clocks)
            error = clocks.error_between(own_position, position[own])
            comparable[own[np.isinf(error)]] = False
        return cls(start_ns, position, comparable, _Arrivals.of(spans, match, clocks))


@dataclass(frozen=True)
class _Arrivals:
    """Who started when in the operations with a root; all (member,), ordered by match and start."""

    match: Integers
    start_ns: Integers
    position: Integers

    @classmethod
    def of(cls, spans: pa.Table, match: Integers, clocks: Alignment) -> _Arrivals:
        rows = np.flatnonzero(equals(spans, "op", *ROOTED_OPS) & (match >= 0))
        of_match, start_ns, position = _matched(spans.take(pa.array(rows)), match[rows], clocks)
        order = np.lexsort((start_ns, of_match))
        return cls(of_match[order], start_ns[order], position[order])

    def last_before(self, match: Integers, end_ns: Integers) -> tuple[Integers, Integers]:
        """Return (start, position) of the last member of each match that started by a time.

        At least one has: whose end is asked for.
        """
        low = np.searchsorted(self.match, match)
        high = np.searchsorted(self.match, match, side="right")
        while (low + 1 < high).any():  # all of them halve their members together
            middle = (low + high) // 2
            came = self.start_ns[middle] <= end_ns
            low, high = np.where(came, middle, low), np.where(came, high, middle)
        return self.start_ns[low], self.position[low]


def _matched(
    spans: pa.Table, match: Integers, clocks: Alignment
) -> tuple[Integers, Integers, Integers]:
    """Return (match, start_ns, position of the rank) of the matched spans."""
    rows = np.flatnonzero(match >= 0)
    position = np.searchsorted(clocks.ranks, numbers(spans, "rank")[rows])
    return match[rows], numbers(spans, "start_ns")[rows], position.astype(np.int64)


def _decompose_block(
    spans: pa.Table, match: Integers, clocks: Alignment, last: _LastMembers
) -> Parts:
    wait, transfer = _split_waits(spans, match, clocks, last)
    communication = equals(spans, "kind", *COMMUNICATION_KINDS)
    inside = communication & (numbers(spans, "track") != Track.OVERLAPPED)
    self_ns, self_cpu_ns = self_times(
        numbers(spans, "rank"),
        numbers(spans, "start_ns"),
        numbers(spans, "duration_ns"),
        numbers(spans, "cpu_ns"),
        inside,
    )
    self_ns[communication] = NOT_APPLICABLE
    self_cpu_ns[communication] = NOT_APPLICABLE
    return Parts(wait_ns=wait, transfer_ns=transfer, self_ns=self_ns, self_cpu_ns=self_cpu_ns)


def _split_waits(
    spans: pa.Table, match: Integers, clocks: Alignment, last: _LastMembers
) -> tuple[Integers, Integers]:
    """Return (wait_ns, transfer_ns) of each span."""
    wait = np.full(len(match), NOT_APPLICABLE, dtype=np.int64)
    transfer = wait.copy()
    rows = np.flatnonzero(match >= 0)
    own, start, position = _matched(spans, match, clocks)
    duration = numbers(spans, "duration_ns")[rows]
    awaited_ns, awaited = last.start_ns[own], last.position[own]
    rooted = np.flatnonzero(equals(spans, "op", *ROOTED_OPS)[rows])
    if len(rooted):
        ends = start[rooted] + duration[rooted]
        awaited_ns[rooted], awaited[rooted] = last.rooted.last_before(own[rooted], ends)
    lag, error = awaited_ns - start, clocks.error_between(position, awaited)
    missed = lag > duration + np.maximum(error, _ROUNDING_NS)
    sends = equals(spans, "op", "send")[rows]
    claimed_ns = np.where((lag > error) & ~(sends & missed), np.minimum(lag, duration), 0)
    known = last.comparable[own] & (numbers(spans, "end_is_bound")[rows] != 1)
    known &= sends | ~missed
    wait[rows] = np.where(known, claimed_ns, NOT_APPLICABLE)
    transfer[rows] = np.where(known, duration - claimed_ns, NOT_APPLICABLE)
    return wait, transfer


def self_times(
    rank: Integers,
    start_ns: Integers,
    duration_ns: Integers,
    cpu_ns: Integers,
    inside: Flags,
) -> tuple[Integers, Integers]:
    """Return (self_ns, self_cpu_ns) of each span of a table ordered by (rank, start).

    `inside` marks the spans to be taken out. CPU time of a span is taken to be spread evenly.
    """
    axis = TimeAxis.of(rank, start_ns, start_ns + duration_ns)
    start = axis.place(rank, start_ns)
    end = start + duration_ns
    cover = Cover.of(start[inside], end[inside], np.maximum(cpu_ns[inside], 0).astype(np.float64))
    self_ns = duration_ns - cover.length_within(start, end)
    cpu_inside = np.rint(cover.amount_within(start, end)).astype(np.int64)
    self_cpu = np.where(cpu_ns >= 0, np.maximum(cpu_ns - cpu_inside, 0), NOT_APPLICABLE)
    return self_ns, self_cpu
