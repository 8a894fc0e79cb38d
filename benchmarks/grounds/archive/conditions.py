"""Compute how fast every rank's parts are in every iteration, with all that was planted or without.

Arrays are (pp, dp, tp, iteration), or with a microbatch at the end. A clock of 1.1 means that
products take 1.1 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.archive.job import Effect, Job, Kind
from benchmarks.grounds.archive.noise import (
    Array,
    bursts,
    chips,
    gamma,
    generator,
    lognormal,
    wander,
)

HEAT_MEMORY = 0.8
BURST_PASSES = 8.0  # a throttled stretch's mean length, in passes
PAUSE_US = 45_000.0  # a full collection of Python's collector over some millions of objects
PAUSES_PER_ITERATION = 0.8
HICCUP_US = 3000.0  # daemons, page faults, interrupts: now and then, on any host
STALL_US = 1500.0  # a host short of memory reclaims pages in the middle of a launch


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """State everybody's speeds."""

    clock: Array  # (pp, dp, tp, iteration, microbatch)
    memory: Array  # (pp, dp, tp, iteration)
    noise: Array  # (pp, dp, tp, iteration): of everything that the chip does
    launch_us: Array  # (pp, dp, tp, iteration)
    load_us: Array  # (pp, dp, tp, iteration, microbatch)
    pause_us: Array  # (pp, dp, tp, iteration, microbatch): the host stops in a forward pass
    length: Array  # (dp, iteration, microbatch): tokens by the usual ones
    tp_link: Array  # (pp, dp, iteration): how many times slower reductions in the group are
    nic: Array  # (rank, iteration): how many times slower the rank's way out of its host is


def holds(effect: Effect, num_iterations: int) -> Array:
    """Return 1 for the iterations in which an effect holds, else 0, (iteration,)."""
    number = np.arange(1, num_iterations + 1)
    return ((number >= effect.first) & (number <= (effect.last or num_iterations))).astype(float)


def _slower(job: Job, effects: Sequence[Effect], kinds: Sequence[Kind]) -> Array:
    """Return how many times slower ranks are by effects of these kinds, (rank, iteration)."""
    slow = np.ones((job.shape.num_ranks, job.num_iterations))
    for effect in effects:
        if effect.kind in kinds:
            slow[list(effect.ranks)] *= 1 + (effect.factor - 1) * holds(effect, job.num_iterations)
    return slow


