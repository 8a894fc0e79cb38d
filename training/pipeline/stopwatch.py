"""How long this rank's own work takes, on the CPU by its clock, on a GPU by events."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

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
        """How long to wait for an input, after the forwards since the last call; None without."""
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
