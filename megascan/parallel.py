"""Divide work among threads or processes and take the results in order.

    items     0 1 2 3 4 5 …       handed out only a few ahead of the result that is waited for
    worker 0  ├─0─┤├2┤├──4─
    worker 1  ├1┤├───3───┤├5
    results      0 1 2 3 4 …      who takes them slowly holds the workers up, so memory stays flat

Threads (`across_threads`) suit long calls of libraries that release the interpreter's lock, such as
making output: all memory is shared. Processes (`across_processes`) suit work that holds the lock,
such as reading: they are forked, so that the work and its items need no copy on the way there, and
only results are pickled. Both are pools of `concurrent.futures`. `process_pool` and `in_order` are
the two parts of which every such way is made; `training.data.documents` uses them, too.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Literal, Protocol, TypeVar, cast

from megascan.errors import MissingError

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_WORKERS = 8
"""Past this, one process writing to one disk is the limit."""
_AHEAD = 2
"""Items a worker may hold beyond the one that is waited for, so that it need not wait itself."""


class Spread(Protocol):
    """A way to work on many items at once."""

    def __call__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results of `work` in the order of `items`."""


def num_workers() -> int:
    """Return how many threads or processes are worth having on this machine."""
    allowed = getattr(os, "sched_getaffinity", None)  # a container's share, where it can be asked
    available = len(allowed(0)) if allowed else os.cpu_count() or 1
    return min(available, _MOST_WORKERS)


def across_threads(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int | None = None
) -> Iterator[Result]:
    """Yield results by threads, as many as there are cores; at most one more than those wait."""
    count = num_threads or num_workers()
    pool = ThreadPoolExecutor(count)
    try:
        yield from in_order(pool, work, items, most_waiting=count + 1)
    finally:
        pool.shutdown(cancel_futures=True)


def can_fork() -> bool:
    """Tell whether this process may be copied: no other thread of it could hold a lock."""
    return sys.platform == "linux" and threading.active_count() == 1


def across_processes(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield results by forked processes, as many as there are cores.

    Threads stand in where there is one core, or this process cannot be forked. Raises what `work`
    raises, in the order of the items, and MissingError when a process dies.
    """
    count = min(num_workers(), len(items))
    if count < 2 or not can_fork():
        yield from across_threads(work, items)
        return
    advice = "run on a larger machine or on fewer ranks of the trace"
    with process_pool(count, "fork", advice, lambda place: work(items[place])) as pool:
        most_waiting = (1 + _AHEAD) * count
        found = in_order(pool, _inherited_work, range(len(items)), most_waiting=most_waiting)
        yield from cast("Iterator[Result]", found)


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], *, most_waiting: int
) -> Iterator[Result]:
    """Yield the results of `work` in the order of `items`, at most `most_waiting` under way.

    What is under way when nobody wants more is left to the pool: who shuts it down cancels it.
    """
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= most_waiting:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def process_pool(
    count: int,
    start: Literal["fork", "spawn"],
    advice: str,
    inherited: Callable[[int], object] | None = None,
) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes that end with the block, in the middle of their work if need be.

    Each worker watches the reading end of a pipe whose only writing end this process holds: it
    closes when the block ends and also when this process is killed. `inherited` reaches forked
    workers without being pickled. Raises MissingError with `advice` when a worker dies.
    """
    context = multiprocessing.get_context(start)
    watched, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        count, context, initializer=_begin, initargs=(watched, held, inherited)
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise MissingError(
            f"a process that did a part of the work was killed, most likely for want of memory; "
            f"{advice}"
        ) from error
    finally:
        # Workers that vanish while a batch is being written to them leave the pool's own thread
        # writing for ever: what is on its way is read first, if that is a matter of a moment.
        pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _GRACE_S
        while multiprocessing.active_children() and time.monotonic() < deadline:
            time.sleep(0.01)
        held.close()
        pool.shutdown(cancel_futures=True)
        watched.close()


_GRACE_S = 2.0
"""Seconds that workers of a pool get for what is already on its way to them."""
_INHERITED: list[Callable[[int], object]] = []
"""In a forked worker: what `_inherited_work` calls; empty in every other process."""


def _begin(
    watched: Connection, held: Connection, inherited: Callable[[int], object] | None
) -> None:
    """Start a worker's life: the parent alone answers an interrupt, and its end is the worker's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held.close()
    gc.disable()  # it would look at all that the parent has, and so copy it
    if inherited is not None:
        _INHERITED.append(inherited)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()


def _end_with(watched: Connection) -> None:
    with suppress(EOFError, OSError):
        watched.recv()
    os._exit(1)


def _inherited_work(place: int) -> object:
    return _INHERITED[0](place)
