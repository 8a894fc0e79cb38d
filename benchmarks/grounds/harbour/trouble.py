"""Say what goes wrong where and when, and lay it out as what each rank feels in each iteration.

`Conditions` are the only thing the simulation knows of faults: how many times slower each rank's
products, memory, launches and links are, how long its pauses. All draws of sound life are made
first and never depend on troubles, so a job with a trouble and the same job without it differ by
the trouble alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.harbour.hardware import (
    MEMORY_SHARE_OF_CLOCK,
    Array,
    generator,
    lasting,
    static_slowness,
    wander,
)
from benchmarks.grounds.harbour.jobs import Job

_MOST_PAUSES = 3  # of the collector in one iteration
_COMMON_PAUSE_S = 0.012
_DAEMON_SHARE = 0.35  # of microbatches that meet a busy daemon


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """State what ails `ranks` from one iteration to another (0: to the end).

    `factor` is how many times slower what it concerns becomes. With `share` below 1 it comes in
    bursts that cover this share of the time: of whole iterations, or of `burst_s` each.
    """

    kind: str
    ranks: tuple[int, ...]
    factor: float
    first_iteration: int = 1
    last_iteration: int = 0
    share: float = 1.0
    burst_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Burst:
    """State a slowness that comes and goes within iterations, of the `ranks` of the job."""

    ranks: tuple[int, ...]
    factor: float
    length_s: float
    share: float
    phase: NDArray[np.float64]  # (iteration,), of a period
    holds: NDArray[np.bool_]  # (iteration,)

    def at(self, start_s: Array, first_rank: int) -> Array:
        """Return how many times slower work is that starts at `start_s`, of a stage's ranks."""
        period_s = self.length_s / self.share
        turn = (start_s / period_s + self.phase[:, None]) % 1.0
        slow = np.ones_like(start_s)
        for rank in self.ranks:
            if 0 <= (own := rank - first_rank) < start_s.shape[1]:
                struck = (turn[:, own] < self.share) & self.holds
                slow[struck, own] = self.factor
        return slow


@dataclass(kw_only=True)
class Conditions:
    """Hold what every rank feels in every iteration, (iteration, rank): 1 is as on a sound one."""

    products: Array
    memory: Array
    launching: Array
    link: Array
    nic: Array
    length: Array  # of the sequences, beside their own spread
    load: Array  # of the experts
    loading: Array  # time that a worker takes for a batch
    layer: Array  # of layers that are heavier than others of their kind should be
    daemon: Array  # host time that each launch of a disturbed microbatch loses, in launches
    pauses: NDArray[np.float64]  # (pause, iteration, rank), s
    pause_places: NDArray[np.int64]  # (pause, iteration, rank), microbatch
    pairs: list[tuple[tuple[int, ...], NDArray[np.float64]]]
    bursts: list[Burst]


def held(job: Job, trouble: Trouble, seed: int) -> NDArray[np.bool_]:
    """Return in which iterations a trouble is there; whole iterations of it are drawn in runs."""
    numbers = np.array(job.iterations)
    holds = numbers >= trouble.first_iteration
    if trouble.last_iteration:
        holds &= numbers <= trouble.last_iteration
    if trouble.share < 1 and not trouble.burst_s:
        holds &= _in_runs(len(numbers), trouble.share, seed)
    return holds


def _in_runs(count: int, share: float, seed: int) -> NDArray[np.bool_]:
    """Return runs of two or so places that cover `share` of `count` places, one at least."""
    random = generator(seed, "bursts")
    wanted = max(1, round(share * count))
    chosen = np.zeros(count, bool)
    while chosen.sum() < wanted:
        begin = int(random.integers(count))
        chosen[begin : begin + min(2, wanted - int(chosen.sum()))] = True
    return chosen


def conditions(
    job: Job, troubles: Sequence[Trouble], seed: int, times_s: NDArray[np.float64], *, even: bool
) -> Conditions:
    """Return what ranks feel; with `even`, chips differ by nothing, and no clock wanders."""
    shape = (len(job.iterations), job.num_ranks)
    clocks = np.ones(shape)
    if not even:
        clocks *= static_slowness(job.site, job.num_ranks, seed)
        clocks *= wander(job.site, job.num_ranks, times_s, seed)
    pauses, places = _collections(job, shape, seed)
    site, hosts = job.site, [job.host_of(rank) for rank in range(job.num_ranks)]
    ways = lasting(site.link_spread_ratio, hosts[-1] + 1, seed, "ways")
    found = Conditions(
        products=clocks,
        memory=clocks**MEMORY_SHARE_OF_CLOCK,
        launching=np.ones(shape) * lasting(site.launch_spread_ratio, shape[1], seed, "cores"),
        link=np.ones(shape) * lasting(site.link_spread_ratio, shape[1], seed, "links"),
        nic=_congestion(job, shape[0], seed)[:, None] * ways[hosts],
        length=np.ones(shape),
        load=np.ones(shape),
        loading=np.ones(shape),
        layer=np.ones(shape),
        daemon=np.zeros(shape),
        pauses=pauses,
        pause_places=places,
        pairs=[],
        bursts=[],
    )
    _move_expert(found, job, seed)
    for trouble in troubles:
        _apply(found, job, trouble, seed + 7919 * (1 + trouble.ranks[0]))
    return found


