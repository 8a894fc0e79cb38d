"""What happens to ranks in machine rooms, for `benchmarks.trainers --set modern`.

    python -m benchmarks.trainer_troubles stream 2       copies within the memory of GPU 2
    python -m benchmarks.trainer_troubles bursts 2       the same for a fifth of the time
    python -m benchmarks.trainer_troubles exchange 2     copies from GPU 2 to the one after it
    python -m benchmarks.trainer_troubles quota 4711     stops process 4711 for 40 of every 100 ms

Each says `ready` when it is at work, and ends when its input does. `Trouble` adds to `Fault` what
is done: around the run (processes, threads), while a batch is fetched, at an iteration's end.
Waits for memory and for disks are made in `trainer_storage.py`.
`benchmarks.trainers` leaves out what does not suit a device, a loop or a profile.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks import trainer_storage
from benchmarks.control_groups import Controller, RefusedError, group_around
from benchmarks.hogs import NUM_CPU_HOGS, alongside, core_hogged, helper
from benchmarks.trainer_faults import BUSY, FAULTS, LONG, Disturbance, Fault

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from benchmarks.trainer_loops import Recorder, Start

STREAMED_BYTES = 1 << 30
"""Copied at once within a GPU, or between two: far more than any cache holds."""
BURST_S, PERIOD_S = 0.3, 1.5
"""A burst outlasts an iteration, and several fall into the 30 iterations of a run."""
STOPPED_S, RUNNING_S = 0.04, 0.06
"""A quota of 600 ms of CPU time in each second stops all threads of a container at once."""
HELD_S, FREE_S = 0.03, 0.07
"""A thread of Python's computes so long, in turns with the trainer, and then waits so long."""
LATE_S, LATE_EVERY = 0.3, 6
"""Of a loader that must open the next file now and then: 5 of 30 batches."""
DEGRADED_S = 0.08
"""Of each batch from the middle of the run on."""
NUM_KEPT_OBJECTS = 500_000
"""On the heap of a rank; each collection goes through all of them."""
LOGGED_BYTES, DISK_S = 4 << 20, 0.06
"""Written in each iteration, and how long the disk takes for that at least."""
SAVE_EVERY, MOST_SAVED_BYTES = 10, 256 << 20
"""Iterations; bytes of a checkpoint, so that three of them leave time to train."""
REPORT_EVERY, REPORT_S = 5, 0.15
"""The first rank looks at its weights for so long, in every so manieth iteration."""
WARM_UP_S = (0.1, 0.6)
"""For which a rank compiles when it meets a new shape: another time on each."""
MIXED_RATIOS = (0.75, 1.0, 1.0, 1.25)
"""Lengths of batches beside the usual one, drawn anew for each replica and batch."""


@dataclass(kw_only=True)
class Site:
    """Where a trouble acts: a rank, and what it is at."""

    device: torch.device
    is_here: bool
    scratch: Path
    iterations: int
    iteration: int = 0
    """0: the training has not begun."""
    num_fetched: int = 0
    """Batches of this iteration."""
    weights: tuple[torch.Tensor, ...] = ()
    """Of this rank's part of the model."""
    began_s: float = 0.0
    """This iteration, by `time.perf_counter`."""
    at_fetch: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """What a trouble does then that keeps something for it, besides its `fetching` and `ending`."""


@dataclass(frozen=True, kw_only=True)
class Trouble(Fault):
    """A fault that says how it is made; acts on the faulty rank unless it is `everywhere`."""

    during: Callable[[Site], AbstractContextManager[None]] | None = None
    """Entered before the model is built, left after the last iteration."""
    fetching: Callable[[Site], None] | None = None
    """Called when a batch is fetched."""
    ending: Callable[[Site], None] | None = None
    """Called within each iteration, after everything else."""
    everywhere: bool = False
    needs: str = ""
    """What of `trainer_storage` a machine may not allow."""

    def refusal(self, folder: Path) -> str:
        """Return why it cannot be made on this machine, with files in a folder; else nothing."""
        return trainer_storage.refusal(self.needs, folder) if self.needs else ""


# Processes beside the job


@contextmanager
def _helped(*words: str) -> Iterator[None]:
    """Have a process of this module at work while inside; it ends by itself, and is waited for."""
    with helper("benchmarks.trainer_troubles", *words):
        yield


