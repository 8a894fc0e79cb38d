"""List the jobs of the archive: what goes wrong, what only looks so, and on which layouts.

A family is a row: how many jobs, on which layouts, in what surroundings, and what is planted. Draw
0 has the factors as they stand; other draws have other seeds, and begin with another layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from zlib import crc32

import numpy as np

from benchmarks.grounds.archive import plants
from benchmarks.grounds.archive.job import Effect, Job, Kind, Layout, Tracer
from benchmarks.grounds.archive.plants import Plant
from benchmarks.grounds.archive.settings import (
    FLAT,
    LAYOUTS,
    LONELY,
    SMALL,
    Wish,
    draw_job,
)
from benchmarks.grounds.ground import Case

GROUND = "archive"
TURN = 5  # rows begin with different layouts
JITTER = 0.12  # of what a factor is above 1, in draws other than 0
ANY = (Tracer.JUNE, Tracer.JULY, Tracer.JULY, Tracer.HEAD)
MIXED = (*LAYOUTS[:6], FLAT[0], *LAYOUTS[6:11], FLAT[1], *LAYOUTS[11:])
WITH_HOSTS = tuple(one for one in LAYOUTS if one.num_hosts >= 3)
WITH_TENSORS = tuple(one for one in LAYOUTS if one.tp > 1)
STAGE_HOSTS = tuple(one for one in LAYOUTS if one.tp * one.dp == one.gpus_per_host)
REPLICA_HOSTS = tuple(Layout(*sizes) for sizes in ((4, 1, 4, 4), (2, 1, 4, 2), (8, 1, 4, 8)))
USUAL = Wish()
MEDIUM = tuple(one for one in LAYOUTS[:12] if one.num_ranks <= 32)
BIG = tuple(one for one in LAYOUTS if one.num_ranks >= 16)


@dataclass(frozen=True)
class Family:
    """State one row of the catalogue."""

    name: str
    count: int
    plant: Plant = plants.nothing
    layouts: tuple[Layout, ...] = MIXED
    wish: Wish = USUAL


RAILS, NO_RAILS, NVLINKS = Wish(has_rails=True), Wish(has_rails=False), Wish(has_nvlink=True)
SMALL_MODEL, EVERY_TRACER = Wish(is_small=True), Wish(tracers=ANY)
LONG = Wish(least_iterations=12, most_spread=0.02)
FAULTS = (
    Family("gpu_clock", 5, plants.slow_chip(1.05), MIXED, Wish(most_spread=0.006, tracers=ANY)),
    Family("gpu_clock", 5, plants.slow_chip(1.1), MIXED, Wish(most_spread=0.01, tracers=ANY)),
    Family("gpu_clock", 5, plants.slow_chip(1.2), MIXED, EVERY_TRACER),
    Family("gpu_clock", 5, plants.slow_chip(1.5), MIXED, EVERY_TRACER),
    Family("gpu_clock", 5, plants.slow_chip(2.0), MIXED, EVERY_TRACER),
    Family("gpu_clock, from then on", 8, plants.slow_chip(1.3, when="onset"), MEDIUM, LONG),
    Family("gpu_clock, for a stretch", 6, plants.slow_chip(1.35, when="stretch"), MEDIUM, LONG),
    Family("throttling", 5, plants.throttling(1.3), (*MEDIUM, FLAT[1]), LONG),
    Family("throttling", 3, plants.throttling(1.5), MEDIUM, LONG),
    Family("hbm", 6, plants.hbm),
    Family("nvlink", 7, plants.nvlink, WITH_TENSORS, NVLINKS),
    Family("nic", 7, plants.nic, WITH_HOSTS, NO_RAILS),
    Family("nic of one rank", 4, plants.nic_of_one_rank, WITH_HOSTS, RAILS),
    Family("rail", 5, plants.rail, WITH_HOSTS, RAILS),
    Family("slow_host", 6, plants.slow_host, BIG),
    Family("slow_host, a stage", 4, plants.slow_host, STAGE_HOSTS),
    Family("slow_host, a replica", 4, plants.slow_host, REPLICA_HOSTS),
    Family("host_cpu, small model", 6, plants.host_cpu, (*BIG, *FLAT[:2]), SMALL_MODEL),
    Family("host_cpu", 3, plants.host_cpu, BIG),
    Family("host_memory", 5, plants.host_memory, BIG),
    Family("loader", 4, plants.loader, LAYOUTS),
    Family("loader of a host", 4, plants.loader_of_host, WITH_HOSTS),
    Family("two faults", 8, plants.two_faults, WITH_TENSORS, NVLINKS),
    Family("pipeline only", 6, plants.slow_chip(1.4), LONELY, Wish(most_spread=0.02)),
    Family("slow pair", 5, plants.slow_pair, BIG),
)
SOUND = (
    Family("gc", 6, plants.collector, LAYOUTS),
    Family("healthy", 20, plants.nothing, (*MIXED, *LONELY), EVERY_TRACER),
    Family("healthy, few ranks", 6, plants.nothing, SMALL),
    Family("healthy, few iterations", 6, plants.nothing, LAYOUTS, Wish(most_iterations=6)),
    Family("healthy, host-bound", 8, plants.nothing, MIXED, SMALL_MODEL),
    Family("healthy, wide chips", 8, plants.nothing, MIXED, Wish(spread=0.05, tracers=ANY)),
    Family("healthy, noisy hosts", 6, plants.nothing, MIXED, Wish(is_noisy=True)),
    Family("look_alike: longer replica", 3, plants.long_sequences(1.03), LAYOUTS),
    Family("look_alike: longer replica", 3, plants.long_sequences(1.06), LAYOUTS),
    Family("look_alike: longer replica", 3, plants.long_sequences(1.12), LAYOUTS),
    Family("look_alike: longer replica", 3, plants.long_sequences(1.3), LAYOUTS),
    Family("look_alike: heavy layers", 7, plants.heavy_stage, LAYOUTS),
    Family("look_alike: heavy output", 7, plants.heavy_output, (*LAYOUTS, *LONELY)),
    Family("look_alike: uneven sequences", 7, plants.uneven_sequences, LAYOUTS),
    Family("look_alike: uneven layers", 6, plants.uneven_layers, (*LAYOUTS, LONELY[0])),
    Family("look_alike: checkpoints", 5, plants.checkpoints),
    Family("look_alike: warming up", 5, plants.warming_up, LAYOUTS),
    Family("look_alike: missing rank", 6, plants.lost_rank, LAYOUTS),
    Family("look_alike: all slow", 5, plants.all_slow, LAYOUTS),
    Family("look_alike: congested", 5, plants.congested, WITH_HOSTS),
)
FAMILIES = (*FAULTS, *SOUND)


@dataclass(frozen=True)
class Recipe:
    """Hold a case and its job."""

    case: Case
    job: Job


def _jittered(effect: Effect, rng: np.random.Generator) -> Effect:
    """Move what an effect's factor is above 1 a little."""
    above = (effect.factor - 1) * (1 + float(rng.uniform(-JITTER, JITTER)))
    fixed = effect.kind in {Kind.UNEVEN_LAYERS, Kind.HEAVY_OUTPUT, Kind.GC}
    return effect if fixed else replace(effect, factor=round(1 + above, 4))


