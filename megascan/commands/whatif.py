"""What a step would cost without each rank's, operation's and stage's slowness.

PATH is a folder of rank files, a merged timeline, or an op table in Parquet. The step is replayed
from its own dependencies with ideal durations: S is the traced step over the ideal one, S_t the
same with one type of operation as traced, S_w with one rank as traced.

examples:
  megascan whatif trace_output
  megascan whatif trace_output --json whatif.json --heat-map ranks.svg --ideal ideal.json.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.commands.inputs import add_run_arguments, load_timeline
from megascan.commands.output import say, write_bytes, write_json
from megascan.commands.packages import require
from megascan.commands.progress import stage
from megascan.errors import UsageError
from megascan.export import check_free, check_output, write_timeline

if TYPE_CHECKING:
    from detect import Report
    from detect.whatif import Replay, Saving, WhatIf

_PICTURES = (".svg", ".png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("path", type=Path, metavar="PATH", help="trace folder, timeline, op table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--heat-map", type=Path, metavar="FILE", help="picture of ranks by stage and DP: .svg, .png"
    )
    parser.add_argument(
        "--ideal", type=Path, metavar="FILE", help="timeline of the ideal run, for Perfetto"
    )
    parser.add_argument("--force", action="store_true", help="replace existing output files")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, print, write what was asked for."""
    require("detect")
    from detect.whatif import analyze, render_text

    _check_outputs(arguments)
    replay, report = _replayed(arguments.path, arguments)
    with stage("replaying the step"):
        result = analyze(replay)
        savings = _savings(replay, result, report)
    say(render_text(result, savings))
    for path in _write(arguments, replay, result, savings):
        say(f"wrote {path}")
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    if arguments.heat_map and arguments.heat_map.suffix not in _PICTURES:
        raise UsageError(f"--heat-map is {arguments.heat_map}, expected a name in .svg or .png")
    for path in (arguments.json, arguments.heat_map, arguments.ideal):
        if path:
            check_free(path, force=arguments.force)
    if arguments.ideal:
        check_output(arguments.ideal, force=arguments.force)


def _replayed(path: Path, arguments: argparse.Namespace) -> tuple[Replay, Report]:
    """The replay of what lies at `path`, and what the detector finds in it."""
    from detect import detect
    from detect.whatif import is_op_table, read_op_table, replay_of_op_table, replay_of_timeline

    if path.is_file() and is_op_table(path):
        from detect.optable import detect_op_table

        return replay_of_op_table(read_op_table(path)), detect_op_table(path)
    timeline = load_timeline(path, arguments)
    return replay_of_timeline(timeline), detect(timeline)


def _savings(replay: Replay, result: WhatIf, report: Report) -> list[Saving]:
    """What each finding costs; without findings, the ranks that cost most."""
    from detect import Cause
    from detect.whatif import saved_by_fixing, worst_ranks

    if report.findings:
        return [
            saved_by_fixing(replay, finding.ranks, links=finding.cause == Cause.LINK)
            for finding in report.findings
        ]
    return [saved_by_fixing(replay, [rank]) for rank in worst_ranks(result)]


def _write(
    arguments: argparse.Namespace, replay: Replay, result: WhatIf, savings: list[Saving]
) -> list[Path]:
    """Write the files asked for and return their names."""
    from detect.whatif import heat_map_png, heat_map_svg, ideal_timeline, to_json

    if arguments.json:
        write_json(arguments.json, to_json(result, savings), force=arguments.force)
    if arguments.heat_map:
        is_png = arguments.heat_map.suffix == ".png"
        picture = heat_map_png(result) if is_png else heat_map_svg(result).encode()
        write_bytes(arguments.heat_map, picture, force=arguments.force)
    if arguments.ideal:
        write_timeline(ideal_timeline(replay), arguments.ideal, force=arguments.force)
    return [path for path in (arguments.json, arguments.heat_map, arguments.ideal) if path]
