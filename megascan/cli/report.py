"""Write one self-contained page about a traced window: verdict, findings, ranks, time, cost.

PATH is a folder of rank files, a merged timeline, or an op table in Parquet. The page is a single
HTML file that loads nothing: open it in a browser, send it to somebody, print it.

examples:
  megascan report trace_output -o report.html
  megascan report timeline.json.gz -o report.html --force
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.cli.options import (
    Look,
    add_detector_arguments,
    add_run_arguments,
    is_op_table,
    load_timeline,
    settings_from,
)
from megascan.cli.output import check_outputs, require, say, stage, write_bytes
from megascan.errors import MegaScanError, UsageError

if TYPE_CHECKING:
    from detect import DetectorSettings
    from detect.detector import Examination
    from detect.page import PageInputs
    from detect.whatif import Replay, Saving
    from detect.whatif.slowness import WhatIf
    from megascan.timeline import Timeline


SUFFIXES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("path", type=Path, metavar="PATH", help="trace folder, timeline, op table")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the page, .html"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output file")
    add_run_arguments(parser)
    add_detector_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read, judge, replay, write."""
    require("detect")
    from detect import render_text
    from detect.page import render_page

    settings = settings_from(arguments)
    if arguments.output.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--output is {arguments.output}, expected a name in .html")
    check_outputs([arguments.output], read=[arguments.path], force=arguments.force)
    inputs = _inputs(arguments, settings)
    with stage("drawing the page"):
        page = render_page(inputs).encode(errors="replace")  # names of paths are bytes
    write_bytes(arguments.output, page, force=arguments.force)
    say(render_text(inputs.examined.report).split("\n", 1)[0])
    say(f"wrote {arguments.output} ({len(page) / 1e3:,.0f} kB); next: open it in a browser")
    return 0


def _inputs(arguments: argparse.Namespace, settings: DetectorSettings) -> PageInputs:
    if is_op_table(arguments.path):
        return _of_op_table(arguments.path, settings)
    timeline = load_timeline(arguments.path, arguments)
    inputs = _of_timeline(arguments.path, timeline, settings)
    look = Look.at(arguments.path, arguments)
    return inputs if look is None else replace(inputs, look=look.command)


def _of_op_table(path: Path, settings: DetectorSettings) -> PageInputs:
    from detect.detector import examine_op_table
    from detect.optable import read_op_table, replay_of_op_table
    from detect.page import PageInputs, facts_of_op_table

    examined = examine_op_table(path, settings)
    result, savings, why = _replayed(lambda: replay_of_op_table(read_op_table(path)), examined)
    return PageInputs(
        source=str(path),
        examined=examined,
        facts=facts_of_op_table(examined.seen),
        whatif=result,
        savings=savings,
        why_no_whatif=why,
    )


def _of_timeline(source: Path, timeline: Timeline, settings: DetectorSettings) -> PageInputs:
    require("aggregate")
    from aggregate import summarise
    from detect.detector import examine
    from detect.page import PageInputs, facts_of_timeline
    from detect.whatif import replay_of_timeline
    from megascan.probes import read_probes

    probes = read_probes(source)
    with stage(f"comparing {len(timeline.headers)} ranks with their peers"):
        examined = examine(timeline, settings, probes)
    with stage("adding up where time went"):
        shares = summarise(timeline).ranks
    result, savings, why = _replayed(lambda: replay_of_timeline(timeline), examined)
    return PageInputs(
        source=str(source),
        examined=examined,
        facts=facts_of_timeline(timeline),
        shares=shares,
        whatif=result,
        savings=savings,
        why_no_whatif=why,
        timeline=timeline,
    )


def _replayed(
    make: Callable[[], Replay], examined: Examination
) -> tuple[WhatIf | None, list[Saving], str]:
    """Return figures and savings of the replay, or the reason why there is no replay."""
    from detect.whatif import savings_of
    from detect.whatif.slowness import analyze

    with stage("replaying the step"):
        try:
            replay = make()
            result = analyze(replay)
        except MegaScanError as error:
            return None, [], str(error)
        return result, savings_of(replay, examined.report.findings), ""
