"""Step times of pipeline schedules in real processes whose compute is slept, beside predictions.

    python -m benchmarks.pipeline_runs [--forward-ms N] [--iterations N] [--only TEXT] [-o FILE]

All cases of a scene run one after the other in one set of processes over gloo, its reference
(Megatron-Core's schedule) first and last; a step's ratio is to the mean of the two. Medians of all
steps but the first two. Predictions are those of `training.pipeline.simulator` for the same times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import environment_line, publish, run_ranks
from benchmarks.pipeline_runs_ranks import Case
from training.arguments import parse_settings, resolve_sizes
from training.pipeline.costs import even_costs
from training.pipeline.disaggregation import best_share
from training.pipeline.plan import PipelineShape
from training.pipeline.schedule import deal_for, plan_for
from training.pipeline.simulator import predict, predict_megatron

MODEL = tuple(
    """
    --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --lr 5e-3 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 100
    """.split()  # noqa: SIM905 - shorter and clearer than a list of strings
)
DATA = tuple(
    """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 16
    --num-workers 0 --distributed-backend gloo
    """.split()  # noqa: SIM905
)
CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]
WARM_UP = 2
REFERENCE = "Megatron-Core"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Cases that are compared with each other; `flags` are those of all."""

    name: str
    num_ranks: int
    flags: tuple[str, ...]
    cases: tuple[tuple[str, tuple[str, ...]], ...]
    slow: tuple[tuple[int, float], ...] = ()
    late_ratio: float = 0.0
    repeats: bool = False
    helpers: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By case: the speed of its helpers, and after how many forwards they die (0: never)."""


def scenes() -> list[Scene]:
    """All scenes."""
    pipe = ("--pipeline-model-parallel-size", "4")
    halves = ("--pipeline-model-parallel-size", "2")
    planned = (*CHUNKS, "--use-dpp", "--dpp-memory-limit", "5")
    guided = ("--dpp-choice", "guided")
    orders = (
        ("1f1b", ("--pipeline-schedule", "1f1b")),
        ("zb-h1", ("--pipeline-schedule", "zb-h1")),
        ("zb-h1, guided", ("--use-dpp", "--pipeline-schedule", "zb-h1", *guided)),
        ("Megatron-Core, 2 chunks", tuple(CHUNKS)),
        ("dfc, 2 chunks", (*CHUNKS, "--pipeline-schedule", "dfc")),
        ("planned, 2 chunks, +1 of memory", planned),
        ("the same, guided", (*planned, *guided)),
    )
    shares = (
        ("18 + 14", ("--dpp-microbatches", "18,14")),
        ("zb-h1", ("--pipeline-schedule", "zb-h1")),
        ("18 + 14, zb-h1", ("--dpp-microbatches", "18,14", "--pipeline-schedule", "zb-h1")),
    )
    helped = ("--forward-backward-disaggregating", "--fbd-helpers")
    again = ("--recompute-ahead", "--pipeline-schedule")
    return [
        Scene(
            name="PP4, 8 microbatches",
            num_ranks=4,
            flags=(*pipe, "--global-batch-size", "8"),
            cases=orders,
        ),
        Scene(
            name="PP4, 16 microbatches, 5 % of messages late by two forwards (plans only)",
            num_ranks=4,
            flags=(*pipe, "--global-batch-size", "16"),
            cases=(orders[1], orders[2], orders[5], orders[6]),
            late_ratio=0.05,
        ),
        Scene(
            name="DP2 PP2, 16 microbatches a replica, rank 1 takes 1.4 times as long",
            num_ranks=4,
            flags=(*halves, "--global-batch-size", "32"),
            cases=shares,
            slow=((1, 1.4),),
        ),
        Scene(
            name="PP4, 8 microbatches, every forward repeated",
            num_ranks=4,
            flags=(*pipe, "--global-batch-size", "8"),
            cases=(("1f1b, ahead", (*again, "1f1b")), ("zb-h1, ahead", (*again, "zb-h1"))),
            repeats=True,
        ),
        Scene(
            name="PP4, 8 microbatches, every forward repeated, helpers",
            num_ranks=4,
            flags=(*pipe, "--global-batch-size", "8"),
            cases=(
                ("1 helper", (*helped, "1")),
                ("1 helper, zb-h1", (*helped, "1", "--pipeline-schedule", "zb-h1")),
                ("1 helper of half the speed", (*helped, "1")),
                ("1 helper, killed in step 3; steps 4 on", (*helped, "1")),
                ("no helper comes", (*helped, "0")),
            ),
            repeats=True,
            helpers={
                "1 helper of half the speed": (0.5, 0),
                "1 helper, killed in step 3; steps 4 on": (1.0, 2 * 3 * 5 + 5),
            },
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one case took, and was to take."""

    name: str
    step_s: float
    predicted_s: float
    last_loss: float