def _collections(
    job: Job, shape: tuple[int, int], seed: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return pauses of Python's collector in sound life: at times of their own, or together."""
    random = generator(seed, "collector")
    lengths = _COMMON_PAUSE_S * np.exp(0.3 * random.standard_normal((_MOST_PAUSES, *shape)))
    strikes = random.random((_MOST_PAUSES, *shape))
    places = random.integers(job.num_microbatches, size=(_MOST_PAUSES, *shape))
    if job.collections == "together":  # --manual-gc: everybody, every fourth iteration
        due = (np.array(job.iterations) % 4 == 0)[None, :, None] & (strikes > -1)
        first = np.arange(_MOST_PAUSES)[:, None, None] == 0
        return np.where(due & first, lengths, 0.0), np.zeros_like(places)
    chance = 0.06 if job.collections == "scattered" else 0.0
    return np.where(strikes < chance, lengths, 0.0), places


def _congestion(job: Job, count: int, seed: int) -> NDArray[np.float64]:
    """Return how many times slower the network between hosts is for everybody, (iteration,)."""
    random = generator(seed, "congestion")
    busy = np.convolve(random.random(count + 2), np.ones(3) / 3, mode="valid")
    return 1 + (job.congestion - 1) * busy


def _move_expert(found: Conditions, job: Job, seed: int) -> None:
    """Give another rank of each expert-parallel group more to do in each iteration."""
    if job.moving_ratio == 1.0:
        return
    count, num_ranks = found.load.shape
    hot = generator(seed, "expert").integers(job.ep, size=(count, 1))
    found.load[np.arange(num_ranks) % job.ep == hot] *= job.moving_ratio


def _apply(found: Conditions, job: Job, trouble: Trouble, seed: int) -> None:
    """Let a trouble be felt."""
    holds = held(job, trouble, seed)
    if trouble.burst_s:
        phase = generator(seed, "phase").random(len(holds))
        found.bursts.append(
            Burst(
                ranks=trouble.ranks, factor=trouble.factor, length_s=trouble.burst_s,
                share=trouble.share, phase=phase, holds=holds,
            )
        )  # fmt: skip
        return
    if trouble.kind == "pair":
        found.pairs.append((trouble.ranks, np.where(holds, trouble.factor, 1.0)))
        return
    if trouble.kind == "gc":
        _pause(found, trouble, holds, seed)
        return
    cells = np.ix_(holds, np.array(trouble.ranks))
    for concerned, power in _concerned(found, trouble.kind):
        concerned[cells] *= trouble.factor**power
    if trouble.kind == "daemon":
        struck = generator(seed, "daemon").random((int(holds.sum()), len(trouble.ranks)))
        found.daemon[cells] += (trouble.factor - 1) * (0.5 + struck)


def _concerned(found: Conditions, kind: str) -> list[tuple[Array, float]]:
    """Return what a kind of trouble slows, and by which power of its factor."""
    return {
        "gpu_clock": [(found.products, 1.0), (found.memory, MEMORY_SHARE_OF_CLOCK)],
        "throttling": [(found.products, 1.0), (found.memory, MEMORY_SHARE_OF_CLOCK)],
        "power_cap": [(found.products, 1.0), (found.memory, MEMORY_SHARE_OF_CLOCK)],
        "hbm": [(found.memory, 1.0)],
        "nvlink": [(found.link, 1.0)],
        "nic": [(found.nic, 1.0)],
        "rail": [(found.nic, 1.0)],
        "host_cpu": [(found.launching, 1.0)],
        "host_memory": [(found.launching, 0.7), (found.loading, 1.0)],
        "daemon": [],
        "loader": [(found.loading, 1.0)],
        "long_sequences": [(found.length, 1.0)],
        "hot_expert": [(found.load, 1.0)],
        "heavy_stage": [(found.layer, 1.0)],
    }[kind]


def _pause(found: Conditions, trouble: Trouble, holds: NDArray[np.bool_], seed: int) -> None:
    """Let the collector stop the thread of each rank once in each iteration, `factor` ms long."""
    random = generator(seed, "pause")
    for rank in trouble.ranks:
        lengths = trouble.factor / 1000 * np.exp(0.15 * random.standard_normal(len(holds)))
        found.pauses[0, holds, rank] = lengths[holds]


def disturbed(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return where a busy daemon takes the core in one microbatch: 1, elsewhere 0."""
    return (rng.random(shape) < _DAEMON_SHARE).astype(float)
