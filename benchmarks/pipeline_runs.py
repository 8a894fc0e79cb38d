"""Step times of pipeline schedules in real processes whose compute is slept, beside predictions.

    python -m benchmarks.pipeline_runs [--forward-ms N] [--iterations N] [--only TEXT] [-o FILE]
    python -m benchmarks.pipeline_runs --device gpu [--ranks 2|4] [--microbatches N]
        [--iterations N] [--only TEXT] [-o FILE] [--keep FOLDER | --from FOLDER]

All cases of a scene run one after the other in one set of processes over gloo, its reference
(Megatron-Core's schedule) first and last; a step's ratio is to the mean of the two. Medians of all
steps but the first two. Predictions are those of `training.pipeline.simulator` for the same times.
On GPUs nothing sleeps: see `benchmarks.pipeline_runs_gpu`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import environment_line, publish, run_ranks
from benchmarks.pipeline_runs_ranks import Case
from training.arguments import parse_settings, resolve_sizes
from training.pipeline.costs import Costs, StageCost, even_costs
from training.pipeline.disaggregation import best_share
from training.pipeline.plan import PipelineShape, Plan
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
    slow_of_case: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """In place of `slow`, where a case has other layers on its ranks."""
    late_ratio: float = 0.0
    repeats: bool = False
    helpers: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By case: the speed of its helpers, and after how many forwards they die (0: never)."""


PIPE = ("--pipeline-model-parallel-size", "4")
HALVES = ("--pipeline-model-parallel-size", "2")
SPLIT = ("--pipeline-schedule", "zb-h1")


def scenes() -> list[Scene]:
    """All scenes."""
    return [*order_scenes(), *share_scenes(), layer_scene(), *repeating_scenes()]


def order_scenes() -> list[Scene]:
    """Other orders of the same work."""
    planned = (*CHUNKS, "--use-dpp", "--dpp-memory-limit", "5")
    guided = ("--dpp-choice", "guided")
    orders = (
        ("1f1b", ("--pipeline-schedule", "1f1b")),
        ("zb-h1", SPLIT),
        ("zb-h1, guided", ("--use-dpp", *SPLIT, *guided)),
        ("Megatron-Core, 2 chunks", tuple(CHUNKS)),
        ("dfc, 2 chunks", (*CHUNKS, "--pipeline-schedule", "dfc")),
        ("planned, 2 chunks, +1 of memory", planned),
        ("the same, guided", (*planned, *guided)),
    )
    return [
        Scene(
            name="PP4, 8 microbatches",
            num_ranks=4,
            flags=(*PIPE, "--global-batch-size", "8"),
            cases=orders,
        ),
        Scene(
            name="PP4, 16 microbatches, 5 % of messages late by two forwards (plans only)",
            num_ranks=4,
            flags=(*PIPE, "--global-batch-size", "16"),
            cases=(orders[1], orders[2], orders[5], orders[6]),
            late_ratio=0.05,
        ),
    ]


def share_scenes() -> list[Scene]:
    """Microbatches moved away from a slow rank's replica."""
    two = (
        ("18 + 14", ("--dpp-microbatches", "18,14")),
        ("zb-h1", SPLIT),
        ("19 + 13, zb-h1", ("--dpp-microbatches", "19,13", *SPLIT)),
    )
    four = (
        ("17 + 13 + 17 + 17", ("--dpp-microbatches", "17,13,17,17")),
        ("18 + 12 + 17 + 17, zb-h1", ("--dpp-microbatches", "18,12,17,17", *SPLIT)),
    )
    return [
        Scene(
            name=f"DP{size} PP2, 16 microbatches a replica, rank 1 takes 1.4 times as long",
            num_ranks=2 * size,
            flags=(*HALVES, "--global-batch-size", str(16 * size)),
            cases=cases,
            slow=((1, 1.4),),
        )
        for size, cases in ((2, two), (4, four))
    ]


