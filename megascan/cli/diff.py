"""Compare two traces of a job, before and after: which rank, operation or link got slower.

BEFORE and AFTER are each a folder of rank files, a merged timeline, or an op table in Parquet;
their iterations need not be as many. The exit code is 0 whatever is found; with
--fail-on-regression it is 3 when something got slower and 1 when the traces cannot be compared,
which makes the command a gate in CI.

examples:
  megascan diff traces/main traces/branch --fail-on-regression
  megascan diff monday.json.gz tuesday.json.gz --min-change 5% --json changes.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.cli.options import add_run_arguments, is_op_table, load_timeline
from megascan.cli.output import check_outputs, require, say, stage, write_json
from megascan.errors import EXIT_FINDING, InputError, UsageError

if TYPE_CHECKING:
    from detect.comparison import Side


LARGEST_CHANGE = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("before", type=Path, metavar="BEFORE", help="the trace to compare with")
    parser.add_argument("after", type=Path, metavar="AFTER", help="the trace that may be slower")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every change as JSON")
    parser.add_argument("--force", action="store_true", help="replace an existing --json file")
    parser.add_argument(
        "--fail-on-regression", action="store_true",
        help=f"exit with {EXIT_FINDING} when something got slower",
    )  # fmt: skip
    parser.add_argument(
        "--min-change", default="3%", metavar="CHANGE",
        help="smallest change that counts: 3%%, 0.03 or 1.03 (default: 3%%)",
    )  # fmt: skip
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read both, compare, print."""
    require("detect")
    from detect.comparison import Outcome, compare, render_text

    min_change = _ratio(arguments.min_change)
    paths = [arguments.before, arguments.after]
    check_outputs([arguments.json], read=paths, force=arguments.force)
    sides = [_side(path, arguments) for path in paths]
    with stage("comparing the two"):
        comparison = compare(sides[0], sides[1], min_change)
    say(render_text(comparison))
    if arguments.json:
        write_json(arguments.json, comparison.to_json(), force=arguments.force)
        say(f"wrote {arguments.json}")
    if arguments.fail_on_regression and comparison.outcome == Outcome.INCOMPARABLE:
        raise InputError(
            f"{arguments.before} and {arguments.after} cannot be compared, so that this gate says "
            "nothing; give it two traces of one job"
        )
    regressed = comparison.outcome == Outcome.REGRESSED
    return EXIT_FINDING if arguments.fail_on_regression and regressed else 0


def _ratio(text: str) -> float:
    """Read a ratio: "3%", "0.03" and "1.03" are all 1.03."""
    try:
        number = float(text.removesuffix("%").strip())
    except ValueError as error:
        raise UsageError(
            f"--min-change is {text!r}, expected a number such as 3% or 1.03"
        ) from error
    ratio = 1 + number / 100 if text.endswith("%") else number if number >= 1 else 1 + number
    if not 1.0 < ratio <= LARGEST_CHANGE:
        raise UsageError(
            f"--min-change is {text}, expected more than nothing and at most 100 %, "
            "such as 3% or 1.03"
        )
    return ratio


def _side(path: Path, arguments: argparse.Namespace) -> Side:
    from detect import DetectorSettings
    from detect.comparison import side_of_op_table, side_of_timeline

    settings = DetectorSettings()
    if is_op_table(path):
        return side_of_op_table(str(path), path, settings)
    timeline = load_timeline(path, arguments)
    require("aggregate")
    from aggregate import summarise

    with stage(f"comparing {len(timeline.headers)} ranks with their peers"):
        return side_of_timeline(str(path), timeline, summarise(timeline).ranks, settings)
