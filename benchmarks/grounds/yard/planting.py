"""Change a job: how it is run and traced, where it runs, what is uneven in it, what ails it.

A change takes a scenario and draws, and returns another scenario; the catalogue puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.yard.jobs import Job, costs_of
from benchmarks.grounds.yard.network import Ranks, suspects, units_of
from benchmarks.grounds.yard.scenario import Scenario
from benchmarks.grounds.yard.trouble import Trouble

Rng: TypeAlias = np.random.Generator
Change: TypeAlias = Callable[[Scenario, Rng], Scenario]

_MOST_SPANS = 32_000
_LINKS = ("nvlink", "pcie", "nic", "host_nic", "rail")


def _spans_an_iteration(job: Job) -> int:
    """Return about how much of the bound one iteration takes."""
    passes = job.num_ranks * job.num_microbatches
    per_layer = 6 + (10 if job.tp > 1 else 0) + (5 if job.experts else 0) + 2 * (job.cp > 1)
    per_layer += 4 * (job.recompute == "full")
    num = passes * (sum(job.layers) // job.pp * per_layer + 12)
    return num // 3 if job.granularity == "base" else num  # all happens, little is recorded


def _paced(job: Job, share: float) -> Job:
    """Return the job with loaders that are busy for a share of the time."""
    costs = costs_of(job)
    layer = costs["attention"].total_s + costs["mlp"].total_s
    seconds = 3 * (layer * sum(job.layers) / job.pp + costs["output_layer"].total_s / job.pp)
    launches = 75 * job.site.launch_s * job.host_bound * sum(job.layers) / job.pp
    return replace(job, loader_s=share * job.loader_workers * max(seconds, launches))


def run_somehow(job: Job, rng: Rng) -> Job:
    """Draw how a job is run and traced, where its template leaves that open."""
    interval, window = [(1, 1), (5, 2), (4, 2), (10, 5), (5, 5)][rng.integers(5)]
    spread, congestion = rng.uniform((0.003, 0.0), (0.008, 0.06)).tolist()
    site = replace(job.site, chip_spread_ratio=spread, congestion_ratio=congestion)
    overlap, distributed, splits, everyone, counters, manual = (
        rng.random(6) < (0.6, 0.75, 0.6, 0.3, 0.6, 0.4)
    ).tolist()
    job = replace(
        job, site=site, interval=interval, window=window, overlap=overlap,
        distributed_optimizer=distributed, sequence_parallel=splits and job.tp > 1,
        everyone_loads=everyone, has_counters=counters, manual_gc=manual,
        first_iteration=int(rng.choice([1, 1, 51, 201, 1001])),
        recompute=str(rng.choice(["", "", "", "selective", "full"])),
        loader_workers=int(rng.choice([2, 4])), storage_spread=float(rng.uniform(0.1, 0.35)),
        noise=float(rng.uniform(0.5, 2.5)),
    )  # fmt: skip
    num = int(np.clip(_MOST_SPANS // _spans_an_iteration(job), 4, 30))
    return _paced(replace(job, num_iterations=num), float(rng.uniform(0.2, 0.5)))


def _factor_shown(job: Job, trouble: Trouble) -> float:
    """Return how many times slower it makes what it concerns; a pause counts with its iteration."""
    if trouble.kind != "ecc_pause":
        return trouble.factor
    costs = costs_of(job)
    layer = costs["attention"].total_s + costs["mlp"].total_s
    work = 3 * layer * sum(job.layers) / job.pp * job.num_microbatches
    return 1 + trouble.stall_s * max(trouble.num_stalls, 1.0) / work


def _with_trouble(scenario: Scenario, *troubles: Trouble) -> Scenario:
    """Return the scenario with faults, and what may be said of them."""
    planted = tuple(_planted(scenario, trouble) for trouble in troubles)
    return replace(scenario, troubles=troubles, planted=planted)


def _planted(scenario: Scenario, trouble: Trouble) -> Planted:
    job, ranks = scenario.job, trouble.ranks
    host = job.site.host_name(job.site.host_of(ranks[0]), scenario.seed)
    return Planted(
        kind=trouble.kind, cause=trouble.cause, owner=trouble.owner,
        ranks=suspects(job, trouble.kind, ranks) if trouble.kind in _LINKS else ranks,
        host=host if trouble.is_of_host else "", factor=_factor_shown(job, trouble),
        first_iteration=trouble.first_iteration, last_iteration=trouble.last_iteration,
        share_of_time=trouble.share_of_time,
    )  # fmt: skip


def changed(scenario: Scenario, rng: Rng, /, **changes: object) -> Scenario:
    """Change the job itself; nothing is planted."""
    job = replace(scenario.job, **changes)  # type: ignore[arg-type]  # names of the catalogue's own
    return replace(scenario, job=job)


def elsewhere(scenario: Scenario, rng: Rng, /, **changes: object) -> Scenario:
    """Change what the cluster is like; nothing is planted."""
    site = replace(scenario.job.site, **changes)  # type: ignore[arg-type]  # as above
    return replace(scenario, job=replace(scenario.job, site=site))


def slow_storage(scenario: Scenario, rng: Rng, /, share: float) -> Scenario:
    """Let everybody's loaders be late, by about as much."""
    job = _paced(replace(scenario.job, storage_spread=0.2), share)
    return replace(scenario, job=job)


