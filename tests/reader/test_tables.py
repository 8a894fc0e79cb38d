"""Collectives, messages and clocks of a timeline as tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from megascan.api import run_tables
from megascan.reader import read_timeline
from megascan.schema import Kind, Track
from megascan.timeline import TIMELINE_SCHEMA, Timeline, number_type


def row(rank: int, start_ns: int, duration_ns: int, **columns: int | str) -> dict[str, int | str]:
    empty: dict[str, int | str] = {
        field.name: "" if pa.types.is_dictionary(field.type) else -1 for field in TIMELINE_SCHEMA
    }
    times = {"rank": rank, "start_ns": start_ns, "duration_ns": duration_ns}
    return {**empty, "track": int(Track.COMMUNICATION), "iteration": 3, **times, **columns}


def timeline_of(merged: Path, *rows: dict[str, int | str]) -> Timeline:
    spans = pa.Table.from_pylist(list(rows), schema=TIMELINE_SCHEMA)
    timeline = read_timeline(merged)
    return Timeline(**{**vars(timeline), "spans": spans})


def test_collectives(merged: Path) -> None:
    reduce: dict[str, int | str] = {
        "kind": Kind.COLLECTIVE, "op": "all_reduce", "group": "tp@0", "match": 7, "sequence": 2,
    }  # fmt: skip
    timeline = timeline_of(
        merged,
        row(0, 100, 50, **reduce, size_bytes=8, transfer_ns=20),
        row(1, 130, 21, **reduce, size_bytes=8, transfer_ns=21),
        row(2, 500, 9, **{**reduce, "match": -1}),
    )
    assert run_tables(timeline).collectives.to_pylist() == [
        {
            "match": 7,
            "iteration": 3,
            "op": "all_reduce",
            "group": "tp@0",
            "sequence": 2,
            "num_members": 2,
            "size_bytes": 8,
            "first_start_ns": 100,
            "last_start_ns": 130,
            "last_rank": 1,
            "end_ns": 151,
            "transfer_ns": 20,
        }
    ]


def test_messages_need_both_ends(merged: Path) -> None:
    send = {"kind": Kind.P2P, "op": "send", "direction": "forward", "size_bytes": 16}
    receive = {"kind": Kind.P2P, "op": "recv", "direction": "forward", "size_bytes": 16}
    timeline = timeline_of(
        merged,
        row(0, 100, 10, **send, match=1, microbatch=4, transfer_ns=10),
        row(0, 200, 10, **send, match=2),
        row(4, 90, 25, **receive, match=1, transfer_ns=15),
    )
    assert run_tables(timeline).messages.to_pylist() == [
        {
            "match": 1,
            "iteration": 3,
            "direction": "forward",
            "microbatch": 4,
            "sender": 0,
            "receiver": 4,
            "size_bytes": 16,
            "send_start_ns": 100,
            "receive_start_ns": 90,
            "end_ns": 115,
            "transfer_ns": 10,
        }
    ]


def test_clocks_and_the_rest(merged: Path) -> None:
    timeline = read_timeline(merged)
    tables = run_tables(timeline)
    assert tables.spans is timeline.spans
    assert tables.clocks.column("rank").to_pylist() == [0, 1, 2, 3]
    assert tables.clocks.column("offset_ns").to_pylist() == [0.0, 1.5, 3.0, 4.5]
    assert np.all(np.asarray(tables.clocks.column("num_anchors")) == 8)


def test_a_timeline_without_communication(merged: Path) -> None:
    tables = run_tables(timeline_of(merged, row(0, 1, 2, kind=Kind.COMPUTE, name="forward")))
    assert (len(tables.collectives), len(tables.messages)) == (0, 0)


def test_types_of_numbers() -> None:
    kinds = (pa.int8(), pa.int64(), pa.uint16(), pa.float32(), pa.float64())
    assert [str(number_type(kind)) for kind in kinds] == [
        *("int8", "int64", "uint16", "float32", "float64")
    ]
