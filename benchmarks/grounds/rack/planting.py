"""Plant what goes wrong into a job: where, how much, and who may be named for it.

Who may be named is a matter of what an operator would do: for a GPU or its process the rank, for a
host or its NICs all ranks of the host. A link within a host is seen by the group that uses it only,
and any of the group leads to the right host: all of them may be named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.parts import Planner
from benchmarks.grounds.rack.places import members
from benchmarks.grounds.rack.trouble import Trouble

_TURN_S = 2.5e-3
"""Of Linux's scheduler, about."""

Plant = Callable[[Job, np.random.Generator, float], Trouble]
"""Of a job, draws and a size makes a trouble."""


def _rank(job: Job, draws: np.random.Generator) -> int:
    """Return a rank whose file is there."""
    there = [rank for rank in range(job.num_ranks) if rank not in job.tracing.missing]
    return int(draws.choice(there))


def _host(job: Job, draws: np.random.Generator) -> int:
    return int(draws.integers(job.rack.num_hosts))


def _on_rank(kind: str, cause: str, rank: int, factor: float) -> Trouble:
    planted = Planted(kind=kind, cause=cause, owner="node", ranks=(rank,), factor=factor)
    return Trouble(planted=planted, touched=(rank,))


def _on_host(kind: str, cause: str, job: Job, host: int, factor: float) -> Trouble:
    ranks = job.rack.ranks_of(host)
    name = job.rack.host_names[host]
    planted = Planted(kind=kind, cause=cause, owner="node", ranks=ranks, host=name, factor=factor)
    return Trouble(planted=planted, touched=ranks)


def _of_job(kind: str, cause: str, ranks: tuple[int, ...], factor: float) -> Trouble:
    planted = Planted(kind=kind, cause=cause, owner="job", ranks=ranks, factor=factor)
    return Trouble(planted=planted, touched=ranks)


def _lasting(trouble: Trouble, **others: float | int) -> Trouble:
    planted = replace(trouble.planted, **others)  # type: ignore[arg-type]
    return replace(trouble, planted=planted)


