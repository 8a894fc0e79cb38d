"""All or nothing on the disk."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from megascan import overwriting
from megascan.errors import OutputError, UsageError
from megascan.export import leftovers, write_timeline
from megascan.export.writing import Encoding, FileFormat, format_of
from megascan.overwriting import GrowingFile, check_free, replacing


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.json", FileFormat(Encoding.CHROME, False)),
        ("a.b.JSON.gz", FileFormat(Encoding.CHROME, True)),
        ("a.pftrace", FileFormat(Encoding.PERFETTO, False)),
        ("a.pftrace.gz", FileFormat(Encoding.PERFETTO, True)),
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
        check_free(path, force=False)
    assert path.read_text() == "mine"
    assert write_timeline(make_timeline(), path, force=True) > 0
    assert path.read_bytes().startswith(b"[\n")
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_is_told_before_the_work(tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        check_free(tmp_path / "nowhere" / "t.json", force=False)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "t.json").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        check_free(tmp_path / "t.json", force=True)


def test_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OutputError, match="No space left"), replacing(path, force=True) as file:
        file.write(b"half")
        raise full
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    """The second takes over the name of what is not complete; the first says so."""
    path = tmp_path / "t.json"
    first, second = replacing(path, force=False), replacing(path, force=False)
    file = first.__enter__()
    file.write(b"half of the")
    with second as other:
        other.write(b"whole")
    with pytest.raises(OutputError, match="another process is writing it"):
        first.__exit__(None, None, None)
    assert path.read_bytes() == b"whole"
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]


def test_what_killed_writers_left_of_other_timelines_is_named(tmp_path):
    for name in (".old.json.part", ".old.pftrace.gz.part", ".t.json.part", ".notes.part", "a.json"):
        (tmp_path / name).write_bytes(b"")
    found = [each.name for each in leftovers(tmp_path / "t.json")]
    assert found == [".old.json.part", ".old.pftrace.gz.part"]


def test_other_errors_leave_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "t.json", force=False) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_half_file_and_the_next_one_cleans_up(tmp_path):
    path = tmp_path / "t.json"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from megascan.overwriting import replacing\n"
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


_WRITES_AND_DIES = """
import os, pickle, signal, sys
from pathlib import Path
import megascan.export.writing as writing

written = writing._written

def dying(*arguments):
    for number, item in enumerate(written(*arguments)):
        yield item
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

writing._written = dying
timeline = pickle.loads(Path(sys.argv[1]).read_bytes())
writing.write_timeline(timeline, Path(sys.argv[2]), force=True)
"""


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace"])
def test_kill_9_during_the_write_of_a_timeline(tmp_path, make_timeline, suffix):
    """The old file stays whole; what the killed process left is taken away by the next one."""
    path, source = tmp_path / f"t{suffix}", tmp_path / "timeline.pickle"
    timeline = make_timeline()
    write_timeline(timeline, path)
    before = path.read_bytes()
    source.write_bytes(pickle.dumps(timeline))
    killed = subprocess.run(
        [sys.executable, "-c", _WRITES_AND_DIES, str(source), str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3
    write_timeline(timeline, path, force=True)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted([path, source])


@pytest.mark.parametrize("suffix", [".json.gz", ".pftrace"])
def test_a_limit_on_the_size_of_files_leaves_no_half_file(tmp_path, make_timeline, suffix):
    """What a full disk does, by the system itself: writing beyond the limit fails."""
    path, source = tmp_path / f"t{suffix}", tmp_path / "timeline.pickle"
    source.write_bytes(pickle.dumps(make_timeline()))
    script = (
        "import pickle, resource, signal, sys; from pathlib import Path\n"
        "from megascan.errors import OutputError\n"
        "from megascan.export import write_timeline\n"
        "timeline = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: write_timeline(timeline, Path(sys.argv[2]))\n"
        "except OutputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "cannot be written (File too large)" in done.stdout
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_written_goes_to_the_disk_piece_by_piece(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(overwriting, "_BYTES_BEHIND", 100)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *what: asked.append(what), raising=False)
    with replacing(tmp_path / "a.json", force=False) as file:
        growing = GrowingFile(file)
        for piece in (b"a" * 60, b"b" * 60, memoryview(b"c" * 300), b"d"):
            growing.write(piece)
    advice = os.POSIX_FADV_DONTNEED
    assert asked == [(0, 120, advice), (120, 300, advice)]
    assert (tmp_path / "a.json").read_bytes() == b"a" * 60 + b"b" * 60 + b"c" * 300 + b"d"


def test_rooms_are_filled_in_any_order(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *what: asked.append(what[:2]), raising=False)
    pieces = {letter: tmp_path / letter for letter in "bd"}
    for letter, piece in pieces.items():
        piece.write_bytes(letter.encode() * 1000)
    with replacing(tmp_path / "a.json", force=False) as file:
        growing = GrowingFile(file)
        growing.write(b"a")
        rooms = {"b": growing.room(1000)}
        growing.write(b"c" * 10)
        rooms["d"] = growing.room(1000)
        for letter in "db":
            with pieces[letter].open("rb") as content:
                rooms[letter].fill(content)
    whole = b"a" + b"b" * 1000 + b"c" * 10 + b"d" * 1000
    assert (tmp_path / "a.json").read_bytes() == whole
    assert asked == [(1011, 1000), (1, 1000)]


@pytest.mark.parametrize("is_renamed", [False, True])
def test_nobody_fills_the_file_of_another_process(tmp_path, is_renamed):
    path, piece = tmp_path / "t.json", tmp_path / "piece"
    piece.write_bytes(b"bytes")
    first = replacing(path, force=False)
    growing = GrowingFile(first.__enter__())
    room = growing.room(5)
    second = replacing(path, force=False)
    second.__enter__().write(b"of another")
    if is_renamed:
        second.__exit__(None, None, None)
    with piece.open("rb") as content:
        room.fill(content)
    if not is_renamed:
        second.__exit__(None, None, None)
    with pytest.raises(OutputError, match="another process is writing it"):
        first.__exit__(None, None, None)
    assert path.read_bytes() == b"of another"
