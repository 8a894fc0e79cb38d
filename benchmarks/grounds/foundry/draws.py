"""What chance decides in a job, and no fault changes: chips, noise, lengths, routers, pauses.

Everything is drawn before the job runs, by iteration, rank and operation, so that a job with a
fault and the same job without it have the same luck. Chips of one batch differ by 1 to 3 % under
the same power limit (Sinha et al., SC22); kernels repeat within half a percent with a heavy tail;
clocks wander by a few thousandths as chips get warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.foundry.hardware import MEMORY_SHARE_OF_CLOCK
from benchmarks.grounds.foundry.jobs import Job
from benchmarks.grounds.foundry.programs import Program

Floats = NDArray[np.float64]
_TAIL_SHARE = 0.002  # of kernels that take clearly longer: page walks, ECC scrubs, interrupts
USUAL_PAUSES = ((0.00015, 1.0), (0.0008, 0.1), (0.05, 0.004))
HEAVY_PAUSES = ((0.0003, 2.0), (0.002, 0.4), (0.25, 0.25))
"""Pauses of Python's collector by generation: seconds, and how many an iteration."""


@dataclass(frozen=True)
class Pause:
    """A moment at which a launching thread stands still: where in the program, for how long."""

    iteration: int  # from 0
    place: float  # share of the operations that lie before it
    duration_s: float
    generation: int = -1  # of a collection; -1: nothing that is recorded


