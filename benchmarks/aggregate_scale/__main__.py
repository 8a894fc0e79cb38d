"""python -m benchmarks.aggregate_scale: `megascan aggregate` from 8 to 16,384 ranks.

Writes synthetic traces (a simulated job's spans, in our format and in the original MegaScan's),
aggregates each in a process of its own to gzipped Chrome JSON and to Perfetto protobuf, and prints
speed, memory, sizes and each stage's share as Markdown. The traces need up to 5 GB in the
temporary folder. --quick takes a minute. --against measures another checkout in the same sitting,
in turns, and prints how the two compare, also CPU time by stage (of all work with --by threads,
else of the one process that aligns and writes). --cores runs the jobs on so many of the machine's
cores in turns, and prints speed, parallel efficiency and memory of all processes: of each the turn
of the median. --original runs the original MegaScan's aggregator in turns with ours on the trace in
its format.

    python -m benchmarks.aggregate_scale --cores 1,2,4,8,16 --sizes 5 --only 64,16384
    python -m benchmarks.aggregate_scale --cores 16 --sizes 80 --only 1024 --layout 8,8,16
    python -m benchmarks.aggregate_scale --only original --original "python3.12 aggregate.py -d"
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from benchmarks.aggregate_scale.cases import BY_SPANS, SIZES, SUFFIXES, Case, cases
from benchmarks.aggregate_scale.measuring import (
    Measurement,
    measure,
    measure_original,
    reference_seconds,
)
from benchmarks.aggregate_scale.report import CoresRow, Row, to_cores, to_markdown
from megascan.errors import UsageError, report_errors
from megascan.topology import Layout

QUICK_SPANS = 200_000


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aggregate_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small traces only")
    parser.add_argument("--sizes", metavar="LIST", help="millions of spans (0.1,1,4,20)")
    parser.add_argument(
        "--layout",
        type=_layout,
        default=BY_SPANS,
        metavar="TP,PP,DP",
        help="of the job that is measured at several lengths (default 4,4,4)",
    )
    parser.add_argument("--max-spans", type=int, metavar="N", help="leave out larger traces")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--by", choices=["processes", "threads"], default="processes", help="who holds the shards"
    )
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="compare with the MegaScan checked out there"
    )
    parser.add_argument(
        "--original",
        type=shlex.split,
        metavar="COMMAND",
        help="starts the original's aggregator",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=3,
        metavar="N",
        help="runs of each with --against, --original and --cores (default 3)",
    )
    parser.add_argument("--cores", metavar="LIST", help="on how many cores in turn (1,2,4,8,16)")
    parser.add_argument(
        "--only", metavar="LIST", help="rank files of so many ranks, or `original`, only (64,16384)"
    )
    parser.add_argument(
        "--suffixes", default=",".join(SUFFIXES), metavar="LIST", help="outputs (.json.gz,.pftrace)"
    )
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where traces are written")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; tables on stdout."""
    chosen = _parser().parse_args(arguments)
    largest = QUICK_SPANS if chosen.quick else sys.maxsize
    largest = chosen.max_spans or largest
    reference = reference_seconds()
    rows: list[Row] = []
    by_cores: list[CoresRow] = []
    only = chosen.only and set(chosen.only.split(","))
    if chosen.work_dir:
        chosen.work_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=chosen.work_dir) as place:
        for case in cases(_sizes(chosen.sizes), largest, chosen.layout):
            is_ours = case.source == "rank files"
            if only and (str(case.num_ranks) if is_ours else case.source) not in only:
                continue
            if chosen.cores:
                by_cores += _on_cores(case, Path(place) / "trace", chosen)
            else:
                rows += _measured(case, Path(place) / "trace", chosen)
    print(to_cores(by_cores, reference) if chosen.cores else to_markdown(rows, reference))
    if chosen.json:
        chosen.json.write_bytes(orjson.dumps([row.to_json() for row in rows]))
    return 0


def _layout(text: str) -> Layout:
    """Read `8,8,16`; argparse says which text it was that this raises ValueError for."""
    tp, pp, dp = map(int, text.split(","))
    return Layout(tp=tp, pp=pp, dp=dp)


def _sizes(text: str | None) -> tuple[float, ...]:
    if text is None:
        return SIZES
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError as error:
        raise UsageError(f"--sizes is {text!r}, expected millions of spans like 0.1,1,4") from error


def _on_cores(case: Case, folder: Path, chosen: argparse.Namespace) -> Iterator[CoresRow]:
    """Run a job on the first so many cores, in turns; more than there are are left out.

    Of each the turn of the median is told: single runs on a shared host differ by a third.
    """
    available = sorted(os.sched_getaffinity(0))
    print(f"writing {case.name}, {case.num_events:,} spans …", file=sys.stderr, flush=True)
    num_events = case.write(folder)
    try:
        wanted = sorted({int(number) for number in chosen.cores.split(",")})
        for suffix in chosen.suffixes.split(","):
            runs = defaultdict(list)
            for _ in range(chosen.turns):
                for num_cores in (number for number in wanted if number <= len(available)):
                    print(f"{case.name} {suffix}, {num_cores} cores …", file=sys.stderr, flush=True)
                    used = available[:num_cores]
                    runs[num_cores].append(measure(folder, suffix, chosen.by, cores=used))
            for num_cores, measured in runs.items():
                yield CoresRow(
                    case=case,
                    suffix=suffix,
                    num_events=num_events,
                    num_cores=num_cores,
                    measured=sorted(measured, key=attrgetter("seconds"))[len(measured) // 2],
                )
    finally:
        shutil.rmtree(folder)


def _measured(case: Case, folder: Path, chosen: argparse.Namespace) -> Iterator[Row]:
    print(f"{case.source} {case.name}, {case.num_events:,} events …", file=sys.stderr, flush=True)
    num_events = case.write(folder)
    try:
        size = sum(path.stat().st_size for path in folder.iterdir())
        for suffix in chosen.suffixes.split(","):
            ours, theirs, original = _in_turns(folder, suffix, chosen, case)
            yield Row(
                case=case,
                suffix=suffix,
                num_events=num_events,
                input_bytes=size,
                measured=ours[0],
                turns=tuple(zip(ours, theirs, strict=False)),
                original=tuple(zip(ours, original, strict=False)),
            )
    finally:
        shutil.rmtree(folder)


def _in_turns(
    folder: Path, suffix: str, chosen: argparse.Namespace, case: Case
) -> tuple[list[Measurement], list[Measurement], list[Measurement]]:
    """Measure this checkout, and in turns with it those to compare with where there are some."""
    beside = chosen.original if case.source == "original" else None
    ours: list[Measurement] = []
    theirs: list[Measurement] = []
    original: list[Measurement] = []
    for _ in range(chosen.turns if chosen.against or beside else 1):
        ours.append(measure(folder, suffix, chosen.by))
        if chosen.against:
            theirs.append(measure(folder, suffix, chosen.by, chosen.against.resolve()))
        if beside:
            original.append(measure_original(folder, beside))
    return ours, theirs, original


if __name__ == "__main__":
    sys.exit(report_errors(main))
