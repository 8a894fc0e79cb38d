"""Does tracing change the training? Losses of traced and untraced runs, digit by digit.

    python -m benchmarks.losses [--device cpu|gpu] [--only TEXT] [--iterations N] [-o RESULT.md]
    python -m benchmarks.losses --schedules [--device cpu|gpu] [--iterations N] [-o RESULT.md]

Every way of training of `benchmarks.axes` is run three times from the same seed: twice untraced, to
see whether it repeats itself at all, and once with every iteration traced at `full`. Exit 1 when a
training repeats itself untraced and differs traced.

With `--schedules` pipelines of two stages are trained by Megatron-Core's schedule and by plans of
ours instead, once each and with deterministic kernels; exit 1 when the curves differ.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.axes import SIZES, Family, families, schedule_families
from benchmarks.jobs import DATA, environment_line, publish, run_ranks
from benchmarks.losses_ranks import Run, write_plan

_RUN = re.compile(r"^run: (.*)$", re.MULTILINE)
_LINE = re.compile(
    r"iteration +\d+/.*?(?:lm loss: (?P<loss>\S+) \| )?loss scale: (?P<scale>\S+) \|"
    r"(?: grad norm: (?P<norm>\S+) \|)? number of skipped iterations: +(?P<skipped>\d+)"
)
Curve = tuple[tuple[str | None, ...], ...]
"""Loss, loss scale, gradient norm and whether it was skipped, of every iteration, as printed."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves of the runs of one way of training."""

    name: str
    untraced: tuple[Curve, ...]
    traced: Curve

    @property
    def repeats(self) -> bool:
        """Whether the untraced runs agree."""
        return len(set(self.untraced)) == 1

    @property
    def unchanged(self) -> bool:
        """Whether the traced run is one of those."""
        return self.traced in self.untraced

    def row(self) -> str:
        """As a row of the result table."""
        words = {True: "yes", False: "NO"}
        loss, _, norm, _ = self.traced[-1]
        return f"| {self.name} | {loss}, {norm} | {words[self.repeats]} | {words[self.unchanged]} |"


def train(
    family: Family,
    device: str,
    num_iterations: int,
    folder: Path,
    *,
    num_untraced: int = 2,
    global_batch: int = 8,
) -> list[Curves]:
    """Train a family's jobs; rank files go to `folder`, one folder a job by its number."""
    length = ("--train-iters", str(num_iterations), "--log-interval", "1")
    runs = []
    for number, (name, flags) in enumerate(family.axes.items()):
        sizes = [*SIZES[device], "--global-batch-size", str(global_batch), *family.sizes]
        words = [*sizes, *DATA, *length, *flags]
        runs += [Run(name=name, flags=words)] * num_untraced
        runs.append(Run(name=name, flags=words, trace_dir=str(folder / str(number))))
    plan = folder / "plan.json"
    write_plan(runs, plan)
    output = run_ranks(family.num_ranks, ["benchmarks.losses_ranks", str(plan)])
    curves = read_curves(output)
    step = num_untraced + 1
    if [name for name, _ in curves] != [run.name for run in runs] or any(
        len(curve) != num_iterations for _, curve in curves
    ):
        logged = ", ".join(f"{name} {len(curve)}" for name, curve in curves)
        raise SystemExit(
            f"{family.name}: not every run logged {num_iterations} iterations ({logged}):\n{output}"
        )
    return [
        Curves(
            name=curves[first][0],
            untraced=tuple(curve for _, curve in curves[first : first + num_untraced]),
            traced=curves[first + num_untraced][1],
        )
        for first in range(0, len(curves), step)
    ]


def train_schedules(device: str, num_iterations: int) -> list[tuple[str, str, Curve, bool]]:
    """Train pipelines by all schedules, in one set of processes.

    Returns of each run its family, its schedule, its curve, and whether that is Megatron-Core's.
    """
    length = ("--train-iters", str(num_iterations), "--log-interval", "1")
    named, runs = [], []
    for family in schedule_families():
        for name, flags in family.axes.items():
            words = [*SIZES[device], "--global-batch-size", "4", *DATA, *length]
            named.append((family.name, name))
            runs.append(
                Run(name=name, flags=[*words, *family.sizes, *flags], is_deterministic=True)
            )
    with TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        write_plan(runs, plan)
        curves = read_curves(run_ranks(2, ["benchmarks.losses_ranks", str(plan)]))
    expected = {
        family: curve
        for (family, name), (_, curve) in zip(named, curves, strict=True)
        if name == "Megatron-Core"
    }
    return [
        (family, name, curve, curve == expected[family] and len(curve) == num_iterations)
        for (family, name), (_, curve) in zip(named, curves, strict=True)
    ]


def render_schedules(
    rows: Sequence[tuple[str, str, Curve, bool]], device: str, iterations: int, command: str
) -> str:
    """The result page of schedules."""
    words = {True: "yes", False: "NO"}
    return "\n".join(
        [
            f"# Losses of pipeline schedules beside Megatron-Core's ({device})",
            "",
            f"`{command}` on {environment_line(device)}. GPT: `{' '.join(SIZES[device])}`, two "
            f"stages, 4 microbatches, {iterations} iterations, deterministic kernels; loss, loss "
            "scale, gradient norm and skipped iterations are compared as they are printed.",
            "",
            "| training | schedule | last loss, norm | as Megatron-Core's |",
            "|---|---|---|---|",
            *(
                f"| {family} | {name} | {curve[-1][0]}, {curve[-1][2]} | {words[same]} |"
                for family, name, curve, same in rows
            ),
            "",
        ]
    )


def read_curves(output: str) -> list[tuple[str, Curve]]:
    """Names and curves of the runs in the output of `benchmarks.losses_ranks`."""
    _, *parts = _RUN.split(output)
    return [
        (name, tuple(match.groups() for match in _LINE.finditer(text)))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def render(curves: Sequence[Curves], device: str, iterations: int, command: str) -> str:
    """The result page."""
    return "\n".join(
        [
            f"# Losses with and without tracing ({device})",
            "",
            f"`{command}` on {environment_line(device)}. GPT: `{' '.join(SIZES[device])}`, "
            f"{iterations} iterations; loss, loss scale, gradient norm and skipped iterations are "
            "compared as they are printed.",
            "",
            "| training | last loss, norm | repeats itself untraced | same traced |",
            "|---|---|---|---|",
            *(each.row() for each in curves),
            "",
        ]
    )


def main() -> int:
    """Train everything and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name holds TEXT")
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    parser.add_argument("--schedules", action="store_true", help="pipeline schedules instead")
    arguments = parser.parse_args()
    command = f"python -m benchmarks.losses --device {arguments.device}"
    if arguments.schedules:
        rows = train_schedules(arguments.device, arguments.iterations)
        command += " --schedules"
        page = render_schedules(rows, arguments.device, arguments.iterations, command)
        publish(page, arguments.output)
        return 0 if all(same for *_, same in rows) else 1
    curves = []
    for family in families(arguments.device):
        axes = {name: words for name, words in family.axes.items() if arguments.only in name}
        if axes:
            with TemporaryDirectory() as folder:
                chosen = replace(family, axes=axes)
                curves += train(chosen, arguments.device, arguments.iterations, Path(folder))
            print("\n".join(each.row() for each in curves[-len(axes) :]), file=sys.stderr)
    if not curves:
        parser.error(f"--only {arguments.only}: no training's name holds that")
    page = render(curves, arguments.device, arguments.iterations, command)
    publish(page, arguments.output)
    return 0 if all(each.unchanged or not each.repeats for each in curves) else 1


if __name__ == "__main__":
    sys.exit(main())
