"""Stands for a GPU whose memory and events two processes share: the CPU's memory, in files.

Copies are done at once, so waiting for an event is no more than a check: what is waited for must
have been recorded, or the copy would read a message that is not there, or overwrite one that nobody
has taken.
"""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class _Event:
    """Counts how often it was recorded, where both processes see it."""

    def __init__(self, count: torch.Tensor, path: str, *, ahead: int = 0) -> None:
        self.path = path
        self._count = count
        self._num_waits = 0
        self._ahead = ahead
        """So many waits may come before the first record."""

    def record(self) -> None:
        """Count."""
        self._count += 1

    def wait(self) -> None:
        """Check that it was recorded for this wait."""
        self._num_waits += 1
        missing = self._num_waits - self._ahead - int(self._count)
        if missing > 0:
            raise AssertionError(f"wait {self._num_waits} of an event before its record")

    def query(self) -> bool:
        """Say that it has come."""
        return True


class SharedMemory:
    """In place of `training.pipeline.copies.Gpu`."""

    def __init__(self) -> None:
        self._path = ""

    def slots(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory in a file."""
        self._path, slots = _file((number, *shape), dtype)
        return slots

    def event(self) -> _Event:
        """Return an event in a file."""
        path, count = _file((1,), torch.int64)
        return _Event(count, path)

    def own_event(self) -> _Event:
        """Return an event that has come."""
        return _Event(torch.ones(1), "")

    def settle(self) -> None:
        """Do nothing: what was launched is done."""

    def offer(self, slots: torch.Tensor | None, events: Sequence[_Event]) -> bytes:
        """Return the files' names."""
        kind = None if slots is None else (self._path, tuple(slots.shape), slots.dtype)
        return pickle.dumps((kind, [event.path for event in events]))

    def accept(self, offer: bytes) -> tuple[torch.Tensor | None, list[_Event]]:
        """Open the files; a sender's first wait for a slot finds it free."""
        kind, paths = pickle.loads(offer)
        slots = None if kind is None else _opened(*kind)
        counts = [_opened(path, (1,), torch.int64) for path in paths]
        ahead = 0 if slots is None else 1
        events = [_Event(c, path, ahead=ahead) for c, path in zip(counts, paths, strict=True)]
        return slots, events

    def aside(self, reads: torch.Tensor | None = None) -> AbstractContextManager[object]:
        """Return no context: there is one stream."""
        del reads
        return nullcontext()


class Separate(SharedMemory):
    """Processes that cannot open each other's memory, as in containers of their own."""

    def accept(self, offer: bytes) -> tuple[torch.Tensor | None, list[_Event]]:
        """Fail."""
        raise RuntimeError("no such memory here")


def _file(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    with tempfile.NamedTemporaryFile(prefix="slots-", delete=False) as file:
        file.truncate(math.prod(shape) * dtype.itemsize)
    return file.name, _opened(file.name, shape, dtype)


def _opened(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
