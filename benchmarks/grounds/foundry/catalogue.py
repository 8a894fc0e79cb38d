"""Which cases there are: families of sound jobs, look-alikes and faults, drawn by a draw's seeds.

A link's fault is planted where other traffic of the same ranks can tell whose it is, but for the
family `... in one ring`; what concerns a host, where each of its stages has ranks elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks.grounds.foundry.faults import Fault
from benchmarks.grounds.foundry.hardware import PCIE_BYTES
from benchmarks.grounds.foundry.jobs import Job
from benchmarks.grounds.foundry.menus import (
    ANY,
    CARDED,
    EXPERTS,
    LARGE,
    LINKED,
    REPLICAS,
    RINGS,
    STAGES,
    Luck,
    Menu,
    Sizes,
    job_of,
    one_of,
)
from benchmarks.grounds.ground import Case, Planted

GROUND = "foundry"
Range = tuple[float, float]


@dataclass(frozen=True)
class Scenario:
    """A job, what is at fault in it, and what it would be without its own peculiarity."""

    job: Job
    faults: tuple[Fault, ...] = ()
    own: Planted | None = None  # a cause of the job
    without_own: Job | None = None

    @property
    def planted(self) -> tuple[Planted, ...]:
        """Return the truths, not priced yet."""
        own = (self.own,) if self.own else ()
        return (*(fault.planted() for fault in self.faults), *own)


Make = Callable[[Luck], Scenario]


# -- faults


def faulty(
    kind: str,
    on: str = "rank",
    *,
    factor: Range = (1.0, 1.0),
    share: Range = (1.0, 1.0),
    burst: Range = (1.0, 1.0),
    pause_s: Range = (0.0, 0.0),
    when: str = "always",
    menu: Menu = ANY,
    **changes: Any,
) -> Make:
    """Return a maker of jobs with a fault on one of some units; ranges are drawn from evenly."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck, menu, **changes)
        while when != "always" and len(job.iterations) < 8:
            job = job_of(luck, menu, **changes)
        while not (ranks := _unit(luck, job, on)):
            job = job_of(luck, menu, **changes)
        fault = Fault(
            kind=kind,
            ranks=ranks,
            host=f"node{job.machines.host_of(ranks[0]):03d}" if "host" in on else "",
            factor=float(luck.uniform(*factor)),
            share=float(luck.uniform(*share)),
            burst_iterations=float(np.exp(luck.uniform(*np.log(burst)))),
            pause_s=float(luck.uniform(*pause_s)),
        )
        if kind == "pcie":
            fault = replace(fault, factor=job.machines.gpu.nvlink_bytes / PCIE_BYTES)
        return Scenario(job, (_timed(luck, job, fault, when),))

    return make


def _unit(luck: Luck, job: Job, on: str) -> tuple[int, ...]:
    """Return the ranks of a unit of a job; none where it is no such unit."""
    rank = int(luck.integers(job.num_ranks))
    host = job.ranks_of_host[job.machines.host_of(rank)]
    if on.endswith("loading"):
        place = job.layout.coordinates(rank)
        if place.tp or place.pp not in (0, job.pp - 1):
            return ()
    match on.removesuffix(" loading"):
        case "pair":
            return job.layout.group(rank, "tp")[:2]
        case "rail":
            number = job.machines.nic_of(rank)[1]
            ranks = range(job.num_ranks)
            return tuple(each for each in ranks if job.machines.nic_of(each)[1] == number)
        case "host":
            return host if _has_peers(job, host) else ()
    return (rank,)


def _has_peers(job: Job, ranks: tuple[int, ...]) -> bool:
    """Tell whether every stage of some ranks has other ranks, too: nobody could tell a slow host
    from a heavy stage otherwise.
    """
    stages = {rank: job.layout.coordinates(rank).pp for rank in range(job.num_ranks)}
    others = {stage for rank, stage in stages.items() if rank not in ranks}
    return {stages[rank] for rank in ranks} <= others


