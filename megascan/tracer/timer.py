"""Take times: this host's clock, marks and spans in memory, the timer of work on the CPU.

Every process of a host reads the same physical clock (CLOCK_MONOTONIC), which no time daemon steps.
A `HostClock` ties it once to unix time; ranks of one host that share the tie (`offset_ns`) have
comparable times without any alignment.

A mark is a moment that is noted now and turned into a time later. The kind of a span decides on
which track it stands.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time_ns
from typing import Protocol, TypeAlias, cast

from megascan.rankfile import SpanRecord
from megascan.schema import Kind, Track

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIE_ATTEMPTS = 20

now_ns = time.monotonic_ns
"""Host time in ns since an arbitrary start; only differences mean something."""


class Spacing:
    """Keeps readings of the machine apart, which take its kernel or a driver some time.

    `least_ns` is the least time from one to the next.
    """

    def __init__(self, least_ns: int) -> None:
        self._least_ns = least_ns
        self._last_ns: int | None = None

    def begin(self) -> None:
        """Take the time up to the first reading from now on."""
        self._last_ns = now_ns()

    def passed_ns(self) -> int | None:
        """Return the time since the last reading or `begin`, without either that of the clock, and
        take another reading; None where it is too early for that.
        """
        now = now_ns()
        passed = now - (self._last_ns or 0)
        if self._last_ns is not None and passed < self._least_ns:
            return None
        self._last_ns = now
        return passed


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """A host's clock: `offset_ns` is unix time less monotonic time, `origin_ns` the monotonic time
    of zero.
    """

    domain: str
    offset_ns: int
    origin_ns: int

    @property
    def origin_unix_ns(self) -> int:
        """Return the unix time of the origin by this host's tie."""
        return self.origin_ns + self.offset_ns


def host_domain() -> str:
    """Return this host's clock domain: host name and boot, as a reboot starts another clock."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux: the host name must do
        boot = "unknown-boot"
    return f"{socket.gethostname()}:{boot}"


def measure_offset_ns() -> int:
    """Return unix time less monotonic time, from the reading that was interrupted least."""
    best_width_ns, best_offset_ns = 1 << 62, 0
    for _ in range(_TIE_ATTEMPTS):
        before_ns = now_ns()
        unix_ns = time.time_ns()
        after_ns = now_ns()
        if after_ns - before_ns < best_width_ns:
            best_width_ns = after_ns - before_ns
            best_offset_ns = unix_ns - (before_ns + after_ns) // 2
    return best_offset_ns


Arguments: TypeAlias = dict[str, int | str]
"""Arguments of a span by names of `schema.SPAN_COLUMNS`; arguments that do not apply are absent."""

Mark: TypeAlias = object
"""A moment in a form that only the timer knows."""

_TRACKS = dict.fromkeys(Kind, Track.COMPUTE) | {
    Kind.COLLECTIVE: Track.COMMUNICATION,
    Kind.P2P: Track.COMMUNICATION,
    Kind.DATA: Track.HOST,
    Kind.HOST: Track.HOST,
    Kind.GC: Track.HOST,
    Kind.CHECKPOINT: Track.HOST,
}


track_of: Callable[[Kind], Track] = _TRACKS.__getitem__
"""Return the track of a synchronous span by its kind; a bound method in C, as it is called often.
"""


@dataclass(slots=True, eq=False)
class Span:
    """One recorded span; `end` is None while asynchronous communication is under way.

    `lane` names what executes asynchronous spans one after the other (a process group): on a
    device, a span of a lane starts no earlier than the span before it ended.
    """

    kind: Kind
    name: str
    track: Track
    begin: Mark
    end: Mark | None
    arguments: Arguments
    lane: str = ""


Step: TypeAlias = Callable[[], None]
"""Function to call after each small piece of work."""


def no_step() -> None:
    """Do nothing after a piece of work."""


class AsyncWork(Protocol):
    """What an asynchronous communication returns (torch.distributed.Work)."""

    def wait(self) -> object:
        """Block, or make the current stream wait, until the work is done."""


@dataclass(frozen=True)
class WindowTimes:
    """What a timer noted when a window opened and closed; the tracer does not look into it."""

    opened: object = None
    closed: object = None


@dataclass(frozen=True)
class ClockCheck:
    """Check of a window's clock: the wider of its two ties, and how much faster than the host's
    clock the device's clock ran.
    """

    tie_width_ns: int = 0
    drift_ppm: float = 0.0


class Timer(Protocol):
    """Takes marks on the training thread; turns them into ns later, on the writer's thread.

    `mark` is a moment in the order of execution (on a GPU: in the current stream), `mark_host` a
    moment on the host's clock. Methods that are called inside a window must not wait for the
    device. What is implemented here holds where the host is the device: it has one clock, no
    streams, and no counters worth a window's line.
    """

    source: str
    domain: str

    def begin_iteration(self) -> None:
        """Take the calling thread's current stream (on a GPU) as the stream of training."""

    def is_aside(self) -> bool:
        """Return whether launches now go to another stream than training's."""
        return False

    def mark(self) -> Mark:
        """Mark now, where the work is executed."""

    def mark_at(self, tensor: object, unless: Mark = None) -> Mark:
        """Mark when a tensor is complete; may return the newest mark if it is the same moment.

        The mark `unless` is never returned.
        """

    def mark_before(self, tensor: object) -> Mark:
        """Mark as `mark_at`, before something is done to the tensor that its state may not show."""

    def mark_after(self, tensor: object) -> Mark:
        """Mark now, after something was done to a tensor."""

    def mark_host(self) -> Mark:
        """Mark now, on the host."""

    def watch(self, work: AsyncWork, span: Span, backend: str) -> bool:
        """Have `span.end` set when the work completes; return False if that is not possible."""

    def tie(self, last: object = None) -> object:
        """Relate the device's clock to the host's, outside traced iterations.

        Returns the `last` tie, if given, if it was made just now.
        """
        return None

    def resolve(
        self, spans: Sequence[Span], times: WindowTimes, step: Step = no_step
    ) -> list[SpanRecord]:
        """Return spans in ns relative to the origin; marks may be used again afterwards.

        Calls `step` after every small piece of the work.
        """

    def durations_ns(self, moments: Sequence[tuple[Mark, Mark]]) -> list[int]:
        """Return the time from one mark to another where the work is executed."""

    def check(self, times: WindowTimes) -> ClockCheck:
        """Return how well a window's clock was tied to the host's; call it before `resolve`."""
        return ClockCheck()

    def counters(self) -> dict[str, float]:
        """Read the device for the window's record."""
        return {}


