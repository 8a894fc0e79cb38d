"""Divide work among threads, processes or machines and take the results in order.

    items     0 1 2 3 4 5 …       handed out only a few ahead of the result that is waited for
    worker 0  ├─0─┤├2┤├──4─
    worker 1  ├1┤├───3───┤├5
    results      0 1 2 3 4 …      a slow consumer holds the workers up, so memory stays flat

`Workers` do the work: this process (`Here`), a pool of processes forked from it (`Pool`), or a
cluster (`aggregate.cluster`). The table that a piece of work makes either comes back (`results`) or
stays with the workers (`keep`): then only a handle comes back, and a later piece of work that is
given the handle as an argument gets the table in its place:

    keep(read, files)          table ─▶ held · a file · a worker's memory     Kept, small result
    results(facts, kept)       table ◀─ from there                            result
    append(write, kept, file)  table ◀─ from there      bytes ─▶ the file     small result

A table that stays is not sent between processes; in a pool it is an Arrow file that any worker maps
into its memory. Nor are bytes of an output sent: as soon as this process knows where they belong, a
worker of a pool writes them there. Any other result that a pipe would not take in one piece comes
back from a pool as a file: if a worker were killed while it writes to the pipe, the pool would wait
for the rest for ever.

All this is made of `process_pool` and `in_order`, which `training.data.documents` uses, too.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counting
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeAlias, TypeVar, cast

import pyarrow as pa

from megascan.errors import ENDING_SIGNALS, MissingError, OutputError
from megascan.overwriting import GrowingFile, Room

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_WORKERS = 32
"""With more workers, the single process that matches, aligns and writes is the limit."""
_ONE_PIECE_BYTES = select.PIPE_BUF - 1024 if hasattr(select, "PIPE_BUF") else 1024
"""Bytes that a pipe takes whole or not at all, less room for what the pool adds."""
_AHEAD = 2
"""Items that a worker may get in advance, so that it need not wait for the next item."""


class Kept(Protocol):
    """A table that stayed where it was made."""

    def open(self) -> pa.Table:
        """Return the table."""


Task: TypeAlias = tuple[object, ...]
"""Arguments of a piece of work; a Kept among them is passed as its table."""


class Workers(Protocol):
    """Workers of any type; results come in the order of the tasks.

    All methods that yield results raise what the work raises, and MissingError if a worker dies.
    """

    def files(self, paths: Sequence[Path]) -> list[Path]:
        """Return files by names that workers can use, here as they are named.

        Raises InputError if workers cannot read them.
        """
        return list(paths)

    def results(self, work: Callable[..., Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield what the work returns."""

    def keep(
        self, work: Callable[..., tuple[pa.Table, Result]], tasks: Iterable[Task]
    ) -> Iterator[tuple[Kept, Result]]:
        """Yield what the work returns, with a handle in place of its table."""

    def append(
        self, work: Callable[..., tuple[Result, bytes]], tasks: Iterable[Task], output: GrowingFile
    ) -> Iterator[Result]:
        """Write the bytes that the work returns, in the order of tasks; yield its other results.

        The bytes follow what is in the output when the first result is asked for; all are written
        when there are no more results. Here this process writes them.
        """
        return appended(self.results(work, tasks), output)

    def put(self, table: pa.Table) -> Kept:
        """Hand a table over to any worker that may need it."""


def appended(made: Iterable[tuple[Result, bytes]], output: GrowingFile) -> Iterator[Result]:
    """Write the bytes of (result, bytes) pairs in this process; yield the results."""
    for result, content in made:
        output.write(content)
        yield result


def num_workers() -> int:
    """Return how many threads or processes are useful on this machine."""
    allowed = getattr(os, "sched_getaffinity", None)  # a container's share, if the system tells it
    available = len(allowed(0)) if allowed else os.cpu_count() or 1
    return min(available, _MOST_WORKERS)


def across_threads(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int | None = None
) -> Iterator[Result]:
    """Yield results, computed by `num_threads` threads, by default one a core; at most one item
    more than threads is under way.
    """
    count = num_threads or num_workers()
    pool = ThreadPoolExecutor(count)
    try:
        yield from in_order(pool, work, items, most_waiting=count + 1)
    finally:
        pool.shutdown(cancel_futures=True)


def over_blocks(work: Callable[[Item], Result], blocks: Sequence[Item]) -> Iterator[Result]:
    """Yield results, computed by threads if there are several blocks."""
    return map(work, blocks) if len(blocks) < 2 else across_threads(work, blocks)


def can_fork() -> bool:
    """Return whether this process may be forked: it has no other thread that could hold a lock."""
    return sys.platform == "linux" and threading.active_count() == 1


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], *, most_waiting: int
) -> Iterator[Result]:
    """Return the results of `work` in the order of `items`, at most `most_waiting` under way.

    If the caller stops taking results, work under way is left to the pool, to be cancelled when the
    pool is shut down.
    """
    return _in_turn((pool.submit(work, item) for item in items), most_waiting=most_waiting)


