"""What commands say: notes once, and commands that can be typed as they stand."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from detect.observe.transfers import _named
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


def test_sizes_are_said_in_units(simulated, capsys: Capture) -> None:
    folder = simulated(
        "slow-link", "--pp", "2", "--microbatches", "2", "--fault", "rank=2,kind=link,factor=4"
    )
    said_of_it = said(capsys, "detect", folder)
    assert re.search(r"evidence one \S+ \S+ of [0-9.]+ [MG]B takes ", said_of_it)
    assert not re.search(r"[0-9]{6,} bytes", said_of_it)


def test_sizes_that_would_be_rounded_alike_are_said_to_the_byte() -> None:
    sizes = np.array([33_554_432, 33_554_440, 8, -1, -1])
    assert _named(["p2p message"] * 5, sizes) == (
        "p2p message of 33,554,432 bytes",
        "p2p message of 33,554,440 bytes",
        "p2p message of 8 bytes",
        "p2p message of unknown size",
        "p2p message of unknown size",
    )


def test_a_page_of_two_ranks_counts_nobody(simulated, tmp_path: Path) -> None:
    """ "0 of 1 rank compute within 3 % of their peers" would be true, and no sentence."""
    folder = simulated("pair", "--tp", "1", "--fault", "rank=1,kind=compute,factor=1.5")
    page = tmp_path / "r.html"
    assert main(["report", str(folder), "-o", str(page)]) == 0
    words = page.read_text()
    assert (
        "Rank 1 (DP1) takes 1.50x the time of its peers. 1 other rank has no sound peer." in words
    )
    assert "of 1 rank compute" not in words


def test_a_page_of_one_iteration_has_no_course_of_time(simulated, tmp_path: Path) -> None:
    folder = simulated("one", "--tp", "1", "--iterations", "1", "--window", "1")
    page = tmp_path / "r.html"
    assert main(["report", str(folder), "-o", str(page)]) == 0
    words = page.read_text()
    assert "compared in 1 iteration (" in words
    assert 'id="time"' not in words
    assert 'href="#time"' not in words
