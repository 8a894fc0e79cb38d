"""Builders of small op tables, timelines and replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from detect.optable import OpTable, replay_of_op_table
from detect.whatif import Replay
from detect.whatif.graph import Graph, Group, Node, partition_of
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings
from megascan.schema import NOT_APPLICABLE, TIMELINE_COLUMNS, Granularity
from megascan.timeline import TIMELINE_SCHEMA, ClockFit, Completeness, Timeline
from megascan.topology import Layout

Row = tuple[int, int, int, str, int, float, float]
"""dp_rank, stage, step, optype, seq_id, start, duration."""


def _columns(rows: Sequence[Row]) -> dict[str, np.ndarray | list[str]]:
    dp, stage, step, optype, seq, start, duration = zip(*rows, strict=True)
    num_lanes = max(dp) + 1
    return {
        "dp_rank": np.array(dp, dtype=np.int16),
        "stage": np.array(stage, dtype=np.int8),
        "rank": np.array(stage, dtype=np.int32) * num_lanes + np.array(dp),
        "step": np.array(step, dtype=np.int64),
        "optype": list(optype),
        "start_ts": np.array(start, dtype=np.float32),
        "duration": np.array(duration, dtype=np.float32),
        "seq_id": np.array(seq, dtype=np.int32),
        "mc": np.zeros(len(rows), dtype=np.int8),
    }


@pytest.fixture
def op_table() -> Callable[[Sequence[Row]], OpTable]:
    def make(rows: Sequence[Row]) -> OpTable:
        columns = _columns(rows)
        optypes = tuple(sorted(set(columns["optype"])))
        columns["optype"] = np.array([optypes.index(name) for name in columns["optype"]])
        return OpTable(**columns, optypes=optypes)

    return make


@pytest.fixture
def op_file(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Sequence[Row], drop: str = "", null: str = "") -> Path:
        columns = {name: pa.array(values) for name, values in _columns(rows).items()}
        columns["optype"] = columns["optype"].dictionary_encode()
        if drop:
            del columns[drop]
        if null:
            columns[null] = pa.array([None, *columns[null].to_pylist()[1:]], columns[null].type)
        path = tmp_path / "trace-job.parquet"
        pq.write_table(pa.table(columns), path)
        return path

    return write


@pytest.fixture
def data_parallel_rows() -> Callable[..., list[Row]]:
    """Rows of a job without a pipeline: per replica 2 microbatches, gradients, optimizer.

    forward 1 s and backward 2 s times the replica's slowness, reduce-scatter 0.5 s, optimizer
    0.25 s; everybody waits for the slowest in the reduce-scatter.
    """

    def make(slowness: Sequence[float], num_steps: int = 2) -> list[Row]:
        rows: list[Row] = []
        last = 6.0 * max(slowness)
        for step in range(num_steps):
            for dp, slow in enumerate(slowness):
                for mb in range(2):
                    begin = 3.0 * slow * mb
                    rows.append((dp, 0, step, "forward-compute", mb, begin, slow))
                    rows.append((dp, 0, step, "backward-compute", mb, begin + slow, 2 * slow))
                done = 6.0 * slow
                rows.append((dp, 0, step, "grads-reduce-scatter", 0, done, last + 0.5 - done))
                rows.append((dp, 0, step, "optimizer", 0, last + 0.5, 0.25))
        return rows

    return make


@pytest.fixture
def data_parallel_replay(
    op_table: Callable[[Sequence[Row]], OpTable], data_parallel_rows: Callable[..., list[Row]]
) -> Callable[[Sequence[float]], Replay]:
    return lambda slowness: replay_of_op_table(op_table(data_parallel_rows(slowness)))


@pytest.fixture
def graph() -> Callable[..., Graph]:
    """A graph from (stage, type) nodes, edges, groups of several nodes, and lane labels."""

    def make(
        nodes: Sequence[tuple[int, str]],
        edges: Sequence[tuple[int, int]],
        groups: Sequence[tuple[tuple[int, ...], str]] = (),
        lanes: dict[str, Sequence[int]] | None = None,
    ) -> Graph:
        grouped = {node for members, _ in groups for node in members}
        alone = [Group(nodes=(n,)) for n in range(len(nodes)) if n not in grouped]
        return Graph(
            nodes=tuple(
                Node(stage=stage, optype=name, is_local=n not in grouped)
                for n, (stage, name) in enumerate(nodes)
            ),
            dependencies=tuple(
                tuple(before for before, after in edges if after == n) for n in range(len(nodes))
            ),
            groups=tuple(alone + [Group(nodes=m, partition=p) for m, p in groups]),
            partitions={name: partition_of(labels) for name, labels in (lanes or {}).items()},
            finish=(len(nodes) - 1,),
        )

    return make


@pytest.fixture
def timeline() -> Callable[..., Timeline]:
    """A timeline from dicts of span columns; times in ms."""

    def make(
        layout: Layout,
        spans: Sequence[dict[str, object]],
        groups: dict[str, tuple[int, ...]],
        granularity: Granularity = Granularity.FULL,
    ) -> Timeline:
        columns = {}
        for column in TIMELINE_COLUMNS:
            default = "" if column.type == "text" else NOT_APPLICABLE
            columns[column.name] = [span.get(column.name, default) for span in spans]
        for name in ("start_ns", "duration_ns", "wait_ns", "transfer_ns", "self_ns"):
            columns[name] = [
                int(value * 1_000_000) if value != NOT_APPLICABLE else NOT_APPLICABLE
                for value in columns[name]
            ]
        table = pa.table({name: pa.array(values) for name, values in columns.items()})
        ranks = sorted({int(str(span["rank"])) for span in spans})
        return Timeline(
            run_id="hand-made",
            layout=layout,
            headers={
                rank: RankHeader(
                    run_id="hand-made",
                    rank=rank,
                    world_size=layout.world_size,
                    layout=layout,
                    coordinates=layout.coordinates(rank),
                    groups={name: ranks for name, ranks in groups.items() if rank in ranks},
                    host="h0",
                    process_id=rank,
                    device=Device(kind="cpu", name="cpu"),
                    backend="gloo",
                    clock=ClockOrigin(domain="h0", source="test", origin_unix_ns=0),
                    trace=TraceSettings(granularity=granularity, interval=1, window=1),
                )
                for rank in ranks
            },
            spans=table.cast(TIMELINE_SCHEMA),
            windows={},
            clocks={
                rank: ClockFit(
                    rank=rank,
                    domain="h0",
                    offset_ns=0.0,
                    drift_ppm=0.0,
                    residual_median_ns=0.0,
                    residual_p99_ns=0.0,
                    num_anchors=0,
                )
                for rank in ranks
            },
            clock_method="one clock",
            origin_ns=0,
            completeness=Completeness(world_size=layout.world_size, ranks=tuple(ranks)),
        )

    return make
