"""Find where the spans of a rank may be divided: between stretches that nothing reaches across.

    stretch 1  |w1 ······|w2 ·······|                     nothing of w2 is under way when w3 begins
    stretch 2                         |w3 ······|w4 ········|
    stretch 3                                            |w5 ······|      w4 is: these stay together

What is derived from a rank's spans (their order, self times, shares of an iteration, tracks) then
needs one side of a border only. One thing reaches further: the device may have had nothing to do
since before the border, which `Group.busy_until_ns` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from megascan.arrays import Integers
from megascan.timeline import Extent, Stay, numbers


@dataclass(frozen=True)
class Group:
    """Stretches of a rank that belong together, and how many ends they have.

    `busy_until_ns` is when the device had done what was launched before them, None if nothing was.
    """

    stays: tuple[Stay, ...]
    num_ends: int
    busy_until_ns: int | None


def groups_of(
    rank: int, stays: Sequence[Stay], corrected: Callable[[pa.Table], pa.Table]
) -> list[Group]:
    """Divide the stretches of a rank, in the order of time; `corrected` sets times on the common
    clock.
    """
    extents = [stay.extent for stay in stays if stay.extent is not None]
    first_ns, last_ns, end_ns, busy_until_ns = _on_common_clock(rank, extents, corrected)
    last_iteration = np.maximum.accumulate([one.last_iteration for one in extents])
    first_iteration = np.array([one.first_iteration for one in extents])
    is_border = first_ns[1:] >= np.maximum.accumulate(end_ns)[:-1]
    is_border &= (
        first_ns[1:] > np.maximum.accumulate(last_ns)[:-1]
    )  # which else might change places
    is_border &= first_iteration[1:] > last_iteration[:-1]
    borders = (np.flatnonzero(is_border) + 1).tolist()
    return [
        Group(
            tuple(stays[low:high]),
            sum(one.num_ends for one in extents[low:high]),
            max((busy for busy in busy_until_ns[:low] if busy), default=None),
        )
        for low, high in pairwise([0, *borders, len(stays)])
    ]


def _on_common_clock(
    rank: int, extents: Sequence[Extent], corrected: Callable[[pa.Table], pa.Table]
) -> tuple[Integers, Integers, Integers, list[int]]:
    """Return when the first and the last span of each stretch start, when it ends, and when its
    device has done its work, 0 if it had none.
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
    end_ns = (numbers(table, "start_ns") + numbers(table, "duration_ns")).reshape(-1, 4)
    works = np.array([one.device is not None for one in extents])
    first_ns, last_start_ns, last_ns, device_ns = end_ns.T
    return first_ns, last_start_ns, last_ns, np.where(works, device_ns, 0).tolist()