def _memory_streamed(site: Site) -> AbstractContextManager[None]:
    return _helped("stream", str(site.device.index))


def _memory_streamed_in_bursts(site: Site) -> AbstractContextManager[None]:
    return _helped("bursts", str(site.device.index))


def _link_taken(site: Site) -> AbstractContextManager[None]:
    return _helped("exchange", str(site.device.index))


@contextmanager
def _stopped_by_quota(site: Site) -> Iterator[None]:
    """Give the process a quota of CPU time, as a container has it; where no control group can be
    made it is stopped and set free by turns, which the kernel counts as no wait for a core.
    """
    del site
    running_us, period_us = round(RUNNING_S * 1e6), round((STOPPED_S + RUNNING_S) * 1e6)
    with ExitStack() as stack:
        try:
            stack.enter_context(group_around(Controller.CPU, os.getpid())).limit_cpu(
                running_us, period_us
            )
        except (OSError, RefusedError):
            stack.enter_context(_helped("quota", str(os.getpid())))
        yield


def _core_crowded(site: Site) -> AbstractContextManager[None]:
    """Confine all threads of the rank, which launch kernels too, to a core with busy processes."""
    return core_hogged(NUM_CPU_HOGS["gpu" if site.device.type == "cuda" else "cpu"])


# Inside the rank's process


def _beside_python(site: Site) -> AbstractContextManager[None]:
    """Have a thread compute in Python a third of the time; each switch takes up to 5 ms."""
    del site

    def count(ended: threading.Event) -> None:
        while not ended.wait(FREE_S):
            end = time.monotonic() + HELD_S
            while time.monotonic() < end:
                pass

    return alongside(count)


@contextmanager
def _heap_kept(site: Site) -> Iterator[None]:
    """Keep many objects, as a loader does that has read all its file names."""
    del site
    kept = [[number] for number in range(NUM_KEPT_OBJECTS)]
    yield
    del kept


def _collect(site: Site) -> None:
    del site
    gc.collect()


def _late_now_and_then(site: Site) -> None:
    if site.iteration % LATE_EVERY == 0 and site.iteration and site.num_fetched == 1:
        time.sleep(LATE_S)


def _late_from_the_middle_on(site: Site) -> None:
    if site.iteration > site.iterations // 2:
        time.sleep(DEGRADED_S)


def _log_to_slow_disk(site: Site) -> None:
    """Write, and wait until it is on a disk that takes its time, also where ours is fast."""
    end = time.monotonic() + DISK_S
    with (site.scratch / f"log{dist.get_rank()}").open("wb") as log:
        log.write(bytes(LOGGED_BYTES))
        log.flush()
        os.fsync(log.fileno())
    time.sleep(max(0.0, end - time.monotonic()))


# Nobody's fault


def _save_on_first_rank(site: Site) -> None:
    """Save weights on rank 0 alone: in iterations 11 and 21 of 30."""
    if dist.get_rank() != 0 or site.iteration % SAVE_EVERY != 1 or site.iteration == 1:
        return
    saved, room = [], MOST_SAVED_BYTES
    for weight in site.weights:
        saved.append(weight)
        room -= weight.nbytes
        if room <= 0:
            break
    torch.save(saved, site.scratch / "saved.pt")


def _report_on_first_rank(site: Site) -> None:
    """Log norms of weights on rank 0 alone."""
    if dist.get_rank() != 0 or site.iteration % REPORT_EVERY != 1:
        return
    end = time.monotonic() + REPORT_S
    while time.monotonic() < end:
        for weight in site.weights[:8]:
            weight.float().norm().item()


def _warm_up(site: Site) -> None:
    """Compute on the host as a compiler does: at first, and for a shape that comes later."""
    rank = dist.get_rank()
    if site.iteration in (1, 2, 11 + rank) and site.num_fetched == 1:
        end = time.monotonic() + random.Random(100 * rank + site.iteration).uniform(*WARM_UP_S)
        while time.monotonic() < end:
            pass


