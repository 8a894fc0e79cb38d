"""Clocks that begin again at every iteration: one offset a rank and iteration.

The original MegaScan zeroes each rank's time at the begin of each step, so that no single offset
can be right for a rank: behind the barrier before a step, ranks begin within some spread, anew
each time. A restarted clock is a new clock. Each (rank, iteration) gets an offset of its own from
what is matched in that iteration, by the same robust fit, under the same causality, as all clocks:

                 as read (steps laid end to end)         after
    rank 0   |step 1 ......|step 2 ......|          |step 1 ......|step 2 ......|
    rank 1   |step 1 ......|step 2 ......|           |step 1 ......|   |step 2 ......|

What is lost is lost: how long after step 1 step 2 began is what the files' pauses say, the same
for all ranks; drift within a step is not estimated. An iteration in which a rank has nothing
matched stays as it was read, and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from aggregate.anchors import Members, Messages, matched_messages
from aggregate.fitting import fit_clocks, relative_lines
from aggregate.keys import BoolArray, FloatArray, IntArray
from aggregate.match import Matches
from aggregate.ties import components, references, tied
from megascan.header import RESTARTING_CLOCK, RankHeader
from megascan.timeline import numbers


@dataclass(frozen=True)
class Restarts:
    """Shifts of restarted clocks; shift_ns (span,) is to be added to the starts of a table."""

    shift_ns: IntArray
    notes: tuple[str, ...]


def restarts(
    spans: pa.Table, matches: Matches, headers: Mapping[int, RankHeader]
) -> Restarts | None:
    """What puts the ranks of each iteration together; None unless all clocks restart."""
    if not all(header.clock.source == RESTARTING_CLOCK for header in headers.values()):
        return None
    ranks = np.array(sorted(headers), dtype=np.int64)
    rank = np.searchsorted(ranks, numbers(spans, "rank"))
    iterations, iteration = np.unique(numbers(spans, "iteration"), return_inverse=True)
    members, messages = Members.of(spans, matches, ranks), matched_messages(spans, matches, ranks)

    def clock(rank: IntArray, iteration: IntArray) -> IntArray:
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
        np.rint(shift).astype(np.int64)[iteration * len(ranks) + rank],
        (_note(shift[linked], int(np.count_nonzero(used & ~linked))),),
    )


def _shifts(members: Members, messages: Messages, num_clocks: int) -> tuple[FloatArray, BoolArray]:
    """(clock,) what to add to its times, and whether anything ties it to another clock."""
    clocks = np.arange(num_clocks)
    ties = tied(members, messages, clocks)
    component = components(ties.anchors, clocks, num_clocks)
    lines = fit_clocks(ties, with_drift=False)
    shift, _ = relative_lines(lines, references(clocks, component), component)
    linked = np.bincount(component)[component] > 1
    return np.where(linked, shift, 0.0), linked


def _note(shift_ns: FloatArray, num_alone: int) -> str:
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
