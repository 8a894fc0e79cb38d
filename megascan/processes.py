"""Work in forked processes, for steps that hold the interpreter's lock: results in order.

Between two calls of a library that releases the lock, a thread waits for it; the more threads, the
longer. Where the calls are long (making output), threads do as well and share all memory.

A child inherits the work and its items as they are, so nothing is copied on the way there. It takes
numbers of items from a socket and sends back parcels (`megascan.parcels`); a closed socket ends
it, also when its parent is killed.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar, cast

from megascan.errors import MissingError
from megascan.parcels import receive_parcel, send_parcel
from megascan.pipeline import across_threads, num_workers

Item = TypeVar("Item")
Result = TypeVar("Result")

_NUMBER_BYTES = 8
_AHEAD = 2
"""Items a worker holds, so that it need not wait for its parent."""


def can_fork() -> bool:
    """Whether this process may be copied: no other thread of it could hold a lock."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and threading.active_count() == 1


def across_processes(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results of `work` in the order of `items`, by as many processes as there are cores.

    At most a few results a process wait at a time. By threads where there is but one core or this
    process cannot be forked. Raises what `work` raises, and MissingError when a process dies.
    """
    count = min(num_workers(), len(items))
    if count < 2 or not can_fork():
        yield from across_threads(work, items)
        return
    with ExitStack() as stack:
        workers: list[_Worker[Item, Result]] = []
        for _ in range(count):
            workers.append(_Worker.started(work, items, workers))
            stack.callback(workers[-1].close)
        yield from _Gathering(workers, len(items)).results()


@dataclass(frozen=True)
class _Failure:
    """What the work on an item raised."""

    error: Exception


class _Worker(Generic[Item, Result]):
    """A child process and the items that it holds."""

    def __init__(self, process: BaseProcess, connection: socket.socket) -> None:
        self.connection = connection
        self.held: list[int] = []
        self._process = process

    @classmethod
    def started(
        cls,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        siblings: Sequence[_Worker[Item, Result]],
    ) -> _Worker[Item, Result]:
        """A new one. It must not keep open what its siblings' parent holds, nor its own's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parents = [ours, *(sibling.connection for sibling in siblings)]
        process = get_context("fork").Process(
            target=_serve, args=(theirs, parents, work, items), daemon=True
        )
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, place: int) -> None:
        """Let it work on an item."""
        self.held.append(place)
        try:
            self.connection.send(place.to_bytes(_NUMBER_BYTES, "little"))
        except ConnectionError as error:
            raise self._death() from error

    def take(self) -> tuple[int, Result | _Failure]:
        """(place, outcome) of the item it has finished."""
        try:
            outcome = receive_parcel(self.connection)
        except EOFError as error:
            raise self._death() from error
        return self.held.pop(0), cast("Result | _Failure", outcome)

    def _death(self) -> MissingError:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return MissingError(
            f"a process that did a part of the work ended with {how}, most likely for want of "
            "memory; run on a larger machine or on fewer ranks of the trace"
        )

    def close(self) -> None:
        """End it, in the middle of its work if need be."""
        self.connection.close()
        if self.held:
            self._process.kill()
        self._process.join()


class _Gathering(Generic[Item, Result]):
    """Hands items out and puts results in order."""

    def __init__(self, workers: Sequence[_Worker[Item, Result]], num_items: int) -> None:
        self._workers = workers
        self._num_items = num_items
        self._num_given = 0
        self._early: dict[int, Result | _Failure] = {}

    def results(self) -> Iterator[Result]:
        """In order, errors too: of several damaged files always the same one is named."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            for place in range(self._num_items):
                self._hand_out(place)
                while place not in self._early:
                    for key, _ in selector.select():
                        number, outcome = key.data.take()
                        self._early[number] = outcome
                    self._hand_out(place)
                next_one = self._early.pop(place)
                if isinstance(next_one, _Failure):
                    raise next_one.error
                yield next_one

    def _hand_out(self, next_place: int) -> None:
        """Give idle workers items, none too far from the one that is waited for."""
        last = min(self._num_items, next_place + (_AHEAD + 1) * len(self._workers))
        for _ in range(_AHEAD):
            for worker in self._workers:
                if len(worker.held) < _AHEAD and self._num_given < last:
                    worker.give(self._num_given)
                    self._num_given += 1


def _serve(
    connection: socket.socket,
    parents: Sequence[socket.socket],
    work: Callable[[Item], Result],
    items: Sequence[Item],
) -> None:
    """Life of a worker: the parent alone answers an interrupt, and closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # all that the parent has would be looked at, and so be copied
    for each in parents:
        each.close()
    with suppress(ConnectionError):
        while message := connection.recv(_NUMBER_BYTES):
            send_parcel(connection, _outcome(work, items[int.from_bytes(message, "little")]))


def _outcome(work: Callable[[Item], Result], item: Item) -> Result | _Failure:
    try:
        return work(item)
    except Exception as error:
        return _Failure(error)
