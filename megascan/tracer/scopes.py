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


class IterationScope(AbstractContextManager[None]):
    """A traced iteration; one that ends with an exception is forgotten."""

    def __init__(self, tracer: RecordingTracer, number: int) -> None:
        self._tracer = tracer
        self._number = number
        self._first_span = 0
        self._entered: Mark = None
        self._begin: Mark = None

    def __enter__(self) -> None:
        try:
            self._entered = self._tracer.mark()
            self._first_span = self._tracer.begin_iteration(self._number)
            self._begin = self._tracer.mark()
        except Exception as error:
            self._tracer.fail(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracer = self._tracer
        try:
            if error is not None:
                tracer.abandon_iteration(self._first_span)
            elif tracer.active:
                tracer.end_iteration(self._begin)
                tracer.add_timing(self._number, Activity.TRACED, self._entered)
        except Exception as failure:
            tracer.fail(failure)


class UntracedScope(AbstractContextManager[None]):
    """An iteration of which only the duration is taken, to compare traced ones with."""

    def __init__(self, tracer: RecordingTracer, number: int) -> None:
        self._tracer = tracer
        self._number = number
        self._num_steps = 0
        self._entered: Mark = None

    def __enter__(self) -> None:
        try:
            self._num_steps = self._tracer.num_writer_steps
            self._entered = self._tracer.mark()
        except Exception as error:
            self._tracer.fail(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracer = self._tracer
        if error is not None or not tracer.waiting:
            return
        try:
            is_idle = not self._num_steps % 2 and self._num_steps == tracer.num_writer_steps
            activity = Activity.NONE if is_idle else Activity.WRITING
            tracer.add_timing(self._number, activity, self._entered)
        except Exception as failure:
            tracer.fail(failure)


class SpanScope(AbstractContextManager[None]):
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

    def __enter__(self) -> None:
        try:
            self._begin = self._mark()
        except Exception as error:
            self._tracer.fail(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._tracer.active or error is not None:
            return
        try:
            self._tracer.add(self._kind, self._name, self._begin, self._mark(), self._arguments)
        except Exception as failure:
            self._tracer.fail(failure)
