"""How exactly clocks are aligned, and how fast.

    python -m benchmarks.alignment [--op-table trace.parquet …] [--trace-dir trace_output …]
                                   [--no-gloo] [-o RESULT.md]

Planted: every rank has a clock of its own, offset within ±100 ms and drift within ±50 ppm; the
ends of collectives scatter by 20 µs (standard deviation), and one rank arrives late everywhere.
The error is that of the corrected clock of a rank against the reference rank's, over the window.

Added skew: the same skew is added to the times of a recorded trace, each rank standing on a clock
of its own, and taken out by the alignment. How far apart matched ends lie must be as before, and
the clocks must come back to where the alignment of the unskewed trace puts them. The traces are
four gloo processes that this command starts (their host clock is one: the truth is known),
production op tables, and any folders of rank files.

The page is written anew by -o; notes on it stand in a file of their own beside it.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from aggregate.anchors import Members, joining_members
from aggregate.clocks import Alignment, align_clocks
from aggregate.match import Matches, match_spans
from benchmarks.alignment_jobs import (
    EPOCH_NS,
    PERIOD_NS,
    SLOW_RANK,
    Skew,
    gloo_run,
    op_table_trace,
    planted_job,
    strings,
)
from megascan.arrays import Floats, Integers
from megascan.errors import report_errors
from megascan.reader import read_trace
from megascan.schema import Kind
from megascan.timeline import Trace, numbers
from megascan.topology import Layout

TARGET_ERROR_US, TARGET_SECONDS = 30.0, 5.0
TARGET_BIAS_US = 10.0
"""Mean error of the slow rank: half of what one end scatters."""
TOLERANCE, FINEST_US = 1.1, 1.0
"""A spread is as before when it is no more than this ratio, or this much, above it."""
PLANTED = (
    (Layout(tp=2, dp=2, pp=2), 300),
    (Layout(tp=8, dp=4), 500),
    (Layout(tp=4, dp=4, pp=4), 600),
    (Layout(tp=8, dp=16), 1000),
    (Layout(dp=64), 500),
    (Layout(tp=8, dp=16, pp=8), 2000),
    (Layout(tp=4, dp=4, pp=4), 20_000),
)
MOST_REPEATED_ENDS = 1_000_000
"""Jobs of more ends are measured once."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the page; exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--op-table", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--trace-dir", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--no-gloo", action="store_true", help="start no processes")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="repetitions (3)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a result page")
    chosen = parser.parse_args(arguments)
    text = StringIO()
    with redirect_stdout(text):
        met = [planted_skew(chosen.seeds)]
        for name, trace in _recorded(chosen):
            print()
            met.append(added_skew(name, on_own_clocks(trace), chosen.seeds))
    sys.stdout.write(text.getvalue())
    if chosen.output:
        words = " ".join(sys.argv[1:] if arguments is None else arguments)
        chosen.output.write_text(_page(words, text.getvalue()), encoding="utf-8")
    return 0 if all(met) else 1


