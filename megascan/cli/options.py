"""Declare the flags of several commands, and do the work that commands share.

    --run, --allow-missing-ranks        a trace folder or merged timeline, and which run in it
    --ranks, --iterations, --kinds      the part of a timeline that is written
    --min-slowdown, …                   the detector's thresholds; its findings as marks
    --scheduler                         workers that read rank files and make the output: this
                                        machine's cores, or a Dask cluster's workers

The detector is imported only when it runs, so that commands start fast.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from megascan.cli.output import require, stage
from megascan.errors import ConfigError, InputError, MissingError, UsageError
from megascan.header import Json
from megascan.parallel import Kept, Workers, workers_here
from megascan.schema import NOT_APPLICABLE, Kind
from megascan.timeline import ShardedTimeline, Timeline, equals, numbers
from megascan.topology import PROBE_FILE_PATTERN, RANK_FILE_PATTERNS

if TYPE_CHECKING:
    from aggregate import Sums
    from detect import DetectorSettings, Report
    from megascan.export import Hop, Mark, Selection
    from megascan.timeline import Trace

_PARQUET = b"PAR1"


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that choose among runs and ranks of a trace folder."""
    parser.add_argument("--run", metavar="ID", help="take this run of the folder (default: newest)")
    parser.add_argument(
        "--allow-missing-ranks", action="store_true",
        help="go on, with a warning, when some ranks' files are not there",
    )  # fmt: skip


def load_timeline(path: Path, arguments: argparse.Namespace) -> Timeline:
    """Load a timeline from a folder of rank files, which are aggregated, or from a merged file."""
    with _workers_here(path) as cores:
        timeline = load_shards(path, arguments, cores)
        return timeline if isinstance(timeline, Timeline) else timeline.whole()


def load_shards(
    path: Path, arguments: argparse.Namespace, workers: Workers
) -> Timeline | ShardedTimeline:
    """Load a merged timeline as a whole; spans of rank files stay with the workers."""
    from megascan.reader import MERGED_FORMATS, read_timeline, sniff

    if path.is_file() and sniff(path) in MERGED_FORMATS:
        with stage(f"reading {path}"):
            return read_timeline(path)
    return aggregate_folder(path, arguments, workers)[0]


def aggregate_folder(
    path: Path, arguments: argparse.Namespace, workers: Workers, *, summed: bool = False
) -> tuple[ShardedTimeline, list[Sums]]:
    """Read the rank files of `path`, match them and put them on one clock; sum up if wanted."""
    require("aggregate")
    from aggregate import align, build_shards

    trace, kept = _trace(path, arguments, workers)
    with stage(f"aligning {len(trace.headers)} ranks"):
        aligned = align(trace)
        del trace  # with the times of its ends as recorded
        return build_shards(aligned, kept, workers, summed=summed)


def _has_probes(path: Path) -> bool:
    return next(path.glob(PROBE_FILE_PATTERN), None) is not None


def _trace(path: Path, arguments: argparse.Namespace, workers: Workers) -> tuple[Trace, list[Kept]]:
    """Read only the ends of the rank files of `path`, as recorded; warn of missing ranks."""
    from aggregate import load_solver
    from megascan.reader import read_ends

    try:
        with stage(f"reading rank files of {path}"):
            trace, kept = read_ends(
                path,
                workers,
                run=arguments.run,
                allow_missing_ranks=arguments.allow_missing_ranks,
                meanwhile=load_solver,
            )
    except InputError as error:
        named = (file for pattern in RANK_FILE_PATTERNS for file in path.glob(pattern))
        if _has_probes(path) and not any(named):
            raise InputError(f"{error}; megascan probe {path} compares its probes") from error
        raise
    if trace.completeness.missing_ranks:
        missing, number = trace.completeness.missing_ranks, trace.completeness.world_size
        print(
            f"warning: {len(missing)} of {number} ranks have no finished window, going on without "
            f"them: {', '.join(map(str, missing))}",
            file=sys.stderr,
        )
    if not any(stay.begin < stay.end for stays in trace.stays.values() for stay in stays):
        raise InputError(f"{path}: the rank files hold no finished window; let the job run longer")
    return trace, kept


_LARGEST_REUSED_BYTES = 31 << 20
"""Largest blocks to reuse: glibc never keeps freed blocks of 32 MB and more."""


def _reuse_freed_memory() -> None:
    """Have memory of freed arrays of some MB used again, instead of new pages each time.

    Work block by block frees and takes equal arrays thousands of times. glibc keeps freed blocks up
    to the size of the largest block that it has seen freed (mallopt(3), dynamic adjustment), so a
    large block is freed here first. Arrow is set to take its buffers from the same heap. Other
    allocators are not affected.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    np.empty(_LARGEST_REUSED_BYTES, dtype=np.uint8)


_LONGEST_RANGE = 1_000_000
"""Most numbers of a range, which are held one by one."""


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the selection flags."""
    parser.add_argument("--ranks", metavar="LIST", help="write these ranks only: 0,3,8-15")
    parser.add_argument("--iterations", metavar="LIST", help="write these iterations only: 5-6,45")
    parser.add_argument(
        "--kinds", metavar="LIST", help=f"write these kinds only, of {', '.join(Kind)}"
    )


