"""GPU time: CUDA events from a pool, tied to the host's clock once a window.

    CudaTimer      the timer: marks are events, recorded on the stream that training uses
    DeviceTimes    from the events of a window to times on the host's clock
    TorchDevice    the GPU of this process, as torch.cuda shows it; Nvml reads clock, power, heat

Nothing in here waits for the device inside a traced iteration. Events are recorded on the current
stream while training runs, and read back by the writer's thread after the window.

    host    ──┬ tie a ──────────────── window ───────────────── tie b ┬──►
    device  ──┴ event                  events                   event ┴──►

A tie is an event on a stream of its own, waited for between two readings of the host's clock; the
narrowest of several is kept. Two ties give the device clock's rate against the host's, so that
drift inside a long window is taken out. What remains is the width of a tie, some µs, and
differs from rank to rank: every rank's GPU is a clock domain of its own. Of two windows that follow
one another the second opens with the tie that closed the first: the device is often idle there, so
that each tie would be the step's.

An event holds its stream up for some 3 µs (`benchmarks.event_cost`), so moments that are the same
share one: where a layer ends the next one begins, with the same tensor, to which nothing has been
done in between.

Between two of torch's calls nothing of ours is in the processor's caches, so a mark costs what it
touches: tuples instead of objects, few calls, and methods of C where torch has a layer of Python
above them (`benchmarks.hot_path --cold`).
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Protocol, TypeAlias, cast

import torch

from megascan.rankfile import SpanRecord
from megascan.schema import Track
from megascan.tracer.timer import (
    AsyncWork,
    ClockCheck,
    HostClock,
    Mark,
    Span,
    Step,
    WindowTimes,
    no_step,
    now_ns,
)

_LEAST_NS_BETWEEN_READINGS = 500_000_000
"""A reading takes a millisecond of the driver, which training's launches need, too."""


class Nvml:
    """One device, found by its UUID; without the pynvml package or a driver it reads nothing."""

    def __init__(self, uuid: str) -> None:
        self._readings: dict[str, Callable[[], float]] = {}
        self._read_at_ns: int | None = None
        with contextlib.suppress(Exception):  # absent package, driver or permission
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._readings = _readings_of(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))

    def read(self) -> dict[str, float]:
        """Read what this device tells; nothing where it was read within the last half second.

        A reading that it does not support is left out.
        """
        now = now_ns()
        if self._read_at_ns is not None and now - self._read_at_ns < _LEAST_NS_BETWEEN_READINGS:
            return {}
        self._read_at_ns = now
        values: dict[str, float] = {}
        for name, reading in self._readings.items():
            with contextlib.suppress(Exception):  # NVMLError_NotSupported, a lost device
                values[name] = float(reading())
        return values


def _readings_of(nvml: ModuleType, handle: object) -> dict[str, Callable[[], float]]:
    clock, temperature = nvml.NVML_CLOCK_SM, nvml.NVML_TEMPERATURE_GPU
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before driver 535
    )
    return {
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, clock),
        "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, clock),
        "clock_event_reasons": lambda: reasons(handle),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, temperature),
    }


class DeviceEvent(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self, stream: object) -> None:
        """Take the time when the stream gets here."""

    def query(self) -> bool:
        """Tell whether the time is taken."""

    def synchronize(self) -> None:
        """Wait until the time is taken."""

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        """Return milliseconds until another event."""


class TimedDevice(Protocol):
    """What the timer needs of a GPU; `TorchDevice` has it from torch.cuda."""

    name: str
    can_wait_aside: bool
    """Whether a stream of our own can wait for NCCL's work without holding anybody up."""

    def new_event(self) -> DeviceEvent:
        """Return an event that takes time."""

    def stream(self) -> object:
        """Return what tells the current stream from others, as cheaply as possible."""

    def record(self, event: DeviceEvent) -> None:
        """Record on the current stream, as cheaply as possible."""

    def record_aside(self, event: DeviceEvent) -> None:
        """Record on a stream of the timer's own, on which nothing else ever runs."""

    def record_after(self, event: DeviceEvent, work: AsyncWork, lane: str) -> None:
        """Record when `work` is done, on a stream of the timer's own, one for each lane."""

    def counters(self) -> dict[str, float]:
        """Read the device; empty without NVML."""


