"""Draw a fault of each kind into a job: where, how bad, since when, in what bursts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from benchmarks.grounds.quarry.estimates import waits_for_cards, waits_for_threads
from benchmarks.grounds.quarry.faults import Fault
from benchmarks.grounds.quarry.jobs import Job
from benchmarks.grounds.quarry.machines import Rng, happens, log_uniform


def ranks_of_host(job: Job, host: int) -> tuple[int, ...]:
    """Return the ranks of a job on one host."""
    return tuple(r for r in range(job.num_ranks) if job.machines.host_of(r) == host)


def talks_afar(job: Job) -> bool:
    """Tell whether anything goes from host to host."""
    return job.num_hosts > 1


def has_hosts(job: Job) -> bool:
    """Tell whether a host has others to be compared with, none of them a splinter."""
    rest = job.num_ranks % job.machines.gpus_per_host
    return job.num_hosts > 1 and (rest == 0 or rest > 1)


def is_long(job: Job) -> bool:
    """Tell whether there is time for something to change."""
    return job.num_iterations >= 8


def neighbours_by_nvlink(job: Job, rank: int) -> set[int]:
    """Return the ranks of its host that a rank ever talks to."""
    layout = job.layout
    axes = ("tp", "cp", "dp", "ep")
    met = {peer for axis in axes for peer in layout.group(rank, axis)}
    line = layout.group(rank, "pp")
    at = line.index(rank)
    met |= {line[at - 1], line[(at + 1) % len(line)]}
    here = job.machines.host_of(rank)
    return {peer for peer in met if job.machines.host_of(peer) == here} - {rank}


def loading_ranks(job: Job) -> tuple[int, ...]:
    """Return the ranks that have a loader."""
    places = [(rank, job.layout.coordinates(rank)) for rank in range(job.num_ranks)]
    return tuple(
        rank
        for rank, place in places
        if place.pp in {0, job.layout.pp - 1} and (job.loads_everywhere or place.tp == 0)
    )


def _one(rng: Rng, ranks: Iterable[int]) -> int:
    return int(rng.choice(sorted(ranks)))


def _excess(rng: Rng, low: float, high: float) -> float:
    """Return a factor of 1 + `low` to 1 + `high`, in one case of five a smaller one."""
    if happens(rng, 0.2):
        return 1 + log_uniform(rng, low / 5, low)
    return 1 + rng.uniform(low, high)


def _burst(rng: Rng, job: Job, share: float, low: float, high: float) -> float:
    """Return a mean length of bursts, in iterations, of which two or more fit into the trace."""
    return min(log_uniform(rng, low, high), share * job.num_iterations / 2)


def _moment(rng: Rng, job: Job, low: float = 0.2, high: float = 0.75) -> int:
    """Return the number of a traced iteration that is neither the first nor one of the last."""
    turns = len(job.iterations)
    turn = int(rng.uniform(low, high) * turns)
    return job.iterations[min(max(turn, 1), turns - 2)]


def _timed(rng: Rng, job: Job, fault: Fault) -> Fault:
    """Let a fault begin within the trace now and then, or end there."""
    if is_long(job) and happens(rng, 0.2):
        return replace(fault, first_iteration=_moment(rng, job))
    if is_long(job) and happens(rng, 0.08):
        return replace(fault, last_iteration=_moment(rng, job, 0.5, 0.9))
    return fault


def _of_rank(kind: str, low: float, high: float) -> Callable[[Rng, Job], Fault]:
    def drawn(rng: Rng, job: Job) -> Fault:
        rank = _one(rng, range(job.num_ranks))
        factor = _excess(rng, low, high)
        return _timed(rng, job, Fault(kind=kind, ranks=(rank,), nameable=(rank,), factor=factor))

    return drawn


def _late_clock(rng: Rng, job: Job) -> Fault:
    fault = _of_rank("gpu_clock", 0.1, 0.6)(rng, job)
    return replace(fault, first_iteration=_moment(rng, job), last_iteration=0)


def _in_bursts(
    kind: str, factors: tuple[float, float], shares: tuple[float, float],
    lengths: tuple[float, float],
) -> Callable[[Rng, Job], Fault]:  # fmt: skip
    def drawn(rng: Rng, job: Job) -> Fault:
        rank = _one(rng, range(job.num_ranks))
        return Fault(
            kind=kind,
            ranks=(rank,),
            nameable=(rank,),
            factor=1 + rng.uniform(*factors),
            share=(share := rng.uniform(*shares)),
            burst_iterations=_burst(rng, job, share, *lengths),
        )

    return drawn


def _thermal_ramp(rng: Rng, job: Job) -> Fault:
    fault = _of_rank("thermal_ramp", 0.1, 0.6)(rng, job)
    span = job.iterations[-1] - job.iterations[0] + 1
    first = job.iterations[int(rng.uniform(0.0, 0.4) * len(job.iterations))]
    ramp = span * rng.uniform(0.3, 1.0)
    return replace(fault, first_iteration=first, last_iteration=0, ramp_iterations=ramp)


def _fan(rng: Rng, job: Job) -> Fault:
    ranks = ranks_of_host(job, int(rng.integers(job.num_hosts)))
    worst = _excess(rng, 0.1, 0.6) - 1
    factors = tuple(1 + worst * rng.uniform(0.15, 1.0) for _ in ranks)
    fault = Fault(
        kind="fan", ranks=ranks, nameable=ranks, factor=max(factors), factors=factors,
        hosts=(job.machines.host_of(ranks[0]),),
    )  # fmt: skip
    return _timed(rng, job, fault)


def _nvlink(rng: Rng, job: Job) -> Fault:
    """Slow one GPU's NVLink; its only partner is as good a name, for they share their link."""
    users = [rank for rank in range(job.num_ranks) if neighbours_by_nvlink(job, rank)]
    rank = _one(rng, users)
    partners = neighbours_by_nvlink(job, rank)
    nameable = (rank, *partners) if len(partners) == 1 else (rank,)
    factor = 1 + log_uniform(rng, 0.5, 15)
    fault = Fault(kind="nvlink", ranks=(rank,), nameable=tuple(sorted(nameable)), factor=factor)
    return _timed(rng, job, fault)


