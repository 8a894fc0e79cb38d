"""Calibration: a simulation of a simulated job has to reproduce it."""

from __future__ import annotations

import json

import pytest

from aggregate import build_timeline
from benchmarks.detection.reality import compare, costs_of, frame_of, measure, read_faults
from megascan.errors import InputError
from megascan.simulate import JobModel, compute_bound, parse_fault, simulate_trace
from megascan.topology import Layout

LAYOUT = Layout(tp=2, pp=2)
JOB = JobModel(layout=LAYOUT, costs=compute_bound(LAYOUT), iterations=6, num_layers=8)
FAULT = parse_fault("rank=3,kind=compute,factor=1.5,from=4")


def test_costs_are_recovered_from_a_trace_with_a_fault_in_it():
    timeline = build_timeline(simulate_trace(JOB, [FAULT], seed=4))
    costs = costs_of(measure(frame_of(timeline), [FAULT]), layers_per_stage=4)
    for name in ("attention_ns", "mlp_ns", "tensor_ns", "pipeline_ns", "output_layer_ns"):
        assert getattr(costs, name) == pytest.approx(getattr(JOB.costs, name), rel=0.03), name
    assert costs.norm_ns == pytest.approx(JOB.costs.norm_ns, rel=0.1)
    assert costs.between_iterations_ns == pytest.approx(500_000, rel=0.1)


def test_step_time_and_waits_come_out_again():
    timeline = build_timeline(simulate_trace(JOB, [FAULT], seed=4))
    table = compare(timeline, [FAULT])
    assert table["simulated"]["step_ms"].tolist() == pytest.approx(
        table["real"]["step_ms"].tolist(), rel=0.05
    )
    real, simulated = table["real"]["wait_ms"], table["simulated"]["wait_ms"]
    assert (simulated - real).abs().max() < 0.06 * table["real"]["step_ms"].max()


def test_a_trace_without_layers_is_refused():
    base = JobModel(**{**JOB.__dict__, "granularity": "base"})
    timeline = build_timeline(simulate_trace(base))
    with pytest.raises(InputError, match="--trace-granularity full"):
        costs_of(measure(frame_of(timeline), []), layers_per_stage=4)


def test_faults_of_the_trainer_and_of_the_simulator_are_read(tmp_path):
    records = [
        {"rank": 1, "kind": "compute", "factor": 1.5, "first_iteration": 5},
        {"rank": 2, "kind": "link", "factor": 2.0, "from": 3, "to": 4, "peer": 0},
        {"rank": 2, "kind": "loader", "delay_ms": 2.0},
    ]
    (tmp_path / "ground-truth.json").write_text(json.dumps({"faults": records}))
    assert read_faults(tmp_path) == [
        parse_fault("rank=1,kind=compute,factor=1.5,from=5"),
        parse_fault("rank=2,kind=link,factor=2,from=3,to=4,peer=0"),
    ]
    assert read_faults(tmp_path / "nothing") == []
