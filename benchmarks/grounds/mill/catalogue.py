"""List the families of cases, how many a draw has of each, and how a case of each is drawn.

A good half of all jobs are sound; most of these have something that looks like a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
from numpy.random import Generator

from benchmarks.grounds.ground import Case, Planted
from benchmarks.grounds.mill.files import host_name
from benchmarks.grounds.mill.job import Job, draw, log_uniform
from benchmarks.grounds.mill.troubles import Fault

GROUND = "mill"
_PASSES_A_MICROBATCH = 3.3  # forwards that a microbatch lasts at least
_FEWEST_BURSTS = 2.5


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """State what is simulated for one case."""

    job: Job
    plain: Job  # the same job without what makes it look faulty
    faults: tuple[Fault, ...] = ()
    likeness: Planted | None = None  # what the job itself does and may be told of


Faults = Callable[[Job, Generator], tuple[Fault, ...]]
Altered = Callable[[Job, Generator], Job]
Wants = Callable[[Job], bool]


def _any(job: Job) -> bool:
    return True


def _same(job: Job, rng: Generator) -> Job:
    return job


def _spans_hosts(job: Job) -> bool:
    """Tell whether enough of an iteration is communication between hosts to be worth slowing."""
    return job.num_hosts > 1 and job.computing_share() < 0.93


def _has_full_hosts(job: Job) -> bool:
    return job.num_hosts > 1 and job.gpus_per_host > 1


def _rank(job: Job, rng: Generator) -> tuple[int, ...]:
    return (int(rng.integers(job.num_ranks)),)


def _host(job: Job, rng: Generator) -> tuple[int, tuple[int, ...]]:
    host = int(rng.integers(job.num_hosts))
    return host, job.ranks_of_host(host)


def _middle(job: Job, rng: Generator) -> int:
    numbers = job.iterations
    return numbers[int(len(numbers) * rng.uniform(0.3, 0.7))]


def _burst_s(job: Job, rng: Generator, share: float, low: float, high: float) -> float:
    """Return how long bursts last, in iterations; short enough for some to come."""
    most = len(job.iterations) * share / _FEWEST_BURSTS
    return job.nominal_s() * min(log_uniform(rng, low, high), most)


def _waited_for(job: Job) -> float:
    """Return from which share of a pass on a batch is waited for."""
    return _PASSES_A_MICROBATCH * max(1.0, job.launch_share()) / job.computing_share()


# faults of devices


def _gpu_clock(job: Job, rng: Generator) -> tuple[Fault, ...]:
    factor = max(1 + log_uniform(rng, 0.03, 1.0), 1 + 1.2 * job.chip_spread)
    return (_device(job, rng, "gpu_clock", factor),)


def _device(job: Job, rng: Generator, kind: str, factor: float, **more: object) -> Fault:
    chosen: dict[str, object] = {"ranks": _rank(job, rng), "rates": ("clock",)}
    chosen |= {"seed": int(rng.integers(1 << 31))} | more
    return Fault(kind=kind, cause="compute", factor=factor, **chosen)  # type: ignore[arg-type]


def _throttling(job: Job, rng: Generator) -> tuple[Fault, ...]:
    share = float(np.clip(rng.normal(0.2, 0.07), 0.06, 0.5))
    burst_s = _burst_s(job, rng, share, 0.1, 6)
    factor = 1 + log_uniform(rng, 0.15, 1.0)
    return (_device(job, rng, "throttling", factor, share=share, burst_s=burst_s),)


def _throttles_from(job: Job, rng: Generator) -> tuple[Fault, ...]:
    factor = 1 + log_uniform(rng, 0.06, 1.0)
    return (_device(job, rng, "throttling", factor, first=_middle(job, rng)),)


def _throttled_until(job: Job, rng: Generator) -> tuple[Fault, ...]:
    factor = 1 + log_uniform(rng, 0.08, 1.0)
    return (_device(job, rng, "throttling", factor, last=_middle(job, rng)),)


def _hbm(job: Job, rng: Generator) -> tuple[Fault, ...]:
    return (_device(job, rng, "hbm", log_uniform(rng, 1.4, 5.0), rates=("memory",)),)


def _ecc(job: Job, rng: Generator) -> tuple[Fault, ...]:
    share = log_uniform(rng, 0.03, 0.25)
    more = {"share": share, "burst_s": _burst_s(job, rng, share, 0.01, 0.6)}
    return (_device(job, rng, "ecc", 1 / (1 - share), stops=True, **more),)


def _host_gpus(job: Job, rng: Generator) -> tuple[Fault, ...]:
    host, ranks = _host(job, rng)
    factor = 1 + log_uniform(rng, 0.06, 1.2)
    return (_device(job, rng, "host_gpus", factor, ranks=ranks, host=host),)


# faults of hosts


def _feels_hosts(job: Job) -> bool:
    return job.launch_share() > 0.08


def _of_host(job: Job, rng: Generator, kind: str, **more: object) -> tuple[Fault, ...]:
    host, ranks = _host(job, rng)
    chosen: dict[str, object] = {"ranks": ranks, "host": host, "rates": ("host", "loader")}
    chosen |= {"factor": 1.0, "seed": int(rng.integers(1 << 31))} | more
    return (Fault(kind=kind, cause="host", **chosen),)  # type: ignore[arg-type]


def _launch_factor(job: Job, rng: Generator) -> float:
    return max(1.4, log_uniform(rng, 1.05, 4.0) / min(job.launch_share(), 1.0))


def _host_cpu(job: Job, rng: Generator) -> tuple[Fault, ...]:
    return _of_host(job, rng, "host_cpu", factor=_launch_factor(job, rng))


def _cpu_quota(job: Job, rng: Generator) -> tuple[Fault, ...]:
    share = rng.uniform(0.3, 0.85)
    more = {"share": share, "burst_s": 0.1 * share, "is_periodic": True, "stops": True}
    return _of_host(job, rng, "cpu_quota", factor=1 / (1 - share), **more)


def _pinned(job: Job, rng: Generator) -> tuple[Fault, ...]:
    factor = 1.2 * _launch_factor(job, rng)
    more = {"ranks": _rank(job, rng), "host": -1, "rates": ("host",)}
    return _of_host(job, rng, "pinned", factor=factor, **more)


def _host_memory(job: Job, rng: Generator) -> tuple[Fault, ...]:
    share = rng.uniform(0.06, 0.4)
    more = {"share": share, "burst_s": _burst_s(job, rng, share, 0.02, 0.5), "stops": True}
    return _of_host(job, rng, "host_memory", factor=1 / (1 - share), **more)


def _loading(job: Job, rng: Generator) -> int:
    """Return a rank that loads batches, of the first stage."""
    places = [job.layout.coordinates(rank) for rank in range(job.num_ranks)]
    ranks = [rank for rank, place in enumerate(places) if not place.tp and not place.pp]
    return int(rng.choice(ranks))


def _loader(job: Job, rng: Generator, **more: object) -> tuple[Fault, ...]:
    factor = _waited_for(job) * log_uniform(rng, 1.0, 2.5) / job.batch_share
    chosen: dict[str, object] = {"ranks": (_loading(job, rng),), "factor": factor}
    chosen |= {"seed": int(rng.integers(1 << 31))} | more
    return (Fault(kind="loader", cause="loader", rates=("loader",), **chosen),)  # type: ignore[arg-type]


def _host_loader(job: Job, rng: Generator) -> tuple[Fault, ...]:
    host = job.host_of(_loading(job, rng))
    return _loader(job, rng, ranks=job.ranks_of_host(host), host=host)


def _storage(job: Job, rng: Generator) -> tuple[Fault, ...]:
    share = rng.uniform(0.15, 0.5)
    more = {"share": share, "burst_s": _burst_s(job, rng, share, 0.5, 5)}
    if rng.random() < 0.5:
        return _loader(job, rng, **more)
    host = job.host_of(_loading(job, rng))
    return _loader(job, rng, ranks=job.ranks_of_host(host), host=host, **more)


def _collector(job: Job, rng: Generator) -> tuple[Fault, ...]:
    pause_s = job.nominal_s() * log_uniform(rng, 0.1, 0.7)
    every = job.num_turns() / job.layout.pp * log_uniform(rng, 0.4, 2.5)
    one = Fault(
        kind="gc", cause="gc", ranks=_rank(job, rng), factor=1.0, rates=(),
        pause_s=pause_s, pause_every=every,
    )  # fmt: skip
    return (one,)


# faults of links


def _link(job: Job, rng: Generator, kind: str, **more: object) -> tuple[Fault, ...]:
    host, ranks = _host(job, rng)
    chosen: dict[str, object] = {"ranks": ranks, "host": host, "rates": ("nic",)}
    chosen |= {"seed": int(rng.integers(1 << 31))} | more
    return (Fault(kind=kind, cause="link", **chosen),)  # type: ignore[arg-type]


def _nic(job: Job, rng: Generator) -> tuple[Fault, ...]:
    return _link(job, rng, "nic", factor=float(rng.choice((1.5, 2.0, 2.0, 4.0, 4.0, 10.0))))


def _of_nic(job: Job, rng: Generator) -> tuple[int, ...]:
    nic = job.nic_of(int(rng.integers(job.num_ranks)))
    return tuple(rank for rank in range(job.num_ranks) if job.nic_of(rank) == nic)


def _rail(job: Job, rng: Generator) -> tuple[Fault, ...]:
    factor = float(rng.choice((2.0, 4.0, 8.0)))
    return _link(job, rng, "rail", ranks=_of_nic(job, rng), host=-1, factor=factor)


def _nvlink(job: Job, rng: Generator) -> tuple[Fault, ...]:
    more = {"ranks": _rank(job, rng), "host": -1, "rates": ("nvlink",)}
    return _link(job, rng, "nvlink", factor=log_uniform(rng, 2.0, 12.0), **more)


def _flapping(job: Job, rng: Generator) -> tuple[Fault, ...]:
    share = rng.uniform(0.1, 0.5)
    more = {
        "share": share,
        "burst_s": min(log_uniform(rng, 0.05, 1.5), _burst_s(job, rng, share, 1, 3)),
    }
    whole = {} if rng.random() < 0.5 else {"ranks": _of_nic(job, rng), "host": -1}
    return _link(job, rng, "flapping", factor=log_uniform(rng, 4, 40), **more, **whole)


def _two(job: Job, rng: Generator) -> tuple[Fault, ...]:
    draws = (_gpu_clock, _throttling, _host_gpus, _loader, _pinned, _nic)
    while True:
        first, second = rng.choice(len(draws), 2, replace=False)
        found = draws[first](job, rng) + draws[second](job, rng)
        if not set(found[0].ranks) & set(found[1].ranks):
            return found


def _none(job: Job, rng: Generator) -> tuple[Fault, ...]:
    return ()


# what sound jobs do


def _longer_replica(job: Job, rng: Generator) -> Job:
    replica, spread = int(rng.integers(job.layout.dp)), log_uniform(rng, 0.03, 0.3)
    return replace(job, lengths="long", length_spread=spread, long_replica=replica)


def _uneven(job: Job, rng: Generator) -> Job:
    return replace(job, lengths="uneven", length_spread=log_uniform(rng, 0.05, 0.35))


def _packed(job: Job, rng: Generator) -> Job:
    return replace(job, lengths="packed", length_spread=log_uniform(rng, 0.1, 0.5))


def _hot(job: Job, rng: Generator) -> Job:
    place, more = int(rng.integers(job.layout.ep)), log_uniform(rng, 0.15, 1.5)
    return replace(job, hot_expert=more, hot_place=place)


def _moving(job: Job, rng: Generator) -> Job:
    return replace(_hot(job, rng), hot_moves=True)


def _heavy_stage(job: Job, rng: Generator) -> Job:
    pp = job.layout.pp
    stage = int(rng.choice((0, pp - 1, int(rng.integers(pp)))))
    if rng.random() < 0.5:
        chunks = list(job.chunks)
        chunks[stage] = chunks[stage] + chunks[0][:1]
        return replace(job, chunks=tuple(chunks))
    extra = [1.0] * pp
    extra[stage] = 1 + log_uniform(rng, 0.08, 0.7)
    return replace(job, stage_extra=tuple(extra))


def _hybrid(job: Job, rng: Generator) -> Job:
    mix = [tuple(str(rng.choice(("d", "m", "m"))) for _ in chunk) for chunk in job.chunks]
    return replace(job, chunks=tuple(mix))


def _host_bound(job: Job, rng: Generator) -> Job:
    return replace(job, launch_s=job.launch_s * log_uniform(rng, 1.1, 3.0) / job.launch_share())


def _congested(job: Job, rng: Generator) -> Job:
    more, noise = log_uniform(rng, 1.5, 5), rng.uniform(0.1, 0.4)
    return replace(job, congestion=more, link_noise=noise, tenants=rng.uniform(0.05, 0.3))


def _slow_storage(job: Job, rng: Generator) -> Job:
    if rng.random() < 0.5:
        return replace(job, storage_hiccups=rng.uniform(0.02, 0.15), hiccup=rng.uniform(20, 60))
    return replace(job, batch_share=_waited_for(job) * log_uniform(rng, 1.0, 2.0))


def _collectors(job: Job, rng: Generator) -> Job:
    every = job.num_turns() / job.layout.pp * log_uniform(rng, 0.5, 3)
    pause_s = job.nominal_s() * log_uniform(rng, 0.03, 0.3)
    return replace(job, collects_every=every, collection_s=pause_s)


def _rank_0(job: Job, rng: Generator) -> Job:
    log_s, save_s = (job.nominal_s() * log_uniform(rng, *it) for it in ((0.02, 0.3), (0.3, 3)))
    every = int(rng.integers(2, 11))
    return replace(job, logger=0, log_s=log_s, saves_every=every, save_s=save_s, saves_alone=True)


def _last_rank(job: Job, rng: Generator) -> Job:
    log_s = job.nominal_s() * log_uniform(rng, 0.02, 0.3)
    return replace(job, logger=job.num_ranks - 1, log_s=log_s)


def _warm_up(job: Job, rng: Generator) -> Job:
    return replace(job, first_iteration=1, warm_up=log_uniform(rng, 4, 30))


def _growth(job: Job, rng: Generator) -> Job:
    return replace(
        job, growth=int(rng.integers(1, 4)) * (job.layout.pp if job.layout.vpp > 1 else 1)
    )


def _unlike_chips(job: Job, rng: Generator) -> Job:
    return replace(job, chip_spread=rng.uniform(0.03, 0.05), clock_tells=bool(rng.random() < 0.3))


def _jitter(job: Job, rng: Generator) -> Job:
    return replace(
        job,
        host_noise=rng.uniform(0.3, 0.6),
        stalls_s=log_uniform(rng, 1e-3, 8e-3),
        stall_share=log_uniform(rng, 1e-3, 1e-2),
        unlike_hosts=rng.uniform(0.3, 0.9),
    )


def _pipeline(job: Job) -> bool:
    return job.layout.pp > 1


def _routed(job: Job) -> bool:
    return job.has_experts and job.layout.ep > 1


def _replicas(job: Job) -> bool:
    return job.layout.dp > 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """State how many cases a family has and how they are drawn."""

    count: int
    faults: Faults = _none
    altered: Altered = _same
    wants: Wants = _any
    told: tuple[str, str] = ("", "")  # kind and cause of what the job does


FAMILIES = {
    "gpu_clock": Family(count=18, faults=_gpu_clock),
    "throttling in bursts": Family(count=10, faults=_throttling),
    "throttling from an iteration": Family(count=6, faults=_throttles_from),
    "throttling that ended": Family(count=4, faults=_throttled_until),
    "hbm": Family(count=5, faults=_hbm),
    "ecc": Family(count=5, faults=_ecc),
    "host_gpus": Family(count=6, faults=_host_gpus, wants=_has_full_hosts),
    "host_cpu": Family(
        count=6, faults=_host_cpu, wants=lambda it: it.num_hosts > 1 and _feels_hosts(it)
    ),
    "cpu_quota": Family(
        count=5, faults=_cpu_quota, wants=lambda it: it.num_hosts > 1 and it.launch_share() > 0.25
    ),
    "pinned": Family(count=5, faults=_pinned, wants=_feels_hosts),
    "host_memory": Family(
        count=4, faults=_host_memory, wants=lambda it: it.num_hosts > 1 and _feels_hosts(it)
    ),
    "loader": Family(count=5, faults=_loader),
    "host_loader": Family(count=4, faults=_host_loader, wants=_has_full_hosts),
    "storage": Family(count=3, faults=_storage, wants=_has_full_hosts),
    "gc": Family(count=5, faults=_collector),
    "nic": Family(count=8, faults=_nic, wants=_spans_hosts),
    "rail": Family(
        count=5, faults=_rail, wants=lambda it: _spans_hosts(it) and it.num_nics > 1
    ),
    "nvlink": Family(
        count=6, faults=_nvlink, wants=lambda it: it.gpus_per_host > 1 and it.layout.tp > 1
    ),
    "flapping": Family(count=4, faults=_flapping, wants=_spans_hosts),
    "two faults": Family(
        count=6, faults=_two,
        wants=lambda it: _spans_hosts(it) and it.num_hosts > 2 and _feels_hosts(it),
    ),
    "healthy": Family(count=34),
    "look_alike: longer replica": Family(
        count=8, altered=_longer_replica, wants=_replicas,
        told=("long_sequences", "sequence_imbalance"),
    ),
    "look_alike: uneven sequences": Family(
        count=8, altered=_uneven, wants=_replicas, told=("long_sequences", "sequence_imbalance")
    ),
    "look_alike: packed documents": Family(count=4, altered=_packed),
    "look_alike: hot expert": Family(
        count=6, altered=_hot, wants=_routed, told=("hot_expert", "sequence_imbalance")
    ),
    "look_alike: moving hot expert": Family(
        count=5, altered=_moving, wants=_routed, told=("hot_expert", "sequence_imbalance")
    ),
    "look_alike: heavy stage": Family(
        count=6, altered=_heavy_stage, wants=_pipeline, told=("heavy_stage", "stage_imbalance")
    ),
    "look_alike: hybrid model": Family(
        count=5, altered=_hybrid,
        wants=lambda it: it.is_megatron and not it.has_experts and sum(map(len, it.chunks)) > 3,
    ),
    "look_alike: host-bound": Family(count=6, altered=_host_bound, wants=_feels_hosts),
    "look_alike: congested network": Family(
        count=6, altered=_congested, wants=_spans_hosts, told=("congestion", "link")
    ),
    "look_alike: slow storage": Family(count=5, altered=_slow_storage, told=("storage", "loader")),
    "look_alike: collectors everywhere": Family(
        count=6, altered=_collectors, told=("gc", "gc")
    ),
    "look_alike: rank 0 logs and saves": Family(count=5, altered=_rank_0),
    "look_alike: last rank logs": Family(count=3, altered=_last_rank),
    "look_alike: warm-up": Family(count=4, altered=_warm_up),
    "look_alike: batch growth": Family(
        count=4, altered=_growth, wants=lambda it: it.num_windows > 2 and it.is_megatron
    ),
    "look_alike: unlike chips": Family(count=5, altered=_unlike_chips),
    "look_alike: jittering hosts": Family(count=4, altered=_jitter),
}  # fmt: skip


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw; each is drawn from the seed in its name."""
    for family, each in FAMILIES.items():
        for number in range(each.count):
            seed = crc32(f"{GROUND} {draw} {family} {number}".encode())
            scenario = _scenario(family, seed)
            words = family.replace("look_alike: ", "").replace(" ", "_")
            told = tuple(planted_of(scenario.job, fault) for fault in scenario.faults)
            yield Case(
                ground=GROUND,
                name=f"{words}-r{scenario.job.num_ranks}-s{seed}",
                family=family,
                num_ranks=scenario.job.num_ranks,
                seed=seed,
                draw=draw,
                planted=told + ((scenario.likeness,) if scenario.likeness else ()),
            )


