"""Use a Dask cluster where one machine is too small: its workers hold the shards of a trace.

    workers    some rank files → a shard, kept there; its ends        client   match, align
    workers    clocks, waits, self times, tracks → kept there; sums   client   summary, head
    workers    a block of rows → its bytes, gzipped                   client   blocks → the file

Every task is the plain function that also runs locally (`megascan.parallel.Workers`), and results
are taken in order, so the output is the same to the bit. Spans do not travel: Dask runs a task
where the shard that it asks for is. If a worker dies, another reads its shards again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import TypeVar, cast

import pyarrow as pa
from distributed import Client, Future, KilledWorker
from distributed.client import FutureCancelledError

from megascan.errors import InputError, MegaScanError, MissingError, UsageError
from megascan.parallel import Kept, Task, Workers
from megascan.schema import SCHEMA_VERSION

__all__ = ["Cluster", "connect"]

Result = TypeVar("Result")

_EQUAL_EVERYWHERE = ("numpy", "pyarrow", "isal", "perfetto")
"""Packages whose version may change a byte of the output: workers need the versions of this
process."""


@dataclass(frozen=True)
class WorkerView:
    """What a worker has: versions by package, and how many of the rank files it can read."""

    versions: dict[str, str]
    num_readable: int


def look(paths: Sequence[Path]) -> WorkerView:
    """Return the package versions of this process and how many of `paths` it can read."""
    versions = {"MegaScan's schema": str(SCHEMA_VERSION)}
    for name in _EQUAL_EVERYWHERE:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return WorkerView(versions, sum(os.access(path, os.R_OK) for path in paths))


_CONNECT_SECONDS = 10
_PATIENCE_SECONDS = 15.0
"""How long work waits for a worker when all are gone: Dask's nanny may start a new worker."""
_POLL_SECONDS = 2.0
_WAITING_A_THREAD = 3


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Connect to the cluster whose scheduler listens at `address` (tcp://host:8786).

    Raises UsageError if `address` is not an address, MissingError if no scheduler answers, or if it
    has no workers or workers with other versions than this process.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # we report errors
    try:
        client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise MissingError(
            f"no Dask scheduler answers at {address}; start one with `dask scheduler` and "
            "workers with `dask worker ADDRESS`, or leave out --scheduler"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"--scheduler {address}: is no address of a Dask scheduler ({error}); give one "
            "like tcp://host:8786"
        ) from error
    try:
        cluster = Cluster(client, address)
        cluster.check_workers()
        yield cluster
    finally:
        client.close(timeout=_POLL_SECONDS)


@dataclass(frozen=True)
class _Remote:
    """A table in the memory of a worker."""

    future: Future
    cluster: Cluster

    def open(self) -> pa.Table:
        return cast("pa.Table", self.cluster.result_of(self.future))


@dataclass(frozen=True)
class Cluster(Workers):
    """A connected cluster; its workers may not see the output, which this process writes."""

    client: Client
    address: str

    def check_workers(self) -> None:
        """Raise MissingError unless there are workers with the versions of this process."""
        here = look([])
        for worker, view in self._views([]).items():
            for name, theirs in view.versions.items():
                if theirs != here.versions[name]:
                    raise MissingError(
                        f"worker {worker} has {name} {theirs}, here it is "
                        f"{here.versions[name]}; install the same versions everywhere, or the "
                        "output may differ"
                    )

    def files(self, paths: Sequence[Path]) -> list[Path]:
        """Return rank files by absolute paths; raise InputError if a worker cannot read them."""
        absolute = [path.absolute() for path in paths]
        num_here = look(absolute).num_readable
        for worker, view in self._views(absolute).items():
            if view.num_readable < num_here:
                raise InputError(
                    f"worker {worker} can read {view.num_readable} of the {num_here} rank files in "
                    f"{absolute[0].parent}; put them where every worker sees them at the same path"
                )
        return absolute

    def results(self, work: Callable[..., Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield what the work returns; raise what it raises."""
        for future in self._in_turn(work, tasks):
            yield cast("Result", self.result_of(future))

    def keep(
        self, work: Callable[..., tuple[pa.Table, Result]], tasks: Iterable[Task]
    ) -> Iterator[tuple[Kept, Result]]:
        """Yield what the work returns; its table stays on the worker that made it."""
        for future in self._in_turn(work, tasks):
            result = self.result_of(self._submit(itemgetter(1), future))
            yield _Remote(self._submit(itemgetter(0), future), self), cast("Result", result)

    def put(self, table: pa.Table) -> Kept:
        """Send a table to a worker."""
        return _Remote(cast("Future", self.client.scatter(table, hash=False)), self)

    def _views(self, paths: Sequence[Path]) -> dict[str, WorkerView]:
        found = self.client.run(look, list(paths), on_error="return")
        if not found:
            raise MissingError(
                f"the Dask scheduler at {self.address} has no workers; start some with "
                f"`dask worker {self.address}`"
            )
        for worker, view in found.items():
            if not isinstance(view, WorkerView):
                raise MissingError(
                    f"worker {worker} cannot run MegaScan ({view}); install the same MegaScan on "
                    "every worker"
                )
        return cast("dict[str, WorkerView]", found)

    def _submit(self, function: Callable[..., object], *arguments: object) -> Future:
        return self.client.submit(function, *arguments, pure=False)

    def _in_turn(self, work: Callable[..., object], tasks: Iterable[Task]) -> Iterator[Future]:
        """Yield the futures of tasks in their order, a few for each thread under way at a time."""
        most = _WAITING_A_THREAD * max(sum(self.client.nthreads().values()), 1)
        waiting: deque[Future] = deque()
        for task in tasks:  # Dask hands the work tables in place of futures
            arguments = [one.future if isinstance(one, _Remote) else one for one in task]
            waiting.append(self._submit(work, *arguments))
            if len(waiting) >= most:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()

    def _has_workers(self) -> bool:
        try:
            return bool(self.client.nthreads())
        except (OSError, TimeoutError):  # the scheduler is gone as well
            return False

    def result_of(self, future: Future) -> object:
        """Wait for what a task returns; if a worker dies, another one runs the task again."""
        seen = time.monotonic()
        while True:
            try:
                return future.result(timeout=_POLL_SECONDS)
            except TimeoutError:
                if self._has_workers():
                    seen = time.monotonic()
                if time.monotonic() - seen > _PATIENCE_SECONDS:
                    raise MissingError(
                        f"all workers of the Dask scheduler at {self.address} are gone and none "
                        "came back; look at their logs (memory?), start them and try again"
                    ) from None
            except (KilledWorker, FutureCancelledError) as error:
                raise MissingError(
                    f"workers of the Dask scheduler at {self.address} died over one piece of work "
                    f"({type(error).__name__}); look at their logs (memory?) and try again"
                ) from error
            except MegaScanError:
                raise
            except Exception as error:
                raise MissingError(
                    f"a worker of the Dask scheduler at {self.address} failed "
                    f"({type(error).__name__}: {error}); look at its log"
                ) from error
