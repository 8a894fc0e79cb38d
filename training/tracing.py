"""MegaScan's tracer as a callback of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from megascan.tracer import Tracer
from training.callback import Callback


class TracingCallback(Callback):
    """Tells the tracer where iterations begin and end, and closes it when the run is over."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def training(self) -> Iterator[None]:
        """Write the last window also when training ends with an exception."""
        try:
            yield
        finally:
            self._tracer.close()

    def iteration(self, iteration: int) -> AbstractContextManager[None]:
        """Trace an iteration, if the tracer's window says so."""
        return self._tracer.iteration(iteration)
