"""GPU time: CUDA events from a pool, tied to the host's clock once a window.

Nothing in here waits for the device inside a traced iteration. Events are recorded on the current
stream while training runs, and read back by the writer's thread after the window.

    host    ──┬ tie a ──────────────── window ───────────────── tie b ┬──►
    device  ──┴ event                  events                   event ┴──►

A tie is an event on a stream of its own, waited for between two readings of the host's clock; the
narrowest of several is kept. Two ties give the device clock's rate against the host's, so that
drift inside a long window is taken out. What remains is the width of a tie, some µs, and
differs from rank to rank: every rank's GPU is a clock domain of its own.

CUDA gives differences of events as float32 milliseconds, which is exact to 30 ns below half a
second only. Marks are therefore measured against a reference that moves along with them.
"""

from __future__ import annotations

import bisect
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from megascan.clock import HostClock, now_ns
from megascan.rankfile import SpanRecord
from megascan.schema import Track
from megascan.tracer.span import Mark, Span
from megascan.tracer.timer import AsyncWork, ClockCheck, Step, WindowTimes, no_step

_TIE_ATTEMPTS = 5
_TIE_TIMEOUT_NS = 10_000_000_000
"""A device that hangs (a peer died in a collective) must not keep the process from ending."""
_MAX_REFERENCE_DISTANCE_MS = 250.0
_RATE_TOLERANCE = 5e-6
"""Crystals differ by some ppm; a rate less certain than this would add noise, not take it out."""


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self, stream: object = None) -> None:
        """Take the time when the stream (the current one) gets here."""

    def query(self) -> bool:
        """Whether the time is taken."""

    def synchronize(self) -> None:
        """Wait until the time is taken."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds until another event."""


class Device(Protocol):
    """What the timer needs of a GPU; `TorchDevice` has it from torch.cuda."""

    name: str
    can_wait_aside: bool
    """Whether a stream of our own can wait for NCCL's work without holding anybody up."""

    def new_event(self) -> Event:
        """An event that takes time."""

    def record(self, event: Event) -> None:
        """Record on the current stream, with as little ado as can be."""

    def record_aside(self, event: Event) -> None:
        """Record on a stream of the timer's own, on which nothing else ever runs."""

    def record_after(self, event: Event, work: AsyncWork, lane: str) -> None:
        """Record when `work` is done, on a stream of the timer's own, one for each lane."""

    def counters(self) -> dict[str, float]:
        """Readings of the device, empty without NVML."""


@dataclass(slots=True)
class _CudaMark:
    event: Event
    launch_ns: int


@dataclass(slots=True)
class _HostMark:
    time_ns: int


@dataclass(frozen=True)
class Tie:
    """The device passed `event` when the host's clock read `host_ns`, give or take `width_ns`/2."""

    event: Event
    host_ns: int
    width_ns: int


class EventPool:
    """Events that are used again: making one costs more than recording it.

    Taken on the training thread, given back by the writer's; a deque needs no lock for that.
    """

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        self._free: deque[Event] = deque()

    def take(self) -> Event:
        """A free event, or a new one."""
        try:
            return self._free.popleft()
        except IndexError:
            return self._make()

    def give_back(self, events: Sequence[Event]) -> None:
        """These have been read."""
        self._free.extend(events)

    def __len__(self) -> int:
        return len(self._free)


