"""Outputs never take the place of what a command reads, whatever --force says."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megascan.cli.main import COMMANDS, main

CLI = Path(__file__).parents[2] / "megascan" / "cli"


@pytest.fixture
def trace(healthy: Path, tmp_path: Path) -> Path:
    """A copy of a trace folder, with a timeline of it inside."""
    folder = tmp_path / "trace"
    shutil.copytree(healthy, folder)
    assert main(["aggregate", "-b", str(folder), "-o", str(folder / "timeline.json")]) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rank_file(folder: Path) -> Path:
    return min(folder.glob("benchmark-data-*.json"))


REQUESTS = {
    "aggregate": ["aggregate", "-b", "{folder}", "-o", "{output}"],
    "and --json": ["aggregate", "-b", "{folder}", "-o", "{room}/t.json", "--json", "{output}"],
    "detect": ["detect", "{folder}", "--json", "{output}"],
    "diff": ["diff", "{folder}", "{folder}", "--json", "{output}"],
    "diff after": ["diff", "{other}", "{folder}", "--json", "{output}"],
    "path": ["path", "{folder}", "--json", "{output}"],
    "whatif": ["whatif", "{folder}", "--json", "{output}"],
    "whatif --ideal": ["whatif", "{folder}", "--ideal", "{output}"],
    "plan": ["plan", "{folder}", "--json", "{output}"],
}  # fmt: skip


def test_every_command_with_force_is_among_the_requests() -> None:
    asked = {words[0] for words in REQUESTS.values()}
    # the first two read no rank files, and no rank file has the name of a page
    elsewhere = {"probe", "simulate", "report"}
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"megascan.cli.{name}").add_arguments(parser)
        if "--force" in parser.format_usage():
            assert name in asked | elsewhere, f"add a request of `megascan {name}` to REQUESTS"


@pytest.mark.parametrize("request_words", REQUESTS.values(), ids=REQUESTS)
def test_a_rank_file_is_not_overwritten_by_force(
    request_words: list[str],
    trace: Path,
    healthy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, output = contents(trace), rank_file(trace)
    places = {"folder": trace, "output": output, "room": tmp_path, "other": healthy}
    words = [word.format(**places) for word in request_words]
    capsys.readouterr()
    assert main([*words, "--force"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{output}: is what this command reads ({output}) and would be lost" in line
    assert contents(trace) == before


def linked(trace: Path, room: Path) -> Path:
    link = room / "link.json"
    link.symlink_to(rank_file(trace))
    return link


def hard_linked(trace: Path, room: Path) -> Path:
    os.link(rank_file(trace), room / "hard.json")
    return room / "hard.json"


def through_another_folder(trace: Path, room: Path) -> Path:
    (room / "door").symlink_to(trace)
    return room / "door" / ".." / "trace" / rank_file(trace).name


def of_an_earlier_run(trace: Path, room: Path) -> Path:
    (trace / "run-a").mkdir()
    return Path(shutil.copy(rank_file(trace), trace / "run-a"))


def named_by_hand(trace: Path, room: Path) -> Path:
    for number, path in enumerate(sorted(trace.glob("benchmark-data-*.json"))):
        path.rename(trace / f"mine-{number}.json")
    return trace / "mine-0.json"


@pytest.mark.parametrize(
    "name", [linked, hard_linked, through_another_folder, of_an_earlier_run, named_by_hand]
)
def test_by_any_other_name_it_is_the_same_file(
    name: Callable[[Path, Path], Path], trace: Path, tmp_path: Path
) -> None:
    output = name(trace, tmp_path)
    before = contents(trace)
    assert main(["detect", str(trace), "--json", str(output), "--force"]) == 1
    assert contents(trace) == before


def test_a_timeline_is_not_overwritten_by_what_is_read_from_it(trace: Path) -> None:
    timeline, before = trace / "timeline.json", contents(trace)
    for words in (["detect", timeline, "--json"], ["whatif", timeline, "--ideal"]):
        assert main([*map(str, words), str(timeline), "--force"]) == 1
    assert contents(trace) == before


def test_what_is_not_read_is_replaced_by_force(trace: Path) -> None:
    timeline = trace / "timeline.json"
    timeline.write_text("old")
    assert main(["aggregate", "-b", str(trace), "-o", str(timeline), "--force"]) == 0
    assert timeline.read_text().startswith("[")


def test_two_outputs_of_one_name_are_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "door").symlink_to(tmp_path)
    words = ["--json", tmp_path / "w.json", "--ideal", tmp_path / "door" / "w.json"]
    assert main(["whatif", str(trace), *map(str, words)]) == 2
    assert "are the same file" in capsys.readouterr().err
    assert not (tmp_path / "w.json").exists()


def test_a_simulated_job_leaves_the_job_before_it_whole(trace: Path) -> None:
    before = contents(trace)
    words = ["simulate", "--dp", "2", "--layers", "2", "--iterations", "3"]
    assert main([*words, "-o", str(trace), "--force"]) == 0
    after = contents(trace)
    assert set(before.values()) <= set(after.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_can_replace_a_file_looks_first(command: str) -> None:
    """A new command with --force must use the shared check; `simulate` sets files aside."""
    source = (CLI / f"{command}.py").read_text()
    if '"--force"' in source and command != "simulate":
        assert "check_outputs(" in source


@pytest.mark.parametrize("request_words", REQUESTS.values(), ids=REQUESTS)
def test_a_pipe_or_a_device_stays_one(
    request_words: list[str],
    healthy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file renamed onto /dev/null would take its place for every program of the machine."""
    output = tmp_path / "pipe.json"
    os.mkfifo(output)
    places = {"folder": healthy, "output": output, "room": tmp_path, "other": healthy}
    words = [word.format(**places) for word in request_words]
    assert main([*words, "--force"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{output}: is a device or a pipe, and a file would take its place" in line
    assert output.is_fifo()
    assert list(tmp_path.iterdir()) == [output]


def test_a_link_is_written_through_and_stays(healthy: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to(Path("runs") / "5.json")
    assert main(["detect", str(healthy), "--json", str(link)]) == 0
    assert link.is_symlink()
    written = tmp_path / "runs" / "5.json"
    assert written.read_text().startswith("{")
    written.write_text("old")
    assert main(["detect", str(healthy), "--json", str(link)]) == 1
    assert written.read_text() == "old"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["5.json"]


@pytest.mark.parametrize(("target", "says"), [("loop.json", "itself"), ("no/x", "does not exist")])
def test_a_link_that_leads_nowhere_is_not_replaced(
    target: str, says: str, healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "loop.json"
    link.symlink_to(target)
    assert main(["detect", str(healthy), "--json", str(link), "--force"]) == 1
    assert says in capsys.readouterr().err
    assert link.readlink() == Path(target)


def test_other_histories_are_read_and_not_changed(healthy: Path, tmp_path: Path) -> None:
    """Nor is a history begun by a request that is refused."""
    empty, new = tmp_path / "empty.db", tmp_path / "new.db"
    empty.touch()
    assert main(["history", "merge", str(new), str(empty)]) == 1
    assert main(["history", "merge", str(new), str(healthy)]) == 1
    assert main(["history", "add", str(new), str(empty)]) == 1
    assert empty.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [empty]
    assert main(["history", "add", str(new), str(healthy)]) == 0
