"""The link between the clients' event loop and the thread that computes, and the server's metrics.

Clients' handlers submit rows and await answers; the engine, in another thread, asks `inbox` for
what has come and hands each step's answers to `deliver`. A handler that ends early, because its
client is gone or has its stop string, cancels its rows: they leave the batch before the next step.
`Metrics` counts requests and tokens, and writes them as text for Prometheus.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from training.generation.engine import NOTHING, Commands, GenerationCallback
from training.generation.request import Answer, Request
from training.generation.scheduler import Scheduler, Step

# Upper ends of the histograms' buckets: from a small model's token to a long prompt in a queue.
_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


class RequestOutcome(StrEnum):
    """How a row or a request has ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class Histogram:
    """Durations in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of Prometheus' text format: cumulated buckets, sum and number."""
        total = 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum_s:.6f}"
        yield f"{name}_count {total}"


class Metrics(GenerationCallback):
    """Counters of one engine; the engine reports steps, the service reports requests."""

    def __init__(self, *, num_slots: int) -> None:
        self.first_token_s = Histogram()
        self.next_token_s = Histogram()
        self._step_s = Histogram()
        self._requests = dict.fromkeys(RequestOutcome, 0)
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._gauges = {
            "rows_running": ("Rows in the batch.", 0),
            "rows_waiting": ("Rows that wait for a place in the batch.", 0),
            "rows_limit": ("Places in the batch.", num_slots),
            "cache_bytes": ("Memory of keys and values on rank 0.", 0),
        }

    def count_request(self, outcome: RequestOutcome) -> None:
        """Count the end of a row, or a request that was refused."""
        self._requests[outcome] += 1

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Time a step."""
        began = time.monotonic()
        yield
        self._step_s.observe(time.monotonic() - began)
        self._num_prompt_tokens += step.num_prompt_tokens

    def answered(self, scheduler: Scheduler, answers: Sequence[Answer]) -> None:
        """Count generated tokens, and note how many rows run and wait."""
        self._num_generated_tokens += sum(answer.token is not None for answer in answers)
        self._set("rows_running", len(scheduler.rows))
        self._set("rows_waiting", len(scheduler.waiting))

    def note_cache(self, num_bytes: int) -> None:
        """Remember the cache's memory, which is known when the model is built."""
        self._set("cache_bytes", num_bytes)

    def _set(self, name: str, value: int) -> None:
        self._gauges[name] = (self._gauges[name][0], value)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Rows by how they ended; refused requests.")
        for outcome, count in self._requests.items():
            yield f'megascan_requests_total{{outcome="{outcome}"}} {count}'
        for name, text, count in (
            ("prompt_tokens_total", "Tokens of prompts that were read.", self._num_prompt_tokens),
            ("generated_tokens_total", "Tokens generated.", self._num_generated_tokens),
        ):
            yield from _head(name, "counter", text)
            yield f"megascan_{name} {count}"
        for name, (text, value) in self._gauges.items():
            yield from _head(name, "gauge", text)
            yield f"megascan_{name} {value}"
        for name, text, histogram in (
            ("first_token_seconds", "From a request to its first token.", self.first_token_s),
            ("next_token_seconds", "From one token of a row to the next.", self.next_token_s),
            ("step_seconds", "One step of the batch.", self._step_s),
        ):
            yield from _head(name, "histogram", text)
            yield from histogram.lines(f"megascan_{name}")


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP megascan_{name} {text}"
    yield f"# TYPE megascan_{name} {kind}"


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

    def __init__(self, service: Service) -> None:
        self._service = service
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._open: dict[int, int] = {}

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
        """Stop one row whose further tokens nobody wants."""
        identifier = self._open.pop(index, None)
        if identifier is not None:
            self._service.cancel([identifier])

    def close(self) -> None:
        """Stop all rows that are not finished."""
        if self._open:
            self._service.cancel(list(self._open.values()))
            self._open.clear()


class Service:
    """Passes requests of clients to one engine, and answers back."""

    def __init__(self, metrics: Metrics, *, max_waiting: int) -> None:
        self.metrics = metrics
        self._max_waiting = max_waiting
        self._incoming: queue.SimpleQueue[Request | int | str | None] = queue.SimpleQueue()
        """New requests, identifiers of cancelled rows, asides; None: the engine is to end."""
        self._identifiers = itertools.count()
        self._places: dict[int, _Place] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        """Return whether the engine has stopped."""
        return self._is_ended

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Give rows identifiers and hand them to the engine; called on the event loop.

        Raises BusyError when too many rows are open already, and EndedError after the end.
        """
        if self._is_ended:
            raise EndedError
        if len(self._places) + len(requests) > self._max_waiting:
            raise BusyError
        self._loop = asyncio.get_running_loop()
        submission = Submission(self)
        for index, request in enumerate(requests):
            identifier = next(self._identifiers)
            place = _Place(submission=submission, index=index, submitted=time.monotonic())
            self._places[identifier] = place
            submission._open[index] = identifier
            self._incoming.put(replace(request, identifier=identifier))
        return submission

    def cancel(self, identifiers: Sequence[int]) -> None:
        """Have rows leave the batch; called on the event loop."""
        for identifier in identifiers:
            if self._places.pop(identifier, None) is not None:
                self.metrics.count_request(RequestOutcome.CANCELLED)
                self._incoming.put(identifier)

    def tell(self, aside: str) -> None:
        """Send an aside (a message) to the engine callbacks of all ranks."""
        self._incoming.put(aside)

    def stop(self) -> None:
        """Have the engine end before its next step; may be called from a signal's handler."""
        self._incoming.put(None)

    def inbox(self, waits: bool) -> Commands:
        """Return to the engine what has come since its last call; with `waits` wait for something.

        Called on the engine's thread.
        """
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
        """Pass the answers of a step on to clients; called on the engine's thread."""
        if answers and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no client is left
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
                self.metrics.count_request(RequestOutcome.FINISHED)
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
