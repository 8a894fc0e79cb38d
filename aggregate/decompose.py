"""Split communication into wait and transfer, and take it out of the spans around it.

Who was last is known where all ranks are seen together (`split_waits`, of the ends of a trace);
self times need one rank only (`decompose`, of a shard).

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

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from aggregate.clocks import Alignment
from megascan.arrays import (
    Cover,
    Flags,
    Integers,
    TimeAxis,
    group_lengths,
    group_numbers,
    group_starts,
)
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Track
from megascan.timeline import equals, is_end, numbers
from megascan.vocabulary import ROOTED_OPS

_ROUNDING_NS = 2.0
"""Two times are rounded to whole ns each."""


@dataclass(frozen=True)
class Parts:
    """Derived columns of a span table, (span,) each, ns; -1 where they do not apply."""

    match: Integers
    wait_ns: Integers
    transfer_ns: Integers
    self_ns: Integers
    self_cpu_ns: Integers


@dataclass(frozen=True)
class _Members:
    """Matched ends in the order of (match, start): those of a match stand together.

    `group` numbers the matches that occur, (member,); `last` is the place of the last member of
    each, (match,), the other arrays are (member,).
    """

    row: Integers
    group: Integers
    first: Integers
    last: Integers
    start_ns: Integers
    end_ns: Integers
    position: Integers

    @classmethod
    def of(cls, ends: pa.Table, match: Integers, clocks: Alignment) -> _Members:
        row = np.flatnonzero(match >= 0)
        start_ns = numbers(ends, "start_ns")
        row = row[np.lexsort((start_ns[row], match[row]))]
        first = group_starts(match[row])
        length = group_lengths(first, len(row))
        start_ns = start_ns[row]
        return cls(
            row=row,
            group=group_numbers(first, len(row)),
            first=first,
            last=first + length - 1,
            start_ns=start_ns,
            end_ns=start_ns + numbers(ends, "duration_ns")[row],
            position=np.searchsorted(clocks.ranks, numbers(ends, "rank")[row]).astype(np.int64),
        )

    def last_before_end(self, chosen: Integers) -> Integers:
        """Return the place of the last member that started by the end of each chosen one.

        At least one has: whose end it is.
        """
        low, high = self.first[self.group[chosen]], self.last[self.group[chosen]] + 1
        end_ns = self.end_ns[chosen]
        while (low + 1 < high).any():  # all of them halve their members together
            middle = (low + high) // 2
            came = self.start_ns[middle] <= end_ns
            low, high = np.where(came, middle, low), np.where(came, high, middle)
        return low


def split_waits(ends: pa.Table, match: Integers, clocks: Alignment) -> Integers:
    """Return (end,) wait_ns of the ends of all ranks on the common clock; -1 where none is claimed.

    What is claimed splits the span: the rest is transfer.
    """
    wait = np.full(len(match), NOT_APPLICABLE, dtype=np.int64)
    members = _Members.of(ends, match, clocks)
    awaited = members.last[members.group]
    error = clocks.error_between(members.position, members.position[awaited])
    comparable = np.ones(len(members.first), dtype=np.bool_)
    comparable[members.group[np.isinf(error)]] = False
    rooted = np.flatnonzero(equals(ends, "op", *ROOTED_OPS)[members.row])
    if len(rooted):
        awaited[rooted] = members.last_before_end(rooted)
        error[rooted] = clocks.error_between(
            members.position[rooted], members.position[awaited[rooted]]
        )
    duration = members.end_ns - members.start_ns
    lag = members.start_ns[awaited] - members.start_ns
    missed = lag > duration + np.maximum(error, _ROUNDING_NS)
    sends = equals(ends, "op", "send")[members.row]
    claimed_ns = np.where((lag > error) & ~(sends & missed), np.minimum(lag, duration), 0)
    known = comparable[members.group] & (numbers(ends, "end_is_bound")[members.row] != 1)
    known &= sends | ~missed
    wait[members.row] = np.where(known, claimed_ns, NOT_APPLICABLE)
    return wait


def transfers(spans: pa.Table, wait_ns: Integers) -> Integers:
    """Return what of each span is no waiting, (span,) ns; -1 where no wait is claimed."""
    return np.where(wait_ns >= 0, numbers(spans, "duration_ns") - wait_ns, NOT_APPLICABLE)


def decompose(spans: pa.Table, match: Integers, wait_ns: Integers) -> Parts:
    """Return the derived columns of some ranks' spans, ordered by (rank, start).

    `match` and `wait_ns` are those of the ends among them.
    """
    rows = np.flatnonzero(is_end(spans))
    wait, matches = np.full((2, spans.num_rows), NOT_APPLICABLE, dtype=np.int64)
    wait[rows], matches[rows] = wait_ns, match
    transfer = transfers(spans, wait)
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
    return Parts(matches, wait, transfer, self_ns, self_cpu_ns)


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
