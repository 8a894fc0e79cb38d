"""Draw the conditions under which a job runs: what everything takes at every moment.

One set of arrays holds for one variant of a job: with all that goes wrong, or without a part of it.
All variants begin with the same draws, so what differs between them is what was planted. Indices
are (place, iteration, slice): iterations are the traced ones, a slice is a pass of the rank's own
order, the last one the update.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.noise import detours, tails, wander
from benchmarks.grounds.rack.places import Map

_SETTLING_ITERATIONS = 15.0
"""In which a chip comes two thirds of the way to its lasting temperature."""
_MEMORY_SPREAD = 0.3
"""Of the spread of clocks: memory runs at one clock on all chips, but for refresh and retries."""
_CHIP_DETOUR_CHANCE = 2e-4
_CHIP_DETOUR_S = 4e-4
_FIRST_LAUNCH = 3.0
"""Times the launch, when allocator, autotuning and lazy loading of modules see a pass first."""


@dataclass(eq=False)
class Conditions:
    """What everything takes; factors are of time, 1 is a sound unit."""

    clock: Floats  # (place, iteration, slice): products and attention
    memory: Floats  # what moves bytes on the device
    chip_stall_s: Floats  # the device stands still
    launch_s: Floats  # a kernel, on the host
    host_stall_s: Floats  # the thread is not scheduled
    collection_s: Floats  # the collector's pause before a pass
    prepare_s: Floats  # (place, iteration, microbatch): a worker of the loader
    nvlink: Floats  # (place, iteration, slice)
    nic: Floats
    pcie: Floats
    tokens: Floats  # (place, iteration, microbatch): relative to the nominal ones
    squares: Floats  # of the lengths, likewise
    load: Floats  # (layer, place of a stage, iteration, microbatch): tokens of its experts
    stage: Floats  # (stage,): how much more work than its plan says
    head: Floats  # (1,): of the output layer

    def copy(self) -> Conditions:
        """Return conditions of their own."""
        return Conditions(**{one.name: getattr(self, one.name).copy() for one in fields(self)})


def stacked(variants: list[Conditions]) -> Conditions:
    """Return all variants as one, along a new first axis."""
    return Conditions(
        **{
            one.name: np.stack([getattr(each, one.name) for each in variants])
            for one in fields(Conditions)
        }
    )


def sound(job: Job, where: Map, *, chip_spread: float | None = None) -> Conditions:
    """Draw the conditions of a job in which nothing goes wrong; a spread of 0: all chips alike."""
    draws = np.random.default_rng([job.seed, 1])
    shape = (job.num_ranks, len(job.tracing.iterations), job.num_slices)
    spread = job.weather.chip_spread if chip_spread is None else chip_spread
    clock, memory = _chips(job, draws, shape, spread)
    batches = (*shape[:2], job.habits.num_microbatches)
    tokens, squares = _lengths(job, where, draws, batches)
    layers = max(number for stage in job.model.layers for chunk in stage for number in chunk)
    return Conditions(
        clock=clock,
        memory=memory,
        chip_stall_s=detours(draws, shape, _CHIP_DETOUR_CHANCE, _CHIP_DETOUR_S),
        launch_s=_launches(job, draws, shape),
        host_stall_s=detours(draws, shape, job.weather.detour_chance, 4e-4),
        collection_s=_collections(job, draws, shape),
        prepare_s=_preparing(job, draws, batches),
        nvlink=np.ones(shape),
        nic=np.ones(shape),
        pcie=np.ones(shape),
        tokens=tokens,
        squares=squares,
        load=_loads(job, where, draws, layers),
        stage=np.ones(job.num_stages),
        head=np.ones(1),
    )


def _chips(
    job: Job, draws: np.random.Generator, shape: tuple[int, ...], spread: float
) -> tuple[Floats, Floats]:
    """Return the factors of products and of memory: leakage, temperature, what wanders."""
    places, num_iterations, _ = shape
    middle = np.clip(0.5 + 0.22 * draws.standard_normal((places, 2)), 0.0, 1.0) - 0.5
    ages = np.array(job.tracing.iterations) / _SETTLING_ITERATIONS
    warm = (0.6 + 0.8 * draws.random((places, 1))) * (1.0 - np.exp(-ages))
    slow = wander(draws, (places, num_iterations), job.weather.chip_wander, 0.85)
    own = spread * middle
    if not spread:
        warm = np.broadcast_to(1.0 - np.exp(-ages), warm.shape)
    clock = (1.0 + own[:, :1]) * (1.0 + job.weather.warming * warm) * np.exp(slow)
    memory = (1.0 + _MEMORY_SPREAD * own[:, 1:]) * np.exp(0.3 * slow)
    return (
        np.repeat(clock[:, :, None], shape[2], axis=2),
        np.repeat(memory[:, :, None], shape[2], axis=2),
    )


def _launches(job: Job, draws: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return what a launch takes: hosts differ, processes wander, a first pass is slow."""
    places, num_iterations, num_slices = shape
    weather = job.weather
    own = np.exp(weather.launch_spread * draws.standard_normal((places, 1, 1)))
    slow = np.exp(wander(draws, (places, num_iterations), 1.5 * weather.launch_tail, 0.7))
    found = job.habits.launch_s * own * slow[:, :, None] * tails(draws, shape, weather.launch_tail)
    if job.tracing.iterations[0] == 1:
        seen = np.arange(num_slices) < 2
        found[:, 0, :] *= np.where(seen, 2.0 * _FIRST_LAUNCH, _FIRST_LAUNCH)
    return np.asarray(found, dtype=np.float64)


