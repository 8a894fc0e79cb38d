"""Formats are found by their content."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet
import pytest

from megascan.errors import InputError
from megascan.export import write_timeline
from megascan.reader import Format, read_timeline, read_trace, sniff

if TYPE_CHECKING:
    from conftest import Folder, Original, Profiles


def test_files_and_folders(
    folder: Folder, original: Original, profiles: Profiles, merged: Path
) -> None:
    assert sniff(folder.path) is Format.RANK_FILES
    assert sniff(folder.file_of(0)) is Format.RANK_FILES
    assert sniff(original.write()) is Format.ORIGINAL
    assert sniff(profiles.write()) is Format.KINETO
    assert sniff(merged) is Format.TIMELINE


def test_compressed(tmp_path: Path, merged: Path) -> None:
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(merged.read_bytes()))
    assert sniff(packed) is Format.TIMELINE


def test_perfetto_protobuf(tmp_path: Path, merged: Path) -> None:
    path = tmp_path / "t.pftrace"
    write_timeline(read_timeline(merged), path)
    assert sniff(path) is Format.PERFETTO
    with pytest.raises(InputError, match="holds perfetto, expected the rank files of a run"):
        read_trace(path)
    assert read_timeline(path).spans.num_rows == read_timeline(merged).spans.num_rows


def test_op_table(tmp_path: Path) -> None:
    path = tmp_path / "ops.parquet"
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id"]
    pyarrow.parquet.write_table(pa.table({name: [1] for name in names}), path)
    assert sniff(path) is Format.OP_TABLE
    pyarrow.parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(InputError, match="a Parquet file without the columns of an op table"):
        sniff(path)


def test_rank_files_come_before_other_json(folder: Folder, profiles: Profiles) -> None:
    folder.write()
    source = profiles.write_rank(0)
    (folder.path / source.name).write_bytes(source.read_bytes())
    assert sniff(folder.path) is Format.RANK_FILES


def test_several_formats_in_one_folder(folder: Folder, original: Original) -> None:
    folder.write_rank(0)
    source = original.write_rank(1, 1, 1)
    (folder.path / source.name).write_bytes(source.read_bytes())
    with pytest.raises(InputError, match=r"several formats \(original, rank_files\)"):
        sniff(folder.path)
