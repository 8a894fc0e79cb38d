"""The seam between the loop and everything that watches it.

The loop knows only `Callback`. Tracing, faults and reports implement the moments they care about;
the loop never asks which of them are there. `TracingCallback` runs MegaScan's tracer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from megascan.tracer import Tracer


class Callback:
    """Moments in the life of a training run.

    Each method returns a context manager that surrounds a moment. Iterations count from 1. All
    methods run on the training thread of every rank and must not communicate, unless all ranks
    communicate in the same way outside an iteration (a probe).
    """

    def training(self) -> AbstractContextManager[None]:
        """Surround the whole run, from before the first iteration to after the last."""
        return nullcontext()

    def iteration(self, iteration: int) -> AbstractContextManager[None]:
        """Surround one training iteration: all microbatches, gradient sync, optimizer."""
        del iteration
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Surround the loading of one microbatch."""
        return nullcontext()

    def optimizer(self) -> AbstractContextManager[None]:
        """Surround the optimizer's part of an iteration."""
        return nullcontext()

    def evaluation(self, iteration: int) -> AbstractContextManager[None]:
        """Surround one evaluation."""
        del iteration
        return nullcontext()

    def checkpoint(self, iteration: int) -> AbstractContextManager[None]:
        """Surround the writing of one checkpoint."""
        del iteration
        return nullcontext()


class Callbacks(Callback):
    """Several callbacks as one; the first of the list is the outermost."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def training(self) -> AbstractContextManager[None]:
        """Surround the run by all callbacks."""
        return self._all(lambda callback: callback.training())

    def iteration(self, iteration: int) -> AbstractContextManager[None]:
        """Surround an iteration by all callbacks."""
        return self._all(lambda callback: callback.iteration(iteration))

    def loading(self) -> AbstractContextManager[None]:
        """Surround the loading of a microbatch by all callbacks."""
        return self._all(lambda callback: callback.loading())

    def optimizer(self) -> AbstractContextManager[None]:
        """Surround the optimizer by all callbacks."""
        return self._all(lambda callback: callback.optimizer())

    def evaluation(self, iteration: int) -> AbstractContextManager[None]:
        """Surround an evaluation by all callbacks."""
        return self._all(lambda callback: callback.evaluation(iteration))

    def checkpoint(self, iteration: int) -> AbstractContextManager[None]:
        """Surround the writing of a checkpoint by all callbacks."""
        return self._all(lambda callback: callback.checkpoint(iteration))

    @contextmanager
    def _all(self, moment: Callable[[Callback], AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(moment(callback))
            yield


class TracingCallback(Callback):
    """Tells the tracer where iterations begin and end, and closes it when the run is over."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def training(self) -> Iterator[None]:
        """Close the tracer after training, also after an exception: it writes the last window."""
        try:
            yield
        finally:
            self._tracer.close()

    def iteration(self, iteration: int) -> AbstractContextManager[None]:
        """Trace an iteration, if the tracer's window says so."""
        return self._tracer.iteration(iteration)
