"""GPU time: CUDA events from a pool, tied to the host's clock once a window.

Nothing in here waits for the device inside a traced iteration. Events are recorded on the current
stream while training runs, and read back by the writer's thread after the window.

    host    ──┬ tie a ──────────────── window ───────────────── tie b ┬──►
    device  ──┴ event                  events                   event ┴──►

A tie is an event on a stream of its own, waited for between two readings of the host's clock; the
narrowest of several is kept. Two ties give the device clock's rate against the host's, so that
drift inside a long window is taken out. What remains is the width of a tie, some µs, and
differs from rank to rank: every rank's GPU is a clock domain of its own.

An event holds its stream up for some 3 µs (`benchmarks.event_cost`), so moments that are the same
share one: where a layer ends the next one begins, with the same tensor, to which nothing has been
done in between.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from typing import cast

from megascan.clock import HostClock, now_ns
from megascan.rankfile import SpanRecord
from megascan.schema import Track
from megascan.tracer.device import Device, EventPool, TensorState
from megascan.tracer.device_times import (
    CudaMark,
    DeviceTimes,
    HostMark,
    Tie,
    distinct_marks,
    wait_for,
)
from megascan.tracer.span import Mark, Span
from megascan.tracer.timer import AsyncWork, ClockCheck, Step, WindowTimes, no_step

_TIE_ATTEMPTS = 5
_TIE_TIMEOUT_NS = 10_000_000_000
"""A device that hangs (a peer died in a collective) must not keep the process from ending."""


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
        self._newest: CudaMark | None = None
        self._complete: TensorState | None = None
        self.domain = f"{clock.domain}:{device.name}:{os.getpid()}"

    def mark(self) -> Mark:
        """An event on the current stream, and the host time of its launch."""
        event = self._pool.take()
        self._device.record(event)
        self._complete = None
        return CudaMark(event, now_ns())

    def mark_at(self, tensor: object, unless: Mark = None) -> Mark:
        """The newest mark if the same tensor was complete at it, else a new one."""
        state, newest = self._complete, self._newest
        if state is not None and newest is not unless and state.is_that_of(tensor):
            return newest
        return self.mark_after(tensor)

    def mark_before(self, tensor: object) -> Mark:
        """As `mark_at`; from now on the tensor no longer counts as complete."""
        mark = self.mark_at(tensor)
        self._complete = None
        return mark

    def mark_after(self, tensor: object) -> Mark:
        """A new mark, at which this tensor is complete."""
        mark = self.mark()
        self._newest, self._complete = cast(CudaMark, mark), self._device.state_of(tensor)
        return mark

    def mark_host(self) -> Mark:
        """Now, on the host."""
        return HostMark(now_ns())

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
        span.end = CudaMark(event, now_ns())
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
        marks = distinct_marks(spans)
        host = DeviceTimes(marks, opened, closed, step)
        records = [self._record(span, host, step) for span in spans]
        self._pool.give_back([mark.event for mark in marks])
        self._pool.give_back([opened.event, closed.event])
        return _in_lanes(spans, records)

    def _record(self, span: Span, host: DeviceTimes, step: Step) -> SpanRecord:
        step()
        start_ns, end_ns = host.host_ns(span.begin), host.host_ns(span.end)
        if self._record_launches and isinstance(span.begin, CudaMark):
            span.arguments["launch_ns"] = span.begin.launch_ns - start_ns
        duration_ns = max(0, end_ns - start_ns)
        start_ns -= self._clock.origin_ns
        return span.kind, span.name, span.track, start_ns, duration_ns, span.arguments

    def durations_ns(self, moments: Sequence[tuple[Mark, Mark]]) -> list[int]:
        """Device time between two marks; waits for the last one."""
        durations = []
        for begin, end in cast("Sequence[tuple[CudaMark, CudaMark]]", moments):
            wait_for(end.event)
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
