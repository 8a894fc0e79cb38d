"""One rank of `benchmarks.losses`: jobs of one family trained one after the other, each anew.

    torchrun … -m benchmarks.losses_ranks PLAN.json

The last rank, which logs the losses, says `run: NAME` before each. What other ranks print goes to
stderr: two processes that write to one pipe may part each other's lines.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megascan.errors import report_errors
from training.distributed import read_launch
from training.job import parse_job


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training by its flags; with a folder it is traced, every iteration of it."""

    name: str
    flags: list[str]
    trace_dir: str | None = None
    is_deterministic: bool = False
    """Whether kernels must repeat themselves; of one run, of all."""

    def arguments(self) -> list[str]:
        """All flags."""
        if self.trace_dir is None:
            return self.flags
        everything = ["--trace-interval", "2", "--continuous-trace-iterations", "2"]
        everything += ["--trace-layer-stride", "1"]
        return [*self.flags, "--trace", "--trace-dir", self.trace_dir, *everything]


def write_plan(runs: Sequence[Run], path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps([asdict(run) for run in runs]), encoding="utf-8")


def be_deterministic() -> None:
    """Have kernels repeat themselves; call it before torch uses a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def main(arguments: Sequence[str]) -> int:
    """Train all runs of the plan in one process group."""
    plan = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    runs = [Run(**values) for values in plan]
    launch = read_launch(os.environ)
    logs = launch.rank == launch.world_size - 1
    if not logs:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if any(run.is_deterministic for run in runs):
        be_deterministic()
    jobs = [parse_job(run.arguments(), launch) for run in runs]
    # A trainer freezes all objects there are: no later run could let its model go. To unfreeze them
    # afterwards would have each collection look through every module's objects again.
    gc.freeze = lambda: None
    with jobs[0].joined():
        from megatron.core import parallel_state

        for run, job in zip(runs, jobs, strict=True):
            if logs:
                print(f"run: {run.name}", flush=True)
            chunks = job.sizes.virtual_pipeline_size
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
            job.train()
            gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
