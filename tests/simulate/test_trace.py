"""The trace as a whole: names, headers, windows, clocks, determinism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megascan.errors import ConfigError
from megascan.schema import Granularity
from megascan.simulate import (
    Clocks,
    CostModel,
    JobModel,
    Noise,
    communication_heavy,
    compute_bound,
    simulate_trace,
)
from megascan.timeline import TRACE_SCHEMA
from megascan.topology import Layout

LAYOUT = Layout(tp=2, pp=2, dp=2)
JOB = JobModel(
    layout=LAYOUT, costs=compute_bound(LAYOUT), iterations=3, num_microbatches=2, num_layers=4
)


def test_the_same_seed_gives_the_same_trace_and_another_one_another():
    first, again, other = (simulate_trace(JOB, seed=seed) for seed in (1, 1, 2))
    assert first.spans.equals(again.spans)
    assert first.headers == again.headers
    assert first.run_id == again.run_id != other.run_id
    assert not first.spans.equals(other.spans)


def test_the_table_has_the_declared_columns():
    assert simulate_trace(JOB).spans.schema == TRACE_SCHEMA


def test_full_granularity_names(frame):
    spans = frame(simulate_trace(JOB))
    assert set(spans["name"]) == {
        "iteration",
        "forward",
        "backward",
        "batch-generator",
        "embedding",
        "transformer_layer",
        "attention",
        "mlp",
        "output_layer",
        "loss",
        "embedding-backward",
        "transformer_layer-backward",
        "attention-backward",
        "mlp-backward",
        "output_layer-backward",
        "send_forward",
        "recv_forward",
        "send_backward",
        "recv_backward",
        "broadcast",
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "grad-sync",
        "optimizer",
    }
    axes = {group.partition("@")[0] for group in spans["group"]} - {""}
    assert axes == {"tp", "pp", "dp_cp", "embd", "intra_dist_opt"}
    assert set(spans[spans["name"] == "transformer_layer"]["layer"]) == {1, 2, 3, 4}


def test_base_granularity_keeps_passes_messages_and_gradients(frame):
    spans = frame(simulate_trace(replace(JOB, granularity=Granularity.BASE)))
    assert set(spans["name"]) == {
        "iteration",
        "forward",
        "backward",
        "batch-generator",
        "loss",
        "send_forward",
        "recv_forward",
        "send_backward",
        "recv_backward",
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "grad-sync",
        "optimizer",
    }
    assert set(spans[spans["kind"] == "collective"]["group"].str.partition("@")[0]) == {"dp_cp"}


def test_granularity_changes_what_is_recorded_and_not_what_happens(frame):
    full = frame(simulate_trace(JOB))
    base = frame(simulate_trace(replace(JOB, granularity=Granularity.BASE)))
    for name in ("forward", "send_forward", "optimizer"):
        columns = ["rank", "start", "end"]
        one, other = (table[table["name"] == name][columns].to_numpy() for table in (full, base))
        assert np.array_equal(one, other)


def test_headers_describe_the_rank():
    trace = simulate_trace(replace(JOB, ranks_per_host=4))
    header = trace.headers[5]
    assert (header.host, header.device.index, header.clock.domain) == ("n01", 1, "n01")
    assert header.coordinates == LAYOUT.coordinates(5)
    assert header.groups["tp@4"] == (4, 5)
    assert header.groups["dp_cp@5"] == (5, 7)
    assert header.groups["embd@1"] == (1, 5)
    assert header.groups["pp@1"] == (1, 5)
    assert header.groups["intra_dist_opt@0"] == tuple(range(8))


def test_windows_hold_the_traced_iterations():
    trace = simulate_trace(replace(JOB, iterations=12, interval=5, window=2))
    iterations = trace.spans.column("iteration").to_numpy()
    assert sorted(set(iterations.tolist())) == [1, 2, 6, 7, 11, 12]
    for rank, windows in trace.windows.items():
        assert [(w.first_iteration, w.last_iteration) for w in windows] == [
            (1, 2),
            (6, 7),
            (11, 12),
        ]
        own = iterations[trace.spans.column("rank").to_numpy() == rank]
        assert sum(window.num_spans for window in windows) == len(own)


def test_missing_ranks_leave_no_trace():
    trace = simulate_trace(replace(JOB, missing_ranks=(3, 6)))
    assert set(trace.spans.column("rank").to_pylist()) == {0, 1, 2, 4, 5, 7}
    assert sorted(trace.headers) == [0, 1, 2, 4, 5, 7]
    assert trace.completeness.missing_ranks == (3, 6)


def test_clocks_of_hosts_are_off_and_drift():
    clocks = Clocks(offset_ms=100.0, drift_ppm=50.0)
    true = simulate_trace(replace(JOB, ranks_per_host=4, iterations=40), seed=5)
    skewed = simulate_trace(replace(JOB, ranks_per_host=4, iterations=40, clocks=clocks), seed=5)
    rank = true.spans.column("rank").to_numpy()
    starts = true.spans.column("start_ns").to_numpy()
    errors = skewed.spans.column("start_ns").to_numpy() - starts
    for host in (0, 1):
        of_host = rank // 4 == host
        slope, offset = np.polyfit(starts[of_host] - starts.min(), errors[of_host], 1)
        assert 1e6 < abs(offset) < 100e6
        assert 1e-7 < abs(slope) < 50e-6
        own = errors[of_host] - (slope * (starts[of_host] - starts.min()) + offset)
        assert np.abs(own).max() < 100


def test_noise_has_the_stated_size(frame):
    layout = Layout(dp=2)
    costs = CostModel(attention_ns=1e6)
    noise = Noise(compute_ratio=0.05, device_ratio=0.0)
    job = JobModel(
        layout=layout, costs=costs, iterations=50, num_layers=10, noise=noise, tied_embeddings=False
    )
    spans = frame(simulate_trace(job))
    logs = np.log(spans[spans["name"] == "attention"]["duration_ns"] / 1e6)
    assert 0.045 < logs.std() < 0.055
    assert abs(logs.mean()) < 0.005


def test_slow_links_cost_a_third_of_the_step_and_fast_ones_little(frame):
    layout = Layout(tp=4, pp=2, dp=2)

    def share(costs: CostModel) -> float:
        job = JobModel(layout=layout, costs=costs, iterations=1)
        spans = frame(simulate_trace(job))
        reduces = spans[(spans["kind"] == "collective") & spans["group"].str.startswith("tp@")]
        groups = reduces.groupby(["group", "op", "sequence"], observed=True)["duration_ns"].min()
        step = spans[spans["name"] == "iteration"]["duration_ns"].max()
        return float(groups.groupby("group", observed=True).sum().max() / step)

    assert share(compute_bound(layout)) < 0.2
    assert share(communication_heavy(layout)) > 0.33


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 5}, "5 layers"),
        ({"iterations": 0}, "0 iterations"),
        ({"device": "tpu"}, "cuda or cpu"),
        ({"missing_ranks": (8,)}, r"\[8\]"),
        ({"window": 6}, "longer than"),
    ],
)
def test_jobs_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(JOB, **changes)


def test_negative_costs_are_refused():
    with pytest.raises(ConfigError, match="attention_ns is -1"):
        CostModel(attention_ns=-1.0)
