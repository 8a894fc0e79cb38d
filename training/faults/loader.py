"""A rank whose data come late: a slow disk, a busy file server, too few loader processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from training.faults.spec import FaultSpec

# Loading tokens from a warm page cache takes so little that no factor of it would be seen.
_LEAST_LOADING_S = 0.02


class SlowLoader:
    """Delays the loading of each microbatch.

    With ``delay`` by that many milliseconds; with ``factor`` by ``factor - 1`` times what loading
    took, or times 20 ms if it took less.
    """

    def __init__(self, fault: FaultSpec) -> None:
        self._fault = fault
        self._acts = False

    def begin_iteration(self, *, acts: bool) -> None:
        """Say whether the fault acts in the iteration that begins."""
        self._acts = acts

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surround the loading of one microbatch."""
        begin_s = time.perf_counter()
        yield
        if self._acts:
            took_s = time.perf_counter() - begin_s
            time.sleep(self._extra_s(took_s))

    def _extra_s(self, took_s: float) -> float:
        if self._fault.delay_ms is not None:
            return self._fault.delay_ms * 1e-3
        return self._fault.excess * max(took_s, _LEAST_LOADING_S)
