"""Choose jobs with a fault of hardware: which, where, how bad, and from when to when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.grounds.depot.faults import Fault
from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.depot.menus import Menu, microbatch_s
from benchmarks.grounds.depot.scenarios import Scenario
from benchmarks.grounds.depot.sound import (
    heavy_stage,
    hot_expert,
    long_replica,
    uneven_lengths,
)

Choose = Callable[[Menu], Scenario]
SIZES = (1.05, 1.06, 1.08, 1.1, 1.12, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.7, 2.0)
LINKS = (1.3, 1.5, 2.0, 2.0, 3.0, 4.0, 8.0)
CHATTY = ("replicas", "tensor", "all", "shards", "experts", "contexts")
LONG = (8, 40)


def _rank(menu: Menu, job: Job) -> int:
    return int(menu.rng.integers(job.num_ranks))


def _host(menu: Menu, job: Job) -> tuple[int, ...]:
    return job.ranks_on(int(menu.rng.integers(job.num_hosts)))


def _timed(menu: Menu, job: Job, fault: Fault, when: str) -> Fault:
    """Return a fault that holds always, from an iteration on ("onset"), or until one ("ended")."""
    traced = job.traced
    place = int(len(traced) * menu.between(0.3, 0.7))
    if when == "onset":
        return replace(fault, first_iteration=traced[min(place, len(traced) - 2)])
    if when == "ended":
        return replace(fault, last_iteration=traced[max(place, 1)])
    return fault


def gpu_clock(when: str) -> Choose:
    """Return who chooses jobs with a GPU whose clock is low."""

    def choose(menu: Menu) -> Scenario:
        iterations = (3, 40) if when == "always" else LONG
        job = menu.job(menu.layout(), iterations=iterations)
        fault = Fault(
            kind="gpu_clock", ranks=(_rank(menu, job),), factor=menu.one(SIZES),
            is_shown=menu.chance(0.6),
        )  # fmt: skip
        return Scenario(job=job, faults=(_timed(menu, job, fault, when),))

    return choose


def throttling(*, whole: bool) -> Choose:
    """Return who chooses jobs with a GPU that is throttled now and then."""

    def choose(menu: Menu) -> Scenario:
        job = menu.job(menu.layout(), iterations=(10, 40) if whole else (5, 40))
        length_s = 0.0 if whole else menu.between(0.1, 3.0) * microbatch_s(job)
        fault = Fault(
            kind="throttling", ranks=(_rank(menu, job),), factor=menu.between(1.25, 2.5),
            share=menu.between(0.1, 0.4), in_whole_iterations=whole,
            seconds=round(max(0.001, length_s), 5),
        )  # fmt: skip
        return Scenario(job=job, faults=(fault,))

    return choose


def hbm(menu: Menu) -> Scenario:
    """Choose a job with a GPU whose memory is slow."""
    job = menu.job(menu.layout(), iterations=(3, 40))
    fault = Fault(kind="hbm", ranks=(_rank(menu, job),), factor=menu.between(1.2, 3.0))
    return Scenario(job=job, faults=(fault,))


def ecc(menu: Menu) -> Scenario:
    """Choose a job with a GPU that stands still while it corrects its memory."""
    job = menu.job(menu.layout(), iterations=(5, 40))
    share = menu.between(0.03, 0.25)
    fault = Fault(
        kind="ecc", ranks=(_rank(menu, job),), share=share, factor=round(1 / (1 - share), 3),
        seconds=menu.between(0.004, 0.06),
    )  # fmt: skip
    return Scenario(job=job, faults=(fault,))


def _launching(menu: Menu, *, hosts: int) -> Job:
    """Return a job whose threads have not much time to spare."""
    layout = menu.layout(hosts=hosts)
    hidden = {1: 2048, 2: 2048, 4: 3072, 8: 5120}[layout.get("tp", 1)]
    return menu.job(
        layout, iterations=(4, 40), hidden=hidden, sequence=2048,
        launch_ratio=menu.between(1.3, 2.2), microbatches=menu.one((4, 8)),
    )  # fmt: skip


def host_cpu(kind: str, *, whole: bool) -> Choose:
    """Return who chooses jobs with a busy daemon, wrong cores or a limit of CPU time: of one
    rank's process, or of a whole host.
    """

    def choose(menu: Menu) -> Scenario:
        job = _launching(menu, hosts=2 if whole else 1)
        ranks = _host(menu, job) if whole else (_rank(menu, job),)
        settings: dict[str, Any] = {"factor": menu.between(1.3, 2.5)}
        if kind == "daemon":
            settings = {
                "factor": menu.between(2.0, 4.0), "share": menu.between(0.25, 0.7),
                "seconds": menu.between(0.01, 0.08),
            }  # fmt: skip
        elif kind == "cgroup":
            share = menu.between(0.15, 0.5)
            settings = {
                "factor": round(1 / (1 - share), 3), "share": share, "seconds": 0.1 * share
            }  # fmt: skip
        fault = Fault(kind=kind, ranks=ranks, is_of_host=whole, **settings)
        return Scenario(job=job, faults=(fault,))

    return choose


def host_memory(menu: Menu) -> Scenario:
    """Choose a job with a host that has to reclaim memory all the time."""
    job = _launching(menu, hosts=2)
    fault = Fault(
        kind="host_memory", ranks=_host(menu, job), factor=menu.between(1.5, 4.0),
        share=menu.between(0.01, 0.1), seconds=menu.between(0.003, 0.03), is_of_host=True,
    )  # fmt: skip
    return Scenario(job=job, faults=(fault,))


def loader(*, whole: bool) -> Choose:
    """Return who chooses jobs with slow loading: of one rank, or of all on one host."""

    def choose(menu: Menu) -> Scenario:
        layout = menu.layout(hosts=2 if whole else 1)
        job = menu.job(layout, iterations=(4, 40), num_prefetched=menu.one((2, 4)))
        job = replace(job, load_s=menu.between(0.3, 0.6) * microbatch_s(job))
        ranks = _host(menu, job) if whole else tuple(range(job.num_ranks))
        readers = [rank for rank in ranks if job.loads(rank)]
        if not readers:
            readers = [rank for rank in job.ranks_on(0) if job.loads(rank)]
        named = tuple(readers) if whole else (menu.one(readers),)
        fault = Fault(kind="loader", ranks=named, factor=menu.between(2.0, 8.0), is_of_host=whole)
        when = menu.one(("always", "always", "onset"))
        return Scenario(job=job, faults=(_timed(menu, job, fault, when),))

    return choose


def nvlink(menu: Menu) -> Scenario:
    """Choose a job with a GPU whose links within the host are slow."""
    layout = menu.layout(("tensor", "all", "experts", "contexts", "shards", "replicas"))
    layout.pop("ranks_per_host", None)
    job = menu.job(layout, iterations=(3, 40), machine=menu.one(("h100", "h800", "a100")))
    fault = Fault(kind="nvlink", ranks=(_rank(menu, job),), factor=menu.one(LINKS))
    return Scenario(job=job, faults=(fault,))


def _wired(menu: Menu, *, most_hosts: bool = False) -> Job:
    """Return a job of several hosts that has much to say between them."""
    layout = menu.layout(CHATTY if menu.chance(0.8) else ("stages",), hosts=2)
    job = menu.job(layout, iterations=(4, 40), microbatches=menu.one((4, 8)))
    apart = 2 if job.tp <= 2 else 4
    return replace(job, ranks_per_host=apart) if most_hosts and job.num_ranks <= 32 else job


def pcie(menu: Menu) -> Scenario:
    """Choose a job with a GPU whose PCIe link has fewer lanes than it should have."""
    if menu.chance(0.4):
        layout = {"tp": 2, "dp": 4} if menu.chance(0.5) else {"dp": 8}
        job = menu.job(layout, machine="pcie", iterations=(4, 40))
    else:
        job = _wired(menu)
    factors = (2.0, 2.0, 4.0, 8.0) if job.hardware.has_nvlink else (1.2, 1.5, 2.0, 4.0)
    fault = Fault(kind="pcie", ranks=(_rank(menu, job),), factor=menu.one(factors))
    return Scenario(job=job, faults=(fault,))


def nic(*, whole: bool) -> Choose:
    """Return who chooses jobs with a slow network card of one GPU, or all cards of one host."""

    def choose(menu: Menu) -> Scenario:
        job = _wired(menu, most_hosts=menu.chance(0.3))
        ranks = _host(menu, job) if whole else (_rank(menu, job),)
        when = menu.one(("always", "always", "onset"))
        job = replace(job, num_windows=max(job.num_windows, 3))
        fault = Fault(kind="nic", ranks=ranks, factor=menu.one(LINKS), is_of_host=whole)
        return Scenario(job=job, faults=(_timed(menu, job, fault, when),))

    return choose


def rail(menu: Menu) -> Scenario:
    """Choose a job whose cards of one rail, one of each host, go through a slow switch."""
    job = _wired(menu)
    place = int(menu.rng.integers(job.gpus_used))
    ranks = tuple(rank for rank in range(job.num_ranks) if rank % job.gpus_used == place)
    fault = Fault(kind="rail", ranks=ranks, factor=menu.one(LINKS))
    return Scenario(job=job, faults=(fault,))


def flapping(menu: Menu) -> Scenario:
    """Choose a job with a card whose link is lost and found again."""
    job = _wired(menu)
    fault = Fault(
        kind="flapping", ranks=(_rank(menu, job),), factor=menu.between(4.0, 20.0),
        share=menu.between(0.1, 0.4), seconds=menu.between(0.05, 0.6),
    )  # fmt: skip
    return Scenario(job=job, faults=(fault,))


def two_faults(menu: Menu) -> Scenario:
    """Choose a job with two faults: two slow GPUs, or a GPU and a link or a loader elsewhere."""
    job = menu.job(menu.layout(hosts=2, ranks=8), iterations=(4, 40))
    first = Fault(kind="gpu_clock", ranks=(_rank(menu, job),), factor=menu.one(SIZES[4:]))
    others = [rank for rank in range(job.num_ranks) if rank not in first.ranks]
    readers = [rank for rank in others if job.loads(rank)]
    second = menu.one(
        (
            Fault(kind="gpu_clock", ranks=(menu.one(others),), factor=menu.one(SIZES[4:])),
            Fault(kind="nic", ranks=(menu.one(others),), factor=menu.one(LINKS[2:])),
            Fault(kind="loader", ranks=(menu.one(readers),), factor=menu.between(4.0, 10.0)),
            Fault(kind="cores", ranks=(menu.one(others),), factor=menu.between(1.5, 3.0)),
            Fault(kind="hbm", ranks=(menu.one(others),), factor=menu.between(1.8, 3.0)),
            Fault(
                kind="throttling", ranks=(menu.one(others),), factor=menu.between(1.3, 2.2),
                share=menu.between(0.2, 0.4),
            ),
        )
    )  # fmt: skip
    return Scenario(job=job, faults=(first, second))


def beside_imbalance(menu: Menu) -> Scenario:
    """Choose a job that is slow by itself and has a fault of hardware as well."""
    choose = menu.one(
        (heavy_stage, heavy_stage, uneven_lengths("packed"), uneven_lengths("padded to the batch"),
         long_replica, hot_expert)
    )  # fmt: skip
    scenario = choose(menu)
    job = scenario.job
    kind = menu.one(("gpu_clock", "gpu_clock", "throttling", "nvlink"))
    factor = menu.one(SIZES[5:]) if kind != "nvlink" else menu.one(LINKS[2:])
    share = menu.between(0.2, 0.4) if kind == "throttling" else 1.0
    fault = Fault(kind=kind, ranks=(_rank(menu, job),), factor=factor, share=share)
    return scenario.with_fault(fault)
