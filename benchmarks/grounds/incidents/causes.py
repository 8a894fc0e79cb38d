"""Plant what goes wrong with nodes: chips, memories, links, hosts, loaders.

Each function draws one trouble for a job: whom it hits and how hard. Sources of the sizes are named
where there are any; the others are our guesses of what operators would still call one incident.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.grounds.incidents.draws import Rng, pick
from benchmarks.grounds.incidents.jobs import MEGATRON, Job
from benchmarks.grounds.incidents.troubles import Trouble


def starving(job: Job, rng: Rng, low: float, high: float) -> float:
    """Return how many times longer launching takes that is `low` to `high` times what it may take
    until the device stands still.
    """
    times = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    return max(1.5, times * job.pass_s / job.launch_s)


def _one(job: Job, rng: Rng) -> int:
    return int(rng.integers(job.num_ranks))


def _host_of(job: Job, rank: int) -> dict[str, object]:
    """Return the ranks and the name of a rank's host."""
    ranks = job.cluster.ranks_on(int(job.cluster.hosts[rank]))
    return {"ranks": ranks, "host": job.cluster.name_of(rank)}


def _node(kind: str, cause: str, **values: object) -> Trouble:
    return Trouble(kind=kind, cause=cause, owner="node", **values)  # type: ignore[arg-type]


def thermal(job: Job, rng: Rng) -> Trouble:
    """Slow one chip's clock: a clogged heat sink, a dead fan (1.05 to 1.7 times)."""
    factor = float(np.exp(rng.uniform(np.log(1.05), np.log(1.7))))
    return _node(
        "gpu_clock",
        "compute",
        ranks=(_one(job, rng),),
        effect={"flop": factor},
        factor=factor,
        clock_ratio=1 / factor,
    )


def power_cap(job: Job, rng: Rng) -> Trouble:
    """Cap one chip's power lower than the others': products slow down most."""
    factor = float(rng.uniform(1.06, 1.3))
    return _node(
        "throttling",
        "compute",
        ranks=(_one(job, rng),),
        effect={"flop": factor},
        factor=factor,
        clock_ratio=1 / factor,
    )


def power_brake(job: Job, rng: Rng) -> Trouble:
    """Brake all chips of a tray: NVIDIA's power brake halves clocks or worse."""
    factor = float(rng.uniform(1.5, 3.0))
    return _node(
        "power_brake",
        "compute",
        **_host_of(job, _one(job, rng)),
        effect={"flop": factor, "memory": 1.1},
        factor=factor,
        clock_ratio=1 / factor,
    )


def memory_stack(job: Job, rng: Rng) -> Trouble:
    """Slow one chip's memory; products, which reuse what they read, feel a part of it."""
    factor = float(rng.uniform(1.3, 3.5))
    return _node(
        "gpu_memory",
        "compute",
        ranks=(_one(job, rng),),
        effect={"memory": factor, "flop": 1 + 0.12 * (factor - 1)},
        factor=factor,
    )


def ecc_pauses(job: Job, rng: Rng) -> Trouble:
    """Freeze one chip now and then: corrected errors are handled, rows are remapped."""
    share = float(rng.uniform(0.2, 0.6))
    freeze_s = job.pass_s * float(rng.uniform(0.2, 1.2))
    return _node(
        "ecc_pauses",
        "compute",
        ranks=(_one(job, rng),),
        freeze_s=freeze_s,
        factor=1 + freeze_s / (2 * job.pass_s),
        share=share,
        burst_passes=1.5,
    )


def pcie(job: Job, rng: Rng) -> Trouble:
    """Train a chip's PCIe link down to four lanes, or to its first generation.

    PCIe 5.0 x16 carries some 60 GB/s, x4 a quarter, Gen1 x16 a sixteenth: traffic to the NIC
    crosses it.
    """
    nic = job.cluster.chip.nic_gbps * job.cluster.nics_per_gpu
    left = float(pick(rng, {14.0: 3, 3.6: 1}))
    factor = max(1.0, nic / left)
    return _node(
        "pcie",
        "link",
        ranks=(_one(job, rng),),
        effect={"nic": factor, "loader": 1.5},
        factor=factor,
    )


def nvlink(job: Job, rng: Rng) -> Trouble:
    """Take NVLink lanes from one chip, or make them retransmit."""
    factor = float(rng.uniform(1.3, 5.0))
    return _node(
        "nvlink", "link", ranks=(_one(job, rng),), effect={"nvlink": factor}, factor=factor
    )


def nvswitch(job: Job, rng: Rng) -> Trouble:
    """Slow all NVLink traffic of one host: a switch has lost ports."""
    factor = float(rng.uniform(1.4, 3.0))
    return _node(
        "nvswitch",
        "link",
        **_host_of(job, _one(job, rng)),
        effect={"nvlink": factor},
        factor=factor,
    )


