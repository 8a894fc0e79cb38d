"""A plain PyTorch trainer of a few ranks to which something happens: see `TROUBLE`.

failing_trainer.py TROUBLE FOLDER [--untraced]
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import megascan

NUM_ITERATIONS, LAST_GOOD = 40, 20


def full_disk(rank: int, iteration: int, folder: Path) -> None:
    """From half-way on, no file grows beyond 4 kB: every write fails as on a full disk."""
    if iteration == LAST_GOOD:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def vanished_folder(rank: int, iteration: int, folder: Path) -> None:
    """Somebody cleans up."""
    if iteration == LAST_GOOD and rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def slow_disk(rank: int, iteration: int, folder: Path) -> None:
    """Every write to disk takes a third of a second."""
    os.fsync = lambda descriptor: time.sleep(0.3)


def killed(rank: int, iteration: int, folder: Path) -> None:
    """One rank is killed in mid-iteration."""
    if iteration == LAST_GOOD + 1 and rank == 1:
        wait_for_windows(folder)
        os.kill(os.getpid(), signal.SIGKILL)


def terminated(rank: int, iteration: int, folder: Path) -> None:
    """One rank is asked to end, as a scheduler or torchrun does."""
    if iteration == LAST_GOOD + 1 and rank == 1:
        wait_for_windows(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)


def exception(rank: int, iteration: int, folder: Path) -> None:
    """The training code of one rank fails."""
    if iteration == LAST_GOOD + 1 and rank == 1:
        raise ValueError("the loss is not finite")


def restarted(rank: int, iteration: int, folder: Path) -> None:
    """One rank fails in the first attempt; torchrun starts all of them again."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        exception(rank, iteration, folder)


def forked(rank: int, iteration: int, folder: Path) -> None:
    """Data comes from worker processes that are forked while tracing is on."""


def none(rank: int, iteration: int, folder: Path) -> None:
    """Nothing happens."""


TROUBLE: dict[str, Callable[[int, int, Path], None]] = {
    function.__name__: function
    for function in (
        *(full_disk, vanished_folder, slow_disk, killed, terminated),
        *(exception, restarted, forked, none),
    )
}


def wait_for_windows(folder: Path) -> None:
    """Let the writer finish what it was given, so that the test knows what must be there."""
    path = folder / "benchmark-data-1-pipeline-0-tensor-0.json"
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:
        if path.read_bytes().count(b'"megascan_window"') == LAST_GOOD // 2:
            return
        time.sleep(0.01)


def main() -> None:
    trouble, folder = TROUBLE[sys.argv[1]], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = list(range(NUM_ITERATIONS))
    workers = {"num_workers": 2, "multiprocessing_context": "fork"} if trouble is forked else {}
    tracer = megascan.start(
        megascan.TraceConfig(enabled=True, directory=folder, interval=2, window=2)
    )
    total, longest_s = torch.zeros(1), 0.0
    for iteration, batch in enumerate(DataLoader(data, **workers), 1):
        begin = time.monotonic()
        with tracer.iteration(iteration):
            trouble(rank, iteration, folder)
            with tracer.span("forward", "compute"):
                value = batch + rank
            dist.all_reduce(value)
            total += value
        longest_s = max(longest_s, time.monotonic() - begin)
        time.sleep(0.005)
    tracer.close()
    print(f"rank {rank}: {total.item()}, longest {longest_s:.3f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
