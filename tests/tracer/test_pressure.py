"""For how long memory and disks were waited for: read from files as the kernel has them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megascan.tracer import pressure, timer
from megascan.tracer.pressure import Pressure

SECOND_NS = 1_000_000_000


class Proc:
    """Stands for /proc, and for the folder of control groups."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.groups = folder / "proc", folder / "groups"
        self.write("self/mountinfo", f"30 23 0:26 / {self.groups} rw - cgroup2 cgroup2 rw\n")
        self.write("self/cgroup", "4:memory:/of/version/1\n0::/\n")
        self.wait(memory_us=1_000, io_us=2_000)
        self.hold(kbytes=1_000_000, swapped_kbytes=0)
        self.move("self", 0, 0)
        self.write(f"self/task/{threading.get_native_id()}/children", "")

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def wait(self, *, memory_us: int, io_us: int, folder: Path | None = None) -> None:
        for name, total in (("memory", memory_us), ("io", io_us)):
            file = folder / f"{name}.pressure" if folder else self.folder / "pressure" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            figures = "avg10=0.00 avg60=0.00 avg300=0.00"
            file.write_text(f"some {figures} total={total}\nfull {figures} total=7\n")

    def hold(self, *, kbytes: int, swapped_kbytes: int) -> None:
        self.write("self/status", f"RssAnon:\t{kbytes} kB\nVmSwap:\t{swapped_kbytes} kB\n")

    def move(self, process: str, read: int, written: int) -> None:
        self.write(f"{process}/io", f"rchar: 9\nread_bytes: {read}\nwrite_bytes: {written}\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    made = Proc(tmp_path)
    monkeypatch.setattr(pressure, "_PROC", made.folder)
    clock = iter(range(SECOND_NS, 100 * SECOND_NS, SECOND_NS))
    monkeypatch.setattr(timer, "now_ns", lambda: next(clock))
    return made


def test_what_came_since_the_last_reading_is_read(proc):
    reading = Pressure()
    reading.begin()
    proc.wait(memory_us=251_000, io_us=12_000)
    proc.hold(kbytes=1_000_000, swapped_kbytes=250_000)
    proc.move("self", 3_000_000, 500_000)
    assert reading.read() == {
        "memory_waited_percent": 25.0,
        "disk_waited_percent": 1.0,
        "disk_read_mbytes_per_s": 3.0,
        "disk_written_mbytes_per_s": 0.5,
        "memory_own_gbytes": 1.28,
        "memory_swapped_gbytes": 0.256,
    }
    after = reading.read()
    assert (after["memory_waited_percent"], after["disk_read_mbytes_per_s"]) == (0.0, 0.0)


def test_the_own_group_counts_and_not_the_host(proc):
    proc.write("self/cgroup", "0::/pod/rank\n")
    proc.wait(memory_us=5, io_us=5, folder=proc.groups / "pod/rank")
    reading = Pressure()
    reading.begin()
    proc.wait(memory_us=900_000, io_us=900_000)
    proc.wait(memory_us=100_005, io_us=5, folder=proc.groups / "pod/rank")
    readings = reading.read()
    assert readings["memory_waited_percent"] == 10.0
    assert readings["disk_waited_percent"] == 0.0


def test_what_loaders_move_counts_also_of_those_that_began_later(proc):
    children = f"self/task/{threading.get_native_id()}/children"
    proc.write(children, "21 22 ")
    proc.move("21", 5_000_000, 0)
    proc.move("22", 0, 0)
    reading = Pressure()
    reading.begin()
    proc.write(children, "21 23 ")
    proc.move("21", 6_000_000, 0)
    proc.move("23", 2_000_000, 1_000_000)
    readings = reading.read()
    assert readings["disk_read_mbytes_per_s"] == 3.0
    assert readings["disk_written_mbytes_per_s"] == 1.0


def test_nothing_is_read_within_half_a_second(proc, monkeypatch):
    reading = Pressure()
    reading.begin()
    monkeypatch.setattr(timer, "now_ns", lambda: SECOND_NS + SECOND_NS // 4)
    assert reading.read() == {}


@pytest.mark.parametrize("words", ["", "some\n", "no numbers here total=x\n"])
def test_a_kernel_that_does_not_tell_is_no_error(proc, words):
    for file in ("pressure/memory", "pressure/io", "self/io", "self/status"):
        proc.write(file, words)
    reading = Pressure()
    reading.begin()
    assert reading.read() == {}


def test_a_system_without_proc_is_no_error(proc, monkeypatch):
    monkeypatch.setattr(pressure, "_PROC", proc.folder / "nowhere")
    reading = Pressure()
    reading.begin()
    assert reading.read() == {}


def test_a_step_is_taken_between_files(proc):
    reading, steps = Pressure(), []
    reading.begin()
    reading.read(lambda: steps.append(1))
    assert len(steps) == 3


@pytest.mark.skipif(not Path("/proc/pressure/memory").exists(), reason="the kernel does not tell")
def test_this_process_is_told():
    reading = Pressure()
    reading.begin()
    time.sleep(0.55)
    readings = reading.read()
    assert 0.0 <= readings["memory_waited_percent"] <= 100.0
    assert readings["memory_own_gbytes"] > 0.0


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not tell")
def test_what_a_child_writes_is_told(tmp_path):
    reading = Pressure()
    reading.begin()
    words = (
        "import os, sys; out = open(sys.argv[1], 'wb'); out.write(bytes(1 << 22)); out.flush(); "
        "os.fsync(out.fileno()); print('written', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", words, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.5)
    readings = reading.read()
    child.communicate()
    if not _counts_blocks(tmp_path):
        pytest.skip("a file system without a disk")
    assert readings["disk_written_mbytes_per_s"] > 0.1


def _counts_blocks(folder: Path) -> bool:
    before = Path("/proc/self/io").read_text()
    with (folder / "probe").open("wb") as out:
        out.write(bytes(1 << 16))
        out.flush()
        os.fsync(out.fileno())
    written = [
        int(text.split("\nwrite_bytes: ")[1].split()[0])
        for text in (before, Path("/proc/self/io").read_text())
    ]
    return written[1] > written[0]
