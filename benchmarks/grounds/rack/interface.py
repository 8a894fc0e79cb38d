"""Offer the cases as every ground does: list them, write them, and tell what their chips are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.rack.catalogue import cases, world_of
from benchmarks.grounds.rack.conditions import Conditions, sound
from benchmarks.grounds.rack.files import write_files
from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.places import Map
from benchmarks.grounds.rack.run import Run, simulate, variants_of
from benchmarks.grounds.rack.trouble import Trouble, afflict, holding

__all__ = ["cases", "run_of", "slowness", "write", "write_varied"]


def run_of(job: Job, troubles: tuple[Trouble, ...]) -> Run:
    """Simulate a job with all troubles and, beside it, without each of them."""
    where = Map(job)
    return simulate(job, where, variants_of(job, where, troubles))


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of `case` into `directory`; return what was planted, with its cost."""
    world = world_of(case)
    run = run_of(world.job, world.troubles)
    write_files(run, world.troubles, directory)
    numbers = world.job.tracing.iterations
    return tuple(
        _shared(world.job, trouble, number).priced(numbers, run.times_s[0], run.times_s[1 + number])
        for number, trouble in enumerate(world.troubles)
    )


def _shared(job: Job, trouble: Trouble, number: int) -> Planted:
    """Return what was planted with the share of the time that its bursts really cover."""
    planted = trouble.planted
    if planted.share_of_time >= 1.0:
        return planted
    holds = holding(job, trouble, np.random.default_rng([job.seed, 2, number]))
    return replace(planted, share_of_time=round(float(holds.mean()), 4))


def slowness(case: Case) -> Floats:
    """Return how many times longer the passes of each rank take than on chips without any
    difference and without what was planted, (rank, iteration).
    """
    world = world_of(case)
    job, where = world.job, Map(world.job)
    real = variants_of(job, where, world.troubles)[0]
    run = simulate(job, where, [real, sound(job, where, chip_spread=0.0)])
    return np.asarray(run.busy_s[0] / run.busy_s[1], dtype=np.float64)


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Floats:
    """Simulate the job of a case without what was planted, but with this variation; write its
    files where a directory is given. Return the time of each rank's passes, (rank, iteration).
    """
    job = world_of(case).job
    where = Map(job)
    conditions = sound(job, where, chip_spread=variation.chip_spread_ratio)
    troubles: tuple[Trouble, ...] = ()
    if variation.slow_rank >= 0:
        troubles = (_slow(variation.slow_rank, variation.factor),)
        conditions = afflict(job, where, conditions, troubles[0], 0)
    run = _alone(job, where, conditions)
    if directory is not None:
        write_files(run, troubles, directory)
    return np.asarray(run.busy_s[0], dtype=np.float64)


def _slow(rank: int, factor: float) -> Trouble:
    planted = Planted(kind="gpu_clock", cause="compute", owner="node", ranks=(rank,), factor=factor)
    return Trouble(planted=planted, touched=(rank,))


def _alone(job: Job, where: Map, conditions: Conditions) -> Run:
    return simulate(job, where, [conditions])
