"""What is missing, damaged or foreign: one clear sentence each, never another exception."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megascan.errors import InputError
from megascan.reader import read_trace
from megascan.reader.lines import read_blocks
from megascan.topology import Layout

if TYPE_CHECKING:
    from conftest import Folder

pytestmark = pytest.mark.usefixtures("each_way")

ORIGINS_NS = (1_700_000_000_000_000_000, 1_700_000_001_000_000_000)
"""Clock origins of an older and a newer run."""


def refused(path: Path, sentence: str, **arguments: object) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        read_trace(path, **arguments)  # type: ignore[arg-type]


def test_no_such_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such file or folder")


def test_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, f"no rank files in {tmp_path}; expected rank files of MegaScan")


def test_rank_files_one_folder_deeper(folder: Folder) -> None:
    folder.write()
    refused(folder.path.parent, "there are some in its subfolder out")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").touch()
    refused(tmp_path / "x.json", "is empty")


@pytest.mark.parametrize(
    ("content", "looks_like"),
    [
        (b'[{"name":"a","ph":"X","ts":1,"dur":1}]', "a Chrome trace of another tool"),
        (b'{"a": 1}', "JSON that is no trace"),
        (b"hello", "text"),
        (b"\x00\x01\x02\x03", "a binary file"),
        ("a – b".encode(), "text"),
        ("a – b".encode()[:4], "text"),
        (b"a \xff b", "a binary file"),
    ],
)
def test_foreign_file(tmp_path: Path, content: bytes, looks_like: str) -> None:
    path = tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json"
    path.write_bytes(content)
    refused(path, f"{path} looks like {looks_like}; expected rank files of MegaScan")
    refused(tmp_path, f"{path} looks like {looks_like}; expected rank files of MegaScan")


def test_missing_ranks_are_named(tmp_path: Path, folder: Folder) -> None:
    folder.layout = Layout(tp=2, dp=8)
    for rank in range(16):
        if rank not in (3, 11):
            folder.write_rank(rank)
    refused(
        folder.path,
        f"expected 16 rank files for world size 16, found 14 in {folder.path}: ranks 3 and 11 are "
        "missing; pass --allow-missing-ranks to go on without them",
    )
    trace = read_trace(folder.path, allow_missing_ranks=True)
    assert trace.completeness.missing_ranks == (3, 11)
    assert trace.completeness.notes == ("ranks 3 and 11 are missing",)
    assert len(trace.headers) == 14


def test_single_file_stands_for_its_rank(folder: Folder) -> None:
    trace = read_trace(folder.write_rank(2))
    assert trace.completeness.ranks == (2,)
    assert trace.completeness.missing_ranks == (0, 1, 3)


def test_mixed_runs_say_so(folder: Folder) -> None:
    for rank in range(4):
        folder.write_rank(rank, run_id="new" if rank < 3 else "old", origin_ns=10 - rank)
    refused(
        folder.path,
        f"found 3 of run new in {folder.path}: rank 3 is missing; several runs are mixed, choose "
        "another with --run (old) or pass --allow-missing-ranks",
    )


def test_two_files_of_one_rank(folder: Folder) -> None:
    folder.write()
    path = folder.file_of(1)
    copy = path.with_name("benchmark-data-9-pipeline-0-tensor-0.json")
    copy.write_bytes(path.read_bytes())
    refused(folder.path, f"{path} and {copy.name} both hold rank 1 of run run-a; move one")


def test_files_of_different_jobs(folder: Folder) -> None:
    folder.write_rank(0)
    folder.layout = Layout(tp=2, dp=4)
    folder.write_rank(5)
    refused(folder.path, "files of different jobs are mixed")


def replaced(path: Path, old: bytes, new: bytes, count: int = 1) -> Path:
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, count))
    return path


def test_world_size_that_contradicts_the_layout(folder: Folder) -> None:
    path = replaced(folder.write_rank(0), b'"world_size":4', b'"world_size":8')
    refused(path, "header says world size 8, but its layout has 4 ranks")


def test_rank_outside_of_the_world(folder: Folder) -> None:
    path = folder.write_rank(0)
    replaced(path, b'"rank":0,"world_size"', b'"rank":9,"world_size"')
    replaced(path, b'"pid":0', b'"pid":9', -1)
    refused(path, "header says rank 9 in a world of 4 ranks")


def test_newer_schema(folder: Folder) -> None:
    path = replaced(folder.write_rank(0), b'"schema":1', b'"schema":2')
    refused(path, "line 2: rank file of schema 2, this MegaScan reads up to 1; update MegaScan")


def test_damaged_header(folder: Folder) -> None:
    path = replaced(folder.write_rank(0), b'"coordinates"', b'"koordinates"')
    refused(path, "line 2: damaged header")


def test_no_finished_window(folder: Folder) -> None:
    folder.write(windows=0, unfinished=list(folder.spans_of(1)))
    refused(folder.path, "run run-a has no finished window")


def test_files_without_a_header(folder: Folder) -> None:
    folder.path.mkdir()
    for rank in range(2):
        folder.file_of(rank).touch()
    refused(folder.path, "none of 2 rank files has a complete header")


def test_killed_before_its_header_counts_as_missing(folder: Folder) -> None:
    folder.write()
    folder.file_of(2).write_bytes(b"")
    refused(folder.path, "found 3 in")
    folder.file_of(2).write_bytes(b'[\n{"name":"megascan","ph":"M","pid":2,"ti')
    refused(folder.path, "rank 2 is missing")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'{"name":"all_reduce"', b'x"name":"all_reduce"', "is not a JSON event"),
        (b'"name":"all_reduce"', b'"name":"all_\0reduce"', "is not a JSON event"),
        (b'"name":"all_reduce"', b'"name":"all_\xffeduce"', "is not a JSON event"),
        (b'"dur":1.001', b'"dur":NaN', "has no usable ts and dur"),
        (b'"dur":1.001', b'"dur":-1.001', "has a negative duration"),
        (b'"dur":1.001', b'"dux":1.001', "has no usable ts and dur"),
        (b'"dur":1.001', b'"dur":null', "has no usable ts and dur"),
        (b'"dur":1.001', b'"dur":1e300', "has no usable ts and dur"),
        (b'"dur":1.001', b'"dur":"1"', "has a value of the wrong type or size"),
        (b'"size_bytes":4096', b'"size_bytes":40.96', "has a value of the wrong type or size"),
        (b'"sequence":0', b'"sequence":99999999999999999999', "wrong type or size"),
        (b'"cat":"collective"', b'"cat":"kollective"', "is of an unknown kind"),
        (b'"name":"all_reduce"', b'"nome":"all_reduce"', "has no name"),
        (b'"dur":1.001,"pid":0', b'"dur":1.001,"pid":1', "another rank than the file's rank 0"),
    ],
)
def test_damaged_span_in_a_finished_window(
    folder: Folder, old: bytes, new: bytes, reason: str
) -> None:
    path = replaced(folder.write_rank(0), old, new)
    with pytest.raises(InputError, match=rf"line 8 .*{re.escape(reason)}.*the file is damaged"):
        read_trace(path)


@pytest.mark.parametrize("rubbish", [b"null", b"nullnull", b"1", b"{}null", b"[[1]]", b'"x"'])
@pytest.mark.parametrize("line", [1, 2, 7])
def test_json_that_is_no_event(folder: Folder, rubbish: bytes, line: int) -> None:
    """The columnar parser crashes on a leading `null`, so it must not get to see one."""
    path = folder.write_rank(0)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:line], rubbish + b",", *lines[line:]]))
    refused(path, f"line {line + 1} is not a JSON event")


def test_the_same_damage_behind_the_last_window_is_noted(folder: Folder) -> None:
    path = folder.write_rank(0, unfinished=list(folder.spans_of(9)), close=False)
    text = path.read_bytes()
    at = text.rindex(b'"dur":1.001')
    path.write_bytes(text[:at] + b"\xff\0" + text[at + 2 :])
    trace = read_trace(path)
    assert trace.spans.num_rows == 4
    assert "1 spans and 1 torn or damaged lines behind" in trace.completeness.notes[1]


def test_lost_and_doubled_lines_do_not_pass(folder: Folder) -> None:
    path = folder.write_rank(0)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:8] + lines[9:]))
    refused(path, "window 0 says it holds 2 spans, found 1")
    path.write_bytes(b"\n".join(lines[:8] + lines[7:]))
    refused(path, "window 0 says it holds 2 spans, found 3")


def test_window_of_another_run(folder: Folder) -> None:
    path = replaced(
        folder.write_rank(0), b'"args":{"run_id":"run-a","window"', b'"args":{"run_id":"b","window"'
    )
    refused(path, "a window of run b without that run's header before it")


def test_window_mark_without_its_fields(folder: Folder) -> None:
    path = replaced(folder.write_rank(0), b'"first_iteration"', b'"fist_iteration"')
    refused(path, "damaged window mark")


def test_unreadable_permissions(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder.write_rank(0)

    def deny(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", deny)
    refused(path, f"cannot read {path}: Permission denied; check its path and permissions")


def test_a_folder_where_a_file_is_expected(folder: Folder) -> None:
    folder.write()
    folder.file_of(0).unlink()
    folder.file_of(0).mkdir()
    refused(folder.path, "rank 0 is missing")


def test_blocks_beyond_the_reach_of_32_bits_take_the_general_way(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 2 GB and more makes a block whose places do not fit 32 bits; here 100 bytes do."""
    expected = read_trace(folder.write()).spans.to_pylist()
    monkeypatch.setattr("megascan.reader.templates._MOST_BYTES", 100)
    assert read_trace(folder.path).spans.to_pylist() == expected


