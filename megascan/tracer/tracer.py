"""The tracer of a run: which iterations are traced, and the spans of the window that is open.

`Tracer` is what a trainer holds when nothing is traced: every call is allowed and does nothing.
`RecordingTracer` records; instrumentation listens to it as an `IterationListener`. An error of ours
stops tracing and never leaves the context managers around iterations and spans.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from megascan.config import LEAST_LAYERS, TraceConfig
from megascan.header import Activity
from megascan.schema import Granularity, Kind, Track
from megascan.tracer.threads import Threads, ThreadTimes
from megascan.tracer.timer import Arguments, AsyncWork, Mark, Span, Timer, WindowTimes, track_of
from megascan.tracer.writer import MAX_WAITING_WINDOWS, TimedIteration, TraceWriter, Voice, Window
from megascan.vocabulary import ITERATION

if TYPE_CHECKING:  # loaded where the flags ask for them
    from megascan.tracer.budget import Level
    from megascan.tracer.switch import Switch, TracingSwitched


class Tracer:
    """The tracer of a run that is not traced: everything is allowed and nothing happens."""

    active: bool = False
    """Whether spans are being recorded right now; wrappers check this before anything else."""

    run_id: str | None = None
    """Id of the run, equal on all ranks; None if the run is not traced."""

    def iteration(self, number: int) -> AbstractContextManager[None]:
        """Enclose training iteration `number` (from 1)."""
        del number
        return nullcontext()

    def span(
        self, name: str, kind: Kind | str, **arguments: int | str
    ) -> AbstractContextManager[None]:
        """Record the enclosed code as a span, if the iteration is traced."""
        del name, kind, arguments
        return nullcontext()

    def close(self) -> None:
        """Finish the open window, write it, and remove all instrumentation."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class IterationListener:
    """Instrumentation that keeps state within an iteration."""

    def iteration_begins(self) -> None:
        """Reset numbering and memory, which are per iteration."""

    def granularity_lowered(self) -> None:
        """Stop recording what the granularity `base` does not record."""

    def tracing_ends(self) -> None:
        """Remove everything that was installed in the process."""


