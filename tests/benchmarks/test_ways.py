"""The ways through the code: what is counted, and what a way must not load."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ways import LATER, ROOT, product_files, walk, write_profiles
from megascan.errors import MissingError


def test_reading_profiles_loads_their_reader_and_no_other(tmp_path: Path) -> None:
    write_profiles(tmp_path / "kineto")
    way = walk("reading Kineto", ROOT, tmp_path)
    assert any(file.startswith("megascan/reader/kineto") for file in way.files)
    assert not {"megascan/reader/original.py", "megascan/reader/timeline_files.py"} & set(way.files)
    assert 0 < way.num_called < len(way.files) <= 25
    assert way.num_lines > sum(1 for _ in (ROOT / "megascan" / "reader" / "trace.py").open())


def test_a_way_that_fails_is_no_figure(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="the way reading Kineto cannot be walked"):
        walk("reading Kineto", ROOT, tmp_path)


def test_what_came_later_is_there() -> None:
    """A file that is moved would count among the subjects of before."""
    files = product_files(ROOT)
    assert [one for one in LATER if not any(file.startswith(one) for file in files)] == []