class CudaTimer:
    """Marks are CUDA events on the current stream; spans of the host are timed by its own clock.

    With `record_launches`, spans carry `launch_ns`: when the host launched them, relative to when
    the device began. Near zero, the device was waiting for the host.
    """

    source = "cuda-event"

    def __init__(self, clock: HostClock, device: Device, *, record_launches: bool) -> None:
        self._clock = clock
        self._device = device
        self._record_launches = record_launches
        self._pool = EventPool(device.new_event)
        self.domain = f"{clock.domain}:{device.name}:{os.getpid()}"

    def mark(self) -> Mark:
        """An event on the current stream, and the host time of its launch."""
        event = self._pool.take()
        self._device.record(event)
        return _CudaMark(event, now_ns())

    def mark_host(self) -> Mark:
        """Now, on the host."""
        return _HostMark(now_ns())

    def watch(self, work: AsyncWork, span: Span, backend: str) -> bool:
        """Record the work's end on a stream of our own that waits for it, which costs no one time.

        Waiting makes torch drop its own protection of the work's tensors, so whoever hands on the
        work keeps them until the trainer's own wait. Only NCCL's works wait in a stream; waiting
        for those of another backend would stop the host.
        """
        if "nccl" not in backend or not self._device.can_wait_aside:
            return False
        event = self._pool.take()
        self._device.record_after(event, work, span.lane)
        span.end = _CudaMark(event, now_ns())
        return True

    def tie(self) -> Tie:
        """Relate the device's clock to the host's; some 10 µs, between iterations."""
        ties = sorted((self._try_tie() for _ in range(_TIE_ATTEMPTS)), key=lambda tie: tie.width_ns)
        self._pool.give_back([tie.event for tie in ties[1:]])
        return ties[0]

    def _try_tie(self) -> Tie:
        event = self._pool.take()
        before_ns = now_ns()
        self._device.record_aside(event)
        while not event.query():
            if now_ns() - before_ns > _TIE_TIMEOUT_NS:
                raise TimeoutError("the GPU does not answer")
        after_ns = now_ns()
        return Tie(event, (before_ns + after_ns) // 2, after_ns - before_ns)

    def resolve(
        self, spans: Sequence[Span], times: WindowTimes, step: Step = no_step
    ) -> list[SpanRecord]:
        """Read the events back, in ns relative to the origin; waits for the last one."""
        opened, closed = cast(Tie, times.opened), cast(Tie, times.closed)
        marks = _distinct_marks(spans)
        host = _DeviceTimes(marks, opened, closed, step)
        records = [self._record(span, host, step) for span in spans]
        self._pool.give_back([mark.event for mark in marks])
        self._pool.give_back([opened.event, closed.event])
        return _in_lanes(spans, records)

    def _record(self, span: Span, host: _DeviceTimes, step: Step) -> SpanRecord:
        step()
        start_ns, end_ns = host.host_ns(span.begin), host.host_ns(span.end)
        if self._record_launches and isinstance(span.begin, _CudaMark):
            span.arguments["launch_ns"] = span.begin.launch_ns - start_ns
        duration_ns = max(0, end_ns - start_ns)
        start_ns -= self._clock.origin_ns
        return span.kind, span.name, span.track, start_ns, duration_ns, span.arguments

    def durations_ns(self, moments: Sequence[tuple[Mark, Mark]]) -> list[int]:
        """Device time between two marks; waits for the last one."""
        durations = []
        for begin, end in cast("Sequence[tuple[_CudaMark, _CudaMark]]", moments):
            _await(end.event)
            durations.append(round(begin.event.elapsed_time(end.event) * 1e6))
            self._pool.give_back([begin.event, end.event])
        return durations

    def check(self, times: WindowTimes) -> ClockCheck:
        """Drift between the ties; 0 where it is less than their widths can tell."""
        opened, closed = cast(Tie, times.opened), cast(Tie, times.closed)
        host_ns = closed.host_ns - opened.host_ns
        surplus_ns = opened.event.elapsed_time(closed.event) * 1e6 - host_ns
        certain = host_ns > 0 and abs(surplus_ns) > (opened.width_ns + closed.width_ns) / 2
        return ClockCheck(
            tie_width_ns=max(opened.width_ns, closed.width_ns),
            drift_ppm=surplus_ns / host_ns * 1e6 if certain else 0.0,
        )

    def counters(self) -> dict[str, float]:
        """Readings of the device for the window's record."""
        return self._device.counters()


class _DeviceTimes:
    """Host times of the events of one window."""

    def __init__(self, marks: Sequence[_CudaMark], opened: Tie, closed: Tie, step: Step) -> None:
        ordered = [mark.event for mark in sorted(marks, key=lambda mark: mark.launch_ns)]
        self._times, closing_ms = self._read(ordered, opened.event, closed.event, step)
        self._start_ns, self._ns_per_ms = _fit(opened, closed, closing_ms)

    def _read(
        self, events: Sequence[Event], opened: Event, closed: Event, step: Step
    ) -> tuple[dict[int, float], float]:
        """Milliseconds from the opening tie, by the identity of the event and to the closing tie.

        Waits for those events that are still to come.
        Launch order is nearly device order, so the reference moves forward along with the events.
        """
        times: dict[int, float] = {}
        reference, reference_ms = opened, 0.0
        for event in events:
            _await(event)
            elapsed_ms = reference.elapsed_time(event)
            times[id(event)] = reference_ms + elapsed_ms
            if elapsed_ms > _MAX_REFERENCE_DISTANCE_MS:
                reference, reference_ms = event, times[id(event)]
            step()
        return times, reference_ms + reference.elapsed_time(closed)

    def host_ns(self, mark: Mark) -> int:
        """Host time of a mark, rounded to ns."""
        if isinstance(mark, _HostMark):
            return mark.time_ns
        elapsed_ms = self._times[id(cast(_CudaMark, mark).event)]
        return round(self._start_ns + elapsed_ms * self._ns_per_ms)


def _await(event: Event) -> None:
    """Wait for an event; the query spares those that are done, nearly all, a change of threads."""
    if not event.query():
        event.synchronize()


def _fit(opened: Tie, closed: Tie, distance_ms: float) -> tuple[float, float]:
    """Host time of the opening tie, and ns a device millisecond.

    The rate is taken from the ties only when they are far enough apart for their width to leave it
    accurate; before that both clocks are taken to run alike, and the ties are averaged.
    """
    host_ns = closed.host_ns - opened.host_ns
    if host_ns > 0 and (opened.width_ns + closed.width_ns) / host_ns < _RATE_TOLERANCE:
        return float(opened.host_ns), host_ns / distance_ms
    return opened.host_ns + (host_ns - distance_ms * 1e6) / 2, 1e6


def _distinct_marks(spans: Sequence[Span]) -> list[_CudaMark]:
    """Each mark once: the messages of one exchange share theirs."""
    marks = {
        id(mark): mark
        for span in spans
        for mark in (span.begin, span.end)
        if isinstance(mark, _CudaMark)
    }
    return list(marks.values())


def _in_lanes(spans: Sequence[Span], records: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Asynchronous work of one communicator runs one after the other: cut off the queueing.

    It is launched long before its turn comes; its span starts when the one before has ended.
    """
    ends: dict[str, list[int]] = {}
    result = list(records)
    asynchronous = [n for n, span in enumerate(spans) if span.track is Track.OVERLAPPED]
    for number in sorted(asynchronous, key=lambda n: records[n][3]):
        kind, name, track, start_ns, duration_ns, arguments = records[number]
        earlier = ends.setdefault(spans[number].lane, [])
        end_ns = start_ns + duration_ns
        before = bisect.bisect_right(earlier, end_ns)
        start = max(start_ns, earlier[before - 1]) if before else start_ns
        if "launch_ns" in arguments:
            arguments = {
                **arguments,
                "launch_ns": cast(int, arguments["launch_ns"]) - start + start_ns,
            }
        result[number] = (kind, name, track, start, end_ns - start, arguments)
        bisect.insort(earlier, end_ns)
    return result
