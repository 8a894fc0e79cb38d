"""Work in forked processes: order, what stays there, errors, deaths, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import select
import shutil
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
from megascan.errors import InputError, MissingError, OutputError
from megascan.overwriting import GrowingFile, replacing
from megascan.parallel import Here, Pool, can_fork, process_pool, workers_here

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


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where a pool keeps tables."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def pool(scratch):
    with workers_here(worth_processes=True) as workers:
        assert isinstance(workers, Pool)
        yield workers
    assert not children()
    assert not list(scratch.glob("megascan-*"))


def slow_first(number):
    time.sleep(0.1 if number == 0 else 0)
    return number, os.getpid()


def touching(folder, number):
    (folder / str(number)).touch()
    return number


def made(size, number):
    table = pa.table({"a": np.arange(size) + number, "b": pa.array(["x"] * size, pa.string())})
    return table.set_column(1, "b", table.column("b").dictionary_encode()), f"text {number}"


def total(table, number):
    return table.num_rows, int(table.column("a").to_numpy().sum()), number, os.getpid()


def damaged_at_two(number):
    if number == 2:
        raise InputError(f"file {number} is damaged")
    return number


def killed_at_three(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def killed_between_passes(table, number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return table.num_rows


def who(_):
    return os.getpid()


def waited(number):
    time.sleep(0.01)
    return number


def singly(count):
    return ((number,) for number in range(count))


def test_order_is_that_of_the_items_and_work_is_elsewhere(pool):
    found = list(pool.results(slow_first, singly(20)))
    assert [number for number, _ in found] == list(range(20))
    workers = {process for _, process in found}
    assert os.getpid() not in workers and len(workers) > 1


def test_few_results_wait_at_a_time(pool, tmp_path):
    """Who takes results slowly is not run over: workers stay a few items ahead."""
    folder = tmp_path / "touched"
    folder.mkdir()
    for number in pool.results(touching, ((folder, number) for number in range(40))):
        time.sleep(0.005)
        assert len(list(folder.iterdir())) <= number + 1 + 3 * 3


@pytest.mark.parametrize("size", [0, 1, 1 << 10, 1 << 20])
@pytest.mark.parametrize("where", ["pool", "here"])
def test_what_is_kept_is_what_was_made(size, where, scratch):
    """Tables stay where they were made, and are there for the next pass, whoever does it."""
    with workers_here(worth_processes=where == "pool") as workers:
        kept = list(workers.keep(made, ((size, number) for number in range(4))))
        assert [text for _, text in kept] == [f"text {number}" for number in range(4)]
        tasks = [(handle, number) for number, (handle, _) in enumerate(kept)]
        sums = list(workers.results(total, tasks))
        for number, (handle, _) in enumerate(kept):
            assert handle.open().equals(made(size, number)[0])
        put = workers.put(made(size, 7)[0])
        assert put.open().equals(made(size, 7)[0])
    expected = [(size, size * (size - 1) // 2 + size * number, number) for number in range(4)]
    assert [one[:3] for one in sums] == expected
    assert (os.getpid() in {one[3] for one in sums}) == (where == "here")
    assert not list(scratch.glob("megascan-*"))


def test_a_full_disk_is_said_so(pool, monkeypatch):
    shutil.rmtree(pool.folder)
    with pytest.raises(OutputError, match="set TMPDIR"):
        list(pool.keep(made, [(4, 0)]))


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_what_was_kept_and_is_no_longer_whole_is_said_so(pool, damage):
    ((kept, _),) = pool.keep(made, [(1 << 10, 0)])
    (path,) = pool.folder.glob("*.arrow")
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(MissingError, match=r"gone or damaged \(N.*; run again with TMPDIR"):
        list(pool.results(total, [(kept, 0)]))


def test_garbage_is_collected_as_before(pool):
    assert gc.isenabled()
    assert list(pool.results(waited, singly(3))) == [0, 1, 2]
    assert gc.isenabled()


def test_an_error_is_the_error_of_the_work(pool):
    found = pool.results(damaged_at_two, singly(5))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(InputError, match="file 2 is damaged"):
        next(found)


@pytest.mark.parametrize("work", [killed_at_three, "between passes"])
def test_a_process_that_is_killed_is_said_so(work, scratch):
    with (
        pytest.raises(MissingError, match=r"was killed, .* memory"),
        workers_here(worth_processes=True) as pool,
    ):
        if work == "between passes":
            kept = [handle for handle, _ in pool.keep(made, ((9, number) for number in range(4)))]
            tasks = [(handle, number) for number, handle in enumerate(kept)]
            list(pool.results(killed_between_passes, tasks))
        else:
            list(pool.results(work, singly(8)))
    assert not children()
    assert not list(scratch.glob("megascan-*"))


def test_a_process_that_is_gone_before_it_is_given_more_is_said_so(scratch):
    with (
        pytest.raises(MissingError, match="was killed"),
        workers_here(worth_processes=True) as pool,
    ):
        found = pool.results(waited, singly(1000))
        assert next(found) == 0
        for process in children():
            process.kill()
        time.sleep(0.3)
        list(found)
    assert not children()
    assert not list(scratch.glob("megascan-*"))


def test_nobody_is_left_when_results_are_no_longer_wanted(scratch):
    with workers_here(worth_processes=True) as pool:
        found = pool.results(waited, singly(1000))
        assert next(found) == 0
    assert not children()


def test_one_core_or_a_small_trace_needs_no_process(monkeypatch):
    with workers_here(worth_processes=False) as workers:
        assert isinstance(workers, Here)
        assert set(workers.results(who, singly(4))) == {os.getpid()}
    monkeypatch.setattr(parallel, "num_workers", lambda: 1)
    with workers_here(worth_processes=True) as workers:
        assert set(workers.results(who, singly(4))) == {os.getpid()}
        assert list(workers.results(who, [])) == []


def test_beside_other_threads_nothing_is_forked(monkeypatch):
    """One of them could hold a lock that the child would wait for."""
    monkeypatch.undo()
    monkeypatch.setattr(parallel, "num_workers", lambda: 2)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not can_fork()
        with workers_here(worth_processes=True) as workers:
            assert set(workers.results(who, singly(4))) == {os.getpid()}
    finally:
        done.set()
        other.join()


_WORKS = """
import sys, tempfile, time
import pyarrow as pa
from megascan import parallel
parallel.num_workers = lambda: 2
tempfile.tempdir = sys.argv[1]

