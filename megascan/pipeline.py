"""Work on blocks in a few threads, results in order, never more than a few blocks in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


_MOST_WORKERS = 8
"""Past this, one process writing to one disk is the limit."""


def num_workers() -> int:
    """Threads or processes worth having on this machine."""
    allowed = getattr(os, "sched_getaffinity", None)  # a container's share, where it can be asked
    available = len(allowed(0)) if allowed else os.cpu_count() or 1
    return min(available, _MOST_WORKERS)


class Spread(Protocol):
    """A way to work on many items at once."""

    def __call__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Results of `work` in the order of `items`."""


def across_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """By as many threads as there are cores."""
    return ordered_map(work, items, num_workers())


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Iterator[Result]:
    """Results of `work` in the order of `items`; at most num_threads + 1 of them wait at a time.

    Threads help because formatting and compression happen in libraries that release the
    interpreter's lock.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= num_threads + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
