"""A rank whose host is slow: busy, collecting garbage, or late with its data.

`BusyHost` puts the launching thread to sleep before layers (forward and backward) and before the
optimizer step, as if other work had its core. A stall is a random multiple, ``factor - 1`` on
average, of the CPU time that the thread has used since the last stall. No CPU time is used and no
operation takes longer: the gaps between operations grow, on a GPU the waits for the next launch.

`GarbagePressure` gives Python's collector many objects to visit in every iteration. `SlowLoader`
delays the data, like a slow disk, a busy file server or too few loader processes.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from training.faults.compute import Function, wrap_attribute
from training.faults.fault import FaultSpec


class BusyHost:
    """Puts the calling thread to sleep at every stall."""

    def __init__(self, excess: float, seed: int) -> None:
        self._excess = excess
        self._random = random.Random(seed)  # separate: training must draw as without the fault
        self._acts = False
        self._last_ns: dict[int, int] = {}  # by thread: backward passes on a GPU have another one

    def begin_iteration(self, *, acts: bool) -> None:
        """Note whether the fault acts in the iteration that begins."""
        self._acts = acts
        self._last_ns.clear()

    def stall(self) -> None:
        """Sleep for the CPU time used since the last stall, times the excess, times chance."""
        if not self._acts:
            return
        thread = threading.get_ident()
        now_ns = time.thread_time_ns()
        used_ns = now_ns - self._last_ns.get(thread, now_ns)
        chance = self._random.expovariate(1.0)  # mean 1, often short, seldom long
        time.sleep(used_ns * 1e-9 * self._excess * chance)
        self._last_ns[thread] = time.thread_time_ns()


def install(host: BusyHost) -> None:
    """Make this process call `host.stall` before layers and optimizer steps, for good."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    wrap_attribute(TransformerLayer, "forward", lambda original: _stalled_layer(original, host))
    wrap_attribute(ChainedOptimizer, "step", lambda original: _stalled(original, host))
    wrap_attribute(schedules, "backward_step", lambda original: _stalled(original, host))


def _stalled(original: Function, host: BusyHost) -> Function:
    def stalled(*arguments: object, **options: object) -> object:
        host.stall()
        return original(*arguments, **options)

    return stalled


def _stalled_layer(original: Function, host: BusyHost) -> Function:
    def forward(*arguments: object, **options: object) -> object:
        host.stall()
        result = original(*arguments, **options)
        output = result[0] if isinstance(result, tuple) else result
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.register_hook(lambda _: host.stall())  # type: ignore[no-untyped-call]
        return result

    return forward


_FIRST_NUM_OBJECTS = 20_000
_MOST_OBJECTS = 20_000_000
_LEAST_ITERATION_S = 0.05


class GarbagePressure:
    """Keeps a large graph of objects and collects garbage at the begin of each iteration.

    The graph grows until a collection takes ``delay`` milliseconds, or ``factor - 1`` times the
    iteration without the collection. Collections are real, so that listeners to Python's collector
    see them.
    """

    def __init__(self, fault: FaultSpec) -> None:
        self._fault = fault
        self._graph: list[list[None]] = []
        self._begun_s: float | None = None
        self._iteration_s = _LEAST_ITERATION_S
        self._pause_s = 0.0

    def begin_iteration(self, *, acts: bool) -> None:
        """Collect garbage if the fault acts, and adjust the graph to how long that took."""
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
        # At most tenfold at a time: a first collection also visits the process's other objects.
        growth = min(10.0, wanted_s / max(took_s, 1e-6))
        return min(_MOST_OBJECTS, max(1, int(num_objects * growth)))

    def _grow(self, num_objects: int) -> None:
        del self._graph[num_objects:]
        missing = num_objects - len(self._graph)
        self._graph.extend([None] for _ in range(missing))


# Loading tokens from a warm page cache takes so little time that no multiple of it would show.
_LEAST_LOADING_S = 0.02


class SlowLoader:
    """Delays the loading of each microbatch.

    With ``delay`` it adds that many milliseconds; with ``factor`` it adds ``factor - 1`` times the
    time of loading, or times 20 ms if loading took less.
    """

    def __init__(self, fault: FaultSpec) -> None:
        self._fault = fault
        self._acts = False

    def begin_iteration(self, *, acts: bool) -> None:
        """Note whether the fault acts in the iteration that begins."""
        self._acts = acts

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surround the loading of one microbatch, and sleep after it if the fault acts."""
        begin_s = time.perf_counter()
        yield
        if self._acts:
            took_s = time.perf_counter() - begin_s
            time.sleep(self._extra_s(took_s))

    def _extra_s(self, took_s: float) -> float:
        if self._fault.delay_ms is not None:
            return self._fault.delay_ms * 1e-3
        return self._fault.excess * max(took_s, _LEAST_LOADING_S)
