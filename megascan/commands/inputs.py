"""What several commands take: a trace folder or a merged timeline, and how to pick a run in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.commands.packages import require
from megascan.commands.progress import stage
from megascan.errors import InputError, MissingError

if TYPE_CHECKING:
    from aggregate.cluster import Cluster
    from megascan.timeline import Timeline, Trace


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that choose among runs and ranks of a trace folder."""
    parser.add_argument("--run", metavar="ID", help="take this run of the folder (default: newest)")
    parser.add_argument(
        "--allow-missing-ranks",
        action="store_true",
        help="go on, with a warning, when some ranks' files are not there",
    )


def add_scheduler_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that moves work to a Dask cluster."""
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="let the workers of this Dask scheduler (tcp://host:8786) do what can be divided; "
        "the result is the same to the bit (docs/scale.md)",
    )


@contextmanager
def cluster_from(arguments: argparse.Namespace) -> Iterator[Cluster | None]:
    """The cluster that --scheduler names while the block runs, None without it."""
    if arguments.scheduler is None:
        yield None
        return
    require("aggregate")
    try:
        from aggregate.cluster import connect
    except ModuleNotFoundError as error:
        raise MissingError(
            f"--scheduler needs {error.name}, which is not installed; install MegaScan with its "
            "extra `cluster` (pip install 'megascan[cluster]') or leave out --scheduler"
        ) from error
    with connect(arguments.scheduler) as cluster:
        yield cluster


def load_timeline(
    path: Path, arguments: argparse.Namespace, cluster: Cluster | None = None
) -> Timeline:
    """A timeline from a folder of rank files (aggregated on the way) or from a merged file."""
    from megascan.reader import MERGED_FORMATS, read_timeline, sniff

    if path.is_file() and sniff(path) in MERGED_FORMATS:
        with stage(f"reading {path}"):
            return read_timeline(path)
    return aggregate_folder(path, arguments, cluster)


def aggregate_folder(
    path: Path, arguments: argparse.Namespace, cluster: Cluster | None = None
) -> Timeline:
    """Rank files of `path`, read here or by a cluster, matched and put on one clock."""
    require("aggregate")
    from aggregate import build_timeline

    trace = [
        _trace(path, arguments, cluster)
    ]  # popped: what alignment replaces must not outlive it
    with stage(f"aligning {len(trace[0].headers)} ranks, {len(trace[0].spans):,} spans"):
        return build_timeline(trace.pop())


def _trace(path: Path, arguments: argparse.Namespace, cluster: Cluster | None) -> Trace:
    """Rank files of `path` as recorded; warns of missing ranks."""
    from megascan.memory import give_back_freed_memory
    from megascan.reader import load_segments, read_trace

    with stage(f"reading rank files of {path}"):
        trace = read_trace(
            path,
            run=arguments.run,
            allow_missing_ranks=arguments.allow_missing_ranks,
            load=cluster.load if cluster else load_segments,
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
