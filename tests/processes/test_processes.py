"""Work in forked processes: order, bounds, errors, deaths, and nobody left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

from megascan import parallel
from megascan.errors import InputError, MissingError
from megascan.parallel import across_processes, can_fork

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


BEFORE = set()
"""What other tests have left running."""


def children():
    return set(psutil.Process().children(recursive=True)) - BEFORE


@pytest.fixture(autouse=True)
def forking(monkeypatch):
    """Three workers, whatever the machine and the test runner's own threads."""
    BEFORE.clear()
    BEFORE.update(children())
    monkeypatch.setattr(parallel, "num_workers", lambda: 3)
    monkeypatch.setattr(parallel, "can_fork", lambda: True)


def test_order_is_that_of_the_items_and_work_is_elsewhere():
    def slow_first(number):
        time.sleep(0.1 if number == 0 else 0)
        return number, os.getpid()

    found = list(across_processes(slow_first, range(20)))
    assert [number for number, _ in found] == list(range(20))
    workers = {process for _, process in found}
    assert os.getpid() not in workers and len(workers) > 1
    assert not children()


def test_few_results_wait_at_a_time(tmp_path):
    """Who takes results slowly is not run over: workers stay a few items ahead."""

    def work(number):
        (tmp_path / str(number)).touch()
        return number

    for number in across_processes(work, range(40)):
        time.sleep(0.005)
        assert len(list(tmp_path.iterdir())) <= number + 1 + 3 * 3


@pytest.mark.parametrize("size", [0, 1, 1 << 10, 1 << 22])
def test_results_of_any_size(size):
    def work(number):
        table = pa.table({"a": np.arange(size) + number, "b": pa.array(["x"] * size, pa.string())})
        return table, np.full(size, number, dtype=np.uint8), "text" * number

    for number, (table, array, text) in enumerate(across_processes(work, range(4))):
        assert table.column("a").to_numpy().tolist() == list(range(number, size + number))
        assert array.tolist() == [number] * size and text == "text" * number


def test_garbage_is_collected_as_before():
    assert gc.isenabled()
    assert list(across_processes(lambda number: [number], range(3))) == [[0], [1], [2]]
    assert gc.isenabled()


def test_an_error_is_the_error_of_the_work():
    def work(number):
        if number == 2:
            raise InputError(f"file {number} is damaged")
        return number

    found = across_processes(work, range(5))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(InputError, match="file 2 is damaged"):
        next(found)
    assert not children()


def test_a_process_that_is_killed_is_said_so():
    def work(number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(MissingError, match=r"was killed, .* memory"):
        list(across_processes(work, range(8)))
    assert not children()


def test_a_process_that_is_gone_before_it_is_given_more_is_said_so():
    found = across_processes(lambda number: number, range(1000))
    assert next(found) == 0
    for process in children():
        process.kill()
    time.sleep(0.3)
    with pytest.raises(MissingError, match="was killed"):
        list(found)
    assert not children()


def test_nobody_is_left_when_results_are_no_longer_wanted():
    found = across_processes(lambda number: time.sleep(0.01) or number, range(1000))
    assert next(found) == 0
    found.close()
    assert not children()


def test_one_core_or_one_item_needs_no_process(monkeypatch):
    assert list(across_processes(lambda _: os.getpid(), [0])) == [os.getpid()]
    monkeypatch.setattr(parallel, "num_workers", lambda: 1)
    assert set(across_processes(lambda _: os.getpid(), range(4))) == {os.getpid()}
    assert list(across_processes(lambda _: os.getpid(), [])) == []


def test_beside_other_threads_nothing_is_forked(monkeypatch):
    """One of them could hold a lock that the child would wait for."""
    monkeypatch.undo()
    monkeypatch.setattr(parallel, "num_workers", lambda: 2)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not can_fork()
        assert set(across_processes(lambda _: os.getpid(), range(4))) == {os.getpid()}
    finally:
        done.set()
        other.join()


_WORKS = """
import sys, time
from pathlib import Path
from megascan import parallel
parallel.num_workers = lambda: 2

def work(number):
    Path(sys.argv[1], str(number)).touch()
    time.sleep(0.2)
    return number

for number in parallel.across_processes(work, range(1000)):
    print(number, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(tmp_path, how, interruptible):
    parent = subprocess.Popen(
        [sys.executable, "-c", _WORKS, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 2
    parent.send_signal(how)
    _, errors = parent.communicate(timeout=20)
    assert parent.returncode != 0
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    # of an interrupt only the parent speaks
    assert errors.count("Traceback") == (how == signal.SIGINT)