def _cards(rng: Rng, job: Job, kind: str, card: int) -> Fault:
    """Slow cards of a host. Of two hosts, the one that it talks to is at the same link's end."""
    host = int(rng.integers(job.num_hosts))
    ends = range(2) if job.num_hosts == 2 else (host,)
    machines = job.machines

    def using(hosts: Iterable[int]) -> tuple[int, ...]:
        ranks = (rank for each in hosts for rank in ranks_of_host(job, each))
        return tuple(rank for rank in ranks if card in {-1, machines.card_of(rank)})

    return Fault(
        kind=kind, ranks=using((host,)), nameable=using(ends), hosts=(host,), card=card,
        factor=1 + log_uniform(rng, 0.2, 7),
    )  # fmt: skip


def _nic(rng: Rng, job: Job) -> Fault:
    return _timed(rng, job, _cards(rng, job, "nic", -1))


def _rail(rng: Rng, job: Job) -> Fault:
    used = min(job.num_ranks % job.machines.gpus_per_host or 8, job.machines.gpus_per_host)
    cards = sorted({job.machines.card_of(rank) for rank in range(used)})
    return _timed(rng, job, _cards(rng, job, "rail", _one(rng, cards)))


def _nic_flap(rng: Rng, job: Job) -> Fault:
    fault, share = _cards(rng, job, "nic_flap", -1), log_uniform(rng, 0.05, 0.5)
    length, factor = _burst(rng, job, share, 0.02, 2), 1 + log_uniform(rng, 2, 25)
    return replace(fault, factor=factor, share=share, burst_iterations=length)


def _switch_port(rng: Rng, job: Job) -> Fault:
    one = int(rng.integers(job.num_hosts))
    ends = tuple(sorted((one, (one + 1) % job.num_hosts)))
    ranks = tuple(rank for host in ends for rank in ranks_of_host(job, host))
    factor = 1 + log_uniform(rng, 0.3, 9)
    fault = Fault(kind="switch_port", ranks=ranks, nameable=ranks, hosts=ends, factor=factor)
    return _timed(rng, job, fault)


def _of_host(kind: str, low: float, high: float) -> Callable[[Rng, Job], Fault]:
    def drawn(rng: Rng, job: Job) -> Fault:
        ranks = ranks_of_host(job, int(rng.integers(job.num_hosts)))
        hosts = (job.machines.host_of(ranks[0]),)
        factor = _excess(rng, low, high)
        fault = Fault(kind=kind, ranks=ranks, nameable=ranks, hosts=hosts, factor=factor)
        return _timed(rng, job, fault)

    return drawn


def _host_memory(rng: Rng, job: Job) -> Fault:
    fault = _of_host("host_memory", 0.1, 0.6)(rng, job)
    share, length = log_uniform(rng, 0.03, 0.4), log_uniform(rng, 0.02, 0.25)
    return replace(fault, share=share, burst_iterations=length)


def _storage(rng: Rng, job: Job) -> Fault:
    loaders = set(loading_ranks(job))
    whom = job.machines.host_of(_one(rng, loaders))
    ranks = ranks_of_host(job, whom)
    fault = Fault(
        kind="storage", ranks=tuple(sorted(loaders & set(ranks))), nameable=ranks, hosts=(whom,),
        factor=1 + log_uniform(rng, 1, 25),
    )  # fmt: skip
    return _timed(rng, job, fault)