def _recorded(chosen: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    """Traces to add skew to, with their names."""
    if not chosen.no_gloo:
        with TemporaryDirectory() as folder:
            yield "gloo run, TP2 DP2", gloo_run(Path(folder))
    for path in chosen.op_table:
        yield path.name, op_table_trace(path)
    for path in chosen.trace_dir:
        yield str(path), read_trace(path)


def _page(words: str, text: str) -> str:
    """The output as a page, with the machine and the command."""
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    return (
        f"# Clock alignment\n\n{machine}; numpy {np.__version__}. Times are CPU seconds.\n\n"
        f"    python -m benchmarks.alignment {words}\n\n```\n{text}```\n\n"
        "What it shows, and traces of GPUs: [alignment_notes.md](alignment_notes.md).\n"
    )


def planted_skew(num_seeds: int) -> bool:
    """Print the accuracy and timing table; whether every row meets the targets."""
    print(
        "layout          ranks  anchors  seed  p99 µs  max µs  slow rank µs  "
        "match CPU s  align CPU s"
    )
    met = True
    for layout, num_events in PLANTED:
        for seed in range(_num_seeds(layout, num_events, num_seeds)):
            skew = Skew.drawn(layout.world_size, seed)
            trace = planted_job(layout, num_events, skew, seed)
            seconds, _, fit = timed_alignment(trace)
            error = clock_errors(fit, skew, num_events * PERIOD_NS) / 1e3
            p99, slow = float(np.percentile(np.abs(error), 99)), float(error[SLOW_RANK].mean())
            met &= p99 < TARGET_ERROR_US and seconds[1] < TARGET_SECONDS
            met &= abs(slow) < TARGET_BIAS_US
            name = f"tp{layout.tp} dp{layout.dp} pp{layout.pp}"
            print(
                f"{name:14s}  {layout.world_size:5d}  {int(fit.num_anchors.sum()):7d}  {seed:4d}  "
                f"{p99:6.2f}  {np.abs(error).max():6.2f}  {slow:+12.2f}  "
                f"{seconds[0]:11.2f}  {seconds[1]:11.2f}"
            )
    print(
        f"targets p99 < {TARGET_ERROR_US:.0f} µs, |slow rank| < {TARGET_BIAS_US:.0f} µs, "
        f"align < {TARGET_SECONDS:.0f} CPU s: {_said(met)}"
    )
    return met


def _num_seeds(layout: Layout, num_events: int, wanted: int) -> int:
    return wanted if layout.world_size * num_events < MOST_REPEATED_ENDS else 1


def _said(met: bool) -> str:
    return "met" if met else "missed"


def timed_alignment(trace: Trace) -> tuple[tuple[float, float], Matches, Alignment]:
    """CPU seconds of matching and of alignment, and their results.

    Both run on one thread: on an idle machine these are the seconds by the clock.
    """
    began = time.process_time()
    matches = match_spans(trace.spans, trace.headers)
    matched = time.process_time()
    fit = align_clocks(trace.spans, matches, trace.headers)
    return (matched - began, time.process_time() - matched), matches, fit


def clock_errors(fit: Alignment, skew: Skew, window_ns: int) -> Floats:
    """(rank, time) corrected time of each rank less that of the reference (rank 0), ns."""
    true = EPOCH_NS + np.linspace(0, window_ns, 9).astype(np.int64)
    rank = np.repeat(np.arange(len(skew.drift)), len(true))
    local = skew.local(rank, np.tile(true, len(skew.drift)))
    common = fit.lines.common(rank, local).reshape(-1, len(true))
    return np.asarray(common - common[0], dtype=np.float64)


def added_skew(name: str, trace: Trace, num_seeds: int) -> bool:
    """Print how far apart matched ends lie before, with skew, and after; whether it is as before.

    As before: median and 99th percentile within a tenth, and clocks within the unskewed fit's own
    median residual of where that fit puts them.
    """
    _, matches, plain = timed_alignment(trace)
    print(
        f"{name}: {trace.spans.num_rows:,} spans, {matches.num_matches:,} matched; {plain.method}"
    )
    print("                       collectives: median   p99 µs   messages: median   p99 µs")
    recorded = _print_spreads("as recorded", trace.spans, matches, plain.ranks)
    _print_spreads("aligned", aligned_spans(trace.spans, plain), matches, plain.ranks)
    met, origin_ns = True, int(numbers(trace.spans, "start_ns").min())
    for seed in range(num_seeds):
        skew = Skew.drawn(int(plain.ranks.max()) + 1, seed, origin_ns)
        spans = skewed_spans(trace.spans, skew)
        seconds, _, fit = timed_alignment(replace(trace, spans=spans))
        _print_spreads(f"skewed, seed {seed}", spans, matches, plain.ranks)
        after = aligned_spans(spans, fit)
        spread = _print_spreads(f"aligned, seed {seed}", after, matches, plain.ranks)
        moved = ends_ns(after) - ends_ns(aligned_spans(trace.spans, plain))
        error = np.abs(moved - np.median(moved))
        from_recorded = ends_ns(after) - ends_ns(trace.spans)
        from_recorded -= int(np.median(from_recorded[numbers(after, "rank") == plain.ranks[0]]))
        residual = float(np.median(plain.residual_median_ns))
        limits = [max(TOLERANCE * was, was + FINEST_US) for was in recorded]
        met &= all(now <= limit for now, limit in zip(spread, limits, strict=True))
        met &= float(np.percentile(error, 99)) <= max(residual, FINEST_US * 1e3)
        print(
            f"  clocks differ from the unskewed alignment by up to {error.max() / 1e3:.2f} µs "
            f"(its median residual: {residual / 1e3:.2f} µs), from the recorded ones by up to "
            f"{np.abs(from_recorded).max() / 1e3:.1f} µs; {seconds[1]:.2f} CPU s"
        )
    print(f"matched ends back within their recorded spread: {_said(met)}")
    return met


def on_own_clocks(trace: Trace) -> Trace:
    """The trace as if no two ranks shared a clock."""
    headers = {
        rank: replace(header, clock=replace(header.clock, domain=f"clock {rank}"))
        for rank, header in trace.headers.items()
    }
    return replace(trace, headers=headers)


def _print_spreads(
    what: str, spans: pa.Table, matches: Matches, ranks: Integers
) -> tuple[float, float, float, float]:
    """Median and p99, µs, of the distance between the first and the last end of a match."""
    members = Members.of(spans, matches.match, joining_members(spans, matches), ranks)
    anchors = members.at(members.in_company(members.certain)).anchors()
    starts = np.flatnonzero(np.diff(anchors.event, prepend=-1))
    both = [np.zeros(1), np.zeros(1)]
    if len(starts):
        high, low = (f.reduceat(anchors.end_ns, starts) for f in (np.maximum, np.minimum))
        both[0] = (high - low) / 1e3
    rows = np.flatnonzero((matches.match >= 0) & (strings(spans, "kind") == Kind.P2P))
    if len(rows):
        pairs = ends_ns(spans)[rows[np.argsort(matches.match[rows], kind="stable")]]
        both[1] = np.abs(pairs[0::2] - pairs[1::2]) / 1e3
    quantiles = [float(np.percentile(spread, q)) for spread in both for q in (50, 99)]
    print(f"  {what:22s} {quantiles[0]:17.1f}  {quantiles[1]:8.1f}  ", end="")
    print(f"{quantiles[2]:17.1f}  {quantiles[3]:8.1f}")
    return quantiles[0], quantiles[1], quantiles[2], quantiles[3]


def ends_ns(spans: pa.Table) -> Integers:
    """(span,) ends, unix ns."""
    return numbers(spans, "start_ns") + numbers(spans, "duration_ns")


def skewed_spans(spans: pa.Table, skew: Skew) -> pa.Table:
    """Spans as skewed clocks would have recorded them."""
    rank = numbers(spans, "rank")
    start, end = (skew.local(rank, at) for at in (numbers(spans, "start_ns"), ends_ns(spans)))
    return _with_times(spans, start, end)


def aligned_spans(spans: pa.Table, fit: Alignment) -> pa.Table:
    """Spans on the fit's common clock, in the same order of rows."""
    position = np.searchsorted(fit.ranks, numbers(spans, "rank"))
    start, end = (
        fit.lines.common(position, at) for at in (numbers(spans, "start_ns"), ends_ns(spans))
    )
    return _with_times(spans, start, end)


def _with_times(spans: pa.Table, start: Integers, end: Integers) -> pa.Table:
    for name, values in (("start_ns", start), ("duration_ns", end - start)):
        spans = spans.set_column(spans.schema.get_field_index(name), name, pa.array(values))
    return spans


if __name__ == "__main__":
    sys.exit(report_errors(main))
