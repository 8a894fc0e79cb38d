"""Step times of pipeline schedules on GPUs, beside predictions from the passes of the same run.

`python -m benchmarks.pipeline_runs --device gpu [--ranks 4] [--microbatches N]` comes here. All
cases run one after the other in one set of processes with deterministic kernels, the references
(Megatron-Core's schedules of one and of two chunks) first and last. A step is the schedule's own
time from an idle device to an idle device, the reduction of tied embeddings included. Predictions
are those of `training.pipeline.simulator` for the median time of every pass (by events on the
compute stream); Megatron-Core's orders are predicted from the passes of the same orders in our
executor.

With ``--keep FOLDER`` what the ranks measured stays, and ``--from FOLDER`` makes the page of it
again: on any machine, and of a run that was cut off, of the cases that had ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import environment_line, run_ranks
from benchmarks.pipeline_runs import CHUNKS, REFERENCE, WARM_UP, without_data
from benchmarks.pipeline_runs_gpu_ranks import TIMELINE, Case, Found
from training.arguments import parse_settings, resolve_sizes
from training.pipeline.costs import Costs, StageCost
from training.pipeline.plan import PipelineShape
from training.pipeline.schedule import plan_for
from training.pipeline.simulator import predict, predict_megatron

SIZES = {
    2: "--num-layers 8 --hidden-size 6144 --num-attention-heads 48 --seq-length 4096",
    4: "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048",
}
"""By the number of stages."""
TRAINING = tuple(
    """
    --micro-batch-size 1 --bf16 --lr 1e-4 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
    --log-interval 100 --use-distributed-optimizer
    """.split()  # noqa: SIM905 - shorter and clearer than a list of strings
)
DATA = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "32000"),
    *("--num-workers", "0"),
)
TWO_CHUNKS = f"{REFERENCE}, 2 chunks"
STAND_INS = {REFERENCE: "1f1b", TWO_CHUNKS: "dfc, 2 chunks"}
"""Whose passes Megatron-Core's orders are predicted from."""
TRACED = "planned, 2 chunks, traced"
AUTO = ("--pipeline-schedule", "auto")
GUIDED = ("--use-dpp", "--dpp-choice", "guided")


def cases(num_ranks: int, num_microbatches: int, num_iterations: int, only: str) -> list[Case]:
    """All cases in their order.

    With `only` those whose name it fits, and those that the others are compared with.
    """
    measured = (*AUTO, "--plan-from", TIMELINE)
    named: list[tuple[str, tuple[str, ...], dict[str, object]]] = [
        (REFERENCE, (), {}),
        (TWO_CHUNKS, tuple(CHUNKS), {}),
        ("1f1b", ("--pipeline-schedule", "1f1b"), {}),
        ("zb-h1", ("--pipeline-schedule", "zb-h1"), {}),
        ("dfc, 2 chunks", (*CHUNKS, "--pipeline-schedule", "dfc"), {}),
        ("planned, 2 chunks, for even stages", (*CHUNKS, *AUTO), {}),
        (TRACED, (*CHUNKS, *AUTO), {"traced": True}),
        ("planned, 2 chunks, for the traced stages", (*CHUNKS, *measured), {}),
        ("the same, guided", (*CHUNKS, *measured, *GUIDED), {}),
        ("the same plan, messages late", (*CHUNKS, *measured), {"late_ratio": 0.05}),
        ("guided, messages late", (*CHUNKS, *measured, *GUIDED), {"late_ratio": 0.05}),
        ("dfc, 2 chunks, by NCCL", (*CHUNKS, "--pipeline-schedule", "dfc"), {"by_nccl": True}),
        (TWO_CHUNKS, tuple(CHUNKS), {}),
        (REFERENCE, (), {}),
    ]
    common = (
        *(*SIZES[num_ranks].split(), *TRAINING, *DATA),
        *("--pipeline-model-parallel-size", str(num_ranks)),
        *("--global-batch-size", str(num_microbatches), "--train-iters", str(num_iterations)),
    )
    return [
        Case(name=name, flags=[*common, *own], **how)  # type: ignore[arg-type]
        for name, own, how in named
        if name in (REFERENCE, TWO_CHUNKS, *STAND_INS.values()) or re.search(only, name)
    ]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case as it ran on all ranks."""

    case: Case
    found: Sequence[Found]
    folder: Path
    """Where the timeline lies that the case plans from."""

    @property
    def step_s(self) -> float:
        """Median step."""
        return statistics.median(self.found[-1].steps_s[WARM_UP:])

    @property
    def iteration_s(self) -> float:
        """Median iteration, the optimizer's step included."""
        return statistics.median(self.found[-1].iterations_s[WARM_UP:])

    @property
    def last_s(self) -> float:
        """What the end of a step takes when no rank waits there for the others."""
        return min(found.last_s for found in self.found)

    def num_chunks(self) -> int:
        """Chunks of a rank."""
        return 2 if CHUNKS[0] in self.case.flags else 1


def measured_costs(row: Row) -> Costs:
    """Costs of the stages as a plan's passes took in the run."""
    passes = {name: s for found in row.found for name, s in found.passes_s.items()}
    num_stages = len(row.found) * row.num_chunks()
    stages = tuple(
        StageCost(
            forward_s=passes[f"F{stage}"],
            input_gradient_s=passes.get(f"I{stage}", passes.get(f"B{stage}", 0.0)),
            weight_gradient_s=passes.get(f"W{stage}", 0.0),
        )
        for stage in range(num_stages)
    )
    message_s = statistics.mean(found.message_s for found in row.found)
    return Costs(stages=stages, message_s=(message_s,) * (num_stages - 1))


