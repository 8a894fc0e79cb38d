"""Draw what sound jobs have luck with: chips, data, kernels, threads, networks, loaders, clocks.

What is drawn depends on the seed, the iteration and the stage alone, never on how long anything
took, so that a job with a fault and the same job without it share all their luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.depot.operations import Program

Figures = NDArray[np.float64]
END_S = 1.2e-6
"""Members of a collective leave it so much apart."""
_OF_DATA, _OF_CHIPS, _OF_STORAGE, _OF_BREAKS = 1001, 1002, 1003, 1004


@dataclass(frozen=True)
class Luck:
    """Of one iteration of one stage; matrices are (operation or microbatch, rank of the stage)."""

    tokens: Figures  # relative to a full microbatch
    squares: Figures
    loads: Figures  # of experts, relative to balance
    kernels: Figures  # how many times as long
    threads: Figures  # the same of launches
    stalls_s: Figures  # of the launching thread, by work
    talks: Figures
    ends_s: Figures  # by how much members leave a collective later than its end
    swap_ends_s: Figures
    meet_ends_s: Figures
    thoughts: Figures
    batches_s: Figures
    collect_s: Figures
    generations: NDArray[np.int64]
    swaps: Figures
    warmth: float  # how many times as long launches take in a run's first iterations


class Fortune:
    """All luck of one job with one seed."""

    def __init__(self, job: Job, seed: int, *, alike: bool = False) -> None:
        self.job, self.seed = job, seed
        rng = np.random.default_rng([seed, _OF_CHIPS])
        spread = 0.0 if alike else job.chip_spread_ratio
        self.clocks = np.exp(rng.normal(0, 1, job.num_ranks) * spread)
        self.memories = np.exp(rng.normal(0, 1, job.num_ranks) * 0.25 * spread)
        self.places = rng.integers(0, 1 << 30, job.num_ranks)

    def lengths(self, iteration: int) -> tuple[Figures, Figures]:
        """Return tokens and squares of each replica's microbatches, (microbatch, replica)."""
        job = self.job
        rng = np.random.default_rng([self.seed, _OF_DATA, iteration])
        shape = (job.microbatches, job.dp)
        drawn = rng.normal(0, 1, shape)
        if job.lengths == "packed":
            return np.ones(shape), np.clip(np.exp(drawn * job.length_spread_ratio) * 0.4, 0.05, 1)
        tokens = np.full(shape, job.fill_ratio)
        if job.lengths != "fixed":
            tokens = np.clip(np.exp(drawn * job.length_spread_ratio) * 0.7, 0.2, 1.0)
        if job.long_replica != 1.0:
            tokens = tokens / job.long_replica
            tokens[:, -1] *= job.long_replica
        if not (tokens == 1.0).all():
            steps = job.sequence // 64
            tokens = np.maximum(1, np.round(tokens * steps)) / steps  # padded to 64 tokens
        return tokens, tokens**2

    def _loads(self, iteration: int) -> Figures:
        """Return how full experts are, (microbatch, expert place)."""
        job = self.job
        rng = np.random.default_rng([self.seed, _OF_DATA, iteration, 1])
        share = np.exp(rng.normal(0, job.expert_spread_ratio, (job.microbatches, job.ep)))
        share[:, 0] *= job.hot_expert
        return np.asarray(share / share.mean(axis=1, keepdims=True))

    def of(self, program: Program, iteration: int) -> Luck:
        """Return the luck of one iteration of a stage."""
        job, number = self.job, job_ranks(self.job)
        rng = np.random.default_rng([self.seed, iteration, program.stage])
        replicas = np.arange(number) // (job.tp * job.cp)
        tokens, squares = (each[:, replicas] for each in self.lengths(iteration))
        num_works, num_talks = len(program.works), len(program.talks)
        warmth = self._warmth(iteration)
        launches = np.array([work.launches for work in program.works])
        expected = launches * job.hardware.launch_s * job.stalls_per_s
        stalled = rng.random((num_works, number)) < expected[:, None]
        stalls = rng.exponential(job.stall_s, (num_works, number)) * stalled
        collect_s, generations = self._collections(rng, program, iteration)
        return Luck(
            tokens=tokens,
            squares=squares,
            loads=self._loads(iteration)[:, np.arange(number) % job.ep],
            kernels=np.exp(rng.normal(0, job.kernel_noise_ratio, (num_works, number))),
            threads=np.exp(rng.normal(0, job.host_noise_ratio, (num_works, number))),
            stalls_s=stalls,
            talks=np.exp(rng.normal(0, job.nic_noise_ratio, (num_talks, number)))
            * self._jams(rng, (num_talks, number)),
            ends_s=rng.exponential(END_S, (num_talks, number)),
            swap_ends_s=rng.exponential(END_S, (program.num_swaps, number)),
            meet_ends_s=rng.exponential(END_S, (2, number)),
            thoughts=np.exp(rng.normal(0, job.host_noise_ratio, (program.num_thoughts, number))),
            batches_s=self._batches(rng, iteration),
            collect_s=collect_s,
            generations=generations,
            swaps=np.exp(rng.normal(0, job.nic_noise_ratio, (program.num_swaps, number))),
            warmth=warmth,
        )

    def _warmth(self, iteration: int) -> float:
        place = iteration - self.job.first_iteration
        surplus = self.job.warm_up - 1
        return 1 + surplus * (1.0, 0.15, 0.02)[place] if place < 3 and surplus else 1.0

    def _jams(self, rng: np.random.Generator, shape: tuple[int, int]) -> Figures:
        """Return how many times as long transfers take in a network that all share."""
        jammed = rng.random(shape) < self.job.nic_jam_share
        factors = 1 + (self.job.nic_jam_factor - 1) * rng.gamma(2.0, 0.5, shape)
        return np.where(jammed, factors, 1.0)

    def _batches(self, rng: np.random.Generator, iteration: int) -> Figures:
        """Return how long the loader's processes are at each batch."""
        job = self.job
        shape = (job.microbatches, job_ranks(job))
        times = job.load_s * np.exp(rng.normal(0, job.load_noise_ratio, shape))
        storage = np.random.default_rng([self.seed, _OF_STORAGE, iteration])
        if storage.random() < job.storage_jams:
            times = times * (1 + storage.gamma(2.0, 4.0))
        return np.asarray(times)

    def _collections(
        self, rng: np.random.Generator, program: Program, iteration: int
    ) -> tuple[Figures, NDArray[np.int64]]:
        """Return pauses of the collector and their generations; -1 where there is none."""
        shape = (program.num_collects, job_ranks(self.job))
        chance = rng.random(shape)
        generations = np.where(chance < 0.25, 0, -1)
        generations = np.where(chance < 0.03, 1, generations)
        pauses = np.where(generations == 1, 0.0015, 0.00025) * np.exp(rng.normal(0, 0.3, shape))
        old = np.exp(rng.normal(0, 0.1, shape[1])) * self.job.collect_s
        place = rng.integers(0, shape[0], shape[1])
        first = program.stage * shape[1]
        period = 7 if self.job.collects == "together" else 5
        lag = self.places[first : first + shape[1]] if self.job.collects == "turns" else 0
        due = (iteration + lag) % period == 0
        if self.job.collects != "rarely":
            columns = np.flatnonzero(np.broadcast_to(due, shape[1:]))
            rows = place[columns] if self.job.collects == "turns" else np.zeros_like(columns)
            pauses[rows, columns], generations[rows, columns] = old[columns], 2
        return pauses * (generations >= 0), generations

    def between_s(self, iteration: int) -> Figures:
        """Return what each rank's thread does between this iteration and the next."""
        rng = np.random.default_rng([self.seed, _OF_BREAKS, iteration])
        times = 0.0012 * np.exp(rng.normal(0, self.job.host_noise_ratio, self.job.num_ranks))
        times[0] += self.job.log_s * np.exp(rng.normal(0, 0.3))
        return np.asarray(times)

    def evaluation_s(self, iteration: int) -> float:
        """Return how long all evaluate after an iteration, 0 if they do not."""
        every = self.job.evaluates_every
        if not every or iteration % every:
            return 0.0
        return float(np.random.default_rng([self.seed, _OF_BREAKS, iteration, 1]).uniform(1.0, 4.0))

    def saving_s(self, iteration: int) -> Figures | None:
        """Return how long each rank writes its checkpoint after an iteration."""
        every = self.job.saves_every
        if not every or iteration % every:
            return None
        rng = np.random.default_rng([self.seed, _OF_BREAKS, iteration, 2])
        return np.asarray(rng.uniform(0.6, 2.0) * np.exp(rng.normal(0, 0.15, self.job.num_ranks)))


def job_ranks(job: Job) -> int:
    """Return how many ranks a stage has."""
    return job.ranks_of_stage
