"""One rank of `benchmarks.wires`: all cases of a job in one process group.

    torchrun … -m benchmarks.wire_ranks PLAN.json

Every case is a training of its own, with a new model. The first rank and the campaign talk by files
beside a case's folder, which end with these words: the rank says `READY` when all ranks wait for
the case, and the campaign `GO` when it has done to the NICs what the case is about; `HALFWAY` and
`DONE` come from the rank again, when half of the iterations are over, and with their mean time when
all files are complete.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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

READY, GO, HALFWAY = "ready", "go", "halfway"
NUM_FIRST = 2
"""Iterations that are left out of the mean: they allocate, and DDP builds its buckets anew."""
LOOPS: dict[str, Callable[[Run], None]] = {
    **trainer_ranks.LOOPS,
    "ddp in buckets": partial(ddp, bucket_mb=1),
}


def marker(trace: Path, word: str) -> Path:
    """Return the file beside a case's folder that says something of it."""
    return trace.parent / f"{trace.name}.{word}"


class Told:
    """A recorder that tells the campaign when half of the iterations are over, and their mean."""

    def __init__(self, recorder: Recorder, trace: Path, iterations: int) -> None:
        self._recorder, self._trace, self._iterations = recorder, trace, iterations
        self._ends_s: list[float] = []

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Enclose a step."""
        with self._recorder.iteration(number):
            yield
        self._ends_s.append(time.perf_counter())
        if dist.get_rank() == 0 and number == self._iterations // 2:
            marker(self._trace, HALFWAY).touch()

    def close(self) -> None:
        """End it."""
        self._recorder.close()

    @property
    def mean_ms(self) -> float:
        """Return the mean of this rank's iterations but the first ones."""
        ends_s = self._ends_s[NUM_FIRST - 1 :]
        return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) * 1e3


def train(plan: Plan, stage: Stage) -> None:
    """Train one case when its time has come."""
    trace, device = Path(stage.folder), torch.device("cpu")
    told: list[Told] = []
    _wait_for_campaign(trace)
    trace.mkdir(parents=True, exist_ok=True)

    def start(
        *, model: torch.nn.Module | tuple[()] = (), mesh: DeviceMesh | None = None
    ) -> Recorder:
        recorder = start_trace(trace, model=model, mesh=mesh)
        told.append(Told(recorder, trace, plan.num_traced))
        return told[0]

    run = Run(
        **plan.sizes,
        iterations=plan.num_traced,
        device=device,
        disturbance=Disturbance(FAULTS[stage.fault], is_here=False, device=device),
        start=start,
        scratch=trace.parent,
        directory=trace,
    )
    torch.manual_seed(plan.seed + dist.get_rank())
    LOOPS[stage.loop](run)
    dist.barrier()
    gc.collect()
    if dist.get_rank() == 0:
        whole = marker(trace, "whole")
        whole.write_text(str(told[0].mean_ms), encoding="utf-8")
        whole.rename(marker(trace, DONE))  # never seen half written


def _wait_for_campaign(trace: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        marker(trace, READY).touch()
        while not marker(trace, GO).exists():
            time.sleep(0.02)
    dist.barrier()


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
