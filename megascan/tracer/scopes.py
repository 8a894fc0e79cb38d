"""The context managers around iterations and spans; an error of ours never leaves them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from megascan.overhead import Activity
from megascan.schema import Kind, Track
from megascan.tracer.span import Arguments, Mark, track_of

if TYPE_CHECKING:
    from megascan.tracer.recording import RecordingTracer


class _Scope(AbstractContextManager[None]):
    """Calls `begin` and `end`; what goes wrong in them stops tracing and nothing else."""

    _tracer: RecordingTracer

    def begin(self) -> None:
        """The enclosed code is about to run."""
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        """It is done, or has `failed` with an exception of its own."""
        raise NotImplementedError

    def __enter__(self) -> None:
        try:
            self.begin()
        except Exception as error:
            self._tracer.fail(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.end(error is not None)
        except Exception as failure:
            self._tracer.fail(failure)


class IterationScope(_Scope):
    """A traced iteration; one that ends with an exception is forgotten."""

    def __init__(self, tracer: RecordingTracer, number: int) -> None:
        self._tracer = tracer
        self._number = number
        self._first_span = 0
        self._entered: Mark = None
        self._begin: Mark = None

    def begin(self) -> None:
        """Open the iteration."""
        self._entered = self._tracer.mark()
        self._first_span = self._tracer.begin_iteration(self._number)
        self._begin = self._tracer.mark()

    def end(self, failed: bool) -> None:
        """Record it, or leave it out."""
        tracer = self._tracer
        if failed:
            tracer.abandon_iteration(self._first_span)
        elif tracer.active:
            tracer.end_iteration(self._begin)
            tracer.add_timing(self._number, Activity.TRACED, self._entered)


class UntracedScope(_Scope):
    """An iteration of which only the duration is taken, to compare traced ones with."""

    def __init__(self, tracer: RecordingTracer, number: int) -> None:
        self._tracer = tracer
        self._number = number
        self._num_steps = 0
        self._entered: Mark = None

    def begin(self) -> None:
        """Start the clock."""
        self._num_steps = self._tracer.num_writer_steps
        self._entered = self._tracer.mark()

    def end(self, failed: bool) -> None:
        """Keep the duration, and whether the writer was at work beside it."""
        tracer = self._tracer
        if failed or not tracer.waiting:
            return
        is_idle = not self._num_steps % 2 and self._num_steps == tracer.num_writer_steps
        activity = Activity.NONE if is_idle else Activity.WRITING
        tracer.add_timing(self._number, activity, self._entered)


class SpanScope(_Scope):
    """A span that the trainer itself asks for; not recorded when it ends with an exception."""

    def __init__(
        self, tracer: RecordingTracer, name: str, kind: Kind, arguments: Arguments
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._arguments = arguments
        on_host = track_of(kind) is Track.HOST
        self._mark = tracer.mark_host if on_host else tracer.mark
        self._begin: Mark = None

    def begin(self) -> None:
        """Take the first mark."""
        self._begin = self._mark()

    def end(self, failed: bool) -> None:
        """Record it."""
        if self._tracer.active and not failed:
            self._tracer.add(self._kind, self._name, self._begin, self._mark(), self._arguments)
