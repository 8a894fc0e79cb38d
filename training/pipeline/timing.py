"""How long this rank's own work takes, and when it has stood still for too long.

Work is timed on the CPU by its clock, on a GPU by events.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from training.pipeline.guided import Patience, patience_for
from training.pipeline.plan import Action, ActionKind


class Stopwatch:
    """Times the work of this rank; waiting for messages is left out because it is not enclosed.

    On a GPU pairs of events are read when the step is over.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._busy_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Surround work."""
        if self._on_gpu:
            begin = recorded_event()
            yield
            self._events.append((begin, recorded_event()))
        else:
            began_s = time.perf_counter()
            yield
            self._busy_s += time.perf_counter() - began_s

    def read_s(self) -> float:
        """Return the seconds since the last call; waits for the work that was timed."""
        busy_s, self._busy_s = self._busy_s, 0.0
        for begin, end in self._events:
            end.synchronize()
            busy_s += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return busy_s


def recorded_event() -> torch.cuda.Event:
    """Return an event that lies where the current stream is now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class ActionClock:
    """How long forwards take; on a GPU also keeps the host from choosing far ahead of it."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._forwards_s: list[float] = []
        self._events: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = deque()

    def patience(self) -> Patience | None:
        """Return how long to wait for an input, by the forwards since the last call; None if there
        were none.
        """
        if not self._forwards_s:
            return None
        forward_s = statistics.median(self._forwards_s)
        self._forwards_s.clear()
        return patience_for(forward_s)

    def catch_up(self) -> None:
        """Wait until at most one action is left for the GPU to do."""
        while len(self._events) > 1:
            action, begin, end = self._events.popleft()
            end.synchronize()
            self._add(action, begin.elapsed_time(end) / 1e3)

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Surround an action."""
        if self._on_gpu:
            begin = recorded_event()
            yield
            self._events.append((action, begin, recorded_event()))
        else:
            began_s = time.perf_counter()
            yield
            self._add(action, time.perf_counter() - began_s)

    def _add(self, action: Action, seconds: float) -> None:
        if action.kind is ActionKind.FORWARD:
            self._forwards_s.append(seconds)


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
        """Note that an action begins."""
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
