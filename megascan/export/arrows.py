"""Draw what waited for what: arrows between spans, and the chain that determines the end.

**Arrows** lead from the span that was waited for to the spans that waited. A collective begins when
its last member arrives, so its arrows lead from the member that started last to each other member;
a receive completes after its send, so the arrow of a message leads from send to receive. Viewers
draw an arrow only forwards in time and bind its ends to the slices that are open at its two times:

    last arriver       |s────────|      s at the start of its slice
    waiting rank |───────f───────|      f at the same time, inside the slice of the waiting rank

Where clock error puts the end of the waiting slice before the last arriver's start, the arrow is
turned round rather than lost.

**The chain** of operations that determines each iteration's end is a track of the whole job:

    critical path    |iteration 7 ···················································|
                     |rank 5: forward, microbatch 0|transfer|rank 1: backward ··|·····|
                          ▲                             ▲
    rank 5, compute  |forward ·····················|    │     arrows come from the spans themselves

Hops of an iteration lie end to end. An iteration's path may begin on one rank before the path of
the iteration before has ended on another rank; it is drawn from that end on, and its arguments tell
its full length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from megascan.arrays import (
    Flags,
    Integers,
    Narrow,
    RowNumbers,
    group_lengths,
    group_numbers,
    group_starts,
    parted,
)
from megascan.header import Json
from megascan.parallel import over_blocks
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Kind
from megascan.timeline import equals, narrow, numbers


@dataclass(frozen=True)
class Arrows:
    """Arrows between rows of the table of ends, each array of shape (arrow,).

    `group` numbers the matched operations from 0; arrows of one operation have one source.
    """

    group: RowNumbers
    source: RowNumbers
    target: RowNumbers

    def within(self, chosen: Flags) -> Arrows:
        """Return the arrows whose both ends are among the chosen rows."""
        kept = chosen[self.source] & chosen[self.target]
        return Arrows(self.group[kept], self.source[kept], self.target[kept])


def find_arrows(spans: pa.Table) -> Arrows:
    """Find the arrows of all matched communication among the ends of a timeline.

    Spans of no length have no arrows, as no time lies inside them. Threads sort blocks of matches,
    so the memory for sorting does not grow with the trace.
    """
    match, start_ns = narrow(spans, "match"), numbers(spans, "start_ns")
    drawn = (match != NOT_APPLICABLE) & (numbers(spans, "duration_ns") > 0)
    drawn &= equals(spans, "kind", *(str(kind) for kind in COMMUNICATION_KINDS))
    p2p, sends = equals(spans, "kind", str(Kind.P2P)), equals(spans, "op", "send")
    drawn_rows = np.flatnonzero(drawn).astype(np.int32)

    def found(block: RowNumbers) -> tuple[Arrows, int]:
        rows = drawn_rows[block]
        rows = rows[np.lexsort((np.where(p2p[rows], sends[rows], start_ns[rows]), match[rows]))]
        first = group_starts(match[rows])
        group = group_numbers(first, len(rows)).astype(np.int32)
        source = rows[(first + group_lengths(first, len(rows)) - 1)[group]]
        is_target = rows != source
        return Arrows(group[is_target], source[is_target], rows[is_target]), len(first)

    return _joined_arrows(list(over_blocks(found, _match_blocks(match[drawn_rows]))))


_BLOCK_ENDS = 1 << 16
"""About how many ends one thread sorts at a time."""


def _match_blocks(match: RowNumbers) -> list[RowNumbers]:
    """Split places into blocks of whole matches, in the order of matches."""
    num_blocks = len(match) // _BLOCK_ENDS + 1
    size = int(match.max(initial=0)) // num_blocks + 1
    return parted((match // size).astype(np.uint16))


def _joined_arrows(parts: Sequence[tuple[Arrows, int]]) -> Arrows:
    """Join the arrows of blocks; each part has its arrows and its number of operations."""
    before = np.cumsum([0, *(num_groups for _, num_groups in parts)], dtype=np.int32)
    found = [arrows for arrows, _ in parts]
    none = np.empty(0, dtype=np.int32)
    return Arrows(
        np.concatenate([none, *(one.group + at for one, at in zip(found, before, strict=False))]),
        np.concatenate([none, *(one.source for one in found)]),
        np.concatenate([none, *(one.target for one in found)]),
    )


@dataclass(frozen=True, kw_only=True)
class BoundArrows:
    """Arrows between slices that are open at both their times; arrays of shape (arrow,).

    Arrow i leaves row `start_row[i]` and reaches row `finish_row[i]`. Arrows with the same `start`,
    a number from 1, leave the same row at the same time. `turned` marks arrows that were turned
    round for clock error: they reach the beginning of a row. As there may be millions of arrows,
    times are computed on demand from `begin_ns` and `duration_ns` (end,).
    """

    start: RowNumbers
    start_row: RowNumbers
    finish_row: RowNumbers
    turned: Flags
    begin_ns: Integers
    duration_ns: Integers

    def start_ns(self, arrows: Narrow) -> Integers:
        """Return the times, ns, at which some arrows leave."""
        row = self.start_row[arrows]
        last_inside = self.begin_ns[row] + self.duration_ns[row] - 1
        return np.where(self.turned[arrows], last_inside, self.begin_ns[row])

    def finish_ns(self, arrows: Narrow) -> Integers:
        """Return the times, ns, at which some arrows arrive, never before they leave."""
        begin_ns = self.begin_ns[self.finish_row[arrows]]
        departure = self.begin_ns[self.start_row[arrows]]
        return np.where(self.turned[arrows], begin_ns, np.maximum(begin_ns, departure))

    def distinct_starts(self) -> RowNumbers:
        """Return one arrow of each start, in the order of the starts' numbers."""
        straight = np.flatnonzero(~self.turned).astype(np.int32)
        first = straight[group_starts(self.start[straight])]
        return np.concatenate([first, np.flatnonzero(self.turned).astype(np.int32)])


