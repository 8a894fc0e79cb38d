"""Plant what is at fault in a node: chips, their memory, links, hosts, loaders; and collectors.

A collector pauses for what its process allocates, which is the job's doing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.grounds.pod.draws import Want, drawn
from benchmarks.grounds.pod.faults import Fault, Law
from benchmarks.grounds.pod.job import Job
from benchmarks.grounds.pod.work import launching_ratio, rough_iteration_s

Random = np.random.Generator
Plan = tuple[Job, tuple[Fault, ...]]
Make = Callable[[Random, int], Plan]
Plant = Callable[[Random, Job], Fault]


def planting(wants: Want, *plants: Plant) -> Make:
    """Return the maker of jobs as wanted, with a fault of each of `plants`."""

    def make(rng: Random, seed: int) -> Plan:
        job = drawn(rng, seed, wants)
        return job, tuple(plant(rng, job) for plant in plants)

    return make


def anything(job: Job) -> bool:
    """Want nothing in particular."""
    return True


def many(job: Job) -> bool:
    """Want enough iterations for something to change inside the trace."""
    return len(job.tracing.iterations) >= 8


def full(job: Job) -> bool:
    """Want modules in the trace."""
    return job.tracing.granularity == "full"


def crosses(job: Job) -> bool:
    """Want several domains, and something large to travel between them."""
    return job.num_ranks > job.cluster.domain and (
        job.layout.dp > 1 or job.layout.ep > job.cluster.domain
    )


def several_hosts(job: Job) -> bool:
    """Want at least two hosts."""
    return job.num_ranks > job.cluster.gpus_per_host


def busy_nvlink(job: Job) -> bool:
    """Want collectives within domains inside of passes."""
    return job.layout.tp > 1 or job.layout.ep > 1


def launching(job: Job) -> bool:
    """Want kernels short enough that the host is not far ahead."""
    return launching_ratio(job) < 8


def experts(job: Job) -> bool:
    """Want a router and experts."""
    return job.model.num_experts > 0


def both(*wants: Want) -> Want:
    """Want all of some things."""
    return lambda job: all(one(job) for one in wants)


def any_rank(rng: Random, job: Job) -> tuple[int, ...]:
    """Return one rank."""
    return (int(rng.integers(job.num_ranks)),)


def ranks_of_host(job: Job, host: int) -> tuple[int, ...]:
    """Return the ranks of a host."""
    return tuple(one for one in range(job.num_ranks) if job.cluster.host_of(one) == host)


def log_uniform(rng: Random, low: float, high: float) -> float:
    """Return a factor between two others, as likely near either."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def onset(rng: Random, job: Job) -> int:
    """Return an iteration inside the trace, with three before it and two from it on."""
    numbers = job.tracing.iterations
    return int(numbers[int(rng.integers(3, max(len(numbers) - 2, 4)))])


def slow_clock(rng: Random, job: Job) -> Fault:
    """Lower a GPU's clock for good."""
    return Fault(
        kind="gpu_clock", cause="compute", owner="node", law=Law.CLOCK,
        ranks=any_rank(rng, job), factor=log_uniform(rng, 1.05, 1.6),
    )  # fmt: skip


def slow_clock_later(rng: Random, job: Job) -> Fault:
    """Lower a GPU's clock from some iteration on."""
    fault = replace(slow_clock(rng, job), factor=log_uniform(rng, 1.08, 1.6))
    return replace(fault, first=onset(rng, job))


def throttling(periods: tuple[float, float], shares: tuple[float, float]) -> Plant:
    """Return the planter of bursts; periods are in iterations."""

    def plant(rng: Random, job: Job) -> Fault:
        return Fault(
            kind="throttling", cause="compute", owner="node", law=Law.CLOCK,
            ranks=any_rank(rng, job), factor=log_uniform(rng, 1.3, 3.0),
            share=float(rng.uniform(*shares)),
            period_s=rough_iteration_s(job) * log_uniform(rng, *periods),
            phase=float(rng.random()),
        )  # fmt: skip

    return plant


def badly_cooled(rng: Random, job: Job) -> Fault:
    """Let a GPU's cooler do its work badly, so that the chip heats up and is held back."""
    return Fault(
        kind="cooling", cause="compute", owner="node", law=Law.HEAT, ranks=any_rank(rng, job),
        factor=float(rng.uniform(1.5, 2.1)), told=1.2,
    )  # fmt: skip


