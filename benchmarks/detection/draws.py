"""Windows drawn from laws of noise: a second generator, which shares nothing with
`megascan.simulate`.

It draws the times of passes directly and gives them to the detector as observations. No order of
operations, no communication; what is tested is the statistics alone.

    log time = stage + operation + iteration + data(replica, microbatch) + level(rank)
             + wander(rank, iteration) + noise(rank, iteration, operation)  [+ fault]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from detect.observe.members import Members, place_of
from detect.observe.observations import Observations
from detect.observe.operations import Work
from megascan.arrays import Floats
from megascan.topology import Layout

Generator = np.random.Generator

FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 10e6, 20e6, 5e6


@dataclass(frozen=True, kw_only=True)
class Law:
    """How healthy times vary. Ratios are standard deviations of the logarithm."""

    operation: Callable[[Generator, tuple[int, ...]], Floats]
    """Noise of single operations, (rank, iteration, operation)."""
    level_ratio: float = 0.003
    """Lasting differences between devices."""
    wander_ratio: float = 0.0
    """Noise that a rank's operations of one iteration share."""
    wander_memory: float = 0.0
    """Lag-1 correlation of it."""
    iteration_ratio: float = 0.0
    data_ratio: float = 0.0
    pause_probability: float = 0.0
    """Share of (rank, iteration) in which one operation takes 20 % of the iteration longer."""
    outlier_probability: float = 0.0
    """Share of (rank, iteration) in which everything takes twice as long."""
    missing_probability: float = 0.0
    """Share of operations that were not recorded."""
    warmup: float = 0.0
    heavy_stage: float = 1.0
    position_ratio: float = 0.0
    """How much slower TP rank 0 is in every replica."""


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """One drawn window. `slow` maps a rank to its factor in iterations `during` (from 0)."""

    layout: Layout
    law: Law
    seed: int
    num_iterations: int = 20
    num_microbatches: int = 8
    first_iteration: int = 3
    slow: Mapping[int, float] = field(default_factory=dict)
    during: tuple[int, int] = (0, 1 << 30)
    with_layers: bool = True


def draw(job: TableJob) -> Observations:
    """The job's observations."""
    random = np.random.default_rng([job.seed, 99])
    layout = job.layout
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    logs = _log_times(job, random, stretched=True)
    phase, microbatch = np.divmod(np.arange(2 * job.num_microbatches), job.num_microbatches)
    usual = np.where(phase == 0, FORWARD_NS, BACKWARD_NS)
    work = Work(log_ns=logs + np.log(usual), phase=phase, microbatch=microbatch)
    layers = None
    if job.with_layers:
        layers = Work(
            log_ns=_log_times(job, np.random.default_rng([job.seed, 99]), stretched=False)
            + np.log(usual / 4),
            phase=phase,
            microbatch=microbatch,
        )
    shape = logs.shape[:2]
    level = _levels(job, np.random.default_rng([job.seed, 5]))
    optimizer = OPTIMIZER_NS * np.exp(level + 0.02 * random.standard_normal(shape))
    busy = np.nansum(np.exp(work.log_ns), axis=2) + optimizer
    ranks = np.arange(layout.world_size)
    return Observations(
        members=Members(
            layout=layout,
            ranks=ranks,
            place=place_of(places),
            labels=tuple(layout.label(rank) for rank in ranks.tolist()),
            hosts=tuple(f"n{rank // 8}" for rank in ranks.tolist()),
            devices=("GPU",) * len(ranks),
            device_index=tuple(rank % 8 for rank in ranks.tolist()),
            workers=tuple((rank,) for rank in ranks.tolist()),
            device_kind="cuda",
        ),
        iterations=job.first_iteration + np.arange(job.num_iterations),
        iteration_ns=1.1 * busy.max(axis=0),
        work=work,
        layers=layers,
        busy_ns=busy,
        optimizer_ns=optimizer,
        host_gap_ns=np.full(shape, np.nan),
        stalled_ns=np.zeros(shape),
        stolen_ns=np.zeros(shape),
    )


def _levels(job: TableJob, random: Generator) -> Floats:
    """What a rank keeps, (rank, iteration): its chip, and its fault while it lasts."""
    shape = (job.layout.world_size, job.num_iterations)
    level = np.broadcast_to(job.law.level_ratio * random.standard_normal((shape[0], 1)), shape)
    level = level.copy()
    for rank, factor in job.slow.items():
        level[rank, job.during[0] : job.during[1] + 1] += np.log(factor)
    return level


def _log_times(job: TableJob, random: Generator, *, stretched: bool) -> Floats:
    """(rank, iteration, operation); `stretched` by what is uneven between stages."""
    law, layout = job.law, job.layout
    shape = (layout.world_size, job.num_iterations, 2 * job.num_microbatches)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    result = law.operation(random, shape)
    result += _levels(job, np.random.default_rng([job.seed, 5]))[:, :, None]
    result += _wander(law, shape[:2], random)[:, :, None]
    result += law.iteration_ratio * random.standard_normal((1, shape[1], 1))
    data = law.data_ratio * random.standard_normal((layout.dp, shape[1], job.num_microbatches))
    replica = np.array([place.dp for place in places])
    result += np.concatenate([data, data], axis=2)[replica]
    paused = random.random(shape[:2]) < law.pause_probability
    where = random.integers(0, shape[2], shape[:2])
    result[paused, where[paused]] += np.log(1 + 0.2 * job.num_microbatches)
    result += np.log(2.0) * (random.random(shape[:2]) < law.outlier_probability)[:, :, None]
    result[random.random(shape) < law.missing_probability] = np.nan
    fading = law.warmup * random.uniform(0.5, 1.5, shape[0])[:, None]
    result += (fading * 0.2 ** np.arange(shape[1]))[:, :, None]
    slow_position = np.array([place.tp == 0 and layout.tp > 1 for place in places])
    result += np.log1p(law.position_ratio) * slow_position[:, None, None]
    if stretched and layout.pp > 1:
        last = np.array([place.pp == layout.pp - 1 for place in places])
        result += np.log(law.heavy_stage) * last[:, None, None]
    return result


def _wander(law: Law, shape: tuple[int, int], random: Generator) -> Floats:
    steps = random.standard_normal(shape)
    memory = law.wander_memory
    path = np.empty(shape)
    path[:, 0] = steps[:, 0]
    for slot in range(1, shape[1]):
        path[:, slot] = memory * path[:, slot - 1] + np.sqrt(1 - memory**2) * steps[:, slot]
    return law.wander_ratio * path
