"""Is the right rank named? Real training in several layouts, healthy and with faults.

    python -m benchmarks.layouts [--device cpu|gpu] [--ranks 2|4] [--trial second] [--only TEXT]
                                 [--layer-stride N] [--keep DIR]
    python -m benchmarks.layouts --device gpu --judge DIR    (kept runs again, on any machine)

Every layout is one job of four ranks or of two (gloo on the CPU, NCCL on GPUs) that goes through
its cases one after the other, each traced by itself; `megascan detect` then judges the rank files
of each. Faults are made in three ways: by the trainer (`--inject-fault`; for compute a spinning
kernel after each module), by a second process that multiplies matrices on the rank's GPU, and by
busy processes on the one core that the rank is confined to. The detector is told nothing of them.

A case is right when the ranks that the verdict accuses are exactly the faulty one, with its cause;
a healthy one when nobody is. Accused are findings whose owner is the node, and garbage collection,
which belongs to the job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import (
    DATA,
    DEVICES,
    LAYOUTS,
    environment_line,
    publish,
    run_python,
    run_ranks,
    unpack,
)
from benchmarks.layout_cases import TRIALS, Case, all_cases
from benchmarks.layout_ranks import Plan, Stage

ENVIRONMENT = "environment.txt"
"""Beside kept runs: what they ran on."""
MANY_CORES = 16
"""With so many, verdicts are reached while the next layout trains."""
NUM_ITERATIONS = {"cpu": 25, "gpu": 20}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the verdict says of a case."""

    case: Case
    verdict: str
    accused: tuple[tuple[int, ...], ...]
    causes: tuple[str, ...]
    slowdowns: tuple[float, ...]
    alignment_p99_us: float
    iteration_ms: float

    @property
    def right(self) -> bool:
        """Exactly the faulty rank with its cause; nobody in a healthy run."""
        if self.case.fault.cause is None:
            return not self.accused
        return self.accused == ((self.case.rank,),) and self.causes == (self.case.fault.cause,)

    def row(self) -> str:
        """As a row of the result table."""
        named = "; ".join(
            f"{','.join(map(str, ranks))} {cause} {slowdown:.2f}x"
            for ranks, cause, slowdown in zip(
                self.accused, self.causes, self.slowdowns, strict=True
            )
        )
        right = "yes" if self.right else "NO"
        return (
            f"| {self.case.name} | {self.verdict} | {named or '–'} | "
            f"{self.alignment_p99_us:,.0f} | {self.iteration_ms:,.0f} | {right} |"
        )


def train(cases: Sequence[Case], given: argparse.Namespace, folder: Path) -> None:
    """Run the job of one layout; leaves a folder of rank files a case."""
    num_iterations = given.iterations or NUM_ITERATIONS[given.device]
    stages = tuple(
        Stage(folder=str(folder / case.file_name), hog=case.fault.hog, rank=case.rank)
        for case in cases
    )
    plan = Plan(stages=stages, num_iterations=num_iterations, layer_stride=given.layer_stride)
    plan.write(folder / "plan.json")
    faults = []
    for number, case in enumerate(cases):
        if case.fault.inject is not None:
            first, last = plan.span_of(number)
            spec = f"rank={case.rank},{case.fault.inject},from={first},to={last}"
            faults += ["--inject-fault", spec]
    layout = LAYOUTS[given.ranks][cases[0].layout]
    model = TRIALS[given.trial].models[given.device]
    words = [*model, *layout, *DATA, *DEVICES[given.device], *faults]
    run_ranks(given.ranks, ["benchmarks.layout_ranks", str(folder / "plan.json"), *words])


def judge(case: Case, folder: Path, keep: Path | None) -> Result:
    """Detect in the rank files of one case; packs them into `keep`, with the verdict."""
    trace = folder / case.file_name
    verdict = trace / "verdict.json"
    done = run_python(["-m", "megascan", "detect", str(trace), "--json", str(verdict)])
    (trace / "verdict.txt").write_text(done.stdout, encoding="utf-8")
    report = json.loads(verdict.read_text(encoding="utf-8"))
    if keep is not None:
        shutil.make_archive(str(keep / case.file_name), "gztar", folder, case.file_name)
    accused = [
        each for each in report["findings"] if each["owner"] == "node" or each["cause"] == "gc"
    ]
    return Result(
        case=case,
        verdict=report["verdict"],
        accused=tuple(tuple(finding["ranks"]) for finding in accused),
        causes=tuple(finding["cause"] for finding in accused),
        slowdowns=tuple(finding["slowdown"] for finding in accused),
        alignment_p99_us=report["alignment"]["residual_p99_ns"] / 1e3,
        iteration_ms=report["iteration_ns"] / 1e6,
    )


