"""What a rank's threads did: read from the kernel's own account."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascan.tracer import threads
from megascan.tracer.threads import Threads, ThreadTimes

SPIN = "while True: pass"


class Tasks:
    """A folder of threads as /proc/self/task has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def thread(self, number: int, name: str, waited_ns: int, ran_ns: int = 123_456) -> None:
        files = self.folder / str(number)
        files.mkdir(exist_ok=True)
        (files / "comm").write_text(f"{name}\n")
        (files / "schedstat").write_text(f"{ran_ns} {waited_ns} 7\n")

    def end(self, number: int) -> None:
        for file in (self.folder / str(number)).iterdir():
            file.unlink()
        (self.folder / str(number)).rmdir()


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    monkeypatch.setattr(threads, "_page_reads", lambda: 0)
    return Tasks(tmp_path)


def own() -> int:
    return threading.get_native_id()


def test_the_training_thread_and_those_of_backward_passes_count_and_no_others(tasks):
    tasks.thread(own(), "python", 100)
    tasks.thread(2, "pt_autograd_0", 1_000)
    tasks.thread(3, "pt_data_worker", 10_000)
    waits = Threads()
    waits.begin()
    tasks.thread(own(), "python", 105, ran_ns=900_000)
    tasks.thread(2, "pt_autograd_0", 1_070, ran_ns=900_000)
    tasks.thread(3, "pt_data_worker", 90_000, ran_ns=900_000)
    assert waits.end() == ThreadTimes(75, 0)
    waits.begin()
    assert waits.end() == ThreadTimes(0, 0)
    waits.close()


def test_pages_that_were_read_back_count(tasks, monkeypatch):
    tasks.thread(own(), "python", 100)
    counts = iter([7, 1_007])
    monkeypatch.setattr(threads, "_page_reads", lambda: next(counts))
    reading = Threads()
    reading.begin()
    assert reading.end() == ThreadTimes(0, 0, page_reads=1_000)
    reading.close()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The numbers of another thread of Python, and of the tracer's writer, while the test lasts."""
    ended = threading.Event()
    others = [
        threading.Thread(target=ended.wait, name=name) for name in ("logger", "megascan-writer")
    ]
    for thread in others:
        thread.start()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), *others])
    yield others[0].native_id, others[1].native_id
    ended.set()
    for thread in others:
        thread.join()


def test_other_threads_of_python_count_by_how_long_they_run(tasks, beside):
    logger, writer = beside
    tasks.thread(own(), "python", 100)
    tasks.thread(logger, "python", 10_000)
    tasks.thread(writer, "python", 10_000)
    running = Threads()
    running.begin()
    for number in (own(), logger, writer):
        tasks.thread(number, "python", 10_000, ran_ns=123_456 + 80)
    assert running.end() == ThreadTimes(9_900, 80)
    tasks.end(logger)
    running.begin()
    assert running.end() == ThreadTimes(0, 0)
    running.close()


def test_threads_of_the_tracer_do_not_count(make_tracer):
    """Their names say whose they are."""
    before = set(threading.enumerate())
    tracer, _ = make_tracer(interval=3, window=2)
    started = [one for one in threading.enumerate() if one not in before]
    assert started
    assert {str(one.native_id) for one in started} & threads._others_of_python() == set()
    tracer.close()


def test_a_thread_that_computes_in_python_runs_for_most_of_the_time():
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            pass

    other = threading.Thread(target=compute)
    other.start()
    running, begin_s = Threads(), time.monotonic()
    running.begin()
    time.sleep(0.5)
    times, taken_s = running.end(), time.monotonic() - begin_s
    ended.set()
    other.join()
    running.close()
    assert times is not None
    assert 0.25 < times.others_ns / 1e9 / taken_s < 1.05


def test_what_a_thread_waited_before_it_was_known_does_not_count(tasks):
    tasks.thread(own(), "python", 100)
    waits = Threads()
    waits.begin()
    tasks.thread(2, "pt_autograd_0", 5_000)  # the first backward pass starts it
    assert waits.end() == ThreadTimes(0, 0)
    waits.begin()
    tasks.thread(2, "pt_autograd_0", 5_300)
    assert waits.end() == ThreadTimes(300, 0)
    waits.close()


def test_a_thread_that_has_ended_is_forgotten(tasks):
    tasks.thread(own(), "python", 100)
    tasks.thread(2, "pt_autograd_0", 1_000)
    waits = Threads()
    waits.begin()
    tasks.end(2)
    waits.begin()
    tasks.thread(own(), "python", 140)
    assert waits.end() == ThreadTimes(40, 0)
    waits.close()


@pytest.mark.parametrize("words", ["", "no numbers here\n", "12\n"])
def test_a_kernel_that_does_not_tell_is_no_error(tasks, words):
    waits = Threads()
    waits.begin()
    assert waits.end() is None  # no such folder of this thread
    tasks.thread(own(), "python", 0)
    (tasks.folder / str(own()) / "schedstat").write_text(words)
    waits.begin()
    assert waits.end() is None
    waits.close()
    waits.close()


def test_a_system_without_proc_is_no_error(tasks, monkeypatch):
    monkeypatch.setattr(threads, "_TASKS", tasks.folder / "nowhere")
    waits = Threads()
    waits.begin()
    assert waits.end() is None


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waits"
)
def test_a_thread_that_shares_its_core_waits_for_about_half_of_the_time():
    allowed = os.sched_getaffinity(0)
    core = {min(allowed)}
    os.sched_setaffinity(0, core)  # of this thread, and of the process it starts
    other = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        time.sleep(0.2)  # it starts
        waits, begin_s = Threads(), time.monotonic()
        waits.begin()
        while time.monotonic() < begin_s + 1.0:
            pass
        times, taken_s = waits.end(), time.monotonic() - begin_s
        waits.close()
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, allowed)
    assert times is not None
    assert 0.2 < times.waited_ns / 1e9 / taken_s < 0.95


@pytest.fixture
def quota() -> Iterator[Path]:
    """A control group that has a core for 30 of every 100 ms; skips where none can be made."""
    group = Path(f"/sys/fs/cgroup/cpu/quota-of-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("30000")
    except OSError:
        pytest.skip("no control group of CPU time (version 1) may be made here")
    yield group
    group.rmdir()


def test_a_quota_of_cpu_time_counts(quota):
    words = f"""
import pathlib, time
from megascan.tracer.threads import Threads
pathlib.Path({str(quota)!r}, "cgroup.procs").write_text("0")
waits, begin = Threads(), time.monotonic()
waits.begin()
while time.monotonic() < begin + 1.0:
    pass
print(waits.end().waited_ns / 1e9 / (time.monotonic() - begin))
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert 0.4 < float(done.stdout) < 0.9
