"""One rank of `benchmarks.layouts`: one training, cut into stages that are traced one by one.

    torchrun … -m benchmarks.layout_ranks PLAN.json [trainer flags]

Starting a job takes longer than the iterations that a verdict needs, so all cases of a layout are
stages of one job: faults act, and hogs run, in the iterations of their stage only. Each stage is
traced by a tracer of its own into a folder of its own, as if it were a run; its first iteration,
in which hogs have just been started, is left untraced.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.hogs import NUM_CPU_HOGS, core_hogged, gpu_hogged
from megascan.config import TraceConfig
from megascan.errors import report_errors
from megascan.tracer import Tracer
from training.callback import Callback
from training.distributed import Launch, read_launch
from training.job import parse_job

NUM_WARMUP = 3
INTERVAL, WINDOW = 5, 4


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where a stage's rank files go, and which rank is robbed of its `gpu` or `cpu`, if any."""

    folder: str
    hog: str | None = None
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Stages in their order, each of so many iterations and one before them."""

    stages: tuple[Stage, ...]
    num_iterations: int
    layer_stride: int = 1
    """Modules of one layer in so many are recorded, in turns."""

    @property
    def num_all_iterations(self) -> int:
        """Of the job."""
        return NUM_WARMUP + len(self.stages) * (self.num_iterations + 1)

    def span_of(self, stage: int) -> tuple[int, int]:
        """First and last iteration of a stage, from 1, in the job's count."""
        first = NUM_WARMUP + stage * (self.num_iterations + 1) + 1
        return first, first + self.num_iterations

    def place_of(self, iteration: int) -> tuple[int, int]:
        """Stage of an iteration of the job (negative: warm-up) and its number there, from 0."""
        return divmod(iteration - 1 - NUM_WARMUP, self.num_iterations + 1)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        stages = tuple(Stage(**stage) for stage in values["stages"])
        return cls(**{**values, "stages": stages})


class Stages(Callback):
    """Starts and ends hogs and tracers as stages begin and end."""

    def __init__(self, plan: Plan, launch: Launch, device: str) -> None:
        self._plan = plan
        self._launch = launch
        self._device = "cpu" if device == "cpu" else "gpu"
        self._tracer = Tracer()
        self._hogs = ExitStack()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Leave no hog behind, also when training fails."""
        with self._hogs:
            yield

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Run it in its stage, traced unless it is the stage's first."""
        stage, within = self._plan.place_of(iteration)
        if stage >= 0 and within == 0:
            self._begin(self._plan.stages[stage])
        with self._traced(stage, within):
            yield
        if stage >= 0 and within == self._plan.num_iterations:
            self._tracer.close()
            self._hogs.close()

    def _begin(self, stage: Stage) -> None:
        """Start the hogs, if this is their rank; the others wait until they run."""
        import torch.distributed as dist

        if stage.hog is not None and stage.rank == self._launch.rank:
            self._hogs.enter_context(self._hog(stage.hog))
        dist.barrier()

    def _hog(self, kind: str) -> AbstractContextManager[None]:
        if kind == "gpu":
            return gpu_hogged(self._launch.local_rank)
        return core_hogged(NUM_CPU_HOGS[self._device])

    def _traced(self, stage: int, within: int) -> AbstractContextManager[None]:
        from megascan.instrument import start

        if stage < 0 or within == 0:
            return nullcontext()
        if within == 1:
            folder = Path(self._plan.stages[stage].folder)
            config = TraceConfig(
                enabled=True,
                directory=folder,
                interval=INTERVAL,
                window=WINDOW,
                layer_stride=self._plan.layer_stride,
            )
            self._tracer = start(config)
        return self._tracer.iteration(within)


def main(arguments: Sequence[str]) -> int:
    """Train through all stages of the plan."""
    plan = Plan.read(Path(arguments[0]))
    launch = read_launch(os.environ)
    length = ("--train-iters", str(plan.num_all_iterations), "--log-interval", "1000000")
    job = parse_job([*arguments[1:], *length], launch)
    with job.joined():
        job.train([Stages(plan, launch, job.device)])
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