def _recipe(family: Family, row: int, number: int, draw: int) -> Recipe:
    """Return one job of a family's row."""
    seed = crc32(f"{GROUND}/{draw}/{row}/{number}/{family.name}".encode())
    layout = family.layouts[(number + draw + TURN * row) % len(family.layouts)]
    rng = np.random.default_rng([seed, 2])
    job = family.plant(draw_job(seed, layout, family.wish), rng)
    if draw:
        job = replace(job, effects=tuple(_jittered(effect, rng) for effect in job.effects))
    words = family.name.replace(": ", "-").replace(", ", "-").replace(" ", "-")
    case = Case(
        ground=GROUND,
        name=f"{words}-{layout.name}-{job.habits.tracer}-s{seed}",
        family=family.name,
        num_ranks=layout.num_ranks,
        seed=seed,
        draw=draw,
        planted=tuple(effect.planted() for effect in job.effects),
    )
    return Recipe(case, job)


@cache
def recipes(draw: int = 0) -> dict[str, Recipe]:
    """Return all jobs of a draw by their names."""
    found = (
        _recipe(family, row, number, draw)
        for row, family in enumerate(FAMILIES)
        for number in range(family.count)
    )
    return {recipe.case.name: recipe for recipe in found}


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw."""
    for recipe in recipes(draw).values():
        yield recipe.case
