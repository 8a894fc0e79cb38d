"""python -m benchmarks.detection: how often the detector is right, and how often it is wrong.

Simulates jobs with planted faults and jobs without any, judges them, and compares. Quick takes
minutes on two cores; --full covers seven layouts and two cost models.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import orjson

from benchmarks.detection.cases import FULL, QUICK, cases
from benchmarks.detection.report import to_json, to_text
from benchmarks.detection.runner import run_all
from megascan.errors import OutputError, UsageError, report_errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all layouts and cost models")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write FILE (.json) or FILE (.md)"
    )
    parser.add_argument("--no-baselines", action="store_true", help="leave other rules out")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--only", metavar="GROUP", help="one class or look-alike only")
    return parser


def main() -> int:
    """Run the benchmark; tables on stdout."""
    arguments = _parser().parse_args()
    chosen = cases(FULL if arguments.full else QUICK)
    if arguments.only:
        groups = sorted({case.group for case in chosen})
        chosen = [case for case in chosen if case.group == arguments.only]
        if not chosen:
            raise UsageError(f"no cases of {arguments.only!r}, there are: {', '.join(groups)}")
    begin = time.perf_counter()
    outcomes = list(
        run_all(chosen, with_baselines=not arguments.no_baselines, num_workers=arguments.workers)
    )
    seconds = time.perf_counter() - begin
    text = to_text(outcomes, seconds)
    print(text)
    if arguments.output is not None:
        result = orjson.dumps(to_json(outcomes, seconds), option=orjson.OPT_INDENT_2) + b"\n"
        _write(arguments.output, result if arguments.output.suffix == ".json" else text.encode())
    return 0


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(report_errors(main))
