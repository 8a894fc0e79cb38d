"""List the cases, and write them.

A recipe is a family, the layouts that its cases go through in turn, what of a job is set, and what
is planted. Everything else of a case is drawn from its seed, which its family, its place and the
draw decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.harbour.files import write_files
from benchmarks.grounds.harbour.hardware import generator
from benchmarks.grounds.harbour.jobs import Job
from benchmarks.grounds.harbour.layouts import (
    EVERYWHERE,
    EXPERT,
    HOST_BOUND,
    HUGE,
    LARGE,
    MEDIUM,
    REPLICATED,
    SMALL,
    STAGED,
    changed,
    drawn_job,
)  # fmt: skip
from benchmarks.grounds.harbour.planting import (
    Plant,
    both,
    collecting,
    heavy_stage,
    hot_expert,
    long_replica,
    slow_chip,
    slow_host,
    slow_link,
    slow_loader,
    slow_thread,
)  # fmt: skip
from benchmarks.grounds.harbour.scenario import Scenario, simulate
from benchmarks.grounds.harbour.trouble import Trouble

GROUND = "harbour"
Changes: TypeAlias = dict[str, object]
"""Fields of a job or its site that are not drawn."""
_HOSTED = ("tp4pp2dp2", "tp2pp2dp4", "pp4dp4v2", "tp4pp4dp2", "tp4pp2dp4", "tp4pp4dp4")
"""Layouts on several hosts whose links can be told apart."""
_BOUND_BY_LINKS: Changes = {"overlap_grads": False, "nic_bytes_s": 22e9}
_LONG: Changes = {"num_iterations": 16, "interval": 1, "window": 1}
_SOUND_CHIPS: Changes = {"chip_spread_ratio": 0.007}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """State how the cases of one family are made."""

    family: str
    shapes: tuple[str, ...]
    count: int
    changes: Changes = field(default_factory=dict)
    plant: Plant | None = None


def _chips(
    percent: int, count: int, family: str = "gpu_clock", changes: Changes | None = None,
    *, shapes: tuple[str, ...] = EVERYWHERE, **more: object,
) -> Recipe:  # fmt: skip
    """Return the recipe of one slow GPU."""
    plant = partial(slow_chip, factor=1 + percent / 100, **more)  # type: ignore[arg-type]
    return Recipe(family=f"{family} {percent}%", shapes=shapes, count=count, plant=plant,
                  changes=changes or {})  # fmt: skip


def _faults() -> Iterator[Recipe]:
    """Yield what lies at a node."""
    yield _chips(5, 6, changes=_SOUND_CHIPS)
    yield _chips(10, 8, changes={"chip_spread_ratio": 0.012}, shapes=EVERYWHERE[::-1])
    yield _chips(20, 8)
    yield _chips(50, 6, shapes=EVERYWHERE[::-1])
    yield _chips(100, 4, shapes=("tp2dp4", "pp4dp2", "tp4pp2dp2", "tp4pp2dp4"))
    yield _chips(15, 4, "gpu_clock in a pipeline", shapes=("pp4", "pp8"))
    few: Changes = {"interval": 1, "window": 1, "num_iterations": 3}
    yield _chips(30, 4, "gpu_clock in few iterations", few, shapes=SMALL + LARGE[:1])
    uneven: Changes = {"lengths": "counted", "length_spread_ratio": 0.15}
    yield _chips(30, 3, "gpu_clock among uneven sequences", uneven, shapes=REPLICATED[1:])
    for percent in (10, 30):
        yield _chips(percent, 4, "gpu_clock from some iteration on", _LONG | _SOUND_CHIPS,
                     shapes=MEDIUM + LARGE[:2], when="from")  # fmt: skip
    yield _chips(30, 4, "gpu_clock for a stretch", _LONG, shapes=MEDIUM[::-1], when="stretch")
    yield _chips(30, 6, "throttling of iterations", _LONG, kind="throttling", share=0.2)
    yield _chips(30, 6, "throttling within iterations", _LONG, shapes=MEDIUM, kind="throttling",
                 share=0.2, burst_s=0.012)  # fmt: skip
    for percent in (50, 100):
        yield _chips(percent, 3, "hbm", _SOUND_CHIPS, shapes=MEDIUM, kind="hbm")
    for percent in (15, 30):
        yield Recipe(family=f"power_cap of a host {percent}%", shapes=_HOSTED, count=3,
                     plant=partial(slow_host, factor=1 + percent / 100,
                                   kind="power_cap"))  # fmt: skip
    yield from _link_faults()
    yield from _host_faults()
    one, other = partial(slow_chip, factor=1.25), partial(slow_chip, factor=1.4)
    yield Recipe(family="two faults: chips", shapes=MEDIUM, count=3, changes=_SOUND_CHIPS,
                 plant=both(one, other))  # fmt: skip
    yield Recipe(family="two faults: chip and NIC", shapes=_HOSTED, count=3,
                 changes=_BOUND_BY_LINKS,
                 plant=both(one, partial(slow_host, factor=3.0, kind="nic")))  # fmt: skip


def _link_faults() -> Iterator[Recipe]:
    """Yield links that are slow."""
    tensor = ("tp2dp4", "tp4dp2", "tp2pp2dp2", "tp4pp2dp2", "tp4pp4dp2")
    for factor in (2.0, 4.0):
        yield Recipe(family=f"nvlink {factor:.0f}x", shapes=tensor, count=3,
                     plant=partial(slow_link, factor=factor, kind="nvlink"))  # fmt: skip
        yield Recipe(family=f"nic {factor:.0f}x", shapes=_HOSTED, count=4,
                     changes=_BOUND_BY_LINKS,
                     plant=partial(slow_host, factor=factor, kind="nic"))  # fmt: skip
    yield Recipe(family="nic of two hosts 2x", shapes=("tp4dp2",), count=1,
                 changes=_BOUND_BY_LINKS,
                 plant=partial(slow_host, factor=2.0, kind="nic"))  # fmt: skip
    yield Recipe(family="rail 3x", shapes=("tp4pp2dp4", "tp4pp4dp4", "tp8dp8"), count=3,
                 changes=_BOUND_BY_LINKS | {"num_nics": 8},
                 plant=partial(slow_link, factor=3.0, kind="rail"))  # fmt: skip
    for factor, shapes in ((40.0, ("pp4", "pp8")), (8.0, ("tp2pp2dp2", "tp4pp2dp2", "pp2dp2"))):
        yield Recipe(family=f"pair {factor:.0f}x", shapes=shapes, count=len(shapes),
                     changes={"overlap_grads": False},
                     plant=partial(slow_link, factor=factor, kind="pair"))  # fmt: skip


def _host_faults() -> Iterator[Recipe]:
    """Yield threads, memory and loaders of hosts."""
    for factor in (2.0, 3.0):
        yield Recipe(family=f"host_cpu {factor:.0f}x", shapes=_HOSTED, count=3, changes=HOST_BOUND,
                     plant=partial(slow_host, factor=factor, kind="host_cpu"))  # fmt: skip
    yield Recipe(family="host_cpu of a rank", shapes=MEDIUM, count=3, changes=HOST_BOUND,
                 plant=partial(slow_thread, factor=2.0))  # fmt: skip
    yield Recipe(family="host_cpu: a busy daemon", shapes=MEDIUM[::-1], count=4,
                 changes=HOST_BOUND,
                 plant=partial(slow_thread, factor=4.0, kind="daemon"))  # fmt: skip
    yield Recipe(family="host_memory 4x", shapes=_HOSTED, count=4, changes={"hidden": 2048},
                 plant=partial(slow_host, factor=4.0, kind="host_memory"))  # fmt: skip
    for factor in (3.0, 5.0):
        yield Recipe(family=f"loader {factor:.0f}x", shapes=MEDIUM, count=3,
                     plant=partial(slow_loader, factor=factor))  # fmt: skip
    yield Recipe(family="loader of a host 4x", shapes=_HOSTED, count=3,
                 plant=partial(slow_loader, factor=4.0, whole_host=True))  # fmt: skip
    for pause_ms in (12.0, 40.0):
        yield Recipe(family=f"gc of a rank {pause_ms:.0f} ms", shapes=MEDIUM, count=3,
                     changes={"granularity": "full"},
                     plant=partial(collecting, pause_ms=pause_ms))  # fmt: skip


def _healthy() -> Iterator[Recipe]:
    """Yield sound jobs in which nothing was planted."""
    launching = HOST_BOUND | {"launch_noise_ratio": 0.3, "hiccup_ms": 2.0}
    first: Changes = {"first_iteration": 1, "interval": 1, "window": 1}
    sparse: Changes = {"interval": 10, "window": 1, "num_iterations": 12}
    table: tuple[tuple[str, int, tuple[str, ...], Changes], ...] = (
        ("plain", 14, EVERYWHERE, {}),
        ("large", 5, HUGE, {}),
        ("few iterations", 6, SMALL + LARGE, {"interval": 1, "window": 1, "num_iterations": 3}),
        ("two iterations", 4, SMALL[::-1], {"interval": 5, "window": 2, "num_iterations": 2}),
        ("host bound", 8, MEDIUM, HOST_BOUND),
        ("chips differ by 3%", 5, EVERYWHERE, {"chip_spread_ratio": 0.03}),
        ("chips differ by 5%", 5, EVERYWHERE[::-1], {"chip_spread_ratio": 0.05}),
        ("clocks wander", 4, MEDIUM + LARGE, {"wander_ratio": 0.012, "host_wander_ratio": 0.008}),
        ("noisy hosts", 4, MEDIUM + LARGE, launching),
        ("all hosts slow", 2, LARGE[1:], {"launch_us": 16.0, "hidden": 2048}),
        ("collectors scattered", 4, MEDIUM, {"collections": "scattered"}),
        ("collectors together", 2, LARGE, _LONG | {"collections": "together"}),
        ("missing rank", 3, MEDIUM, {"missing": (3,)}),
        ("checkpoints", 4, EVERYWHERE, _LONG | {"checkpoint_every": 4}),
        ("evaluations", 3, EVERYWHERE[::-1], _LONG | {"evaluate_every": 5}),
        ("warming up", 4, SMALL + MEDIUM, first),
        ("every tenth iteration", 4, EVERYWHERE, sparse),
        ("PCIe", 2, ("dp4", "dp8"), {"chip": "l40s", "hidden": 2048}),
        ("network congested", 4, _HOSTED, _BOUND_BY_LINKS | {"congestion": 3.0}),
    )
    for name, count, shapes, changes in table:
        yield Recipe(family=f"healthy: {name}", shapes=shapes, count=count, changes=changes)


def _look_alikes() -> Iterator[Recipe]:
    """Yield sound jobs that look as if something were wrong, by their data or by their design."""
    for percent in (3, 6, 12, 30):
        for lengths, count in (("counted", 2), ("packed", 1)):
            yield Recipe(
                family=f"look_alike: long sequences {percent}%, {lengths}", count=count,
                shapes=REPLICATED[(percent + count) % 8 :] + REPLICATED,
                changes={"lengths": lengths, "length_spread_ratio": 0.04},
                plant=partial(long_replica, factor=1 + percent / 100),
            )  # fmt: skip
    for factor in (1.2, 1.6):
        yield Recipe(family=f"look_alike: hot expert {factor}x", shapes=EXPERT, count=3,
                     plant=partial(hot_expert, factor=factor))  # fmt: skip
    yield Recipe(family="look_alike: heavy stage 30%", shapes=STAGED, count=5,
                 plant=partial(heavy_stage, factor=1.3))  # fmt: skip
    uneven: Changes = {"layers": (2, 1, 1, 2), "num_microbatches": 6}
    table: tuple[tuple[str, int, tuple[str, ...], Changes], ...] = (
        ("vocabulary", 6, STAGED, {"vocabulary": 152_000}),
        ("uneven layers", 4, ("pp4", "pp4dp2", "tp4pp4dp2"), uneven),
        ("wide layers", 3, ("tp2pp2dp2", "pp4dp2"), {"heavy_chunk": 1, "heavy_ratio": 1.4}),
        ("moving expert", 4, EXPERT, {"moving_ratio": 1.5}),
        ("uneven sequences, counted", 6, REPLICATED,
         {"lengths": "counted", "length_spread_ratio": 0.25}),
        ("uneven sequences, packed", 6, REPLICATED[::-1],
         {"lengths": "packed", "length_spread_ratio": 0.25}),
    )  # fmt: skip
    for name, count, shapes, changes in table:
        yield Recipe(family=f"look_alike: {name}", shapes=shapes, count=count, changes=changes)


def _recipes() -> Iterator[Recipe]:
    yield from _faults()
    yield from _healthy()
    yield from _look_alikes()


@lru_cache(maxsize=4)
def _drawn(draw: int) -> dict[str, tuple[Case, Scenario]]:
    """Return all cases of a draw with what is simulated for them, by name."""
    return {
        case.name: (case, scenario)
        for recipe in _recipes()
        for number in range(recipe.count)
        for case, scenario in [_made(recipe, number, draw)]
    }


def _made(recipe: Recipe, number: int, draw: int) -> tuple[Case, Scenario]:
    seed = crc32(f"{GROUND}/{recipe.family}/{number}/{draw}".encode()) >> 1
    random = generator(seed, "job")
    place = (number + draw) % len(recipe.shapes)
    shape = recipe.shapes[place]
    job = drawn_job(shape, random, recipe.changes)
    planted: list[tuple[Trouble, Planted]] = recipe.plant(job, random) if recipe.plant else []
    words = "".join(one if one.isalnum() else "-" for one in recipe.family.replace("%", ""))
    case = Case(
        ground=GROUND,
        name=f"{words}-{shape}-s{seed}",
        family=recipe.family,
        num_ranks=job.num_ranks,
        seed=seed,
        draw=draw,
        planted=tuple(truth for _, truth in planted),
    )
    troubles = tuple(trouble for trouble, _ in planted)
    return case, Scenario(job=job, seed=seed, troubles=troubles)


def cases(draw: int = 0) -> list[Case]:
    """Return all cases of a draw."""
    return [case for case, _ in _drawn(draw).values()]


def scenario_of(case: Case) -> Scenario:
    """Return what is simulated for a case."""
    return _drawn(case.draw)[case.name][1]


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the rank files of a case; return what was planted, with its cost."""
    scenario = scenario_of(case)
    outcome = simulate(scenario, recording=True)
    write_files(outcome, directory)
    numbers = scenario.job.iterations
    return tuple(
        truth.priced(numbers, outcome.iteration_s, simulate(scenario.without(place)).iteration_s)
        for place, truth in enumerate(case.planted)
    )


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer each rank's passes take than on even chips with nothing
    planted, (rank, iteration).
    """
    scenario = scenario_of(case)
    even = replace(scenario.without(), even=True)
    ratios: NDArray[np.float64] = (simulate(scenario).own_s / simulate(even).own_s).T
    return ratios


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate a sound job with other chips, one of them slow; return its passes' times."""
    scenario = scenario_of(case).without()
    job: Job = scenario.job
    if variation.chip_spread_ratio is not None:
        job = changed(job, {"chip_spread_ratio": variation.chip_spread_ratio})
    troubles: tuple[Trouble, ...] = ()
    if variation.slow_rank >= 0:
        slow = Trouble(kind="gpu_clock", ranks=(variation.slow_rank,), factor=variation.factor)
        troubles = (slow,)
    outcome = simulate(
        replace(scenario, job=job, troubles=troubles), recording=directory is not None
    )
    if directory is not None:
        write_files(outcome, directory)
    return np.ascontiguousarray(outcome.own_s.T)
