"""What a rank waits for, said when a step stands still."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

STALL_S = 60.0
"""Without an action for so long a rank says where it stands. Actions take milliseconds to seconds;
the process groups' own timeout, after which the job ends, is 10 minutes by default."""


class Watchdog:
    """Says once a step where this rank stands when no action has begun for long.

    A context around a step; `beat` is called with every action. `describe` says what the rank
    does next, which inputs it has, and what it holds.
    """

    def __init__(self, rank: int, describe: Callable[[], str], *, stall_s: float = STALL_S) -> None:
        self._rank = rank
        self._describe = describe
        self._stall_s = stall_s
        self._last_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="pipeline-watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()

    def beat(self) -> None:
        """An action begins."""
        self._last_s = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(self._stall_s / 4):
            silent_s = time.monotonic() - self._last_s
            if silent_s > self._stall_s:
                print(
                    f"rank {self._rank} has waited for {silent_s:.0f} s: {self._describe()}",
                    file=sys.stderr,
                    flush=True,
                )
                return
