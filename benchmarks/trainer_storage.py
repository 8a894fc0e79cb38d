"""Hosts that wait for memory or a disk, for `benchmarks.trainers --set modern`: by the kernel.

    python -m benchmarks.trainer_storage memory 4711 DIR    process 4711 in a group of memory
    python -m benchmarks.trainer_storage reads 4711 DIR     the disk of DIR reads 4 MB/s for it
    python -m benchmarks.trainer_storage disk 4711 DIR      the disk of DIR is full of writes
    python -m benchmarks.trainer_storage beside 4711 DIR    a file is read again and again

Each says `ready` when it is at work, or in one line why this machine does not allow it, and undoes
everything when its input ends: also when the rank is killed that has the other end. Process 0 is
itself, to try. Of `memory`, a line of its input says by how many bytes the limit is to be below
what the process has allocated, or with a `+` by how many it is to be raised.

Ranks do the same in all cases, and only what their hosts have for it differs. They keep states of
128 MiB in host memory and change some rows at the end of each iteration, as an offloaded optimizer
does; they read each batch from a file, past the page cache; they write a small log, and wait until
it is on the disk.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

from benchmarks.control_groups import Controller, Group, RefusedError, disk_of, group_around
from benchmarks.hogs import helper

if TYPE_CHECKING:
    from benchmarks.trainer_troubles import Site

PAGE_BYTES = 4096
STATES_BYTES = 128 << 20
"""Of a rank, beside its model: so that half of them can be out and the model is not."""
SPARED_BYTES = STATES_BYTES // 2
COLD_BYTES = 3 * STATES_BYTES // 4
"""The limit is so far below what a rank has allocated; more where it never comes back for them."""
ROWS_CHANGED = 8192
"""Of one page each, in an iteration: every second one has to come in, at 10 to 30 us from zram."""
LIMITED_AFTER = 2
"""Iterations: by then a rank has allocated everything."""
MOST_LONGER, EASED_BYTES = 0.5, 8 << 20
"""While the rows take more than this part of the rest of an iteration, the limit is raised so."""
SWAP_BYTES, SWAP_PRIORITY = 1 << 30, 100
"""Goes before the swap of the machine, so that pages go where it is known how long they take."""
ROOM_BYTES = 4 << 20
"""Given to a process that the kernel would kill otherwise."""
LOOK_S = 0.05
READ_BYTES, READ_BPS = 448 << 10, 4 << 20
"""Of an iteration's batch: 107 ms. The kernel looks each 100 ms, and what fits in is free."""
BATCHES_BYTES = 16 * READ_BYTES
LOG_BYTES, WRITE_BPS = 64 << 10, 40 << 20
"""Written at the end of each iteration, to a disk that writes so much in a second."""
NUM_WRITERS, WRITTEN_BYTES, FILLED_BYTES = 2, 512 << 10, 16 << 20
"""Of the process that fills the disk: two writes are always ahead of the log, 30 to 170 ms."""
READ_BESIDE_BYTES, CACHED_BYTES, REST_S = 4 << 20, 64 << 20, 0.2
"""A reader beside the job reads so much at once, 20 MB/s, of a file that leaves the cache then."""
ENVIRONMENT_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


# What a rank does


@contextmanager
def _kept(kind: str, process: int, folder: Path) -> Iterator[IO[str]]:
    """Have a process of this module at work; yield its input. It outlives whoever kills the rank's
    session, so that it can undo what it did.
    """
    words = (kind, str(process), str(folder))
    with helper("benchmarks.trainer_storage", *words, outlives_session=True) as its_input:
        yield its_input


def refusal(kind: str, folder: Path) -> str:
    """Return why this machine does not allow it; nothing where it does."""
    try:
        with _kept(kind, 0, folder):
            return ""
    except RefusedError as error:
        return str(error)


