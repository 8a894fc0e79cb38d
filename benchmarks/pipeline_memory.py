"""Activations that planned steps hold on each rank, counted by the allocator, beside the plans.

    python -m benchmarks.pipeline_memory [-o FILE]

Every rank records its allocations (torch.profiler, CPU) over one step and takes what is allocated
between its actions. A microbatch's activations are what the first forward of a rank's first chunk
leaves, the share that weight gradients keep what is left after the first half of its backward; the
plan then says the rest: at which action most is held, and how much.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.jobs import environment_line, publish, run_ranks
from megascan.errors import report_errors
from training.arguments import parse_settings, resolve_sizes
from training.distributed import read_launch
from training.job import parse_job
from training.pipeline.costs import ActivationMemory, peak_memory
from training.pipeline.plan import Plan
from training.pipeline.schedule import plan_for

NUM_RANKS = 4
MODEL = """
    --num-layers 16 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --micro-batch-size 1
    --lr 5e-3 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 100
    --pipeline-model-parallel-size 4 --global-batch-size 12 --train-iters 2
    --distributed-backend gloo
""".split()  # noqa: SIM905
DATA = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 16
    --num-workers 0
""".split()  # noqa: SIM905
CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]
CASES = {
    "1f1b": ["--pipeline-schedule", "1f1b"],
    "zb-h1": ["--pipeline-schedule", "zb-h1"],
    "auto, limit 3": ["--use-dpp", "--dpp-memory-limit", "3"],
    "auto, limit 6": ["--use-dpp", "--dpp-memory-limit", "6"],
    "dfc, 2 chunks": [*CHUNKS, "--pipeline-schedule", "dfc"],
    "auto, 2 chunks, limit 5": [*CHUNKS, "--use-dpp", "--dpp-memory-limit", "5"],
}
ACTION = "action "
MIB = 2**20


def boundaries(profile: torch.profiler.profile) -> list[tuple[str, int, int]]:
    """Actions with the bytes allocated since the profile began, before and after each."""
    events: Sequence[Any] = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    moments: list[tuple[int, str, int]] = []
    for event in events:
        if event.name() == "[memory]":
            moments.append((event.start_ns(), "", event.nbytes()))
        elif event.name().startswith(ACTION):
            name = event.name().removeprefix(ACTION)
            moments.append((event.start_ns(), f"begin {name}", 0))
            moments.append((event.start_ns() + event.duration_ns(), f"end {name}", 0))
    found: list[tuple[str, int, int]] = []
    now, began = 0, 0
    for _, what, size in sorted(moments, key=lambda moment: moment[0]):
        now += size
        if what.startswith("begin"):
            began = now
        elif what:
            found.append((what.removeprefix("end "), began, now))
    return found


def run_rank(out: str) -> None:
    """Train all cases on this rank and write what was allocated in each one's second step."""
    launch = read_launch(os.environ)
    jobs = {n: parse_job([*MODEL, *DATA, *flags], launch) for n, flags in CASES.items()}
    found: dict[str, list[tuple[str, int, int]]] = {}
    with next(iter(jobs.values())).joined():
        from megatron.core import parallel_state

        from training.pipeline import executor

        do, call = executor.Step.do, executor.Executor.__call__
        num_steps = 0

        def named(step: executor.Step, action: object) -> None:
            with torch.profiler.record_function(f"{ACTION}{action}"):
                do(step, action)  # type: ignore[arg-type]

        def profiled(own: executor.Executor, **keywords: object) -> object:
            nonlocal num_steps
            num_steps += 1
            if num_steps % 2:  # the first step of a case makes what stays
                return call(own, **keywords)  # type: ignore[arg-type]
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
                reports = call(own, **keywords)  # type: ignore[arg-type]
            found[name] = boundaries(profile)
            return reports

        executor.Step.do = named  # type: ignore[method-assign,assignment]
        executor.Executor.__call__ = profiled  # type: ignore[method-assign,assignment]
        for name, job in jobs.items():  # noqa: B007 - `profiled` asks for it
            chunks = job.sizes.virtual_pipeline_size
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
            job.train()
    Path(f"{out}.{launch.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def rows(name: str, of_rank: Sequence[list[tuple[str, int, int]]]) -> Iterator[str]:
    """A line of the table for each rank."""
    settings = parse_settings([*MODEL, *CASES[name]])
    sizes = resolve_sizes(settings, NUM_RANKS)
    plan = plan_for(settings, sizes, sizes.num_microbatches)
    assert plan is not None
    for rank, actions in enumerate(of_rank):
        memory = measured_memory(plan, rank, actions)
        planned = peak_memory(plan, memory)[rank]
        counted = max(after for _, _, after in actions) - actions[0][1]
        by_units = peak_memory(plan)[rank]
        yield (
            f"| {name} | {rank} | {by_units:.2f} | {planned / MIB:.1f} | {counted / MIB:.1f} "
            f"| {counted / planned - 1:+.1%} | {memory.kept_for_weights_ratio:.2f} |"
        )


def measured_memory(
    plan: Plan, rank: int, actions: Sequence[tuple[str, int, int]]
) -> ActivationMemory:
    """What one microbatch takes on each of a rank's stages, from the first that passes."""
    by_stage = [0.0] * plan.shape.num_stages
    kept = 0.94
    for stage in plan.shape.stages_of(rank):
        by_stage[stage] = next(b - a for name, a, b in actions if name == f"{stage}F0")
        freed = [b - a for name, a, b in actions if name == f"{stage}I0"]
        if freed:
            kept = 1 + freed[0] / by_stage[stage]
    return ActivationMemory(by_stage=tuple(by_stage), kept_for_weights_ratio=kept)


def main(arguments: Sequence[str]) -> int:
    """Run all cases and print the table; with ``--rank OUT`` be one of the ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_memory", description=__doc__
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    if given.rank:
        run_rank(given.rank)
        return 0
    with TemporaryDirectory() as folder:
        out = f"{folder}/found"
        run_ranks(NUM_RANKS, ["benchmarks.pipeline_memory", "--rank", out])
        of_rank = [
            json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8"))
            for rank in range(NUM_RANKS)
        ]
    lines = [
        "# Activations of planned steps\n",
        f"{environment_line('cpu')}; PP4, 12 microbatches, 16 layers, hidden 128, sequence 256, "
        "unfused attention. `python -m benchmarks.pipeline_memory`\n",
        "| plan | rank | planned peak, microbatches (weights keep 0.94) | planned, MiB "
        "| allocated, MiB | off | weights keep |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CASES:
        lines += rows(name, [found[name] for found in of_rank])
    publish("\n".join([*lines, ""]), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
