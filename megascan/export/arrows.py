"""Draw what waited for what: arrows between spans, and the chain that determines the end.

**Arrows** lead from the span that was waited for to those that waited. A collective begins when its
last member arrives, so its arrows lead from the member that started last to each of the others; a
receive completes after its send, so that arrow leads from send to receive. Viewers draw an arrow
only forwards in time and bind its ends to the slices that are open at its two times:

    last arriver       |s────────|      s at its own start
    other        |───────f───────|      f at the same time, which is inside the other's slice

Where clock error puts the other's end before the last arriver's start, the arrow is turned round
rather than lost.

**The chain** of operations that determines each iteration's end is a track of the whole job:

    critical path    |iteration 7 ···················································|
                     |rank 5: forward, microbatch 0|transfer|rank 1: backward ··|·····|
                          ▲                             ▲
    rank 5, compute  |forward ·····················|    │     arrows come from the spans themselves

Hops of an iteration lie end to end. An iteration's path may begin on one rank before the one
before has ended on another; it is drawn from that end on, and its arguments tell its length.
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

    Spans of no length take part in none: no time lies inside them. Some matches are looked at at a
    time, by threads: what sorting takes beside the ends does not grow with the trace.
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
"""Ends that are sorted at a time, about: one thread's work among others."""


def _match_blocks(match: RowNumbers) -> list[RowNumbers]:
    """Return places of whole matches, in the order of matches, for some of these at a time."""
    num_blocks = len(match) // _BLOCK_ENDS + 1
    size = int(match.max(initial=0)) // num_blocks + 1
    return parted((match // size).astype(np.uint16))


def _joined_arrows(parts: Sequence[tuple[Arrows, int]]) -> Arrows:
    """Put arrows of blocks together, of which each has its number of operations."""
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

    Arrow i leaves row `start_row[i]` and reaches row `finish_row[i]`. Arrows of one `start` share
    their start's row and time; starts are numbered from 1. `turned` marks those that clock error
    turned round: they reach the beginning of a row. Of millions of arrows, the times are those of
    the ends, `begin_ns` and `duration_ns` (end,), until they are asked for.
    """

    start: RowNumbers
    start_row: RowNumbers
    finish_row: RowNumbers
    turned: Flags
    begin_ns: Integers
    duration_ns: Integers

    def start_ns(self, arrows: Narrow) -> Integers:
        """Return when some arrows leave."""
        row = self.start_row[arrows]
        last_inside = self.begin_ns[row] + self.duration_ns[row] - 1
        return np.where(self.turned[arrows], last_inside, self.begin_ns[row])

    def finish_ns(self, arrows: Narrow) -> Integers:
        """Return when some arrows arrive, never before they leave."""
        begin_ns = self.begin_ns[self.finish_row[arrows]]
        departure = self.begin_ns[self.start_row[arrows]]
        return np.where(self.turned[arrows], begin_ns, np.maximum(begin_ns, departure))

    def distinct_starts(self) -> RowNumbers:
        """Return an arrow of each start, in the order of their numbers."""
        straight = np.flatnonzero(~self.turned).astype(np.int32)
        first = straight[group_starts(self.start[straight])]
        return np.concatenate([first, np.flatnonzero(self.turned).astype(np.int32)])


def bind(arrows: Arrows, spans: pa.Table) -> BoundArrows:
    """Set the slices that arrows leave and reach while these are open, never backwards in time.

    `spans` is the table whose rows the arrows speak of.
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
    """A slice of the chain, on the common clock. `row` is its span in the table, -1 for none.

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
    """Yield hops that can lie on one track: each is over before the next of its level begins.

    `hops` are those of an iteration after the slice that spans it, iterations in order.
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
    """Return the hops of these ranks and iterations (None: all), by the rows of `chosen` spans.

    Only the first hop of an iteration in a span keeps its row: one arrow leads there.
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
