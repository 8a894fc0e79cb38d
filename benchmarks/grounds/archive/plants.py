"""Plant one cause into a job: choose whom it hits, and say who may be named for it.

What nobody could tell apart is named together: both ends of a link, all ranks behind a host's NIC
or on a rail, and the tensor group of a loader, which waits for the batch in the same scope.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.grounds.archive.costs import layer_of, output_of
from benchmarks.grounds.archive.job import Effect, Job, Kind

Plant = Callable[[Job, np.random.Generator], Job]


def _with(job: Job, effect: Effect) -> Job:
    return replace(job, effects=(*job.effects, effect))


def _slower(job: Job, kind: Kind, factor: float, *ranks: int) -> Job:
    """Make ranks slower throughout; they are all whom one may name."""
    return _with(job, Effect(kind=kind, factor=factor, ranks=ranks))


def _any_rank(job: Job, rng: np.random.Generator) -> int:
    """Return a rank that no other effect names."""
    taken = {rank for effect in job.effects for rank in (effect.named or effect.ranks)}
    free = [rank for rank in range(job.shape.num_ranks) if rank not in taken]
    return int(rng.choice(free))


def _any_host(job: Job, rng: np.random.Generator) -> int:
    """Return a host that no other effect names."""
    taken = {rank for effect in job.effects for rank in (effect.named or effect.ranks)}
    hosts = range(job.shape.num_hosts)
    free = [host for host in hosts if not taken & set(job.shape.host_ranks(host))]
    return int(rng.choice(free or [0]))


def _some(rng: np.random.Generator, low: float, high: float) -> float:
    return round(float(rng.uniform(low, high)), 3)


def slow_chip(factor: float, *, when: str = "always") -> Plant:
    """Lower a chip's clock: always, from an iteration on (`onset`), or for a `stretch`."""

    def plant(job: Job, rng: np.random.Generator) -> Job:
        num, first, last = job.num_iterations, 1, 0
        if when == "onset":
            first = int(rng.integers(5, max(6, num - 3)))
        elif when == "stretch":
            first = int(rng.integers(4, max(5, num // 2)))
            last = min(num - 2, first + int(rng.integers(3, 6)))
        slow = _any_rank(job, rng)
        return _with(
            job,
            Effect(kind=Kind.GPU_CLOCK, factor=factor, ranks=(slow,), first=first, last=last),
        )

    return plant


def slow_pair(job: Job, rng: np.random.Generator) -> Job:
    """Lower the clocks of two neighbours that share a power supply or a cold plate."""
    first = 2 * int(rng.integers(job.shape.num_ranks // 2))
    return _slower(job, Kind.GPU_CLOCK, _some(rng, 1.12, 1.4), first, first + 1)


def throttling(factor: float) -> Plant:
    """Throttle a chip in bursts, a fifth of the time."""

    def plant(job: Job, rng: np.random.Generator) -> Job:
        slow = _any_rank(job, rng)
        return _with(job, Effect(kind=Kind.THROTTLING, factor=factor, ranks=(slow,), share=0.2))

    return plant


def hbm(job: Job, rng: np.random.Generator) -> Job:
    """Slow a chip's memory: rows that were remapped, or an ECC storm."""
    return _slower(job, Kind.HBM, _some(rng, 1.4, 2.2), _any_rank(job, rng))


def nvlink(job: Job, rng: np.random.Generator) -> Job:
    """Slow one link between neighbours of a tensor group, and so its whole ring."""
    tensor = job.shape.tensor_ranks(_any_rank(job, rng))
    at = int(rng.integers(len(tensor)))
    ends = sorted((tensor[at], tensor[(at + 1) % len(tensor)]))
    return _slower(job, Kind.NVLINK, float(rng.choice([2.0, 3.0, 5.0])), *ends)


def nic(job: Job, rng: np.random.Generator) -> Job:
    """Let a host's way out work at half its speed."""
    return _on_host(job, rng, Kind.NIC, 2.0)


def nic_of_one_rank(job: Job, rng: np.random.Generator) -> Job:
    """Let the NIC of one GPU work at a half or a third of its speed, where each has one.

    Two ranks that use their NICs for each other only cannot be told apart.
    """
    factor = float(rng.choice([2.0, 3.0]))
    slow = _any_rank(job, rng)
    named = {slow}
    peers = _peers_elsewhere(job, slow)
    if len(peers) == 1 and _peers_elsewhere(job, *peers) == {slow}:
        named |= peers
    return _with(
        job, Effect(kind=Kind.NIC, factor=factor, ranks=(slow,), named=tuple(sorted(named)))
    )


def _peers_elsewhere(job: Job, rank: int) -> set[int]:
    """Return whom a rank exchanges messages or gradients with through its NIC."""
    shape, per_host = job.shape, job.shape.gpus_per_host
    at = rank // shape.tp // shape.dp
    tensor, replica = rank % shape.tp, rank // shape.tp % shape.dp
    peers = {shape.rank(at, dp, tensor) for dp in range(shape.dp)}
    peers |= {shape.rank(pp, replica, tensor) for pp in (at - 1, at + 1) if 0 <= pp < shape.pp}
    if at in {0, shape.pp - 1}:
        peers |= {shape.rank(pp, replica, tensor) for pp in (0, shape.pp - 1)}
    return {peer for peer in peers if peer // per_host != rank // per_host}


def rail(job: Job, rng: np.random.Generator) -> Job:
    """Slow one rail's switch: the NICs of one GPU's number, on all hosts."""
    device, per_host = int(rng.integers(job.shape.gpus_per_host)), job.shape.gpus_per_host
    ranks = range(device, job.shape.num_ranks, per_host)
    return _slower(job, Kind.RAIL, float(rng.choice([2.0, 3.0])), *ranks)


def slow_host(job: Job, rng: np.random.Generator) -> Job:
    """Cap the power of a whole host."""
    return _on_host(job, rng, Kind.SLOW_HOST, _some(rng, 1.08, 1.35))


def host_cpu(job: Job, rng: np.random.Generator) -> Job:
    """Let something else use a host's cores."""
    return _on_host(job, rng, Kind.HOST_CPU, _some(rng, 2.5, 8))


def host_memory(job: Job, rng: np.random.Generator) -> Job:
    """Let a host run out of memory bandwidth and pages."""
    return _on_host(job, rng, Kind.HOST_MEMORY, _some(rng, 4, 10))


def _on_host(job: Job, rng: np.random.Generator, kind: Kind, factor: float) -> Job:
    host = _any_host(job, rng)
    ranks = job.shape.host_ranks(host)
    return _with(job, Effect(kind=kind, factor=factor, ranks=ranks, host=f"host{host}"))


def _loading(job: Job) -> list[int]:
    """Return the ranks that load batches: tensor rank 0 of the first and the last stage."""
    shape = job.shape
    stages = sorted({0, shape.pp - 1})
    return [shape.rank(stage, dp, 0) for stage in stages for dp in range(shape.dp)]


def loader(job: Job, rng: np.random.Generator) -> Job:
    """Let one rank's batches come late."""
    slow = int(rng.choice(_loading(job)))
    factor = _late(job, rng)
    named = job.shape.tensor_ranks(slow)
    return _with(job, Effect(kind=Kind.LOADER, factor=factor, ranks=(slow,), named=named))


def loader_of_host(job: Job, rng: np.random.Generator) -> Job:
    """Let all batches of a host come late."""
    per_host = job.shape.gpus_per_host
    hosts: dict[int, list[int]] = {}
    for rank in _loading(job):
        hosts.setdefault(rank // per_host, []).append(rank)
    host = int(rng.choice(sorted(hosts)))
    named = job.shape.host_ranks(host)
    return _with(
        job,
        Effect(
            kind=Kind.LOADER,
            factor=_late(job, rng),
            ranks=tuple(hosts[host]),
            named=named,
            host=f"host{host}",
        ),
    )


def _late(job: Job, rng: np.random.Generator) -> float:
    """Return how many times slower a batch is that takes a part of what its passes take."""
    layer = layer_of(job.site.chip, job.model, job.shape.tp).whole()
    passes_us = job.shape.layers[0] * (layer + layer.backward()).alone_us
    late_us = max(float(rng.uniform(0.1, 0.4)) * passes_us, 4_000.0)
    return round(1 + late_us / job.site.load_us, 1)


def collector(job: Job, rng: np.random.Generator) -> Job:
    """Let Python's collector stop one rank's host now and then."""
    return _slower(job, Kind.GC, _some(rng, 0.7, 2.5), _any_rank(job, rng))


def two_faults(job: Job, rng: np.random.Generator) -> Job:
    """Plant two faults that have nothing to do with each other."""
    first, second = _PAIRS[int(rng.integers(len(_PAIRS)))]
    return second(first(job, rng), rng)


_PAIRS: tuple[tuple[Plant, Plant], ...] = (
    (slow_chip(1.3), slow_chip(1.2)),
    (slow_chip(1.25), throttling(1.3)),
    (loader, slow_chip(1.3)),
    (nvlink, slow_chip(1.25)),
    (hbm, slow_chip(1.2)),
)


def long_sequences(factor: float) -> Plant:
    """Give one replica more tokens in every microbatch."""

    def plant(job: Job, rng: np.random.Generator) -> Job:
        ranks = job.shape.replica_ranks(int(rng.integers(job.shape.dp)))
        return _slower(job, Kind.LONG_SEQUENCES, factor, *ranks)

    return plant


def uneven_sequences(job: Job, rng: np.random.Generator) -> Job:
    """Let the tokens of microbatches differ, by a factor that is 1 plus their variation."""
    factor = _some(rng, 1.06, 1.25)
    return _slower(job, Kind.UNEVEN_SEQUENCES, factor, *range(job.shape.num_ranks))


def heavy_stage(job: Job, rng: np.random.Generator) -> Job:
    """Make the layers of one stage heavier."""
    ranks = job.shape.stage_ranks(int(rng.integers(job.shape.pp)))
    return _slower(job, Kind.HEAVY_STAGE, _some(rng, 1.1, 1.5), *ranks)


def heavy_output(job: Job, rng: np.random.Generator) -> Job:
    """Give the last stage a larger vocabulary, on top of as many layers as others have."""
    vocabulary = int(rng.choice([50_304, 64_128, 100_352, 128_256]))
    model = replace(job.model, vocabulary=vocabulary)
    shape = replace(job.shape, layers=(job.shape.layers[0],) * job.shape.pp)
    place = job.site.chip, model, shape.tp
    layers_us = shape.layers[0] * layer_of(*place).whole().alone_us
    factor = round(1 + output_of(*place, vocabulary).alone_us / layers_us, 3)
    heavy = shape.stage_ranks(shape.pp - 1)
    return _slower(replace(job, model=model, shape=shape), Kind.HEAVY_OUTPUT, factor, *heavy)


def uneven_layers(job: Job, rng: np.random.Generator) -> Job:
    """Give one stage a layer more than the others; the last one has one less anyhow."""
    usual, stage = job.shape.layers[0], int(rng.integers(job.shape.pp - 1))
    layers = tuple(num + (at == stage) for at, num in enumerate(job.shape.layers))
    shape = replace(job.shape, layers=layers)
    factor = round((usual + 1) / usual, 3)
    heavy = shape.stage_ranks(stage)
    return _slower(replace(job, shape=shape), Kind.UNEVEN_LAYERS, factor, *heavy)


def nothing(job: Job, _: np.random.Generator) -> Job:
    """Leave a job as it is."""
    return job


def checkpoints(job: Job, rng: np.random.Generator) -> Job:
    """Write a checkpoint every few iterations, beside the next one."""
    every = int(rng.integers(3, 6))
    return replace(job, habits=replace(job.habits, checkpoint_every=every))


def warming_up(job: Job, rng: np.random.Generator) -> Job:
    """Begin with slow hosts (allocating, compiling) and cold chips that then lose clock."""
    habits = replace(job.habits, warms_up=_some(rng, 2.5, 6), heats_up=_some(rng, 0.01, 0.03))
    return replace(job, habits=habits)


def lost_rank(job: Job, rng: np.random.Generator) -> Job:
    """Lose the files of one or two ranks, not of the last ones: those tell how large the job is."""
    num = 1 if job.shape.num_ranks < 16 else int(rng.integers(1, 3))
    lost = rng.choice(job.shape.num_ranks - 1 - job.shape.tp, num, replace=False)
    return replace(job, habits=replace(job.habits, lost_ranks=tuple(sorted(map(int, lost)))))


def all_slow(job: Job, rng: np.random.Generator) -> Job:
    """Cap the power of all hosts alike in the middle of the run."""
    return replace(job, site=replace(job.site, slow_alike=_some(rng, 1.05, 1.25)))


def congested(job: Job, rng: np.random.Generator) -> Job:
    """Share the network with other jobs, everywhere alike."""
    return replace(job, site=replace(job.site, congestion=_some(rng, 1.6, 3)))