def render(results: Sequence[Result], given: argparse.Namespace, environment: str) -> str:
    """The result page."""
    model = TRIALS[given.trial].models[given.device]
    faulty = [result for result in results if result.case.fault.cause]
    healthy = [result for result in results if not result.case.fault.cause]
    num_silent = sum(result.right for result in healthy)
    num_found = sum(result.right for result in faulty)
    return "\n".join(
        [
            f"# Real runs on {given.ranks} ranks",
            "",
            f"`{_command(given)}` on {environment}. "
            f"GPT: `{' '.join(model)}`, mock data; 4 of every 5 iterations traced at "
            f"`full`{_turns(given.layer_stride)}.",
            "",
            f"- right rank and cause: {num_found} of {len(faulty)} faulty runs",
            f"- nobody accused: {num_silent} of {len(healthy)} healthy runs",
            "",
            "| case | verdict | accused | clock residual p99, µs | iteration, ms | right |",
            "|---|---|---|---|---|---|",
            *(result.row() for result in results),
            "",
        ]
    )


def _turns(layer_stride: int) -> str:
    turns = ", modules of one layer in {} in turns"
    return turns.format(layer_stride) if layer_stride > 1 else ""


def run_layout(
    cases: Sequence[Case],
    arguments: argparse.Namespace,
    folder: Path,
    pool: ThreadPoolExecutor,
) -> list[Future[Result]]:
    """Train one layout's cases and have them judged."""
    folder.mkdir(parents=True)
    print(f"{cases[0].layout}: training {len(cases)} cases …", file=sys.stderr, flush=True)
    started = time.monotonic()
    train(cases, arguments, folder)
    seconds = time.monotonic() - started
    print(f"{cases[0].layout}: trained in {seconds:.0f} s", file=sys.stderr, flush=True)
    judged = [pool.submit(_judged, case, folder, arguments.keep) for case in cases]
    if (os.cpu_count() or 1) < MANY_CORES:
        for each in judged:
            each.result()
    return judged


def _judged(case: Case, folder: Path, keep: Path | None) -> Result:
    result = judge(case, folder, keep)
    print(result.row(), file=sys.stderr, flush=True)
    return result


def main() -> int:
    """Run the cases, print the page, exit 1 when one was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu")
    parser.add_argument("--ranks", type=int, choices=sorted(LAYOUTS), default=4, help="(4)")
    parser.add_argument(
        "--trial",
        choices=list(TRIALS),
        default="first",
        help="another model, other faulty ranks, milder faults (first)",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--iterations", type=int, help="of a case (cpu: 25, gpu: 20)")
    parser.add_argument(
        "--layer-stride",
        type=int,
        default=1,
        metavar="N",
        help="record the modules of one layer in N, in turns (1: of all)",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="put rank files and verdict of each case there"
    )
    parser.add_argument(
        "--judge", type=Path, metavar="DIR", help="train nothing, judge again what --keep put there"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    arguments = parser.parse_args()
    every = all_cases(arguments.device, TRIALS[arguments.trial], arguments.ranks)
    wanted = [case for case in every if arguments.only in case.name]
    if not wanted:
        parser.error(f"--only {arguments.only}: no case's name holds that")
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.judge:
        environment = (arguments.judge / ENVIRONMENT).read_text(encoding="utf-8")
        results = [judge_again(case, arguments.judge) for case in wanted]
    else:
        environment = environment_line(arguments.device)
        results = run_all(wanted, arguments)
        if arguments.keep:
            (arguments.keep / ENVIRONMENT).write_text(environment, encoding="utf-8")
    page = render(results, arguments, environment)
    publish(page, arguments.output)
    return 0 if all(result.right for result in results) else 1


def run_all(wanted: Sequence[Case], arguments: argparse.Namespace) -> list[Result]:
    """Train and judge, layout by layout."""
    workers = max(1, (os.cpu_count() or 1) // 8)
    with TemporaryDirectory() as temporary, ThreadPoolExecutor(workers) as pool:
        judged: list[Future[Result]] = []
        for layout in LAYOUTS[arguments.ranks]:
            cases = [case for case in wanted if case.layout == layout]
            if cases:
                judged += run_layout(cases, arguments, Path(temporary) / layout, pool)
        return [each.result() for each in judged]


def judge_again(case: Case, kept: Path) -> Result:
    """Detect in the rank files that `--keep` packed."""
    with TemporaryDirectory() as temporary:
        unpack(kept / f"{case.file_name}.tar.gz", Path(temporary))
        (Path(temporary) / case.file_name / "verdict.json").unlink()
        return _judged(case, Path(temporary), None)


def _command(arguments: argparse.Namespace) -> str:
    only = f' --only "{arguments.only}"' if arguments.only else ""
    judge = " --judge DIR" if arguments.judge else ""
    trial = "" if arguments.trial == "first" else f" --trial {arguments.trial}"
    ranks = "" if arguments.ranks == 4 else f" --ranks {arguments.ranks}"
    stride = f" --layer-stride {arguments.layer_stride}" if arguments.layer_stride > 1 else ""
    flags = f"{ranks}{trial}{stride}{only}{judge}"
    return f"python -m benchmarks.layouts --device {arguments.device}{flags}"


if __name__ == "__main__":
    sys.exit(main())
