"""The background thread that turns finished windows into lines of the rank file.

Python's threads take turns: a thread that asks for the interpreter while another computes waits up
to 5 ms, and training asks after every kernel that it launches. So the writer computes for a fifth
of a millisecond at a time and rests five times as long, so that a waiting thread gets its turn, and
gets ahead of the device before the writer's next one. With turns of a millisecond and short rests a
job that waits for its device every few ms, as pipelines do at each message, pays nearly all of the
writer's time; with these a tenth (`benchmarks.writer_turns`).

The writer also starts late. At the end of an iteration trainers wait for the device (the norm of
gradients), so at the begin of the next iteration the device has nothing queued and every launch is
urgent:

    host    | launches ···················| waits for the device    | launches ····
    device  | computes, some ms behind the host ···················|idle| computes
    writer                                    | writes |

A warning that hundreds of ranks have at once is logged by one of them only (`Voice`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TypeAlias

from megascan.header import Activity, RankHeader, WindowRecord
from megascan.rankfile import (
    DamagedError,
    LimitedFile,
    SpanRecord,
    encode_spans,
    encode_window,
    rank_file_path,
    set_earlier_run_aside,
)
from megascan.schema import Granularity, Kind
from megascan.topology import RANK_FILE_PATTERNS, rank_file_name
from megascan.tracer.nics import Nics
from megascan.tracer.pressure import Pressure
from megascan.tracer.sockets import Sockets
from megascan.tracer.timer import Mark, Span, Timer, WindowTimes

logger = logging.getLogger("megascan")

_FINISH_S = 5.0


@dataclass(eq=False)
class Voice:
    """Logs each warning of a run once, on the first rank that has it.

    `claim` asks whether this rank is the first with a topic. It asks the job's key-value store and
    may take long if the job is in trouble, so it runs on a thread of its own: neither training nor
    the writer waits. Without `claim` every warning is logged at once.
    """

    rank: int = 0
    claim: Callable[[str], bool] | None = None
    _topics: set[str] = field(default_factory=set)
    _threads: list[threading.Thread] = field(default_factory=list)

    def warn(self, topic: str, text: str) -> None:
        """Log a warning, unless this or another rank has logged one on the topic."""
        if topic in self._topics:
            return
        self._topics.add(topic)
        if self.claim is None:
            logger.warning("%s", text)
            return
        thread = threading.Thread(target=self._say, args=(self.claim, topic, text), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _say(self, claim: Callable[[str], bool], topic: str, text: str) -> None:
        if claim(topic):
            logger.warning(
                "%s (said by rank %d; ranks with the same trouble do not repeat it)",
                text,
                self.rank,
            )

    def finish(self) -> None:
        """Wait a bounded time for warnings that are still to be logged."""
        for thread in self._threads:
            thread.join(_FINISH_S)


SLICE_NS, REST_S = 200_000, 1e-3
"""How long a turn and the rest after it take."""
FIRST_REST_SHARE = 0.6
"""Share of an iteration before the writer starts: by then a device-bound job has launched nearly
all of it."""
LEAST_FIRST_REST_S, LONGEST_FIRST_REST_S = 0.02, 1.0
_SPANS_A_STEP = 8
"""Spans that are encoded between two looks at the clock, in some 100 µs."""


@dataclass(eq=False)
class Pace:
    """Paces the writer: called between small pieces of work, it rests when it is time to.

    `hurried` says whether work is piling up: then the writer does not rest, and competes like any
    other thread. `pause` waits some seconds, or until work piles up.
    """

    hurried: Callable[[], bool]
    pause: Callable[[float], object]
    slice_ns: int = SLICE_NS
    rest_s: float = REST_S
    _since_ns: int = 0

    def begin(self, iteration_s: float) -> None:
        """Let training get ahead of the device before the work on a window starts."""
        if not self.hurried():
            late_s = FIRST_REST_SHARE * iteration_s
            self.pause(min(max(late_s, LEAST_FIRST_REST_S), LONGEST_FIRST_REST_S))
        self._since_ns = time.perf_counter_ns()

    def step(self) -> None:
        """Rest if it is time to: a piece of the work is done."""
        if time.perf_counter_ns() - self._since_ns > self.slice_ns:
            if not self.hurried():
                time.sleep(self.rest_s)
            self._since_ns = time.perf_counter_ns()


MAX_WAITING_WINDOWS = 4
"""Windows that may wait in memory for a slow disk; further windows are dropped and counted."""


TimedIteration: TypeAlias = tuple[int, Activity, Mark, Mark]
"""(iteration, what the tracer did meanwhile, begin, end)."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A finished window on its way to the file; `timed` are the iterations since the last window.

    `layers` are the layers whose modules were recorded, by iteration; for iterations that it does
    not name, all layers. `tokens`, `kinds`, `core_waits`, `other_threads` and
    `page_reads` are as in a WindowRecord.
    """

    first_iteration: int
    last_iteration: int
    spans: Sequence[Span]
    times: WindowTimes
    num_dropped: int = 0
    granularity: Granularity
    interval: int
    iteration_s: float
    """About how long an iteration took on the training thread."""
    timed: Sequence[TimedIteration] = ()
    layers: Sequence[tuple[int, tuple[int, ...]]] = ()
    tokens: tuple[int, ...] = ()
    kinds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    core_waits: tuple[tuple[int, int], ...] = ()
    other_threads: tuple[tuple[int, int], ...] = ()
    page_reads: tuple[tuple[int, int], ...] = ()


class TraceWriter:
    """Owns one rank's file. Only its own thread touches the disk.

    `on_failure` is called once, from the writer's thread, with the first error; windows submitted
    afterwards are thrown away, and windows written before stay readable. `on_written` is called,
    from the same thread, for each window that was written.
    """

    num_steps = 0
    """Odd while the thread is at work on a window."""

    def __init__(
        self,
        folder: Path,
        header: RankHeader,
        timer: Timer,
        *,
        resumed: bool,
        on_failure: Callable[[Exception], None],
        on_written: Callable[[WindowRecord], None] | None = None,
        voice: Voice | None = None,
    ) -> None:
        self._folder = folder
        self._header = header
        self._timer = timer
        self._resumed = resumed
        self._on_failure = on_failure
        self._on_written = on_written
        self._file: LimitedFile | None = None
        self._num_windows = 0
        self._num_lost_spans = 0
        self._has_passes = False
        self._sockets = Sockets()
        self._pressure = Pressure()
        self._voice = voice or Voice()
        self._queue: Queue[Window | None] = Queue(maxsize=MAX_WAITING_WINDOWS)
        self._handed_over = threading.Event()
        self._pace = Pace(hurried=lambda: not self._queue.empty(), pause=self._pause)
        self._thread = threading.Thread(target=self._run, name="megascan-writer", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Return the path of the rank file."""
        return rank_file_path(self._folder, self._header)

    @property
    def run_id(self) -> str:
        """Return the id of the run that is written."""
        return self._header.run_id

    def submit(self, window: Window) -> bool:
        """Hand over a window without waiting; return False if the disk is too far behind."""
        try:
            self._queue.put_nowait(window)
        except Full:
            return False
        self._handed_over.set()
        return True

    def close(self, timeout_s: float) -> bool:
        """Write waiting windows and close the file; return False if that takes too long."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except Full:
            return False
        self._handed_over.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _pause(self, seconds: float) -> None:
        """Wait some seconds, or until there is more to write, or the writer is closed."""
        self._handed_over.clear()
        if self._queue.empty():
            self._handed_over.wait(seconds)

    def _run(self) -> None:
        try:
            self._open()
            with suppress(Exception):  # without it the first reading counts from the beginning
                self._sockets.begin()
            with suppress(Exception):  # likewise
                self._pressure.begin()
            while (window := self._queue.get()) is not None:
                self.num_steps += 1
                self._write(window)
                self.num_steps += 1
            if self._file:
                self._file.close()
            self._say_what_is_missing()
        except Exception as error:  # whatever it is, training goes on without a trace
            self._on_failure(error)
            self._drain()

    def _readings(self) -> dict[str, float]:
        """Read the device and the host's ports; what cannot be read costs no window."""
        counters: dict[str, float] = {}
        try:
            counters |= self._timer.counters()
            counters |= self._nics.read(self._pace.step)
        except Exception as error:  # of a driver, or a file of the system
            self._say_unread("device and ports", error)
        return counters

    def _waits(self) -> dict[str, float]:
        """Read the waiting for memory and disks; what cannot be read costs no window."""
        try:
            return self._pressure.read(self._pace.step)
        except Exception as error:  # of a file of the system
            self._say_unread("memory and disks", error)
            return {}

    def _connections(self) -> tuple[tuple[str, str, int, int, int, int], ...]:
        """Read what TCP connections carried; what cannot be read costs no window."""
        try:
            return tuple([one.as_tuple() for one in self._sockets.read(self._pace.step)])
        except Exception as error:  # of a socket that goes away
            self._say_unread("connections", error)
            return ()

    def _say_unread(self, what: str, error: Exception) -> None:
        self._voice.warn(f"unread {what}", f"{what} cannot be read, tracing goes on: {error!r}")

    def _say_what_is_missing(self) -> None:
        if self._num_windows and not self._has_passes:
            self._voice.warn(
                "no passes",
                f"{self._num_windows} windows were traced, but no forward or backward pass was "
                "seen: slow devices cannot be named; a trainer without megatron.core's schedules "
                "gives its model to megascan.start(config, model=model), see "
                "docs/other-trainers.md",
            )

    def _drain(self) -> None:
        """Empty the queue, so that no thread waits for a writer that has failed."""
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            return

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._resumed:
            for path in self._own_paths():
                set_earlier_run_aside(path)
            if self._header.rank == 0:
                self._set_strangers_aside()
        try:
            self._file = self._open_file()
        except DamagedError:
            set_earlier_run_aside(self.path)
            self._file = self._open_file()
        self._file.begin_run(self._header)
        self._nics = Nics()

    def _open_file(self) -> LimitedFile:
        settings = self._header.trace
        return LimitedFile(self.path, compress=settings.compress, max_bytes=settings.max_bytes)

    def _own_paths(self) -> list[Path]:
        """Return this rank's file names, plain and compressed."""
        plain = self._folder / rank_file_name(self._header.layout, self._header.coordinates)
        return [plain, plain.with_name(f"{plain.name}.gz")]

    def _set_strangers_aside(self) -> None:
        """Move away files of an earlier run of other sizes, which no rank of this run owns."""
        layout = self._header.layout
        ours = {
            rank_file_name(layout, layout.coordinates(rank)) for rank in range(layout.world_size)
        }
        for pattern in RANK_FILE_PATTERNS:
            for path in sorted(self._folder.glob(pattern)):
                if path.name.removesuffix(".gz") not in ours:
                    set_earlier_run_aside(path)

    def _write(self, window: Window) -> None:
        assert self._file is not None  # opened before the first window is taken
        rank = self._header.rank
        self._pace.begin(window.iteration_s)
        check = self._timer.check(window.times)
        records = self._timer.resolve(window.spans, window.times, self._pace.step)
        self._has_passes = self._has_passes or any(each[0] is Kind.COMPUTE for each in records)
        durations = self._timer.durations_ns([(begin, end) for _, _, begin, end in window.timed])
        record = WindowRecord(
            run_id=self._header.run_id,
            window=self._num_windows,
            first_iteration=window.first_iteration,
            last_iteration=window.last_iteration,
            num_spans=len(records),
            num_dropped=window.num_dropped + self._num_lost_spans,
            granularity=window.granularity,
            interval=window.interval,
            counters=self._readings(),
            tie_width_ns=check.tie_width_ns,
            drift_ppm=check.drift_ppm,
            tokens=window.tokens,
            kinds=window.kinds,
            layers=tuple(window.layers),
            core_waits=window.core_waits,
            other_threads=window.other_threads,
            page_reads=window.page_reads,
            pressure=self._waits(),
            connections=self._connections(),
            timings=tuple(
                [
                    (timed[0], int(timed[1]), duration_ns)
                    for timed, duration_ns in zip(window.timed, durations, strict=True)
                ]
            ),
        )
        lines = [*self._encoded(rank, records), encode_window(rank, record)]
        if self._file.append(lines, record):
            self._num_windows += 1
            self._num_lost_spans = 0
        else:
            self._leave_out(record)
        if self._on_written is not None:
            self._on_written(record)

    def _encoded(self, rank: int, records: Sequence[SpanRecord]) -> Iterator[bytes]:
        for first in range(0, len(records), _SPANS_A_STEP):
            yield from encode_spans(rank, records[first : first + _SPANS_A_STEP])
            self._pace.step()

    def _leave_out(self, record: WindowRecord) -> None:
        """Leave out a window that is larger than the limit; the next record counts its spans."""
        self._num_lost_spans = record.num_spans + record.num_dropped
        self._voice.warn(
            "window too large",
            f"a window of {record.num_spans} spans does not fit into half of --trace-max-bytes "
            f"{self._header.trace.max_bytes} and was left out; raise the limit, or trace fewer "
            "iterations a window or granularity base",
        )