def _in_turn(futures: Iterable[Future[Result]], *, most_waiting: int) -> Iterator[Result]:
    """Return the results of futures in their order.

    The first futures are made at once, so that work begins before the first result is taken;
    further futures are made as results are taken.
    """
    rest = iter(futures)
    waiting = deque(islice(rest, most_waiting))

    def results() -> Iterator[Result]:
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(islice(rest, 1))

    return results()


@dataclass(frozen=True)
class _Held:
    """A table in the memory of this process."""

    table: pa.Table

    def open(self) -> pa.Table:
        return self.table


@dataclass(frozen=True)
class Here(Workers):
    """Threads of this process, by default one a core; tables stay in its memory."""

    num_threads: int | None = None

    def results(self, work: Callable[..., Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield what the work returns."""
        if self.num_threads == 1:
            return (work(*opened(task)) for task in tasks)
        return across_threads(lambda task: work(*opened(task)), tasks, self.num_threads)

    def keep(
        self, work: Callable[..., tuple[pa.Table, Result]], tasks: Iterable[Task]
    ) -> Iterator[tuple[Kept, Result]]:
        """Yield what the work returns, with its table held in memory."""
        for table, result in self.results(work, tasks):
            yield _Held(table), result

    def put(self, table: pa.Table) -> Kept:
        """Hold a table."""
        return _Held(table)


def opened(task: Task) -> Task:
    """Return the arguments with handles replaced by their tables."""
    return tuple(one.open() if isinstance(one, _Held | _Filed) else one for one in task)


@dataclass(frozen=True)
class _Filed:
    """A table in an Arrow file of this machine."""

    path: Path

    def open(self) -> pa.Table:
        try:
            with pa.memory_map(str(self.path)) as source:
                return pa.ipc.open_file(source).read_all()
        except (OSError, pa.ArrowException) as error:
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number else str(error)
            raise _gone(self.path, reason) from error

    @classmethod
    def of(cls, table: pa.Table, path: Path) -> _Filed:
        table = table.unify_dictionaries().combine_chunks()
        with _put_down(path), pa.ipc.new_file(str(path), table.schema) as sink:
            sink.write_table(table)
        return cls(path)


@contextmanager
def _put_down(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); spans are kept there "
            "between the passes: free some space, or set TMPDIR to a folder that has it"
        ) from error


@dataclass(frozen=True)
class _FiledBytes:
    """Bytes in a file of this machine, to be taken once."""

    path: Path
    num_bytes: int

    @contextmanager
    def taken(self) -> Iterator[BinaryIO]:
        """Open the file and remove its name; the file is gone after the block."""
        try:
            file = self.path.open("rb")
            self.path.unlink()
        except OSError as error:
            raise _gone(self.path, error.strerror or str(error)) from error
        with file:
            yield file

    @classmethod
    def of(cls, content: bytes, path: Path) -> _FiledBytes:
        """Write bytes to a file."""
        with _put_down(path):
            path.write_bytes(content)
        return cls(path, len(content))


@dataclass(frozen=True)
class _FiledResult:
    """The result of a piece of work, pickled in a file."""

    content: _FiledBytes

    def take(self) -> object:
        """Return the result, and remove the file."""
        with self.content.taken() as file:
            return pickle.load(file)

    @classmethod
    def where_large(cls, result: object, path: Path) -> object:
        """Return a result as it is, or in a file if a pipe would take it in several pieces."""
        content = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        return result if len(content) <= _ONE_PIECE_BYTES else cls(_FiledBytes.of(content, path))


def _gone(path: Path, reason: str) -> MissingError:
    return MissingError(
        f"{path}: spans that were kept there between the passes are gone or damaged ({reason}): "
        "something clears that folder, or its disk fails; run again with TMPDIR set to another one"
    )


@dataclass(frozen=True)
class Pool(Workers):
    """Processes of this machine; tables stay in Arrow files of a folder."""

    executor: ProcessPoolExecutor
    count: int
    folder: Path
    _number: Iterator[int] = field(default_factory=counting)

    def results(self, work: Callable[..., Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield what the work returns."""
        done = self._run(_work, ((work, task, self._path()) for task in tasks))
        return (cast("Result", _taken(result)) for result in done)

    def keep(
        self, work: Callable[..., tuple[pa.Table, Result]], tasks: Iterable[Task]
    ) -> Iterator[tuple[Kept, Result]]:
        """Yield what the work returns, with its table in a file."""
        done = self._run(_keep, ((work, task, self._path()) for task in tasks))
        return ((kept, cast("Result", _taken(result))) for kept, result in done)

    def append(
        self, work: Callable[..., tuple[Result, bytes]], tasks: Iterable[Task], output: GrowingFile
    ) -> Iterator[Result]:
        """Write the bytes that the work returns; workers write large ones, as otherwise all workers
        would wait for this process.
        """
        made = self._run(_make_bytes, ((work, task, self._path()) for task in tasks))
        return self._appended(made, output)

    def _appended(
        self, made: Iterator[tuple[Result, bytes | _FiledBytes]], output: GrowingFile
    ) -> Iterator[Result]:
        under_way: deque[Future[None]] = deque()
        for result, content in made:
            if isinstance(content, bytes):
                output.write(content)
            else:
                room = output.room(content.num_bytes)
                under_way.append(self.executor.submit(_fill, room, content))
            yield result
            while under_way and under_way[0].done():
                under_way.popleft().result()
        for each in under_way:
            each.result()

    def put(self, table: pa.Table) -> Kept:
        """Write a table to a file for any worker that may need it."""
        return _Filed.of(table, self._path())

    def _path(self) -> Path:
        return self.folder / f"{next(self._number)}.arrow"

    def _run(self, call: Callable[..., Result], tasks: Iterable[Task]) -> Iterator[Result]:
        submitted = (self.executor.submit(call, *task) for task in tasks)
        return _in_turn(submitted, most_waiting=(1 + _AHEAD) * self.count)


def _work(work: Callable[..., object], task: Task, path: Path) -> object:
    return _FiledResult.where_large(work(*opened(task)), path.with_suffix(".result"))


def _make_bytes(
    work: Callable[..., tuple[Result, bytes]], task: Task, path: Path
) -> tuple[Result, bytes | _FiledBytes]:
    """Return what the work returns, with its bytes in a file unless a pipe takes them whole."""
    result, content = work(*opened(task))
    if len(content) <= _ONE_PIECE_BYTES:
        return result, content
    return result, _FiledBytes.of(content, path.with_suffix(".bytes"))


def _fill(room: Room, content: _FiledBytes) -> None:
    with content.taken() as file:
        room.fill(file)


def _taken(result: object) -> object:
    return result.take() if isinstance(result, _FiledResult) else result


def _keep(
    work: Callable[..., tuple[pa.Table, object]], task: Task, path: Path
) -> tuple[Kept, object]:
    table, result = work(*opened(task))
    return _Filed.of(table, path), _FiledResult.where_large(result, path.with_suffix(".result"))


@contextmanager
def workers_here(*, worth_processes: bool) -> Iterator[Workers]:
    """Hold a pool of one process a core, or threads if processes are not worth it.

    Threads are also used if there is only one core, or this process cannot be forked. Files that
    the pool keeps between passes are removed with the pool, also if this process is killed.
    """
    count = num_workers()
    if not worth_processes or count < 2 or not can_fork():
        yield Here()
        return
    advice = "run on a larger machine or on fewer ranks of the trace"
    folder = Path(tempfile.mkdtemp(prefix="megascan-"))
    try:
        with process_pool(count, "fork", advice, folder) as executor:
            yield Pool(executor, count, folder)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder of files; threads do it, as the system frees what files held one by one."""
    with suppress(OSError):
        list(across_threads(partial(Path.unlink, missing_ok=True), folder.iterdir()))
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def process_pool(
    count: int, start: Literal["fork", "spawn"], advice: str, scratch: Path | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes that end with the block, in the middle of their work if need be.

    Each worker watches the reading end of a pipe. Only this process holds the writing end, which
    closes when the block ends, and also when this process is killed. Workers then remove `scratch`
    and end. Raises MissingError with `advice` if a worker dies.
    """
    context = multiprocessing.get_context(start)
    watched, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        count, context, initializer=_begin, initargs=(watched, held, scratch)
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise MissingError(
            f"a process that did a part of the work was killed, most likely for want of memory; "
            f"{advice}"
        ) from error
    finally:
        # If workers vanished while a batch is being written to them, the pool's own thread would
        # write for ever: so they get a moment to read what is on its way.
        pool.shutdown(wait=False, cancel_futures=True)
        _await_children()
        held.close()
        _await_children()  # a second shutdown would not wait, as the first has let go of its thread
        watched.close()


_GRACE_S = 2.0
"""Seconds that workers of a pool get to read what is already on its way to them, and to end."""


def _await_children() -> None:
    deadline = time.monotonic() + _GRACE_S
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)


def _begin(watched: Connection, held: Connection, scratch: Path | None) -> None:
    """Prepare a worker: only the parent handles signals, and the worker ends with the parent."""
    for number in (signal.SIGINT, *ENDING_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    held.close()
    gc.disable()  # it would touch, and so copy, the parent's memory
    threading.Thread(target=_end_with, args=(watched, scratch), daemon=True).start()


def _end_with(watched: Connection, scratch: Path | None) -> None:
    with suppress(EOFError, OSError):
        watched.recv()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)
