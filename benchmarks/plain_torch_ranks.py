"""One rank of `benchmarks.plain_torch`: all cases of one layout in one process group.

    torchrun … -m benchmarks.plain_torch_ranks PLAN.json

For the losses the same training is done three times, the third time traced. One more goes through
the stages that are judged, each traced by a tracer of its own, and then through blocks of traced
and untraced iterations, for the cost.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.overhead_ranks import Alternation, CpuClock, GpuClock
from benchmarks.overhead_ranks import Plan as Blocks
from benchmarks.plain_torch_models import Drag, Job, Sizes, make_job
from megascan.config import TraceConfig
from megascan.errors import report_errors
from megascan.instrument import start
from megascan.tracer import Tracer
from training.distributed import read_launch

INTERVAL, WINDOW = 5, 4
NUM_WARMUP, BLOCK_LENGTH = 2, 4
NUM_LOSSES = 6
TIMEOUT = timedelta(seconds=120)
"""Of a collective, after which the job has failed."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where a stage's rank files go, and which rank is slow in it, if any."""

    folder: str
    slow_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks of one layout are to do; they write what comes of it into `folder`."""

    layout: str
    device: str
    sizes: Sizes
    folder: str
    compares_losses: bool
    stages: tuple[Stage, ...]
    num_iterations: int
    modes: tuple[str, ...]
    """Of the blocks by which the cost is measured; none: it is not."""

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["sizes"] = Sizes(**values["sizes"])
        values["stages"] = tuple(Stage(**stage) for stage in values["stages"])
        values["modes"] = tuple(values["modes"])
        return cls(**values)


class Trainer:
    """A job made anew, with its optimizer."""

    def __init__(self, plan: Plan, device: torch.device, drag: Drag) -> None:
        self._job: Job = make_job(plan.layout, plan.sizes, device, drag)
        weights = self._job.model.parameters()
        self._optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=device.type == "cuda")

    def start(self, config: TraceConfig) -> Tracer:
        """Trace from now on."""
        return start(config, model=self._job.model, mesh=self._job.mesh)

    def step(self, traced: AbstractContextManager[object]) -> torch.Tensor | None:
        """One iteration; its loss where it is known."""
        with traced:
            self._optimizer.zero_grad()
            loss = self._job.backpropagate()
            self._optimizer.step()
        return loss

    def run(self, num_iterations: int, tracer: Tracer) -> list[str]:
        """So many iterations from 1 and the end of tracing; losses and weights, to the last bit."""
        losses = [self.step(tracer.iteration(each)) for each in range(1, num_iterations + 1)]
        tracer.close()
        values = [loss for loss in losses if loss is not None]
        values += [_local(weight).double().sum() for weight in self._job.model.parameters()]
        return [float(value).hex() for value in values]


def _local(weight: torch.Tensor) -> torch.Tensor:
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach()


def compare_losses(plan: Plan, device: torch.device, drag: Drag) -> list[list[str]]:
    """Of two untraced trainings and a traced one, all from the same seed."""
    traced = TraceConfig(enabled=True, directory=Path(plan.folder, "losses"), interval=2, window=2)
    results = []
    for config in (TraceConfig(), TraceConfig(), traced):
        trainer = Trainer(plan, device, drag)
        results.append(trainer.run(NUM_LOSSES, trainer.start(config)))
        del trainer
        gc.collect()
    return results


def run_stage(trainer: Trainer, stage: Stage, num_iterations: int, drag: Drag) -> None:
    """Trace some iterations, of which the slow rank was slow one before."""
    drag.acts = stage.slow_rank == dist.get_rank()
    trainer.step(Tracer().iteration(1))
    folder = Path(stage.folder)
    config = TraceConfig(enabled=True, directory=folder, interval=INTERVAL, window=WINDOW)
    trainer.run(num_iterations, trainer.start(config))
    drag.acts = False


def measure_cost(trainer: Trainer, plan: Plan, device: torch.device) -> list[float]:
    """Times of the iterations of all blocks, ms."""
    blocks = Blocks(
        models={},
        modes=list(plan.modes),
        num_warmup=NUM_WARMUP,
        block_length=BLOCK_LENGTH,
        window=1,
        folder=plan.folder,
    )
    clock = GpuClock() if device.type == "cuda" else CpuClock()
    alternation = Alternation(blocks, Path(plan.folder, "cost"), clock, start=trainer.start)
    with alternation.training():
        for iteration in range(1, blocks.num_iterations + 1):
            trainer.step(alternation.iteration(iteration))
    return alternation.times_ms()


def train(plan: Plan, device: torch.device) -> None:
    """Everything that the plan says; every rank writes its losses, rank 0 the times."""
    folder, drag = Path(plan.folder), Drag(plan.sizes, device)
    if plan.compares_losses:
        losses = compare_losses(plan, device, drag)
        (folder / f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))
    trainer = Trainer(plan, device, drag)
    for _ in range(NUM_WARMUP):
        trainer.step(Tracer().iteration(1))
    for stage in plan.stages:
        run_stage(trainer, stage, plan.num_iterations, drag)
    if plan.modes:
        times_ms = measure_cost(trainer, plan, device)
        if dist.get_rank() == 0:
            (folder / "times.json").write_text(json.dumps(times_ms))


def main(arguments: Sequence[str]) -> int:
    """Join the job and train."""
    plan = Plan.read(Path(arguments[0]))
    if plan.device == "cpu":
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products that repeat themselves
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # only megatron.core asks for one
        device = torch.device("cuda", read_launch(os.environ).local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    torch.use_deterministic_algorithms(True)  # flash attention heeds it without warn_only alone
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    train(plan, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
