"""Merge the rank files of a trace folder into one aligned timeline; with -d say which rank is slow.

The suffix of the output decides its format: .json (Chrome trace), .pftrace (Perfetto protobuf),
either with .gz. All of them open in Perfetto: `megascan view FILE`.

examples:
  python aggregate.py -b trace_output -d
  megascan aggregate -b trace_output -o timeline.json.gz --iterations 5-6
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from megascan.cli.options import (
    Look,
    add_detector_arguments,
    add_run_arguments,
    add_scheduler_argument,
    add_selection_arguments,
    aggregate_folder,
    check_ranks,
    detect_in,
    is_tuned,
    marks_of_findings,
    path_hops,
    ranks_in_focus,
    selection_from,
    settings_from,
    size_bytes,
    workers_from,
)
from megascan.cli.output import check_outputs, require, say, stage, write_json
from megascan.errors import UsageError
from megascan.export import Mark, format_of, leftovers, write_timeline
from megascan.header import Json
from megascan.parallel import Workers
from megascan.timeline import numbers

LARGE_BYTES = 256 << 20
"""Size of rank files from which Chrome JSON, which is as large as they are, is no longer the
default; Perfetto's own format takes 0.6 of that size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; `--b`, `--bench-dir` and `--benchmark_dir` are names that scripts use."""
    parser.add_argument(
        "-b", "--bench-dir", "--b", "--benchmark_dir", dest="folder", type=Path, required=True,
        metavar="DIR",
        help="the trace folder: one rank file a rank",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="the timeline (default: benchmark_<date and time>.json in the current folder; "
        ".pftrace from 256 MiB of rank files on)",
    )  # fmt: skip
    parser.add_argument("-d", "--detect", action="store_true", help="look for slow ranks, too")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write summary and findings as JSON"
    )
    parser.add_argument("--force", action="store_true", help="replace existing output files")
    add_run_arguments(parser)
    add_scheduler_argument(parser)
    add_selection_arguments(parser)
    parser.add_argument(
        "--focus", action="store_true",
        help="write only the suspects of -d and the ranks that share a group with them",
    )  # fmt: skip
    parser.add_argument(
        "--path", action="store_true",
        help="draw the chain of spans that determines each iteration's end, too (megascan path)",
    )  # fmt: skip
    add_detector_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read, align, write; print the summary, the verdict and the next command to type."""
    output: Path | None = arguments.output
    if output is None:
        suffix = "pftrace" if size_bytes(arguments.folder) >= LARGE_BYTES else "json"
        output = Path(f"benchmark_{datetime.now():%Y%m%d_%H%M%S}.{suffix}")
    if arguments.focus and not arguments.detect:
        raise UsageError("--focus shows the suspects of a detection; pass -d, too")
    if is_tuned(arguments) and not arguments.detect:
        raise UsageError("thresholds are those of a detection; pass -d, too")
    format_of(output)
    check_outputs([output, arguments.json], read=[arguments.folder], force=arguments.force)
    for left in leftovers(output):
        print(
            f"warning: {left} is what a killed process left of a timeline; delete it, unless one "
            "is still writing it",
            file=sys.stderr,
        )
    require("aggregate")
    with workers_from(arguments, arguments.folder) as workers:
        num_events = _aggregate(arguments, output, workers)
    say(f"wrote {output} ({num_events:,} events); look at it: {_view(output)}")
    return 0


def _aggregate(arguments: argparse.Namespace, output: Path, workers: Workers) -> int:
    """Write the timeline, print summary and verdict, and return the number of events written."""
    from aggregate import render_text, summary_of

    selection = selection_from(arguments)
    settings = settings_from(arguments) if arguments.detect else None
    sharded, sums = aggregate_folder(arguments.folder, arguments, workers, summed=True)
    timeline = sharded.frame
    check_ranks(selection, timeline)
    num_matches = int(numbers(sharded.ends, "match").max(initial=-1)) + 1
    summary = summary_of(timeline, sums, num_matches)
    say(render_text(summary))
    marks: list[Mark] = []
    whole = sharded.whole() if arguments.path else None
    chain = [] if whole is None else path_hops(whole)
    record: dict[str, Json] = {"aggregate": summary.to_json()} if arguments.json else {}
    if settings is not None:
        from detect import render_text as render_verdict

        report = detect_in(whole or sharded, settings, arguments.folder)
        if arguments.focus and report.findings:
            selection = replace(selection, ranks=ranks_in_focus(report, timeline))
        look = Look(_view(output), selection.ranks, selection.iterations)
        said = timeline.completeness.notes  # in the summary
        new = tuple(note for note in report.notes if note not in said)
        say(render_verdict(replace(report, notes=new).with_look(look)))
        marks = marks_of_findings(report, sharded.ends)
        record["detect"] = report.to_json()
    sharded = sharded.for_drawing()
    with stage(f"writing {output}"):
        num_events = write_timeline(
            whole if whole and chain else sharded,
            output,
            force=arguments.force,
            selection=selection,
            marks=marks,
            chain=chain,
        )
    if arguments.json:
        write_json(arguments.json, record, force=arguments.force)
    return num_events


def _view(output: Path) -> str:
    return f"megascan view {shlex.quote(str(output))}"
