"""Split communication into wait and transfer, and take it out of the spans around it.

Which member came last is only known where all ranks are seen together (`split_waits`, for the ends
of a trace); self times need one rank only (`decompose`, for a shard).

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

The self time of any other span is its duration less the union of its rank's synchronous
communication inside the span; a bracket around collectives and the collectives in it count once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from aggregate.clocks import Accuracy, Alignment
from aggregate.match import Matches, by_rank
from megascan.arrays import (
    Cover,
    Flags,
    Integers,
    RowNumbers,
    TimeAxis,
    group_lengths,
    group_numbers,
    group_starts,
)
from megascan.parallel import over_blocks
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Track
from megascan.timeline import equals, is_end, narrow, numbers
from megascan.vocabulary import ROOTED_OPS

_ROUNDING_NS = 2.0
"""Two times are rounded to whole ns each."""
_BLOCK_ENDS = 1 << 16
"""About how many members (of whole matches) have their waits split together."""


@dataclass(frozen=True)
class Parts:
    """Derived columns of a span table, (span,) each; times in ns; -1 where they do not apply."""

    match: Integers
    wait_ns: Integers
    transfer_ns: Integers
    self_ns: Integers
    self_cpu_ns: Integers


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
    """Return each span's duration less its wait, (span,) ns; -1 where no wait is claimed."""
    return np.where(wait_ns >= 0, numbers(spans, "duration_ns") - wait_ns, NOT_APPLICABLE)


def decompose(spans: pa.Table, match: RowNumbers, wait_ns: Integers) -> Parts:
    """Return the derived columns of some ranks' spans, ordered by (rank, start).

    `match` and `wait_ns` belong to the ends among the spans.
    """
    rows = np.flatnonzero(is_end(spans))
    wait, matches = np.full((2, spans.num_rows), NOT_APPLICABLE, dtype=np.int64)
    wait[rows], matches[rows] = wait_ns, match
    transfer = transfers(spans, wait)
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
    return Parts(matches, wait, transfer, self_ns, self_cpu_ns)


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
