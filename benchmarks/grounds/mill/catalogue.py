"""List the families of cases, how many a draw has of each, and how a case of each is drawn.

A good half of all jobs are sound; most of these have something that looks like a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
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
Faults = Callable[[Job, Generator], tuple[Fault, ...]]
Altered = Callable[[Job, Generator], Job]
Wants = Callable[[Job], bool]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """State what is simulated for one case."""

    job: Job
    plain: Job  # the same job without what makes it look faulty
    faults: tuple[Fault, ...] = ()
    likeness: Planted | None = None  # what the job itself does and may be told of


@dataclass(frozen=True, kw_only=True)
class Family:
    """State how many cases a family has and how they are drawn."""

    count: int
    faults: Faults = lambda job, rng: ()
    altered: Altered = lambda job, rng: job
    wants: Wants = lambda job: True
    told: tuple[str, str] = ("", "")  # kind and cause of what the job does


# which jobs


def _spans_hosts(job: Job) -> bool:
    """Tell whether enough of an iteration is communication between hosts to be worth slowing."""
    return job.num_hosts > 1 and job.computing_share() < 0.93


def _has_full_hosts(job: Job) -> bool:
    return job.num_hosts > 1 and job.gpus_per_host > 1


def _feels_hosts(job: Job) -> bool:
    return job.num_hosts > 1 and job.launch_share() > 0.08


def _has_replicas(job: Job) -> bool:
    return job.layout.dp > 1


def _routes(job: Job) -> bool:
    return job.has_experts and job.layout.ep > 1


# what goes wrong


def _fault(job: Job, rng: Generator, kind: str, cause: str, where: str, **more: Any) -> Fault:
    """Return a fault of a random rank, host, NIC, or rank (host) that loads batches."""
    places = [job.layout.coordinates(rank) for rank in range(job.num_ranks)]
    loading = [rank for rank, place in enumerate(places) if not place.tp and not place.pp]
    rank = int(rng.choice(loading if "load" in where else job.num_ranks))
    host = job.host_of(rank) if "host" in where else -1
    ranks: tuple[int, ...] = job.ranks_of_host(host) if host >= 0 else (rank,)
    if where == "nic":
        ranks = tuple(it for it in range(job.num_ranks) if job.nic_of(it) == job.nic_of(rank))
    seed = int(rng.integers(1 << 31))
    return Fault(kind=kind, cause=cause, ranks=ranks, host=host, seed=seed, **more)


def _clock(job: Job, rng: Generator, low: float, high: float, **more: Any) -> Fault:
    """Return a lower clock, throttled where it does not hold all the time."""
    kind = "throttling" if more else "gpu_clock"
    factor = max(1 + log_uniform(rng, low, high), 1 + 1.2 * job.chip_spread)
    return _fault(job, rng, kind, "compute", "rank", rates=("clock",), factor=factor, **more)


def _bursts(job: Job, rng: Generator, share: float, low: float, high: float) -> dict[str, float]:
    """Return bursts that last so many iterations, and not too long for some to come."""
    most = len(job.iterations) * share / _FEWEST_BURSTS
    return {"share": share, "burst_s": job.nominal_s() * min(log_uniform(rng, low, high), most)}


def _throttling(job: Job, rng: Generator) -> Fault:
    share = float(np.clip(rng.normal(0.2, 0.07), 0.06, 0.5))
    return _clock(job, rng, 0.15, 1.0, **_bursts(job, rng, share, 0.1, 6))


def _middle(job: Job, rng: Generator) -> int:
    numbers = job.iterations
    return numbers[int(len(numbers) * rng.uniform(0.3, 0.7))]


def _stopping(
    job: Job, rng: Generator, kind: str, where: str, rates: tuple[str, ...], **bursts: Any
) -> Fault:
    cause, factor = "compute" if "clock" in rates else "host", 1 / (1 - bursts["share"])
    more = {"rates": rates, "factor": factor, "stops": True, **bursts}
    return _fault(job, rng, kind, cause, where, **more)


def _host_gpus(job: Job, rng: Generator) -> Fault:
    factor = 1 + log_uniform(rng, 0.06, 1.2)
    return _fault(job, rng, "host_gpus", "compute", "host", rates=("clock",), factor=factor)


def _launching(job: Job, rng: Generator, kind: str, where: str) -> Fault:
    factor = max(1.4, log_uniform(rng, 1.1, 4.5) / min(job.launch_share(), 1.0))
    rates = ("host", "loader") if where == "host" else ("host",)
    return _fault(job, rng, kind, "host", where, rates=rates, factor=factor)


def _quota(job: Job, rng: Generator) -> Fault:
    share = rng.uniform(0.3, 0.85)
    bursts = {"share": share, "burst_s": 0.1 * share, "is_periodic": True}
    return _stopping(job, rng, "cpu_quota", "host", ("host", "loader"), **bursts)


def _waited_for(job: Job) -> float:
    """Return from which share of a pass on a batch is waited for."""
    return _PASSES_A_MICROBATCH * max(1.0, job.launch_share()) / job.computing_share()


def _loader(job: Job, rng: Generator, where: str, **bursts: Any) -> Fault:
    factor = _waited_for(job) * log_uniform(rng, 1.0, 2.5) / job.batch_share
    return _fault(job, rng, "loader", "loader", where, rates=("loader",), factor=factor, **bursts)


def _collector(job: Job, rng: Generator) -> Fault:
    pause_s = job.nominal_s() * log_uniform(rng, 0.1, 0.7)
    every = job.num_turns() / job.layout.pp * log_uniform(rng, 0.4, 2.5)
    more = {"rates": (), "factor": 1.0, "pause_s": pause_s, "pause_every": every}
    return _fault(job, rng, "gc", "gc", "rank", **more)


def _link(job: Job, rng: Generator, kind: str, where: str, factor: float, **more: Any) -> Fault:
    rates = ("nvlink",) if kind == "nvlink" else ("nic",)
    return _fault(job, rng, kind, "link", where, rates=rates, factor=factor, **more)


def _nic(job: Job, rng: Generator) -> Fault:
    return _link(job, rng, "nic", "host", float(rng.choice((1.5, 2.0, 2.0, 4.0, 4.0, 10.0))))


def _flapping(job: Job, rng: Generator) -> Fault:
    bursts = _bursts(job, rng, rng.uniform(0.1, 0.5), 1, 3)
    bursts["burst_s"] = min(log_uniform(rng, 0.05, 1.5), bursts["burst_s"])
    where = str(rng.choice(("host", "nic")))
    return _link(job, rng, "flapping", where, log_uniform(rng, 4, 40), **bursts)


def _two(job: Job, rng: Generator) -> tuple[Fault, ...]:
    draws: tuple[Callable[[Job, Generator], Fault], ...] = (
        lambda job, rng: _clock(job, rng, 0.06, 1.0),
        _throttling,
        _host_gpus,
        lambda job, rng: _loader(job, rng, "load"),
        lambda job, rng: _launching(job, rng, "pinned", "rank"),
        _nic,
    )
    while True:
        first, second = (draws[at](job, rng) for at in rng.choice(len(draws), 2, replace=False))
        if not set(first.ranks) & set(second.ranks):
            return first, second


# what sound jobs do


def _hot(job: Job, rng: Generator, *, moves: bool) -> Job:
    place, more = int(rng.integers(job.layout.ep)), log_uniform(rng, 0.15, 1.5)
    return replace(job, hot_expert=more, hot_place=place, hot_moves=moves)


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


def _logs(job: Job, rng: Generator, *, is_first: bool) -> Job:
    """Let rank 0 log and save alone, or the last rank log."""
    log_s, save_s = (job.nominal_s() * log_uniform(rng, *it) for it in ((0.02, 0.3), (0.3, 3)))
    if not is_first:
        return replace(job, logger=job.num_ranks - 1, log_s=log_s)
    every = int(rng.integers(2, 11))
    return replace(job, logger=0, log_s=log_s, saves_every=every, save_s=save_s, saves_alone=True)


def _growth(job: Job, rng: Generator) -> Job:
    unit = job.layout.pp if job.layout.vpp > 1 else 1
    return replace(job, growth=int(rng.integers(1, 4)) * unit)


def _jitter(job: Job, rng: Generator) -> Job:
    return replace(
        job,
        host_noise=rng.uniform(0.3, 0.6),
        stalls_s=log_uniform(rng, 1e-3, 8e-3),
        stall_share=log_uniform(rng, 1e-3, 1e-2),
        unlike_hosts=rng.uniform(0.3, 0.9),
    )


_LENGTHS, _EXPERTS = (
    ("long_sequences", "sequence_imbalance"),
    ("hot_expert", "sequence_imbalance"),
)
# fmt: off
FAMILIES = {
    "gpu_clock": Family(count=18, faults=lambda job, rng: (_clock(job, rng, 0.03, 1.0),)),
    "throttling in bursts": Family(count=10, faults=lambda job, rng: (_throttling(job, rng),)),
    "throttling from an iteration": Family(count=6, faults=lambda job, rng: (
        _clock(job, rng, 0.06, 1.0, first=_middle(job, rng)),)),
    "throttling that ended": Family(count=4, faults=lambda job, rng: (
        _clock(job, rng, 0.08, 1.0, last=_middle(job, rng)),)),
    "hbm": Family(count=5, faults=lambda job, rng: (_fault(
        job, rng, "hbm", "compute", "rank", rates=("memory",), factor=log_uniform(rng, 1.4, 5)),)),
    "ecc": Family(count=5, faults=lambda job, rng: (_stopping(
        job, rng, "ecc", "rank", ("clock",),
        **_bursts(job, rng, log_uniform(rng, 0.03, 0.25), 0.01, 0.6)),)),
    "host_gpus": Family(
        count=6, faults=lambda job, rng: (_host_gpus(job, rng),), wants=_has_full_hosts),
    "host_cpu": Family(count=6, wants=_feels_hosts, faults=lambda job, rng: (
        _launching(job, rng, "host_cpu", "host"),)),
    "cpu_quota": Family(count=5, faults=lambda job, rng: (_quota(job, rng),),
        wants=lambda job: job.num_hosts > 1 and job.launch_share() > 0.25),
    "pinned": Family(count=5, wants=_feels_hosts, faults=lambda job, rng: (
        _launching(job, rng, "pinned", "rank"),)),
    "host_memory": Family(count=4, wants=_feels_hosts, faults=lambda job, rng: (_stopping(
        job, rng, "host_memory", "host", ("host", "loader"),
        **_bursts(job, rng, rng.uniform(0.06, 0.4), 0.02, 0.5)),)),
    "loader": Family(count=5, faults=lambda job, rng: (_loader(job, rng, "load"),)),
    "host_loader": Family(count=4, wants=_has_full_hosts, faults=lambda job, rng: (
        _loader(job, rng, "host load"),)),
    "storage": Family(count=3, wants=_has_full_hosts, faults=lambda job, rng: (_loader(
        job, rng, str(rng.choice(("load", "host load"))),
        **_bursts(job, rng, rng.uniform(0.15, 0.5), 0.5, 5)),)),
    "gc": Family(count=5, faults=lambda job, rng: (_collector(job, rng),)),
    "nic": Family(count=8, faults=lambda job, rng: (_nic(job, rng),), wants=_spans_hosts),
    "rail": Family(count=5, wants=lambda job: _spans_hosts(job) and job.num_nics > 1,
        faults=lambda job, rng: (_link(job, rng, "rail", "nic", float(rng.choice((2, 4, 8)))),)),
    "nvlink": Family(count=6, wants=lambda job: job.gpus_per_host > 1 and job.layout.tp > 1,
        faults=lambda job, rng: (_link(job, rng, "nvlink", "rank", log_uniform(rng, 2, 12)),)),
    "flapping": Family(count=4, faults=lambda job, rng: (_flapping(job, rng),), wants=_spans_hosts),
    "two faults": Family(count=6, faults=_two,
        wants=lambda job: _spans_hosts(job) and job.num_hosts > 2 and _feels_hosts(job)),
    "healthy": Family(count=34),
    "look_alike: longer replica": Family(count=8, wants=_has_replicas, told=_LENGTHS,
        altered=lambda job, rng: replace(
            job, lengths="long", length_spread=log_uniform(rng, 0.03, 0.3),
            long_replica=int(rng.integers(job.layout.dp)))),
    "look_alike: uneven sequences": Family(count=8, wants=_has_replicas, told=_LENGTHS,
        altered=lambda job, rng: replace(
            job, lengths="uneven", length_spread=log_uniform(rng, 0.05, 0.35))),
    "look_alike: packed documents": Family(count=4, altered=lambda job, rng: replace(
        job, lengths="packed", length_spread=log_uniform(rng, 0.1, 0.5))),
    "look_alike: hot expert": Family(count=6, wants=_routes, told=_EXPERTS,
        altered=lambda job, rng: _hot(job, rng, moves=False)),
    "look_alike: moving hot expert": Family(count=5, wants=_routes, told=_EXPERTS,
        altered=lambda job, rng: _hot(job, rng, moves=True)),
    "look_alike: heavy stage": Family(count=6, altered=_heavy_stage,
        wants=lambda job: job.layout.pp > 1, told=("heavy_stage", "stage_imbalance")),
    "look_alike: hybrid model": Family(count=5, altered=_hybrid, wants=lambda job: (
        job.is_megatron and not job.has_experts and sum(map(len, job.chunks)) > 3)),
    "look_alike: host-bound": Family(
        count=6, wants=lambda job: job.launch_share() > 0.08, altered=lambda job, rng: replace(
            job, launch_s=job.launch_s * log_uniform(rng, 1.1, 3.0) / job.launch_share())),
    "look_alike: congested network": Family(
        count=6, altered=_congested, wants=_spans_hosts, told=("congestion", "link")),
    "look_alike: slow storage": Family(count=5, altered=_slow_storage, told=("storage", "loader")),
    "look_alike: collectors everywhere": Family(count=6, altered=_collectors, told=("gc", "gc")),
    "look_alike: rank 0 logs and saves": Family(
        count=5, altered=lambda job, rng: _logs(job, rng, is_first=True)),
    "look_alike: last rank logs": Family(
        count=3, altered=lambda job, rng: _logs(job, rng, is_first=False)),
    "look_alike: warm-up": Family(count=4, altered=lambda job, rng: replace(
        job, first_iteration=1, warm_up=log_uniform(rng, 4, 30))),
    "look_alike: batch growth": Family(
        count=4, altered=_growth, wants=lambda job: job.num_windows > 2 and job.is_megatron),
    "look_alike: unlike chips": Family(count=5, altered=lambda job, rng: replace(
        job, chip_spread=rng.uniform(0.03, 0.05))),
    "look_alike: jittering hosts": Family(count=4, altered=_jitter),
}
# fmt: on


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
    plain = replace(plain, collects_every=0.0) if "collectors" in family else plain
    faults, likeness = each.faults(job, rng), None
    if each.told[0]:
        kind, cause = each.told
        likeness = Planted(kind=kind, cause=cause, owner="job", ranks=_concerned(family, job))
    return Scenario(job=job, plain=plain, faults=faults, likeness=likeness)


def _concerned(family: str, job: Job) -> tuple[int, ...]:
    """Return the ranks on which one sees what a job does by itself."""
    heavy = int(np.argmax(job.stage_extra or [len(it) for it in job.chunks])) % job.layout.pp
    axis, wanted = {
        "look_alike: longer replica": ("dp", job.long_replica),
        "look_alike: hot expert": ("ep", job.hot_place),
        "look_alike: heavy stage": ("pp", heavy),
    }.get(family, ("", 0))
    places = [job.layout.coordinates(rank) for rank in range(job.num_ranks)]
    return tuple(r for r, it in enumerate(places) if not axis or getattr(it, axis) == wanted)
