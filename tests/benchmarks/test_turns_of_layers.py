"""Rank files of the grounds with modules of layers in turns: as the tracer records them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from aggregate import build_timeline
from benchmarks.grounds.turns import leave_modules_out
from megascan.reader import read_trace
from megascan.simulate import JobModel, compute_bound, simulate_trace, write_rank_files
from megascan.timeline import is_sampled
from megascan.topology import Layout

LAYOUT = Layout(tp=2, dp=2)


def job(stride: int, num_layers: int) -> JobModel:
    return JobModel(
        layout=LAYOUT, costs=compute_bound(LAYOUT), iterations=6, num_layers=num_layers,
        num_microbatches=2, interval=2, window=2, layer_stride=stride,
    )  # fmt: skip


@pytest.mark.parametrize("num_layers", [3, 8])
def test_what_is_left_is_what_the_simulator_records_in_turns(tmp_path: Path, num_layers: int):
    for stride, name in ((1, "whole"), (4, "part")):
        write_rank_files(simulate_trace(job(stride, num_layers), [], seed=3), tmp_path / name)
    leave_modules_out(tmp_path / "whole", 4)
    thinned, expected = (build_timeline(read_trace(tmp_path / one)) for one in ("whole", "part"))
    columns = ["rank", "name", "iteration", "microbatch", "layer"]
    kept, wanted = (
        Counter(zip(*one.spans.select(columns).to_pydict().values(), strict=True))
        for one in (thinned, expected)
    )
    assert kept == wanted
    assert is_sampled(thinned) == is_sampled(expected) == (num_layers == 8)


def test_a_file_that_was_cut_keeps_what_is_whole(tmp_path: Path):
    write_rank_files(simulate_trace(job(1, 8), [], seed=3), tmp_path / "cut")
    path = sorted((tmp_path / "cut").glob("benchmark-data-*.json"))[0]
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    leave_modules_out(tmp_path / "cut", 4)
    timeline = build_timeline(read_trace(tmp_path / "cut"))
    assert is_sampled(timeline)
    assert set(timeline.headers) == {0, 1, 2, 3}
