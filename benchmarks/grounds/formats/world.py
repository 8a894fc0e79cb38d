"""Simulate a job with or without what is planted: all iterations, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.formats.draws import Chips, Draws
from benchmarks.grounds.formats.engine import Engine
from benchmarks.grounds.formats.hardware import Cluster
from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.program import Bound, Code, Program
from benchmarks.grounds.formats.schedule import program_of
from benchmarks.grounds.formats.troubles import Effects, Trouble

Floats = NDArray[np.float64]
BETWEEN_NS = 1.5e6  # logging between two iterations


@dataclass(frozen=True, kw_only=True)
class World:
    """One job on one cluster: what is planted, and the job that it would be without."""

    job: Job
    cluster: Cluster
    seed: int
    troubles: tuple[Trouble, ...] = ()
    sound_job: Job | None = None  # where the cause is the shape of the model itself

    def sound(self) -> World:
        """Return the same without what is planted."""
        return replace(self, troubles=(), job=self.sound_job or self.job, sound_job=None)


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Something between two iterations that all ranks stand for."""

    after: int  # place of the iteration before it
    name: str
    begin: Floats  # (rank,) ns
    end: Floats


@dataclass(frozen=True, kw_only=True)
class Run:
    """State when each operation was issued, began and ended: (iteration, operation) ns."""

    world: World
    program: Program
    issued: Floats
    start: Floats
    end: Floats
    notes: tuple[dict[int, str], ...]  # pauses that have a name, one entry an iteration
    pauses: tuple[Pause, ...]
    begin_ns: Floats  # (iteration, rank)
    end_ns: Floats

    @property
    def iteration_times(self) -> Floats:
        """Return how long each iteration took, from the first begin to the last end."""
        return np.asarray(self.end_ns.max(1) - self.begin_ns.min(1))


@lru_cache(maxsize=4)
def _program(job: Job, cluster: Cluster) -> Program:
    return program_of(replace(job, iterations=()), cluster.chip)


def draws_of(world: World) -> Draws:
    """Return what draws the costs of a world."""
    program = _program(replace(world.job, iterations=(1,)), world.cluster)
    return Draws(world.job, world.cluster, program, world.seed)


def simulate(world: World, chips: Chips | None = None) -> Run:
    """Run all iterations of a job; `chips` in place of those that the seed draws."""
    job = world.job
    draws = draws_of(world)
    program = _program(replace(job, iterations=(1,)), world.cluster)
    chips = chips or Chips(job, world.seed, job.chip_spread)
    effects = Effects(world.troubles, world.seed, len(job.iterations))
    engine = Engine(program, job.shape.world)
    times: list[tuple[list[float], list[float], list[float]]] = []
    notes, pauses = [], list[Pause]()
    for place in range(len(job.iterations)):
        pauses += _between(world, engine, place, times[-1] if times else None, program)
        costs, named = draws.costs(place, chips, effects)
        times.append(engine.iteration(costs))
        notes.append(named)
    issued, start, end = (np.array([one[part] for one in times]) for part in range(3))
    firsts, lasts = _ends(program, job.shape.world)
    return Run(
        world=world, program=program, issued=issued, start=start, end=end, notes=tuple(notes),
        pauses=tuple(pauses), begin_ns=start[:, firsts], end_ns=end[:, lasts],
    )  # fmt: skip


def _ends(program: Program, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the marks at which each rank's iteration begins and ends."""
    spans = {one.rank: one for one in program.spans if one.name == "iteration"}
    ranks = range(num_ranks)
    return [spans[rank].begin for rank in ranks], [spans[rank].end for rank in ranks]


def _between(
    world: World, engine: Engine, place: int,
    last: tuple[list[float], list[float], list[float]] | None, program: Program,
) -> list[Pause]:  # fmt: skip
    """Let time pass before an iteration; return what the pause was, where it has a name."""
    job, count = world.job, world.job.shape.world
    number = job.iterations[place]
    rng = np.random.default_rng((world.seed, 9, number))
    if not place:
        for rank in range(count):
            engine.pause(rank, rng.uniform(1e6, 4e6))
        return []
    before = job.iterations[place - 1]
    skipped = number - before - 1
    length = BETWEEN_NS * rng.uniform(0.7, 1.3)
    if skipped and last is not None:
        length += skipped * (max(last[2]) - min(time for time in last[1] if time))
    found = list[Pause]()
    names = [
        name
        for name, every in (("save-checkpoint", job.checkpoint_every), ("", job.evaluate_every))
        if every and before % every == 0
    ]
    if names:
        own = rng.uniform(0.95, 1.0, count)
        common = rng.uniform(4e8, 9e8)
        begin = np.array([max(engine.host[rank], engine.stream[rank]) for rank in range(count)])
        until = begin + common * own
        found = [
            Pause(after=place - 1, name=name, begin=begin, end=until) for name in names if name
        ]
        for rank in range(count):
            engine.pause(rank, float(until[rank] - begin[rank]))
        latest = max(engine.host)
        for rank in range(count):
            engine.host[rank] = latest  # a checkpoint and an evaluation end together
    for rank in range(count):
        engine.pause(rank, length + rng.exponential(5e4))
    return found


def pass_times(world: World, chips: Chips | None) -> Floats:
    """Return the time of the kernels of each rank's passes, (rank, iteration) ns.

    Waiting, communication and what the host does are left out.
    """
    draws = draws_of(world)
    program = _program(replace(world.job, iterations=(1,)), world.cluster)
    counted = np.array(
        [
            one.code is Code.KERNEL and one.microbatch >= 0 and one.bound is not Bound.NONE
            for one in program.operations
        ]
    )
    effects = Effects(world.troubles, world.seed, len(world.job.iterations))
    count = world.job.shape.world
    return np.array(
        [
            np.bincount(
                draws.known.rank[counted],
                draws.kernels(place, chips, effects)[counted],
                minlength=count,
            )
            for place in range(len(world.job.iterations))
        ]
    ).T
