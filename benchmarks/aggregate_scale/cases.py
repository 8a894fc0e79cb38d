"""Which jobs are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.aggregate_scale.original_files import write_original_files
from benchmarks.aggregate_scale.rank_files import ScaleJob, write_rank_files
from megascan.topology import Layout

BY_SPANS = Layout(tp=4, pp=4, dp=4)
BY_RANKS = (
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=8, pp=8, dp=16),
    Layout(tp=8, pp=16, dp=128),
)
SIZES = (0.1, 1.0, 4.0, 20.0)
"""Millions of spans of the job that is measured at several lengths."""
SUFFIXES = (".json.gz", ".pftrace")

ORIGINAL_SECONDS, ORIGINAL_PEAK_MIB, ORIGINAL_RECORDS = 26.8, 1_369, 998_688
"""The original's aggregator, unmodified, on begin and end records of 8 ranks: median of five runs,
CPython 3.12.1 on 2 cores of an AMD EPYC. 64 ranks (982,400 records): 28.2 s and 1,364 MiB."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trace to aggregate. `write` makes its folder and returns how many events it holds."""

    name: str
    source: str
    num_ranks: int
    num_events: int
    write: Callable[[Path], int]


def cases(
    sizes: tuple[float, ...], max_spans: int, layout_by_spans: Layout = BY_SPANS
) -> list[Case]:
    """Traces of at most so many spans: by length, by ranks, and in the original's format."""
    jobs = [
        ScaleJob(layout=layout_by_spans, num_spans=round(size * 1e6), num_microbatches=4)
        for size in sizes
    ]
    jobs += [
        ScaleJob(layout=layout, num_spans=1_000_000, num_microbatches=4) for layout in BY_RANKS
    ]
    found = [_ours(job) for job in jobs if job.num_spans <= max_spans]
    return [*found, _original(num_records=min(ORIGINAL_RECORDS, 2 * max_spans))]


def _ours(job: ScaleJob) -> Case:
    return Case(
        name=job.name,
        source="rank files",
        num_ranks=job.layout.world_size,
        num_events=job.num_spans,
        write=lambda folder: write_rank_files(job, folder),
    )


def _original(num_records: int) -> Case:
    job = ScaleJob(layout=BY_SPANS, num_spans=num_records // 2)
    return Case(
        name=job.name,
        source="original",
        num_ranks=job.layout.world_size,
        num_events=num_records,
        write=lambda folder: write_original_files(job, folder),
    )