def nic(job: Job, rng: Rng) -> Trouble:
    """Run one NIC at half its rate, or at a quarter."""
    factor = float(pick(rng, {2.0: 3, 4.0: 2, 8.0: 1}))
    return _node("nic", "link", ranks=(_one(job, rng),), effect={"nic": factor}, factor=factor)


def flapping(job: Job, rng: Rng) -> Trouble:
    """Make one optical link flap: retransmissions while it does (10 to 40 % of the time)."""
    factor = float(rng.uniform(5, 20))
    return _node(
        "link_flap",
        "link",
        ranks=(_one(job, rng),),
        effect={"nic": factor},
        factor=factor,
        share=float(rng.uniform(0.15, 0.4)),
        burst_passes=float(rng.uniform(2, 12)),
    )


def wrong_rail(job: Job, rng: Rng) -> Trouble:
    """Send a chip's traffic through its neighbour's NIC: both have half of it."""
    rank = _one(job, rng)
    own = job.cluster.ranks_on(int(job.cluster.hosts[rank]))
    other = own[(own.index(rank) + 1) % len(own)]
    factor = float(rng.uniform(2.0, 2.6))
    ranks = tuple(sorted({rank, other}))
    return _node("rail", "link", ranks=ranks, effect={"nic": factor}, factor=factor)


def pfc_storm(job: Job, rng: Rng) -> Trouble:
    """Let pause frames stop a switch, and the hosts below it, again and again."""
    hosts = np.unique(job.cluster.hosts)
    count = min(len(hosts) - 1, int(rng.integers(1, 3)))
    hit = rng.permutation(hosts)[:count]
    ranks = tuple(sorted(rank for host in hit.tolist() for rank in job.cluster.ranks_on(host)))
    factor = float(rng.uniform(4, 12))
    return _node(
        "pfc_storm",
        "link",
        ranks=ranks,
        effect={"nic": factor},
        factor=factor,
        share=float(rng.uniform(0.3, 0.9)),
        burst_passes=8.0,
    )


def neighbour(job: Job, rng: Rng) -> Trouble:
    """Take the cores of some ranks of a host: launching takes several times as long."""
    rank = _one(job, rng)
    factor = starving(job, rng, 0.7, 3.0)
    alone = len(np.unique(job.cluster.hosts)) == 1 or rng.random() < 0.5
    where: dict[str, object] = {"ranks": (rank,)} if alone else _host_of(job, rank)
    return _node("host_cpu", "host", **where, effect={"host": factor}, factor=factor)