def sick_memory(rng: Random, job: Job) -> Fault:
    """Let a GPU's memory repeat what it reads; products wait for it a little."""
    factor = log_uniform(rng, 1.6, 6.0)
    return Fault(
        kind="hbm", cause="compute", owner="node", law=Law.MEMORY, ranks=any_rank(rng, job),
        factor=factor, also=((Law.CLOCK, 1 + 0.04 * (factor - 1)),),
    )  # fmt: skip


def slow_nvlink(rng: Random, job: Job) -> Fault:
    """Take lanes from one GPU's NVLink."""
    return Fault(
        kind="nvlink", cause="link", owner="node", law=Law.NVLINK, ranks=any_rank(rng, job),
        factor=log_uniform(rng, 1.5, 6.0),
    )  # fmt: skip


def slow_nic(rng: Random, job: Job) -> Fault:
    """Let one NIC run at half of its speed or a third."""
    factor = float(rng.choice([2.0, 2.0, 3.0, 4.0])) * float(rng.uniform(0.95, 1.1))
    fault = Fault(
        kind="nic", cause="link", owner="node", law=Law.NIC, ranks=any_rank(rng, job), factor=factor
    )
    return replace(fault, first=onset(rng, job)) if many(job) and rng.random() < 0.3 else fault


def slow_nics_of_host(rng: Random, job: Job) -> Fault:
    """Slow all NICs of a host, by its PCIe or its driver."""
    host = job.cluster.host_of(int(rng.integers(job.num_ranks)))
    return Fault(
        kind="host_nics", cause="link", owner="node", law=Law.NIC, ranks=ranks_of_host(job, host),
        host=job.cluster.hosts[host], factor=log_uniform(rng, 1.6, 4.0),
    )  # fmt: skip


def slow_rail(rng: Random, job: Job) -> Fault:
    """Slow the switch of one rail, and so the NICs of that number on all hosts."""
    rail = int(rng.integers(job.cluster.gpus_per_host))
    ranks = tuple(one for one in range(job.num_ranks) if job.cluster.rail_of(one) == rail)
    return Fault(
        kind="rail", cause="link", owner="node", law=Law.NIC, ranks=ranks,
        factor=log_uniform(rng, 1.6, 4.0),
    )  # fmt: skip


def flapping(rng: Random, job: Job) -> Fault:
    """Let the link of one NIC come and go."""
    return Fault(
        kind="flapping", cause="link", owner="node", law=Law.NIC, ranks=any_rank(rng, job),
        factor=log_uniform(rng, 4.0, 20.0), share=float(rng.uniform(0.05, 0.25)),
        period_s=rough_iteration_s(job) * log_uniform(rng, 0.6, 5.0), phase=float(rng.random()),
    )  # fmt: skip


def busy_host(rng: Random, job: Job) -> Fault:
    """Let something else compute on a host's cores."""
    host = job.cluster.host_of(int(rng.integers(job.num_ranks)))
    return Fault(
        kind="host_cpu", cause="host", owner="node", law=Law.LAUNCH,
        ranks=ranks_of_host(job, host), host=job.cluster.hosts[host],
        factor=max(launching_ratio(job) * log_uniform(rng, 0.5, 1.6), 1.6),
        also=((Law.STALL, 1.0), (Law.LOADER, 2.0)),
        pause_ms=log_uniform(rng, 1.0, 8.0), pause_share=float(rng.uniform(0.05, 0.3)),
    )  # fmt: skip


def pinned(rng: Random, job: Job) -> Fault:
    """Pin a rank's process to a core on which something else runs."""
    return Fault(
        kind="pinned_process", cause="host", owner="node", law=Law.LAUNCH,
        ranks=any_rank(rng, job), also=((Law.STALL, 1.0),),
        factor=max(launching_ratio(job) * log_uniform(rng, 0.5, 1.6), 1.6),
        pause_ms=log_uniform(rng, 2.0, 10.0), pause_share=float(rng.uniform(0.1, 0.5)),
    )  # fmt: skip


def _loading_ranks(job: Job) -> list[int]:
    ends = {0, job.layout.pp - 1}
    return [
        one
        for one in range(job.num_ranks)
        if (place := job.layout.coordinates(one)).tp == 0 and place.pp in ends
    ]


def _loading_s(rng: Random, job: Job) -> float:
    """Return how many times longer loading takes so that a step notices."""
    per_batch = rough_iteration_s(job) / job.trainer.num_microbatches
    return max(log_uniform(rng, 0.1, 1.2) * per_batch / 0.35e-3, 8.0)


def slow_loader(rng: Random, job: Job) -> Fault:
    """Slow the data loader of one rank: its workers are too few, or stuck."""
    rank = int(rng.choice(_loading_ranks(job)))
    return Fault(
        kind="loader", cause="loader", owner="node", law=Law.LOADER, ranks=(rank,),
        factor=_loading_s(rng, job),
    )  # fmt: skip


