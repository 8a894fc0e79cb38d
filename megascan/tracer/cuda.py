"""GPU time: CUDA events from a pool, tied to the host's clock once a window.

    CudaTimer      the timer: marks are events, recorded on the stream that training uses
    DeviceTimes    the times of a window's events on the host's clock
    TorchDevice    the GPU of this process, as torch.cuda shows it

Nothing here waits for the device inside a traced iteration. Events are recorded on the current
stream while training runs, and read back by the writer's thread after the window.

    host    ──┬ tie a ──────────────── window ───────────────── tie b ┬──►
    device  ──┴ event                  events                   event ┴──►

A tie is an event on a stream of its own, waited for between two readings of the host's clock; the
narrowest of several ties is kept. Two ties give the rate of the device clock against the host's, so
that drift inside a long window is taken out. What remains is the width of a tie, some µs, which
differs from rank to rank: every rank's GPU is a clock domain of its own. Of two consecutive windows
the second opens with the tie that closed the first: between them the device is often idle, so that
another tie would make the step longer.

An event holds its stream up for some 3 µs (`benchmarks.event_cost`), so equal moments share one
event: where a layer ends the next layer begins, with the same tensor, which nothing has changed in
between.

Between two of torch's calls nothing of ours is in the processor's caches, so the cost of a mark is
the memory it touches: tuples are used instead of objects, few calls, and C methods where torch has
a Python layer above them (`benchmarks.hot_path --cold`).
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol, TypeAlias, cast

import torch

from megascan.rankfile import SpanRecord
from megascan.schema import Track
from megascan.tracer.nvml import Nvml
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


class DeviceEvent(Protocol):
    """The part of torch.cuda.Event that the timer uses."""

    def record(self, stream: object) -> None:
        """Take the time when the stream reaches this event."""

    def query(self) -> bool:
        """Return whether the time is taken."""

    def synchronize(self) -> None:
        """Wait until the time is taken."""

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        """Return milliseconds until another event."""


class TimedDevice(Protocol):
    """What the timer needs of a GPU; `TorchDevice` has it from torch.cuda."""

    name: str
    can_wait_aside: bool
    """Whether a stream of the tracer can wait for NCCL's work without holding training up."""

    def new_event(self) -> DeviceEvent:
        """Return an event that takes time."""

    def stream(self) -> object:
        """Return an identity of the current stream, as cheaply as possible."""

    def record(self, event: DeviceEvent) -> None:
        """Record an event on the current stream, as cheaply as possible."""

    def record_aside(self, event: DeviceEvent) -> None:
        """Record an event on a stream of the timer's own, on which nothing else ever runs."""

    def record_after(self, event: DeviceEvent, work: AsyncWork, lane: str) -> None:
        """Record an event when `work` is done, on a stream of the timer's own for each lane."""

    def begin_counting(self) -> None:
        """Count what the device does, for `counters`, from now on."""

    def counters(self) -> dict[str, float]:
        """Read the device; empty without NVML."""


class EventPool:
    """Events that are used again: making an event costs more than recording it.

    The training thread takes events, the writer's gives them back; a deque needs no lock for that.
    """

    def __init__(self, make: Callable[[], DeviceEvent]) -> None:
        self._make = make
        self._free: deque[DeviceEvent] = deque()

        self.take_free: Callable[[], DeviceEvent] = self._free.popleft
        """Return a free event; raises IndexError if no event is free."""

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
"""How many events and spans the writer's thread handles in some 100 µs, between two looks at the
clock."""
_RATE_TOLERANCE = 5e-6
"""A less certain rate would add noise instead of removing drift: crystals differ by some ppm."""


CudaMark: TypeAlias = tuple[DeviceEvent, int]
"""A CUDA event, and the host time at which it was launched."""

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

    CUDA gives differences of events as float32 milliseconds, which are exact to 30 ns only below
    half a second. Marks are therefore measured against a reference event that moves along with
    them.
    """

    def __init__(self, marks: Sequence[CudaMark], opened: Tie, closed: Tie, step: Step) -> None:
        ordered = [event for event, _ in sorted(marks, key=itemgetter(1))]
        times, closing_ms = self._read(ordered, opened.event, closed.event, step)
        start_ns, ns_per_ms = _fit(opened, closed, closing_ms)
        self.host_ns = {
            identity: round(start_ns + elapsed_ms * ns_per_ms)
            for identity, elapsed_ms in times.items()
        }
        """Host time of each event by the event's identity, rounded to ns."""

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
            if not event.query():  # nearly all are done, and save a change of threads
                event.synchronize()
            elapsed_ms = reference.elapsed_time(event)
            times[id(event)] = reference_ms + elapsed_ms
            if elapsed_ms > _MAX_REFERENCE_DISTANCE_MS:
                reference, reference_ms = event, times[id(event)]
            if not number % _EVENTS_A_STEP:
                step()
        return times, reference_ms + reference.elapsed_time(closed)


def _fit(opened: Tie, closed: Tie, distance_ms: float) -> tuple[float, float]:
    """Return the host time of the opening tie, and host ns a device millisecond.

    The rate is taken from the ties only if they are far enough apart to make it accurate despite
    their width. Otherwise both clocks are assumed to run alike, and the ties are averaged.
    """
    host_ns = closed.host_ns - opened.host_ns
    if host_ns > 0 and (opened.width_ns + closed.width_ns) / host_ns < _RATE_TOLERANCE:
        return float(opened.host_ns), host_ns / distance_ms
    return opened.host_ns + (host_ns - distance_ms * 1e6) / 2, 1e6