def bind(arrows: Arrows, spans: pa.Table) -> BoundArrows:
    """Bind arrows to slices that are open when arrows leave and arrive, never backwards in time.

    `spans` is the table whose rows the arrows name.
    """
    begin_ns, duration_ns = numbers(spans, "start_ns"), numbers(spans, "duration_ns")
    turned = np.empty(len(arrows.group), dtype=np.bool_)
    for low in range(0, len(turned), _BLOCK_ENDS):
        block = slice(low, low + _BLOCK_ENDS)
        target = arrows.target[block]
        last_inside = begin_ns[target] + duration_ns[target] - 1
        turned[block] = np.maximum(begin_ns[arrows.source[block]], begin_ns[target]) > last_inside
    start = arrows.group + np.int32(1)
    num_turned = int(np.count_nonzero(turned))
    first_own = int(arrows.group.max(initial=-1)) + 3
    start[turned] = np.arange(first_own, first_own + num_turned, dtype=np.int32)
    return BoundArrows(
        start=start,
        start_row=np.where(turned, arrows.target, arrows.source),
        finish_row=np.where(turned, arrows.source, arrows.target),
        turned=turned,
        begin_ns=begin_ns,
        duration_ns=duration_ns,
    )


CHAIN_TRACK = "critical path"


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A slice of the chain, on the common clock; `row` is its span in the table, -1 if it has none.

    `rank` is -1 for the slice that spans a whole iteration.
    """

    rank: int
    iteration: int
    start_ns: int
    end_ns: int
    label: str
    row: int = NOT_APPLICABLE
    args: dict[str, Json] = field(default_factory=dict)


def in_order(hops: Sequence[Hop]) -> Iterator[Hop]:
    """Yield hops cut to lie on one track: each ends before the next hop of its level begins.

    `hops` are in the order of iterations; the slice that spans an iteration stands before its hops.
    """
    reached = before = int(np.iinfo(np.int64).min)
    for hop in hops:
        if hop.rank == NOT_APPLICABLE:
            before = reached
            reached = max(reached, hop.end_ns)
        start_ns = max(hop.start_ns, before)
        if start_ns < hop.end_ns:
            yield replace(hop, start_ns=start_ns)


def shown_hops(
    hops: Sequence[Hop],
    iterations: Collection[int] | None,
    ranks: Collection[int],
    chosen: Flags | None,
) -> tuple[Hop, ...]:
    """Return the hops of some ranks and iterations (None: all); rows count `chosen` spans only.

    If several hops of an iteration lie in one span, only the first keeps its row, for one arrow.
    """
    kept = {*ranks, NOT_APPLICABLE}
    renumber = None if chosen is None else np.where(chosen, np.cumsum(chosen) - 1, NOT_APPLICABLE)
    found: list[Hop] = []
    seen = {(0, NOT_APPLICABLE)}
    for hop in in_order(hops):
        if hop.rank not in kept or not (iterations is None or hop.iteration in iterations):
            continue
        row = hop.row if renumber is None or hop.row < 0 else int(renumber[hop.row])
        place = (hop.iteration if row >= 0 else 0, row)
        found.append(replace(hop, row=NOT_APPLICABLE if place in seen else row))
        seen.add(place)
    return tuple(found)
