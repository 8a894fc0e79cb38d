"""Jobs of `benchmarks.wires` at work: launchers on their hosts, and troubles beside them."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.jobs import DATA, DEVICES, ROOT
from benchmarks.trainer_ranks import DONE, Plan, Stage
from benchmarks.wire_hosts import NIC, Network, end
from benchmarks.wire_jobs import Case, Job
from benchmarks.wire_ranks import GO, HALFWAY, NUM_FIRST, READY, marker
from benchmarks.wire_troubles import TROUBLES, Site

NUM_ITERATIONS = 30
MASTER_PORT = 29511
CASE_S = 200.0
"""What a case takes at most, with the start of its ranks."""
LOOK_S = 0.1
ENGINE = (
    *("--num-layers", "2", "--hidden-size", "192", "--num-attention-heads", "4"),
    *("--micro-batch-size", "1", "--global-batch-size", "12"),
    *("--train-iters", str(NUM_ITERATIONS), "--log-interval", "1"),
    *(*DATA, "--vocab-size", "512", *DEVICES["cpu"], "--trace", "--trace-dir"),
)
"""Flags of the engine but those of a job; its batch is one for 2, 3 and 4 replicas."""

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": NIC,
    "TORCHDYNAMO_DISABLE": "1",  # Megatron-Core would have every rank compile its small functions
}


class JobFailedError(Exception):
    """A job's launcher ended early, or took too long; the text is what it said."""


@contextmanager
def running(
    job: Job, cases: Sequence[Case], folder: Path
) -> Iterator[Callable[[Case], tuple[Case, Path]]]:
    """Start a job on hosts of its own, which are removed after it.

    Yield what runs one of its cases, in their order, and returns the case and its files' folder.
    """
    with Network(job.num_hosts, job.rate_mbit) as network:
        if job.is_engine:
            yield lambda case: _run_engine(job, case, network, folder)
            return
        plan = folder / "plan.json"
        _plan_of(job, cases, folder).write(plan)
        words = ("-m", "benchmarks.wire_ranks", str(plan))
        with _Launchers(job, network, words, folder / "output.txt") as launchers:
            yield lambda case: _run_loop(case, network, folder, launchers)


def _run_loop(
    case: Case, network: Network, folder: Path, launchers: _Launchers
) -> tuple[Case, Path]:
    """Have ranks that wait for it go through a case."""
    trace = folder / case.file_name
    launchers.wait(marker(trace, READY).exists)
    with _trouble(case, network, marker(trace, HALFWAY).exists):
        before = launchers.cores_used()
        marker(trace, GO).touch()
        launchers.wait(marker(trace, DONE).exists)
        used = launchers.cores_used().since(before)
    network.reset()
    mean_ms = float(marker(trace, DONE).read_text(encoding="utf-8"))
    return _with_figures(case, mean_ms, used), trace