class LayerTurns:
    """Which layers' modules are recorded in the traced iteration; asked at every module.

    The layers of a rank are learned in its first traced iteration, in which all layers are
    recorded; from then on `TraceConfig.layers_in_turn` chooses, alike on all ranks of a stage. At
    least `least` layers of each chunk are recorded.
    """

    def __init__(self) -> None:
        self.least = LEAST_LAYERS
        self._layers_of_chunk: defaultdict[int, set[int]] = defaultdict(set)
        self._chosen: frozenset[int] | None = None

    def begin_iteration(self, config: TraceConfig, iteration: int) -> None:
        """Choose the layers for the iteration that begins: all until they are known, or where there
        are too few for turns.
        """
        self._chosen = config.layers_in_turn(iteration, self._layers_of_chunk, self.least)

    def takes(self, layer: int | None, chunk: int = 0) -> bool:
        """Return whether a layer's modules are recorded; modules in no layer (None) always are."""
        if self._chosen is not None:
            return layer is None or layer in self._chosen
        if layer is not None:
            self._layers_of_chunk[chunk].add(layer)
        return True

    def largest_stride(self) -> int:
        """Return the largest stride that still leaves `least` layers; 1 without layers."""
        return self.last_stride() // self.least or 1

    def last_stride(self) -> int:
        """Return the stride that leaves a single layer of each chunk, if `allow` permits that."""
        return max(map(len, self._layers_of_chunk.values()), default=1)

    def allow(self, stride: int) -> None:
        """Lower `least` so that a stride may leave fewer layers, as a budget may ask for."""
        self.least = max(1, min(self.least, self.last_stride() // stride))

    @property
    def chosen(self) -> tuple[int, ...] | None:
        """Return the layers that are recorded in this iteration, None for all."""
        return None if self._chosen is None else tuple(sorted(self._chosen))


class _Scope(AbstractContextManager[None]):
    """Context manager that calls `begin` and `end`, whose errors stop tracing and nothing else."""

    _tracer: RecordingTracer

    def begin(self) -> None:
        """Open the scope: the enclosed code is about to run."""
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        """Close the scope; `failed` tells that the enclosed code raised an exception."""
        raise NotImplementedError

    def __enter__(self) -> None:
        try:
            self.begin()
        except Exception as error:
            self._tracer.fail(error)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.end(error is not None)
        except Exception as failure:
            self._tracer.fail(failure)


@dataclass(eq=False)
class IterationScope(_Scope):
    """A traced iteration; one that ends with an exception is forgotten."""

    _tracer: RecordingTracer
    _number: int
    _first_span: int = 0
    _entered: Mark = None
    _begin: Mark = None

    def begin(self) -> None:
        """Open the iteration."""
        self._entered = self._tracer.mark()
        self._first_span = self._tracer.begin_iteration(self._number)
        self._tracer.threads.begin()
        self._begin = self._tracer.mark()

    def end(self, failed: bool) -> None:
        """Record the iteration, or leave it out if it failed."""
        tracer = self._tracer
        if failed:
            tracer.abandon_iteration(self._first_span)
        elif tracer.active:
            tracer.note_threads(self._number, tracer.threads.end())
            tracer.end_iteration(self._begin)
            tracer.add_timing(self._number, Activity.TRACED, self._entered)


@dataclass(eq=False)
class UntracedScope(_Scope):
    """An untraced iteration; only its duration is taken, to compare traced iterations with."""

    _tracer: RecordingTracer
    _number: int
    _num_steps: int = 0
    _entered: Mark = None

    def begin(self) -> None:
        """Start the clock."""
        self._num_steps = self._tracer.num_writer_steps
        self._entered = self._tracer.mark()

    def end(self, failed: bool) -> None:
        """Keep the duration, and whether the writer was at work at the same time."""
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
        """Record the span."""
        if self._tracer.active and not failed:
            self._tracer.add(self._kind, self._name, self._begin, self._mark(), self._arguments)


MAX_WINDOW_SPANS = 400_000
"""A window ends after the iteration in which it exceeds this size, to bound memory."""

MAX_TIMED = 2048
"""Durations that one window's record holds at most; the newest are kept."""

MAX_TIMED_BETWEEN = 32
"""Untraced iterations after a window whose durations are taken, to compare traced ones with."""

CLOSE_TIMEOUT_S = 30.0


class RecordingTracer(Tracer):
    """Records spans of traced iterations and hands each window to the writer when it ends.

    Nothing that goes wrong in here reaches training: the first error is logged once, tracing stops
    for the rest of the run, and windows already written stay.
    """

    mark: Callable[[], Mark]
    """Mark now, where the work is executed; the timer's own method, as it is called very often."""

    mark_at: Callable[..., Mark]
    """Mark when a tensor is complete: the timer's `mark_at(tensor, unless)`."""

    mark_before: Callable[[object], Mark]
    """Mark now, before something is done to a tensor."""

    mark_after: Callable[[object], Mark]
    """Mark now, after something was done to a tensor."""

    mark_host: Callable[[], Mark]
    """Mark now, on the host's clock."""

    layers: LayerTurns
    """Layers whose modules are recorded in this iteration."""

    threads: Threads
    """For how long this rank's threads wait for a core, and others of it run."""

    _timer: Timer
    _writer: TraceWriter

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self.layers = LayerTurns()
        self.threads = Threads()
        self._core_waits: list[tuple[int, int]] = []
        self._other_threads: list[tuple[int, int]] = []
        self._page_reads: list[tuple[int, int]] = []
        self._sampled: list[tuple[int, tuple[int, ...]]] = []
        self._tokens: set[int] = set()
        self._kinds: dict[str, tuple[int, ...]] = {}
        self._voice = Voice()
        self._next_level: Level | None = None
        self._on = not config.armed
        self._switch: Switch | None = None
        self._changes: deque[TracingSwitched] = deque()
        self._timed: deque[TimedIteration] = deque(maxlen=MAX_TIMED)
        self._ready = False
        self._spans: list[Span] = []
        self._unwatched: list[Span] = []
        self._iteration = 0
        self._first_iteration = 0
        self._last_iteration = 0
        self._window_open = False
        self._opened: object = None
        self._last_tie: object = None
        self._opened_s = 0.0
        self._num_dropped = 0
        self._failed = False
        self._closed = False
        self._process_id = os.getpid()
        self._listeners: list[IterationListener] = []
        self._forget_in_children()
        atexit.register(self.close)

    # What instrumentation uses

    @property
    def waiting(self) -> bool:
        """Return whether tracing goes on, now or in a later iteration."""
        return not (self._failed or self._closed)

    @property
    def full(self) -> bool:
        """Return whether modules, all collectives and host events are wanted, too."""
        return self._config.granularity is Granularity.FULL

    @property
    def current_iteration(self) -> int:
        """Return the number of the iteration that training is in, or was in last."""
        return self._iteration

    @property
    def num_writer_steps(self) -> int:
        """Return a counter of the writer thread's begins and ends: odd while it works."""
        return self._writer.num_steps

    def add(self, kind: Kind, name: str, begin: Mark, end: Mark, arguments: Arguments) -> Span:
        """Record a finished span of the current iteration."""
        arguments["iteration"] = self._iteration
        span = Span(kind, name, track_of(kind), begin, end, arguments)
        self._spans.append(span)
        return span

    def add_collective(
        self,
        name: str,
        begin: Mark,
        end: Mark,
        arguments: Arguments,
        lane: str,
        *,
        is_beside: bool = False,
    ) -> None:
        """Record a finished collective.

        It is asynchronous if it `is_beside` other work, or on another stream than training's, as
        FSDP's collectives are.
        """
        span = self.add(Kind.COLLECTIVE, name, begin, end, arguments)
        if is_beside or self._timer.is_aside():
            span.track, span.lane = Track.OVERLAPPED, lane

    def add_pending(
        self,
        work: AsyncWork,
        kind: Kind,
        name: str,
        begin: Mark,
        *,
        arguments: Arguments,
        lane: str,
        backend: str,
    ) -> tuple[Span, bool]:
        """Record asynchronous communication that was started on `backend`.

        Returns the span and whether the timer sees its end; if not, the caller sets `span.end` at
        its own wait, and the span says that its end is a bound.
        """
        arguments["iteration"] = self._iteration
        span = Span(kind, name, Track.OVERLAPPED, begin, None, arguments, lane)
        watched = self._timer.watch(work, span, backend)
        if not watched:
            arguments["end_is_bound"] = 1
            self._unwatched.append(span)
        self._spans.append(span)
        return span, watched

    def fail(self, error: BaseException) -> None:
        """Stop tracing for the rest of the run, and warn why, once."""
        self.active = False
        self._spans = []
        if not self._failed and os.getpid() == self._process_id:
            self._failed = True
            kind = type(error).__name__
            self._voice.warn(
                f"{kind} {getattr(error, 'errno', '')}",
                f"tracing stopped, training goes on without it: {kind}: {error}",
            )

    def warn(self, topic: str, text: str) -> None:
        """Warn the user, once a run for each topic."""
        if os.getpid() == self._process_id:
            self._voice.warn(topic, text)

    def listen(self, listener: IterationListener) -> None:
        """Add a listener, which is told when each traced iteration begins and when tracing ends."""
        self._listeners.append(listener)

    def speak_with(self, voice: Voice) -> None:
        """Set the voice for warnings; call it before anything can fail."""
        self._voice = voice

    def record_with(self, timer: Timer, writer: TraceWriter) -> None:
        """Set timer and writer; call it before the first iteration."""
        self._timer, self._writer = timer, writer
        self.mark, self.mark_host = timer.mark, timer.mark_host
        self.mark_at, self.mark_before = timer.mark_at, timer.mark_before
        self.mark_after = timer.mark_after
        self.run_id = writer.run_id
        self._ready = True

    def switch_with(self, switch: Switch) -> None:
        """Let a switch decide when to trace; call it before the first iteration of an armed run."""
        self._switch = switch

    # What a trainer uses

    def iteration(self, number: int) -> AbstractContextManager[None]:
        """Enclose training iteration `number` (from 1)."""
        self._iteration = number
        if self._failed or self._closed:
            return nullcontext()
        if self._next_level is not None:
            self._change_level(self._next_level)
        if self._switch is not None:
            self._obey(self._switch)
        if not self._on:
            return nullcontext()
        if self._config.traces(number):
            return IterationScope(self, number)
        after_window = (number - 1) % self._config.interval - self._config.window
        return UntracedScope(self, number) if after_window < MAX_TIMED_BETWEEN else nullcontext()

    def span(
        self, name: str, kind: Kind | str, **arguments: int | str
    ) -> AbstractContextManager[None]:
        """Record the enclosed code as a span, if the iteration is traced."""
        return SpanScope(self, name, Kind(kind), arguments) if self.active else nullcontext()

    def announce(self, change: TracingSwitched) -> None:
        """Start or stop tracing from an iteration on; may be called from another thread."""
        self._changes.append(change)

    def lower(self, level: Level) -> None:
        """Trace less from an iteration on; may be called from another thread."""
        self._next_level = level

    def close(self) -> None:
        """Finish the open window as it is, write it, and remove all instrumentation.

        Waits a bounded time for the disk. May be called more than once.
        """
        if self._closed or os.getpid() != self._process_id:
            return
        self._closed = True
        self.active = False
        atexit.unregister(self.close)
        if self._switch is not None:
            self._switch.close()
        for listener in self._listeners:
            listener.tracing_ends()
        # Listeners keep models and process groups, and a group that outlives torch aborts the
        # process.
        self._listeners.clear()
        self.threads.close()
        try:
            self._close_writer()
        except Exception as error:
            self.fail(error)
        self._voice.finish()

    def _close_writer(self) -> None:
        if not self._ready:
            return
        if self._window_open and not self._failed:
            self._end_window()
        if not self._writer.close(CLOSE_TIMEOUT_S) and not self._failed:
            self._voice.warn(
                "slow close",
                "the last windows were not written: the disk did not take them within "
                f"{CLOSE_TIMEOUT_S:.0f} s",
            )

    # The life of a window

    def begin_iteration(self, number: int) -> int:
        """Open the iteration, and a window if none is open; return the number of spans so far."""
        if self._window_open and number != self._last_iteration + 1:
            self._end_window()  # iterations between were skipped or ended with an exception
        if not self._window_open:
            self._first_iteration = number
            self._opened = self._timer.tie(self._last_tie)
            self._opened_s = time.monotonic()
        self._timer.begin_iteration()
        for listener in self._listeners:
            listener.iteration_begins()
        self.layers.begin_iteration(self._config, number)
        self.active = True
        return len(self._spans)

    def end_iteration(self, begin: Mark) -> None:
        """Record the iteration's own span; hand the window over if the iteration was its last."""
        self._end_unwatched()
        self.add(Kind.ITERATION, ITERATION, begin, self.mark(), {})
        self.active = False
        if self.full and (chosen := self.layers.chosen) is not None:
            self._sampled.append((self._iteration, chosen))
        self._last_iteration = self._iteration
        self._window_open = True
        if self._config.ends_window(self._iteration) or len(self._spans) > MAX_WINDOW_SPANS:
            self._end_window()

    def add_timing(self, number: int, activity: Activity, begin: Mark) -> None:
        """Note how long an iteration took, until now."""
        self._timed.append((number, activity, begin, self.mark()))

    def note_threads(self, number: int, times: ThreadTimes | None) -> None:
        """Note for how long an iteration's threads had no core, and for how long others ran; None
        where nobody tells.
        """
        if times is not None:
            self._core_waits.append((number, times.waited_ns))
            self._other_threads.append((number, times.others_ns))
            if times.page_reads:
                self._page_reads.append((number, times.page_reads))

    def note_tokens(self, count: int) -> None:
        """Note how many tokens a pass gets; 0 if the number is unknown, or does not tell all."""
        self._tokens.add(count)

    def note_kinds(self, kinds: Mapping[int, str]) -> None:
        """Note the kind of each numbered layer, in addition to layers noted before."""
        for number, kind in kinds.items():
            self._kinds[kind] = (*self._kinds.get(kind, ()), number)

    def _change_level(self, level: Level) -> None:
        """Apply an announced level at the first begin of an interval from its iteration on."""
        if self._iteration < level.from_iteration or (self._iteration - 1) % self._config.interval:
            return
        self._next_level = None
        if self._window_open:
            self._end_window()
        was_full = self.full
        self.layers.allow(level.layer_stride)
        self._config = replace(
            self._config,
            granularity=level.granularity,
            interval=level.interval,
            layer_stride=level.layer_stride,
        )
        if was_full and not self.full:
            for listener in self._listeners:
                listener.granularity_lowered()

    def _obey(self, switch: Switch) -> None:
        """Apply the changes that hold now; have the switch look at the begin of an interval."""
        if not (self._iteration - 1) % self._config.interval:
            switch.interval_begins(self._iteration)
        while self._changes and self._iteration >= self._changes[0].from_iteration:
            self._on = self._changes.popleft().on
            if not self._on and self._window_open:
                self._end_window()

    def _end_unwatched(self) -> None:
        """End communication that the trainer has not waited for, at the end of the iteration."""
        for span in self._unwatched:
            if span.end is None and span.arguments["iteration"] == self._iteration:
                span.end = self.mark()
        self._unwatched.clear()

    def abandon_iteration(self, first_span: int) -> None:
        """Forget an iteration that ended with an exception; the window ends before it."""
        self.active = False
        del self._spans[first_span:]

    def _end_window(self) -> None:
        finished = [span for span in self._spans if span.end is not None]
        dropped = len(self._spans) - len(finished)
        num_iterations = self._last_iteration - self._first_iteration + 1
        self._last_tie = self._timer.tie()
        window = Window(
            first_iteration=self._first_iteration,
            last_iteration=self._last_iteration,
            spans=finished,
            times=WindowTimes(self._opened, self._last_tie),
            num_dropped=self._num_dropped + dropped,
            granularity=self._config.granularity,
            interval=self._config.interval,
            iteration_s=(time.monotonic() - self._opened_s) / num_iterations,
            timed=tuple(self._timed),
            layers=tuple(self._sampled),
            core_waits=tuple(self._core_waits),
            other_threads=tuple(self._other_threads),
            page_reads=tuple(self._page_reads),
            kinds=dict(self._kinds),
            tokens=_fewest_and_most(self._tokens),
        )
        self._spans = []
        self._sampled = []
        self._core_waits = []
        self._other_threads = []
        self._page_reads = []
        self._tokens = set()
        self._timed.clear()
        self._window_open = False
        self._num_dropped = 0
        if not self._writer.submit(window):
            if not self._failed:
                self._voice.warn(
                    "disk behind",
                    f"a window of {len(finished)} spans was dropped, since the disk is "
                    f"{MAX_WAITING_WINDOWS} windows behind; window records count what is dropped",
                )
            self._num_dropped = window.num_dropped + len(finished)

    def _forget_in_children(self) -> None:
        """Stop tracing in forked children (data-loader workers): they neither trace nor write."""
        reference = weakref.ref(self)

        def silence() -> None:
            tracer = reference()
            if tracer is not None:
                tracer.active = False
                tracer._failed = True

        os.register_at_fork(after_in_child=silence)


def _fewest_and_most(tokens: set[int]) -> tuple[int, ...]:
    """Return the fewest and the most tokens that passes got; () where any pass did not tell (0)."""
    return (min(tokens), max(tokens)) if tokens and 0 not in tokens else ()