def selection_from(arguments: argparse.Namespace) -> Selection:
    """Return the selection of the flags; raise UsageError for values that cannot be understood."""
    from megascan.export import Selection

    return Selection(
        ranks=_numbers(arguments.ranks, "--ranks"),
        iterations=_numbers(arguments.iterations, "--iterations"),
        kinds=_kinds(arguments.kinds),
    )


def check_ranks(selection: Selection, timeline: Timeline) -> None:
    """Raise UsageError if ranks are selected that the job does not have."""
    world_size = timeline.completeness.world_size
    unknown = sorted(rank for rank in selection.ranks or () if rank >= world_size)
    if unknown:
        raise UsageError(
            f"--ranks names rank {unknown[0]}, but the job has {world_size} ranks, "
            f"0 to {world_size - 1}"
        )


def _numbers(text: str | None, flag: str) -> frozenset[int] | None:
    """Read a list of numbers and ranges: "0,3,8-11" → {0, 3, 8, 9, 10, 11}."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        try:
            first, last = int(low), int(high or low)
        except ValueError as error:
            raise UsageError(
                f"{flag} is {text!r}, expected numbers and ranges like 0,3,8-15"
            ) from error
        if not first <= last < first + _LONGEST_RANGE:
            raise UsageError(
                f"{flag} has the range {part}, expected one that goes upwards, over at most "
                f"{_LONGEST_RANGE:,} numbers"
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def _kinds(text: str | None) -> frozenset[Kind] | None:
    if text is None:
        return None
    try:
        return frozenset(Kind(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--kinds is {text!r}, expected some of {', '.join(Kind)}") from error


def add_detector_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the detector's thresholds; those that are not given keep the detector's defaults (a
    test compares the help with them).
    """
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--min-slowdown", type=float, metavar="RATIO",
        help="smallest slowdown that is reported, 1.03 is 3 %% (default: 1.03)",
    )  # fmt: skip
    group.add_argument(
        "--false-discovery-rate", type=float, metavar="Q",
        help="share of false names accepted among all names (default: 0.01)",
    )  # fmt: skip


def is_tuned(arguments: argparse.Namespace) -> bool:
    """Return whether a threshold was given."""
    return not (arguments.min_slowdown is None and arguments.false_discovery_rate is None)


