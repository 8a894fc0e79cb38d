"""Between the clients' event loop and the thread that computes.

Clients' handlers submit rows and await their answers; the engine, in another thread, asks `inbox`
for what has come and hands each step's answers to `deliver`. A handler that ends early, because its
client is gone or has its stop string, cancels its rows: they leave the batch before the next step.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from training.generation.engine import NOTHING, Commands
from training.generation.metrics import Metrics, Outcome
from training.generation.request import Answer, Request

_Item = tuple[int, Answer] | None


class BusyError(Exception):
    """Too many requests wait already."""


class EndedError(Exception):
    """The engine has ended; nothing will be answered any more."""


@dataclass
class _Place:
    """Where the answers of one row go."""

    submission: Submission
    index: int
    submitted: float
    last_token: float | None = None


class Submission:
    """The rows of one client's request, and their answers in the order in which they come."""

    def __init__(self, service: Service, num_rows: int) -> None:
        self._service = service
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._open: dict[int, int] = {}
        self._num_rows = num_rows

    async def answers(self) -> AsyncIterator[tuple[int, Answer]]:
        """Yield `(row, answer)` until every row is finished or cancelled."""
        while self._open:
            item = await self._items.get()
            if item is None:
                raise EndedError
            index, answer = item
            if index not in self._open:
                continue
            if answer.finish_reason is not None:
                del self._open[index]
            yield index, answer

    def cancel(self, index: int) -> None:
        """Stop one row, whose rest nobody wants."""
        identifier = self._open.pop(index, None)
        if identifier is not None:
            self._service.cancel([identifier])

    def close(self) -> None:
        """Stop all rows that are not finished."""
        if self._open:
            self._service.cancel(list(self._open.values()))
            self._open.clear()


class Service:
    """One engine's clients."""

    def __init__(self, metrics: Metrics, *, max_waiting: int) -> None:
        self.metrics = metrics
        self._max_waiting = max_waiting
        self._incoming: queue.SimpleQueue[Request | int | str | None] = queue.SimpleQueue()
        self._identifiers = itertools.count()
        self._places: dict[int, _Place] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        """Return whether the engine has stopped."""
        return self._is_ended

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand rows to the engine; their identifiers are given here.

        Raises BusyError when too many rows are open already and EndedError after the end. Called
        on the event loop.
        """
        if self._is_ended:
            raise EndedError
        if len(self._places) + len(requests) > self._max_waiting:
            raise BusyError
        self._loop = asyncio.get_running_loop()
        submission = Submission(self, len(requests))
        for index, request in enumerate(requests):
            identifier = next(self._identifiers)
            place = _Place(submission=submission, index=index, submitted=time.monotonic())
            self._places[identifier] = place
            submission._open[index] = identifier
            self._incoming.put(replace(request, identifier=identifier))
        return submission

    def cancel(self, identifiers: Sequence[int]) -> None:
        """Let rows leave the batch; called on the event loop."""
        for identifier in identifiers:
            if self._places.pop(identifier, None) is not None:
                self.metrics.count_request(Outcome.CANCELLED)
                self._incoming.put(identifier)

    def tell(self, aside: str) -> None:
        """Hand an aside to the callbacks of all ranks."""
        self._incoming.put(aside)

    def stop(self) -> None:
        """Let the engine end before its next step; may be called from a signal's handler."""
        self._incoming.put(None)

    def inbox(self, waits: bool) -> Commands:
        """Give the engine what has come since it asked last."""
        items = []
        if waits:
            items.append(self._incoming.get())
        with suppress(queue.Empty):
            while True:
                items.append(self._incoming.get_nowait())
        if not items:
            return NOTHING
        gone = {item for item in items if isinstance(item, int)}
        requests = [item for item in items if isinstance(item, Request)]
        return Commands(
            requests=tuple(one for one in requests if one.identifier not in gone),
            cancelled=tuple(gone),
            is_last=None in items,
            asides=tuple(item for item in items if isinstance(item, str)),
        )

    def deliver(self, answers: Sequence[Answer]) -> None:
        """Pass on what a step has brought; called on the engine's thread."""
        if answers and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody is there any more
                self._loop.call_soon_threadsafe(self._spread, tuple(answers), time.monotonic())

    def end(self) -> None:
        """Tell all clients that nothing more will come; called on the engine's thread."""
        self._is_ended = True
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end_all)

    def _spread(self, answers: Sequence[Answer], now: float) -> None:
        for answer in answers:
            place = self._places.get(answer.identifier)
            if place is None:
                continue
            if answer.token is not None:
                self._observe(place, now)
            if answer.finish_reason is not None:
                del self._places[answer.identifier]
                self.metrics.count_request(Outcome.FINISHED)
            place.submission._items.put_nowait((place.index, answer))

    def _observe(self, place: _Place, now: float) -> None:
        if place.last_token is None:
            self.metrics.first_token_s.observe(now - place.submitted)
        else:
            self.metrics.next_token_s.observe(now - place.last_token)
        place.last_token = now

    def _end_all(self) -> None:
        for place in self._places.values():
            place.submission._items.put_nowait(None)
        self._places.clear()
