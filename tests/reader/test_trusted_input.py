"""What used to be taken on trust: folders, mixtures, and ranks without a finished window."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megascan.cli.output import check_folder
from megascan.errors import InputError
from megascan.reader import read_trace, sniff

if TYPE_CHECKING:
    from conftest import Folder, Original, Profiles


@contextmanager
def as_somebody_without_permission() -> Iterator[None]:
    """Root may look everywhere; another user may not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("mode", [0o000, 0o600], ids=["not listed", "not entered"])
def test_a_folder_without_permission_is_said_to_be_one(
    folder: Folder, tmp_path: Path, mode: int
) -> None:
    folder.write()
    for parent in (*reversed(tmp_path.parents), tmp_path):
        if parent.stat().st_uid == os.getuid() and parent.is_relative_to(tmp_path.parents[2]):
            parent.chmod(0o755)
    os.chown(folder.path, 65534 if os.geteuid() == 0 else -1, -1)
    folder.path.chmod(mode)
    try:
        with as_somebody_without_permission(), pytest.raises(InputError) as caught:
            sniff(folder.path)
        with as_somebody_without_permission(), pytest.raises(InputError, match="Permission denied"):
            check_folder(folder.path, "give another")
    finally:
        folder.path.chmod(0o755)
    assert "Permission denied" in str(caught.value)
    assert "check the permissions" in str(caught.value)


def test_a_rank_without_a_finished_window_is_missing(folder: Folder) -> None:
    folder.write()
    file = folder.file_of(1)
    lines = file.read_text().splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if "megascan_window" in line)
    file.write_text("".join(lines[:end]))
    with pytest.raises(InputError, match=r"rank 1 has no finished window; .*--allow-missing-ranks"):
        read_trace(folder.path)
    trace = read_trace(folder.path, allow_missing_ranks=True)
    assert trace.completeness.missing_ranks == (1,)
    assert any("rank 1 has no finished window" in note for note in trace.completeness.notes)


def test_profiles_beside_rank_files_are_named_where_ranks_are_missing(
    folder: Folder, profiles: Profiles
) -> None:
    folder.write_rank(0)
    source = profiles.write_rank(1)
    (folder.path / source.name).write_bytes(source.read_bytes())
    with pytest.raises(InputError, match="PyTorch profiles in the same folder were not read") as it:
        read_trace(folder.path)
    assert source.name in str(it.value)


def test_a_note_of_all_ranks_is_said_once(original: Original) -> None:
    folder = original.write()
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().rstrip().removesuffix("]"))
    notes = read_trace(folder).completeness.notes
    cut = [note for note in notes if "is cut off" in note]
    assert len(cut) == len(set(cut))
