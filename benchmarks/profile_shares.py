"""python -m benchmarks.profile_shares PROFILE…: shares of time beside a count that knows nothing of
ours.

Each argument is a PyTorch profile, or a folder of those of one job. Counted from the JSON alone, as
Holistic Trace Analysis defines them: over the time from the first kernel to the last one, *compute*
is the union of compute kernels, *idle* what no kernel and no copy covers, and *overlap* the share
of communication that compute covers. One row a rank, in per cent, and the largest difference.
What a queue still held when the profile began is in no iteration of ours, and libraries other than
NCCL communicate in kernels that are counted as compute: traces with either differ. Without its
rounding of nanoseconds these are the figures of

    TraceAnalysis(…, include_last_profiler_step=True).get_temporal_breakdown(visualize=False)
    TraceAnalysis(…).get_comm_comp_overlap(visualize=False)
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from aggregate import build_timeline
from aggregate.summary import summarise
from megascan.errors import report_errors
from megascan.reader import read_trace
from megascan.schema import Kind
from megascan.timeline import Timeline, equals, numbers

Spans = NDArray[np.float64]
"""(span, 2): begin and end."""
SHARES = ("compute", "idle", "overlap")
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}


def counted(document: dict[str, Any]) -> dict[str, float]:
    """Return the shares of one profile, from its events alone."""
    events = [
        one
        for one in document["traceEvents"]
        if one.get("ph") == "X" and str(one.get("cat")).lower() in _ON_DEVICE
    ]
    kinds: dict[str, list[tuple[float, float]]] = {"compute": [], "communication": [], "copy": []}
    for one in events:
        begin = float(one["ts"])
        kinds[_kind(one)].append((begin, begin + float(one.get("dur", 0.0))))
    compute, communication = _union(kinds["compute"]), _union(kinds["communication"])
    everything = _union([*kinds["compute"], *kinds["communication"], *kinds["copy"]])
    length = everything[:, 1].max() - everything[:, 0].min()
    either = _union([*map(tuple, compute), *map(tuple, communication)])
    hidden = _time(compute) + _time(communication) - _time(either)
    return {
        "compute": _time(compute) / length,
        "idle": 1.0 - _time(everything) / length,
        "overlap": hidden / _time(communication) if len(communication) else float("nan"),
    }


def _kind(event: dict[str, Any]) -> str:
    if str(event["cat"]).lower() != "kernel":
        return "copy"
    return "communication" if "nccl" in str(event["name"]).lower() else "compute"


def _union(spans: Iterable[tuple[float, ...]]) -> Spans:
    """Return disjoint intervals that cover the same time."""
    joined: list[list[float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return np.array(joined, dtype=np.float64).reshape(-1, 2)


def _time(spans: Spans) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


def ours(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Return the shares of each rank that our table of shares holds, the overlap from its spans."""
    spans, shares = timeline.spans, {}
    start, rank = numbers(spans, "start_ns"), numbers(spans, "rank")
    end = start + numbers(spans, "duration_ns")
    is_communication = equals(spans, "kind", Kind.COLLECTIVE, Kind.P2P)
    for row in summarise(timeline).ranks.to_pylist():
        of_rank = np.flatnonzero(is_communication & (rank == row["rank"]))
        communication = _time(
            _union(zip(start[of_rank].tolist(), end[of_rank].tolist(), strict=True))
        )
        seen_ns = row["transfer_ns"] + row["wait_ns"] + row["unsplit_ns"]
        shares[row["rank"]] = {
            "compute": row["compute_ratio"],
            "idle": row["idle_ratio"] + row["dispatch_ratio"] + row["host_ratio"],
            "overlap": 1.0 - seen_ns / communication if communication else float("nan"),
        }
    return shares


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def _document(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    document: dict[str, Any] = orjson.loads(
        gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    )
    return document


def main() -> int:
    """Print a row a rank and the largest difference."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_shares", description=__doc__
    )
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE")
    largest = 0.0
    print(f"| trace | rank | {' | '.join(f'{name} | counted' for name in SHARES)} |")
    print("|---|---:|" + "---:|---:|" * len(SHARES))
    for path in parser.parse_args().profiles:
        shares = ours(build_timeline(read_trace(path)))
        for file, (rank, mine) in zip(_files(path), sorted(shares.items()), strict=True):
            other = counted(_document(file))
            cells = [f"{mine[name]:.2%} | {other[name]:.2%}" for name in SHARES]
            largest = max([largest, *(abs(mine[name] - other[name]) for name in SHARES
                                      if mine[name] == mine[name])])  # fmt: skip
            print(f"| {path.name} | {rank} | {' | '.join(cells)} |")
    print(f"\nlargest difference: {100 * largest:.2f} points")
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
