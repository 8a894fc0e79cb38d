"""What commands say: notes once, and commands that can be typed as they stand."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from megascan.cli.main import main

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return " ".join(capsys.readouterr().out.split())


def spot_of(text: str) -> str:
    """The first command that shows a spot."""
    command = text.split("look at the spot: ")[1]
    return command[: command.index(" --at ")]


def test_a_note_is_printed_once_with_detection_too(
    healthy: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "trace"
    shutil.copytree(healthy, folder)
    min(folder.glob("benchmark-data-*.json")).unlink()
    words = ["aggregate", "-b", folder, "-o", tmp_path / "t.json", "--allow-missing-ranks", "-d"]
    assert said(capsys, *words).count("rank 0 is missing") == 1


def test_a_folder_is_merged_before_it_is_looked_at(faulty: Path, capsys: Capture) -> None:
    command = spot_of(said(capsys, "detect", faulty))
    merge, look = command.split(" && ")
    assert shlex.split(merge)[:4] == ["megascan", "aggregate", "-b", str(faulty)]
    assert look == "megascan view timeline.json.gz"


def test_a_timeline_is_named_and_quoted(faulty: Path, tmp_path: Path, capsys: Capture) -> None:
    timeline = tmp_path / "my timeline.json"
    printed = said(capsys, "aggregate", "-b", faulty, "-o", timeline, "-d")
    wanted = ["megascan", "view", str(timeline)]
    assert shlex.split(spot_of(printed)) == wanted
    assert shlex.split(printed.split("look at it: ")[1]) == wanted
    assert shlex.split(spot_of(said(capsys, "detect", timeline))) == wanted


def test_a_spot_that_is_not_written_is_not_shown(
    faulty: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ["aggregate", "-b", faulty, "-o", tmp_path / "t.json", "-d", "--ranks", "0,1"]
    assert "look at the spot" not in said(capsys, *words)