def _chip_clock(job: Job, *, equal_chips: bool) -> Array:
    """Return the clocks of sound chips, (rank, iteration)."""
    site, shape, num = job.site, job.shape, job.num_iterations
    made = chips(generator(job.seed, "chips"), site.chip_spread, shape.num_ranks)
    heat = wander(generator(job.seed, "heat"), site.wander, shape.num_ranks, num, HEAT_MEMORY)
    room = wander(generator(job.seed, "room"), site.wander / 2, shape.num_hosts, num, HEAT_MEMORY)
    on_host = np.arange(shape.num_ranks) // shape.gpus_per_host
    clock = np.ones_like(heat) if equal_chips else made[:, None] + heat + room[on_host]
    iterations = np.arange(num)
    warmth = generator(job.seed, "warmth").uniform(0.6, 1.4, (shape.num_ranks, 1))
    warmth = job.habits.heats_up * (np.ones_like(warmth) if equal_chips else warmth)
    clock = clock * (1 + warmth * (1 - np.exp(-iterations / 4)))
    capped: Array = clock * np.where(iterations >= num // 2, site.slow_alike, 1)
    return capped


def _burst_clock(job: Job, effects: Sequence[Effect]) -> Array:
    """Return what throttling multiplies clocks by, (rank, iteration, microbatch)."""
    shape = (job.shape.num_ranks, job.num_iterations, job.model.num_microbatches)
    clock = np.ones(shape)
    for effect in effects:
        if effect.kind is Kind.THROTTLING:
            rng = generator(job.seed, f"bursts {effect.ranks[0]}")
            signal = bursts(rng, effect.share, BURST_PASSES, shape[1] * shape[2])
            held = signal.reshape(shape[1:]) * holds(effect, shape[1])[:, None]
            clock[list(effect.ranks)] *= 1 + (effect.factor - 1) * held
    return clock


def _noise(job: Job) -> Array:
    """Return noise that all operations of a host, and of a rank, share in one iteration."""
    shape, num = job.shape, job.num_iterations
    of_rank = gamma(generator(job.seed, "rank noise"), job.site.rank_cv, (shape.num_ranks, num))
    of_host = gamma(generator(job.seed, "host noise"), job.site.host_cv, (shape.num_hosts, num))
    return of_rank * of_host[np.arange(shape.num_ranks) // shape.gpus_per_host]


def _launch_us(job: Job, effects: Sequence[Effect]) -> Array:
    """Return the host's time for a launch, (rank, iteration)."""
    shape, num, habits = job.shape, job.num_iterations, job.habits
    rng = generator(job.seed, "launches")
    drawn = lognormal(rng, job.site.launch_cv, (shape.num_ranks, num))
    drawn *= lognormal(rng, job.site.launch_cv / 2, (shape.num_ranks, 1))
    slow = _slower(job, effects, (Kind.HOST_CPU,))
    slow *= 1 + 0.5 * (_slower(job, effects, (Kind.HOST_MEMORY,)) - 1)
    number = np.arange(1, num + 1)
    warm = 1 + (habits.warms_up - 1) * 0.4 ** (number - 1)
    if habits.checkpoint_every:  # written out beside the next iteration
        warm = warm * np.where((number > 1) & (number % habits.checkpoint_every == 1), 1.6, 1)
    launch: Array = job.site.launch_us * drawn * slow * warm
    return launch


def _load_us(job: Job, effects: Sequence[Effect]) -> Array:
    """Return the time to get a batch, (rank, iteration, microbatch), skewed as storage is."""
    size = (job.shape.num_ranks, job.num_iterations, job.model.num_microbatches)
    drawn = lognormal(generator(job.seed, "loads"), 0.35, size)
    slow = _slower(job, effects, (Kind.LOADER, Kind.HOST_MEMORY))
    return job.site.load_us * drawn * slow[..., None]


def _pause_us(job: Job, effects: Sequence[Effect]) -> Array:
    """Return pauses of the host within forward passes, (rank, iteration, microbatch)."""
    num = (job.num_iterations, job.model.num_microbatches)
    rng = generator(job.seed, "hiccups")
    happens = rng.random((job.shape.num_ranks, *num)) < job.site.hiccup_chance
    pauses = happens * rng.exponential(HICCUP_US, happens.shape)
    for effect in effects:
        held = holds(effect, num[0])[:, None]
        for rank in effect.ranks:
            rng = generator(job.seed, f"pauses {effect.kind} {rank}")
            if effect.kind is Kind.GC:
                often = rng.random(num) < PAUSES_PER_ITERATION / num[1]
                pauses[rank] += held * often * PAUSE_US * effect.factor * gamma(rng, 0.2, num)
            elif effect.kind is Kind.HOST_MEMORY:
                often = rng.random(num) < 0.35
                pauses[rank] += held * often * STALL_US * (effect.factor - 1) * gamma(rng, 1, num)
    return pauses


def _length(job: Job, effects: Sequence[Effect]) -> Array:
    """Return the tokens of each replica's microbatches by the usual ones."""
    shape = job.shape
    length = np.ones((shape.dp, job.num_iterations, job.model.num_microbatches))
    for effect in effects:
        if effect.kind is Kind.LONG_SEQUENCES:
            length[effect.ranks[0] // shape.tp % shape.dp] *= effect.factor
        elif effect.kind is Kind.UNEVEN_SEQUENCES:
            cv = effect.factor - 1
            length *= lognormal(generator(job.seed, "lengths"), cv, length.shape)
    return length


def _tp_link(job: Job, effects: Sequence[Effect]) -> Array:
    """Return how many times slower a tensor group's ring is: as slow as its slowest link."""
    shape = job.shape
    link = np.ones((shape.pp * shape.dp, job.num_iterations))
    for effect in effects:
        if effect.kind is Kind.NVLINK:
            slow = 1 + (effect.factor - 1) * holds(effect, job.num_iterations)
            link[effect.ranks[0] // shape.tp] *= slow
    return link.reshape(shape.pp, shape.dp, -1)


def conditions_of(job: Job, effects: Sequence[Effect], *, equal_chips: bool = False) -> Conditions:
    """Return the conditions under these effects; `equal_chips` makes all chips one and steady."""
    shape = job.shape
    grid = (shape.pp, shape.dp, shape.tp)

    def placed(per_rank: Array) -> Array:
        return per_rank.reshape(*grid, *per_rank.shape[1:])

    clock = _chip_clock(job, equal_chips=equal_chips)
    clock = clock * _slower(job, effects, (Kind.GPU_CLOCK, Kind.SLOW_HOST))
    return Conditions(
        clock=placed(clock[..., None] * _burst_clock(job, effects)),
        memory=placed(_slower(job, effects, (Kind.HBM,))),
        noise=placed(_noise(job)),
        launch_us=placed(_launch_us(job, effects)),
        load_us=placed(_load_us(job, effects)),
        pause_us=placed(_pause_us(job, effects)),
        length=_length(job, effects),
        tp_link=_tp_link(job, effects),
        nic=_slower(job, effects, (Kind.NIC, Kind.RAIL)),
    )
