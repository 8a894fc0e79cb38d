"""Jobs small and exact enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest

from megascan.simulate import CostModel, JobModel, Noise
from megascan.timeline import Trace
from megascan.topology import Layout

SILENT = Noise(compute_ratio=0.0, transfer_ratio=0.0, end_jitter_ns=0.0)


@pytest.fixture
def exact_job() -> Callable[..., JobModel]:
    """A job without noise whose layers are one attention of 10 us forward and 20 us backward."""

    def make(layout: Layout, **changes: object) -> JobModel:
        costs = CostModel(**{"attention_ns": 10_000.0, **changes.pop("costs", {})})
        settings = {
            "layout": layout,
            "costs": costs,
            "iterations": 1,
            "num_microbatches": 2,
            "num_layers": layout.pp * layout.vpp,
            "noise": SILENT,
            "tied_embeddings": False,
            "distributed_optimizer": False,
        }
        return JobModel(**{**settings, **changes})

    return make


@pytest.fixture
def frame() -> Callable[[Trace], pd.DataFrame]:
    """Spans of a trace with start and end relative to the first start."""

    def table(trace: Trace) -> pd.DataFrame:
        spans = trace.spans.to_pandas()
        spans["start"] = spans["start_ns"] - spans["start_ns"].min()
        spans["end"] = spans["start"] + spans["duration_ns"]
        return spans

    return table
