"""Say which rank is slow, of what, how sure it is, what it costs and whose fault it is.

PATH is a folder of rank files, a merged timeline, or an op table in Parquet. The exit code is 0
whatever is found; with --fail-on-finding it is 3 when a finding's owner is a node.

examples:
  megascan detect trace_output
  megascan detect timeline.json.gz --json findings.json --fail-on-finding
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.cli.options import (
    Look,
    add_detector_arguments,
    add_run_arguments,
    add_scheduler_argument,
    detect_in,
    is_op_table,
    load_shards,
    settings_from,
    workers_from,
)
from megascan.cli.output import check_outputs, require, say, write_json
from megascan.errors import EXIT_FINDING
from megascan.timeline import Timeline

if TYPE_CHECKING:
    from detect import DetectorSettings, Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("path", type=Path, metavar="PATH", help="trace folder, timeline, op table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument("--force", action="store_true", help="replace an existing --json file")
    parser.add_argument(
        "--fail-on-finding", action="store_true",
        help=f"exit with {EXIT_FINDING} when a finding's owner is a node",
    )  # fmt: skip
    parser.add_argument(
        "--history", type=Path, metavar="FILE",
        help="quote what earlier jobs' findings say of the devices (megascan history)",
    )  # fmt: skip
    add_run_arguments(parser)
    add_scheduler_argument(parser)
    add_detector_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read, detect, print."""
    require("detect")
    from detect import Verdict, render_text

    settings = settings_from(arguments)
    check_outputs([arguments.json], read=[arguments.path], force=arguments.force)
    report = _report(arguments, settings)
    look = Look.at(arguments.path, arguments)
    say(render_text(report if look is None else report.with_look(look)))
    if arguments.json:
        write_json(arguments.json, report.to_json(), force=arguments.force)
        say(f"wrote {arguments.json}")
    degraded = report.verdict == Verdict.DEGRADED
    return EXIT_FINDING if arguments.fail_on_finding and degraded else 0


def _report(arguments: argparse.Namespace, settings: DetectorSettings) -> Report:
    from detect.detector import detect_op_table

    if is_op_table(arguments.path):
        return detect_op_table(arguments.path, settings)
    with workers_from(arguments, arguments.path) as workers:
        timeline = load_shards(arguments.path, arguments, workers)
        report = detect_in(timeline, settings, arguments.path)
    if arguments.history is None:
        return report
    from megascan.watch.history import History, quoted

    headers = timeline.headers if isinstance(timeline, Timeline) else timeline.frame.headers
    return quoted(report, History(arguments.history, must_exist=True), headers)
