"""One growing rank file: every window once, whatever happens to the file."""

from __future__ import annotations

import errno
import gzip
import os
import random

import pytest

from megascan.reader.growing import GrowingFile, Wanted, polled
from megascan.reader.rank_files import read_rank_file

ALL = Wanted(1000)


def everything(file: GrowingFile) -> list[int]:
    """Last iterations of all windows that the file hands out now."""
    found = file.poll()
    while file.has_more:
        found += file.poll()
    return [segment.windows[0].last_iteration for segment in found]


def all_of(feed, rank: int = 0) -> list[int]:
    return [2 * (window + 1) for window in range(len(feed.appends[feed.names[rank]]))]


@pytest.mark.parametrize("compress", [False, True])
def test_windows_are_those_that_the_reader_reads(healthy, grow, compress):
    feed = grow(healthy, compress=compress)
    file = GrowingFile(feed.path(0), ALL)
    segments = []
    for _ in range(feed.num_windows):
        feed.step(ranks=[0])
        segments += file.poll()
        while file.has_more:
            segments += file.poll()
    feed.close()
    assert file.poll() == []
    assert file.is_closed
    (whole,) = read_rank_file(feed.path(0))
    assert tuple(one.windows[0] for one in segments) == whole.windows
    rows = [row for one in segments for row in one.spans.to_pylist()]
    assert rows == whole.spans.to_pylist()


@pytest.mark.parametrize("compress", [False, True])
def test_any_cut_of_the_file_is_followed(healthy, grow, compress):
    feed = grow(healthy, compress=compress)
    feed.step(6, ranks=[0])
    content = feed.path(0).read_bytes()
    feed.path(0).write_bytes(b"")
    file, found, draw, done = GrowingFile(feed.path(0), ALL), [], random.Random(3), 0
    while done < len(content):
        count = draw.randrange(1, len(content) // 7)
        with feed.path(0).open("ab") as growing:
            growing.write(content[done : done + count])
        done += count
        found += everything(file)
    assert found == all_of(feed)[:6]


@pytest.mark.parametrize("compress", [False, True])
def test_the_first_look_begins_at_the_last_windows(healthy, grow, compress):
    feed = grow(healthy, compress=compress)
    feed.step(20, ranks=[0])
    assert everything(GrowingFile(feed.path(0), Wanted(3))) == [36, 38, 40]


def test_what_was_judged_before_a_restart_is_not_handed_out_again(healthy, grow):
    feed = grow(healthy)
    feed.step(20, ranks=[0])
    run = GrowingFile(feed.path(0), Wanted(1)).poll()[0].header.run_id
    assert everything(GrowingFile(feed.path(0), Wanted(100, run, 32))) == [34, 36, 38, 40]
    assert len(everything(GrowingFile(feed.path(0), Wanted(100, "another", 32)))) == 20


def test_a_file_that_is_replaced_by_its_successor_hands_out_only_what_is_new(healthy, grow):
    feed = grow(healthy)
    feed.step(10, ranks=[0])
    file = GrowingFile(feed.path(0), ALL)
    assert everything(file) == all_of(feed)[:10]
    appends = feed.appends[feed.names[0]]
    header = b"\n".join(appends[0].split(b"\n")[:2]).rstrip(b",")
    successor = feed.target / "successor"
    successor.write_bytes(header + b"".join(appends[8:12]))
    successor.replace(feed.path(0))
    assert everything(file) == [22, 24]


def test_a_truncated_file_is_read_anew(healthy, grow):
    feed = grow(healthy)
    feed.step(4, ranks=[0])
    file = GrowingFile(feed.path(0), ALL)
    everything(file)
    os.truncate(feed.path(0), 1000)
    assert everything(file) == []
    feed.path(0).write_bytes(b"".join(feed.appends[feed.names[0]][:6]))
    assert everything(file) == [10, 12]


def test_a_file_rewritten_in_place_is_noticed_by_the_bytes_before(healthy, grow):
    feed = grow(healthy)
    feed.step(4, ranks=[0])
    file = GrowingFile(feed.path(0), ALL)
    everything(file)
    longer = feed.path(0).read_bytes().replace(b'"tid":', b'"tid": ')
    with feed.path(0).open("r+b") as same:
        same.write(longer + feed.appends[feed.names[0]][4])
    assert everything(file) == [10]


def test_a_deleted_file_that_comes_back_is_followed(healthy, grow):
    feed = grow(healthy)
    feed.step(3, ranks=[0])
    file = GrowingFile(feed.path(0), ALL)
    everything(file)
    content = feed.path(0).read_bytes()
    feed.path(0).unlink()
    assert (file.poll(), file.is_there) == ([], False)
    feed.path(0).write_bytes(content + feed.appends[feed.names[0]][3])
    assert everything(file) == [8]


def test_a_run_that_is_resumed_takes_the_bracket_away_and_goes_on(healthy, grow):
    feed = grow(healthy)
    feed.step(2, ranks=[0])
    with feed.path(0).open("ab") as file:
        file.write(b"\n]\n")
    growing = GrowingFile(feed.path(0), ALL)
    assert everything(growing) == [2, 4]
    assert growing.is_closed
    os.truncate(feed.path(0), feed.path(0).stat().st_size - 3)
    feed.step(1, ranks=[0])
    assert everything(growing) == [6]
    assert not growing.is_closed


def test_damage_costs_what_it_damaged_and_is_said_once(healthy, grow):
    feed = grow(healthy)
    feed.step(2, ranks=[0])
    file = GrowingFile(feed.path(0), ALL)
    everything(file)
    with feed.path(0).open("ab") as growing:
        growing.write(feed.appends[feed.names[0]][2].replace(b'"ph":"X"', b'"ph" "X"', 1))
    assert everything(file) == []
    assert "left out" in file.problem
    assert "is not a JSON event" in file.problem
    feed.written[feed.names[0]] = 3
    feed.step(1, ranks=[0])
    assert everything(file) == [8]


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b'"ph":"X"', b'"ph" "X"'), (b'"num_spans":', b'"num_spans":9'),
     (b'"dur":', b'"dur":-'), (b'"pid":2', b'"pid":3')],
)  # fmt: skip
def test_files_read_together_hand_out_what_each_would_by_itself(healthy, grow, before, after):
    """Three ranks, the third perhaps damaged in its second window."""
    feed = grow(healthy)
    appends = feed.appends[feed.names[2]]
    appends[1] = appends[1].replace(before, after, 1)
    feed.step(1, ranks=range(3))
    together, alone = ([GrowingFile(feed.path(rank), ALL) for rank in range(3)] for _ in range(2))
    for step in range(3):
        found = list(polled(together, together[0].parser))
        expected = [segment for file in alone for segment in file.poll()]
        assert [(one.path, one.windows) for one in found] == [
            (one.path, one.windows) for one in expected
        ]
        for one, other in zip(found, expected, strict=True):
            assert one.spans.to_pylist() == other.spans.to_pylist()
        assert [bool(file.problem) for file in together] == [bool(file.problem) for file in alone]
        assert bool(together[2].problem) == (step > 0 and bool(before))
        feed.step(1, ranks=range(3))


