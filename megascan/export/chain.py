"""Draw the chain of operations that determines each iteration's end, as a track of the whole job.

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

from megascan.arrays import Flags
from megascan.header import Json
from megascan.schema import NOT_APPLICABLE

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
