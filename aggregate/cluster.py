"""Use a Dask cluster where one machine is too small: its workers read files and make the output.

    workers    each rank file → its spans            client   all spans: match, align, decompose
    client     spans on one clock, once              workers  a block of rows → its bytes, gzipped
    client     blocks in their order → the file

Reading and encoding are most of the work and need nothing but a file, or a block of rows; matching
and alignment need all ranks at once and are short. Workers keep no state: every task is a plain
function, the one that runs locally, and results are taken in order, so the output is the same to
the bit.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar, cast

from distributed import Client, Future, KilledWorker
from distributed.client import FutureCancelledError

from megascan.errors import InputError, MegaScanError, MissingError, UsageError
from megascan.export import Block, Drawing, gzip_member
from megascan.reader import Format, Packed, Segment, file_batches, load_segments
from megascan.schema import SCHEMA_VERSION

__all__ = ["Cluster", "connect"]


_WORTH_THE_SAME = ("numpy", "pyarrow", "isal", "perfetto")
"""Packages whose version may change a byte of the output."""


@dataclass(frozen=True)
class WorkerView:
    """What a worker has and sees: versions by package, and how many of some files it can read."""

    versions: dict[str, str]
    num_readable: int


def look(paths: Sequence[Path]) -> WorkerView:
    """Return what this process has and sees."""
    versions = {"MegaScan's schema": str(SCHEMA_VERSION)}
    for name in _WORTH_THE_SAME:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return WorkerView(versions, sum(os.access(path, os.R_OK) for path in paths))


def read_files(found: Format, paths: Sequence[Path]) -> Packed:
    """Read the segments of some files."""
    return Packed(tuple(load_segments(found, paths)))


def make_block(make: Callable[..., bytes | memoryview], gzipped: bool, *arguments: object) -> bytes:
    """Make the bytes of a block of the output file."""
    block = make(*arguments)
    return gzip_member(block) if gzipped else bytes(block)


Result = TypeVar("Result")

_CONNECT_SECONDS = 10
_PATIENCE_SECONDS = 15.0
"""How long work waits for a worker when all are gone: a nanny may start a new one."""
_POLL_SECONDS = 2.0
_SCATTER_SECONDS = 3600
_WAITING_A_THREAD = 3


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Connect to the cluster whose scheduler listens at `address` (tcp://host:8786).

    Raises UsageError for an address that is none, MissingError when nobody answers there, when it
    has no workers, or when their versions differ from this process's.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what goes wrong is said by us
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


@dataclass
class Cluster:
    """A connected cluster."""

    client: Client
    address: str
    _shared: dict[int, tuple[object, Future]] = field(default_factory=dict)

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

    def load(self, found: Format, files: Sequence[Path]) -> list[Segment]:
        """Read rank files on the workers, as `megascan.reader.load_segments` does here.

        Raises InputError for a worker that cannot read the files, and what reading raises.
        """
        paths = [path.absolute() for path in files]
        self._check_files(paths)
        batches = file_batches(paths) if found is Format.RANK_FILES else [paths]
        parts = self._ordered(partial(self._submit, read_files, found, batch) for batch in batches)
        named = dict(zip(paths, files, strict=True))
        return [
            replace(segment, path=named.get(segment.path, segment.path))
            for part in parts
            for segment in cast("Packed", part).segments
        ]

    def encode(self, blocks: Iterable[Block], *, gzipped: bool) -> Iterator[tuple[int, bytes]]:
        """Yield (number of events, bytes) of each block in order, made by the workers."""
        counts: deque[int] = deque()

        def tasks() -> Iterator[Callable[[], Future]]:
            for block in blocks:
                counts.append(block.num_events)
                yield partial(self._submit_block, block, gzipped)

        for data in self._ordered(tasks()):
            yield counts.popleft(), cast("bytes", data)

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

    def _check_files(self, paths: Sequence[Path]) -> None:
        here = sum(os.access(path, os.R_OK) for path in paths)
        for worker, view in self._views(paths).items():
            if view.num_readable < here:
                raise InputError(
                    f"worker {worker} can read {view.num_readable} of the {here} rank files in "
                    f"{paths[0].parent}; put them where every worker sees them at the same path"
                )

    def _submit(self, function: Callable[..., object], *arguments: object) -> Future:
        return self.client.submit(function, *arguments, pure=False)

    def _submit_block(self, block: Block, gzipped: bool) -> Future:
        """Submit a block; what blocks have in common goes to the workers once."""
        make = block.make
        if not isinstance(make, partial):
            return self._submit(make_block, bytes, gzipped, bytes(make()))
        arguments = [self._share(one) if is_dataclass(one) else one for one in make.args]
        return self._submit(make_block, make.func, gzipped, *arguments)

    def _share(self, value: object) -> Future:
        """Put the value on every worker; keep it with its future, so that its id stays its own."""
        if id(value) not in self._shared:
            future = self.client.scatter(
                _without_timeline(value), broadcast=True, hash=False, timeout=_SCATTER_SECONDS
            )
            self._shared[id(value)] = value, cast("Future", future)
        return self._shared[id(value)][1]

    def _ordered(self, tasks: Iterable[Callable[[], Future]]) -> Iterator[object]:
        """Yield results in the order of the tasks, a few for each thread under way at a time."""
        most = _WAITING_A_THREAD * max(sum(self.client.nthreads().values()), 1)
        waiting: deque[Future] = deque()
        try:
            for submit in tasks:
                waiting.append(submit())
                if len(waiting) >= most:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            for future in waiting:
                future.release()

    def _has_workers(self) -> bool:
        try:
            return bool(self.client.nthreads())
        except (OSError, TimeoutError):  # nor is there a scheduler
            return False

    def _result(self, future: Future) -> object:
        """Wait for what a task gave; tasks of a dead worker run again on another while there is
        one.
        """
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


def _without_timeline(value: object) -> object:
    """Return a drawing, or what holds one, without the table that it was drawn from."""
    if isinstance(value, Drawing):
        timeline = value.timeline
        return replace(value, timeline=replace(timeline, spans=timeline.spans[:0]))
    inner = getattr(value, "drawing", None)
    if isinstance(inner, Drawing):
        return replace(value, drawing=_without_timeline(inner))  # type: ignore[type-var]
    return value