def test_a_torn_compressed_member_is_waited_for(healthy, grow):
    feed = grow(healthy, compress=True)
    feed.step(1, ranks=[0])
    file = GrowingFile(feed.path(0), ALL)
    member = gzip.compress(feed.appends[feed.names[0]][1], mtime=0)
    with feed.path(0).open("ab") as growing:
        growing.write(member[: len(member) // 2])
    assert everything(file) == [2]
    with feed.path(0).open("ab") as growing:
        growing.write(member[len(member) // 2 :])
    assert everything(file) == [4]


def test_a_compressed_member_that_is_lost_is_left_out_and_said(healthy, grow, monkeypatch):
    """Somebody truncates the file, its writer goes on where it was: zeros in between."""
    monkeypatch.setattr("megascan.reader.growing._HOLE_S", 0.0)
    feed = grow(healthy, compress=True)
    feed.step(4, ranks=[0])
    path = feed.path(0)
    file = GrowingFile(path, Wanted(num_windows=100))
    assert len(file.poll()) == 4
    feed.step(2, ranks=[0])
    written = path.read_bytes()
    path.write_bytes(written[:-300] + bytes(300))
    feed.step(ranks=[0])
    windows = [segment.windows[0].last_iteration for segment in file.poll()]
    feed.step(ranks=[0])
    windows += [segment.windows[0].last_iteration for segment in file.poll()]
    assert windows == [10, 14, 16]
    assert "were left out: compressed data that is damaged" in file.problem
    assert str(path) in file.problem


def test_an_empty_or_foreign_file_hands_out_nothing(tmp_path):
    path = tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json"
    path.write_bytes(b"")
    file = GrowingFile(path, ALL)
    assert file.poll() == []
    path.write_bytes(b"\0\xff not ours \n" * 50_000)
    assert file.poll() == []


def test_sizes_that_go_back_hand_out_nothing_twice(healthy, grow, monkeypatch):
    """As over NFS: a cached size may be older than bytes that were read already."""
    feed = grow(healthy)
    feed.step(4, ranks=[0])
    file, before = GrowingFile(feed.path(0), ALL), feed.path(0).stat()
    feed.step(2, ranks=[0])
    assert everything(file) == [2, 4, 6, 8, 10, 12]
    monkeypatch.setattr("megascan.reader.growing.os.fstat", lambda _: before)
    assert everything(file) == []
    monkeypatch.undo()
    feed.step(1, ranks=[0])
    assert everything(file) == [14]
    assert file.problem == ""


def test_a_stale_handle_is_said_and_tried_again(healthy, grow, monkeypatch):
    """As over NFS, where the server has put another file in its place meanwhile."""
    feed = grow(healthy)
    feed.step(2, ranks=[0])
    file = GrowingFile(feed.path(0), ALL)

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("megascan.reader.growing.os.fstat", stale)
    assert everything(file) == []
    assert "Stale file handle; tried again" in file.problem
    monkeypatch.undo()
    assert everything(file) == [2, 4]


def test_zeros_that_writes_will_fill_are_waited_for(healthy, grow, monkeypatch):
    """As over NFS: the file is long already, and what was written last is there first."""
    feed = grow(healthy)
    feed.step(2)
    path = feed.path(0)
    file = GrowingFile(path, ALL)
    file.poll()
    before = path.stat().st_size + 100
    feed.step(2)
    whole = path.read_bytes()
    hole = whole[:before] + bytes(500) + whole[before + 500 :]
    path.write_bytes(hole)
    assert (file.poll(), file.problem) == ([], "")
    with path.open("r+b") as opened:
        opened.seek(before)
        opened.write(whole[before : before + 500])
    assert [one.windows[0].last_iteration for one in file.poll()] == [6, 8]
    path.write_bytes(hole)  # and what is never filled is damage
    other = GrowingFile(path, ALL)
    assert other.poll() == []
    monkeypatch.setattr("megascan.reader.growing._HOLE_S", 0.0)
    found = [one.windows[0].last_iteration for one in other.poll()]
    assert found[:2] == [2, 4]
    assert "were left out" in other.problem
