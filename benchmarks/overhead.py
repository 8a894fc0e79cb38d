"""What does tracing cost? Blocks of traced and untraced iterations, alternating in one job.

    python -m benchmarks.overhead [--device cpu|gpu] [--layouts TP2,DP2] [--cycles N] [-o RESULT.md]
    python -m benchmarks.overhead --device gpu --only "12 x" --modes full,full/4
    python -m benchmarks.overhead --device gpu --modes default --block 11
    python -m benchmarks.overhead --device gpu --modes default --block 901 --cycles 0

For each layout one process group trains several models, GPU-bound and host-bound. Tracing is
installed and removed again between blocks of iterations: off, base, off, full, off, … A mode is
a granularity, `full/4` modules of one layer in 4 only (`--trace-layer-stride`). Every iteration of
such a block is traced and ends a window, which is the dearest setting; `default` is what the flags
do where nothing is said, two traced iterations of five, so its blocks count five iterations or a
multiple, and only the ratio of means says what a run pays. `default, by cycles` is the same from
within its blocks, each cycle of five against the iterations beside it that pay nothing, which sees
a tenth of a per cent (`benchmarks/paired.py`); `off, by cycles` is the same of untraced blocks, and
should be one. Rows by place say which iterations of a cycle pay: two traced ones and the one in
which their window is written. `--cycles 0` leaves untraced blocks out and spends all of its time on
that. In `armed` everything is installed and nothing is traced.

The first iteration of a block, in which the mode is switched, is not counted; all others are
compared with the untraced blocks right before and after theirs, so that drift of the machine
cancels. Prints a result page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import DATA, DEVICES, environment_line, model, publish, run_ranks
from benchmarks.overhead_ranks import ARMED, DEFAULT, Plan, tracing_in
from benchmarks.paired import OFF, Cost, blocks_of, cost_in_cycles, cost_of
from megascan.config import TraceConfig
from megascan.schema import Granularity

MODELS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpu": {
        "host-bound": model(layers=8, hidden=512, heads=8, sequence=512),
        "GPU-bound": model(layers=4, hidden=6144, heads=48, sequence=2048),
        "24 x 1024": model(layers=24, hidden=1024, heads=16, sequence=2048),
        "12 x 2560": model(layers=12, hidden=2560, heads=20, sequence=4096),
    },
    "cpu": {"small": model(layers=4, hidden=128, heads=4, sequence=64)},
}
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ("--global-batch-size", "4")),
    "TP2": (2, ("--tensor-model-parallel-size", "2", "--global-batch-size", "4")),
    "DP2": (2, ("--global-batch-size", "8")),
    "PP2": (2, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "4")),
    "TP2-DP2": (4, ("--tensor-model-parallel-size", "2", "--global-batch-size", "8")),
    "PP2-DP2": (4, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")),
}
"""Number of ranks, and flags; each replica runs 4 microbatches of one sample."""
DEFAULT_LAYOUTS = {"gpu": "one,TP2,TP2-DP2", "cpu": "one,TP2"}
MODES = tuple(str(granularity) for granularity in Granularity)
NUM_WARMUP, BLOCK_LENGTH = 6, 4
DEFAULTS, NUM_QUIET = TraceConfig(), 2
"""Of the default's cycle of five iterations two are traced; in the third the window is written."""


def modes_of(num_cycles: int, traced: Sequence[str] = MODES) -> list[str]:
    """Modes of successive blocks: every traced one between two untraced ones, in turns; without
    cycles, the traced ones alone.
    """
    if not num_cycles:
        return list(traced)
    modes = [OFF]
    for cycle in range(num_cycles):
        for mode in traced[:: 1 if cycle % 2 else -1]:
            modes += [mode, OFF]
    return modes


def chosen_models(device: str, only: str) -> list[str]:
    """Names of the models that hold one of the texts, separated by commas."""
    return [name for name in MODELS[device] if any(text in name for text in only.split(","))]


def measure(layout: str, arguments: argparse.Namespace) -> dict[str, list[Cost]]:
    """Costs of each mode by model, those that `--only` chooses.

    SystemExit with the output when the run fails.
    """
    device, traced = arguments.device, arguments.modes.split(",")
    num_ranks, flags = LAYOUTS[layout]
    common = (*flags, *DATA, *DEVICES[device])
    models = chosen_models(device, arguments.only)
    with TemporaryDirectory() as folder:
        plan = Plan(
            models={name: [*MODELS[device][name], *common] for name in models},
            modes=modes_of(arguments.cycles, traced),
            num_warmup=NUM_WARMUP,
            block_length=arguments.block,
            window=arguments.window,
            folder=folder,
        )
        plan.write(Path(folder) / "plan.json")
        run_ranks(num_ranks, ["benchmarks.overhead_ranks", str(Path(folder) / "plan.json")])
        times = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
    return {name: list(costs_of(plan, traced, times[name])) for name in plan.models}


