"""Numbers of profiles: bytes of elements, and times in whole nanoseconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megascan.reader import read_trace
from megascan.reader.kineto.document import read_profile, times_ns

NUM_ELEMENTS = 300


def write(folder: Path, events: list[dict[str, object]]) -> Path:
    path = folder / "rank0.json"
    document = {"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [
        ("Double", 8), ("Long", 8), ("Float", 4), ("Int", 4), ("BFloat16", 2), ("Half", 2),
        ("Float8_e4m3fn", 1), ("Float8_e5m2", 1), ("Float8_e8m0fnu", 1), ("Byte", 1),
    ],
)  # fmt: skip
def test_bytes_of_a_collective(tmp_path: Path, dtype: str, item_bytes: int) -> None:
    told = {
        "Collective name": "allreduce", "In msg nelems": NUM_ELEMENTS, "dtype": dtype,
        "Process Group Name": "5", "Process Group Ranks": "[0, 1]", "stream": 20,
    }  # fmt: skip
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum(x)"}
    event = {**kernel, "pid": 0, "tid": 20, "ts": 10, "dur": 5, "args": told}
    spans = read_trace(write(tmp_path, [event])).spans
    assert spans.column("size_bytes").to_pylist() == [NUM_ELEMENTS * item_bytes]


def test_what_an_event_holds_stays_in_it_when_times_are_rounded(tmp_path: Path) -> None:
    """Both end at 1.6 ns: lengths rounded by themselves would end the outer one at 1 ns."""
    outer, inner = {"ts": 0.0004, "dur": 0.0012}, {"ts": 0.0006, "dur": 0.0010}
    common = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 0, "tid": 5}
    profile = read_profile(write(tmp_path, [{**common, **outer}, {**common, **inner}]))
    start, end = times_ns(profile)
    assert (start.tolist(), end.tolist()) == ([0, 1], [2, 2])


def test_nesting_survives_wherever_events_begin(tmp_path: Path) -> None:
    drawn = np.random.default_rng(7).uniform(0, 50, (200, 4)) / 1000
    common = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 0, "tid": 5}
    events = []
    for begin, before, length, after in drawn.tolist():
        events.append({**common, "ts": begin, "dur": before + length + after})
        events.append({**common, "ts": begin + before, "dur": length})
    start, end = (
        column.reshape(-1, 2) for column in times_ns(read_profile(write(tmp_path, events)))
    )
    assert (start[:, 0] <= start[:, 1]).all() and (end[:, 1] <= end[:, 0]).all()