def _place(job: Job, where: str, rng: Rng) -> int:
    """Choose a rank at a place of the layout."""
    places = [job.layout.coordinates(rank) for rank in range(job.num_ranks)]
    wanted = [
        {
            "PP first": place.pp == 0,
            "PP last": place.pp == job.pp - 1,
            "TP not first": place.tp > 0,
            "DP last": place.dp == job.dp - 1,
            "a loader": place.pp == 0 and (job.everyone_loads or place.tp == 0),
        }.get(where, True)
        for place in places
    ]
    return int(rng.choice(np.flatnonzero(wanted)))


def _unit(job: Job, kind: str, where: str, rng: Rng) -> Ranks:
    """Choose the ranks of the unit at fault: a GPU, a NIC, a rail, a host."""
    rank = _place(job, where, rng)
    by = {"nic": "nic", "rail": "rail"}.get(kind, "gpu")
    if Trouble(kind=kind, ranks=()).is_of_host:
        by = "host_nic"
    return next(unit for unit in units_of(job, by) if rank in unit)


def fault(
    scenario: Scenario, rng: Rng, /, kind: str, factor: float = 1.0,
    *, where: str = "", onset: float = 0.0, end: float = 1.0, **given: float,
) -> Scenario:  # fmt: skip
    """Plant one fault; `onset` and `end` are shares of the traced iterations."""
    numbers = scenario.job.iterations
    trouble = Trouble(
        kind=kind, ranks=_unit(scenario.job, kind, where, rng), factor=factor,
        first_iteration=numbers[int(onset * len(numbers))] if onset else 1,
        last_iteration=numbers[int(end * len(numbers)) - 1] if end < 1 else 0,
        on=int(given.get("on", 0)), period=int(given.get("period", 0)),
        stall_s=given.get("stall_s", 0.0), num_stalls=given.get("num_stalls", 0.0),
    )  # fmt: skip
    return _with_trouble(scenario, *scenario.troubles, trouble)


def two(scenario: Scenario, rng: Rng, /, first: Change, second: Change) -> Scenario:
    """Plant two faults."""
    return second(first(scenario, rng), rng)


def in_a_row(scenario: Scenario, rng: Rng, /, change: Change, least: int = 10) -> Scenario:
    """Trace iterations in a row, so that what comes and goes is seen to do so."""
    num = max(scenario.job.num_iterations, least)
    job = replace(scenario.job, interval=5, window=5, num_iterations=num)
    return change(replace(scenario, job=job), rng)


def _of_job(kind: str, cause: str, ranks: Sequence[int]) -> Planted:
    return Planted(kind=kind, cause=cause, owner="job", ranks=tuple(ranks))


def long_replica(scenario: Scenario, rng: Rng, /, lengths: str) -> Scenario:
    """Give one replica long documents, always."""
    job = replace(scenario.job, lengths=lengths, length_spread=0.35)
    replica = int(rng.integers(job.dp))
    ranks = [rank for rank in range(job.num_ranks) if job.layout.coordinates(rank).dp == replica]
    planted = _of_job("long_sequences", "sequence_imbalance", ranks)
    return replace(scenario, job=job, long_replica=replica, planted=(planted,))


def hot_expert(scenario: Scenario, rng: Rng, /) -> Scenario:
    """Let one rank's experts be everybody's choice, always."""
    job = replace(scenario.job, expert_spread=0.06)
    expert = int(rng.integers(job.ep))
    ranks = [rank for rank in range(job.num_ranks) if job.layout.coordinates(rank).ep == expert]
    planted = _of_job("hot_expert", "sequence_imbalance", ranks)
    return replace(scenario, job=job, hot_expert=expert, planted=(planted,))


def heavy_stage(scenario: Scenario, rng: Rng, /, **changes: object) -> Scenario:
    """Let one stage have more to do, by its layers or the words it knows."""
    job = replace(scenario.job, **changes)  # type: ignore[arg-type]  # names of the catalogue's own
    most = job.pp - 1 if job.layers[-1] >= max(job.layers) else job.layers.index(max(job.layers))
    ranks = [rank for rank in range(job.num_ranks) if job.layout.coordinates(rank).pp == most]
    planted = _of_job("heavy_stage", "stage_imbalance", ranks)
    return replace(scenario, job=job, even_job=scenario.job, planted=(planted,))
