"""The ground "mill": jobs operation by operation, each drawn anew, under several worlds.

Threads launch ahead of devices up to a bounded queue; 1F1B with messages that block, interleaved
chunks with messages that travel, DDP, ZeRO-1 and ZeRO-3, experts, long contexts (`program`); ranks
of a stage run together, with and without faults from the same draws (`engine`). Faults change rates
or stop things (`troubles`); layouts, models, machines, habits and noise are drawn (`job`), and so
is what goes wrong or only looks like it (`catalogue`). Rank files only (`files`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.mill.catalogue import cases, planted_of, scenario_of
from benchmarks.grounds.mill.engine import Engine
from benchmarks.grounds.mill.files import Writer
from benchmarks.grounds.mill.troubles import World

__all__ = ["cases", "slowness", "write", "write_varied"]


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with what it costs."""
    scenario = scenario_of(case)
    job, faults = scenario.job, scenario.faults
    without = [World(faults=tuple(it for it in faults if it is not one)) for one in faults]
    engine = Engine(job, [World(faults=faults), *without])
    run = engine.run()
    spared = [rank for fault in faults for rank in fault.ranks]
    Writer(engine, run.turns).write(directory, spared)
    planted = [
        planted_of(job, fault).priced(job.iterations, run.iteration_s[0], run.iteration_s[at])
        for at, fault in enumerate(faults, start=1)
    ]
    if scenario.likeness:
        plain = Engine(scenario.plain, [World()]).run().iteration_s[0]
        planted.append(scenario.likeness.priced(job.iterations, run.iteration_s[0], plain))
    return tuple(planted)


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer passes take than on even chips without faults, (rank, turn)."""
    scenario = scenario_of(case)
    worlds = [World(faults=scenario.faults), World(chip_spread=0.0)]
    own = Engine(scenario.job, worlds).run().own_s
    ratio: NDArray[np.float64] = own[0] / own[1]
    return ratio


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate the job without its faults, but with this variation; return the times of passes."""
    scenario = scenario_of(case)
    world = World(
        chip_spread=variation.chip_spread_ratio,
        slow_rank=variation.slow_rank,
        factor=variation.factor,
    )
    engine = Engine(scenario.job, [world])
    run = engine.run()
    if directory is not None:
        spared = [rank for fault in scenario.faults for rank in fault.ranks]
        Writer(engine, run.turns).write(directory, spared)
    passes: NDArray[np.float64] = run.own_s[0]
    return passes
