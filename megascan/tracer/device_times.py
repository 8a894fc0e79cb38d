"""From the events of a window to times on the host's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from megascan.tracer.device import Event
from megascan.tracer.span import Mark, Span
from megascan.tracer.timer import Step

_MAX_REFERENCE_DISTANCE_MS = 250.0
_RATE_TOLERANCE = 5e-6
"""Crystals differ by some ppm; a rate less certain than this would add noise, not take it out."""


@dataclass(slots=True)
class CudaMark:
    """An event, and when the host launched it."""

    event: Event
    launch_ns: int


@dataclass(slots=True)
class HostMark:
    """A time of the host's clock."""

    time_ns: int


@dataclass(frozen=True)
class Tie:
    """The device passed `event` when the host's clock read `host_ns`, give or take `width_ns`/2."""

    event: Event
    host_ns: int
    width_ns: int


class DeviceTimes:
    """Host times of the events of one window.

    CUDA gives differences of events as float32 milliseconds, which is exact to 30 ns below half a
    second only. Marks are therefore measured against a reference that moves along with them.
    """

    def __init__(self, marks: Sequence[CudaMark], opened: Tie, closed: Tie, step: Step) -> None:
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
            wait_for(event)
            elapsed_ms = reference.elapsed_time(event)
            times[id(event)] = reference_ms + elapsed_ms
            if elapsed_ms > _MAX_REFERENCE_DISTANCE_MS:
                reference, reference_ms = event, times[id(event)]
            step()
        return times, reference_ms + reference.elapsed_time(closed)

    def host_ns(self, mark: Mark) -> int:
        """Host time of a mark, rounded to ns."""
        if isinstance(mark, HostMark):
            return mark.time_ns
        elapsed_ms = self._times[id(cast(CudaMark, mark).event)]
        return round(self._start_ns + elapsed_ms * self._ns_per_ms)


def wait_for(event: Event) -> None:
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


def distinct_marks(spans: Sequence[Span]) -> list[CudaMark]:
    """Each mark once: the messages of one exchange share theirs."""
    marks = {
        id(mark): mark
        for span in spans
        for mark in (span.begin, span.end)
        if isinstance(mark, CudaMark)
    }
    return list(marks.values())
