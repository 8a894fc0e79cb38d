"""python -m benchmarks.grounds: judge the detector on ground that its authors have not made.

Four generators of traced jobs, written from physics by people who have not read the detector:
`kernels` (roofline costs), `original` (the original MegaScan's files), `cluster` (hosts, NICs and
loaders as shared resources) and `profiles` (what torch.profiler exports, in the dialects of torch
1.8 to 2.7). Fourteen more are judged where they are asked for: `fleet` (launching threads and
device queues, wandering clocks, a fluid network), `yard` (chips between heat and power cap,
products in waves of tiles, NICs in rails), `plain` (trainers on plain PyTorch), `formats` (the same
jobs as rank files, as the original's files and as profiles), `rack` (what goes wrong in a machine
room, event by event), `incidents` (what operators of large clusters have published), `pod` (racks
of NVLink domains and rails; experts, packed documents, long contexts), `campus` (many teams' jobs
on shared machines, from two GPUs to 64), `archive` (old jobs of which only the original MegaScan's
files are left), `harbour` (launching threads, blocking and travelling messages, rings and their
slowest link, batches fetched ahead), `foundry` (Megatron's schedules operation by operation, cards
shared by flows, bursts in the middle of kernels), `depot` (whole stages at a time, threads a queue
ahead of their GPUs, faults of all kinds in all places), `quarry` (each job drawn anew: layout,
model, data, noise, fault, what is traced) and `mill` (operation by operation: threads with bounded
queues, messages that block or travel, ZeRO and experts; half of the jobs only look faulty).
Development cases are judged by default; `--unseen` judges the third that is kept back until the
detector is finished. `--draw SEED` judges the same catalogues drawn anew with other seeds: learn on
one such draw, and believe what holds on another one that was never looked at. Tables on stdout, one
row a family.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

import orjson

from benchmarks.grounds.aims import (
    table_of_aims,
    table_of_confidence,
    table_of_costs,
    table_of_doubts,
)
from benchmarks.grounds.ground import Case, Ground, Variation
from benchmarks.grounds.outcome import (
    Outcome,
    judge_case,
    table_by_cause,
    table_of,
    table_of_devices,
    table_of_networks,
)
from benchmarks.grounds.turns import leave_modules_out
from megascan.config import LEAST_LAYERS, LEAST_LAYERS_OF_PLAIN_MODELS
from megascan.errors import UsageError, report_errors

GROUNDS = ("kernels", "original", "cluster", "profiles")
OTHERS = (
    "fleet", "yard", "plain", "formats", "rack", "incidents", "pod", "campus", "archive", "harbour",
    "foundry", "depot", "quarry", "mill",
)  # fmt: skip
"""Judged when asked for."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grounds", description=__doc__)
    parser.add_argument(
        "--ground", choices=(*GROUNDS, *OTHERS), action="append", help="only this one; repeatable"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--unseen", action="store_true", help="the third that was kept back")
    which.add_argument(
        "--draw",
        type=int,
        default=0,
        metavar="SEED",
        help="cases with other seeds, none of them unseen; with --every, other ones in each draw",
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose family or name holds TEXT")
    parser.add_argument(
        "--cause",
        metavar="CAUSE",
        help="only cases with such a cause planted, alone or beside others: link, host, ...",
    )
    parser.add_argument("--baselines", action="store_true", help="judge by other tools' rules, too")
    parser.add_argument(
        "--layer-stride",
        type=int,
        default=1,
        metavar="N",
        help="rank files have modules of one layer in N, in turns (1: of all layers)",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="append outcomes to FILE (JSON lines); go on from it",
    )
    parser.add_argument("--wrong", action="store_true", help="list every case that went wrong")
    return parser


def ground_named(name: str) -> Ground:
    """Return the module of one ground."""
    return cast(Ground, importlib.import_module(f"benchmarks.grounds.{name}"))


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the flags ask for, the same ones in every call."""
    if arguments.draw < 0 or arguments.every < 1:
        raise UsageError(
            f"--draw {arguments.draw} --every {arguments.every}: want 0 or more, 1 or more"
        )
    cases = [
        case
        for name in arguments.ground or GROUNDS
        for case in ground_named(name).cases(arguments.draw)
        if case.unseen == arguments.unseen
        and (not arguments.only or arguments.only in f"{case.family} {case.name}")
        and (not arguments.cause or arguments.cause in {one.cause for one in case.planted})
    ][arguments.draw % arguments.every :: arguments.every]
    if not cases:
        raise UsageError("no case is left; see --only, --cause, --every and --ground")
    return cases


def run_case(case: Case, with_baselines: bool, layer_stride: int) -> Outcome:
    """Write one case into a folder of its own, read it back and judge it; where a verdict blames
    the job beside faults of hardware alone, the same job without them as well.
    """
    ground = ground_named(case.ground)
    with tempfile.TemporaryDirectory() as folder:
        planted = ground.write(case, Path(folder))
        _thin_out(case, Path(folder), layer_stride)
        outcome = judge_case(case, planted, Path(folder), with_baselines=with_baselines)
    if not outcome.doubtful_for_job:
        return outcome
    with tempfile.TemporaryDirectory() as folder:
        ground.write_varied(case, Variation(), Path(folder))
        _thin_out(case, Path(folder), layer_stride)
        return outcome.beside_sound(judge_case(case, (), Path(folder), with_baselines=False))


def _thin_out(case: Case, folder: Path, layer_stride: int) -> None:
    """Leave the modules of one layer in `layer_stride` in the files of a case."""
    if layer_stride > 1:
        least = LEAST_LAYERS_OF_PLAIN_MODELS if case.ground == "plain" else LEAST_LAYERS
        leave_modules_out(folder, layer_stride, least=least)


def outcomes_of(
    cases: Sequence[Case],
    *,
    workers: int,
    with_baselines: bool,
    layer_stride: int,
    kept: Path | None,
) -> Iterator[Outcome]:
    """Yield the outcomes of `cases`; what stands in `kept` already is not judged again."""
    done = {}
    if kept and kept.exists():
        for line in kept.read_bytes().splitlines():
            outcome = Outcome.from_json(orjson.loads(line))
            done[outcome.ground, outcome.name] = outcome
    left = [case for case in cases if (case.ground, case.name) not in done]
    with ProcessPoolExecutor(workers) as pool:
        fresh = pool.map(
            partial(run_case, with_baselines=with_baselines, layer_stride=layer_stride), left
        )
        for number, case in enumerate(cases, start=1):
            outcome = done.get((case.ground, case.name)) or next(fresh)
            if kept and (case.ground, case.name) not in done:
                with kept.open("ab") as file:
                    file.write(orjson.dumps(outcome.to_json()) + b"\n")
            if sys.stderr.isatty():
                print(f"\r{number} of {len(cases)} cases", end="", file=sys.stderr)
            yield outcome


def main() -> int:
    """Judge and print the tables."""
    arguments = _parser().parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes = list(
        outcomes_of(
            chosen_cases(arguments),
            workers=arguments.workers,
            with_baselines=arguments.baselines,
            layer_stride=arguments.layer_stride,
            kept=arguments.keep,
        )
    )
    if arguments.wrong:
        for outcome in outcomes:
            for line in outcome.complaints():
                print(f"{outcome.ground} {outcome.name}: {line}")
    print(table_of(outcomes))
    print()
    print(table_by_cause(outcomes))
    print()
    print(table_of_aims(outcomes))
    print()
    print(table_of_confidence(outcomes))
    print()
    print(table_of_costs(outcomes))
    print()
    print(table_of_networks(outcomes))
    print()
    print(table_of_devices(outcomes))
    print()
    print(table_of_doubts(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