BOTH = ("cpu", "gpu")
TROUBLES: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        # As many kinds as can be in each four in a row: a job has some neighbours of this list.
        Trouble(
            name="bandwidth hog",
            causes=("compute",),
            devices=("gpu",),
            during=_memory_streamed,
        ),
        FAULTS["slow x1.3"],
        Trouble(
            name="late now and then",
            causes=("loader", "host"),
            devices=BOTH,
            fetching=_late_now_and_then,
        ),
        Trouble(
            name="memory limit",
            causes=("host",),
            devices=BOTH,
            everywhere=True,
            during=trainer_storage.memory_limited,
            needs="memory",
        ),
        Trouble(name="rank 0 saves", devices=BOTH, everywhere=True, ending=_save_on_first_rank),
        Trouble(name="crowded host", causes=("host",), devices=("gpu",), during=_core_crowded),
        Trouble(
            name="crowded core",
            causes=("host", "compute"),
            during=_core_crowded,
        ),
        Trouble(
            name="bandwidth hog at times",
            causes=("compute",),
            devices=("gpu",),
            during=_memory_streamed_in_bursts,
            only_traced=True,
        ),
        LONG,
        Trouble(
            name="slow reads",
            causes=("loader", "host"),
            devices=BOTH,
            everywhere=True,
            during=trainer_storage.read_from_file,
            needs="reads",
        ),
        Trouble(
            name="large heap", causes=("gc",), devices=BOTH, during=_heap_kept, ending=_collect
        ),
        Trouble(name="quota", causes=("host", "compute"), during=_stopped_by_quota),
        Trouble(name="quota of host", causes=("host",), devices=("gpu",), during=_stopped_by_quota),
        FAULTS["33 SMs less"],
        Trouble(
            name="cold memory out",
            devices=BOTH,
            during=trainer_storage.cold_memory_out,
            needs="memory",
        ),
        Trouble(name="mixed lengths", devices=BOTH, everywhere=True, mixes_lengths=True),
        Trouble(name="slow disk", causes=("host",), devices=BOTH, ending=_log_to_slow_disk),
        Trouble(name="python thread", causes=("host", "compute"), during=_beside_python),
        Trouble(
            name="python thread of host",
            causes=("host",),
            devices=("gpu",),
            during=_beside_python,
        ),
        Trouble(
            name="reads beside", devices=BOTH, during=trainer_storage.read_beside, needs="beside"
        ),
        Trouble(name="warm-up", devices=BOTH, everywhere=True, fetching=_warm_up),
        Trouble(
            name="link contention",
            causes=("link", "compute"),
            devices=("gpu",),
            during=_link_taken,
            reaches_next=True,
        ),
        Trouble(
            name="late from the middle on",
            causes=("loader", "host"),
            devices=BOTH,
            fetching=_late_from_the_middle_on,
        ),
        Trouble(
            name="slow reads everywhere",
            devices=BOTH,
            everywhere=True,
            during=partial(trainer_storage.read_from_file, everywhere=True),
            needs="reads",
        ),
        BUSY,
        Trouble(name="busy hosts", devices=("gpu",), everywhere=True, during=_beside_python),
        Trouble(
            name="disk shared",
            causes=("host",),
            devices=BOTH,
            everywhere=True,
            during=trainer_storage.log_on_disk,
            needs="disk",
        ),
        Trouble(name="rank 0 reports", devices=BOTH, everywhere=True, ending=_report_on_first_rank),
    )
}
"""Some are faults of the classic set."""


