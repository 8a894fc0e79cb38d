"""All or nothing on the disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from megascan.errors import OutputError, UsageError
from megascan.export import check_output, write_timeline
from megascan.export.destination import Encoding, Format, format_of, replacing


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.json", Format(Encoding.CHROME, False)),
        ("a.b.JSON.gz", Format(Encoding.CHROME, True)),
        ("a.pftrace", Format(Encoding.PERFETTO, False)),
        ("a.pftrace.gz", Format(Encoding.PERFETTO, True)),
    ],
)
def test_suffix_decides(tmp_path, name, expected):
    assert format_of(tmp_path / name) == expected


@pytest.mark.parametrize("name", ["a.txt", "a.gz", "json", "a.json.xz"])
def test_other_suffixes_are_refused(tmp_path, make_timeline, name):
    with pytest.raises(UsageError, match=r"must be one of \.json, \.json\.gz, \.pftrace"):
        write_timeline(make_timeline(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_existing_file_needs_force(tmp_path, make_timeline):
    path = tmp_path / "t.json"
    path.write_text("mine")
    with pytest.raises(OutputError, match="--force"):
        write_timeline(make_timeline(), path)
    with pytest.raises(OutputError, match="--force"):
        check_output(path)
    assert path.read_text() == "mine"
    assert write_timeline(make_timeline(), path, force=True) > 0
    assert path.read_bytes().startswith(b"[\n")
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_is_told_before_the_work(tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        check_output(tmp_path / "nowhere" / "t.json")


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "t.json").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        check_output(tmp_path / "t.json", force=True)


def test_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OutputError, match="No space left"), replacing(path, force=True) as file:
        file.write(b"half")
        raise full
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_other_errors_leave_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "t.json", force=False) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_half_file_and_the_next_one_cleans_up(tmp_path):
    path = tmp_path / "t.json"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from megascan.export.destination import replacing\n"
        "with replacing(Path(sys.argv[1]), force=False) as file:\n"
        "    file.write(b'half'); file.flush(); print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        writer.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while writer.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
    with replacing(path, force=False) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
