"""Rank files of a simulated job, read back as any other."""

from __future__ import annotations

import json

import pytest

from megascan.errors import OutputError
from megascan.rankfile import write_ground_truth
from megascan.reader import read_trace
from megascan.simulate import (
    Clocks,
    Imbalance,
    JobModel,
    compute_bound,
    ground_truth,
    parse_fault,
    simulate_trace,
    write_rank_files,
)
from megascan.topology import Layout

LAYOUT = Layout(tp=2, pp=2, dp=2)
JOB = JobModel(
    layout=LAYOUT,
    costs=compute_bound(LAYOUT),
    iterations=7,
    num_microbatches=2,
    num_layers=2,
    clocks=Clocks(offset_ms=50.0, drift_ppm=20.0),
    ranks_per_host=2,
    imbalance=Imbalance(stage_ratio={1: 1.3}, checkpoint_interval=3, gc_interval=3),
)
FAULTS = [parse_fault("rank=3,kind=compute,factor=1.5,from=2,to=4")]


def test_what_is_read_back_is_what_was_simulated(tmp_path):
    trace = simulate_trace(JOB, FAULTS, seed=2)
    paths = write_rank_files(trace, tmp_path)
    assert len(paths) == 8
    back = read_trace(tmp_path)
    assert back.run_id == trace.run_id
    assert back.headers == trace.headers
    assert back.windows == trace.windows
    assert back.spans.num_rows == trace.spans.num_rows
    for name in trace.spans.column_names:
        assert back.spans.column(name).to_pylist() == trace.spans.column(name).to_pylist(), name


def test_each_file_is_json_by_itself(tmp_path):
    (path, *_) = write_rank_files(simulate_trace(JOB), tmp_path)
    assert path.name == "benchmark-data-0-pipeline-0-tensor-0.json"
    events = json.loads(path.read_bytes())
    assert events[0]["name"] == "megascan"
    assert [event["name"] for event in events].count("megascan_window") == 2


def test_ground_truth_says_what_was_planted(tmp_path):
    trace = simulate_trace(JOB, FAULTS, seed=2)
    path = write_ground_truth(ground_truth(trace, JOB, FAULTS, 2), tmp_path)
    truth = json.loads(path.read_bytes())
    assert path.name == "ground-truth.json"
    assert truth["run_id"] == trace.run_id
    assert truth["faults"] == [{"rank": 3, "kind": "compute", "factor": 1.5, "from": 2, "to": 4}]
    assert {item["kind"] for item in truth["imbalances"]} == {"stage_imbalance", "checkpoint", "gc"}


def test_a_second_run_sets_the_first_aside(tmp_path):
    first = simulate_trace(JOB, seed=1)
    write_rank_files(first, tmp_path)
    second = simulate_trace(JOB, seed=2)
    write_rank_files(second, tmp_path)
    assert read_trace(tmp_path).run_id == second.run_id
    assert len(list((tmp_path / first.run_id).iterdir())) == 8


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(OutputError, match="cannot write rank files"):
        write_rank_files(simulate_trace(JOB), blocked)
    with pytest.raises(OutputError, match=r"cannot write .*ground-truth"):
        write_ground_truth({}, blocked)
