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

Where = tuple[tuple[int, ...], str]
"""Ranks, and the name of their host where the whole of it is at fault."""

_MOST_STARVED = 40.0
"""How many times longer launching takes at most: a thread that gets one time slice in forty."""


def starving(job: Job, rng: Rng, low: float, high: float) -> float:
    """Return how many times longer launching takes that is `low` to `high` times what it may take
    until the device stands still.
    """
    times = _log_uniform(rng, low, high)
    return min(_MOST_STARVED, max(1.5, times * job.pass_s / job.launch_s))


def _one(job: Job, rng: Rng) -> int:
    return int(rng.integers(job.num_ranks))


def _host_of(job: Job, rank: int) -> Where:
    """Return the ranks and the name of a rank's host."""
    return job.cluster.ranks_on(int(job.cluster.hosts[rank])), job.cluster.name_of(rank)


def _log_uniform(rng: Rng, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _slow(
    what: tuple[str, str], where: Where, resource: str, factor: float, **more: object
) -> Trouble:
    """Return a trouble of a kind and cause that makes a resource slower, and others by `also`."""
    also = more.pop("also", {})
    assert isinstance(also, dict)
    more |= {"effect": {resource: factor, **also}, "factor": factor}
    return _stops(what, where, **more)


def _stops(what: tuple[str, str], where: Where, **more: object) -> Trouble:
    """Return a trouble of a kind and cause, with any other fields."""
    (kind, cause), (ranks, host) = what, where
    return Trouble(kind=kind, cause=cause, owner="node", ranks=ranks, host=host, **more)  # type: ignore[arg-type]


def _clock(kind: str, where: Where, factor: float, **more: object) -> Trouble:
    return _slow((kind, "compute"), where, "flop", factor, clock_ratio=1 / factor, **more)


def thermal(job: Job, rng: Rng) -> Trouble:
    """Slow one chip's clock: a clogged heat sink, a dead fan (1.05 to 1.7 times)."""
    return _clock("gpu_clock", ((_one(job, rng),), ""), _log_uniform(rng, 1.05, 1.7))


def power_cap(job: Job, rng: Rng) -> Trouble:
    """Cap one chip's power lower than the others': products slow down most."""
    return _clock("throttling", ((_one(job, rng),), ""), float(rng.uniform(1.06, 1.3)))


def power_brake(job: Job, rng: Rng) -> Trouble:
    """Brake all chips of a tray: NVIDIA's power brake halves clocks or worse."""
    where, factor = _host_of(job, _one(job, rng)), float(rng.uniform(1.5, 3.0))
    return _clock("power_brake", where, factor, also={"memory": 1.1})


def memory_stack(job: Job, rng: Rng) -> Trouble:
    """Slow one chip's memory; products, which reuse what they read, feel a part of it."""
    where, factor = ((_one(job, rng),), ""), float(rng.uniform(1.3, 3.5))
    also = {"flop": 1 + 0.12 * (factor - 1)}
    return _slow(("gpu_memory", "compute"), where, "memory", factor, also=also)


def ecc_pauses(job: Job, rng: Rng) -> Trouble:
    """Freeze one chip now and then: corrected errors are handled, rows are remapped."""
    length = float(rng.uniform(0.2, 1.2))
    return _stops(
        ("ecc_pauses", "compute"),
        ((_one(job, rng),), ""),
        freeze_s=length * job.pass_s,
        factor=1 + length / 2,
        share=float(rng.uniform(0.2, 0.6)),
        burst_passes=1.5,
    )


def pcie(job: Job, rng: Rng) -> Trouble:
    """Train a chip's PCIe link down to four lanes, or to its first generation.

    PCIe 5.0 x16 carries some 60 GB/s, x4 a quarter, Gen1 x16 a sixteenth: traffic to the NIC
    crosses it.
    """
    nic = job.cluster.chip.nic_gbps * job.cluster.nics_per_gpu
    factor = max(1.0, nic / float(pick(rng, {14.0: 3, 3.6: 1})))
    where = ((_one(job, rng),), "")
    return _slow(("pcie", "link"), where, "nic", factor, also={"loader": 1.5})


def nvlink(job: Job, rng: Rng) -> Trouble:
    """Take NVLink lanes from one chip, or make them retransmit."""
    where, factor = ((_one(job, rng),), ""), float(rng.uniform(1.3, 5.0))
    return _slow(("nvlink", "link"), where, "nvlink", factor)


def nvswitch(job: Job, rng: Rng) -> Trouble:
    """Slow all NVLink traffic of one host: a switch has lost ports."""
    where, factor = _host_of(job, _one(job, rng)), float(rng.uniform(1.4, 3.0))
    return _slow(("nvswitch", "link"), where, "nvlink", factor)


def nic(job: Job, rng: Rng) -> Trouble:
    """Run one NIC at half its rate, or at a quarter: some boards have one for two GPUs."""
    factor = float(pick(rng, {2.0: 3, 4.0: 2, 8.0: 1}))
    ranks = job.cluster.on_nic_of(_one(job, rng))
    return _slow(("nic", "link"), (ranks, ""), "nic", factor)


def flapping(job: Job, rng: Rng) -> Trouble:
    """Make one optical link flap: retransmissions while it does (10 to 40 % of the time)."""
    return _slow(
        ("link_flap", "link"),
        (job.cluster.on_nic_of(_one(job, rng)), ""),
        "nic",
        float(rng.uniform(5, 20)),
        share=float(rng.uniform(0.15, 0.4)),
        burst_passes=float(rng.uniform(2, 12)),
    )


def wrong_rail(job: Job, rng: Rng) -> Trouble:
    """Send a chip's traffic through its neighbour's NIC: both have half of it."""
    rank = _one(job, rng)
    own = job.cluster.ranks_on(int(job.cluster.hosts[rank]))
    ranks = tuple(sorted({rank, own[(own.index(rank) + 1) % len(own)]}))
    return _slow(("rail", "link"), (ranks, ""), "nic", float(rng.uniform(2.0, 2.6)))


def pfc_storm(job: Job, rng: Rng) -> Trouble:
    """Let pause frames stop a switch, and the hosts below it, again and again."""
    hosts = np.unique(job.cluster.hosts)
    hit = rng.permutation(hosts)[: min(len(hosts) - 1, int(rng.integers(1, 3)))]
    ranks = tuple(sorted(rank for host in hit.tolist() for rank in job.cluster.ranks_on(host)))
    share, factor = float(rng.uniform(0.3, 0.9)), float(rng.uniform(4, 12))
    what = ("pfc_storm", "link")
    return _slow(what, (ranks, ""), "nic", factor, share=share, burst_passes=8.0)


def neighbour(job: Job, rng: Rng) -> Trouble:
    """Take the cores of some ranks of a host: launching takes several times as long."""
    rank = _one(job, rng)
    alone = len(np.unique(job.cluster.hosts)) == 1 or rng.random() < 0.5
    where: Where = ((rank,), "") if alone else _host_of(job, rank)
    return _slow(("host_cpu", "host"), where, "host", starving(job, rng, 0.7, 3.0))


def misbound(job: Job, rng: Rng) -> Trouble:
    """Bind half of a host's ranks to the far socket's cores and memory."""
    ranks, _ = _host_of(job, _one(job, rng))
    where = ranks[: max(1, len(ranks) // 2)], ""
    factor = starving(job, rng, 0.5, 1.8)
    return _slow(("numa", "host"), where, "host", factor, also={"loader": 1.6})


def quota(job: Job, rng: Rng) -> Trouble:
    """Throttle a container: its threads stand still for the rest of each 100 ms period."""
    pause_s = float(rng.uniform(0.02, 0.09))
    return _stops(
        ("cpu_quota", "host"),
        _host_of(job, _one(job, rng)),
        pause_s=pause_s,
        factor=1 + pause_s / 0.1,
        share=float(rng.uniform(0.3, 0.8)),
        burst_passes=3.0,
    )


def _stops_once(what: tuple[str, str], where: Where, pause_s: float, times: float) -> Trouble:
    """Return a trouble that stops hosts for a while, for some passes of all."""
    return _stops(what, where, pause_s=pause_s, share=times, burst_passes=1.0)


def agent(job: Job, rng: Rng) -> Trouble:
    """Let a monitoring agent stop a host's threads now and then."""
    where, pause_s = _host_of(job, _one(job, rng)), float(rng.uniform(0.1, 0.6))
    times = float(rng.uniform(0.15, 0.6)) / job.num_passes
    return _stops_once(("agent", "host"), where, pause_s, times)


def memory_pressure(job: Job, rng: Rng) -> Trouble:
    """Let a host reclaim pages: launches and reads are slow while it does."""
    return _slow(
        ("host_memory", "host"),
        _host_of(job, _one(job, rng)),
        "host",
        starving(job, rng, 0.8, 3.0),
        also={"loader": 3.0},
        share=float(rng.uniform(0.3, 0.8)),
        burst_passes=6.0,
    )


def storage(job: Job, rng: Rng) -> Trouble:
    """Read from a slow mount on one host."""
    factor = max(1.5, _log_uniform(rng, 1.4, 6) / job.loader_share)
    return _slow(("storage", "loader"), _host_of(job, _reader(job, rng)), "loader", factor)


def _reader(job: Job, rng: Rng) -> int:
    """Return a rank that reads batches: those of the first and the last stage do."""
    last = (job.layout.pp - 1) * job.lanes
    first = int(rng.integers(job.lanes)) // job.layout.tp * job.layout.tp
    return first if rng.random() < 0.7 else last + first


def dead_workers(job: Job, rng: Rng) -> Trouble:
    """Leave one rank with one of its workers that read."""
    factor = max(1.5, _log_uniform(rng, 1.3, 5) / job.loader_share)
    return _slow(("loader", "loader"), ((_reader(job, rng),), ""), "loader", factor)


def collector(job: Job, rng: Rng) -> Trouble:
    """Collect garbage on one rank: full collections of a large heap take tenths of a second."""
    where, pause_s = ((_one(job, rng),), ""), float(rng.uniform(0.08, 0.5))
    times = float(rng.uniform(0.2, 0.9)) / job.num_passes
    return _stops_once(("gc", "gc"), where, pause_s, times)


def logging(job: Job, rng: Rng) -> Trouble:
    """Log metrics on the first or the last rank, which holds its thread up.

    No trace tells a logger from any other process that takes the core, so the rank may be named.
    """
    rank = 0 if rng.random() < 0.5 else job.num_ranks - 1
    pause_s = float(rng.uniform(0.05, 0.4))
    return _stops_once(("logging", "host"), ((rank,), ""), pause_s, 1.0 / job.num_passes)


def checkpoint(job: Job, rng: Rng) -> Trouble:
    """Write a checkpoint beside training: its threads take cores of one host for a while."""
    factor = starving(job, rng, 0.8, 2.5)
    numbers = job.tracing.iterations
    begin = int(rng.integers(0, max(1, len(numbers) // 2)))
    end = min(len(numbers) - 1, begin + max(1, len(numbers) // 3))
    what, where = ("async_checkpoint", "host"), _host_of(job, 0)
    return _slow(what, where, "host", factor, first=numbers[begin], last=numbers[end])


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
    where: Where = ((rank,), "")
    if what == "loader":
        job = replace(job, loader_share=0.05, loader_depth=4)
        return job, (_slow(("loader", "loader"), where, "loader", 2.5),)
    if what == "host":
        job = replace(job, host_ahead=0.4 * min(1.0, job.host_ahead))
        return job, (_slow(("host_cpu", "host"), where, "host", 1.25),)
    return job, (_slow(("nvlink", "link"), where, "nvlink", 1.03),)
