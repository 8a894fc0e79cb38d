"""How time is taken: this host's clock, marks and spans in memory, the timer of work on the CPU.

Every process of a host reads the same physical clock (CLOCK_MONOTONIC), which no time daemon steps.
A `HostClock` ties it once to unix time; ranks of one host that share the tie (`offset_ns`) have
comparable times without any alignment.

A mark is a moment that is written down now and turned into a time later. Which track a span stands
on follows from its kind.
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


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """`offset_ns` is unix time minus monotonic time; `origin_ns` is the monotonic time of zero."""

    domain: str
    offset_ns: int
    origin_ns: int

    @property
    def origin_unix_ns(self) -> int:
        """Return the unix time of the origin by this host's tie."""
        return self.origin_ns + self.offset_ns


def host_domain() -> str:
    """Name of this host's clock: host name and boot, since a reboot starts another clock."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux: the host name must do
        boot = "unknown-boot"
    return f"{socket.gethostname()}:{boot}"


def measure_offset_ns() -> int:
    """Return unix time minus monotonic time, from the reading that was interrupted least."""
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
"""Arguments of a span by the names of `schema.SPAN_COLUMNS`; only those that apply."""

Mark: TypeAlias = object
"""A moment as its timer knows it; opaque to everybody else."""

_TRACKS = dict.fromkeys(Kind, Track.COMPUTE) | {
    Kind.COLLECTIVE: Track.COMMUNICATION,
    Kind.P2P: Track.COMMUNICATION,
    Kind.DATA: Track.HOST,
    Kind.HOST: Track.HOST,
    Kind.GC: Track.HOST,
    Kind.CHECKPOINT: Track.HOST,
}


track_of: Callable[[Kind], Track] = _TRACKS.__getitem__
"""Return the track of a synchronous span; called for each of them, so no function of ours."""


@dataclass(slots=True, eq=False)
class Span:
    """One recorded span; `end` is None while asynchronous communication is under way.

    `lane` names what executes asynchronous spans one after the other (a process group): on a
    device, the next one of a lane starts no earlier than the last one ended.
    """

    kind: Kind
    name: str
    track: Track
    begin: Mark
    end: Mark | None
    arguments: Arguments
    lane: str = ""


Step: TypeAlias = Callable[[], None]
"""Called after a small piece of work."""


def no_step() -> None:
    """Go on at once."""


class AsyncWork(Protocol):
    """What an asynchronous communication returns (torch.distributed.Work)."""

    def wait(self) -> object:
        """Block, or make the current stream wait, until it is done."""


@dataclass(frozen=True)
class WindowTimes:
    """What a timer learned about a window when it opened and closed; opaque to the tracer."""

    opened: object = None
    closed: object = None


@dataclass(frozen=True)
class ClockCheck:
    """The wider of a window's two ties, and how much faster than the host's its clock ran."""

    tie_width_ns: int = 0
    drift_ppm: float = 0.0


class Timer(Protocol):
    """Takes marks on the training thread; turns them into ns later, on the writer's thread.

    `mark` is a moment in the order of execution (on a GPU: in the current stream), `mark_host` one
    on the host's clock. None of the methods called inside a window may wait for the device.
    """

    source: str
    domain: str

    def begin_iteration(self) -> None:
        """Take what the calling thread launches on (a GPU's current stream) for training's own."""

    def is_aside(self) -> bool:
        """Tell whether what is launched now runs next to training's own, on another stream."""

    def mark(self) -> Mark:
        """Mark now, where the work is executed."""

    def mark_at(self, tensor: object, unless: Mark = None) -> Mark:
        """Mark when a tensor is complete; may return the newest mark, if that says the same.

        Not where the newest mark is `unless`.
        """

    def mark_before(self, tensor: object) -> Mark:
        """Mark as `mark_at`, before something is done to the tensor that its state may not show."""

    def mark_after(self, tensor: object) -> Mark:
        """Mark now, behind what has just been done to a tensor."""

    def mark_host(self) -> Mark:
        """Mark now, on the host."""

    def watch(self, work: AsyncWork, span: Span, backend: str) -> bool:
        """Have `span.end` set when the work completes; False where that cannot be arranged."""

    def tie(self, last: object = None) -> object:
        """Relate the device's clock to the host's, outside traced iterations.

        Returns the last tie, if one is given, where it was made just now.
        """

    def resolve(
        self, spans: Sequence[Span], times: WindowTimes, step: Step = no_step
    ) -> list[SpanRecord]:
        """Return spans in ns relative to the origin; marks may be used again afterwards.

        Calls `step` after every small piece of the work.
        """

    def durations_ns(self, moments: Sequence[tuple[Mark, Mark]]) -> list[int]:
        """Return the time from one mark to another where the work is executed."""

    def check(self, times: WindowTimes) -> ClockCheck:
        """Say how well a window's clock was tied to the host's; call it before `resolve`."""

    def counters(self) -> dict[str, float]:
        """Read the device for the window's record."""


_CpuMark: TypeAlias = tuple[int, int]
"""(wall time, CPU time of the thread), ns; a tuple, since it is made twice a span."""


class CpuTimer:
    """The monotonic clock, with the CPU time of the calling thread next to it.

    Asynchronous work ends when its future completes (gloo calls back from its own thread).
    """

    source = "monotonic"

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self.domain = clock.domain

    def begin_iteration(self) -> None:
        """Do nothing: there are no streams."""

    def is_aside(self) -> bool:
        """Tell that there are no streams."""
        return False

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
        """Take the end from the work's future; False for works that have none."""
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

    def tie(self, last: object = None) -> object:
        """Return None: there is only one clock."""
        del last
        return None

    def resolve(
        self, spans: Sequence[Span], times: WindowTimes, step: Step = no_step
    ) -> list[SpanRecord]:
        """Return times relative to the origin; CPU time where one thread ran the whole span."""
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
        """Return wall time."""
        return [cast(_CpuMark, end)[0] - cast(_CpuMark, begin)[0] for begin, end in moments]

    def check(self, times: WindowTimes) -> ClockCheck:
        """Return a perfect check: there is only one clock."""
        del times
        return ClockCheck()

    def counters(self) -> dict[str, float]:
        """Return nothing: a CPU has no counters worth a window's line."""
        return {}