def work(number):
    time.sleep(0.2)
    return pa.table({"a": [number]}), number

with parallel.workers_here(worth_processes=True) as pool:
    for _, number in pool.keep(work, ((number,) for number in range(1000))):
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
    assert not list(tmp_path.iterdir())  # nor does what it kept
    # of an interrupt only the parent speaks
    assert errors.count("Traceback") == (how == signal.SIGINT)


_SLOW_AGGREGATE = """
import sys, time
from megascan import parallel
from megascan.cli import options
from megascan.reader import trace
from aggregate import merge

parallel.num_workers = lambda: 2
options.WORTH_PROCESSES_BYTES, trace.SHARD_BYTES = 0, 100_000
settled = merge.decomposed

def slow(*arguments):
    time.sleep(0.5)
    return settled(*arguments)

merge.decomposed = slow
from megascan.cli.main import main
sys.exit(main(["aggregate", "-b", sys.argv[1], "-o", sys.argv[2]]))
"""


@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_kill_9_in_the_middle_of_a_pass(megascan, tmp_path, victim):
    """One sentence and exit code 1; no timeline, no part of one, no kept spans, no process."""
    folder, scratch, output = tmp_path / "trace", tmp_path / "scratch", tmp_path / "out" / "t.json"
    scratch.mkdir()
    output.parent.mkdir()
    words = ("--tp", 2, "--pp", 2, "--dp", 2, "--iterations", 4, "--layers", 4, "--seed", 3)
    assert megascan("simulate", *words, "-o", folder).returncode == 0
    command = subprocess.Popen(
        [sys.executable, "-c", _SLOW_AGGREGATE, str(folder), str(output)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ends = time.monotonic() + 60
    while not list(scratch.glob("megascan-*/*.arrow")) and time.monotonic() < ends:
        time.sleep(0.05)
    workers = psutil.Process(command.pid).children()
    assert len(workers) == 2
    (workers[0] if victim == "worker" else command).send_signal(signal.SIGKILL)
    _, errors = command.communicate(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert not list(scratch.iterdir()) and not list(output.parent.iterdir())
    if victim == "worker":
        assert command.returncode == 1
        assert len(errors.strip().splitlines()) == 1 and "was killed" in errors


def bytes_of(number, size):
    return number, bytes([number]) * size


def test_bytes_are_put_where_they_belong_by_the_workers(tmp_path):
    scratch, output = tmp_path / "scratch", tmp_path / "t.json"
    scratch.mkdir()
    sizes = [10, 1 << 20, 3 << 20, 20, 0, 1 << 20]
    with process_pool(2, "fork", "", scratch) as executor:
        pool = Pool(executor, 2, scratch)
        with replacing(output, force=False) as file:
            growing = GrowingFile(file)
            made = pool.append(bytes_of, enumerate(sizes), growing)
            growing.write(b"head")
            assert list(made) == [0, 1, 2, 3, 4, 5]
            growing.write(b"tail")
            assert not list(scratch.iterdir())
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert output.read_bytes() == b"".join([b"head", *pieces, b"tail"])


def bytes_and_death(number, size):
    if number == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return bytes_of(number, size)


def appended_to(output, work, count, scratch):
    """Append so many pieces of 64 KB to a file by a pool."""
    scratch.mkdir()
    with (
        process_pool(2, "fork", "take less", scratch) as executor,
        replacing(output, force=False) as file,
    ):
        tasks = ((number, 1 << 16) for number in range(count))
        for _ in Pool(executor, 2, scratch).append(work, tasks, GrowingFile(file)):
            pass


def test_an_output_of_a_killed_worker_is_not_there(tmp_path):
    output = tmp_path / "out" / "t.json"
    output.parent.mkdir()
    with pytest.raises(MissingError, match="was killed"):
        appended_to(output, bytes_and_death, 40, tmp_path / "scratch")
    assert not list(output.parent.iterdir())


def test_a_worker_that_finds_the_disk_full_says_so(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output = tmp_path / "out" / "t.json"
    output.parent.mkdir()
    monkeypatch.setattr(os, "sendfile", refused)
    with pytest.raises(OutputError, match=f"{output}: cannot be written .No space left"):
        appended_to(output, bytes_of, 3, tmp_path / "scratch")
    assert not list(output.parent.iterdir())


def numbers_of(number, count):
    return pa.table({"n": [number]}), list(range(number, number + count))


def test_what_a_worker_sends_fits_a_pipe_in_one_piece(tmp_path):
    """Of one that is killed while it writes, the pool would await the rest for ever."""
    with process_pool(2, "fork", "", tmp_path) as executor:
        sent = executor.submit(parallel._keep, numbers_of, (1, 100_000), tmp_path / "9.arrow")
        assert len(pickle.dumps(sent.result())) < select.PIPE_BUF
        pool = Pool(executor, 2, tmp_path)
        tasks = [(1, 3), (2, 100_000), (3, 2)]
        assert [found for _, found in pool.keep(numbers_of, tasks)] == [
            list(range(number, number + count)) for number, count in tasks
        ]
        assert [found for _, found in pool.results(numbers_of, tasks)] == [
            list(range(number, number + count)) for number, count in tasks
        ]
        assert {path.suffix for path in tmp_path.iterdir()} == {".arrow", ".result"}  # that sent


def test_bytes_whose_file_is_gone_are_an_error_that_says_what_to_do(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with (
        process_pool(2, "fork", "", scratch) as executor,
        replacing(tmp_path / "t.json", force=False) as file,
    ):
        pool = Pool(executor, 2, scratch)
        results = pool.append(bytes_of, [(1, 1 << 20)], GrowingFile(file))
        ends = time.monotonic() + 20
        while not list(scratch.iterdir()) and time.monotonic() < ends:
            time.sleep(0.01)
        (content,) = scratch.iterdir()
        content.unlink()
        with pytest.raises(MissingError, match=r"gone or damaged .*TMPDIR"):
            list(results)
