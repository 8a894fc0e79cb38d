"""A real cluster: a scheduler and worker processes of their own, as `dask worker` starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from aggregate import align, build_shards
from detect import detect
from megascan.errors import InputError, MissingError, UsageError
from megascan.export import write_timeline
from megascan.parallel import Here, workers_here
from megascan.reader import read_ends

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")

from distributed import LocalCluster

from aggregate import cluster as connection
from aggregate.cluster import connect
from tests import warm_python

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
FORMATS = (".json", ".json.gz", ".pftrace", ".pftrace.gz")


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Workers:
    """A scheduler of this process and workers that may be killed."""

    def __init__(self, python, scheduler, folder):
        self.python = python
        self.scheduler = scheduler
        self.address = scheduler.scheduler_address
        self.folder = folder
        self.processes = []

    def start(self, count, cwd=None):
        words = ["-m", "distributed.cli.dask_worker", self.address, "--no-nanny", "--no-dashboard"]
        words += ["--nthreads", "1", "--host", "127.0.0.1"]
        words += ["--local-directory", str(self.folder)]
        wanted = len(self.scheduler.scheduler.workers) + count
        for _ in range(count):
            process = subprocess.Popen(
                [self.python, *words],
                cwd=cwd or self.folder,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self.processes.append(process)
        ends = time.monotonic() + 100
        while len(self.scheduler.scheduler.workers) < wanted:
            assert time.monotonic() < ends, "workers did not come up"
            time.sleep(0.1)

    def kill(self, number):
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait()

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def python():
    """An interpreter that has imported what each worker needs two CPU seconds for."""
    packages = (*warm_python.COMMANDS, "distributed", "distributed.cli.dask_worker")
    server, program = warm_python.start(packages, environment())
    yield program
    server.communicate()


@pytest.fixture(scope="module")
def some_workers(python):
    """Scheduler and so many workers."""

    @contextmanager
    def started(count, folder):
        options = {"n_workers": 0, "dashboard_address": ":0", "host": "127.0.0.1"}
        with LocalCluster(**options) as scheduler:
            workers = Workers(python, scheduler, folder)
            try:
                workers.start(count)
                yield workers
            finally:
                workers.stop()

    return started


@pytest.fixture(scope="module")
def two(some_workers, tmp_path_factory):
    with some_workers(2, tmp_path_factory.mktemp("workers")) as workers:
        yield workers


@pytest.fixture(scope="module")
def traced(megascan, tmp_path_factory):
    """Rank files of a simulated job with a slow rank."""
    folder = tmp_path_factory.mktemp("traced") / "out"
    words = ("--tp", 2, "--pp", 2, "--dp", 2, "--iterations", 6, "--seed", 3)
    words += ("--layers", 2, "--microbatches", 2, "--fault", "rank=5,kind=compute,factor=1.5")
    done = megascan("simulate", *words, "-o", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def small_shards(monkeypatch):
    """Many shards and blocks of a small trace, parts of ranks among them."""
    monkeypatch.setattr("megascan.reader.trace.SHARD_BYTES", 50_000)
    monkeypatch.setattr("megascan.reader.rank_files.STRETCH_BYTES", 20_000)
    monkeypatch.setattr("megascan.export.writing.BLOCK_ROWS", 300)


def shards_of(folder, workers):
    """The timeline of a trace folder, its spans with the workers."""
    trace, kept = read_ends(folder, workers)
    sharded, sums = build_shards(align(trace), kept, workers, summed=True)
    assert len(sharded.shards) > 2
    return sharded, sums


def test_the_command_writes_the_same_bytes_and_says_the_same(megascan, two, traced, tmp_path):
    texts = []
    for name, where in (("here", ()), ("there", ("--scheduler", two.address))):
        out = tmp_path / f"{name}.json.gz"
        words = ("-b", traced, "-o", out, "-d", "--json", f"{out}.txt")
        done = megascan("aggregate", *words, *where)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        texts.append(done.stdout.replace(name, "-"))
    assert texts[0] == texts[1]
    for suffix in ("", ".txt"):
        here, there = (tmp_path / f"{name}.json.gz{suffix}" for name in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()


def test_detection_says_the_same(megascan, two, traced, tmp_path):
    found = []
    for number, words in enumerate(((), ("--scheduler", two.address))):
        record = tmp_path / f"{number}.json"
        done = megascan("detect", traced, "--json", record, *words)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(record.read_text()))
    assert found[0] == found[1]
    assert found[0]["findings"][0]["ranks"] == [5]


def test_every_format_is_the_same_to_the_bit_wherever_it_is_made(
    two, traced, tmp_path, small_shards, monkeypatch, without_power
):
    """In this process, in pools of others, on a cluster: one engine, one result."""
    monkeypatch.setattr("megascan.parallel.can_fork", lambda: True)
    here, own_sums = shards_of(traced, Here())
    counts = [write_timeline(here, tmp_path / f"here{suffix}") for suffix in FORMATS]
    whole = here.whole()
    report = detect(whole).to_json()
    for name, num_workers, opened in (
        ("pair", 2, workers_here(worth_processes=True)),
        ("four", 4, workers_here(worth_processes=True)),
        ("there", 2, connect(two.address)),
    ):
        monkeypatch.setattr("megascan.parallel.num_workers", partial(int, num_workers))
        with opened as workers:
            assert getattr(workers, "count", 2) == num_workers
            there, sums = shards_of(traced, workers)
            assert there.whole().spans.equals(whole.spans)
            assert there.frame.clocks == whole.clocks
            assert there.frame.completeness == whole.completeness
            assert sums == own_sums
            assert detect(there).to_json() == report
            for suffix, count in zip(FORMATS, counts, strict=True):
                file = tmp_path / f"{name}{suffix}"
                assert write_timeline(there, file) == count
                assert file.read_bytes() == (tmp_path / f"here{suffix}").read_bytes()


def test_the_workers_do_the_work(two, traced, tmp_path, small_shards):
    """Nothing is quietly done by the client: each worker has run tasks."""
    with connect(two.address) as cluster:
        sharded, _ = shards_of(traced, cluster)
        write_timeline(sharded, tmp_path / "t.json")
        logs = cluster.client.run(lambda dask_worker: dask_worker.state.executed_count)
    assert len(logs) == 2
    assert min(logs.values()) > 3


def test_damage_is_told_as_it_is_here(two, traced, tmp_path):
    for path in traced.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    broken = min(tmp_path.glob("benchmark-data-*"))
    broken.write_bytes(broken.read_bytes().replace(b'"dur":', b'"dur"x', 1))
    messages = []
    with connect(two.address) as cluster:
        for workers in (Here(), cluster):
            with pytest.raises(InputError) as told:
                read_ends(tmp_path, workers)
            messages.append(str(told.value))
    assert messages[0] == messages[1]
    assert "damaged" in messages[0]


def test_a_worker_that_cannot_see_the_files_is_named(two, traced, tmp_path, monkeypatch):
    """/proc/self/cwd is another folder for every process."""
    monkeypatch.chdir(traced.parent)
    with connect(two.address) as cluster, pytest.raises(InputError) as told:
        read_ends(Path("/proc/self/cwd") / traced.name, cluster)
    assert "can read 0 of the 8 rank files" in str(told.value)
    assert "every worker sees them" in str(told.value)


class Killing:
    """A cluster that loses workers when some blocks of the output have come back."""

    def __init__(self, cluster, workers, numbers):
        self.cluster, self.workers, self.numbers = cluster, workers, numbers

    def keep(self, work, tasks):
        return self.cluster.keep(work, tasks)

    def append(self, work, tasks, output):
        for place, result in enumerate(self.cluster.append(work, tasks, output)):
            if place == 5:
                for number in self.numbers:
                    self.workers.kill(number)
            yield result


def test_a_worker_that_dies_in_the_middle_costs_time_only(
    some_workers, traced, tmp_path, small_shards
):
    """Its shards are read again by the other."""
    write_timeline(shards_of(traced, Here())[0], tmp_path / "local.json.gz")
    with some_workers(2, tmp_path) as workers, connect(workers.address) as cluster:
        sharded, _ = shards_of(traced, cluster)
        killing = replace(sharded, workers=Killing(cluster, workers, [0]))
        write_timeline(killing, tmp_path / "remote.json.gz")
    assert (tmp_path / "remote.json.gz").read_bytes() == (tmp_path / "local.json.gz").read_bytes()


def test_when_all_workers_die_it_says_so_and_leaves_no_file(
    some_workers, traced, tmp_path, small_shards, monkeypatch
):
    monkeypatch.setattr(connection, "_PATIENCE_SECONDS", 1.0)
    out = tmp_path / "remote.json.gz"
    with some_workers(2, tmp_path) as workers, connect(workers.address) as cluster:
        sharded, _ = shards_of(traced, cluster)
        killing = replace(sharded, workers=Killing(cluster, workers, [0, 1]))
        with pytest.raises(MissingError, match="try again"):
            write_timeline(killing, out)
    assert not out.exists()


def test_a_scheduler_without_workers_is_an_error(some_workers, tmp_path):
    with (
        some_workers(0, tmp_path) as nobody,
        pytest.raises(MissingError, match="has no workers; start some with `dask worker tcp"),
        connect(nobody.address),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("tcp://127.0.0.1:9", MissingError, "no Dask scheduler answers at tcp://127.0.0.1:9"),
        ("no such thing://x", UsageError, "is no address of a Dask scheduler"),
    ],
)
def test_an_address_where_nobody_listens(address, error, words, monkeypatch):
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 1)
    with pytest.raises(error, match=words), connect(address):
        raise AssertionError


def test_other_versions_are_refused(two, monkeypatch):
    monkeypatch.setattr("aggregate.cluster.SCHEMA_VERSION", 99)
    with pytest.raises(MissingError, match="install the same versions"), connect(two.address):
        raise AssertionError


def test_without_dask_only_the_flag_is_an_error(traced, tmp_path):
    code = (
        "import sys; sys.modules['distributed'] = None\n"
        "from megascan.cli.main import main\n"
        f"words = ['aggregate', '-b', {str(traced)!r}, '-o', {str(tmp_path / 'a.json')!r}]\n"
        "assert main(words) == 0\n"
        "sys.exit(main([*words, '--force', '--scheduler', 'tcp://127.0.0.1:9']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert "--scheduler needs distributed, which is not installed" in done.stderr
    assert "megascan[cluster]" in done.stderr
    assert "Traceback" not in done.stderr


def test_dask_is_not_imported_without_the_flag():
    code = (
        "import sys, megascan, aggregate, detect, megascan.cli.aggregate\n"
        "assert not {'dask', 'distributed'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), check=False)
    assert done.returncode == 0