def settings_from(arguments: argparse.Namespace) -> DetectorSettings:
    """Return the detector's settings of the flags; raise UsageError for invalid values."""
    require("detect")
    from detect import DetectorSettings

    own, ratio, rate = DetectorSettings(), arguments.min_slowdown, arguments.false_discovery_rate
    try:
        return DetectorSettings(
            min_slowdown=own.min_slowdown if ratio is None else ratio,
            false_discovery_rate=own.false_discovery_rate if rate is None else rate,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error


def detect_in(
    timeline: Timeline | ShardedTimeline, settings: DetectorSettings, source: Path
) -> Report:
    """Find the slow ranks of a timeline, and by the probes in its folder the wrong ranks."""
    from detect import detect

    probes = None
    if _has_probes(source):
        from megascan.probes import read_probes  # most jobs have none

        probes = read_probes(source)
    frame = timeline.frame if isinstance(timeline, ShardedTimeline) else timeline
    with stage(f"comparing {len(frame.headers)} ranks with their peers"):
        return detect(timeline, settings, probes)


@dataclass(frozen=True)
class Look:
    """The shell command that opens what was read in Perfetto, to which `--at RANK:ITERATION` is
    appended.

    Perfetto shows merged timelines, so rank files are merged first. An op table cannot be shown.
    """

    command: str
    ranks: Collection[int] | None = None
    iterations: Collection[int] | None = None

    @classmethod
    def at(cls, path: Path, arguments: argparse.Namespace) -> Look | None:
        """Return the look at a trace folder, a rank's file or a timeline; None for an op table."""
        from megascan.reader import MERGED_FORMATS, Format, sniff

        found = sniff(path)
        if found is Format.OP_TABLE:
            return None
        if path.is_file() and found in MERGED_FORMATS:
            return cls(f"megascan view {shlex.quote(str(path))}")
        words = ["megascan", "aggregate", "-b", str(path), "-o", "timeline.json.gz"]
        words += ["--run", arguments.run] if arguments.run else []
        words += ["--allow-missing-ranks"] if arguments.allow_missing_ranks else []
        merge = shlex.join(words)
        return cls(f"{merge} && megascan view timeline.json.gz")

    def __call__(self, rank: int, iteration: int) -> str | None:
        """Return the command that shows a spot; None if the file does not have it."""
        if self.ranks is not None and rank not in self.ranks:
            return None
        if self.iterations is not None and iteration not in self.iterations:
            return None
        return f"{self.command} --at {rank}:{iteration}"


def marks_of_findings(report: Report, spans: pa.Table) -> list[Mark]:
    """Draw every finding on its ranks: one slice for each stretch of iterations in which it was
    active.

    `spans` are those of the timeline, or only its ends, which include iteration spans.
    """
    from megascan.export import Mark

    spans = spans.filter(equals(spans, "kind", Kind.ITERATION))
    ranks, iterations = numbers(spans, "rank"), numbers(spans, "iteration")
    starts = numbers(spans, "start_ns")
    ends = starts + numbers(spans, "duration_ns")
    marks = []
    for finding in report.findings:
        for rank in finding.ranks:
            for first, last in finding.stretches:
                inside = (ranks == rank) & (iterations >= first) & (iterations <= last)
                if np.any(inside):
                    mark = Mark(
                        rank=rank,
                        start_ns=int(starts[inside].min()),
                        end_ns=int(ends[inside].max()),
                        label=f"{finding.cause} {finding.slowdown:.2f}x ({finding.owner})",
                        args={"headline": finding.headline, "q_value": finding.q_value},
                    )
                    marks.append(mark)
    return marks


def path_hops(timeline: Timeline) -> list[Hop]:
    """Draw the critical path of every iteration that can be replayed."""
    from detect.whatif import replay_of_timeline
    from detect.whatif.path import critical_path, pieces
    from megascan.export import Hop

    with stage("walking back from the ends of iterations"):
        path = critical_path(replay_of_timeline(timeline))
    hops: list[Hop] = []
    for step, one in zip(path.steps, path.makeups, strict=True):
        shares: dict[str, Json] = {str(share): ratio for share, ratio in one.shares.items()}
        hops.append(
            Hop(
                rank=NOT_APPLICABLE,
                iteration=step.iteration,
                start_ns=step.begin_ns,
                end_ns=int(step.ends_ns[-1]),
                label=f"iteration {step.iteration}",
                args={**shares, "bubble": one.bubble, "length_ns": step.length_ns},
            )
        )
        hops += [
            Hop(
                rank=piece.rank,
                iteration=step.iteration,
                start_ns=piece.start_ns,
                end_ns=piece.end_ns,
                label=f"rank {piece.rank}: {piece.name}",
                row=piece.row,
                args={"rank": piece.rank, "share": str(piece.share)},
            )
            for piece in pieces(path, step)
        ]
    return hops


def ranks_in_focus(report: Report, timeline: Timeline) -> frozenset[int]:
    """Return the suspected ranks and all that share a process group, except the world, with one.

    Findings of the job name whole stages; they count only if no node is suspected.
    """
    from detect import Owner

    world = timeline.completeness.world_size
    findings = [one for one in report.findings if one.owner != Owner.JOB] or report.findings
    suspects = {rank for finding in findings for rank in finding.ranks}
    members = {
        member
        for rank in suspects & timeline.headers.keys()
        for group in timeline.headers[rank].groups.values()
        if len(group) < world
        for member in group
    }
    return frozenset(suspects | members)


WORTH_PROCESSES_BYTES = 8 << 20
"""Size of rank files below which starting processes takes as long as it saves."""


def is_op_table(path: Path) -> bool:
    """Return whether a path is a Parquet file, by its first four bytes.

    Raises InputError for a file that cannot be read.
    """
    from megascan.reader.lines import read_start  # readers take long to import

    return path.is_file() and read_start(path, len(_PARQUET)) == _PARQUET


def size_bytes(path: Path) -> int:
    """Return the size of a file or of the files in a folder; 0 if it cannot be read."""
    try:
        if not path.is_dir():
            return path.stat().st_size
        with os.scandir(path) as files:
            return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def add_scheduler_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that moves work to a Dask cluster."""
    parser.add_argument(
        "--scheduler", metavar="ADDRESS",
        help="let the workers of this Dask scheduler (tcp://host:8786) do what can be divided; "
        "the result is the same to the bit (docs/scale.md)",
    )  # fmt: skip


@contextmanager
def workers_from(arguments: argparse.Namespace, path: Path) -> Iterator[Workers]:
    """Hold the cluster that --scheduler names, or without that flag this machine's cores."""
    if arguments.scheduler is None:
        with _workers_here(path) as workers:
            yield workers
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


@contextmanager
def _workers_here(path: Path) -> Iterator[Workers]:
    """Hold workers of this machine: processes if a trace is large enough, else threads."""
    _reuse_freed_memory()
    pa.array([0])  # here Arrow looks for pandas once, not in every worker
    worth_processes = size_bytes(path) >= WORTH_PROCESSES_BYTES
    with _garbage_left(), workers_here(worth_processes=worth_processes) as workers:
        yield workers


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Turn the garbage collector off: a trace of 16,384 ranks has millions of objects, no cycles.

    Every collection would cost as much as reading some ranks; objects outside of cycles are freed
    at once as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