class TroubledRank(Disturbance):
    """A rank of a job that has trouble; acts where the trouble is."""

    def __init__(self, trouble: Trouble, site: Site) -> None:
        super().__init__(trouble, is_here=site.is_here, device=site.device)
        self._trouble, self._site = trouble, site
        self._acts = site.is_here or trouble.everywhere

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let everything go on that needs nothing of the trainer."""
        with ExitStack() as stack:
            stack.enter_context(super().acting())
            if self._acts and self._trouble.during is not None:
                stack.enter_context(self._trouble.during(self._site))
            yield

    def load(self) -> None:
        """What happens while a batch is fetched."""
        super().load()
        self._site.num_fetched += 1
        if self._acts and self._trouble.fetching is not None:
            self._trouble.fetching(self._site)
        for act in self._site.at_fetch:
            act()

    def tokens(self, usual: int, dp_rank: int) -> int:
        """Of the sequences of a replica; all ranks of one draw the same."""
        if not self._trouble.mixes_lengths:
            return super().tokens(usual, dp_rank)
        site = self._site
        draw = random.Random(10_000 * dp_rank + 100 * site.iteration + site.num_fetched)
        return int(usual * draw.choice(MIXED_RATIOS))

    def reaching(self, start: Start) -> Start:
        """Have what begins the recording tell this rank its model and its iterations."""

        def begin(
            *, model: torch.nn.Module | tuple[()] = (), mesh: DeviceMesh | None = None
        ) -> Recorder:
            models = (model,) if isinstance(model, torch.nn.Module) else model
            self._site.weights = tuple(
                _local(weight) for one in models for weight in one.parameters()
            )
            return _Telling(start(model=model, mesh=mesh), self)

        return begin

    def iteration_begins(self, number: int) -> None:
        """Count."""
        self._site.iteration, self._site.num_fetched = number, 0
        self._site.began_s = time.perf_counter()

    def iteration_ends(self) -> None:
        """What happens after the optimizer's step."""
        if self._acts and self._trouble.ending is not None:
            self._trouble.ending(self._site)
        for act in self._site.at_end:
            act()


class _Telling:
    """A recorder that tells a rank of its iterations."""

    def __init__(self, recorder: Recorder, rank: TroubledRank) -> None:
        self._recorder, self._rank = recorder, rank

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Enclose a step."""
        with self._recorder.iteration(number):
            self._rank.iteration_begins(number)
            yield
            self._rank.iteration_ends()

    def close(self) -> None:
        """End it."""
        self._recorder.close()


def _local(weight: torch.Tensor) -> torch.Tensor:
    """Return the part of a weight that this rank holds."""
    from torch.distributed.tensor import DTensor

    return weight.to_local().detach() if isinstance(weight, DTensor) else weight.detach()


# The processes


def _until_input_ends(wait_s: float = 0.0) -> bool:
    """Wait so long; tell whether to go on."""
    return not select.select([sys.stdin], [], [], wait_s)[0]


def stream_memory(device: int, *, is_time: Callable[[], bool] = lambda: True) -> None:
    """Copy within a GPU's memory while it is time."""
    torch.cuda.set_device(device)
    source = torch.zeros(STREAMED_BYTES, dtype=torch.uint8, device="cuda")
    _copy(torch.empty_like(source), source, is_time)


def stream_memory_in_bursts(device: int) -> None:
    """Copy within a GPU's memory for `BURST_S` of each `PERIOD_S`."""
    stream_memory(device, is_time=lambda: time.monotonic() % PERIOD_S < BURST_S)


def take_link(device: int) -> None:
    """Copy from a GPU to the one after it."""
    torch.cuda.set_device(device)
    other = torch.device("cuda", (device + 1) % torch.cuda.device_count())
    source = torch.zeros(STREAMED_BYTES, dtype=torch.uint8, device="cuda")
    _copy(torch.empty_like(source, device=other), source, lambda: True)


def _copy(target: torch.Tensor, source: torch.Tensor, is_time: Callable[[], bool]) -> None:
    """Copy by some at a time, so that the GPU is never idle between two looks at the clock."""
    target.copy_(source)
    torch.cuda.synchronize()
    print("ready", flush=True)
    while _until_input_ends():
        if not is_time():
            time.sleep(0.005)
            continue
        for _ in range(8):
            target.copy_(source)
        torch.cuda.synchronize()


def stop_in_turns(process: int) -> None:
    """Stop a process and let it go on, as a quota of CPU time does.

    It ends only while that process runs: what it stops it sets free again.
    """
    print("ready", flush=True)
    while _until_input_ends(RUNNING_S):
        os.kill(process, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(process, signal.SIGCONT)


HELPERS: dict[str, Callable[[int], None]] = {
    "stream": stream_memory,
    "bursts": stream_memory_in_bursts,
    "exchange": take_link,
    "quota": stop_in_turns,
}


def main(arguments: Sequence[str]) -> int:
    """Make trouble."""
    if len(arguments) != 2 or arguments[0] not in HELPERS or not arguments[1].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    HELPERS[arguments[0]](int(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