_CpuMark: TypeAlias = tuple[int, int]
"""(wall time, CPU time of the thread), ns; a tuple, as two are made for each span."""


class CpuTimer(Timer):
    """Timer by the monotonic clock, with the CPU time of the calling thread next to it.

    Asynchronous work ends when its future completes (gloo calls back from its own thread).
    """

    source = "monotonic"

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self.domain = clock.domain

    def begin_iteration(self) -> None:
        """Do nothing: there are no streams."""

    def mark(self) -> Mark:
        """Mark wall time and this thread's CPU time."""
        return now_ns(), thread_time_ns()

    mark_host = mark

    def mark_at(self, tensor: object, unless: Mark = None) -> Mark:
        """Mark now: on the CPU no two moments are the same."""
        del tensor, unless
        return now_ns(), thread_time_ns()

    def mark_after(self, tensor: object) -> Mark:
        """Mark now."""
        del tensor
        return now_ns(), thread_time_ns()

    mark_before = mark_after

    def watch(self, work: AsyncWork, span: Span, backend: str) -> bool:
        """Take the end from the work's future; return False for works without a future."""
        del backend
        try:
            future = work.get_future()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):
            return False

        def finish(_: object) -> None:
            if span.end is None:
                span.end = (now_ns(), 0)

        future.add_done_callback(finish)
        return True

    def resolve(
        self, spans: Sequence[Span], times: WindowTimes, step: Step = no_step
    ) -> list[SpanRecord]:
        """Return spans relative to the origin; with CPU time unless they are asynchronous."""
        del times
        return [self._resolve(span, step) for span in spans]

    def _resolve(self, span: Span, step: Step) -> SpanRecord:
        step()
        begin_ns, begin_cpu_ns = cast(_CpuMark, span.begin)
        end_ns, end_cpu_ns = cast(_CpuMark, span.end)
        if span.track is not Track.OVERLAPPED:
            span.arguments["cpu_ns"] = max(0, end_cpu_ns - begin_cpu_ns)
        start_ns = begin_ns - self._clock.origin_ns
        duration_ns = max(0, end_ns - begin_ns)
        return span.kind, span.name, span.track, start_ns, duration_ns, span.arguments

    def durations_ns(self, moments: Sequence[tuple[Mark, Mark]]) -> list[int]:
        """Return the wall time between each pair of marks."""
        return [cast(_CpuMark, end)[0] - cast(_CpuMark, begin)[0] for begin, end in moments]
