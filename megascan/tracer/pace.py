"""How the writer's thread works beside training without holding it up.

Python threads take turns: whoever asks for the interpreter while another computes waits up to 5 ms,
and training asks after every kernel that it launches. So the writer computes for a few ten µs at a
time and rests in between; whoever waits gets its turn then. It starts late, too: many trainers
wait for the device at the end of an iteration, and their launches are urgent right after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SLICE_NS = 40_000
REST_S = 100e-6
"""Long enough that a thread that waits has woken up and taken over."""
FIRST_REST_S = 0.02


class Pace:
    """Called between small pieces of work; rests when it is time to, unless in a hurry.

    `hurried` says whether work is piling up: then the writer competes like any other thread.
    """

    def __init__(self, hurried: Callable[[], bool]) -> None:
        self._hurried = hurried
        self._since_ns = 0

    def begin(self) -> None:
        """Let training get going before the work on a window starts."""
        if not self._hurried():
            time.sleep(FIRST_REST_S)
        self._since_ns = time.perf_counter_ns()

    def step(self) -> None:
        """A piece of the work is done."""
        if time.perf_counter_ns() - self._since_ns > SLICE_NS:
            if not self._hurried():
                time.sleep(REST_S)
            self._since_ns = time.perf_counter_ns()