def misbound(job: Job, rng: Rng) -> Trouble:
    """Bind half of a host's ranks to the far socket's cores and memory."""
    place = _host_of(job, _one(job, rng))
    ranks = place["ranks"]
    assert isinstance(ranks, tuple)
    factor = starving(job, rng, 0.5, 1.8)
    return _node(
        "numa",
        "host",
        ranks=ranks[: max(1, len(ranks) // 2)],
        effect={"host": factor, "loader": 1.6},
        factor=factor,
    )


def quota(job: Job, rng: Rng) -> Trouble:
    """Throttle a container: its threads stand still for the rest of each 100 ms period."""
    pause_s = float(rng.uniform(0.02, 0.09))
    return _node(
        "cpu_quota",
        "host",
        **_host_of(job, _one(job, rng)),
        pause_s=pause_s,
        factor=1 + pause_s / 0.1,
        share=float(rng.uniform(0.3, 0.8)),
        burst_passes=3.0,
    )


def agent(job: Job, rng: Rng) -> Trouble:
    """Let a monitoring agent stop a host's threads now and then."""
    pause_s = float(rng.uniform(0.1, 0.6))
    return _node(
        "agent",
        "host",
        **_host_of(job, _one(job, rng)),
        pause_s=pause_s,
        share=float(rng.uniform(0.15, 0.6)) / job.num_passes,
        burst_passes=1.0,
    )


def memory_pressure(job: Job, rng: Rng) -> Trouble:
    """Let a host reclaim pages: launches and reads are slow while it does."""
    factor = starving(job, rng, 0.8, 3.0)
    return _node(
        "host_memory",
        "host",
        **_host_of(job, _one(job, rng)),
        effect={"host": factor, "loader": 3.0},
        factor=factor,
        share=float(rng.uniform(0.3, 0.8)),
        burst_passes=6.0,
    )


def storage(job: Job, rng: Rng) -> Trouble:
    """Read from a slow mount on one host."""
    factor = float(rng.uniform(3, 12)) / job.loader_share
    return _node(
        "storage",
        "loader",
        **_host_of(job, _readers(job, rng)),
        effect={"loader": factor},
        factor=factor,
    )


def _readers(job: Job, rng: Rng) -> int:
    """Return a rank that reads batches: those of the first and the last stage do."""
    last = (job.layout.pp - 1) * job.lanes
    first = int(rng.integers(job.lanes)) // job.layout.tp * job.layout.tp
    return first if rng.random() < 0.7 else last + first


def dead_workers(job: Job, rng: Rng) -> Trouble:
    """Leave one rank with one of its workers that read."""
    factor = float(rng.uniform(3, 8)) / job.loader_share
    return _node(
        "loader", "loader", ranks=(_readers(job, rng),), effect={"loader": factor}, factor=factor
    )


def collector(job: Job, rng: Rng) -> Trouble:
    """Collect garbage on one rank: full collections of a large heap take tenths of a second."""
    return _node(
        "gc",
        "gc",
        ranks=(_one(job, rng),),
        pause_s=float(rng.uniform(0.08, 0.5)),
        share=float(rng.uniform(0.2, 0.9)) / job.num_passes,
        burst_passes=1.0,
    )


def logging(job: Job, rng: Rng) -> Trouble:
    """Log metrics on the first or the last rank, which holds its thread up.

    No trace tells a logger from any other process that takes the core, so the rank may be named.
    """
    rank = 0 if rng.random() < 0.5 else job.num_ranks - 1
    return _node(
        "logging",
        "host",
        ranks=(rank,),
        pause_s=float(rng.uniform(0.05, 0.4)),
        share=min(0.5, 1.0 / job.num_passes),
        burst_passes=1.0,
    )


def checkpoint(job: Job, rng: Rng) -> Trouble:
    """Write a checkpoint beside training: its threads take cores of one host for a while."""
    factor = starving(job, rng, 0.8, 2.5)
    numbers = job.tracing.iterations
    begin = int(rng.integers(0, max(1, len(numbers) // 2)))
    end = min(len(numbers) - 1, begin + max(1, len(numbers) // 3))
    return _node(
        "async_checkpoint",
        "host",
        **_host_of(job, 0),
        effect={"host": factor},
        factor=factor,
        first=numbers[begin],
        last=numbers[end],
    )


def any_computing(job: Job, rng: Rng) -> Trouble:
    """Draw one of the troubles whose time is to be limited."""
    options: dict[Callable[[Job, Rng], Trouble], float] = {
        thermal: 3,
        power_cap: 1,
        memory_stack: 1,
        neighbour: 2,
        dead_workers: 1,
    }
    if len(np.unique(job.cluster.hosts)) > 1:
        options[nic] = 1
    return pick(rng, options)(job, rng)


def begins(trouble: Trouble, job: Job, rng: Rng) -> Trouble:
    """Let it begin in the midst of what is traced."""
    numbers = job.tracing.iterations
    return replace(trouble, first=numbers[int(rng.integers(2, len(numbers) - 1))])


def ends(trouble: Trouble, job: Job, rng: Rng) -> Trouble:
    """Let it end in the midst of what is traced."""
    numbers = job.tracing.iterations
    return replace(trouble, last=numbers[int(rng.integers(1, len(numbers) - 2))])


def bursts(trouble: Trouble, job: Job, rng: Rng) -> Trouble:
    """Let it come and go, 10 to 40 % of the time."""
    return replace(
        trouble,
        share=float(rng.uniform(0.1, 0.4)),
        burst_passes=float(pick(rng, {2.0: 1, 6.0: 2, 20.0: 2})),
    )


def two(job: Job, rng: Rng) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant two troubles on different ranks."""
    options: dict[Callable[[Job, Rng], Trouble], float] = {
        thermal: 3,
        memory_stack: 1,
        nic: 2,
        neighbour: 2,
        dead_workers: 1,
        collector: 1,
        power_brake: 1,
    }
    first = pick(rng, options)
    one = first(job, rng)
    del options[first]
    for _ in range(60):
        other = pick(rng, options)(job, rng)
        if not set(one.ranks) & set(other.ranks):
            break
    return job, (one, other)


def hidden(job: Job, rng: Rng) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant what costs nothing: hidden by prefetching, by launching ahead, by links at rest."""
    rank = _one(job, rng)
    what = pick(rng, {"loader": 2, "host": 2, "nvlink": 1 if job.trainer == MEGATRON else 0})
    if what == "loader":
        job = replace(job, loader_share=0.05, loader_depth=4)
        return job, (_node("loader", "loader", ranks=(rank,), effect={"loader": 2.5}, factor=2.5),)
    if what == "host":
        job = replace(job, host_ahead=0.4)
        return job, (_node("host_cpu", "host", ranks=(rank,), effect={"host": 1.25}, factor=1.25),)
    return job, (_node("nvlink", "link", ranks=(rank,), effect={"nvlink": 1.03}, factor=1.03),)