def costs_of(plan: Plan, traced: Sequence[str], times_ms: Sequence[float]) -> Iterator[Cost]:
    """Yield what each mode costs; `default` also within its cycles, beside untraced iterations."""
    length = plan.block_length
    blocks = blocks_of(plan.modes, times_ms, length)
    if OFF in plan.modes:
        for mode in traced:
            yield cost_of(mode, blocks)
    if DEFAULT not in traced or length <= 2 * DEFAULTS.interval:
        return
    firsts = [plan.num_warmup + 2 + length * number for number in range(len(blocks))]

    def within(mode: str, what: str, place: int | None = None) -> Cost:
        interval = DEFAULTS.interval
        cost = cost_in_cycles(
            mode, blocks, firsts, interval=interval, num_quiet=NUM_QUIET, place=place
        )
        return replace(cost, mode=f"{mode}, {what}")

    for mode in (DEFAULT, OFF):
        if mode in plan.modes:
            yield within(mode, "by cycles")
    for place in range(DEFAULTS.interval - NUM_QUIET):
        yield within(DEFAULT, f"iteration {place + 1} of a cycle", place)


def row(name: str, layout: str, cost: Cost) -> str:
    """One line of the table."""
    return (
        f"| {name} | {LAYOUTS[layout][0]} ({layout}) | {cost.mode} | {cost.untraced_ms:.1f} "
        f"| {cost.median:.4f} | {cost.low:.4f} to {cost.high:.4f} | {cost.mean:.4f} "
        f"| {cost.mean_low:.4f} to {cost.mean_high:.4f} | {cost.num_iterations} |"
    )


def render(rows: Sequence[str], device: str, window: int, command: str) -> str:
    """The result page."""
    sizes = "; ".join(f"{name}: `{' '.join(words)}`" for name, words in MODELS[device].items())
    return "\n".join(
        [
            f"# What tracing costs ({device})",
            "",
            f"`{command}` on {environment_line(device)}.",
            "",
            f"Models: {sizes}, 4 microbatches an iteration. All iterations of a traced block are "
            f"traced, in windows of {window}; two of five in `{DEFAULT}`, none in `{ARMED}`.",
            "",
            "| model | GPUs | mode | untraced, ms | traced ÷ untraced, median "
            "| 95 % interval | by means | 95 % interval | iterations |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Below one means noise, not a gain. Rows by cycles count cycles, not iterations.",
            "",
        ]
    )


def main() -> int:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(MODELS), default="cpu")
    parser.add_argument("--layouts", metavar="NAME,NAME", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument(
        "--cycles", type=int, default=8, help="blocks of each mode (8); 0: one, without untraced"
    )
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        metavar="LIST",
        help="of base, full, full/4, default, armed (base,full)",
    )
    parser.add_argument(
        "--block",
        type=int,
        default=BLOCK_LENGTH,
        metavar="N",
        help=f"iterations of a block, of which the first is not counted ({BLOCK_LENGTH})",
    )
    parser.add_argument("--window", type=int, default=1, help="iterations in a window (1)")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="models whose name holds TEXT, or one of several: A,B",
    )
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    arguments = parser.parse_args()
    if not chosen_models(arguments.device, arguments.only):
        parser.error(f"--only {arguments.only}: no model's name holds that")
    if arguments.block < 2:
        parser.error(
            f"--block {arguments.block}: its first iteration is not counted; want 2 or more"
        )
    if not arguments.cycles and arguments.modes != DEFAULT:
        parser.error(f"--cycles 0: only --modes {DEFAULT} has untraced iterations to compare with")
    if not arguments.cycles and arguments.block <= 2 * DEFAULTS.interval:
        parser.error(f"--block {arguments.block}: want more than two cycles of {DEFAULTS.interval}")
    for mode in arguments.modes.split(","):
        try:
            tracing_in(mode, arguments.window, Path())
        except ValueError as error:
            parser.error(f"--modes {arguments.modes}: {error}")
    words = arguments.layouts or DEFAULT_LAYOUTS[arguments.device]
    if unknown := [name for name in words.split(",") if name not in LAYOUTS]:
        parser.error(f"--layouts {words}: no layout {unknown[0]}, only {', '.join(LAYOUTS)}")
    rows = []
    for layout in words.split(","):
        costs = measure(layout, arguments)
        measured = [row(name, layout, cost) for name, by_mode in costs.items() for cost in by_mode]
        print("\n".join(measured), file=sys.stderr, flush=True)
        rows += measured
    command = f"python -m benchmarks.overhead --device {arguments.device} --layouts {words}"
    command += f" --cycles {arguments.cycles} --window {arguments.window}"
    command += f" --modes {arguments.modes}"
    command += f" --block {arguments.block}" if arguments.block != BLOCK_LENGTH else ""
    command += f" --only '{arguments.only}'" if arguments.only else ""
    page = render(rows, arguments.device, arguments.window, command)
    publish(page, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
