"""One rank of `benchmarks.trainers`: all cases of a job in one process group.

    torchrun … -m benchmarks.trainer_ranks PLAN.json

Every case is a training of its own, with a new model, from its first iteration on. The files of a
case are complete once its folder holds `done`, which tells how fast the ranks' cores were before it
and after it, and for how long each rank's threads waited for a core.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import trainer_libraries, trainer_loops, trainer_modern
from benchmarks.trainer_faults import FAULTS, Disturbance, Fault, time_core, waited_ms
from benchmarks.trainer_loops import Recorder, Run, Start
from benchmarks.trainer_troubles import TROUBLES, Site, Trouble, TroubledRank
from megascan.config import TraceConfig
from megascan.errors import report_errors
from megascan.instrument import start
from training.distributed import read_launch

DONE = "done"
TIMEOUT = timedelta(seconds=60)
"""Of a collective, after which the job has failed."""
PROFILED = {"wait": 3, "warmup": 2, "active": 6}
"""Steps, where torch's profiler records in place of the tracer."""
NUM_TRACED, NUM_PROFILED = 30, sum(PROFILED.values()) + 1
"""Iterations of a case."""
LOOPS = {**trainer_loops.LOOPS, **trainer_libraries.LOOPS, **trainer_modern.LOOPS}
ALL_FAULTS: dict[str, Fault] = {**FAULTS, **TROUBLES}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A case: its trainer, its fault, the rank that has it, and where the files go."""

    loop: str
    fault: str
    rank: int
    folder: str
    is_profiled: bool = False
    """Recorded by torch's profiler, not by the tracer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks of a job do."""

    device: str
    sizes: dict[str, int]
    """Of the model and the training, by the names of `Run`."""
    cores: tuple[tuple[int, ...], ...]
    """Of each rank; none: wherever there is room."""
    seed: int
    stages: tuple[Stage, ...]
    num_traced: int = NUM_TRACED
    """Iterations of each case that is traced."""

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["stages"] = tuple(Stage(**stage) for stage in values["stages"])
        values["cores"] = tuple(map(tuple, values["cores"]))
        return cls(**values)


class Profile:
    """torch's profiler around the iterations, as its documentation shows it."""

    def __init__(self, path: Path) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(**PROFILED),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        )
        self._profiler.start()

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Enclose a step."""
        del number
        yield
        self._profiler.step()

    def close(self) -> None:
        """End the recording."""
        self._profiler.stop()


def start_trace(
    folder: Path, *, model: torch.nn.Module | tuple[()] = (), mesh: DeviceMesh | None = None
) -> Recorder:
    """Trace with the default window, as somebody does who has read the first page."""
    config = TraceConfig(enabled=True, directory=folder)
    return start(config, model=model, mesh=mesh)


def start_profile(folder: Path, **_: object) -> Recorder:
    """Record with torch's profiler."""
    return Profile(folder / f"rank{dist.get_rank()}.pt.trace.json.gz")


def train(plan: Plan, stage: Stage, device: torch.device) -> None:
    """One case."""
    folder = Path(stage.folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, iterations = dist.get_rank(), NUM_PROFILED if stage.is_profiled else plan.num_traced
    begin: Start = partial(start_profile if stage.is_profiled else start_trace, folder)
    disturbance = _disturbance(stage, device, iterations, folder.parent)
    run = Run(
        **plan.sizes,
        iterations=iterations,
        device=device,
        disturbance=disturbance,
        start=disturbance.reaching(begin) if isinstance(disturbance, TroubledRank) else begin,
        scratch=folder.parent,
        directory=folder,
    )
    torch.manual_seed(plan.seed + rank)
    before, waited = _of_all(time_core()), waited_ms()
    with disturbance.acting():
        dist.barrier()
        LOOPS[stage.loop](run)
        dist.barrier()
    waits = _of_all(waited_ms() - waited)
    gc.collect()
    machine = {"core_ms": [before, _of_all(time_core())], "waited_ms": waits}
    if rank == 0:
        whole = folder.parent / "machine.json"
        whole.write_text(json.dumps(machine), encoding="utf-8")
        whole.rename(folder / DONE)  # never seen half written


def _disturbance(stage: Stage, device: torch.device, iterations: int, scratch: Path) -> Disturbance:
    """Return what makes the fault of a case."""
    fault, is_here = ALL_FAULTS[stage.fault], dist.get_rank() == stage.rank
    if isinstance(fault, Trouble):
        site = Site(device=device, is_here=is_here, scratch=scratch, iterations=iterations)
        return TroubledRank(fault, site)
    return Disturbance(fault, is_here=is_here, device=device)


def _of_all(own: float) -> list[float]:
    """Gather a figure of every rank."""
    figures: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(figures, own)
    return figures


def main(arguments: Sequence[str]) -> int:
    """Join the job and train."""
    plan, launch = Plan.read(Path(arguments[0])), read_launch(os.environ)
    if plan.cores:
        os.sched_setaffinity(0, plan.cores[launch.local_rank])
    torch.set_num_threads(1)
    if plan.device == "cpu":
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    for stage in plan.stages:
        train(plan, stage, device)
    dist.barrier()  # nobody leaves whom another one still needs
    if plan.device == "cpu":  # FSDP over gloo aborts now and then while its process is taken apart
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