def gpu_clock(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Lower one chip's clock throughout."""
    return _on_rank("gpu_clock", "compute", _rank(job, draws), size)


def _onset(job: Job, draws: np.random.Generator) -> int:
    numbers = job.tracing.iterations
    return numbers[round(len(numbers) * draws.uniform(0.35, 0.65))]


def gpu_clock_onset(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Lower one chip's clock from some iteration on."""
    trouble = gpu_clock(job, draws, size)
    return _lasting(trouble, first_iteration=_onset(job, draws))


def power_brake(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let the power supply's brake halve one chip's clock, or worse, from some iteration on."""
    trouble = _on_rank("power_brake", "compute", _rank(job, draws), size)
    if len(job.tracing.iterations) >= 6 and draws.random() < 0.5:
        return _lasting(trouble, first_iteration=_onset(job, draws))
    return trouble


def throttling(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let one chip throttle in bursts of a part of an iteration, or of several."""
    trouble = _on_rank("throttling", "compute", _rank(job, draws), size)
    share = float(draws.uniform(0.12, 0.35))
    length = job.num_slices * float(draws.choice((0.25, 0.6, 1.5)))
    return replace(_lasting(trouble, share_of_time=share), length=max(1.0, length))


def hbm(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Slow one chip's memory."""
    return _on_rank("hbm", "compute", _rank(job, draws), size)


def host_cpu(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Slow the processors of a host: a governor that saves power, a missing fan."""
    return _on_host("host_cpu", "host", job, _host(job, draws), size)


def contention(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let another process share the cores of a rank, or of a host, for turns of some ms.

    Its factor is that of the thread's time for a pass; a turn is Pareto's, 2.25 times the shortest.
    """
    chance, turn_s = float(draws.uniform(0.15, 0.5)), _TURN_S * size
    plan = Planner(job).forward(0, 0)
    pass_s = job.habits.launch_s * sum(plan.kernels)
    factor = round(1.15 + chance * 2.25 * turn_s / pass_s, 3)
    if draws.random() < 0.5:
        trouble = _on_rank("contention", "host", _rank(job, draws), factor)
    else:
        trouble = _on_host("contention", "host", job, _host(job, draws), factor)
    return replace(trouble, chance=chance, turn_s=turn_s)


def _loading(job: Job) -> list[int]:
    """Return the ranks that load batches."""
    ends = (0, job.num_stages - 1)
    places = [(rank, job.layout.coordinates(rank)) for rank in range(job.num_ranks)]
    missing = job.tracing.missing
    return [rank for rank, at in places if at.tp == 0 and at.pp in ends and rank not in missing]


def loader(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Slow the workers of one rank's loader, or of all loaders of a host."""
    rank = int(draws.choice(_loading(job)))
    if draws.random() < 0.5:
        return _on_rank("loader", "loader", rank, size)
    return _on_host("loader", "loader", job, job.rack.host_of(rank), size)


def nic(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Leave a host's NICs a part of their rate."""
    return _on_host("nic", "link", job, _host(job, draws), size)


def nic_flapping(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let a host's NICs lose their link now and then."""
    trouble = nic(job, draws, size)
    share = float(draws.uniform(0.12, 0.45))
    length = job.num_slices * float(draws.choice((0.3, 1.0, 2.0)))
    return replace(_lasting(trouble, share_of_time=share), length=max(1.0, length))


def rail(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Slow one NIC of a host: the GPUs that use it."""
    rack, rank = job.rack, _rank(job, draws)
    sharing = max(1, rack.gpus_per_host // rack.nics_per_host)
    first = rank - rank % sharing
    ranks = tuple(range(first, first + sharing))
    planted = Planted(kind="rail", cause="link", owner="node", ranks=ranks, factor=size)
    return Trouble(planted=planted, touched=ranks)


def nvlink(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Take lanes off one GPU's NVLink."""
    rank = _rank(job, draws)
    axis = next(one for one in ("tp", "ep", "cp", "dp") if getattr(job.layout, one) > 1)
    group = next(part for part in members(job.layout, axis) if rank in part)
    host = job.rack.host_of(rank)
    ranks = tuple(one for one in group if job.rack.host_of(one) == host)
    planted = Planted(kind="nvlink", cause="link", owner="node", ranks=ranks, factor=size)
    return Trouble(planted=planted, touched=(rank,))


def pcie(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Leave one GPU a part of its PCIe lanes: copies, and what goes to the NIC."""
    return _on_rank("pcie", "link", _rank(job, draws), size)


def collector(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let one process keep so many objects that its collector is always at work."""
    trouble = _on_rank("gc", "gc", _rank(job, draws), size)
    return replace(trouble, chance=float(draws.uniform(0.5, 2.0)) / job.num_slices)


def two_faults(job: Job, draws: np.random.Generator, size: float) -> tuple[Trouble, ...]:
    """Plant two faults that touch different ranks."""
    kinds: list[Plant] = [gpu_clock, hbm, throttling, host_cpu, loader]
    if job.rack.num_hosts > 2:
        kinds.append(nic)
    chosen = draws.choice(len(kinds), 2)
    first = kinds[int(chosen[0])](job, draws, size)
    while True:
        second = kinds[int(chosen[1])](job, draws, round(float(draws.uniform(1.4, 3.0)), 4))
        if not set(first.planted.ranks) & set(second.planted.ranks):
            return first, second
        if len(first.planted.ranks) + len(second.planted.ranks) > job.num_ranks:
            first = gpu_clock(job, draws, size)


def heavy_stage(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Give the last stage an output layer that is large for its model, or a stage heavy layers."""
    stage = job.num_stages - 1
    if draws.random() < 0.6:
        ranks = tuple(sorted(job.ranks_of_stage(stage)))
        return _of_job("heavy_stage", "stage_imbalance", ranks, 3.0 * size)
    stage = int(draws.integers(job.num_stages))
    ranks = tuple(sorted(job.ranks_of_stage(stage)))
    trouble = _of_job("heavy_stage", "stage_imbalance", ranks, size)
    return replace(trouble, stage=stage)


def _all(job: Job) -> tuple[int, ...]:
    return tuple(range(job.num_ranks))


def long_sequences(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Draw the lengths of each replica's microbatches anew."""
    trouble = _of_job("long_sequences", "sequence_imbalance", _all(job), size)
    return replace(trouble, persists=False)


def longer_replicas(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Give some replicas the longer documents for good: shards that were sorted by length."""
    count = max(1, job.layout.dp // int(draws.choice((2, 4))))
    replicas = draws.choice(job.layout.dp, count, replace=False)
    ranks = tuple(rank for rank in _all(job) if job.layout.coordinates(rank).dp in replicas)
    return _of_job("long_sequences", "sequence_imbalance", ranks, size)


def hot_expert(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let the router prefer the experts of one rank, for good, or others in each layer and time."""
    if draws.random() < 0.5:
        trouble = _of_job("hot_expert", "sequence_imbalance", _all(job), size)
        return replace(trouble, persists=False)
    rank = _rank(job, draws)
    at = job.ranks_of_stage(job.layout.coordinates(rank).pp).index(rank)
    ranks = tuple(sorted(job.ranks_of_stage(stage)[at] for stage in range(job.num_stages)))
    return _of_job("hot_expert", "sequence_imbalance", ranks, size)


def collectors(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let the collectors of all ranks pause, each in its own time."""
    trouble = _of_job("gc", "gc", _all(job), size)
    return replace(trouble, chance=float(draws.uniform(0.2, 0.6)) / job.num_slices)


def storage(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Slow the storage that all loaders read."""
    return _of_job("storage", "loader", _all(job), size)


def network(job: Job, draws: np.random.Generator, size: float) -> Trouble:
    """Let others' traffic cross the fabric."""
    return _of_job("network", "link", _all(job), size)
