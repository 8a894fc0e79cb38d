"""Each fault does what it says, and nothing when it is not to act."""

from __future__ import annotations

import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megascan.errors import OutputError
from training.faults.compute import CpuSlowness, _mark_boundary, burn_cpu_time
from training.faults.fault import FaultSpec, parse_fault, write_planted_faults
from training.faults.host import BusyHost, GarbagePressure, SlowLoader
from training.faults.injection import FaultCallback
from training.faults.link import GLOO, SlowLink, SlowWork

MS = 1_000_000


def cpu_ms_of(slowness: CpuSlowness) -> float:
    """CPU time of an operation of 20 ms that holds one of 10 ms and waits 30 ms."""

    def inner() -> None:
        burn_cpu_time(10 * MS)

    def outer() -> None:
        burn_cpu_time(10 * MS)
        time.sleep(0.03)
        slowness.run("inner", inner)

    begin_ns = time.thread_time_ns()
    slowness.run("outer", outer)
    return (time.thread_time_ns() - begin_ns) / MS


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_compute_multiplies_cpu_time_once_and_not_waits(factor: float) -> None:
    slowness = CpuSlowness(factor - 1)
    slowness.begin_iteration(acts=True)
    assert cpu_ms_of(slowness) == pytest.approx(20 * factor, rel=0.1)


def test_compute_does_nothing_outside_its_iterations() -> None:
    slowness = CpuSlowness(2.0)
    slowness.begin_iteration(acts=False)
    assert cpu_ms_of(slowness) == pytest.approx(20, rel=0.1)


def test_compute_slows_the_backward_pass_between_boundaries() -> None:
    slowness = CpuSlowness(1.0)
    slowness.begin_iteration(acts=True)

    def backward() -> None:
        burn_cpu_time(10 * MS)
        slowness.boundary("first")
        slowness.run("recomputed", lambda: burn_cpu_time(5 * MS))
        burn_cpu_time(10 * MS)

    begin_ns = time.thread_time_ns()
    slowness.run_backward(backward)
    assert (time.thread_time_ns() - begin_ns) / MS == pytest.approx(50, rel=0.1)
    begin_ns = time.thread_time_ns()
    slowness.boundary("outside a backward pass")
    assert (time.thread_time_ns() - begin_ns) / MS < 1


def test_compute_hooks_activations_and_never_weights() -> None:
    """A hook on a weight would stay; a first pass of recomputed layers hands out a bias alone."""
    weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    slowness = CpuSlowness(1.0)
    with torch.no_grad():
        _mark_boundary(slowness, (0, "out"), (((weight * 2), bias),))
        _mark_boundary(slowness, (0, "in"), (weight,))
    assert not bias._backward_hooks
    assert not weight._backward_hooks
    received = torch.ones(2, requires_grad=True)
    output = received * weight
    _mark_boundary(slowness, (0, "in"), (bias, received))
    _mark_boundary(slowness, (0, "out"), ([output, bias],))
    assert len(received._backward_hooks or ()) == len(output._backward_hooks or ()) == 1


def test_host_sleeps_in_proportion_without_using_the_cpu() -> None:
    host = BusyHost(excess=1.0, seed=1)
    host.begin_iteration(acts=True)
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(100):
        burn_cpu_time(1 * MS)
        host.stall()
    cpu_ms = (time.thread_time_ns() - cpu_ns) / MS
    wall_ms = (time.perf_counter_ns() - wall_ns) / MS
    assert cpu_ms == pytest.approx(100, rel=0.25)
    assert wall_ms > 1.5 * cpu_ms