def test_memory_does_not_grow_with_the_file(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of any size is read in blocks: none is larger than asked for plus a line."""
    path = folder.write_rank(0, windows=40)
    longest = max(map(len, path.read_bytes().split(b"\n")))
    monkeypatch.setattr("megascan.reader.lines.BLOCK_BYTES", 500)
    sizes = [len(block.text) for block in read_blocks(path)]
    assert len(sizes) > 20
    assert max(sizes) <= 500 + longest
    assert read_trace(path).spans.num_rows == 80


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder: Folder) -> None:
    path = folder.write_rank(0)
    path.chmod(0)
    refused(path, f"cannot read {path}: Permission denied; check its path and permissions")


def test_two_runs_mixed_file_by_file(folder: Folder) -> None:
    """Files of two runs in one folder: the newest is read, the ranks it lacks are named."""
    for rank in range(4):
        newer = rank < 2
        folder.write_rank(rank, run_id="new" if newer else "old", origin_ns=ORIGINS_NS[newer])
    refused(folder.path, "ranks 2 and 3 are missing")
    trace = read_trace(folder.path, allow_missing_ranks=True)
    assert trace.run_id == "new"
    assert "also holds old (--run chooses)" in " ".join(trace.completeness.notes)


def test_ranks_of_different_schema_versions(folder: Folder) -> None:
    folder.write()
    replaced(folder.file_of(2), b'"schema":1', b'"schema":9')
    refused(folder.path, "rank file of schema 9, this MegaScan reads up to 1; update MegaScan")
