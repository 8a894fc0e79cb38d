"""One rank of `benchmarks.wires`: all cases of a job in one process group.

    torchrun … -m benchmarks.wire_ranks PLAN.json

Every case is a training of its own, with a new model. A case begins once its folder holds `GO`: the
campaign has then done to the NICs what the case is about. Its first rank says with `HALFWAY` that
half of the iterations are over, and with `DONE` that all files are complete.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import trainer_ranks
from benchmarks.trainer_faults import FAULTS, Disturbance
from benchmarks.trainer_loops import Recorder, Run, ddp
from benchmarks.trainer_ranks import DONE, TIMEOUT, Plan, Stage, start_trace
from megascan.errors import report_errors

GO, HALFWAY = "go", "halfway"
LOOPS = {**trainer_ranks.LOOPS, "ddp in buckets": partial(ddp, bucket_mb=1)}


class Told:
    """A recorder that tells the campaign when half of the iterations are over."""

    def __init__(self, recorder: Recorder, marker: Path, iterations: int) -> None:
        self._recorder, self._marker, self._iterations = recorder, marker, iterations

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Enclose a step."""
        with self._recorder.iteration(number):
            yield
        if dist.get_rank() == 0 and number == self._iterations // 2:
            self._marker.touch()

    def close(self) -> None:
        """End it."""
        self._recorder.close()


def _start(
    folder: Path,
    iterations: int,
    *,
    model: torch.nn.Module | tuple[()] = (),
    mesh: DeviceMesh | None = None,
) -> Recorder:
    recorder = start_trace(folder, model=model, mesh=mesh)
    return Told(recorder, folder.parent / f"{folder.name}.{HALFWAY}", iterations)


def train(plan: Plan, stage: Stage) -> None:
    """Train one case when its time has come."""
    folder, device = Path(stage.folder), torch.device("cpu")
    if dist.get_rank() == 0:
        while not (folder.parent / f"{folder.name}.{GO}").exists():
            time.sleep(0.05)
    dist.barrier()
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(
        **plan.sizes,
        iterations=plan.num_traced,
        device=device,
        disturbance=Disturbance(FAULTS[stage.fault], is_here=False, device=device),
        start=partial(_start, folder, plan.num_traced),
        scratch=folder.parent,
        directory=folder,
    )
    torch.manual_seed(plan.seed + dist.get_rank())
    LOOPS[stage.loop](run)
    dist.barrier()
    gc.collect()
    if dist.get_rank() == 0:
        (folder.parent / f"{folder.name}.{DONE}").touch()


def main(arguments: Sequence[str]) -> int:
    """Join the job and train."""
    plan = Plan.read(Path(arguments[0]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for stage in plan.stages:
        train(plan, stage)
    dist.barrier()  # nobody leaves whom another one still needs
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # FSDP over gloo aborts now and then while its process is taken apart


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
