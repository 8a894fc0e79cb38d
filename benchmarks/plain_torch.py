"""Plain PyTorch, traced: DDP, FSDP2, torch.compile and a pipeline on four ranks.

    python -m benchmarks.plain_torch [--device cpu|gpu] [--only TEXT] [--keep DIR] [-o RESULT.md]

Each layout is one job of four ranks (gloo on the CPU, NCCL on GPUs) without megatron.core, which
MegaScan sees through the model's hooks and torch's collectives alone. It is asked for

- losses and weights of the same training, twice untraced and once with every iteration traced at
  `full`, compared to the last bit;
- a healthy stage, in which nobody may be accused, and one with a rank whose layers take 1.5 times
  as long, which alone must be accused, of compute; both with every communication matched;
- the cost of tracing, by alternating blocks of traced and untraced iterations.

Exit 1 when something of that is not so; the cost is reported as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import environment_line, publish, run_ranks
from benchmarks.layout_cases import Case, Fault
from benchmarks.layouts import MANY_CORES, Result, judge
from benchmarks.overhead import modes_of
from benchmarks.paired import Cost, blocks_of, cost_of
from benchmarks.plain_torch_models import COMPILED, DDP, FSDP, PIPELINE, Sizes
from benchmarks.plain_torch_ranks import BLOCK_LENGTH, NUM_LOSSES, Plan, Stage
from megascan.schema import Granularity

NUM_RANKS = 4
LAYOUTS = (DDP, FSDP, PIPELINE, COMPILED)
LOSSES, COST = "losses", "cost"
FAULTS = (Fault(name="healthy"), Fault(name="compute × 1.5", cause="compute"))
SIZES = {
    "cpu": Sizes(num_layers=4, hidden=128, num_heads=4, sequence=384, num_microbatches=2),
    "gpu": Sizes(num_layers=4, hidden=4096, num_heads=32, sequence=2048, num_microbatches=4),
}
NUM_ITERATIONS = {"cpu": 20, "gpu": 20}
NUM_CYCLES = {"cpu": 2, "gpu": 6}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A stage: its verdict, and the communications of which only one side was found."""

    result: Result
    num_unmatched: int

    @property
    def right(self) -> bool:
        """The verdict is right and rests on everything."""
        return self.result.right and self.num_unmatched == 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one layout; None and nothing stand for what was not asked for."""

    layout: str
    losses: tuple[tuple[tuple[str, ...], ...], ...] | None
    """`(rank, run, value)`: losses and sums of weights of two untraced runs and a traced one."""
    judged: tuple[Judged, ...]
    costs: tuple[Cost, ...]

    @property
    def repeats(self) -> bool:
        """Whether the untraced trainings agree on every rank."""
        return all(first == second for first, second, _ in self.losses or ())

    @property
    def unchanged(self) -> bool:
        """Whether the traced training is one of the untraced ones on every rank."""
        return all(traced in untraced for *untraced, traced in self.losses or ())

    @property
    def right(self) -> bool:
        """Nothing changed and every verdict right; a training that cannot repeat itself is none."""
        return self.repeats and self.unchanged and all(each.right for each in self.judged)

    def loss_rows(self) -> list[str]:
        """As a row of the table of losses."""
        if self.losses is None:
            return []
        words = {True: "yes", False: "NO"}
        num_values = sum(len(runs[-1]) for runs in self.losses)
        return [
            f"| {self.layout} | {num_values} | {words[self.repeats]} | {words[self.unchanged]} |"
        ]

    def verdict_rows(self) -> list[str]:
        """As rows of the table of verdicts."""
        return [f"{each.result.row()} {each.num_unmatched:,} |" for each in self.judged]

    def cost_rows(self) -> list[str]:
        """As rows of the table of costs."""
        return [
            f"| {self.layout} | {cost.mode} | {cost.untraced_ms:.1f} | {cost.median:.4f} "
            f"| {cost.low:.4f} to {cost.high:.4f} | {cost.mean:.4f} | {cost.num_iterations} |"
            for cost in self.costs
        ]


def cases_of(layout: str) -> list[Case]:
    """The stages of a layout, each with another slow rank."""
    slow_rank = (LAYOUTS.index(layout) + 1) % NUM_RANKS
    return [Case(layout=layout, fault=fault, rank=slow_rank) for fault in FAULTS]


def plan_of(layout: str, device: str, only: str, folder: Path) -> Plan:
    """What the ranks do for those cases of a layout whose name holds `only`."""
    return Plan(
        layout=layout,
        device=device,
        sizes=SIZES[device],
        folder=str(folder),
        compares_losses=only in f"{layout} {LOSSES}",
        stages=tuple(
            Stage(
                folder=str(folder / case.file_name),
                slow_rank=case.rank if case.fault.cause else None,
            )
            for case in _wanted(layout, only)
        ),
        num_iterations=NUM_ITERATIONS[device],
        modes=tuple(modes_of(NUM_CYCLES[device])) if only in f"{layout} {COST}" else (),
    )


def _wanted(layout: str, only: str) -> list[Case]:
    return [case for case in cases_of(layout) if only in case.name]


def train(plan: Plan) -> None:
    """Run the job of one layout; SystemExit with the output when it fails."""
    folder = Path(plan.folder)
    folder.mkdir(parents=True)
    plan.write(folder / "plan.json")
    started = time.monotonic()
    run_ranks(NUM_RANKS, ["benchmarks.plain_torch_ranks", str(folder / "plan.json")])
    seconds = time.monotonic() - started
    print(f"{plan.layout}: trained in {seconds:.0f} s", file=sys.stderr, flush=True)


def outcome_of(plan: Plan, cases: Sequence[Case], keep: Path | None) -> Outcome:
    """Read what the ranks left, and judge it."""
    folder = Path(plan.folder)
    outcome = Outcome(
        layout=plan.layout,
        losses=read_losses(folder) if plan.compares_losses else None,
        judged=tuple(judge_case(case, folder, keep) for case in cases),
        costs=read_costs(folder, plan.modes) if plan.modes else (),
    )
    rows = [*outcome.loss_rows(), *outcome.verdict_rows(), *outcome.cost_rows()]
    print("\n".join(rows), file=sys.stderr, flush=True)
    return outcome


def judge_case(case: Case, folder: Path, keep: Path | None) -> Judged:
    """Detect in the rank files of a stage."""
    result = judge(case, folder, keep)
    verdict = folder / case.file_name / "verdict.json"
    completeness = json.loads(verdict.read_text(encoding="utf-8"))["completeness"]
    return Judged(result=result, num_unmatched=sum(completeness["num_unmatched"].values()))


def read_losses(folder: Path) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """What every rank wrote."""
    files = [folder / f"losses-{rank}.json" for rank in range(NUM_RANKS)]
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return tuple(tuple(tuple(run) for run in runs) for runs in ranks)


def read_costs(folder: Path, modes: Sequence[str]) -> tuple[Cost, ...]:
    """Of each granularity, by the times that rank 0 wrote."""
    times_ms = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    blocks = blocks_of(modes, times_ms, BLOCK_LENGTH)
    return tuple(cost_of(str(mode), blocks) for mode in Granularity)


def render(outcomes: Sequence[Outcome], failed: Sequence[str], device: str, command: str) -> str:
    """The result page."""
    num_right = sum(outcome.right for outcome in outcomes)
    left_out = [layout for layout in LAYOUTS if not can_run(layout)]
    lacking = [
        *([f"Training failed: {', '.join(failed)}.", ""] if failed else ()),
        *([f"Left out for want of a compiler: {', '.join(left_out)}.", ""] if left_out else ()),
    ]
    return "\n".join(
        [
            f"# Plain PyTorch on four ranks ({device})",
            "",
            f"`{command}` on {environment_line(device)}. Blocks like a transformer's: "
            f"{SIZES[device].words()}; {_precision(device)}.",
            "",
            f"{num_right} of {len(outcomes) + len(failed)} layouts: losses and weights unchanged, "
            "every verdict right, every communication matched.",
            "",
            *lacking,
            f"Losses of {NUM_LOSSES} iterations and the sums of all weights after them, of every "
            "rank, to the last bit:",
            "",
            "| layout | values | repeats itself untraced | same traced |",
            "|---|---|---|---|",
            *(row for outcome in outcomes for row in outcome.loss_rows()),
            "",
            "4 of every 5 iterations traced at `full`, then `megascan detect`:",
            "",
            "| case | verdict | accused | clock residual p99, µs | iteration, ms | right "
            "| unmatched |",
            "|---|---|---|---|---|---|---|",
            *(row for outcome in outcomes for row in outcome.verdict_rows()),
            "",
            "Blocks of traced iterations, windows of one, between untraced ones (DDP keeps the "
            "hook of its first tracing also in those):",
            "",
            "| layout | granularity | untraced, ms | traced ÷ untraced, median | 95 % interval "
            "| by means | iterations |",
            "|---|---|---|---|---|---|---|",
            *(row for outcome in outcomes for row in outcome.cost_rows()),
            "",
        ]
    )


def _precision(device: str) -> str:
    if device == "cpu":
        return "float32"
    return "weights in bfloat16 (FSDP2: float32, computed with in bfloat16)"


def main() -> int:
    """Run the layouts, print the page, exit 1 when one was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="put rank files and verdict of each case there"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    layouts = [name for name in LAYOUTS if can_run(name)]
    outcomes, failed = run_all(layouts, arguments.device, arguments.only, arguments.keep)
    if not outcomes and not failed:
        parser.error(f"--only {arguments.only}: no case's name holds that")
    only = f' --only "{arguments.only}"' if arguments.only else ""
    command = f"python -m benchmarks.plain_torch --device {arguments.device}{only}"
    publish(render(outcomes, failed, arguments.device, command), arguments.output)
    return 0 if all(outcome.right for outcome in outcomes) and not failed else 1


def can_run(layout: str) -> bool:
    """Whether this machine has what a layout needs: a compiler, for torch.compile."""
    has_compiler = shutil.which(os.environ.get("CC", "gcc")) is not None
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return layout != COMPILED or (has_compiler and has_headers)


def run_all(
    layouts: Sequence[str], device: str, only: str, keep: Path | None
) -> tuple[list[Outcome], list[str]]:
    """Train and judge; outcomes, and the layouts whose training failed."""
    failed, judged = [], list[Future[Outcome]]()
    with TemporaryDirectory() as temporary, ThreadPoolExecutor(1) as pool:
        for layout in layouts:
            plan = plan_of(layout, device, only, Path(temporary) / layout.replace(" ", "-"))
            if not (plan.compares_losses or plan.stages or plan.modes):
                continue
            try:
                train(plan)
            except SystemExit as failure:  # the others are worth their time on the machine
                print(failure, file=sys.stderr, flush=True)
                failed.append(layout)
                continue
            judged.append(pool.submit(outcome_of, plan, _wanted(layout, only), keep))
            if (os.cpu_count() or 1) < MANY_CORES:
                judged[-1].result()
        return [each.result() for each in judged], failed


if __name__ == "__main__":
    sys.exit(main())
