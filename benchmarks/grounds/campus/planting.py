"""Plant faults: who has one, how strong it is, and from when on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.grounds.campus.faults import Fault
from benchmarks.grounds.campus.job import Job

Planter = Callable[[np.random.Generator, Job], Fault | None]
SECOND = ("gpu_clock", "nic", "host_cpu", "throttling", "loader", "gpu_memory")
"""What a second fault may be."""


@dataclass(frozen=True)
class Plant:
    """State what a family plants."""

    kinds: tuple[str, ...]
    later: bool = False
    strength: tuple[float, float] = (0.0, 0.0)


def plant(rng: np.random.Generator, job: Job, wanted: Plant) -> tuple[Fault, ...] | None:
    """Return the faults of a job, None if it can have none of the kind."""
    found: list[Fault] = []
    for kind in wanted.kinds:
        name = str(rng.choice(SECOND)) if kind == "any" else kind
        fault = PLANTERS[name](rng, job)
        if fault is None or any(set(fault.ranks) & set(other.ranks) for other in found):
            return None
        if wanted.strength[1]:
            fault = _with(fault, factor=round(float(rng.uniform(*wanted.strength)), 3))
        if wanted.later:
            numbers = job.tracing.iterations
            place = int(rng.integers(len(numbers) // 3, len(numbers) * 2 // 3 + 1))
            fault = _with(fault, first_iteration=numbers[place])
            if rng.random() < 0.25 and place + 2 < len(numbers):
                last = int(rng.integers(place + 1, len(numbers) - 1))
                fault = _with(fault, last_iteration=numbers[last])
        found.append(fault)
    return tuple(found)


def _with(
    fault: Fault, *, factor: float = 0.0, first_iteration: int = 0, last_iteration: int = 0
) -> Fault:
    return replace(
        fault,
        factor=factor or fault.factor,
        first_iteration=first_iteration or fault.first_iteration,
        last_iteration=last_iteration or fault.last_iteration,
    )


def _factor(rng: np.random.Generator, least: float, most: float) -> float:
    return round(float(rng.uniform(least, most)), 3)


def _rank(rng: np.random.Generator, job: Job) -> int:
    return int(rng.integers(job.num_ranks))


def _host(rng: np.random.Generator, job: Job) -> tuple[str, tuple[int, ...]] | None:
    """Return the name and the ranks of a host that does not have the whole job."""
    host = int(rng.integers(job.site.host_of(job.num_ranks - 1) + 1))
    ranks = job.site.ranks_of(host, job.num_ranks)
    return None if len(ranks) == job.num_ranks else (f"node{host + 1:02d}", ranks)


def _gpu_clock(rng: np.random.Generator, job: Job) -> Fault:
    return Fault(kind="gpu_clock", ranks=(_rank(rng, job),), factor=_factor(rng, 1.1, 1.6))


def _gpu_memory(rng: np.random.Generator, job: Job) -> Fault:
    return Fault(kind="gpu_memory", ranks=(_rank(rng, job),), factor=_factor(rng, 1.3, 3.0))


def _throttling(rng: np.random.Generator, job: Job) -> Fault:
    """Return bursts that last for some 0.3 to 3 seconds: so many passes, at the job's pace.

    In short traces they are shorter, so that there are some.
    """
    a_pass = job.pass_s() / 2 / job.layout.vpp
    num_passes = 2 * job.microbatches[0] * job.layout.vpp * len(job.tracing.iterations)
    lasts = min(float(rng.uniform(0.3, 3.0)) / a_pass, 0.1 * num_passes)
    return Fault(
        kind="throttling", ranks=(_rank(rng, job),), factor=_factor(rng, 1.2, 1.6),
        share=_factor(rng, 0.15, 0.4), burst=round(max(2.0, lasts), 1),
    )  # fmt: skip


def _of_host(kind: str, least: float, most: float, share: float = 1.0) -> Planter:
    def planter(rng: np.random.Generator, job: Job) -> Fault | None:
        found = _host(rng, job)
        if found is None:
            return None
        host, ranks = found
        return Fault(
            kind=kind, ranks=ranks, factor=_factor(rng, least, most), host=host, share=share,
            burst=round(float(rng.uniform(4, 20)), 1),
        )  # fmt: skip

    return planter


def _of_rank(kind: str, least: float, most: float) -> Planter:
    def planter(rng: np.random.Generator, job: Job) -> Fault:
        return Fault(kind=kind, ranks=(_rank(rng, job),), factor=_factor(rng, least, most))

    return planter


def _pcie(rng: np.random.Generator, job: Job) -> Fault:
    """Return a slot with lanes lost: all goes through it where there is no NVLink."""
    return Fault(
        kind="pcie", ranks=(_rank(rng, job),), factor=_factor(rng, 2.0, 4.0),
        everywhere=not job.site.chip.nvlink_bytes_s,
    )  # fmt: skip


def _nvlink_pair(rng: np.random.Generator, job: Job) -> Fault | None:
    """Return lanes lost between two neighbours that talk within their host."""
    if job.site.ranks_per_host < 2:
        return None
    first = _rank(rng, job) // 2 * 2
    return Fault(kind="nvlink_pair", ranks=(first, first + 1), factor=_factor(rng, 2.0, 5.0))


def _loader(rng: np.random.Generator, job: Job) -> Fault | None:
    """Return a host whose disk cannot keep up: batches take longer than the passes they feed."""
    found = _host(rng, job)
    if found is None:
        return None
    host, ranks = found
    loading = job.habits.loading
    share = float(rng.uniform(0.15, 1.0))  # of a pass, that is waited
    needed = (1 + share) * job.pass_s() * max(1, loading.num_workers)
    if not loading.num_workers:
        needed = share * job.pass_s()
    factor = max(2.0, needed / loading.seconds)
    return Fault(kind="loader", ranks=ranks, factor=round(factor, 1), host=host)


def _gc(rng: np.random.Generator, job: Job) -> Fault:
    """Return long collections on one rank: `factor` seconds, once in `burst` passes."""
    passes = 2 * job.microbatches[0] * job.layout.vpp
    step = job.pass_s() * job.microbatches[0]
    lasts = min(0.3, max(0.01, step * float(rng.uniform(0.1, 0.6))))
    return Fault(
        kind="gc", ranks=(_rank(rng, job),), factor=round(lasts, 4),
        burst=round(float(rng.uniform(0.5, 2.0)) * passes, 1),
    )  # fmt: skip


def _long_sequences(rng: np.random.Generator, job: Job) -> Fault:
    replica = int(rng.integers(job.layout.dp))
    own = [r for r in range(job.num_ranks) if job.layout.coordinates(r).dp == replica]
    return Fault(kind="long_sequences", ranks=tuple(own), factor=_factor(rng, 1.08, 1.35))


def _hot_expert(rng: np.random.Generator, job: Job) -> Fault:
    place = int(rng.integers(job.layout.ep))
    own = [r for r in range(job.num_ranks) if job.layout.coordinates(r).ep == place]
    return Fault(kind="hot_expert", ranks=tuple(own), factor=_factor(rng, 1.3, 2.2))


PLANTERS: dict[str, Planter] = {
    "gpu_clock": _gpu_clock, "gpu_memory": _gpu_memory, "throttling": _throttling,
    "power_brake": _of_host("power_brake", 1.1, 2.0), "pcie": _pcie,
    "nvlink": _of_rank("nvlink", 2.0, 6.0), "nvlink_pair": _nvlink_pair,
    "nic": _of_host("nic", 1.8, 4.0), "rail": _of_rank("rail", 1.8, 4.0),
    "flapping": _of_host("flapping", 3.0, 8.0, share=0.25),
    "host_cpu": _of_host("host_cpu", 1.5, 3.5),
    "neighbour": _of_host("neighbour", 2.0, 5.0, share=0.3), "loader": _loader, "gc": _gc,
    "long_sequences": _long_sequences, "hot_expert": _hot_expert,
}  # fmt: skip
"""By kind, what makes a fault of it, None where a job can have none."""