def distinct_marks(spans: Sequence[Span]) -> list[CudaMark]:
    """Return each event's mark once: the messages of one exchange share their marks."""
    marks = {
        id(mark): mark
        for span in spans
        for mark in (span.begin, span.end)
        if isinstance(mark, tuple)
    }
    return list(marks.values())


_TIE_ATTEMPTS = 5
_NARROW_RATIO = 1.25
"""A tie is narrow enough if it is at most this factor wider than the narrowest tie of the run."""
_TIE_LASTS_NS = 10_000_000
"""A tie may be used again for this long, in which clocks that differ by 100 ppm, more than crystals
do, drift apart by 1 µs."""
_TIE_TIMEOUT_NS = 10_000_000_000
"""How long to wait for a tie: a hanging device (a peer died in a collective) must not keep the
process from ending."""


class CudaTimer:
    """Timer whose marks are CUDA events on the current stream; host spans use the host's clock.

    With `record_launches`, spans carry `launch_ns`: the time at which the host launched the span,
    relative to its begin on the device. Near zero, the device was waiting for the host.
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
        """Take the current stream as the stream on which training computes."""
        self._stream = self._device.stream()

    def is_aside(self) -> bool:
        """Return whether the current stream is not training's; FSDP has streams for collectives."""
        return self._device.stream() != self._stream

    def mark(self) -> Mark:
        """Record an event on the current stream, and the host time of its launch."""
        return self.mark_after(None)

    def mark_at(self, tensor: object, unless: Mark = None) -> Mark:
        """Return the newest mark if the same tensor was complete at that mark, else a new mark.

        A weak reference tells whether the tensor is the same: a later tensor may get the identity
        of an earlier tensor, but not while the earlier tensor lives.
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
        """Return a new mark, and note that the tensor is complete at this mark.

        Nothing is noted for tensors of a subclass, whose memory other tensors hold, and for tensors
        made in inference mode, whose changes torch does not count.
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
        """Record the work's end on a stream of the timer, which waits without holding training up.

        Waiting makes torch drop its protection of the work's tensors, so the caller must keep them
        until the trainer's own wait. Only NCCL's works wait in a stream; waiting for works of
        another backend would stop the host.
        """
        if "nccl" not in backend or not self._device.can_wait_aside:
            return False
        event = self._pool.take()
        self._device.record_after(event, work, span.lane)
        span.end = event, now_ns()
        return True

    def tie(self, last: object = None) -> Tie:
        """Relate the device's clock to the host's; this takes some 10 µs, between iterations.

        The training thread waits for each attempt, so the first tie that is about as narrow as any
        before is taken, and a `last` tie that was made just now is used again.
        """
        if isinstance(last, Tie) and now_ns() - last.host_ns < _TIE_LASTS_NS:
            return last
        if not self._narrowest_ns:
            self._device.begin_counting()
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
        """Return spans in ns relative to the origin; waits for the last event."""
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
        """Return the device time between each pair of marks; waits for the last mark."""
        durations = []
        for (begin, _), (end, _) in cast("Sequence[tuple[CudaMark, CudaMark]]", moments):
            if not end.query():
                end.synchronize()
            durations.append(round(begin.elapsed_time(end) * 1e6))
            self._pool.give_back([begin, end])
        return durations

    def check(self, times: WindowTimes) -> ClockCheck:
        """Return the width of the ties and the drift between them; 0 if it is within the widths."""
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
    """Cut queueing off the spans of asynchronous work, which runs one after the other in a lane.

    Work is launched long before its turn comes; its span starts when the work before has ended.
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
        """Record on the stream for ties, after a copy of one number to the host.

        Copies to the host have a queue of their own on the device. Without a copy the event would
        wait for all kernels launched so far where all streams share one queue, as with Megatron
        (CUDA_DEVICE_MAX_CONNECTIONS=1): 40 ms instead of 40 µs with 40 ms of kernels ahead.
        """
        with torch.cuda.stream(self._aside):
            self._to.copy_(self._from, non_blocking=True)
            event.record(self._aside)

    def record_after(self, event: DeviceEvent, work: AsyncWork, lane: str) -> None:
        """Record when the work is done, on the lane's stream, on which nothing but waits runs."""
        stream = self._after.get(lane)
        if stream is None:
            stream = self._after[lane] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            work.wait()
            event.record(stream)

    def begin_counting(self) -> None:
        """Have NVML count from now on."""
        self._nvml.begin()

    def counters(self) -> dict[str, float]:
        """Read what NVML says of it."""
        return self._nvml.read()


class CurrentStream:
    """The current stream of a thread, without building a new Python object for it every time.

    torch builds an object in each `current_stream()`, which takes longer than recording an event.
    So the first object of each stream is kept, and found by the stream's raw handle, which torch
    returns fast. If torch does not give the handle, it is asked for the stream each time.
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
    """Return whether a stream of ours may wait for NCCL's work without stopping host or kernels.

    Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1 to order its kernels; a wait on any stream then
    holds up all kernels launched after it, and the overlap for which the setting exists is lost.
    """
    blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
    return not blocking and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
