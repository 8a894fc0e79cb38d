"""A rank on which Python's garbage collector has much to look through, in every iteration."""

from __future__ import annotations

import gc
import time

from training.faults.spec import FaultSpec

_FIRST_NUM_OBJECTS = 20_000
_MOST_OBJECTS = 20_000_000
_LEAST_ITERATION_S = 0.05


class GarbagePressure:
    """Keeps a large graph of objects and collects garbage at the begin of each iteration.

    The graph grows until a collection takes as long as was asked: ``delay`` milliseconds, or
    ``factor - 1`` times the iteration without it. The collections are real ones, so that whoever
    listens to Python's collector sees them.
    """

    def __init__(self, fault: FaultSpec) -> None:
        self._fault = fault
        self._graph: list[list[None]] = []
        self._begun_s: float | None = None
        self._iteration_s = _LEAST_ITERATION_S
        self._pause_s = 0.0

    def begin_iteration(self, *, acts: bool) -> None:
        """Collect garbage, and adjust the graph to how long it took."""
        now_s = time.perf_counter()
        if self._begun_s is not None:
            self._iteration_s = max(_LEAST_ITERATION_S, now_s - self._begun_s - self._pause_s)
        self._begun_s = now_s
        self._pause_s = 0.0
        if not acts:
            self._graph.clear()
            return
        if not self._graph:
            self._grow(self._wanted_objects(_FIRST_NUM_OBJECTS, self._collect(_FIRST_NUM_OBJECTS)))
        took_s = self._collect(len(self._graph))
        self._grow(self._wanted_objects(len(self._graph), took_s))
        self._pause_s = time.perf_counter() - now_s

    def _collect(self, num_objects: int) -> float:
        self._grow(num_objects)
        begin_s = time.perf_counter()
        gc.collect()
        return time.perf_counter() - begin_s

    def _wanted_objects(self, num_objects: int, took_s: float) -> int:
        wanted_s = self._fault.excess * self._iteration_s
        if self._fault.delay_ms is not None:
            wanted_s = self._fault.delay_ms * 1e-3
        # At most tenfold at a time: a first estimate holds what else the process keeps.
        growth = min(10.0, wanted_s / max(took_s, 1e-6))
        return min(_MOST_OBJECTS, max(1, int(num_objects * growth)))

    def _grow(self, num_objects: int) -> None:
        del self._graph[num_objects:]
        missing = num_objects - len(self._graph)
        self._graph.extend([None] for _ in range(missing))
