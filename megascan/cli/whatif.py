"""What a step would cost without each rank's, operation's and stage's slowness.

PATH is a folder of rank files, a merged timeline, or an op table in Parquet. The step is replayed
from its own dependencies with ideal durations: S is the traced step over the ideal one, S_t the
same with one type of operation as traced, S_w with one rank as traced.

What mending brings is said for every finding of the detector, or with --no-detect for the ranks and
stages that cost most. Op tables may be huge, and what the detector takes for one is many times what
the replay takes: there --no-detect is the default.

examples:
  megascan whatif trace_output
  megascan whatif trace_output --json whatif.json --heat-map ranks.svg --ideal ideal.json.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.cli.options import add_run_arguments, is_op_table, load_timeline
from megascan.cli.output import check_outputs, require, say, stage, write_bytes, write_json
from megascan.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from detect import Finding
    from detect.whatif import Replay, Saving
    from detect.whatif.slowness import WhatIf
    from megascan.timeline import Timeline


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
    parser.add_argument(
        "-d", "--detect", action=argparse.BooleanOptionalAction,
        help="look for findings, and say what each costs (default: yes, but not in an op table)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace existing output files")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, print, and write the files that flags name."""
    require("detect")
    from detect.whatif import savings_of
    from detect.whatif.render import render_text
    from detect.whatif.slowness import analyze, savings_of_standouts

    _check(arguments)
    replay, timeline, findings = _replayed(arguments.path, arguments)
    with stage("replaying the step"):
        result = analyze(replay)
        savings = savings_of(replay, findings) if findings else savings_of_standouts(result)
    say(render_text(result, savings))
    for path in _write(arguments, result, savings, timeline):
        say(f"wrote {path}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from megascan.export import format_of

    if arguments.heat_map and arguments.heat_map.suffix not in _PICTURES:
        raise UsageError(f"--heat-map is {arguments.heat_map}, expected a name in .svg or .png")
    if arguments.ideal:
        format_of(arguments.ideal)
    outputs = [arguments.json, arguments.heat_map, arguments.ideal]
    check_outputs(outputs, read=[arguments.path], force=arguments.force)


def _replayed(
    path: Path, arguments: argparse.Namespace
) -> tuple[Replay, Timeline | None, Sequence[Finding]]:
    """Return the replay of the trace at `path`, its timeline (if any), and its findings."""
    from detect.whatif import replay_of_timeline

    if is_op_table(path):
        from detect import DetectorSettings
        from detect.detector import judge
        from detect.optable import observe_op_table, read_op_table, replay_of_op_table

        table = read_op_table(path)
        findings: Sequence[Finding] = ()
        if arguments.detect:
            with stage("comparing ranks with their peers"):
                findings = judge(observe_op_table(table), DetectorSettings()).findings
        return replay_of_op_table(table), None, findings
    timeline = load_timeline(path, arguments)
    replay = replay_of_timeline(timeline)
    if arguments.detect is False:
        return replay, timeline, ()
    from detect import detect

    with stage(f"comparing {len(timeline.headers)} ranks with their peers"):
        return replay, timeline, detect(timeline).findings


def _write(
    arguments: argparse.Namespace, result: WhatIf, savings: list[Saving], timeline: Timeline | None
) -> list[Path]:
    """Write the files that flags name, and return their paths."""
    from detect.whatif.ideal import ideal_timeline
    from detect.whatif.render import heat_map_png, heat_map_svg, to_json

    if arguments.json:
        write_json(arguments.json, to_json(result, savings), force=arguments.force)
    if arguments.heat_map:
        is_png = arguments.heat_map.suffix == ".png"
        picture = heat_map_png(result) if is_png else heat_map_svg(result).encode()
        write_bytes(arguments.heat_map, picture, force=arguments.force)
    if arguments.ideal:
        from megascan.export import write_timeline

        ideal = ideal_timeline(result.replay, timeline)
        write_timeline(ideal, arguments.ideal, force=arguments.force)
    return [path for path in (arguments.json, arguments.heat_map, arguments.ideal) if path]
