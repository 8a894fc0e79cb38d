"""What the timer needs of a GPU, and the events that it takes time with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from megascan.tracer.timer import AsyncWork


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


class TensorState(Protocol):
    """A tensor's memory and what was done to it, at some time."""

    def is_that_of(self, tensor: object) -> bool:
        """Whether a tensor lies in the same memory, and nothing was done to it since."""


class Device(Protocol):
    """What the timer needs of a GPU; `TorchDevice` has it from torch.cuda."""

    name: str
    can_wait_aside: bool
    """Whether a stream of our own can wait for NCCL's work without holding anybody up."""

    def new_event(self) -> Event:
        """An event that takes time."""

    def record(self, event: Event) -> None:
        """Record on the current stream, with as little ado as can be."""

    def state_of(self, tensor: object) -> TensorState | None:
        """What tells whether anything is done to a tensor; None for what is none."""

    def record_aside(self, event: Event) -> None:
        """Record on a stream of the timer's own, on which nothing else ever runs."""

    def record_after(self, event: Event, work: AsyncWork, lane: str) -> None:
        """Record when `work` is done, on a stream of the timer's own, one for each lane."""

    def counters(self) -> dict[str, float]:
        """Readings of the device, empty without NVML."""


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