def _loader(rng: Rng, job: Job) -> Fault:
    rank = _one(rng, loading_ranks(job))
    factor = 1 + log_uniform(rng, 1, 25)
    return _timed(rng, job, Fault(kind="loader", ranks=(rank,), nameable=(rank,), factor=factor))


def _gc(rng: Rng, job: Job) -> Fault:
    rank = _one(rng, range(job.num_ranks))
    share, length = log_uniform(rng, 0.05, 0.4), log_uniform(rng, 0.03, 0.4)
    return Fault(
        kind="gc", ranks=(rank,), nameable=(rank,), factor=1 / (1 - share), share=share,
        burst_iterations=length,
    )  # fmt: skip


def _heavy_stage(rng: Rng, job: Job) -> Fault:
    stage = job.layout.pp - 1 if happens(rng, 0.7) else int(rng.integers(job.layout.pp))
    ranks = tuple(r for r in range(job.num_ranks) if job.layout.coordinates(r).pp == stage)
    factor = _excess(rng, 0.1, 0.8)
    return Fault(kind="heavy_stage", ranks=ranks, nameable=ranks, factor=factor)


def _long_sequences(rng: Rng, job: Job) -> Fault:
    replica = int(rng.integers(job.layout.dp))
    ranks = tuple(r for r in range(job.num_ranks) if job.layout.coordinates(r).dp == replica)
    high = 3.0 if job.lengths == "packed" else 0.6
    factor = _excess(rng, 0.1, high)
    return Fault(kind="long_sequences", ranks=ranks, nameable=ranks, factor=factor)


def _hot_expert(rng: Rng, job: Job) -> Fault:
    place = int(rng.integers(job.layout.ep))
    ranks = tuple(r for r in range(job.num_ranks) if job.layout.coordinates(r).ep == place)
    fault = Fault(kind="hot_expert", ranks=ranks, nameable=ranks, factor=_excess(rng, 0.15, 1.5))
    return _timed(rng, job, fault)


DRAWN: dict[str, Callable[[Rng, Job], Fault]] = {
    "gpu_clock": _of_rank("gpu_clock", 0.1, 0.6),
    "late_clock": _late_clock,
    "throttling": _in_bursts("throttling", (0.1, 0.6), (0.05, 0.5), (0.05, 5)),
    "thermal_ramp": _thermal_ramp,
    "hbm": _of_rank("hbm", 0.5, 4.0),
    "row_remap": _in_bursts("row_remap", (0.02, 0.1), (0.02, 0.3), (0.003, 0.06)),
    "contention": _in_bursts("contention", (0.3, 2.0), (0.2, 0.95), (0.01, 2)),
    "fan": _fan,
    "nvlink": _nvlink,
    "nic": _nic,
    "rail": _rail,
    "nic_flap": _nic_flap,
    "switch_port": _switch_port,
    "host_cpu": _of_host("host_cpu", 0.2, 2.5),
    "host_thread": _of_rank("host_thread", 0.2, 2.5),
    "host_memory": _host_memory,
    "storage": _storage,
    "loader": _loader,
    "gc": _gc,
    "heavy_stage": _heavy_stage,
    "long_sequences": _long_sequences,
    "hot_expert": _hot_expert,
}
"""How a fault of each kind is drawn into a job."""

FITS: dict[str, Callable[[Job], bool]] = {
    "late_clock": is_long,
    "thermal_ramp": is_long,
    "fan": has_hosts,
    "nvlink": lambda job: any(neighbours_by_nvlink(job, r) for r in range(job.num_ranks)),
    "nic": talks_afar,
    "rail": lambda job: talks_afar(job) and job.machines.cards_per_host > 1,
    "nic_flap": talks_afar,
    "switch_port": lambda job: job.num_hosts > 2,
    "host_cpu": has_hosts,
    "host_memory": has_hosts,
    "storage": has_hosts,
    "gc": lambda job: job.granularity == "full",
    "heavy_stage": lambda job: job.layout.pp > 1,
    "long_sequences": lambda job: job.layout.dp > 1 and job.lengths != "fixed",
    "hot_expert": lambda job: job.layout.ep > 1,
}
"""What a job must have for a fault of a kind to be felt at all."""

FELT: dict[str, Callable[[Job], bool]] = {
    "nic": waits_for_cards,
    "rail": waits_for_cards,
    "nic_flap": waits_for_cards,
    "switch_port": waits_for_cards,
    "host_cpu": waits_for_threads,
    "host_thread": waits_for_threads,
    "host_memory": waits_for_threads,
    "gc": waits_for_threads,
    "storage": lambda job: job.load_ratio > 0.12,
    "loader": lambda job: job.load_ratio > 0.12,
}
"""What a job must have for such a fault to be likely to cost something."""
