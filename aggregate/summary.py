"""What a timeline amounts to: shares of time by rank and iteration, clocks, completeness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from aggregate.keys import IntArray, group_starts
from aggregate.shares import SHARES, iteration_shares
from megascan.header import Json, RankHeader
from megascan.overhead import Overhead, measure_job
from megascan.schema import COMMUNICATION_KINDS, SCHEMA_VERSION
from megascan.timeline import ClockFit, Completeness, Timeline, codes, equals, numbers
from megascan.topology import Layout


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Numbers of one timeline.

    iterations  one row a rank and iteration: rank, iteration, duration_ns, `<share>_ns`
    ranks       one row a rank, worst first: rank, num_iterations, iteration_median_ns (the first
                iteration of a job, which loads and compiles, must not stand for the others),
                duration_ns (of all its iterations), `<share>_ns` and `<share>_ratio` of duration_ns

    The ns of a row's shares add up to its duration. Worst is who waits for others least: everyone
    else waits for that rank.
    """

    run_id: str
    layout: Layout
    iterations: pa.Table
    ranks: pa.Table
    num_spans: Mapping[str, int]
    """By kind."""
    num_matches: int
    unmatched: pa.Table
    """kind, rank, num_spans: operations without a counterpart, or recorded twice."""
    clocks: Mapping[int, ClockFit]
    clock_method: str
    clock_names: Mapping[int, str]
    """Of each rank, short enough to read: host, and the GPU where it has a clock of its own."""
    completeness: Completeness
    tracing: Overhead
    """What tracing cost, by the run's own untraced iterations."""

    def to_json(self) -> dict[str, Json]:
        """All of it; the tables as lists of records."""
        record = {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "layout": self.layout.to_json(),
            "num_spans": dict(self.num_spans),
            "num_matches": self.num_matches,
            "unmatched": self.unmatched.to_pylist(),
            "ranks": self.ranks.to_pylist(),
            "iterations": self.iterations.to_pylist(),
            "alignment": {
                "method": self.clock_method,
                "clocks": [asdict(self.clocks[rank]) for rank in sorted(self.clocks)],
            },
            "completeness": asdict(self.completeness),
            "tracing": asdict(self.tracing),
        }
        return cast("dict[str, Json]", record)


def summarise(timeline: Timeline) -> Summary:
    """Shares of every rank and iteration, with what tells how far they can be trusted."""
    iterations = iteration_shares(timeline)
    kind_codes, kinds = codes(timeline.spans, "kind")
    counts = np.bincount(kind_codes, minlength=len(kinds))
    return Summary(
        run_id=timeline.run_id,
        layout=timeline.layout,
        iterations=iterations,
        ranks=_by_rank(iterations),
        num_spans={kind: int(counts[code]) for code, kind in enumerate(kinds) if counts[code]},
        num_matches=int(numbers(timeline.spans, "match").max(initial=-1)) + 1,
        unmatched=_unmatched(timeline.spans),
        clocks=timeline.clocks,
        clock_method=timeline.clock_method,
        clock_names={
            rank: _clock_name(timeline.headers[rank]) if rank in timeline.headers else fit.domain
            for rank, fit in timeline.clocks.items()
        },
        completeness=timeline.completeness,
        tracing=measure_job(timeline.windows),
    )


def _unmatched(spans: pa.Table) -> pa.Table:
    alone = equals(spans, "kind", *COMMUNICATION_KINDS) & ~equals(spans, "op", "")
    rows = np.flatnonzero(alone & (numbers(spans, "match") < 0))
    kind_codes, kinds = codes(spans, "kind")
    rank = numbers(spans, "rank")[rows]
    num_ranks = int(rank.max(initial=0)) + 1
    key, count = np.unique(kind_codes[rows] * num_ranks + rank, return_counts=True)
    named = [kinds[code] for code in (key // num_ranks).tolist()]
    return pa.table(
        {"kind": pa.array(named, pa.string()), "rank": key % num_ranks, "num_spans": count}
    )


def _clock_name(header: RankHeader) -> str:
    """The domain's name without its boot, card and process ids, which only JSON keeps."""
    domain = header.clock.domain
    if not domain.startswith(f"{header.host}:"):
        return domain
    on_device = bool(header.device.uuid) and header.device.uuid in domain
    return f"{header.host} GPU {header.device.index}" if on_device else header.host


def _medians(values: IntArray, rank: IntArray, starts: IntArray, count: IntArray) -> IntArray:
    """(rank,) of values ordered by rank; between the middle two of an even number."""
    ordered = values[np.lexsort((values, rank))]
    low, high = ordered[starts + (count - 1) // 2], ordered[starts + count // 2]
    medians: IntArray = low + (high - low) // 2
    return medians


def _by_rank(iterations: pa.Table) -> pa.Table:
    rank = numbers(iterations, "rank")
    starts = group_starts(rank)
    count = np.diff(np.r_[starts, len(rank)])
    columns = {
        "rank": rank[starts],
        "num_iterations": count,
        "iteration_median_ns": _medians(numbers(iterations, "duration_ns"), rank, starts, count),
    }
    for name in ("duration_ns", *(f"{share}_ns" for share in SHARES)):
        values = numbers(iterations, name)
        columns[name] = np.add.reduceat(values, starts) if len(starts) else values
    whole = np.maximum(columns["duration_ns"], 1)
    ratios = {f"{share}_ratio": columns[f"{share}_ns"] / whole for share in SHARES}
    order = np.lexsort((columns["rank"], ratios["wait_ratio"]))
    return pa.table({name: values[order] for name, values in (columns | ratios).items()})