def scenario_of(case: Case) -> Scenario:
    """Return what is simulated for a case."""
    return _scenario(case.family, case.seed)


def planted_of(job: Job, fault: Fault) -> Planted:
    """Return what is told of a fault of a job, without its costs."""
    return fault.planted(host_name(job, max(fault.host, 0)))


def _scenario(family: str, seed: int) -> Scenario:
    rng, each = np.random.default_rng(seed), FAMILIES[family]
    plain, job = draw(rng, seed, each.wants, each.altered)
    faults = each.faults(job, rng)
    likeness = None
    if each.told[0]:
        kind, cause = each.told
        likeness = Planted(kind=kind, cause=cause, owner="job", ranks=_concerned(family, job))
    return Scenario(job=job, plain=plain, faults=faults, likeness=likeness)


def _concerned(family: str, job: Job) -> tuple[int, ...]:
    """Return the ranks on which one sees what a job does by itself."""
    places = [job.layout.coordinates(rank) for rank in range(job.num_ranks)]
    if "longer replica" in family:
        return tuple(r for r, place in enumerate(places) if place.dp == job.long_replica)
    if family == "look_alike: hot expert":
        return tuple(r for r, place in enumerate(places) if place.ep == job.hot_place)
    if "heavy stage" in family:
        heavy = int(np.argmax(job.stage_extra or [len(it) for it in job.chunks])) % job.layout.pp
        return tuple(r for r, place in enumerate(places) if place.pp == heavy)
    return tuple(range(job.num_ranks))
