"""A rank that was killed records fewer iterations than its peers: nothing is warned, none named."""

from __future__ import annotations

import warnings

import pyarrow as pa

from aggregate import build_timeline
from detect import DetectorSettings, detect
from megascan.simulate import JobModel, compute_bound, simulate_trace
from megascan.timeline import numbers
from megascan.topology import Layout


def test_a_rank_that_ended_early_is_no_reason_to_warn() -> None:
    layout = Layout(dp=2, pp=2)
    job = JobModel(
        layout=layout, costs=compute_bound(layout), iterations=12, num_microbatches=4, num_layers=4
    )
    trace = simulate_trace(job)
    spans = trace.spans
    kept = (numbers(spans, "rank") != 1) | (numbers(spans, "iteration") <= 5)
    object.__setattr__(trace, "spans", spans.filter(pa.array(kept)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        report = detect(build_timeline(trace), DetectorSettings())
    assert [finding.ranks for finding in report.findings if finding.owner == "node"] == []
