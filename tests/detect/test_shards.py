"""Spans that stay in shards are observed there; what is found is the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from aggregate import build_timeline
from detect import detect
from detect.observe.extract import observe
from detect.whatif import replay_of_timeline
from detect.whatif.marks import replayed_spans
from megascan.parallel import Here
from megascan.simulate import JobModel, compute_bound, parse_fault, simulate_trace
from megascan.timeline import END_COLUMNS, Shard, ShardedTimeline, Timeline, is_end, numbers
from megascan.topology import Layout

LAYOUT = Layout(tp=2, pp=2, dp=2)
JOBS = {
    "entangled": ("rank=5,kind=compute,factor=1.3", {}),
    "layers in turns": ("rank=5,kind=gc,factor=1.3", {"layer_stride": 4}),
    "on CPUs": ("rank=5,kind=host,factor=1.5", {"device": "cpu"}),
}


def simulated(fault: str, **job: object) -> Timeline:
    """A job of eight ranks, six iterations."""
    model = JobModel(
        layout=LAYOUT,
        costs=compute_bound(LAYOUT),
        iterations=6,
        num_microbatches=4,
        num_layers=8,
        **job,
    )
    return build_timeline(simulate_trace(model, [parse_fault(fault)], seed=1))


def divided(timeline: Timeline, ranks_of: list[list[int]]) -> ShardedTimeline:
    """The same spans in shards of these ranks."""
    here, spans = Here(1), timeline.spans
    ends = np.flatnonzero(is_end(spans))
    end_rank, rank = numbers(spans, "rank")[ends], numbers(spans, "rank")
    return ShardedTimeline(
        frame=replace(timeline, spans=spans.slice(0, 0)),
        ends=spans.take(ends).select([*END_COLUMNS, "match", "transfer_ns"]),
        shards=tuple(
            Shard(
                here.put(spans.filter(np.isin(rank, ranks))),
                int(np.isin(rank, ranks).sum()),
                tuple(ranks),
                np.flatnonzero(np.isin(end_rank, ranks)),
            )
            for ranks in ranks_of
        ),
        workers=here,
    )


def values(record: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Everything that a record holds, and where; not how costs are replayed."""
    if is_dataclass(record):
        for field in fields(record):
            if field.name != "costs":
                yield from values(getattr(record, field.name), f"{path}.{field.name}")
    elif isinstance(record, dict):
        for key, value in record.items():
            yield from values(value, f"{path}[{key}]")
    else:
        yield path, record


def alike(one: object, other: object) -> bool:
    """Whether two values are equal, NaN to NaN."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return one == other


@pytest.mark.parametrize("name", JOBS)
def test_shards_of_any_ranks_are_observed_alike(name, without_power):
    fault, job = JOBS[name]
    timeline = simulated(fault, **job)
    shards = divided(timeline, [[1, 6], [0, 2, 3, 7], [4, 5]])
    for (path, one), (_, other) in zip(
        values(observe(shards)), values(observe(timeline)), strict=True
    ):
        assert alike(one, other), path
    assert detect(shards).to_json() == detect(timeline).to_json()


def test_only_what_a_replay_needs_leaves_the_shards():
    timeline = simulated("rank=5,kind=compute,factor=1.3")
    taken = divided(timeline, [[1, 6], [0, 2, 3, 7], [4, 5]]).whole(replayed_spans)
    assert taken.spans.num_rows < 0.7 * timeline.spans.num_rows
    whole, part = replay_of_timeline(timeline), replay_of_timeline(taken)
    assert np.array_equal(whole.weights, part.weights)
    assert np.array_equal(whole.ideal, part.ideal)