def layer_scene() -> Scene:
    """Layers moved away from a slow rank."""
    moved = ("--pipeline-model-parallel-layout", "Et*9|t*8|t*6|t*9L")
    cases = (("9, 8, 6, 9 layers", moved), ("the same, zb-h1", (*moved, *SPLIT)))
    ratios = ((0, 9 / 8), (2, 1.4 * 6 / 8), (3, 9 / 8))
    return Scene(
        name="PP4, 16 microbatches, 32 layers, rank 2 takes 1.4 times as long",
        num_ranks=4,
        flags=(*PIPE, "--global-batch-size", "16", "--num-layers", "32"),
        cases=cases,
        slow=((2, 1.4),),
        slow_of_case=dict.fromkeys((name for name, _ in cases), ratios),
    )


def repeating_scenes() -> list[Scene]:
    """Jobs that recompute, alone and with helpers."""
    again = ("--recompute-ahead", "--pipeline-schedule")
    helped = ("--forward-backward-disaggregating", "--fbd-helpers")
    half, killed = "1 helper of half the speed", "1 helper, killed in step 3; steps 4 on"
    flags = (*PIPE, "--global-batch-size", "8")
    return [
        Scene(
            name="PP4, 8 microbatches, every forward repeated",
            num_ranks=4,
            flags=flags,
            cases=(("1f1b, ahead", (*again, "1f1b")), ("zb-h1, ahead", (*again, "zb-h1"))),
            repeats=True,
        ),
        Scene(
            name="PP4, 8 microbatches, every forward repeated, helpers",
            num_ranks=4,
            flags=flags,
            cases=(
                ("1 helper", (*helped, "1")),
                ("1 helper, zb-h1", (*helped, "1", *SPLIT)),
                (half, (*helped, "1")),
                (killed, (*helped, "1")),
                ("no helper comes", (*helped, "0")),
            ),
            repeats=True,
            helpers={half: (0.5, 0), killed: (1.0, 2 * 3 * 5 + 5)},
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one case took, and was to take."""

    name: str
    step_s: float
    predicted_s: float
    measured_s: float | None
    """Predicted from the passes, pauses and messages as the run itself had them; plans only."""
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
            slow={str(rank): ratio for rank, ratio in scene.slow_of_case.get(name, scene.slow)},
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
        of_rank = [
            json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8"))
            for rank in range(scene.num_ranks)
        ]
        found = of_rank[-1]
    return [
        Result(
            name=case.name,
            step_s=statistics.median(one["steps_s"][WARM_UP + bool(case.helper_dies_after) :]),
            predicted_s=predicted_s(scene, case),
            measured_s=replayed_s(scene, case, [rows[number]["diary"] for rows in of_rank]),
            last_loss=one["losses"][-1],
        )
        for number, (case, one) in enumerate(zip(cases, found, strict=True))
    ]


Diary = dict[str, list[float]]


def replayed_s(scene: Scene, case: Case, diaries: Sequence[dict[str, object]]) -> float | None:
    """The simulator's step for the medians that the run had; None where it cannot know them.

    So it shows what the simulator itself gets wrong, less what sleeping on a shared machine costs.
    Only for plans of one replica that are followed as they stand.
    """
    settings = parse_settings(without_data(case.flags))
    sizes = resolve_sizes(settings, scene.num_ranks)
    helps = settings.pipeline.forward_backward_disaggregating
    plan = plan_for(settings, sizes, sizes.num_microbatches)
    is_guided = settings.pipeline.dpp_choice == "guided"
    if plan is None or is_guided or helps or sizes.data_size > 1 or scene.late_ratio:
        return None
    stages = tuple(
        _measured_stage(diaries[plan.shape.rank_of(stage)], plan)
        for stage in range(plan.shape.num_stages)
    )
    last = diaries[-1]["overheads_s"]
    costs = Costs(
        stages=stages,
        message_s=(_message_s(diaries),) * (plan.shape.num_stages - 1),
        overhead_s=statistics.median(last),  # type: ignore[arg-type]
    )
    return predict(plan, costs.table(plan.shape)).step_s + _edges_s(diaries)


def _measured_stage(diary: dict[str, object], plan: Plan) -> StageCost:
    """What passes took on a rank; its chunks are alike."""
    passes: Diary = diary["passes_s"]  # type: ignore[assignment]
    backward_s = statistics.median(passes["backward"])
    return StageCost(
        forward_s=statistics.median(passes["forward"]),
        input_gradient_s=backward_s,
        weight_gradient_s=statistics.median(passes["weights"]) if plan.splits_backward else 0.0,
        recompute_s=statistics.median(passes["forward"]) if plan.recomputes else 0.0,
    )


def _message_s(diaries: Sequence[dict[str, object]]) -> float:
    """From the begin of a send to the end of a receive that somebody stood waiting for."""
    left = dict(entry for diary in diaries for entry in diary["sent"])  # type: ignore[attr-defined]
    waited = [entry for diary in diaries for entry in diary["waited"]]  # type: ignore[attr-defined]
    return float(statistics.median(came_s - left[name] for name, came_s in waited))


def _edges_s(diaries: Sequence[dict[str, object]]) -> float:
    """From the end of the last action of all to the end of the step: gradients, a barrier."""
    times: Sequence[Sequence[float]] = [diary["last_s"] for diary in diaries]  # type: ignore[misc]
    ends: Sequence[float] = diaries[0]["ends_s"]  # type: ignore[assignment]
    after = [end - max(row) for end, row in zip(ends, zip(*times, strict=True), strict=True)]
    return float(statistics.median(after[WARM_UP:]))


def predicted_s(scene: Scene, case: Case) -> float:
    """The simulator's step: that of the slowest replica."""
    settings = parse_settings(without_data(case.flags))
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
        for rank, ratio in ((int(rank), ratio) for rank, ratio in case.slow.items()):
            if rank % sizes.data_size == replica:  # ranks of a stage are numbered through replicas
                costs = costs.slowed(shape, rank // sizes.data_size, ratio)
        table = costs.table(shape)
        step = predict_megatron(shape, table) if plan is None else predict(plan, table)
        steps.append(step.step_s)
    return max(steps)


def without_data(flags: Sequence[str]) -> Sequence[str]:
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
        "| schedule | step, ms | ratio | predicted, ms | predicted ratio "
        "| predicted from the run's own passes, ms | off | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        lines.append(
            f"| {one.name} | {1e3 * one.step_s:.0f} | {one.step_s / reference_s:.3f} "
            f"| {1e3 * one.predicted_s:.0f} | {one.predicted_s / predicted_reference_s:.3f} "
            f"| {_replayed(one)} | {one.last_loss:.7f} |"
        )
    return "\n".join([*lines, ""])


def _replayed(one: Result) -> str:
    if one.measured_s is None:
        return "– | –"
    return f"{1e3 * one.measured_s:.0f} | {one.measured_s / one.step_s - 1:+.1%}"


def main(arguments: Sequence[str]) -> int:
    """Run the scenes and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_runs", description=__doc__)
    parser.add_argument("--forward-ms", type=float, default=80.0)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument(
        "--only", default="", help="scenes, or on GPUs cases, whose name this fits (re)"
    )
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="GPUs: stages (2)")
    parser.add_argument(
        "--microbatches", type=int, help="GPUs: of an iteration (twice as many as ranks)"
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--keep", type=Path, help="GPUs: leave what the ranks measured here")
    kept.add_argument("--from", dest="kept", type=Path, help="GPUs: only make the page of that")
    given = parser.parse_args(arguments)
    if given.microbatches is None:
        given.microbatches = 2 * given.ranks
    if given.device == "gpu":
        from benchmarks.pipeline_runs_gpu import run_or_read

        command = f"python -m benchmarks.pipeline_runs {' '.join(arguments)}"
        publish(run_or_read(given, command), given.output)
        return 0
    if given.keep or given.kept:
        parser.error("--keep and --from are for --device gpu")
    parts = [
        "# Pipeline schedules: real steps beside predicted ones",
        f"{environment_line('cpu')}; F = {given.forward_ms:g} ms slept, backward 2 F (halves 1.05 "
        f"and 0.95 F); medians of {given.iterations - WARM_UP} steps.\n",
    ]
    for scene in scenes():
        if re.search(given.only, scene.name):
            results = run_scene(scene, given.forward_ms / 1e3, given.iterations)
            parts.append(table_of(scene, results))
            print(parts[-1], file=sys.stderr, flush=True)
    publish("\n".join(parts), given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
