"""A merged timeline comes back as it was written."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megascan.errors import InputError
from megascan.export import Selection, write_timeline
from megascan.header import Trainer
from megascan.reader import read_timeline, read_trace
from megascan.timeline import TIMELINE_SCHEMA

if TYPE_CHECKING:
    from conftest import Folder


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_everything_survives(merged: Path, suffix: str) -> None:
    timeline = read_timeline(merged)
    again = merged.with_name(f"again{suffix}")
    write_timeline(timeline, again)
    other = read_timeline(again)
    assert other.spans.schema == TIMELINE_SCHEMA
    assert other.spans.to_pylist() == timeline.spans.to_pylist()
    for field in ("run_id", "layout", "headers", "windows", "clocks", "clock_method", "origin_ns"):
        assert getattr(other, field) == getattr(timeline, field)
    assert other.completeness == timeline.completeness


def test_who_trains_survives_even_if_some_ranks_do_not_say_it(merged: Path) -> None:
    timeline = read_timeline(merged)
    headers = {rank: replace(header, trainer=Trainer.TORCH) if rank % 2 else header
               for rank, header in timeline.headers.items()}  # fmt: skip
    again = merged.with_name("again.json")
    write_timeline(replace(timeline, headers=headers), again)
    assert read_timeline(again).headers == headers


def test_spans_are_those_of_the_trace(folder: Folder, merged: Path) -> None:
    trace, timeline = read_trace(folder.path), read_timeline(merged)
    assert timeline.spans.select(trace.spans.column_names).to_pylist() == trace.spans.to_pylist()
    assert timeline.spans.column("match").to_pylist()[:3] == [-1, 9, 19]
    assert timeline.clocks[3].offset_ns == 4.5


def test_selected_ranks_only(merged: Path) -> None:
    part = merged.with_name("part.json")
    write_timeline(read_timeline(merged), part, selection=Selection(ranks=frozenset({1, 3})))
    timeline = read_timeline(part)
    assert sorted(timeline.headers) == [1, 3]
    assert set(timeline.spans.column("rank").to_pylist()) == {1, 3}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b'"args":{"schema":1', b'"args":{"schema":7', "timeline of schema 7.*update MegaScan"),
        (b'"clock_method"', b'"klock_method"', "damaged megascan_timeline event"),
        (b'"dur":1.001', b'"dur":-1.001', "has a negative duration; write it again"),
        (b'"dur":1.001', b'"dur":1.0.1', r"line \d+ is not a JSON event; write it again"),
        (b"\n]\n", b"\n", "cut off, its last bracket is missing"),
    ],
)
def test_damage(merged: Path, old: bytes, new: bytes, sentence: str) -> None:
    text = merged.read_bytes()
    assert old in text
    merged.write_bytes(text.replace(old, new, 1))
    with pytest.raises(InputError, match=sentence):
        read_timeline(merged)


def test_cut_off_in_its_compression(merged: Path) -> None:
    packed = merged.with_name("t.json.gz")
    packed.write_bytes(gzip.compress(merged.read_bytes())[:-20])
    with pytest.raises(InputError, match="cut off"):
        read_timeline(packed)


def test_rank_files_are_no_timeline(folder: Folder) -> None:
    with pytest.raises(InputError, match="holds rank files, expected a merged timeline"):
        read_timeline(folder.write())
