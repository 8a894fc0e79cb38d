"""What several commands take: a trace folder or a merged timeline, and how to pick a run in it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.commands.packages import require
from megascan.commands.progress import stage
from megascan.commands.workers import Cores, Workers, size_bytes
from megascan.errors import InputError

if TYPE_CHECKING:
    from megascan.timeline import Timeline, Trace


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that choose among runs and ranks of a trace folder."""
    parser.add_argument("--run", metavar="ID", help="take this run of the folder (default: newest)")
    parser.add_argument(
        "--allow-missing-ranks",
        action="store_true",
        help="go on, with a warning, when some ranks' files are not there",
    )


def load_timeline(
    path: Path, arguments: argparse.Namespace, workers: Workers | None = None
) -> Timeline:
    """A timeline from a folder of rank files (aggregated on the way) or from a merged file.

    Rank files are read by `workers`; without any, by this machine's cores.
    """
    from megascan.reader import MERGED_FORMATS, read_timeline, sniff

    if path.is_file() and sniff(path) in MERGED_FORMATS:
        with stage(f"reading {path}"):
            return read_timeline(path)
    return aggregate_folder(path, arguments, workers or Cores.for_trace(size_bytes(path)))


def aggregate_folder(path: Path, arguments: argparse.Namespace, workers: Workers) -> Timeline:
    """Rank files of `path`, matched and put on one clock."""
    require("aggregate")
    from aggregate import build_timeline

    trace = [
        _trace(path, arguments, workers)
    ]  # popped: what alignment replaces must not outlive it
    with stage(f"aligning {len(trace[0].headers)} ranks, {len(trace[0].spans):,} spans"):
        return build_timeline(trace.pop())


def _trace(path: Path, arguments: argparse.Namespace, workers: Workers) -> Trace:
    """Rank files of `path` as recorded; warns of missing ranks."""
    from megascan.memory import give_back_freed_memory
    from megascan.reader import read_trace

    with stage(f"reading rank files of {path}"):
        trace = read_trace(
            path,
            run=arguments.run,
            allow_missing_ranks=arguments.allow_missing_ranks,
            load=workers.load,
        )
    give_back_freed_memory()
    if trace.completeness.missing_ranks:
        missing = trace.completeness.missing_ranks
        print(
            f"warning: {len(missing)} of {trace.completeness.world_size} ranks have no file, "
            f"going on without them: {', '.join(map(str, missing))}",
            file=sys.stderr,
        )
    if not len(trace.spans):
        raise InputError(f"{path}: the rank files hold no finished window; let the job run longer")
    return trace