class EventPool:
    """Events that are used again: making one costs more than recording it.

    Taken on the training thread, given back by the writer's; a deque needs no lock for that.
    """

    def __init__(self, make: Callable[[], DeviceEvent]) -> None:
        self._make = make
        self._free: deque[DeviceEvent] = deque()

        self.take_free: Callable[[], DeviceEvent] = self._free.popleft
        """Return a free event; IndexError when there is none."""

    def take(self) -> DeviceEvent:
        """Return a free event, or a new one."""
        try:
            return self.take_free()
        except IndexError:
            return self._make()

    def give_back(self, events: Sequence[DeviceEvent]) -> None:
        """Take back events that have been read."""
        self._free.extend(events)

    def __len__(self) -> int:
        return len(self._free)


_MAX_REFERENCE_DISTANCE_MS = 250.0
_EVENTS_A_STEP, _SPANS_A_STEP = 16, 32
"""What the writer's thread does without looking at the clock: some 100 µs."""
_RATE_TOLERANCE = 5e-6
"""Crystals differ by some ppm; a rate less certain than this would add noise, not take it out."""


CudaMark: TypeAlias = tuple[DeviceEvent, int]
"""An event, and when the host launched it."""

_HostMark: TypeAlias = int
"""A time of the host's clock."""


@dataclass(frozen=True)
class Tie:
    """The device passed `event` when the host's clock read `host_ns`, give or take `width_ns`/2."""

    event: DeviceEvent
    host_ns: int
    width_ns: int


class DeviceTimes:
    """Host times of the events of one window.

    CUDA gives differences of events as float32 milliseconds, which is exact to 30 ns below half a
    second only. Marks are therefore measured against a reference that moves along with them.
    """

    def __init__(self, marks: Sequence[CudaMark], opened: Tie, closed: Tie, step: Step) -> None:
        ordered = [event for event, _ in sorted(marks, key=itemgetter(1))]
        times, closing_ms = self._read(ordered, opened.event, closed.event, step)
        start_ns, ns_per_ms = _fit(opened, closed, closing_ms)
        self.host_ns = {
            identity: round(start_ns + elapsed_ms * ns_per_ms)
            for identity, elapsed_ms in times.items()
        }
        """By identity of the event, rounded to ns."""

    def _read(
        self, events: Sequence[DeviceEvent], opened: DeviceEvent, closed: DeviceEvent, step: Step
    ) -> tuple[dict[int, float], float]:
        """Return milliseconds from the opening tie, by identity of the event, and to the closing
        tie.

        Waits for those events that are still to come.
        Launch order is nearly device order, so the reference moves forward along with the events.
        """
        times: dict[int, float] = {}
        reference, reference_ms = opened, 0.0
        for number, event in enumerate(events):
            if not event.query():  # spares those that are done, nearly all, a change of threads
                event.synchronize()
            elapsed_ms = reference.elapsed_time(event)
            times[id(event)] = reference_ms + elapsed_ms
            if elapsed_ms > _MAX_REFERENCE_DISTANCE_MS:
                reference, reference_ms = event, times[id(event)]
            if not number % _EVENTS_A_STEP:
                step()
        return times, reference_ms + reference.elapsed_time(closed)


def _fit(opened: Tie, closed: Tie, distance_ms: float) -> tuple[float, float]:
    """Return the host time of the opening tie, and ns a device millisecond.

    The rate is taken from the ties only when they are far enough apart for their width to leave it
    accurate; before that both clocks are taken to run alike, and the ties are averaged.
    """
    host_ns = closed.host_ns - opened.host_ns
    if host_ns > 0 and (opened.width_ns + closed.width_ns) / host_ns < _RATE_TOLERANCE:
        return float(opened.host_ns), host_ns / distance_ms
    return opened.host_ns + (host_ns - distance_ms * 1e6) / 2, 1e6


def distinct_marks(spans: Sequence[Span]) -> list[CudaMark]:
    """Return each mark once: the messages of one exchange share theirs."""
    marks = {
        id(mark): mark
        for span in spans
        for mark in (span.begin, span.end)
        if isinstance(mark, tuple)
    }
    return list(marks.values())


_TIE_ATTEMPTS = 5
_NARROW_RATIO = 1.25
"""A tie is narrow enough when it is so much wider than the narrowest of this run at most."""
_TIE_LASTS_NS = 10_000_000
"""Clocks that differ by 100 ppm, more than crystals do, part by 1 µs in so long."""
_TIE_TIMEOUT_NS = 10_000_000_000
"""A device that hangs (a peer died in a collective) must not keep the process from ending."""