def slow_loaders_of_host(rng: Random, job: Job) -> Fault:
    """Slow the data loaders of one host."""
    host = job.cluster.host_of(int(rng.choice(_loading_ranks(job))))
    return Fault(
        kind="host_loader", cause="loader", owner="node", law=Law.LOADER,
        ranks=ranks_of_host(job, host), host=job.cluster.hosts[host], factor=_loading_s(rng, job),
    )  # fmt: skip


def slow_storage(rng: Random, job: Job) -> Fault:
    """Let the disk of a host stand still now and then."""
    fault = slow_loaders_of_host(rng, job)
    return replace(
        fault, kind="storage", factor=fault.factor * 3, share=float(rng.uniform(0.1, 0.35)),
        period_s=rough_iteration_s(job) * log_uniform(rng, 0.5, 4.0), phase=float(rng.random()),
    )  # fmt: skip


def collecting(rng: Random, job: Job) -> Fault:
    """Let one rank's collector pause for long."""
    return Fault(
        kind="gc", cause="gc", owner="job", law=Law.COLLECTOR, ranks=any_rank(rng, job),
        pause_ms=min(log_uniform(rng, 25.0, 200.0), 600 * rough_iteration_s(job)),
        pause_share=float(min(rng.uniform(0.4, 2.0) / (2 * job.trainer.num_microbatches), 0.5)),
    )  # fmt: skip


def two_faults(rng: Random, seed: int) -> Plan:
    """Return a job with two faults of different kinds on different ranks."""
    job = drawn(rng, seed, both(crosses, full))
    plants = [slow_clock, sick_memory, slow_nic, busy_host, slow_loader, slow_clock_later]
    chosen = rng.choice(len(plants), 2, replace=False)
    while True:
        faults = [plants[one](rng, job) for one in chosen]
        if not set(faults[0].ranks) & set(faults[1].ranks):
            return job, tuple(faults)


BURSTS_WITHIN = throttling((0.15, 0.9), (0.05, 0.3))
BURSTS_OF_ITERATIONS = throttling((3.0, 12.0), (0.1, 0.3))


def _pipeline(job: Job) -> bool:
    return job.layout.pp > 1 and job.layout.dp == 1 and job.layout.tp > 1


def _lasting(job: Job) -> bool:
    """Want a trace in which a chip has time to warm up, and work that warms it."""
    numbers = job.tracing.iterations
    seconds = (numbers[-1] - numbers[0]) * rough_iteration_s(job)
    return seconds > 40 and job.layout.pp <= 2


def _base(job: Job) -> bool:
    return not full(job)


def _packed(job: Job) -> bool:
    return job.data.packed


TROUBLES: tuple[tuple[str, int, Make], ...] = (
    ("gpu_clock", 20, planting(full, slow_clock)),
    ("gpu_clock: experts", 8, planting(both(experts, full), slow_clock)),
    ("gpu_clock: packed", 6, planting(both(_packed, full), slow_clock)),
    ("gpu_clock: one replica", 5, planting(_pipeline, slow_clock)),
    ("gpu_clock: base", 6, planting(_base, slow_clock)),
    ("gpu_clock: later", 10, planting(both(many, full), slow_clock_later)),
    ("throttling: within iterations", 8, planting(full, BURSTS_WITHIN)),
    ("throttling: for iterations", 7, planting(both(many, full), BURSTS_OF_ITERATIONS)),
    ("cooling", 6, planting(both(full, _lasting), badly_cooled)),
    ("hbm", 12, planting(full, sick_memory)),
    ("nvlink", 10, planting(both(busy_nvlink, full), slow_nvlink)),
    ("nic", 12, planting(crosses, slow_nic)),
    ("host_nics", 8, planting(both(crosses, several_hosts), slow_nics_of_host)),
    ("rail", 6, planting(both(crosses, several_hosts), slow_rail)),
    ("flapping", 8, planting(both(crosses, many), flapping)),
    ("host_cpu", 11, planting(both(launching, several_hosts), busy_host)),
    ("pinned_process", 9, planting(launching, pinned)),
    ("loader", 7, planting(anything, slow_loader)),
    ("host_loader", 6, planting(several_hosts, slow_loaders_of_host)),
    ("storage", 6, planting(both(several_hosts, many), slow_storage)),
    ("gc", 7, planting(full, collecting)),
    ("two faults", 10, two_faults),
)
"""Families, how many cases of each, and what draws one."""