def predicted_s(row: Row, costs: Costs) -> float:
    """The simulator's step."""
    settings = parse_settings(without_data(row.case.flags_in(row.folder)))
    num_ranks = len(row.found)
    sizes = resolve_sizes(settings, num_ranks)
    plan = plan_for(settings, sizes, sizes.num_microbatches)
    shape = PipelineShape(
        num_ranks=num_ranks,
        num_microbatches=sizes.num_microbatches,
        num_chunks=row.num_chunks(),
    )
    table = costs.table(shape)
    step = predict_megatron(shape, table) if plan is None else predict(plan, table)
    return step.step_s + row.last_s


def table_of(rows: Sequence[Row]) -> str:
    """All cases as Markdown."""
    by_name = {row.case.name: row for row in rows}
    reference_s, chunks_s = (
        statistics.mean(row.step_s for row in rows if row.case.name == name)
        for name in (REFERENCE, TWO_CHUNKS)
    )
    predicted = {
        name: predicted_s(row, measured_costs(by_name[STAND_INS.get(name, name)]))
        for name, row in by_name.items()
    }
    lines = [
        f"| schedule | step, ms | of {REFERENCE}'s | of {REFERENCE}'s with 2 chunks "
        "| predicted, ms | of predicted 1F1B | of predicted 2 chunks | iteration, ms "
        "| GiB by rank | losses |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, step_s = row.case.name, row.step_s
        late = bool(row.case.late_ratio)
        expected_s = predicted[name]
        by_plan = (
            "– | – | –"
            if late or "guided" in name
            else f"{1e3 * expected_s:.1f} | {expected_s / predicted[REFERENCE]:.3f} "
            f"| {expected_s / predicted[TWO_CHUNKS]:.3f}"
        )
        lines.append(
            f"| {name} | {1e3 * step_s:.1f} | {step_s / reference_s:.3f} "
            f"| {step_s / chunks_s:.3f} | {by_plan} | {1e3 * row.iteration_s:.1f} "
            f"| {', '.join(f'{found.peak_gib:.1f}' for found in row.found)} "
            f"| {_losses(row, by_name)} |"
        )
    return "\n".join([*lines, ""])


def _losses(row: Row, by_name: dict[str, Row]) -> str:
    """Whether every loss is Megatron-Core's with as many chunks, to the last digit."""
    of = by_name[REFERENCE if row.num_chunks() == 1 else TWO_CHUNKS]
    own, expected = row.found[-1].losses, of.found[-1].losses
    return f"{'same' if own == expected else 'DIFFER'} ({float.fromhex(own[-1]):.6f})"


def run(folder: Path, given: argparse.Namespace, command: str) -> None:
    """Train all cases; leaves what they are and what each rank measured in the folder."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    about = {
        "command": command,
        "environment": environment_line("gpu"),
        "connections": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
        "iterations": given.iterations,
        "ranks": given.ranks,
        "microbatches": given.microbatches,
    }
    chosen = cases(given.ranks, given.microbatches, given.iterations, given.only)
    wanted = [asdict(case) for case in chosen]
    for name, content in (("about", about), ("cases", wanted)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    run_ranks(given.ranks, ["benchmarks.pipeline_runs_gpu_ranks", str(folder)])


def read_rows(folder: Path, num_ranks: int) -> list[Row]:
    """Cases that ended on all ranks."""
    of_rank = [
        [Found(**one) for one in json.loads((folder / f"found.{rank}.json").read_text("utf-8"))]
        for rank in range(num_ranks)
    ]
    known = [Case(**case) for case in json.loads((folder / "cases.json").read_text("utf-8"))]
    return [
        Row(case=case, found=found, folder=folder)
        for case, found in zip(known, zip(*of_rank, strict=False), strict=False)
    ]


def page(folder: Path) -> str:
    """The result page of what is in the folder."""
    about = json.loads((folder / "about.json").read_text("utf-8"))
    num_ranks = about["ranks"]
    last = f"found.{num_ranks - 1}.json"
    if not (folder / last).is_file():
        raise SystemExit(f"{folder} holds no {last}: no case has ended there")
    rows = read_rows(folder, num_ranks)
    num_wanted = len(json.loads((folder / "cases.json").read_text("utf-8")))
    cut = "" if len(rows) == num_wanted else f" Cut off after {len(rows)} of {num_wanted} cases."
    return "\n".join(
        [
            f"# Pipeline schedules on {num_ranks} GPUs",
            "",
            f"`{about['command']}` on {about['environment']}, CUDA_DEVICE_MAX_CONNECTIONS="
            f"{about['connections']}. `{SIZES[num_ranks]}`, PP{num_ranks}, "
            f"{about['microbatches']} microbatches, bf16, deterministic kernels; medians of "
            f"{about['iterations'] - WARM_UP} steps; late messages: 5 %, by two forwards of a "
            f"rank.{cut}",
            "",
            table_of(rows),
        ]
    )


def run_or_read(given: argparse.Namespace, command: str) -> str:
    """The page of a new run, or of a kept one."""
    if given.kept is not None:
        return page(given.kept)
    with TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        run(folder.absolute(), given, command)
        return page(folder)
