"""List the cases: which jobs get which trouble, of which sizes, and how many of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

import numpy as np

from benchmarks.grounds.ground import Case
from benchmarks.grounds.rack import planting
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.planting import Plant
from benchmarks.grounds.rack.settings import Wish, draw_job
from benchmarks.grounds.rack.trouble import Trouble

GROUND = "rack"
_Plants = Callable[[Job, np.random.Generator, float], tuple[Trouble, ...]]


def _one(plant: Plant) -> _Plants:
    return lambda job, draws, size: (plant(job, draws, size),)


def _none(job: Job, draws: np.random.Generator, size: float) -> tuple[Trouble, ...]:
    del job, draws, size
    return ()


@dataclass(frozen=True)
class Family:
    """Cases of one kind: each takes the next of the sizes and the next of the wishes."""

    name: str
    count: int
    plants: _Plants
    sizes: Sequence[float]
    wishes: Sequence[Wish] = (Wish(),)


_ANY = Wish()
_LARGE = Wish(is_small=False)
_LONG = Wish(least_iterations=6, settled=True, is_contiguous=True, is_small=False)
_SMALL = Wish(is_small=True)
_FABRIC = Wish(axes=("dp",), least_hosts=3, least_ranks=12, is_small=False)

FAMILIES = (
    Family(
        "gpu_clock",
        16,
        _one(planting.gpu_clock),
        (1.05, 1.06, 1.08, 1.1, 1.12, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 1.07),
        (_LARGE, _LARGE, _LARGE, _ANY),
    ),
    Family(
        "gpu_clock from an iteration on",
        8,
        _one(planting.gpu_clock_onset),
        (1.06, 1.08, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0),
        (_LONG,),
    ),
    Family("power_brake", 5, _one(planting.power_brake), (1.8, 2.2, 2.6, 3.0, 2.0), (_LARGE,)),
    Family(
        "throttling",
        12,
        _one(planting.throttling),
        (1.25, 1.4, 1.5, 1.6, 1.8, 2.0, 2.2, 2.5, 3.0, 1.3, 1.7, 2.0),
        (replace(_LARGE, least_iterations=4), replace(_LONG, least_iterations=8)),
    ),
    Family("hbm", 8, _one(planting.hbm), (1.2, 1.35, 1.5, 1.7, 2.0, 2.4, 2.8, 3.5), (_LARGE,)),
    Family(
        "host_cpu",
        9,
        _one(planting.host_cpu),
        (1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 1.4, 2.0, 3.0),
        (_SMALL, replace(_ANY, least_hosts=2), replace(_SMALL, least_hosts=2)),
    ),
    Family(
        "contention",
        9,
        _one(planting.contention),
        (0.6, 1.0, 1.5, 2.0, 3.0, 0.8, 1.2, 2.5, 4.0),
        (_ANY, replace(_SMALL, least_hosts=2), replace(_ANY, least_hosts=2)),
    ),
    Family(
        "loader",
        10,
        _one(planting.loader),
        (1.3, 1.6, 2.0, 2.4, 3.0, 4.0, 5.0, 1.5, 1.8, 3.5),
        (
            Wish(loads_much=True, axes=("dp",), least_iterations=4, is_small=False),
            Wish(loads_much=True, axes=("dp",), least_iterations=6),
            replace(_LARGE, axes=("dp",), least_iterations=4),
        ),
    ),
    Family(
        "nic",
        10,
        _one(planting.nic),
        (1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 2.0, 3.0, 4.0),
        (_FABRIC, replace(_FABRIC, axes=("dp", "pp")), replace(_FABRIC, axes=("dp", "tp"))),
    ),
    Family(
        "nic_flapping",
        5,
        _one(planting.nic_flapping),
        (3.0, 5.0, 8.0, 12.0, 20.0),
        (replace(_FABRIC, least_iterations=4), replace(_FABRIC, axes=("dp", "pp"))),
    ),
    Family(
        "rail",
        4,
        _one(planting.rail),
        (2.0, 3.0, 4.0, 8.0),
        (replace(_FABRIC, axes=("dp", "tp")), _FABRIC),
    ),
    Family(
        "nvlink",
        8,
        _one(planting.nvlink),
        (1.7, 2.5, 3.0, 4.0, 6.0, 8.0, 3.5, 10.0),
        (
            replace(_LARGE, axes=("tp",)),
            replace(_LARGE, axes=("tp", "dp")),
            replace(_LARGE, axes=("ep",)),
        ),
    ),
    Family(
        "pcie",
        4,
        _one(planting.pcie),
        (3.0, 4.0, 4.0, 8.0),
        (replace(_LARGE, offloads=True), replace(_FABRIC, least_hosts=2)),
    ),
    Family(
        "gc of one process",
        4,
        _one(planting.collector),
        (1.0, 2.0, 3.0, 5.0),
        (replace(_LARGE, collects=False, least_iterations=4),),
    ),
    Family(
        "two faults",
        8,
        planting.two_faults,
        (1.3, 1.4, 1.5, 1.7, 2.0, 2.4, 2.8, 1.6),
        (
            replace(_LARGE, least_hosts=2, least_ranks=8, loads_much=True),
            replace(_FABRIC, loads_much=True),
        ),
    ),
    Family("healthy", 28, _none, (1.0,), (_ANY, replace(_ANY, settled=True))),
    Family(
        "look_alike: heavy stage",
        7,
        _one(planting.heavy_stage),
        (1.15, 1.3, 1.5, 1.8, 2.2, 1.4, 1.25),
        (Wish(axes=("pp",), is_contiguous=False),),
    ),
    Family(
        "look_alike: uneven stages",
        3,
        _none,
        (1.0,),
        (Wish(axes=("pp",), extra_layers=1), Wish(axes=("pp",), extra_layers=2)),
    ),
    Family(
        "look_alike: sequences of all lengths",
        7,
        _one(planting.long_sequences),
        (1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.25),
        (Wish(axes=("dp",)), Wish(axes=("dp",), is_packed=True)),
    ),
    Family(
        "look_alike: long sequences on some replicas",
        6,
        _one(planting.longer_replicas),
        (1.08, 1.15, 1.2, 1.3, 1.5, 1.8),
        (Wish(axes=("dp",), is_packed=False), Wish(axes=("dp",), is_packed=True)),
    ),
    Family(
        "look_alike: hot expert",
        6,
        _one(planting.hot_expert),
        (1.2, 1.4, 1.6, 2.0, 2.5, 3.0),
        (Wish(axes=("ep",)),),
    ),
    Family(
        "look_alike: collectors everywhere",
        5,
        _one(planting.collectors),
        (0.5, 1.0, 1.5, 2.0, 3.0),
        (replace(_ANY, least_iterations=3),),
    ),
    Family(
        "look_alike: checkpoints",
        4,
        _none,
        (1.0,),
        (Wish(saves_every=2), Wish(saves_every=3), Wish(saves_every=1), Wish(saves_every=5)),
    ),
    Family(
        "look_alike: shared storage",
        5,
        _one(planting.storage),
        (1.3, 1.6, 2.0, 2.5, 1.8),
        (Wish(loads_much=True, axes=("dp",)), Wish(axes=("dp",))),
    ),
    Family(
        "look_alike: warm-up",
        4,
        _none,
        (1.0,),
        (Wish(settled=False), Wish(settled=False, is_small=True)),
    ),
    Family(
        "look_alike: hosts bound the job",
        6,
        _none,
        (1.0,),
        (_SMALL, replace(_SMALL, axes=("tp",)), replace(_SMALL, axes=("pp",))),
    ),
    Family(
        "look_alike: noisy network",
        6,
        _one(planting.network),
        (1.1, 1.2, 1.3, 1.4, 1.6, 1.25),
        (Wish(axes=("dp",), least_hosts=2, network_tail=0.12),),
    ),
    Family("look_alike: chips of 4 %", 5, _none, (1.0,), (Wish(chip_spread=0.04),)),
    Family(
        "look_alike: clocks that bend",
        4,
        _none,
        (1.0,),
        (Wish(clock_bend_ppm=4.0), Wish(clock_bend_ppm=15.0)),
    ),
    Family(
        "look_alike: missing files",
        4,
        _none,
        (1.0,),
        (Wish(missing=1, least_ranks=8), Wish(missing=2, least_ranks=8)),
    ),
)


@dataclass(frozen=True, eq=False)
class World:
    """What a case is made of."""

    job: Job
    troubles: tuple[Trouble, ...]


def _seed(draw: int, family: str, number: int) -> int:
    return crc32(f"{GROUND}/{draw}/{family}/{number}".encode())


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw."""
    for place, family in enumerate(FAMILIES):
        for number in range(family.count):
            seed = _seed(draw, family.name, number)
            world = _world(place, number, seed)
            yield Case(
                ground=GROUND,
                name=f"{_word(family.name)}-{number}-{seed:08x}",
                family=family.name,
                num_ranks=world.job.num_ranks,
                seed=seed,
                draw=draw,
                planted=tuple(trouble.planted for trouble in world.troubles),
            )


def _word(name: str) -> str:
    return name.replace("look_alike: ", "alike ").replace(" ", "_").replace("%", "percent")


def world_of(case: Case) -> World:
    """Return the job and the troubles of a case."""
    place = next(n for n, family in enumerate(FAMILIES) if family.name == case.family)
    return _world(place, int(case.name.split("-")[-2]), case.seed)


@lru_cache(maxsize=32)
def _world(place: int, number: int, seed: int) -> World:
    family = FAMILIES[place]
    job = draw_job(seed, family.wishes[number % len(family.wishes)])
    draws = np.random.default_rng([seed, 10])
    size = family.sizes[number % len(family.sizes)]
    wobble = 1.0 + (size - 1.0) * float(draws.uniform(0.9, 1.1)) if size > 1.0 else size
    return World(job=job, troubles=family.plants(job, draws, round(wobble, 4)))
