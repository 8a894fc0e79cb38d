"""Streams that close, places that refuse, input that is no trace: one line, and nothing lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A line of bash in which $MEGASCAN is the command; streams are not buffered."""
    return subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PATH": "/usr/bin:/bin",
            "MEGASCAN": f"{sys.executable} -m megascan",
        },
    )


def test_a_reader_that_leaves_does_not_cost_the_timeline(healthy, tmp_path):
    done = shell(
        f"$MEGASCAN aggregate -b {healthy} -o t.json | true; exit ${{PIPESTATUS[0]}}", tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "t.json").read_text().rstrip().endswith("]")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_one_line(healthy, tmp_path):
    done = shell(f"$MEGASCAN aggregate -b {healthy} -o t.json > /dev/full", tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: standard output cannot be written (No space left on device)")


def test_a_current_folder_that_is_gone_is_one_line(healthy, tmp_path):
    done = shell(f"mkdir gone; cd gone; rmdir ../gone; $MEGASCAN aggregate -b {healthy}", tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_killed_writer_leaves_no_half_file_and_the_next_one_takes_over(healthy, tmp_path):
    (tmp_path / ".t.json.part").write_text("half")
    done = shell(f"$MEGASCAN aggregate -b {healthy} -o t.json", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "1,99"], "rank 99, but the job has 4 ranks, 0 to 3"),
        (["--iterations", "6-5"], "range 6-5"),
        (["--iterations", "1-99999999999"], "at most 1,000,000 numbers"),
        (["--json", "t.json"], "t.json and t.json are to be written, and are the same file"),
        (["-d", "--min-slowdown", "nan"], "min_slowdown is nan"),
    ],
)
def test_requests_that_mean_nothing_are_wrong_usage(megascan, healthy, tmp_path, words, says):
    done = megascan("aggregate", "-b", healthy, "-o", "t.json", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_place_for_findings_even_by_force(megascan, healthy, tmp_path):
    done = megascan("detect", healthy, "--json", tmp_path, "--force")
    assert done.returncode == 1
    assert "is a folder" in done.stderr
    assert done.stdout == ""


def test_a_pipe_is_no_trace(megascan, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = megascan("detect", tmp_path / "pipe")
    assert done.returncode == 1
    assert "neither a file nor a folder" in done.stderr


def test_a_merged_timeline_is_not_merged_again(megascan, healthy, tmp_path):
    timeline = tmp_path / "t.json"
    assert megascan("aggregate", "-b", healthy, "-o", timeline).returncode == 0
    done = megascan("aggregate", "-b", timeline, "-o", tmp_path / "again.json")
    assert done.returncode == 1
    assert "merged already" in done.stderr
    assert "megascan view" in done.stderr


def test_ranks_left_out_are_named_on_stderr(megascan, tmp_path):
    trace = tmp_path / "trace"
    assert megascan("simulate", "--dp", 3, "--missing-rank", 1, "-o", trace).returncode == 0
    done = megascan("aggregate", "-b", trace, "-o", tmp_path / "t.json", "--allow-missing-ranks")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "warning: 1 of 3 ranks have no file, going on without them: 1\n"


@pytest.mark.parametrize("text", ["no trace at all", '{"hello": "world"}', ""])
def test_view_does_not_serve_what_is_no_trace(megascan, tmp_path, text):
    (tmp_path / "notes.json").write_text(text)
    done = megascan("view", tmp_path / "notes.json", "--no-browser")
    assert done.returncode == 1
    assert "notes.json" in done.stderr
    assert done.stdout == ""


def test_an_empty_query_is_wrong_usage(megascan, tmp_path):
    done = megascan("query", tmp_path / "t.json", "")
    assert done.returncode == 2
    assert "query is empty" in done.stderr
