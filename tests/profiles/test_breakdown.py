"""Shares of a profile's time against a count by the microsecond that knows nothing of ours.

The definitions are those of HolisticTraceAnalysis: over the time from the first kernel to the last
one, compute is the union of compute kernels, whatever else runs beside it; communication and copies
count where no compute hides them; idle is what nothing covers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from aggregate import build_timeline
from aggregate.summary import SHARES, summarise
from megascan.reader import read_trace

COMPUTE, COMMUNICATION, COPY = (
    "ampere_gemm(Args)",
    "ncclDevKernel_AllReduce_Sum(Args)",
    "Memcpy HtoD",
)
STREAMS = {7: COMPUTE, 13: COMPUTE, 20: COMMUNICATION, 27: COPY}
NUM_STEPS = 3


def events(seed: int) -> list[dict[str, object]]:
    """Three steps of kernels of random length on four streams; the device lags behind its host."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    device = dict.fromkeys(STREAMS, 0)
    host = 0
    correlation = 0
    for step in range(NUM_STEPS):
        begin = host
        for _ in range(120):
            correlation += 1
            made.append(_event("cuda_runtime", "cudaLaunchKernel", host, 2, correlation, 0))
            host += rng.randint(3, 12)
            stream = rng.choice([*STREAMS])
            start = max(device[stream], host) + rng.choice([0, 0, 5, 40])
            length = rng.randint(1, 90)
            device[stream] = start + length
            kind = "gpu_memcpy" if stream == 27 else "kernel"
            made.append(_event(kind, STREAMS[stream], start, length, correlation, stream))
        made.append(_event("user_annotation", f"ProfilerStep#{step}", begin, host - begin, 0, 0))
    return made


def _event(
    category: str, name: str, start: int, length: int, correlation: int, stream: int
) -> dict[str, object]:
    arguments = {"correlation": correlation} | ({"stream": stream} if stream else {})
    place = {"pid": 0, "tid": stream, "ts": start, "dur": length}
    return {"ph": "X", "cat": category, "name": name, **place, "args": arguments}


def counted(made: list[dict[str, object]]) -> dict[str, float]:
    """Colour every microsecond by what runs in it."""
    kernels = [one for one in made if one["cat"] in ("kernel", "gpu_memcpy")]
    first = min(one["ts"] for one in kernels)
    last = max(one["ts"] + one["dur"] for one in kernels)
    running = {name: np.zeros(last - first, dtype=bool) for name in STREAMS.values()}
    for one in kernels:
        begin = one["ts"] - first
        running[one["name"]][begin : begin + one["dur"]] = True
    compute, communication, copy = (running[name] for name in (COMPUTE, COMMUNICATION, COPY))
    return {
        "compute": compute.mean(),
        "communication": (communication & ~compute).mean(),
        "copy": (copy & ~compute & ~communication).mean(),
        "nothing": (~compute & ~communication & ~copy).mean(),
    }


@pytest.mark.parametrize("seed", range(6))
def test_shares_are_those_of_a_count_by_the_microsecond(tmp_path: Path, seed: int) -> None:
    made = events(seed)
    (tmp_path / "rank0.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": made}))
    summary = summarise(build_timeline(read_trace(tmp_path)))
    (row,) = summary.ranks.to_pylist()
    ours = {
        "compute": row["compute_ratio"],
        "communication": row["transfer_ratio"] + row["wait_ratio"] + row["unsplit_ratio"],
        "copy": row["copy_ratio"],
        "nothing": row["idle_ratio"] + row["dispatch_ratio"],
    }
    assert ours == pytest.approx(counted(made), abs=0.001)
    assert sum(row[f"{share}_ns"] for share in SHARES) == row["duration_ns"]
    assert summary.iterations.num_rows == NUM_STEPS
