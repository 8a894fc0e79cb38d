"""Whatever happens to tracing, training goes on and finished windows stay readable."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from megascan.schema import Kind
from megascan.tracer import writer as writer_module


def train(tracer, iterations):
    for iteration in iterations:
        with tracer.iteration(iteration), tracer.span("forward", Kind.COMPUTE):
            pass


def wait_for_windows(read_rank_file, path, count):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and len(read_rank_file(path).windows) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{count} windows were not written in time")


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_full_disk_stops_tracing_with_one_warning(
    make_tracer, read_rank_file, monkeypatch, warnings_of_megascan
):
    tracer, path = make_tracer(interval=2, window=2)
    train(tracer, [1, 2])
    wait_for_windows(read_rank_file, path, 1)

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    train(tracer, [3, 4])
    wait_until(lambda: not tracer.waiting)
    train(tracer, range(5, 20))
    tracer.close()
    (warning,) = warnings_of_megascan()
    assert "No space left on device" in warning
    file = read_rank_file(path)
    assert [w["last_iteration"] for w in file.windows] == [2]
    assert {span["args"]["iteration"] for span in file.spans} == {1, 2}  # no half window behind


def test_a_folder_that_vanishes_stops_tracing_with_one_warning(
    make_tracer, read_rank_file, warnings_of_megascan
):
    tracer, path = make_tracer(interval=2, window=2)
    train(tracer, [1, 2])
    wait_for_windows(read_rank_file, path, 1)
    shutil.rmtree(path.parent)
    train(tracer, [3, 4])
    wait_until(lambda: not tracer.waiting)
    train(tracer, range(5, 9))
    tracer.close()
    (warning,) = warnings_of_megascan()
    assert "was removed while it was written" in warning


def test_a_folder_that_cannot_be_made_stops_tracing(make_tracer, tmp_path, warnings_of_megascan):
    (tmp_path / "file").write_text("not a folder")
    tracer, _ = make_tracer(folder=tmp_path / "file" / "trace")
    wait_until(lambda: not tracer.waiting)
    train(tracer, range(1, 9))
    tracer.close()
    assert len(warnings_of_megascan()) == 1


def test_an_error_in_a_timer_never_reaches_training(make_tracer, monkeypatch, warnings_of_megascan):
    tracer, _ = make_tracer()

    def broken():
        raise RuntimeError("no clock")

    monkeypatch.setattr(tracer, "mark", broken)
    train(tracer, range(1, 9))
    (warning,) = warnings_of_megascan()
    assert "no clock" in warning


def test_a_disk_that_is_behind_drops_windows_and_counts_them(
    make_tracer, read_rank_file, monkeypatch, warnings_of_megascan
):
    blocked = [True]
    write = writer_module.TraceWriter._write

    def slow(self, window):
        while blocked[0]:
            time.sleep(0.01)
        write(self, window)

    monkeypatch.setattr(writer_module.TraceWriter, "_write", slow)
    tracer, path = make_tracer(interval=1, window=1)
    train(tracer, range(1, 11))
    assert warnings_of_megascan()
    blocked[0] = False
    wait_for_windows(read_rank_file, path, writer_module.MAX_WAITING_WINDOWS)
    train(tracer, [11])
    tracer.close()
    windows = read_rank_file(path).windows
    assert windows[-1]["last_iteration"] == 11
    assert sum(w["num_spans"] + w["num_dropped"] for w in windows) == 22


@pytest.mark.parametrize("resumed", [False, True])
def test_kill_in_mid_window_leaves_the_finished_windows(
    resumed, make_tracer, read_rank_file, tmp_path, make_header
):
    program = textwrap.dedent(
        """
        import os, pickle, signal, sys, time
        from pathlib import Path
        from megascan.tracer.timer import HostClock, now_ns
        from megascan.config import TraceConfig
        from megascan.tracer import CpuTimer, RecordingTracer, TraceWriter

        header = pickle.loads(sys.stdin.buffer.read())
        folder = Path(sys.argv[1])
        timer = CpuTimer(HostClock(domain="d", offset_ns=0, origin_ns=now_ns()))
        tracer = RecordingTracer(
            TraceConfig(enabled=True, directory=folder, interval=3, window=3)
        )
        writer = TraceWriter(folder, header, timer, resumed=False, on_failure=tracer.fail)
        tracer.record_with(timer, writer)
        while not writer.path.exists():
            time.sleep(0.01)
        for iteration in range(1, 9):
            with tracer.iteration(iteration):
                for _ in range(200):
                    with tracer.span("forward", "compute"):
                        pass
                if iteration == 8:
                    while writer.path.read_bytes().count(b"megascan_window") < 2:
                        time.sleep(0.01)
                    with writer.path.open("ab") as file:
                        file.write(b',\\n{"name":"forward","ph":"X","args":{"iteration":8}')
                    os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    folder = tmp_path / "killed"
    finished = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        input=pickle.dumps(make_header()),
        timeout=60,
    )
    assert finished.returncode == -signal.SIGKILL
    path = folder / "benchmark-data-0-pipeline-0-tensor-0.json"
    file = read_rank_file(path)
    assert [(w["first_iteration"], w["last_iteration"]) for w in file.windows] == [(1, 3), (4, 6)]
    assert sum(w["num_spans"] for w in file.windows) == len(file.spans) == 6 * 201
    if resumed:
        tracer, _ = make_tracer(folder=folder, resumed=True, run_id="later")
        train(tracer, [1, 2])
        tracer.close()
        file = read_rank_file(path)
        assert [header["run_id"] for header in file.headers] == ["20261121-084512-3f9a", "later"]
        assert [w["run_id"] for w in file.windows] == [*["20261121-084512-3f9a"] * 2, "later"]


def test_a_trace_without_passes_says_what_to_do(make_tracer, warnings_of_megascan):
    tracer, _ = make_tracer(interval=2, window=2)
    for iteration in (1, 2):
        with tracer.iteration(iteration), tracer.span("step", Kind.OPTIMIZER):
            pass
    tracer.close()
    (warning,) = warnings_of_megascan()
    assert "1 windows were traced" in warning and "model=model" in warning


def test_one_pass_is_enough(make_tracer, warnings_of_megascan):
    tracer, _ = make_tracer(interval=1, window=1)
    with tracer.iteration(1):
        pass
    train(tracer, [2])
    tracer.close()
    assert warnings_of_megascan() == []


def test_what_was_never_traced_misses_nothing(make_tracer, warnings_of_megascan):
    tracer, _ = make_tracer()
    tracer.close()
    assert warnings_of_megascan() == []


@pytest.mark.parametrize("kind", ["read-only folder", "file", "named pipe"])
def test_a_place_that_cannot_be_written_to(kind, tmp_path, make_tracer, warnings_of_megascan):
    """Training goes on, one warning says why there is no trace, and nobody hangs."""
    place = tmp_path / "place"
    if kind == "read-only folder":
        place.mkdir()
        place.chmod(0o500)
        if os.access(place, os.W_OK):
            pytest.skip("root may write everywhere")
    elif kind == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        first, path = make_tracer(folder=place)
        first.close()
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    begin = time.monotonic()
    tracer, _ = make_tracer(interval=2, window=2, folder=place, resumed=True)
    train(tracer, [1, 2])
    tracer.close()
    assert time.monotonic() - begin < 10
    assert len(warnings_of_megascan()) == 1
    if kind == "file":
        assert place.read_text() == "mine"
