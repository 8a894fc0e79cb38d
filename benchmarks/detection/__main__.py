"""python -m benchmarks.detection: how often the detector is right, and how often it is wrong.

Simulates jobs with planted faults and jobs without any, judges them, and compares. Quick takes
minutes on two cores; --full covers seven layouts and two cost models.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from benchmarks.detection.cases import FULL, QUICK, cases
from benchmarks.detection.jobs import sampled
from benchmarks.detection.outcomes import Outcome
from benchmarks.detection.report import to_json, to_text
from benchmarks.detection.runner import run_all
from megascan.errors import OutputError, UsageError, report_errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all layouts and cost models")
    parser.add_argument(
        "-o", "--output", type=Path, action="append", default=[], metavar="FILE",
        help="write FILE (.json, or .md); repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep outcomes in FILE, and go on from there"
    )
    parser.add_argument("--no-baselines", action="store_true", help="leave other rules out")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--only", metavar="GROUP", help="one class or look-alike only")
    parser.add_argument(
        "--layer-stride", type=int, default=1, metavar="N",
        help="record the modules of every N-th layer only, in turns (1: all)",
    )  # fmt: skip
    return parser


def main() -> int:
    """Run the benchmark; tables on stdout."""
    arguments = _parser().parse_args()
    chosen = cases(FULL if arguments.full else QUICK)
    if arguments.layer_stride != 1:
        chosen = [sampled(case, arguments.layer_stride) for case in chosen]
    if arguments.only:
        groups = sorted({case.group for case in chosen})
        chosen = [case for case in chosen if case.group == arguments.only]
        if not chosen:
            raise UsageError(f"no cases of {arguments.only!r}, there are: {', '.join(groups)}")
    begin = time.perf_counter()
    outcomes = list(
        run_all(
            chosen,
            with_baselines=not arguments.no_baselines,
            num_workers=arguments.workers,
            kept=arguments.keep,
        )
    )
    seconds = time.perf_counter() - begin
    text = to_text(outcomes, _setting(arguments, seconds))
    print(text)
    for path in arguments.output:
        _write(path, outcomes, text, seconds)
    return 0


def _setting(arguments: argparse.Namespace, seconds: float) -> str:
    """Command, date, machine, versions, time."""
    command = "python -m benchmarks.detection" + (" --full" if arguments.full else "")
    command += f" --only {arguments.only}" if arguments.only else ""
    command += f" --layer-stride {arguments.layer_stride}" if arguments.layer_stride != 1 else ""
    return (
        f"`{command}`, {datetime.date.today().isoformat()}; {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, numpy {np.__version__}; "
        f"{seconds / 60:.0f} min in this sitting."
    )


def _write(path: Path, outcomes: Sequence[Outcome], text: str, seconds: float) -> None:
    content = text.encode()
    if path.suffix == ".json":
        content = orjson.dumps(to_json(outcomes, seconds), option=orjson.OPT_INDENT_2) + b"\n"
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(report_errors(main))