class CudaTimer:
    """Marks are CUDA events on the current stream; spans of the host are timed by its own clock.

    With `record_launches`, spans carry `launch_ns`: when the host launched them, relative to when
    the device began. Near zero, the device was waiting for the host.
    """

    source = "cuda-event"

    def __init__(self, clock: HostClock, device: TimedDevice, *, record_launches: bool) -> None:
        self._clock = clock
        self._device = device
        self._record_launches = record_launches
        self._pool = EventPool(device.new_event)
        self._take_free, self._record = self._pool.take_free, device.record
        self.mark_host: Callable[[], Mark] = now_ns
        self._newest: Mark = None
        self._complete: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._narrowest_ns = 0
        self._stream: object = None
        self.domain = f"{clock.domain}:{device.name}:{os.getpid()}"

    def begin_iteration(self) -> None:
        """Take the current stream for the one that training computes on."""
        self._stream = self._device.stream()

    def is_aside(self) -> bool:
        """Tell whether the current stream is another one; FSDP has some for its collectives."""
        return self._device.stream() != self._stream

    def mark(self) -> Mark:
        """Record an event on the current stream, and the host time of its launch."""
        return self.mark_after(None)

    def mark_at(self, tensor: object, unless: Mark = None) -> Mark:
        """Return the newest mark if the same tensor was complete at it, else a new one.

        The weak reference tells whether it is the same one: later tensors get the identity of
        earlier ones, but not while those live.
        """
        complete, newest = self._complete, self._newest
        if complete is not None and newest is not unless:
            known = complete()
            if known is not None and known is tensor and known._version == self._version:
                return newest
        return self.mark_after(tensor)

    def mark_before(self, tensor: object) -> Mark:
        """Mark as `mark_at` does; from now on the tensor no longer counts as complete."""
        mark = self.mark_at(tensor)
        self._complete = None
        return mark

    def mark_after(self, tensor: object) -> Mark:
        """Return a new mark, at which this tensor is complete.

        That cannot be told of subclasses, whose memory others hold, and of tensors made in
        inference mode, whose changes torch does not count.
        """
        try:
            event = self._take_free()
        except IndexError:
            event = self._device.new_event()
        self._record(event)
        mark = self._newest = event, now_ns()
        self._complete = None
        if type(tensor) is torch.Tensor:
            try:
                self._version = tensor._version
                self._complete = weakref.ref(tensor)
            except RuntimeError:
                pass
        return mark

    def watch(self, work: AsyncWork, span: Span, backend: str) -> bool:
        """Record the work's end on a stream of our own that waits for it, which holds nobody up.

        Waiting makes torch drop its own protection of the work's tensors, so whoever hands on the
        work keeps them until the trainer's own wait. Only NCCL's works wait in a stream; waiting
        for those of another backend would stop the host.
        """
        if "nccl" not in backend or not self._device.can_wait_aside:
            return False
        event = self._pool.take()
        self._device.record_after(event, work, span.lane)
        span.end = event, now_ns()
        return True

    def tie(self, last: object = None) -> Tie:
        """Relate the device's clock to the host's; some 10 µs, between iterations.

        The training thread waits for each attempt, so one that is as narrow as any before is the
        last, and a tie that was made just now is as good as another.
        """
        if isinstance(last, Tie) and now_ns() - last.host_ns < _TIE_LASTS_NS:
            return last
        best = self._try_tie()
        for _ in range(_TIE_ATTEMPTS - 1):
            if best.width_ns <= _NARROW_RATIO * self._narrowest_ns:
                break
            tie = self._try_tie()
            narrower, wider = sorted((best, tie), key=lambda each: each.width_ns)
            self._pool.give_back([wider.event])
            best = narrower
        self._narrowest_ns = min(self._narrowest_ns or best.width_ns, best.width_ns)
        return best

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
        marks = distinct_marks(spans)
        host_ns = DeviceTimes(marks, opened, closed, step).host_ns
        records = []
        for number, span in enumerate(spans):
            records.append(self._record_of(span, host_ns))
            if not number % _SPANS_A_STEP:
                step()
        self._pool.give_back([event for event, _ in marks])
        self._pool.give_back([opened.event])  # the next window may begin with the closing tie
        return _in_lanes(spans, records)

    def _record_of(self, span: Span, host_ns: Mapping[int, int]) -> SpanRecord:
        begin, end = cast(
            "tuple[CudaMark | _HostMark, CudaMark | _HostMark]", (span.begin, span.end)
        )
        end_ns = host_ns[id(end[0])] if isinstance(end, tuple) else end
        if isinstance(begin, tuple):
            start_ns = host_ns[id(begin[0])]
            if self._record_launches:
                span.arguments["launch_ns"] = begin[1] - start_ns
        else:
            start_ns = begin
        duration_ns = max(0, end_ns - start_ns)
        start_ns -= self._clock.origin_ns
        return span.kind, span.name, span.track, start_ns, duration_ns, span.arguments

    def durations_ns(self, moments: Sequence[tuple[Mark, Mark]]) -> list[int]:
        """Return the device time between two marks; waits for the last one."""
        durations = []
        for (begin, _), (end, _) in cast("Sequence[tuple[CudaMark, CudaMark]]", moments):
            if not end.query():
                end.synchronize()
            durations.append(round(begin.elapsed_time(end) * 1e6))
            self._pool.give_back([begin, end])
        return durations

    def check(self, times: WindowTimes) -> ClockCheck:
        """Return the drift between the ties; 0 where it is less than their widths can tell."""
        opened, closed = cast(Tie, times.opened), cast(Tie, times.closed)
        host_ns = closed.host_ns - opened.host_ns
        surplus_ns = opened.event.elapsed_time(closed.event) * 1e6 - host_ns
        certain = host_ns > 0 and abs(surplus_ns) > (opened.width_ns + closed.width_ns) / 2
        return ClockCheck(
            tie_width_ns=max(opened.width_ns, closed.width_ns),
            drift_ppm=surplus_ns / host_ns * 1e6 if certain else 0.0,
        )

    def counters(self) -> dict[str, float]:
        """Read the device for the window's record."""
        return self._device.counters()