def _run_engine(job: Job, case: Case, network: Network, folder: Path) -> tuple[Case, Path]:
    """Train by the engine for a case."""
    trace, output = folder / case.file_name, folder / f"{case.file_name}.txt"
    words = ("-m", "training.pretrain_gpt", *ENGINE, str(trace), *job.words)

    def has_reached(iteration: int) -> bool:
        return f"iteration {iteration:8d}/" in output.read_text(errors="replace")

    with (
        _trouble(case, network, lambda: has_reached(NUM_ITERATIONS // 2)),
        _Launchers(job, network, words, output) as launchers,
    ):
        launchers.wait(lambda: has_reached(1))
        before = launchers.cores_used()
        launchers.wait(lambda: has_reached(NUM_ITERATIONS))
        used = launchers.cores_used().since(before)
        launchers.wait(launchers.have_ended)
    network.reset()
    (trace / "ground-truth.json").unlink(missing_ok=True)  # of faults in ranks: it knows of none
    times = re.findall(r"per iteration \(ms\): ([\d.]+)", output.read_text(errors="replace"))
    mean_ms = statistics.mean(map(float, times[NUM_FIRST:]))
    return _with_figures(case, mean_ms, used), trace


@contextmanager
def _trouble(case: Case, network: Network, is_halfway: Callable[[], bool]) -> Iterator[None]:
    """Make the trouble of a case while inside."""
    site = Site(
        network=network,
        host=network.hosts[case.host],
        peer=network.hosts[case.peer],
        ratio=case.ratio,
        is_halfway=is_halfway,
    )
    with TROUBLES[case.trouble].acting(site):
        yield


@dataclass(frozen=True, kw_only=True)
class CoresUsed:
    """CPU time until now, or between two such readings."""

    job_s: float
    """Of a job's processes."""
    all_s: float
    """Of the machine."""
    possible_s: float
    """Of all its cores."""

    def since(self, before: CoresUsed) -> CoresUsed:
        """Return what was used since an earlier reading."""
        return CoresUsed(
            job_s=self.job_s - before.job_s,
            all_s=self.all_s - before.all_s,
            possible_s=self.possible_s - before.possible_s,
        )


def _with_figures(case: Case, mean_ms: float, used: CoresUsed) -> Case:
    """Return a case that knows how long its iterations took, and who used the cores."""
    others_s = max(0.0, used.all_s - used.job_s)
    return replace(
        case,
        mean_ms=mean_ms,
        job_cores_ratio=used.job_s / used.possible_s,
        other_cores_ratio=others_s / used.possible_s,
    )


class _Launchers:
    """The launchers of a job, one a host, all of whose output goes to a file."""

    def __init__(self, job: Job, network: Network, words: Sequence[str], output: Path) -> None:
        self._job, self._network, self._words, self._output = job, network, words, output
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> _Launchers:
        """Start them."""
        with self._output.open("w") as stream:
            self._processes += [
                subprocess.Popen(
                    [*host.prefix, sys.executable, *self._launch(host.number), *self._words],
                    cwd=ROOT,
                    env={**os.environ, **VARIABLES},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for host in self._network.hosts
            ]
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs."""
        end(self._processes)

    def _launch(self, node_rank: int) -> tuple[str, ...]:
        """Return what Python is given on a host before `-m` and a module."""
        job, master = self._job, self._network.hosts[0]
        return (
            *("-m", "torch.distributed.run", "--nnodes", str(job.num_hosts)),
            *("--node-rank", str(node_rank), "--nproc-per-node", str(job.ranks_per_host)),
            *("--master-addr", master.address, "--master-port", str(MASTER_PORT)),
        )

    def cores_used(self) -> CoresUsed:
        """Return the CPU time of the ranks so far, and of the whole machine."""
        job_s = 0.0
        for launcher in self._processes:
            for rank in psutil.Process(launcher.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    job_s += sum(rank.cpu_times()[:2])
        times = psutil.cpu_times()
        idle_s = times.idle + times.iowait
        return CoresUsed(job_s=job_s, all_s=sum(times) - idle_s, possible_s=sum(times))

    def have_ended(self) -> bool:
        """Tell whether all have ended well."""
        return all(process.poll() == 0 for process in self._processes)

    def wait(self, is_complete: Callable[[], bool]) -> None:
        """Wait until a case is; raise JobFailedError if a launcher fails or it takes too long."""
        end_s = time.monotonic() + CASE_S
        while not is_complete():
            if any(process.poll() for process in self._processes) or time.monotonic() > end_s:
                raise JobFailedError(self._output.read_text(errors="replace")[-3000:])
            time.sleep(LOOK_S)


def _plan_of(job: Job, cases: Sequence[Case], folder: Path) -> Plan:
    return Plan(
        device="cpu",
        sizes=job.sizes,
        cores=(),
        seed=1000 * cases[0].seed,
        stages=tuple(
            Stage(
                loop=job.loop,
                fault=TROUBLES[case.trouble].of_ranks,
                rank=0,
                folder=str(folder / case.file_name),
            )
            for case in cases
        ),
        num_traced=NUM_ITERATIONS,
    )