def run_scene(scene: Scene, forward_s: float, num_iterations: int) -> list[Result]:
    """Run all cases of a scene; the reference stands first and last."""
    named = [(REFERENCE, ()), *scene.cases, (REFERENCE, ())]
    length = ["--train-iters", str(num_iterations)]
    cases = [
        Case(
            name=name,
            flags=[*MODEL, *DATA, *scene.flags, *own, *length],
            forward_s=forward_s,
            slow={str(rank): ratio for rank, ratio in scene.slow},
            late_ratio=scene.late_ratio if name != REFERENCE else 0.0,
            repeats=scene.repeats,
            helper_speed=scene.helpers.get(name, (1.0, 0))[0],
            helper_dies_after=scene.helpers.get(name, (1.0, 0))[1],
        )
        for name, own in named
    ]
    with TemporaryDirectory() as folder:
        file, out = Path(folder) / "cases.json", Path(folder) / "found"
        file.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
        run_ranks(scene.num_ranks, ["benchmarks.pipeline_runs_ranks", str(file), str(out)])
        found = json.loads(Path(f"{out}.{scene.num_ranks - 1}.json").read_text(encoding="utf-8"))
    return [
        Result(
            name=case.name,
            step_s=statistics.median(one["steps_s"][WARM_UP + bool(case.helper_dies_after) :]),
            predicted_s=predicted_s(scene, case),
            last_loss=one["losses"][-1],
        )
        for case, one in zip(cases, found, strict=True)
    ]


def predicted_s(scene: Scene, case: Case) -> float:
    """The simulator's step: that of the slowest replica."""
    settings = parse_settings(_without_data(case.flags))
    sizes = resolve_sizes(settings, scene.num_ranks)
    num_helpers = 0 if case.helper_dies_after else settings.pipeline.fbd_helpers
    if num_helpers:
        shape = PipelineShape(num_ranks=sizes.pipeline_size, num_microbatches=1)
        return best_share(
            even_costs(shape, forward_s=case.forward_s, recomputes=True).stages,
            sizes.num_microbatches,
            speeds=(case.helper_speed,) * num_helpers,
            splits_backward=settings.pipeline.pipeline_schedule == "zb-h1",
        ).pipeline_s
    deal = deal_for(settings, sizes)
    steps = []
    for replica in range(sizes.data_size):
        count = deal.shares[replica] if deal else sizes.num_microbatches
        shape = PipelineShape(
            num_ranks=sizes.pipeline_size, num_microbatches=count, num_chunks=sizes.model_chunks
        )
        costs = even_costs(shape, forward_s=case.forward_s, message_s=0.0, recomputes=case.repeats)
        plan = plan_for(settings, sizes, count)
        if plan is not None and plan.recomputes:  # the last stage repeats nothing
            last = replace(costs.stages[-1], recompute_s=0.0)
            costs = replace(costs, stages=(*costs.stages[:-1], last))
        for rank, ratio in scene.slow:
            if rank % sizes.data_size == replica:  # ranks of a stage are numbered through replicas
                costs = costs.slowed(shape, rank // sizes.data_size, ratio)
        table = costs.table(shape)
        step = predict_megatron(shape, table) if plan is None else predict(plan, table)
        steps.append(step.step_s)
    return max(steps)


def _without_data(flags: Sequence[str]) -> Sequence[str]:
    """The flags that `parse_settings` knows: those of the data belong to others."""
    own = ("--mock-data", "--tokenizer-type", "--vocab-size", "--num-workers")
    kept: list[str] = []
    skips = False
    for word in flags:
        if word.startswith("--"):
            skips = word in own
        if not skips:
            kept.append(word)
    return kept


def table_of(scene: Scene, results: Sequence[Result]) -> str:
    """One scene as Markdown."""
    reference_s = statistics.mean(one.step_s for one in results if one.name == REFERENCE)
    predicted_reference_s = results[0].predicted_s
    lines = [
        f"## {scene.name}",
        "",
        "| schedule | step, ms | ratio | predicted, ms | predicted ratio | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        lines.append(
            f"| {one.name} | {1e3 * one.step_s:.0f} | {one.step_s / reference_s:.3f} "
            f"| {1e3 * one.predicted_s:.0f} | {one.predicted_s / predicted_reference_s:.3f} "
            f"| {one.last_loss:.7f} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> int:
    """Run the scenes and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_runs", description=__doc__)
    parser.add_argument("--forward-ms", type=float, default=80.0)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--only", default="", help="scenes whose name holds this")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    parts = [
        "# Pipeline schedules: real steps beside predicted ones",
        f"{environment_line('cpu')}; F = {given.forward_ms:g} ms slept, backward 2 F (halves 1.05 "
        f"and 0.95 F); medians of {given.iterations - WARM_UP} steps.\n",
    ]
    for scene in scenes():
        if given.only in scene.name:
            results = run_scene(scene, given.forward_ms / 1e3, given.iterations)
            parts.append(table_of(scene, results))
            print(parts[-1], file=sys.stderr, flush=True)
    publish("\n".join(parts), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
