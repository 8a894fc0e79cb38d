"""Offer the cases as every ground does: list them, write them, and tell what their chips are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.formats.catalogue import Style, cases, style_of, world_of
from benchmarks.grounds.formats.causes import SHAPED
from benchmarks.grounds.formats.draws import Chips
from benchmarks.grounds.formats.kineto import write_profiles
from benchmarks.grounds.formats.original import write_original
from benchmarks.grounds.formats.rankfiles import write_rank_files
from benchmarks.grounds.formats.troubles import Trouble
from benchmarks.grounds.formats.world import Run, World, pass_times, simulate
from benchmarks.grounds.ground import Case, Planted, Variation

__all__ = ["cases", "slowness", "write", "write_varied"]

Floats = NDArray[np.float64]


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of `case` into `directory`; return what was planted, with its cost."""
    world = world_of(case)
    run = simulate(world)
    _write(run, style_of(case), directory)
    return tuple(_priced(case, world, run, number, one) for number, one in enumerate(case.planted))


def _write(run: Run, style: Style, directory: Path) -> None:
    if style.format == "rank_files":
        write_rank_files(run, style.rank_files, directory)
    elif style.format == "original":
        write_original(run, style.original, directory)
    else:
        write_profiles(run, style.profile, directory)


def _priced(case: Case, world: World, run: Run, number: int, planted: Planted) -> Planted:
    """Return a cause with what it costs beside all others that are planted."""
    if planted.kind in SHAPED:
        without = world.sound()
        ratio = pass_times(world, None).sum(1) / pass_times(without, None).sum(1)
        planted = replace(planted, factor=round(float(ratio[list(planted.ranks)].mean()), 3))
    else:
        others = world.troubles[:number] + world.troubles[number + 1 :]
        without = replace(world, troubles=others)
    times = simulate(without).iteration_times
    return planted.priced(world.job.iterations, run.iteration_times, times)


def slowness(case: Case) -> Floats:
    """Return how many times longer the passes of each rank take than on chips without any
    difference and without what was planted, (rank, iteration).
    """
    world = world_of(case)
    chips = Chips(world.job, world.seed, world.job.chip_spread)
    return pass_times(world, chips) / pass_times(world.sound(), None)


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Floats:
    """Simulate the job of a case without what was planted, but with this variation; write its
    files where a directory is given. Return the time of each rank's passes, (rank, iteration).
    """
    world = world_of(case).sound()
    spread = variation.chip_spread_ratio
    chips = Chips(world.job, world.seed, world.job.chip_spread if spread is None else spread)
    if variation.slow_rank >= 0:
        slow = Trouble(kind="gpu_clock", touched=(variation.slow_rank,), factor=variation.factor)
        world = replace(world, troubles=(slow,))
    if directory is not None:
        _write(simulate(world, chips), style_of(case), directory)
    return pass_times(world, chips)