def _in_lanes(spans: Sequence[Span], records: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Cut queueing off: asynchronous work of one communicator runs one after the other.

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


class TorchDevice:
    """The current device, with streams that only the tracer uses."""

    def __init__(self) -> None:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.name = f"GPU-{uuid}"
        self.can_wait_aside = can_wait_aside()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._from = torch.zeros(1, device="cuda")
        self._to = torch.zeros(1).pin_memory()
        self._after: dict[str, torch.cuda.Stream] = {}
        streams = CurrentStream(torch.cuda.current_device())
        self.stream, self.record = streams.identity, streams.record
        self._nvml = Nvml(self.name)

    def new_event(self) -> DeviceEvent:
        """Return an event that takes time."""
        return cast(DeviceEvent, torch._C._CudaEventBase(enable_timing=True))

    def record_aside(self, event: DeviceEvent) -> None:
        """Record on the stream for ties, behind a copy of one number to the host.

        Copies to the host have a queue of their own on the device. Without one the event would
        queue up behind all kernels launched so far where all streams share one queue, as Megatron
        has it (CUDA_DEVICE_MAX_CONNECTIONS=1): 40 ms instead of 40 µs with 40 ms of kernels ahead.
        """
        with torch.cuda.stream(self._aside):
            self._to.copy_(self._from, non_blocking=True)
            event.record(self._aside)

    def record_after(self, event: DeviceEvent, work: AsyncWork, lane: str) -> None:
        """Record when the work is done; a lane's stream holds nothing but such waits."""
        stream = self._after.get(lane)
        if stream is None:
            stream = self._after[lane] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            work.wait()
            event.record(stream)

    def counters(self) -> dict[str, float]:
        """Read clock, power and temperature."""
        return self._nvml.read()


class CurrentStream:
    """The current stream of a thread, without building a new Python object for it every time.

    torch makes one of each `current_stream()`, which takes longer than recording an event. By its
    raw handle, which is to be had cheaply, the one made first is found again. Where torch does not
    tell the handle, it is asked for the stream.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._handle_of: Callable[[int], int] | None = getattr(
            torch._C, "_cuda_getCurrentRawStream", None
        )
        self._known: dict[int, torch.cuda.Stream] = {}

    def identity(self) -> object:
        """Return the handle of the stream on which the calling thread launches now."""
        if self._handle_of is None:
            return torch.cuda.current_stream(self._device)
        return self._handle_of(self._device)

    def record(self, event: DeviceEvent) -> None:
        """Record on the stream on which the calling thread launches now."""
        if self._handle_of is None:
            event.record(torch.cuda.current_stream(self._device))
            return
        handle = self._handle_of(self._device)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = torch.cuda.current_stream(self._device)
        event.record(stream)


def can_wait_aside() -> bool:
    """Tell whether a stream of ours may wait for this work without stopping host or kernels.

    Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1 to order its kernels; a wait on any stream then
    holds up the kernels launched after it, and the overlap that the setting is there for is gone.
    """
    blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
    return not blocking and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
