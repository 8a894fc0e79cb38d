"""python -m benchmarks.fuzz --inputs 100000: damaged files through every reader, in all formats.

Rank files, the original MegaScan's files, PyTorch profiles and merged timelines (JSON and
protobuf), each plain and gzipped, are cut at every byte and damaged at random: bits, holes, lines,
line ends, numbers, types, names, depth. Each is read, aligned, summed up, and now and then written
again. The only good ends are a result and one sentence that says what to do; what else happens
(a traceback, several lines, a crash, 20 seconds) is listed, and the exit code is 1.

With --only NUMBER an input is made again, for a closer look, and left in the folder of --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fuzz.inputs import Inputs
from benchmarks.fuzz.samples import make_samples
from benchmarks.jobs import ROOT
from megascan.errors import UsageError, report_errors

PORTION = 1000
"""Inputs a process, so that the death of one costs little."""
_PRINTED = 3000


@dataclass(frozen=True)
class Portion:
    """Some of a campaign's inputs, and what came of them."""

    outcomes: Counter[str]
    faults: tuple[dict[str, object], ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 when anything came of an input but a result or a sentence."""
    chosen = _parser().parse_args(arguments)
    if chosen.inputs < 1 or chosen.workers < 1:
        raise UsageError("--inputs and --workers must be 1 or more")
    if chosen.only is not None:
        return _make_again(chosen.seed, chosen.only, chosen.keep)
    began = time.perf_counter()
    outcomes: Counter[str] = Counter()
    num_faults = 0
    for portion in _campaign(chosen.seed, chosen.inputs, chosen.workers):
        outcomes += portion.outcomes
        num_faults += len(portion.faults)
        for fault in portion.faults:
            print(json.dumps(fault)[:_PRINTED], flush=True)
        tried = sum(outcomes.values())
        print(f"{tried:,} of {chosen.inputs:,} inputs, {num_faults} faults", file=sys.stderr)
    print(
        f"{sum(outcomes.values()):,} inputs in {time.perf_counter() - began:.0f} s (seed "
        f"{chosen.seed}): {outcomes['read']:,} were read, {outcomes['refused']:,} refused in one "
        f"sentence, {num_faults} ended otherwise"
    )
    return 1 if num_faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="(100000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the damage (1)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="make this input, run nothing")
    parser.add_argument("--keep", type=Path, default=Path("fuzz_input"), metavar="DIR")
    return parser


def _campaign(seed: int, num_inputs: int, num_workers: int) -> Iterator[Portion]:
    """Portions that interleave: each has cuts and random damage of all samples."""
    num_portions = -(-num_inputs // PORTION)
    with TemporaryDirectory() as place, ThreadPoolExecutor(num_workers) as pool:
        yield from pool.map(
            lambda first: _portion(
                seed, range(first, num_inputs, num_portions), Path(place) / f"{first}"
            ),
            range(num_portions),
        )


def _portion(seed: int, numbers: range, place: Path) -> Portion:
    """By a process of its own; where that dies, the input at work is a fault and the rest go on."""
    words = [seed, numbers.start, len(numbers), numbers.step, place]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz.worker", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    faults = [line for line in lines if "fault" in line]
    totals = [Counter(line["outcomes"]) for line in lines if "outcomes" in line]
    if totals:
        return Portion(totals[-1], tuple(faults))
    if not (place / "at").exists():
        raise RuntimeError(f"a worker did not start: {process.stderr[-2000:]}")
    at = int((place / "at").read_text())
    words_of_death = process.stderr.strip()[-500:]
    faults.append({"input": at, "fault": f"died with {process.returncode}: {words_of_death}"})
    tried = Counter({"fault": len(faults), "of a process that died": numbers.index(at)})
    rest = numbers[numbers.index(at) + 1 :]
    after = _portion(seed, rest, place) if len(rest) else Portion(Counter(), ())
    return Portion(tried + after.outcomes, (*faults, *after.faults))


def _make_again(seed: int, number: int, folder: Path) -> int:
    with TemporaryDirectory() as place:
        sample, content = Inputs(make_samples(Path(place)), seed)[number]
    sample.write(folder, content)
    print(f"wrote {sample.name}, damaged: {folder / sample.file_name}; next: megascan aggregate")
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