def test_host_stalls_differ_in_length(slept_s: list[float]) -> None:
    host = BusyHost(excess=1.0, seed=1)
    for _ in range(20):
        host.begin_iteration(acts=True)
        host.stall()
        burn_cpu_time(1 * MS)
        host.stall()
    stalls_s = slept_s[1::2]
    assert len(stalls_s) == 20 and max(stalls_s) > 3 * min(stalls_s) > 0


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is slept from now on, without sleeping: a busy machine makes real sleeps longer."""
    lengths_s: list[float] = []
    monkeypatch.setattr(time, "sleep", lengths_s.append)
    return lengths_s


def test_host_counts_each_threads_own_time(slept_s: list[float]) -> None:
    """On a GPU the backward pass, and its stalls, run on a thread of its own."""
    host = BusyHost(excess=1.0, seed=1)
    host.begin_iteration(acts=True)
    host.stall()
    burn_cpu_time(50 * MS)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(host.stall).result()
    assert slept_s == [0.0, 0.0]
    host.stall()
    assert slept_s[-1] > 0


@pytest.mark.parametrize(
    ("amount", "least_ms"), [("delay=30", 30), ("factor=2", 20), ("factor=3", 40)]
)
def test_loader_delays_each_microbatch(amount: str, least_ms: float) -> None:
    loader = SlowLoader(parse_fault(f"rank=0,kind=loader,{amount}"))
    callback = FaultCallback([(parse_fault(f"rank=0,kind=loader,{amount},from=2"), loader)])
    took_ms = []
    for iteration in (1, 2):
        with callback.iteration(iteration):
            begin_s = time.perf_counter()
            with callback.loading():
                pass
            took_ms.append((time.perf_counter() - begin_s) * 1e3)
    assert took_ms[0] < least_ms / 2
    assert took_ms[1] >= least_ms


def test_gc_pauses_as_long_as_asked_with_real_collections() -> None:
    pressure = GarbagePressure(parse_fault("rank=0,kind=gc,delay=60"))
    phases: list[str] = []

    def listen(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            phases.append(phase)

    gc.collect()
    gc.callbacks.append(listen)
    try:
        pauses_s = []
        for _ in range(5):
            begin_s = time.perf_counter()
            pressure.begin_iteration(acts=True)
            pauses_s.append(time.perf_counter() - begin_s)
    finally:
        gc.callbacks.remove(listen)
        pressure.begin_iteration(acts=False)
    assert phases.count("stop") >= 5
    assert pauses_s[-1] > 0.03


def test_link_waits_once_and_only_when_it_acts(slept_s: list[float]) -> None:
    link = SlowLink(parse_fault("rank=0,kind=link,delay=20"))

    class Done:
        def wait(self, *arguments: object) -> object:
            return "done"

    work = SlowWork(link, 10, Done())
    assert not work.is_completed()
    assert work.wait() == "done"
    assert sum(slept_s) == pytest.approx(0.02)
    assert work.wait() == "done"
    assert work.is_completed()
    assert sum(slept_s) == pytest.approx(0.02)
    assert not hasattr(work, "get_future")
    assert not link.concerns_peer(1)
    link.begin_iteration(acts=True)
    assert link.concerns_peer(1)


def test_link_estimates_latency_and_bandwidth() -> None:
    assert GLOO.time_ms(0) == 2.0
    assert GLOO.time_ms(10**6) == 3.0


def test_link_between_two_ranks_concerns_only_them() -> None:
    link = SlowLink(parse_fault("rank=0,kind=link,factor=2,peer=3"))
    link.begin_iteration(acts=True)
    assert link.concerns_peer(3)
    assert not link.concerns_peer(1)


def test_ground_truth_says_what_where_when_and_keeps_earlier_ones(tmp_path: Path) -> None:
    fault: FaultSpec = parse_fault("rank=1,kind=compute,factor=1.5,from=2")
    path = write_planted_faults(tmp_path / "trace", "run-a", 4, [fault])
    assert json.loads(path.read_text()) == {
        "schema": 1,
        "run_id": "run-a",
        "world_size": 4,
        "faults": [{"rank": 1, "kind": "compute", "factor": 1.5, "first_iteration": 2}],
    }
    assert not path.name.startswith("benchmark-data-")
    write_planted_faults(tmp_path / "trace", "run-b", 4, [])
    assert json.loads(path.read_text())["faults"] == []
    assert (tmp_path / "trace" / "run-a" / path.name).exists()


def test_ground_truth_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="give another --trace-dir"):
        write_planted_faults(tmp_path / "file", None, 1, [])
