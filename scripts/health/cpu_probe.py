"""Measure cores one after the other, by a thread that is tied to each: the sweep without GPUs.

Wall time counts, so that a core which another process keeps busy looks slow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

_SIZE = 192  # rows of the matrices, which stay in a core's own cache
_COPY_BYTES = 4 * 1024 * 1024
_MEASURE_S = 0.03  # several time slices of the scheduler, so that a shared core shows as such


class CpuProbe:
    """Measures the cores that this process may use; numpy must be limited to one thread."""

    def __init__(self, most_cores: int = 8) -> None:
        self._cores = sorted(os.sched_getaffinity(0))[:most_cores]
        self.devices: Sequence[str] = [f"core {core}" for core in self._cores]
        generator = np.random.default_rng(0)
        self._factor = generator.random((_SIZE, _SIZE), dtype=np.float32)
        self._product = np.empty_like(self._factor)
        self._source = np.ones(_COPY_BYTES, dtype=np.uint8)
        self._target = np.empty_like(self._source)

    def matrix_product(self) -> list[float]:
        """Return TFLOP/s of one thread on each core."""
        flops = 2 * _SIZE**3
        return [self._rate(core, self._multiply) * flops / 1e12 for core in self._cores]

    def memory_copy(self) -> list[float]:
        """Return GB/s of one thread on each core, bytes read."""
        return [self._rate(core, self._copy) * _COPY_BYTES / 1e9 for core in self._cores]

    def pair_bandwidth(self, source: int, target: int) -> float:
        """Return GB/s at which one core reads what another has just written."""
        total_s, copied_bytes = 0.0, 0
        while total_s < _MEASURE_S / 4:
            with tied_to(self._cores[source]):
                self._source += 1
            with tied_to(self._cores[target]):
                started_s = time.perf_counter()
                self._copy()
                total_s += time.perf_counter() - started_s
            copied_bytes += _COPY_BYTES
        return copied_bytes / total_s / 1e9

    def _multiply(self) -> None:
        np.matmul(self._factor, self._factor, out=self._product)

    def _copy(self) -> None:
        np.copyto(self._target, self._source)

    @staticmethod
    def _rate(core: int, work: Callable[[], None]) -> float:
        """Return how often a second `work` is done on a core."""
        with tied_to(core):
            work()
            count, started_s = 0, time.perf_counter()
            while time.perf_counter() - started_s < _MEASURE_S:
                work()
                count += 1
            return count / (time.perf_counter() - started_s)


@contextmanager
def tied_to(core: int) -> Iterator[None]:
    """Run the block on one core, and afterwards on all cores as before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
