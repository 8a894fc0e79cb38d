"""Whether asynchronous messages hold up the device all the same.

With a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron needs it for tensor
parallelism) kernels run in the order of their launch. A message that waits for its partner then
keeps the next pass from starting, though nothing in the program makes the pass wait:

    forward ──┤░░░ recv_backward ░░░├── forward          the gap is not the host's, it is waiting

Such messages are told by when they end: nothing begins before, and the next pass begins at once.
"""

from __future__ import annotations

import numpy as np

from detect.whatif.graph import Bools
from detect.whatif.marks import BEGIN, COMMUNICATION, Marks

LEAST_NS = 200_000
"""Shorter messages hardly wait and tell nothing."""
LEAST_SHARE_BEFORE = 0.95
"""Of their time lies before the next pass begins."""
MOST_IDLE_AFTER = 0.2
"""Idle time between their end and the next begin, over their own time."""


def messages_hold_up(marks: Marks, messages: Bools) -> bool:
    """Judge the asynchronous `messages` (row of the table,) of a whole job.

    False where none of them waits: then it makes no difference.
    """
    begins = np.flatnonzero(marks.edge == BEGIN)
    length = marks.end_ns - marks.time_ns
    chosen = (marks.edge == COMMUNICATION) & messages[marks.row] & (length >= LEAST_NS)
    waiting = np.flatnonzero(chosen)
    place = np.searchsorted(begins, waiting, side="right")
    waiting, place = waiting[place < len(begins)], place[place < len(begins)]
    following = begins[place]
    same = marks.segment[following] == marks.segment[waiting]
    waiting, following = waiting[same], following[same]
    if not len(waiting):
        return False
    total = float(length[waiting].sum())
    gap = marks.time_ns[following] - marks.end_ns[waiting]
    beside = float(np.minimum(np.maximum(-gap, 0), length[waiting]).sum())
    idle = float(np.maximum(gap, 0).sum())
    return beside <= (1 - LEAST_SHARE_BEFORE) * total and idle <= MOST_IDLE_AFTER * total
