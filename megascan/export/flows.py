"""Arrows between matched spans: from the one that was waited for to those that waited.

A collective begins when its last member arrives, so its arrows lead from the member that started
last to each of the others; a receive completes after its send, so that arrow leads from send to
receive. Viewers draw an arrow only forwards in time and bind its ends to the slices that are open
at its two times:

    last arriver       |s────────|      s at its own start
    other        |───────f───────|      f at the same time, which is inside the other's slice

Where clock error puts the other's end before the last arriver's start, the arrow is turned round
rather than lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Kind
from megascan.timeline import equals, numbers

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Arrows:
    """Arrows between rows of the span table, each array of shape (arrow,).

    `group` numbers the matched operations from 0; arrows of one operation have one source.
    """

    group: Integers
    source: Integers
    target: Integers

    def within(self, chosen: npt.NDArray[np.bool_]) -> Arrows:
        """Arrows whose both ends are among the chosen rows, by the rows' new numbers."""
        kept = chosen[self.source] & chosen[self.target]
        renumber = np.cumsum(chosen) - 1
        return Arrows(
            group=self.group[kept],
            source=renumber[self.source[kept]],
            target=renumber[self.target[kept]],
        )


def find_arrows(spans: pa.Table) -> Arrows:
    """Arrows of all matched communication of a timeline's span table.

    Spans of no length take part in none: no time lies inside them.
    """
    spans = spans.select(["kind", "op", "match", "start_ns", "duration_ns"])
    match = numbers(spans, "match")
    rows = np.flatnonzero(
        (match != NOT_APPLICABLE)
        & (numbers(spans, "duration_ns") > 0)
        & equals(spans, "kind", *(str(kind) for kind in COMMUNICATION_KINDS))
    )
    taken = spans.take(pa.array(rows))
    p2p = equals(taken, "kind", str(Kind.P2P))
    lateness = np.where(p2p, equals(taken, "op", "send"), numbers(taken, "start_ns"))
    order = np.lexsort((lateness, match[rows]))
    rows, match = rows[order], match[rows][order]
    first = np.flatnonzero(np.diff(match, prepend=match[:1] - 1))
    size = np.diff(first, append=len(match))
    group = np.repeat(np.arange(len(first)), size)
    source = rows[(first + size - 1)[group]] if len(rows) else rows
    is_target = rows != source
    return Arrows(group=group[is_target], source=source[is_target], target=rows[is_target])


@dataclass(frozen=True, kw_only=True)
class BoundArrows:
    """Arrows with their times, every array of shape (arrow,).

    Arrow i leaves row `start_row[i]` at `start_ns[i]` and reaches row `finish_row[i]` at
    `finish_ns[i]`. Arrows of one `start` share their start's row and time; starts are numbered
    from 1. `turned` marks those that clock error turned round: they reach the beginning of a row.
    """

    start: Integers
    start_row: Integers
    start_ns: Integers
    finish_row: Integers
    finish_ns: Integers
    turned: npt.NDArray[np.bool_]

    def distinct_starts(self) -> Integers:
        """An arrow of each start, in the order of their numbers."""
        return np.unique(self.start, return_index=True)[1]


def bind(arrows: Arrows, spans: pa.Table) -> BoundArrows:
    """Times at which the arrows leave and reach slices that are open then, never backwards.

    `spans` is the table whose rows the arrows speak of.
    """
    start_ns, duration_ns = numbers(spans, "start_ns"), numbers(spans, "duration_ns")
    departure = start_ns[arrows.source]
    arrival = np.maximum(departure, start_ns[arrows.target])
    last_inside = start_ns[arrows.target] + duration_ns[arrows.target] - 1
    turned = arrival > last_inside
    own_start = int(arrows.group.max(initial=-1)) + 1 + np.cumsum(turned)
    return BoundArrows(
        start=1 + np.where(turned, own_start, arrows.group),
        start_row=np.where(turned, arrows.target, arrows.source),
        start_ns=np.where(turned, last_inside, departure),
        finish_row=np.where(turned, arrows.source, arrows.target),
        finish_ns=np.where(turned, departure, arrival),
        turned=turned,
    )
