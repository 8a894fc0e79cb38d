"""Ranks of a group in JSON: there and back, short for large groups."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascan.errors import InputError
from megascan.export import write_timeline
from megascan.header import RankHeader, packed, unpacked
from megascan.reader import read_timeline, read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Folder


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((0, 1, 2), [0, 1, 2]),
        (tuple(range(16_384)), "0-16383"),
        (tuple(range(3, 16_384, 8)), "3-16379/8"),
        ((*range(32), *range(64, 96)), "0-31,64-95"),
        ((5, 4, *range(20)), "5,4,0-19"),
    ],
)
def test_packed(ranks: tuple[int, ...], expected: object) -> None:
    assert packed(ranks) == expected
    assert unpacked(expected) == ranks


@given(st.lists(st.integers(0, 20_000), max_size=60))
def test_any_ranks_come_back(ranks: list[int]) -> None:
    assert unpacked(orjson.loads(orjson.dumps(packed(ranks)))) == tuple(ranks)


@pytest.mark.parametrize(
    "damaged", ["", "0-", "5-1", "0-9/0", "a", "0-999999999", "1,,2", 7, None, [1, "2"]]
)
def test_anything_else_is_refused(damaged: object) -> None:
    with pytest.raises(ValueError, match="ranks of a group"):
        unpacked(damaged)


def test_a_header_does_not_grow_with_the_world(folder: Folder) -> None:
    world = tuple(range(16_384))
    header = replace(folder.header(0), groups={"world@0": world, "dp@0": world[::8]})
    assert len(orjson.dumps(header.to_json())) < 1_500
    assert RankHeader.from_json(header.to_json(), "x") == header


def test_pickled_headers_are_short_and_share_the_ranks_of_a_group(folder: Folder) -> None:
    """Thousands of them go from the processes that read files to the one that joins them."""
    world = tuple(range(16_384))
    headers = [
        replace(folder.header(rank), groups={"world@0": world, "tp@0": (0, 1)}) for rank in (0, 1)
    ]
    pickled = [pickle.dumps(header) for header in headers]
    assert max(map(len, pickled)) < 3_000
    back = [pickle.loads(each) for each in pickled]
    assert back == headers
    assert back[0].groups["world@0"] is back[1].groups["world@0"]


def test_headers_with_lists_are_read_as_before(folder: Folder) -> None:
    record = folder.header(0).to_json()
    record["groups"] = {"world@0": list(range(40))}
    assert RankHeader.from_json(record, "x").groups == {"world@0": tuple(range(40))}
    record["groups"] = {"world@0": "0-nonsense"}
    with pytest.raises(InputError, match="damaged header"):
        RankHeader.from_json(record, "x")


def test_a_timeline_holds_each_group_once(merged: Path, tmp_path: Path) -> None:
    timeline = read_timeline(merged)
    record = orjson.loads(merged.read_bytes().split(b"\n")[1].rstrip(b","))["args"]
    assert record["groups"] == {"tp@0": [0, 1], "tp@2": [2, 3]}
    assert [header["groups"] for header in record["headers"]] == [["tp@0"]] * 2 + [["tp@2"]] * 2
    assert record["common_header"]["run_id"] == "run-a"
    assert "run_id" not in record["headers"][0]
    again = tmp_path / "again.json"
    write_timeline(timeline, again)
    assert read_timeline(again).headers == timeline.headers


def test_ranks_that_contradict_each_other_keep_their_own_groups(
    folder: Folder, tmp_path: Path, merged: Path
) -> None:
    timeline = read_timeline(merged)
    headers = {
        rank: replace(header, groups={"tp@0": (rank, 7)})
        for rank, header in timeline.headers.items()
    }
    path = tmp_path / "other.json"
    write_timeline(replace(timeline, headers=headers), path)
    assert read_timeline(path).headers == headers


def test_old_timelines_repeat_groups_in_every_header(merged: Path) -> None:
    timeline = read_timeline(merged)
    lines = merged.read_bytes().split(b"\n")
    event = orjson.loads(lines[1].rstrip(b","))
    event["args"] |= {
        "headers": [header.to_json() for header in timeline.headers.values()],
    }
    del event["args"]["groups"], event["args"]["common_header"]
    merged.write_bytes(b"\n".join([lines[0], orjson.dumps(event) + b",", *lines[2:]]))
    assert read_timeline(merged).headers == timeline.headers


def test_read_trace_shares_the_ranks_of_a_group(folder: Folder) -> None:
    trace = read_trace(folder.write())
    assert trace.headers[0].groups["tp@0"] == trace.headers[1].groups["tp@0"] == (0, 1)
