"""What several commands take: a trace folder or a merged timeline, and how to pick a run in it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megascan.commands.packages import require
from megascan.commands.progress import stage
from megascan.errors import InputError
from megascan.reader import Format, read_timeline, read_trace, sniff
from megascan.timeline import Timeline


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that choose among runs and ranks of a trace folder."""
    parser.add_argument("--run", metavar="ID", help="take this run of the folder (default: newest)")
    parser.add_argument(
        "--allow-missing-ranks",
        action="store_true",
        help="go on, with a warning, when some ranks' files are not there",
    )


def load_timeline(path: Path, arguments: argparse.Namespace) -> Timeline:
    """A timeline from a folder of rank files (aggregated on the way) or from a merged file."""
    if path.is_file() and sniff(path) is Format.TIMELINE:
        with stage(f"reading {path}"):
            return read_timeline(path)
    return aggregate_folder(path, arguments)


def aggregate_folder(path: Path, arguments: argparse.Namespace) -> Timeline:
    """Rank files of `path`, matched and put on one clock."""
    require("aggregate")
    from aggregate import build_timeline

    with stage(f"reading rank files of {path}"):
        trace = read_trace(
            path, run=arguments.run, allow_missing_ranks=arguments.allow_missing_ranks
        )
    if trace.completeness.missing_ranks:
        missing = trace.completeness.missing_ranks
        print(
            f"warning: {len(missing)} of {trace.completeness.world_size} ranks have no file, "
            f"going on without them: {', '.join(map(str, missing))}",
            file=sys.stderr,
        )
    if not len(trace.spans):
        raise InputError(f"{path}: the rank files hold no finished window; let the job run longer")
    with stage(f"aligning {len(trace.headers)} ranks, {len(trace.spans):,} spans"):
        return build_timeline(trace)
