"""For how long a rank's launching threads had no core: read from the kernel's own account."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascan.tracer import core_waits
from megascan.tracer.core_waits import CoreWaits

SPIN = "while True: pass"


class Tasks:
    """A folder of threads as /proc/self/task has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def thread(self, number: int, name: str, waited_ns: int) -> None:
        files = self.folder / str(number)
        files.mkdir(exist_ok=True)
        (files / "comm").write_text(f"{name}\n")
        (files / "schedstat").write_text(f"123456 {waited_ns} 7\n")

    def end(self, number: int) -> None:
        for file in (self.folder / str(number)).iterdir():
            file.unlink()
        (self.folder / str(number)).rmdir()


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    monkeypatch.setattr(core_waits, "_TASKS", tmp_path)
    return Tasks(tmp_path)


def own() -> int:
    return threading.get_native_id()


def test_the_training_thread_and_those_of_backward_passes_count_and_no_others(tasks):
    tasks.thread(own(), "python", 100)
    tasks.thread(2, "pt_autograd_0", 1_000)
    tasks.thread(3, "pt_data_worker", 10_000)
    waits = CoreWaits()
    waits.begin()
    tasks.thread(own(), "python", 105)
    tasks.thread(2, "pt_autograd_0", 1_070)
    tasks.thread(3, "pt_data_worker", 90_000)
    assert waits.end() == 75
    waits.begin()
    assert waits.end() == 0
    waits.close()


def test_what_a_thread_waited_before_it_was_known_does_not_count(tasks):
    tasks.thread(own(), "python", 100)
    waits = CoreWaits()
    waits.begin()
    tasks.thread(2, "pt_autograd_0", 5_000)  # the first backward pass starts it
    assert waits.end() == 0
    waits.begin()
    tasks.thread(2, "pt_autograd_0", 5_300)
    assert waits.end() == 300
    waits.close()


def test_a_thread_that_has_ended_is_forgotten(tasks):
    tasks.thread(own(), "python", 100)
    tasks.thread(2, "pt_autograd_0", 1_000)
    waits = CoreWaits()
    waits.begin()
    tasks.end(2)
    waits.begin()
    tasks.thread(own(), "python", 140)
    assert waits.end() == 40
    waits.close()


@pytest.mark.parametrize("words", ["", "no numbers here\n", "12\n"])
def test_a_kernel_that_does_not_tell_is_no_error(tasks, words):
    waits = CoreWaits()
    waits.begin()
    assert waits.end() is None  # no such folder of this thread
    tasks.thread(own(), "python", 0)
    (tasks.folder / str(own()) / "schedstat").write_text(words)
    waits.begin()
    assert waits.end() is None
    waits.close()
    waits.close()


def test_a_system_without_proc_is_no_error(tasks, monkeypatch):
    monkeypatch.setattr(core_waits, "_TASKS", tasks.folder / "nowhere")
    waits = CoreWaits()
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
        waits, begin_s = CoreWaits(), time.monotonic()
        waits.begin()
        while time.monotonic() < begin_s + 1.0:
            pass
        waited_ns, taken_s = waits.end(), time.monotonic() - begin_s
        waits.close()
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, allowed)
    assert waited_ns is not None
    assert 0.2 < waited_ns / 1e9 / taken_s < 0.95


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
from megascan.tracer.core_waits import CoreWaits
pathlib.Path({str(quota)!r}, "cgroup.procs").write_text("0")
waits, begin = CoreWaits(), time.monotonic()
waits.begin()
while time.monotonic() < begin + 1.0:
    pass
print(waits.end() / 1e9 / (time.monotonic() - begin))
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert 0.4 < float(done.stdout) < 0.9