class States:
    """Memory on the host of which an iteration changes some rows, a page each."""

    def __init__(self, size_bytes: int = STATES_BYTES) -> None:
        import torch

        self._draw = torch.Generator().manual_seed(0)  # the training's own draws stay as they are
        self._rows = torch.randn(size_bytes // PAGE_BYTES, PAGE_BYTES // 4, generator=self._draw)

    def change(self, number: int = ROWS_CHANGED) -> float:
        """Change so many rows; return for how long, s."""
        import torch

        begin = time.perf_counter()
        rows = torch.randint(len(self._rows), (number,), generator=self._draw)
        self._rows[rows, 0] += 1.0
        return time.perf_counter() - begin


@contextmanager
def memory_limited(site: Site) -> Iterator[None]:
    """Have all ranks change states on their hosts; the faulty one's memory does not hold them."""
    with ExitStack() as stack:
        keeper = None
        if site.is_here:
            keeper = stack.enter_context(_kept("memory", os.getpid(), site.scratch))
        states = States()  # within the group, which limits only what is allocated in it

        def change() -> None:
            took_s = states.change()
            rest_s = time.perf_counter() - site.began_s - took_s
            if keeper is None:
                return
            if site.iteration == LIMITED_AFTER:
                print(SPARED_BYTES, file=keeper, flush=True)
            elif site.iteration > LIMITED_AFTER and took_s > MOST_LONGER * rest_s:
                print(f"+{EASED_BYTES}", file=keeper, flush=True)

        site.at_end.append(change)
        yield


@contextmanager
def cold_memory_out(site: Site) -> Iterator[None]:
    """Have memory go out that the rank does not need again, and nothing come back."""
    with _kept("memory", os.getpid(), site.scratch) as keeper:
        kept = States()

        def limit() -> None:
            if site.iteration == LIMITED_AFTER:
                print(COLD_BYTES, file=keeper, flush=True)

        site.at_end.append(limit)
        yield
        del kept


@contextmanager
def read_from_file(site: Site, *, everywhere: bool = False) -> Iterator[None]:
    """Have all ranks read each iteration's batch from a file; the faulty one's disk is slow."""
    with ExitStack() as stack:
        batches = stack.enter_context(_file(site.scratch, BATCHES_BYTES))
        if site.is_here or everywhere:
            stack.enter_context(_kept("reads", os.getpid(), site.scratch))
        room = stack.enter_context(mmap.mmap(-1, READ_BYTES))

        def read() -> None:
            if site.num_fetched == 1:  # it holds all microbatches
                place = site.iteration * READ_BYTES % BATCHES_BYTES
                os.preadv(batches.fileno(), [room], place)

        site.at_fetch.append(read)
        yield


@contextmanager
def log_on_disk(site: Site) -> Iterator[None]:
    """Have all ranks log to their disks in each iteration; another process fills one of them."""
    with ExitStack() as stack:
        log = stack.enter_context(_file(site.scratch, LOG_BYTES, is_direct=False))
        if site.is_here:
            stack.enter_context(_kept("disk", os.getpid(), site.scratch))

        def write() -> None:
            os.pwrite(log.fileno(), os.urandom(LOG_BYTES), 0)
            os.fsync(log.fileno())

        site.at_end.append(write)
        yield


@contextmanager
def read_beside(site: Site) -> Iterator[None]:
    """Have another process fill the page cache, which the job does not need."""
    with _kept("beside", os.getpid(), site.scratch):
        yield


@contextmanager
def _file(folder: Path, size_bytes: int, *, is_direct: bool = True) -> Iterator[IO[bytes]]:
    """Have a file that is gone when it is closed, by whatever; direct: past the page cache."""
    with TemporaryFile(dir=folder) as file:
        for _ in range(0, size_bytes, LOG_BYTES):
            file.write(os.urandom(LOG_BYTES))
        file.flush()
        os.fsync(file.fileno())
        if is_direct:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        yield file


# The processes


def _inputs() -> Iterator[str | None]:
    """Yield each line of the input until it ends; None now and then."""
    left = b""
    while True:
        if not select.select([sys.stdin], [], [], LOOK_S)[0]:
            yield None
            continue
        if not (read := os.read(sys.stdin.fileno(), 4096)):
            return
        *lines, left = (left + read).split(b"\n")
        yield from map(bytes.decode, lines)


def keep_memory(process: int, folder: Path) -> None:
    """Put a process in a group of memory, and limit it when told to."""
    with _swap(folder), group_around(Controller.MEMORY, process) as group:
        group.wait_for_room()
        print("ready", flush=True)
        for line in _inputs():
            if line is not None:
                _change_limit(group, line)
            elif group.lacks_room:
                group.ease_memory(ROOM_BYTES)
        group.ease_memory(SWAP_BYTES)


def _change_limit(group: Group, line: str) -> None:
    if line.startswith("+"):
        group.ease_memory(int(line))
        return
    allocated, spared = group.allocated_bytes(), int(line)
    while spared > ROOM_BYTES:
        try:
            group.limit_memory(allocated - spared)
            return
        except OSError:  # so many pages cannot go out
            spared //= 2


@contextmanager
def _swap(folder: Path) -> Iterator[None]:
    """Have a swap on a disk in memory, in a file, or where there is one with room already."""
    reasons = []
    for make in (_zram, _swap_file):
        with ExitStack() as stack:
            try:
                place = stack.enter_context(make(folder))
                _command("mkswap", place)
                _command("swapon", "--priority", str(SWAP_PRIORITY), place)
            except OSError as error:
                reasons.append(str(error))
                continue
            stack.callback(_command, "swapoff", place)
            yield
            return
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        _, _, size_kib, used_kib, _ = line.split()
        if 1024 * (int(size_kib) - int(used_kib)) > 2 * STATES_BYTES:
            yield
            return
    raise RefusedError(f"no swap can be made: {'; '.join(reasons)}")


@contextmanager
def _zram(folder: Path) -> Iterator[str]:
    """Have a compressed disk in memory, of one's own."""
    del folder
    control = Path("/sys/class/zram-control")
    number = (control / "hot_add").read_text().strip()
    try:
        (Path(f"/sys/block/zram{number}") / "disksize").write_text(str(SWAP_BYTES))
        yield f"/dev/zram{number}"
    finally:
        with suppress(OSError):
            (Path(f"/sys/block/zram{number}") / "reset").write_text("1")
        (control / "hot_remove").write_text(number)


@contextmanager
def _swap_file(folder: Path) -> Iterator[str]:
    place = folder / f"swap-{os.getpid()}"
    try:
        with place.open("wb") as file:
            place.chmod(0o600)
            os.posix_fallocate(file.fileno(), 0, SWAP_BYTES)
        yield str(place)
    finally:
        place.unlink(missing_ok=True)


def _command(*words: str) -> None:
    """Run a command of the system; OSError with what it says."""
    done = subprocess.run(
        words,
        env={**os.environ, "PATH": ENVIRONMENT_PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(done.stderr.strip().partition("\n")[0] or f"{words[0]} failed")


def keep_reads(process: int, folder: Path) -> None:
    """Have the disk of a folder read slowly for a process."""
    with group_around(Controller.DISK, process) as group:
        group.throttle(disk_of(folder), read_bps=READ_BPS)
        _until_input_ends()


def keep_disk(process: int, folder: Path) -> None:
    """Have a process share a disk that writes slowly with this one, which fills it."""
    with group_around(Controller.DISK, process) as group, _file(folder, FILLED_BYTES) as file:
        group.throttle(disk_of(folder), write_bps=WRITE_BPS)
        group.add(os.getpid())
        ended = threading.Event()

        def fill(first: int) -> None:
            with mmap.mmap(-1, WRITTEN_BYTES) as data:
                place = first
                while not ended.is_set():
                    os.pwritev(file.fileno(), [data], place)
                    place = (place + NUM_WRITERS * WRITTEN_BYTES) % FILLED_BYTES

        writers = [
            threading.Thread(target=fill, args=(number * WRITTEN_BYTES,))
            for number in range(NUM_WRITERS)
        ]
        for writer in writers:
            writer.start()
        _until_input_ends()
        ended.set()
        for writer in writers:
            writer.join()


def keep_reading(process: int, folder: Path) -> None:
    """Read a file through the page cache, again and again from the disk, at little cost."""
    del process
    os.nice(19)
    with _file(folder, CACHED_BYTES, is_direct=False) as file:
        print("ready", flush=True)
        place = 0
        while not select.select([sys.stdin], [], [], REST_S)[0]:
            os.pread(file.fileno(), READ_BESIDE_BYTES, place)
            place = (place + READ_BESIDE_BYTES) % CACHED_BYTES
            if place == 0:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _until_input_ends() -> None:
    print("ready", flush=True)
    for _ in _inputs():
        pass


KEEPERS: dict[str, Callable[[int, Path], None]] = {
    "memory": keep_memory,
    "reads": keep_reads,
    "disk": keep_disk,
    "beside": keep_reading,
}


def main(arguments: Sequence[str]) -> int:
    """Make a host wait."""
    if len(arguments) != 3 or arguments[0] not in KEEPERS or not arguments[1].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    kind, process, folder = arguments
    try:
        KEEPERS[kind](int(process) or os.getpid(), Path(folder))
    except (RefusedError, OSError) as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
