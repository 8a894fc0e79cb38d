"""Rank files as our tracer writes them: columns, windows, runs."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from megascan.errors import InputError
from megascan.reader import read_trace
from megascan.schema import Kind
from megascan.timeline import TRACE_SCHEMA, equals, numbers

if TYPE_CHECKING:
    from conftest import Folder

pytestmark = pytest.mark.usefixtures("each_way")

ORIGIN_NS = 1_700_000_000_123_456_789


def test_columns_of_one_rank(folder: Folder) -> None:
    trace = read_trace(folder.write_rank(1, windows=1))
    assert trace.spans.schema == TRACE_SCHEMA
    assert trace.spans.to_pylist() == [
        {
            "rank": 1,
            "kind": "compute",
            "name": "forward",
            "track": 1,
            "start_ns": ORIGIN_NS + 1_000_001,
            "duration_ns": 2_003,
            "iteration": 1,
            "microbatch": 0,
            "chunk": 0,
            "layer": -1,
            "phase": "forward",
            "op": "",
            "group": "",
            "sequence": -1,
            "size_bytes": -1,
            "peer": -1,
            "direction": "",
            "cpu_ns": 1_999,
            "end_is_bound": -1,
            "launch_ns": -1,
        },
        {
            "rank": 1,
            "kind": "collective",
            "name": "all_reduce",
            "track": 2,
            "start_ns": ORIGIN_NS + 1_000_101,
            "duration_ns": 1_001,
            "iteration": 1,
            "microbatch": 0,
            "chunk": -1,
            "layer": -1,
            "phase": "",
            "op": "all_reduce",
            "group": "tp@0",
            "sequence": 0,
            "size_bytes": 4096,
            "peer": -1,
            "direction": "",
            "cpu_ns": -1,
            "end_is_bound": -1,
            "launch_ns": -1,
        },
    ]


def test_folder_is_in_order_of_rank_and_start(folder: Folder) -> None:
    trace = read_trace(folder.write(windows=3))
    assert list(trace.headers) == [0, 1, 2, 3]
    assert trace.headers[2] == folder.header(2)
    assert trace.spans.column("rank").to_pylist() == [rank for rank in range(4) for _ in range(6)]
    rank, start = numbers(trace.spans, "rank"), numbers(trace.spans, "start_ns")
    assert np.all((np.diff(rank) > 0) | (np.diff(start) > 0))
    assert trace.completeness.num_spans == 24
    assert trace.completeness.missing_ranks == ()
    assert trace.completeness.notes == ()
    assert [window.first_iteration for window in trace.windows[3]] == [1, 6, 11]


def test_nanoseconds_survive_a_fortnight(folder: Folder) -> None:
    fortnight_ns = 14 * 86_400 * 10**9
    late = [("compute", "late", 1, fortnight_ns + ns, ns, {}) for ns in range(1000)]
    folder.spans_of = lambda iteration, rank=0: iter(late)  # type: ignore[method-assign]
    trace = read_trace(folder.write_rank(0, windows=1))
    assert numbers(trace.spans, "start_ns").tolist() == [
        ORIGIN_NS + fortnight_ns + ns for ns in range(1000)
    ]
    assert numbers(trace.spans, "duration_ns").tolist() == list(range(1000))


def test_spans_behind_the_last_window_are_left_out_and_counted(folder: Folder) -> None:
    folder.write_rank(0)
    path = folder.write_rank(1, unfinished=list(folder.spans_of(50)), close=False)
    for rank in (2, 3):
        folder.write_rank(rank)
    trace = read_trace(folder.path)
    assert trace.completeness.num_spans == 16
    assert trace.completeness.num_unfinished_spans == 2
    assert trace.completeness.notes == (
        f"rank 1: 2 spans behind the last finished window of {path.name} were left out",
    )


def test_ranks_that_stop_early_are_named(folder: Folder) -> None:
    for rank, windows in enumerate((3, 2, 2, 3)):
        folder.write_rank(rank, windows=windows)
    notes = read_trace(folder.path).completeness.notes
    assert notes == ("ranks 1 and 2 end with iteration 7, the others with 12",)


def test_resumed_run_in_the_same_files(folder: Folder) -> None:
    folder.write(windows=3)
    folder.write(run_id="run-b", origin_ns=ORIGIN_NS + 10**12, windows=1)
    newest, older = read_trace(folder.path), read_trace(folder.path, run="run-a")
    assert (newest.run_id, newest.spans.num_rows) == ("run-b", 8)
    assert (older.run_id, older.spans.num_rows) == ("run-a", 24)
    assert newest.completeness.notes == (
        f"run run-b was read; {folder.path} also holds run-a (--run chooses)",
    )
    assert numbers(newest.spans, "start_ns").min() == ORIGIN_NS + 10**12 + 1_000_000


def test_header_repeated_by_the_same_run_continues_it_with_its_own_clock(folder: Folder) -> None:
    folder.write_rank(0, windows=1)
    path = folder.write_rank(0, windows=1, origin_ns=ORIGIN_NS + 10**12)
    starts = numbers(read_trace(path).spans, "start_ns")
    assert starts.max() - starts.min() == 10**12 + 100


def test_run_set_aside_in_a_subfolder_is_found_by_its_id(folder: Folder) -> None:
    folder.write(run_id="old")
    (folder.path / "old").mkdir()
    for path in folder.path.glob("*.json"):
        path.rename(folder.path / "old" / path.name)
    folder.write(run_id="new")
    assert read_trace(folder.path).run_id == "new"
    assert read_trace(folder.path, run="old").run_id == "old"


def test_unknown_run_is_refused_with_the_known_ones(folder: Folder) -> None:
    folder.write()
    with pytest.raises(InputError, match="holds no run x; it holds run-a: pass one with --run"):
        read_trace(folder.path, run="x")


def test_gzip_members_one_after_the_other(folder: Folder) -> None:
    plain = folder.write_rank(0, windows=3)
    expected = read_trace(plain).spans
    text = plain.read_bytes()
    packed = plain.with_name(plain.name + ".gz")
    third = len(text) // 3
    parts = (text[:third], text[third : 2 * third], text[2 * third :])
    packed.write_bytes(b"".join(gzip.compress(part) for part in parts))
    assert read_trace(packed).spans.to_pylist() == expected.to_pylist()


def test_gzip_cut_off_keeps_finished_windows(folder: Folder) -> None:
    plain = folder.write_rank(0, windows=40)
    packed = plain.with_name(plain.name + ".gz")
    whole = gzip.compress(plain.read_bytes())
    packed.write_bytes(whole[: len(whole) * 2 // 3])
    trace = read_trace(packed)
    assert 0 < len(trace.windows[0]) < 40
    assert trace.spans.num_rows == 2 * len(trace.windows[0])
    assert any("is cut off inside its compressed data" in note for note in trace.completeness.notes)


def test_gzip_with_damage_is_refused(folder: Folder) -> None:
    plain = folder.write_rank(0, windows=40)
    packed = plain.with_name(plain.name + ".gz")
    whole = bytearray(gzip.compress(plain.read_bytes()))
    whole[-6] ^= 1  # its checksum
    packed.write_bytes(whole)
    with pytest.raises(InputError, match="compressed data is damaged"):
        read_trace(packed)


def test_other_layouts_of_the_same_json(folder: Folder) -> None:
    path = folder.write_rank(0)
    expected = read_trace(path).spans
    events = json.loads(path.read_text())
    for text in (
        path.read_text().replace("\n", "\r\n"),
        "[" + ",\n  ".join(json.dumps(event) for event in events) + "]",
        json.dumps(events),
    ):
        path.write_bytes(text.encode())
        assert read_trace(path).spans.equals(expected)


def test_other_events_are_passed_over(folder: Folder) -> None:
    path = folder.write_rank(0, windows=1, close=False)
    with path.open("a") as file:
        file.write(',\n{"name":"power","ph":"C","ts":1,"pid":0,"args":{"watts":3.5}}\n]\n')
    assert read_trace(path).spans.num_rows == 2


def test_stray_files_are_passed_over(folder: Folder) -> None:
    folder.write()
    (folder.path / "ground-truth.json").write_text('{"rank": 3}')
    (folder.path / "timeline.json").write_text("[1, 2]")
    (folder.path / "notes.txt").write_text("hello")
    assert read_trace(folder.path).completeness.num_spans == 16


def test_names_outside_ascii(folder: Folder) -> None:
    spans = [("compute", "Vorwärts→😀", 1, 0, 10, {})]
    folder.spans_of = lambda iteration, rank=0: iter(spans)  # type: ignore[method-assign]
    trace = read_trace(folder.write_rank(0, windows=1))
    assert trace.spans.column("name").to_pylist() == ["Vorwärts→😀"]


def test_a_file_of_many_blocks_reads_as_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.write_rank(0, windows=30)
    expected = read_trace(path)
    monkeypatch.setattr("megascan.reader.lines.BLOCK_BYTES", 97)
    trace = read_trace(path)
    assert trace.spans.to_pylist() == expected.spans.to_pylist()
    assert trace.windows == expected.windows


def test_saves_between_windows_make_no_iterations(folder: Folder) -> None:
    """Iterations 1, 2 and 6, 7 are traced; saves behind 3 to 5 come with the second window."""
    path = folder.write_rank(0, saves=[1, 2, 3, 4, 5, 6])
    spans = read_trace(path, allow_missing_ranks=True).spans
    is_save = equals(spans, "kind", Kind.CHECKPOINT)
    iteration = numbers(spans, "iteration")
    assert sorted(iteration[is_save].tolist()) == [-1, -1, -1, 1, 2, 6]
    assert set(iteration[~is_save].tolist()) == {1, 6}