class Draws:
    """All of a job's luck."""

    def __init__(self, job: Job, programs: list[Program], seed: int) -> None:
        self.job, self.programs, self.seed = job, programs, seed
        self.shape = (job.num_ranks, job.num_iterations)

    def stream(self, *purpose: int) -> np.random.Generator:
        """Return random numbers for one purpose."""
        return np.random.default_rng([self.seed, *purpose])

    @cached_property
    def nominal_s(self) -> float:
        """Return about how long an iteration takes."""
        job = self.job
        busiest = max(
            sum(each.products_s + each.attention_s + each.memory_s for each in program.costs)
            for program in self.programs
        )
        return busiest * (1.1 + (job.pp - 1) / job.num_microbatches / job.vpp)

    @cached_property
    def chips(self) -> Floats:
        """Return how many times longer each rank's products take: (rank,)."""
        machines = self.job.machines
        spread = np.log1p(machines.chip_spread_ratio) * self.stream(1).standard_normal(
            self.shape[0]
        )
        return np.asarray(machines.slow_alike_ratio * np.exp(spread))

    @cached_property
    def clocks(self) -> Floats:
        """Return the same of clocks that wander, (rank, iteration)."""
        stream, ratio = self.stream(2), self.job.machines.wander_ratio
        hosts = _wandering(stream, (self.shape[0], self.shape[1]), 0.95)
        hosts = hosts[[self.job.machines.host_of(rank) for rank in range(self.shape[0])]]
        own = _wandering(stream, self.shape, 0.8)
        return np.exp(ratio * (0.7 * hosts + 0.7 * own))

    @cached_property
    def lengths(self) -> tuple[Floats, Floats]:
        """Return shares of tokens and of attention's work, (replica, iteration, microbatch)."""
        job, stream = self.job, self.stream(3)
        shape = (job.dp, job.num_iterations, job.num_microbatches)
        tokens = np.ones(shape)
        if job.lengths == "packed":
            documents = stream.dirichlet(np.full(12, 0.7), shape)
            attention = (documents**2).sum(axis=-1)
        else:
            if job.lengths == "uneven":
                tokens = np.exp(job.length_spread_ratio * stream.standard_normal(shape))
            if job.long_replica >= 0:
                extra = np.full(shape[1:], job.long_ratio - 1.0)
                if job.long_varies:
                    extra *= np.clip(1 + _wandering(stream, shape[1:][::-1], 0.7).T, 0.2, 2.5)
                tokens[job.long_replica] *= 1 + extra
            if job.growth_from:
                tokens[:, np.array(job.all_iterations) >= job.growth_from] *= job.growth_ratio
            attention = tokens**2
        return tokens, attention

    @cached_property
    def loads(self) -> Floats:
        """Return how many times its even share each expert-parallel rank gets,
        (iteration, layer, place); layers are counted from 1.
        """
        job, stream = self.job, self.stream(4)
        num_layers = sum(job.layers) + 1
        logits = job.router_spread_ratio * stream.standard_normal((num_layers, job.experts))
        steps = stream.standard_normal((job.num_iterations, num_layers, job.experts))
        logits = logits + np.cumsum(job.router_drift_ratio * steps, axis=0)
        shares = np.exp(logits + 0.02 * stream.standard_normal(steps.shape))
        shares *= job.experts / shares.sum(axis=-1, keepdims=True)
        if job.capacity_ratio:
            shares = np.minimum(shares, job.capacity_ratio)
        by_place = shares.reshape(job.num_iterations, num_layers, job.ep, -1)
        return np.asarray(by_place.mean(axis=-1))

    def seconds_of(self, rank: int, clock: Floats, memory: Floats) -> Floats:
        """Return how long each operation's kernels take, (iteration, operation), at slower clocks
        and memories: (iteration,) each.
        """
        job, program = self.job, self.programs[rank]
        place = job.layout.coordinates(rank)
        products, attention, memories = self._costs(rank)
        microbatches = np.array(program.microbatches)
        tokens, squares = (
            np.where(microbatches >= 0, each[place.dp][:, microbatches], 1.0)
            for each in self.lengths
        )
        if job.experts:
            is_expert = np.array([each.is_expert for each in program.costs])
            loads = self.loads[:, np.array(program.layers), place.ep]
            tokens = tokens * np.where(is_expert, loads, 1.0)
        slow = clock[:, None]
        half = 1 + MEMORY_SHARE_OF_CLOCK * (slow - 1)
        seconds = slow * (products * tokens + attention * squares)
        seconds = seconds + memory[:, None] * half * memories * tokens
        return np.asarray(seconds * self.noise(rank))

    def _costs(self, rank: int) -> tuple[Floats, Floats, Floats]:
        costs = self.programs[rank].costs
        return (
            np.array([each.products_s for each in costs]),
            np.array([each.attention_s for each in costs]),
            np.array([each.memory_s for each in costs]),
        )

    def share_of_clock(self, rank: int) -> Floats:
        """Return which part of each operation a lower clock makes longer."""
        products, attention, memory = self._costs(rank)
        bound = products + attention
        return np.asarray(
            (bound + MEMORY_SHARE_OF_CLOCK * memory) / np.maximum(bound + memory, 1e-12)
        )

    def noise(self, rank: int) -> Floats:
        """Return the noise of kernels: log-normal, alike in neighbours, with a heavy tail."""
        stream, ratio = self.stream(5, rank), self.job.machines.kernel_noise_ratio
        shape = (self.job.num_iterations, len(self.programs[rank].costs))
        alike = np.repeat(stream.standard_normal((shape[0], shape[1] // 6 + 1)), 6, axis=1)
        noise = 0.75 * stream.standard_normal(shape) + 0.5 * alike[:, : shape[1]]
        tail = stream.random(shape) < _TAIL_SHARE
        noise = np.exp(ratio * noise) + tail * stream.exponential(0.12, shape)
        noise[np.array(self.job.all_iterations) == 1] *= 1.03
        return np.asarray(noise)

    @cached_property
    def threads(self) -> Floats:
        """Return how many times longer the launching threads take, (rank, iteration)."""
        job, stream = self.job, self.stream(6)
        own = job.machines.host_noise_ratio * _wandering(stream, self.shape, 0.5)
        fixed = 0.5 * job.machines.host_noise_ratio * stream.standard_normal((self.shape[0], 1))
        numbers = np.array(job.all_iterations)
        warming_up = np.select([numbers == 1, numbers == 2], [2.5, 1.2], 1.0)
        return np.asarray(np.exp(own + fixed) * warming_up)

    @cached_property
    def loading(self) -> Floats:
        """Return how long a worker prepares each microbatch, (rank, iteration, microbatch)."""
        job = self.job
        shape = (*self.shape, job.num_microbatches)
        ratio = job.loader_spread_ratio
        return np.asarray(
            job.load_ratio
            * job.microbatch_s
            * np.exp(ratio * self.stream(7).standard_normal(shape))
        )

    @cached_property
    def transfers(self) -> list[float]:
        """Return the noise of transfers, used in turn."""
        stream = self.stream(8)
        noise = np.exp(0.02 * stream.standard_normal(4096))
        tail = (stream.random(4096) < 0.004) * stream.exponential(0.4, 4096)
        return [float(each) for each in noise + tail]

    def pauses(self, rank: int) -> list[Pause]:
        """Return at which moments a rank's thread stands still in a sound job."""
        job, stream = self.job, self.stream(9, rank)
        pauses = [
            Pause(iteration, float(stream.random()), float(stream.exponential(0.003)))
            for iteration in range(job.num_iterations)
            for _ in range(stream.poisson(job.machines.daemons_per_s * self.nominal_s))
        ]
        if job.first_iteration == 1:  # compiling, allocating, connecting
            pauses.append(Pause(0, 0.05, 0.6 + 0.2 * float(stream.random())))
        return pauses + self.collections(rank)

    def collections(self, rank: int) -> list[Pause]:
        """Return the collections of Python's garbage in one process."""
        kinds = {"off": (), "usual": USUAL_PAUSES, "heavy": HEAVY_PAUSES}[self.job.collections]
        return collections_by(self.stream(10, rank), kinds, self.job.num_iterations)


def collections_by(
    stream: np.random.Generator, kinds: tuple[tuple[float, float], ...], num_iterations: int
) -> list[Pause]:
    """Return collections that come as regularly as allocations do: each generation's in its turn,
    from a drawn moment on.
    """
    pauses = []
    for generation, (seconds, per_iteration) in enumerate(kinds):
        moments = (stream.random() + np.arange(num_iterations * per_iteration + 1)) / per_iteration
        for moment in moments[moments < num_iterations]:
            duration = seconds * float(np.exp(0.2 * stream.standard_normal()))
            pauses.append(Pause(int(moment), float(moment % 1), duration, generation))
    return pauses


def _wandering(stream: np.random.Generator, shape: tuple[int, ...], correlation: float) -> Floats:
    """Return numbers of deviation 1, each row's neighbours correlated."""
    steps = stream.standard_normal(shape)
    for place in range(1, shape[1]):
        fresh = np.sqrt(1 - correlation**2) * steps[:, place]
        steps[:, place] = correlation * steps[:, place - 1] + fresh
    return np.asarray(steps)