def _timed(luck: Luck, job: Job, fault: Fault, when: str) -> Fault:
    traced = job.iterations
    middle = traced[int(luck.integers(len(traced) // 3, max(2 * len(traced) // 3, 2)))]
    if when == "from":
        return replace(fault, first_iteration=middle)
    return replace(fault, last_iteration=middle) if when == "ended" else fault


def clock(factor: float, high: float = 0.0, on: str = "rank", when: str = "always") -> Make:
    """Return a maker of jobs with one slow chip, or a host of them."""
    return faulty("gpu_clock", on, factor=(factor, high or factor), when=when)


def card(on: str, kind: str = "nic", menu: Menu = CARDED, **ranges: Any) -> Make:
    """Return a maker of jobs with slow network cards, each of which serves one rank or two."""

    def make(luck: Luck) -> Scenario:
        slow = ranges or {"factor": one_of(luck, ((2.0, 2.0), (3.0, 3.0)))}
        scenario = faulty(
            kind, on, menu=menu, congestion_share=0.0, overlap_grads=luck.random() < 0.3, **slow
        )(luck)
        machines = scenario.job.machines
        cards = max(1, machines.ranks_per_host // (2 if on == "host" else 1))
        machines = replace(machines, num_nics=cards)
        return replace(scenario, job=replace(scenario.job, machines=machines))

    return make


def both(*makes: Make) -> Make:
    """Return a maker of jobs with the faults of two of some makers, on different ranks."""

    def make(luck: Luck) -> Scenario:
        first, second = luck.choice(len(makes), 2, replace=False)
        scenario, (other,) = makes[int(first)](luck), makes[int(second)](luck).faults
        num_ranks, (mine,) = scenario.job.num_ranks, scenario.faults[0].ranks
        rank = (mine + 1 + int(luck.integers(num_ranks - 1))) % num_ranks
        return replace(scenario, faults=(*scenario.faults, replace(other, ranks=(rank,))))

    return make


# -- sound jobs


def sound(menu: Menu = ANY, **changes: Any) -> Make:
    """Return a maker of sound jobs."""
    return lambda luck: Scenario(job_of(luck, menu, **changes))


def peculiar(
    kind: str,
    cause: str,
    change: Callable[[Luck, Job], tuple[Sizes, tuple[int, ...]]],
    menu: Menu = ANY,
    **changes: Any,
) -> Make:
    """Return a maker of sound jobs that are slowed by what they do: `change` says what a job does
    otherwise, and on which ranks; a cause "" is not planted.
    """

    def make(luck: Luck) -> Scenario:
        job = job_of(luck, menu, **changes)
        fields, ranks = change(luck, job)
        if not cause:
            return Scenario(replace(job, **fields))
        own = Planted(kind=kind, cause=cause, owner="job", ranks=ranks)
        return Scenario(replace(job, **fields), (), own, job)

    return make


def _ranks_at(job: Job, axis: str, place: int) -> tuple[int, ...]:
    places = ((rank, job.layout.coordinates(rank)) for rank in range(job.num_ranks))
    return tuple(rank for rank, at in places if getattr(at, axis) == place)


def _all(job: Job) -> tuple[int, ...]:
    return tuple(range(job.num_ranks))


def _heavy_stage(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    """Move one or two layers to the first or the last stage."""
    heavy, layers = one_of(luck, (0, job.pp - 1)), list(job.layers)
    others = [stage for stage in range(job.pp) if stage != heavy]
    for stage in luck.permutation(others)[: int(luck.integers(1, 3))]:
        layers[stage] -= 1
        layers[heavy] += 1
    return {"layers": tuple(layers)}, _ranks_at(job, "pp", heavy)


def _long(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    replica = int(luck.integers(job.dp))
    fields = {"long_replica": replica, "long_ratio": float(luck.uniform(1.1, 1.5))}
    return fields, _ranks_at(job, "dp", replica)


def _long_at_times(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    fields, ranks = _long(luck, job)
    return {**fields, "long_varies": True}, ranks


def _uneven(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    fields = {"lengths": "uneven", "length_spread_ratio": float(luck.uniform(0.1, 0.35))}
    return fields, _all(job)


def _hot(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    capacity = one_of(luck, (0.0, 0.0, 1.5))
    fields = {"router_spread_ratio": float(luck.uniform(0.3, 0.8)), "capacity_ratio": capacity}
    return fields, _all(job)


def _drifting(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    fields = {"router_spread_ratio": 0.1, "router_drift_ratio": float(luck.uniform(0.1, 0.3))}
    return fields, _all(job)


def _collecting(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    return {"collections": "heavy"}, _all(job)


def _slow_storage(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    ratio = float(luck.uniform(1.1, 1.8))
    return {"load_ratio": ratio, "prefetch": 2, "loader_spread_ratio": 0.25}, ()


def _missing(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    missing = luck.choice(job.num_ranks, int(luck.integers(1, 3)), replace=False)
    return {"missing": tuple(sorted(int(each) for each in missing))}, ()


def _growth(luck: Luck, job: Job) -> tuple[Sizes, tuple[int, ...]]:
    return {"growth_from": job.iterations[len(job.iterations) // 2], "growth_ratio": 1.25}, ()


THROTTLING = faulty("throttling", factor=(1.2, 3.0), share=(0.1, 0.4), burst=(0.05, 3.0))
ECC = faulty("ecc", share=(0.04, 0.2), burst=(0.05, 0.3))
HBM = faulty("hbm", factor=(1.5, 3.0))
CPU_LIMIT = faulty("cpu_limit", factor=(2.0, 10.0), share=(0.1, 0.6))
SMALL: Sizes = {"hidden": 2048, "sequence": 2048}
TINY: Sizes = {"hidden": 1024, "sequence": 2048, "vocabulary": 32_000, "launch_us": 8.0}
LOADING: Sizes = {"menu": REPLICAS, "factor": (5.0, 14.0), "load_ratio": 0.3, "prefetch": 2}
INSIDE: Sizes = {
    "menu": LINKED, "granularity": "full", "ranks_per_host": 8, "overlap_grads": False
}  # fmt: skip

FAMILIES: tuple[tuple[str, int, Make], ...] = (
    ("gpu_clock 5%", 5, clock(1.05)),
    ("gpu_clock 10%", 6, clock(1.1)),
    ("gpu_clock 20%", 6, clock(1.2)),
    ("gpu_clock 35%", 5, clock(1.35)),
    ("gpu_clock 50%", 5, clock(1.5)),
    ("gpu_clock 100%", 4, clock(2.0)),
    ("gpu_clock from an iteration on", 7, clock(1.1, 1.4, when="from")),
    ("gpu_clock ended", 5, clock(1.15, 1.5, when="ended")),
    ("gpu_clock of a host", 7, clock(1.08, 1.5, on="host")),
    ("throttling", 14, THROTTLING),
    ("hbm", 7, HBM),
    ("ecc", 5, ECC),
    ("shared_gpu", 7, faulty("shared_gpu", factor=(1.5, 3.0), share=(0.5, 0.9), burst=(0.05, 0.3))),
    ("host_cpu", 4, faulty("host_cpu", "host", factor=(3.0, 10.0))),
    ("host_cpu: small model", 4, faulty("host_cpu", "host", factor=(1.5, 4.0), **SMALL)),
    ("cpu_limit", 8, CPU_LIMIT),
    ("host_memory", 6, faulty("host_memory", "host", share=(0.05, 0.25))),
    ("loader", 6, faulty("loader", "rank loading", **LOADING)),
    ("loader of a host", 4, faulty("loader", "host loading", **LOADING)),
    ("gc", 6, faulty("gc", pause_s=(0.3, 1.0), share=(0.5, 1.2), granularity="full")),
    ("nvlink", 7, faulty("nvlink", factor=(2.0, 8.0), **INSIDE)),
    ("nvlink of a pair", 4, faulty("nvlink_pair", "pair", factor=(2.0, 8.0), **INSIDE)),
    ("pcie", 5, faulty("pcie", **INSIDE)),
    ("nic of a host", 7, card("host")),
    ("nic of a host in one ring", 2, card("host", menu=RINGS)),
    ("nic of a rank", 5, card("rank")),
    ("nic flapping", 5, card("host", "nic_flap", factor=(5, 20), share=(0.1, 0.4), burst=(0.3, 2))),
    ("rail", 4, card("rail", "rail")),
    ("two faults", 10, both(clock(1.15, 1.6), THROTTLING, CPU_LIMIT, HBM, ECC)),
    ("healthy", 54, sound()),
    ("healthy: large", 5, sound(LARGE, granularity="base", num_iterations=7, window=2)),
    ("look_alike: chips differ", 8, sound(chip_spread_ratio=0.03)),
    ("look_alike: heavy stage", 8,
     peculiar("heavy_stage", "stage_imbalance", _heavy_stage, STAGES, vocabulary=50_000)),
    ("look_alike: long sequences", 6,
     peculiar("long_sequences", "sequence_imbalance", _long, REPLICAS)),
    ("look_alike: long sequences at times", 5,
     peculiar("long_sequences", "sequence_imbalance", _long_at_times, REPLICAS)),
    ("look_alike: uneven sequences", 6,
     peculiar("uneven_sequences", "sequence_imbalance", _uneven, REPLICAS)),
    ("look_alike: packed documents", 5, sound(REPLICAS, lengths="packed", sequence=16384)),
    ("look_alike: hot experts", 5, peculiar("hot_expert", "sequence_imbalance", _hot, EXPERTS)),
    ("look_alike: drifting experts", 5,
     peculiar("hot_expert", "sequence_imbalance", _drifting, EXPERTS)),
    ("look_alike: slow storage", 4, peculiar("", "", _slow_storage)),
    ("look_alike: gc everywhere", 5,
     peculiar("gc", "gc", _collecting, granularity="full", collections="off")),
    ("look_alike: checkpoints", 4, sound(checkpoint_every=4)),
    ("look_alike: host-bound", 6, sound(**TINY)),
    ("look_alike: missing ranks", 4, peculiar("", "", _missing, REPLICAS)),
    ("look_alike: warm-up", 3, sound(num_iterations=4, first_iteration=1)),
    ("look_alike: congestion", 5, sound(CARDED, congestion_share=0.3)),
    ("look_alike: logging rank", 4, sound(logging_s=0.03)),
    ("look_alike: growth", 3, peculiar("", "", _growth)),
    ("look_alike: all slow", 3, sound(slow_alike_ratio=1.3)),
)  # fmt: skip
"""Name, how many, and who makes them."""


@lru_cache(maxsize=4)
def catalogue(draw: int) -> dict[str, tuple[Case, Scenario]]:
    """Return all cases of a draw by name, with what each of them is."""
    return {case.name: (case, scenario) for case, scenario in _drawn(draw)}


def _drawn(draw: int) -> Iterator[tuple[Case, Scenario]]:
    for family, number, make in FAMILIES:
        for place in range(number):
            seed = crc32(f"{draw} {family} {place}".encode())
            scenario = make(np.random.default_rng(seed))
            name = f"{family.replace(' ', '-').replace(':', '')}-{place}-{seed:08x}"
            case = Case(
                ground=GROUND,
                name=name,
                family=family,
                num_ranks=scenario.job.num_ranks,
                seed=seed,
                draw=draw,
                planted=scenario.planted,
            )
            yield case, scenario


def scenario_of(case: Case) -> Scenario:
    """Return what a case is."""
    return catalogue(case.draw)[case.name][1]
