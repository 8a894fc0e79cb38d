"""Sides of a comparison from simulated jobs and from small op tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aggregate import build_timeline, summarise
from detect import DetectorSettings
from detect.comparison import Side, side_of_timeline
from megascan.simulate import (
    Clocks,
    Imbalance,
    JobModel,
    Noise,
    compute_bound,
    parse_fault,
    simulate_trace,
)
from megascan.topology import Layout

LAYOUT = Layout(tp=2, pp=2, dp=2)


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Nothing here asks what would have been found."""


@pytest.fixture(scope="session")
def side() -> Callable[..., Side]:
    """`side(seed, "rank=…,kind=compute,factor=1.3", layout=…)`; any field of a JobModel besides."""

    def make(seed: int, *faults: str, layout: Layout = LAYOUT, **job: object) -> Side:
        settings: dict[str, object] = {
            "iterations": 12,
            "num_layers": 4 * layout.pp,
            "num_microbatches": 4,
            "noise": Noise(device_ratio=0.002),
            "clocks": Clocks(offset_ms=5.0, drift_ppm=10.0),
            "imbalance": Imbalance(),
        }
        settings |= {"costs": compute_bound(layout)}
        model = JobModel(layout=layout, **(settings | job))
        timeline = build_timeline(
            simulate_trace(model, [parse_fault(fault) for fault in faults], seed=seed)
        )
        shares = summarise(timeline).ranks
        return side_of_timeline(f"seed {seed}", timeline, shares, DetectorSettings())

    return make


@pytest.fixture(scope="session")
def healthy(side: Callable[..., Side]) -> Side:
    return side(0)


@pytest.fixture
def op_file(tmp_path: Path) -> Callable[..., Path]:
    """An op table of DP 4: forward 1 s and backward 2 s, times `slow` by replica."""

    def write(name: str, seed: int, slow: dict[int, float] | None = None, steps: int = 8) -> Path:
        random = np.random.default_rng(seed)
        rows = []
        for step in range(steps):
            longest = 0.0
            for rank in range(4):
                factor, now = (slow or {}).get(rank, 1.0), 0.0
                for microbatch in range(4):
                    for optype, usual in (("forward-compute", 1.0), ("backward-compute", 2.0)):
                        time = usual * factor * np.exp(0.01 * random.standard_normal())
                        rows.append((rank, step, optype, microbatch, now, time))
                        now += time
                longest = max(longest, now)
            rows += [(rank, step, "optimizer", 0, longest, 0.2) for rank in range(4)]
        rank, step, optype, sequence, start, duration = zip(*rows, strict=True)
        table = pa.table(
            {
                "dp_rank": pa.array(rank, pa.int8()),
                "stage": pa.array([0] * len(rows), pa.int8()),
                "rank": pa.array(rank, pa.int16()),
                "step": pa.array(step, pa.int64()),
                "optype": pa.array(optype).dictionary_encode(),
                "start_ts": pa.array(start, pa.float32()),
                "duration": pa.array(duration, pa.float32()),
                "seq_id": pa.array(sequence, pa.int32()),
                "mc": pa.array([0] * len(rows), pa.int8()),
            }
        )
        path = tmp_path / f"trace-{name}.parquet"
        pq.write_table(table, path)
        return path

    return write
