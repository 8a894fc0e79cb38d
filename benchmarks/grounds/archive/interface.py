"""Write a case's files, price what was planted, and say how slow its ranks truly are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.archive.catalogue import recipes
from benchmarks.grounds.archive.files import write_files
from benchmarks.grounds.archive.job import Effect, Job, Kind
from benchmarks.grounds.archive.schedule import simulate
from benchmarks.grounds.ground import Case, Planted, Variation


def _job_of(case: Case) -> Job:
    return recipes(case.draw)[case.name].job


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of `case`; return what was planted, each with its price beside the others."""
    job = _job_of(case)
    run = simulate(job, job.effects)
    write_files(job, run, directory)
    numbers = range(1, job.num_iterations + 1)
    priced = []
    for effect in job.effects:
        without = simulate(job, [other for other in job.effects if other is not effect])
        priced.append(effect.planted().priced(numbers, run.iteration_us, without.iteration_us))
    return tuple(priced)


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer each rank's passes take than on equal chips with nothing
    planted, (rank, iteration).
    """
    job = _job_of(case)
    real = simulate(job, job.effects).passes_us
    equal = simulate(job, (), equal_chips=True).passes_us
    slow: NDArray[np.float64] = real / equal
    return slow


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate a case's job without what was planted but with this variation; write its files into
    `directory`, if any. Return the time of each rank's passes in µs, (rank, iteration).
    """
    job = _job_of(case)
    if variation.chip_spread_ratio is not None:
        job = replace(job, site=replace(job.site, chip_spread=variation.chip_spread_ratio))
    effects: tuple[Effect, ...] = ()
    if variation.slow_rank >= 0:
        rank = (variation.slow_rank,)
        effects = (Effect(kind=Kind.GPU_CLOCK, factor=variation.factor, ranks=rank),)
    run = simulate(job, effects)
    if directory is not None:
        write_files(job, run, directory)
    return run.passes_us
