"""Compressed and bounded rank files: durable at every moment, and what is left is read back."""

from __future__ import annotations

import gzip
import os
import shutil

import pytest

from megascan.header import WindowRecord
from megascan.rankfile import (
    DamagedError,
    LimitedFile,
    RankFile,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.reader.rank_files import read_rank_files

LIMIT = 100_000


def incompressible():
    """Return numbers of 28 random bytes: a reader learns each new name, and numbers once."""
    return {key: int.from_bytes(os.urandom(7), "big") for key in "abcd"}


@pytest.fixture
def make_file(tmp_path, make_header):
    """A bounded file with a run begun, and a function that appends the windows of some numbers."""

    class File:
        def __init__(self, *, compress=False, max_bytes=LIMIT, run_id="first"):
            settings = make_header().trace
            self.path = rank_file_path(tmp_path, make_header())
            self.path = self.path.with_name(self.path.name + (".gz" if compress else ""))
            self.file = LimitedFile(self.path, compress=compress, max_bytes=max_bytes)
            self.run_id = run_id
            self.file.begin_run(make_header(run_id=run_id, trace=settings))

        def window(self, number, num_spans=20):
            record = WindowRecord(
                run_id=self.run_id,
                window=number,
                first_iteration=2 * number + 1,
                last_iteration=2 * number + 2,
                num_spans=num_spans,
            )
            spans = [
                ("compute", "forward", 1, number * 1000 + n, 1, incompressible())
                for n in range(num_spans)
            ]
            return [*encode_spans(0, spans), encode_window(0, record)], record

        def append(self, *numbers, num_spans=20):
            return [self.file.append(*self.window(number, num_spans)) for number in numbers]

    return File


def windows_of(path):
    return [
        (segment.header.run_id, window.window)
        for segment in read_rank_files([path])
        for window in segment.windows
    ]


def disk_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize("compress", [False, True])
def test_the_newest_windows_stay_and_the_header_tells_of_the_others(make_file, tmp_path, compress):
    made = make_file(compress=compress)
    for number in range(80):
        made.append(number)
        assert disk_bytes(tmp_path) <= LIMIT // 2
        if number % 3 != 1:  # the last one among them
            continue
        (segment,) = read_rank_files([made.path])
        kept = [window.window for window in segment.windows]
        assert kept == list(range(number + 1 - len(kept), number + 1))
        assert segment.header.num_windows_dropped == number + 1 - len(kept)
        assert segment.header.last_iteration_dropped == 2 * segment.header.num_windows_dropped
        assert segment.notes == () and segment.spans.num_rows == 20 * len(kept)
    assert disk_bytes(tmp_path) > LIMIT // 4
    made.file.close()
    assert [window for _, window in windows_of(made.path)] == kept


@pytest.mark.parametrize("compress", [False, True])
def test_the_successor_and_the_file_together_stay_below_the_limit(
    make_file, tmp_path, compress, monkeypatch
):
    most, fsync = [0], os.fsync

    def look(descriptor):
        most[0] = max(most[0], disk_bytes(tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    made = make_file(compress=compress)
    for number in range(60):
        made.append(number, num_spans=10 if number % 7 else 200)
    assert LIMIT // 2 < most[0] <= LIMIT


@pytest.mark.parametrize("compress", [False, True])
def test_a_kill_while_the_successor_is_written_leaves_the_old_file(
    make_file, tmp_path, compress, monkeypatch
):
    class Killed(BaseException):
        pass

    made = make_file(compress=compress)
    rename = type(made.path).replace

    def kill(self, target):
        raise Killed

    monkeypatch.setattr(type(made.path), "replace", kill)
    number = 0
    with pytest.raises(Killed):
        while True:
            made.append(number)
            number += 1
    monkeypatch.setattr(type(made.path), "replace", rename)
    assert [window for _, window in windows_of(made.path)] == list(range(number))
    assert len(list(tmp_path.iterdir())) == 2  # the successor that never became one
    resumed = make_file(compress=compress, run_id="second")
    resumed.append(0)
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]
    assert windows_of(made.path)[-1] == ("second", 0)


@pytest.mark.parametrize("compress", [False, True])
def test_a_resumed_run_drops_the_windows_of_the_earlier_first(make_file, compress):
    first = make_file(compress=compress)
    first.append(*range(8))
    first.file.close()
    second = make_file(compress=compress, run_id="second")
    second.append(0)
    assert windows_of(first.path) == [("first", n) for n in range(8)] + [("second", 0)]
    seen = set()
    for number in range(1, 60, 3):
        second.append(number, number + 1, number + 2)
        runs = [run for run, _ in windows_of(first.path)]
        assert runs == sorted(runs)
        seen.add(tuple(dict.fromkeys(runs)))
    assert seen == {("first", "second"), ("second",)}  # first windows went, then the whole run


@pytest.mark.parametrize("compress", [False, True])
def test_a_window_that_can_never_fit_is_refused_and_costs_no_other(make_file, compress):
    made = make_file(compress=compress)
    assert made.append(0, 1) == [True, True]
    assert made.append(2, num_spans=2000) == [False]
    assert made.append(3) == [True]
    assert [window for _, window in windows_of(made.path)] == [0, 1, 3]


def test_a_disk_that_is_full_in_mid_rewrite_leaves_the_old_file(make_file, tmp_path, monkeypatch):
    made = make_file()
    made.append(*range(12))
    before = windows_of(made.path)

    def no_space(descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        made.append(*range(12, 30))
    assert windows_of(made.path) == before
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]


def test_a_folder_that_vanished_is_not_made_again(make_file, tmp_path):
    made = make_file()
    made.append(0)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        made.append(*range(1, 30))


def test_one_gzip_member_an_append_and_plain_text_inside(make_file):
    made = make_file(compress=True, max_bytes=0)
    made.append(0, 1)
    data = made.path.read_bytes()
    assert data.count(b"\x1f\x8b\x08\x00\0\0\0\0") == 3  # header and two windows
    made.file.close()
    plain = make_file(max_bytes=0)
    plain.append(0)
    assert gzip.decompress(made.path.read_bytes()).startswith(b'[\n{"name":"megascan"')
    assert gzip.decompress(made.path.read_bytes()).endswith(b"}\n]\n")
    assert len(read_rank_files([made.path])[0].windows) == 2


def test_a_compressed_file_cut_anywhere_keeps_its_whole_windows_and_is_continued(
    make_file, tmp_path
):
    made = make_file(compress=True, max_bytes=0)
    ends = []
    for number in range(3):
        made.append(number, num_spans=3)
        ends.append(made.path.stat().st_size)
    made.file.close()
    whole = made.path.read_bytes()
    for cut in (*range(0, len(whole), len(whole) // 40), len(whole)):
        made.path.write_bytes(whole[:cut])
        finished = sum(end <= cut for end in ends)
        segments = read_rank_files([made.path])
        assert len(segments[0].windows if segments else ()) in (finished, finished + 1)
        resumed = make_file(compress=True, max_bytes=0, run_id="second")
        resumed.append(0, num_spans=3)
        resumed.file.close()
        found = windows_of(made.path)
        assert found == [("first", n) for n in range(finished)] + [("second", 0)]


def test_damaged_compressed_data_is_not_continued(make_file):
    made = make_file(compress=True, max_bytes=0)
    made.append(0, 1)
    data = bytearray(made.path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    made.path.write_bytes(data)
    with pytest.raises(DamagedError, match="damaged at byte"):
        RankFile(made.path, compress=True)


def test_a_resumed_run_sets_damaged_compressed_data_aside(
    make_file, make_header, make_tracer, tmp_path
):
    made = make_file(compress=True, max_bytes=0)
    made.append(0, 1)
    data = bytearray(made.path.read_bytes())
    data[-30] ^= 0xFF
    made.path.write_bytes(data)
    tracer, path = make_tracer(folder=tmp_path, resumed=True, run_id="second", compress=True)
    with tracer.iteration(1):
        pass
    tracer.close()
    assert windows_of(path) == [("second", 0)]
    assert (tmp_path / "first" / made.path.name).read_bytes() == bytes(data)


def test_a_fresh_run_sets_aside_plain_and_compressed(make_file, make_tracer, tmp_path):
    for compress in (False, True):
        made = make_file(compress=compress, run_id="first")
        made.append(0)
        made.file.close()
    tracer, path = make_tracer(folder=tmp_path, run_id="second", compress=True)
    with tracer.iteration(1):
        pass
    tracer.close()
    assert path.suffix == ".gz" and windows_of(path) == [("second", 0)]
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == [
        path.name.removesuffix(".gz"),
        path.name,
    ]


def test_spans_of_a_window_too_large_are_counted_by_the_next(
    make_header, make_tracer, read_rank_file, warnings_of_megascan
):
    tracer, path = make_tracer(interval=1, window=1, max_bytes=20_000)
    for iteration in range(1, 5):
        with tracer.iteration(iteration):
            for _ in range(500 if iteration in (2, 3) else 1):
                with tracer.span("forward", "compute"):
                    pass
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["num_dropped"]) for w in windows] == [(1, 0), (4, 1002)]
    (warning,) = warnings_of_megascan()
    assert "--trace-max-bytes 20000" in warning
