"""Streams that close, places that refuse, input that is no trace: one line, and nothing lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascan.cli.main import main
from megascan.errors import report_errors

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


@pytest.mark.parametrize("command", [("detect",), ("aggregate", "-b")])
def test_a_folder_of_probes_points_to_the_command_that_compares_them(tmp_path, capsys, command):
    (tmp_path / "scope-probe-0.jsonl").touch()
    assert report_errors(lambda: main([*command, str(tmp_path)])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: no rank files in {tmp_path}; ")
    assert line.endswith(f"; megascan probe {tmp_path} compares its probes")
    (tmp_path / "scope-probe-0.jsonl").unlink()
    assert report_errors(lambda: main([*command, str(tmp_path)])) == 1
    assert "probe" not in capsys.readouterr().err.replace(str(tmp_path), "")


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
    said = "warning: 1 of 3 ranks have no finished window, going on without them: 1\n"
    assert done.stderr == said


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


def copied(folder: Path, room: Path) -> tuple[Path, Path]:
    """A copy of a trace folder, and its first rank file."""
    copy = Path(shutil.copytree(folder, room / "trace"))
    return copy, min(copy.glob("benchmark-data-*.json"))


@pytest.mark.parametrize("command", ["detect", "whatif", "report", "diff"])
def test_a_file_that_cannot_be_read_is_named(command, healthy, tmp_path, capsys):
    """/proc/self/mem is a regular file whose first byte cannot be read."""
    unreadable = "/proc/self/mem"
    more = {"report": ["-o", tmp_path / "r.html"], "diff": [healthy]}.get(command, [])
    assert main([command, unreadable, *map(str, more)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot read {unreadable}: Input/output error")


def test_a_mark_of_the_byte_order_means_nothing(faulty, tmp_path, capsys):
    trace, file = copied(faulty, tmp_path)
    assert main(["detect", str(trace)]) == 0
    plain = capsys.readouterr().out
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert main(["detect", str(trace)]) == 0
    assert capsys.readouterr().out == plain
    assert main(["watch", str(trace), "--once", "--no-state"]) == 3
    said = capsys.readouterr()
    assert said.err == ""
    assert "ranks missing" not in said.out


def test_a_watch_does_not_wait_for_a_pipe(healthy, tmp_path, capsys):
    trace, file = copied(healthy, tmp_path)
    file.unlink()
    os.mkfifo(file)
    code = main(["watch", str(trace), "--once", "--no-state"])
    assert code in (0, 4)  # 4 when the files have been still for long: a rank has not ended
    said = capsys.readouterr()
    assert f"{file}: is a pipe or a device, not a file" in said.err
    assert "1 rank missing" in said.out


def test_a_name_that_is_no_text_is_shown_as_well_as_it_can_be(healthy, tmp_path):
    trace = tmp_path / os.fsdecode(b"tr\xffce")
    shutil.copytree(healthy, trace)
    page, changes = tmp_path / "r.html", tmp_path / "c.json"
    assert main(["report", str(trace), "-o", str(page)]) == 0
    assert "tr?ce" in page.read_text()
    assert main(["diff", str(trace), str(trace), "--json", str(changes)]) == 0
    json.loads(changes.read_text())


def test_a_page_of_transfers_that_took_no_time(simulated, tmp_path):
    """Every span of a rank says 0 µs: the page has no link to draw, and is written."""
    trace, file = copied(simulated("instant", "--dp", "4", "--tp", "2", "--layers", "2"), tmp_path)
    file.write_text(re.sub(r'"dur":[0-9.]+', '"dur":0', file.read_text()))
    assert main(["report", str(trace), "-o", str(tmp_path / "r.html")]) == 0


@pytest.mark.parametrize("command", [["view"], ["query", "select 1"]])
def test_what_is_no_timeline_is_told_apart(command, healthy, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    words = {
        healthy: f"is a folder; merge its rank files first: megascan aggregate -b {healthy}",
        tmp_path / "pipe": "a device or a pipe is no timeline",
        tmp_path / "nothing": "no such file",
    }
    for path, says in words.items():
        assert main([command[0], str(path), *command[1:]]) == 1
        assert f"{path}: {says}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["probe", "scope"])
def test_a_folder_that_is_not_there_is_said_to_be_missing(command, tmp_path, capsys):
    """And not to hold nothing, which has other causes."""
    assert main([command, str(tmp_path / "gone")]) == 1
    assert "gone: No such file or directory; give the" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([command, str(tmp_path / "file")]) == 1
    assert "file: Not a directory; give the" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["probe", "scope", "watch --once --no-state"])
def test_a_folder_that_may_not_be_looked_into_is_said_to_be_one(
    command, tmp_path, monkeypatch, capsys
):
    """And not to hold nothing: a watch would wait for ever."""

    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refused)
    name, *flags = command.split()
    assert main([name, str(tmp_path), *flags]) == 1
    assert f"{tmp_path}: Permission denied; " in capsys.readouterr().err


def test_an_empty_file_answers_no_query(tmp_path, capsys):
    (tmp_path / "t.json").touch()
    assert main(["query", str(tmp_path / "t.json"), "select 1"]) == 1
    assert "t.json is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "--layers", "-4", "-o", "x"], "--layers is -4, expected 1 or more"),
        (["simulate", "--seed", str(1 << 63), "-o", "x"], "expected 0 to 9223372036854775807"),
        (["simulate", "--dp", "3000000", "-o", "x"], "3000000 ranks, expected 1048576 or fewer"),
        (["simulate", "--missing-rank", "0", "-o", "x"], "leaves no rank to be written"),
        (["plan", "{}", "--fbd", "--helper-speed", "inf"], "1 helper(s) of speed inf"),
        (["plan", "{}", "--write", "{file}"], "file is no folder; give another"),
        (["plan", "{}", "--write", "{file}/x"], "file is no folder; give another"),
        (["simulate", "-o", "{file}/x"], "file is no folder; give another"),
    ],
)
def test_numbers_and_names_that_mean_nothing(words, says, healthy, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([word.format(healthy, file=tmp_path / "file") for word in words]) in (1, 2)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", ["detect", "diff {0}", "aggregate -o t.json -b"])
def test_a_terminal_that_cannot_show_a_letter(command, encoding, healthy, tmp_path):
    script = f"PYTHONIOENCODING={encoding} $MEGASCAN {command.format(healthy)} {healthy} > out"
    done = shell(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_without_a_standard_error_does_its_work(healthy, tmp_path):
    done = shell(f"$MEGASCAN detect {healthy} 2>&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("HEALTHY")
    assert shell("$MEGASCAN detect nothing 2>&-", tmp_path).stdout == ""


def test_a_history_that_does_not_fit_on_the_disk_is_not_begun(healthy, tmp_path):
    script = f"export PYTHONDONTWRITEBYTECODE=1; ulimit -f 2; $MEGASCAN history add h.db {healthy}"
    done = shell(script, tmp_path)  # else what is compiled would be cut off, and kept
    assert done.returncode == 1
    assert "error: the history h.db cannot be used" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_an_extension_is_imported_is_ctrl_c(capsys):
    """pandas, interrupted in its first lines, raises "partially initialized module"."""

    def command():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            pass
        raise AttributeError("partially initialized module")

    assert report_errors(command) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