def _collections(job: Job, draws: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return pauses of the collector of the oldest generation."""
    habits, found = job.habits, np.zeros(shape)
    offsets = draws.integers(0, max(1, habits.collects_every), shape[0])
    slices = draws.integers(0, shape[2] - 1, shape[0])
    lengths = habits.collection_s * tails(draws, shape[:2], 0.1)
    if not habits.collects_every:
        return found
    if habits.collects_together:
        offsets[:], slices[:] = offsets[0], 0
    for place, number in enumerate(offsets):
        for at, iteration in enumerate(job.tracing.iterations):
            if iteration % habits.collects_every == number:
                found[place, at, slices[place]] = lengths[place, at]
    return found


def _preparing(job: Job, draws: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    own = np.exp(0.08 * draws.standard_normal((shape[0], 1, 1)))
    return np.asarray(job.habits.prepares_s * own * tails(draws, shape, 0.12), dtype=np.float64)


def _lengths(
    job: Job, where: Map, draws: np.random.Generator, shape: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """Return tokens and squared lengths of each microbatch: all alike, or packed documents.

    A sequence packed from documents of lengths l_i costs sum l_i^2 instead of (sum l_i)^2.
    """
    by_replica = np.ones((job.layout.dp, *shape[1:]))
    if job.habits.is_packed:
        by_replica = 0.25 + 0.75 * draws.beta(2.5, 2.5, by_replica.shape)
    replica = np.concatenate([where.dp] * job.num_stages)
    return np.ones(shape), np.asarray(by_replica[replica], dtype=np.float64)


def _loads(job: Job, where: Map, draws: np.random.Generator, num_layers: int) -> Floats:
    """Return how many times the mean each place's experts get: a router is never even.

    Loads of the ranks of one expert-parallel group have the mean 1.
    """
    num_iterations, batches = len(job.tracing.iterations), job.habits.num_microbatches
    n = job.ranks_a_stage
    if not job.model.num_experts or job.layout.ep == 1:
        return np.ones((num_layers + 1, 1, 1, 1))
    lasting = wander(draws, (num_layers + 1, n, num_iterations), 0.05, 0.9)
    found = np.exp(lasting[..., None]) * tails(draws, (*lasting.shape, batches), 0.03)
    return evened(found, where)


def evened(load: Floats, where: Map) -> Floats:
    """Return loads whose mean over every expert-parallel group is 1."""
    groups = where.within[0]["ep"]
    means = load[:, groups.index].mean(axis=2)
    return np.asarray(load / means[:, groups.of], dtype=np.float64)
