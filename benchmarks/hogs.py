"""Processes that take a GPU or a processor core away from somebody else.

    python -m benchmarks.hogs gpu 2      matrix products on GPU 2
    python -m benchmarks.hogs cpu 5      a busy loop on core 5
    python -m benchmarks.hogs bursts 5   the same now and then

Each says `hogging` when it is at work, and ends when its parent does. Processes share a GPU by
turns; `multiprocessors_kept` takes a part of it away all the time, from inside the process that is
to be slow.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from benchmarks.control_groups import RefusedError
from benchmarks.jobs import ROOT

NUM_CPU_HOGS = {"cpu": 2, "gpu": 7}
"""On one core, by what the job computes on: a GPU works off what a slow host launched before."""


@contextmanager
def helper(module: str, *words: str, outlives_session: bool = False) -> Iterator[IO[str]]:
    """Have a process of a module at work while inside; yield its input, whose end ends it, and wait
    for it. Raises RefusedError, with what it says, where that is not `ready`.

    `outlives_session`: it is not killed with this process, so that it can undo what it did.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=outlives_session,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if (said := process.stdout.readline()) != "ready\n":
            raise RefusedError(said.strip() or f"the process for {words[0]} did not start")
        yield process.stdin
    finally:
        process.communicate()  # closes its input, which ends it


@contextmanager
def gpu_hogged(device: int) -> Iterator[None]:
    """Another process multiplies matrices on this GPU while inside."""
    with _started([["gpu", str(device)]]):
        yield


_KEEPER = """
extern "C" __global__ void keep(int ns) {
    extern __shared__ char room[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < ns);
    if (ns < 0) room[0] = 1;  // so that the memory is used
}
"""
_KEEPER_THREADS, _KEEPER_BYTES = 1024, 224 * 1024
"""Of a block: nearly all shared memory of a Hopper's multiprocessor, so each block has its own."""
_KEPT_NS = 50_000_000
"""One after the other: who waits for the whole device, to free memory, waits so long."""


@contextmanager
def multiprocessors_kept(number: int, *, is_time: Callable[[], bool]) -> Iterator[None]:
    """Keep so many multiprocessors of the current GPU idle while inside and `is_time()` says so.

    A product of matrices finds no room on them, as on a chip with fewer of them. Kernels that need
    no shared memory lose less.
    """
    import torch

    kernel = torch.cuda._compile_kernel(_KEEPER, "keep")
    kernel.set_shared_memory_config(_KEEPER_BYTES)
    device = torch.cuda.current_device()

    def keep(ended: threading.Event) -> None:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        while not ended.is_set():
            if not is_time():
                ended.wait(0.01)
                continue
            kernel(
                grid=(number, 1, 1),
                block=(_KEEPER_THREADS, 1, 1),
                args=[_KEPT_NS],
                shared_mem=_KEEPER_BYTES,
                stream=stream,
            )
            stream.synchronize()

    with alongside(keep):
        yield


@contextmanager
def alongside(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Have a thread act while inside, until the event that it is given is set."""
    ended = threading.Event()
    thread = threading.Thread(target=act, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def core_hogged(num_hogs: int) -> Iterator[None]:
    """All threads of this process share one core with busy processes while inside."""
    before = os.sched_getaffinity(0)
    core = max(before)
    with _started([["cpu", str(core)]] * num_hogs):
        _confine({core})
        try:
            yield
        finally:
            _confine(before)


@contextmanager
def core_hogged_in_bursts() -> Iterator[None]:
    """Another process is busy on this process's last core now and then while inside."""
    with _started([["bursts", str(max(os.sched_getaffinity(0)))]]):
        yield


@contextmanager
def _started(words: Sequence[Sequence[str]]) -> Iterator[None]:
    hogs = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hogs", *each],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in words
    ]
    try:
        for hog in hogs:
            if hog.stdout is None or hog.stdout.readline() != "hogging\n":
                raise SystemExit(f"a process to hog the {words[0][0]} did not start")
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.communicate()


def _confine(cores: set[int]) -> None:
    """Let every thread of this process run on these cores only."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def hog_gpu(device: int) -> None:
    """Multiply matrices until the parent has ended."""
    import torch

    torch.cuda.set_device(device)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(matrix)
    parent = os.getppid()
    torch.mm(matrix, matrix, out=product)
    torch.cuda.synchronize()
    print("hogging", flush=True)
    while os.getppid() == parent:
        for _ in range(50):
            torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize()


def hog_core(core: int) -> None:
    """Count until the parent has ended."""
    os.sched_setaffinity(0, {core})
    parent = os.getppid()
    print("hogging", flush=True)
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def hog_core_in_bursts(core: int) -> None:
    """Take a core for 10 to 150 ms, leave it for 100 to 600, until the parent has ended."""
    os.sched_setaffinity(0, {core})
    draw, parent = random.Random(core), os.getppid()
    print("hogging", flush=True)
    while os.getppid() == parent:
        end = time.monotonic() + draw.uniform(0.01, 0.15)
        while time.monotonic() < end:
            pass
        time.sleep(draw.uniform(0.1, 0.6))


HOGS = {"gpu": hog_gpu, "cpu": hog_core, "bursts": hog_core_in_bursts}


def main(arguments: Sequence[str]) -> int:
    """Hog."""
    if len(arguments) != 2 or arguments[0] not in HOGS or not arguments[1].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    HOGS[arguments[0]](int(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
