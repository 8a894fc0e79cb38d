"""Ends of communication: as few bytes as they need, and each rank's where they belong."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from aggregate.match import match_spans
from megascan.header import WindowRecord
from megascan.reader.segments import Segment, settled_shard
from megascan.reader.trace import build_trace
from megascan.schema import Kind
from megascan.timeline import ends_of, in_order, narrowed, numbers, row_order, span_table, without


def ends(**columns):
    num_rows = max(len(values) for values in columns.values())
    texts = {"kind": (np.zeros(num_rows, dtype=np.int64), [str(Kind.COLLECTIVE)])}
    return ends_of(span_table(num_rows, {k: np.array(v) for k, v in columns.items()}, texts))


def test_columns_are_as_wide_as_their_largest_number():
    table = ends(
        rank=[3, 4],
        start_ns=[5, 6],
        microbatch=[-1, 127],
        iteration=[1, 128],
        sequence=[0, 40_000],
        size_bytes=[0, 2**31],
    )
    widths = {field.name: field.type for field in table.schema}
    assert widths["microbatch"] == pa.int8() and widths["iteration"] == pa.int16()
    assert widths["sequence"] == pa.int32() and widths["size_bytes"] == pa.int64()
    assert widths["rank"] == pa.int32() and widths["start_ns"] == pa.int64()  # never narrowed
    assert widths["kind"] == pa.dictionary(pa.int8(), pa.string())
    assert numbers(table, "sequence").tolist() == [0, 40_000]
    assert numbers(table, "microbatch").tolist() == [-1, 127]


def test_iterations_are_left_out_though_the_column_cannot_hold_their_number():
    table = ends(rank=[0, 0, 0], iteration=[1, 2, 3])
    assert numbers(without(table, {2, 5_000}), "iteration").tolist() == [1, 3]


def test_iterations_from_none_to_the_last_of_a_byte_are_matched_in_parts(
    folder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aggregate.match._BLOCK_ENDS", 2)
    table = ends(rank=[0] * 5 + [1] * 5, iteration=[-1, 1, 2, 126, 127] * 2, sequence=[0] * 10)
    for name, text in (("op", "all_reduce"), ("group", "tp@0")):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.array([text] * 10).dictionary_encode())
    table = narrowed(table)
    assert table.schema.field("iteration").type == pa.int8()
    found = match_spans(table, {rank: folder.header(rank) for rank in (0, 1)})
    assert found.match.tolist() == [0, 1, 2, 3, 4] * 2


def segment(folder, rank: int, kind: str, microbatch: int) -> Segment:
    header = folder.header(rank)
    table = span_table(
        3,
        {"rank": rank, "start_ns": np.arange(3), "duration_ns": 1, "microbatch": microbatch},
        {
            "kind": (np.array([0, 1, 0]), [kind, str(Kind.COMPUTE)]),
            "name": (np.arange(3), [f"a{rank}", "b", f"c{rank % 2}"]),
        },
    )
    window = WindowRecord(
        run_id=header.run_id, window=0, first_iteration=1, last_iteration=1, num_spans=3
    )
    return Segment(path=Path(f"{rank}.json"), header=header, windows=(window,), spans=table)


def test_ends_of_shards_stand_in_the_order_of_ranks(folder):
    found = [segment(folder, rank, Kind.P2P, 200 * (rank % 2)) for rank in range(4)]
    shards = [[found[0], found[2]], [found[1], found[3]]]
    handed = [
        one
        for number, shard in enumerate(shards)
        for one in settled_shard(shard, number)[1].segments
    ]
    trace = build_trace(Path("out"), handed, None, allow_missing_ranks=False)
    assert numbers(trace.spans, "rank").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert numbers(trace.spans, "microbatch").tolist() == [0, 0, 200, 200] * 2
    names = trace.spans.column("name").to_pylist()
    assert names == ["a0", "c0", "a1", "c1", "a2", "c0", "a3", "c1"]
    assert {chunked.num_chunks for chunked in trace.spans.columns} == {1}
    whole = build_trace(Path("out"), found, None, allow_missing_ranks=False)
    assert trace.spans.to_pylist() == ends_of(whole.spans).to_pylist()


def test_ranks_are_sorted_some_at_a_time_as_they_are_together(monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(3)
    columns = {
        "rank": np.sort(random.integers(0, 9, 200)),
        "start_ns": random.integers(0, 20, 200),
        "duration_ns": random.integers(0, 4, 200),
    }
    table = span_table(200, columns, {})
    rank, start, duration = columns.values()
    for size in (1, 30, 1000):
        monkeypatch.setattr("megascan.timeline._PIECE_ROWS", size)
        assert row_order(table).tolist() == np.lexsort((-duration, start, rank)).tolist()
    mixed = table.take(pa.array(random.permutation(200)))
    assert in_order(mixed).select(list(columns)).to_pylist() == (
        in_order(table).select(list(columns)).to_pylist()
    )
    assert all(one <= other for one, other in pairwise(numbers(in_order(mixed), "rank")))
