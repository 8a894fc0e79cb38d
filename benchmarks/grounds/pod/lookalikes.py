"""Draw sound jobs, and jobs that look as if a node were at fault: the job's own doing, or nobody's.

What somebody could mend in the job (a heavy stage, long documents of one replica, a hot expert) is
planted with owner `job`. Of the rest nothing is planted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.grounds.pod.draws import Want, drawn, pick
from benchmarks.grounds.pod.faults import Fault, Law
from benchmarks.grounds.pod.job import Job
from benchmarks.grounds.pod.machine import FURTHER_FACTOR
from benchmarks.grounds.pod.troubles import (
    Make,
    Plan,
    Random,
    anything,
    both,
    crosses,
    experts,
    full,
    log_uniform,
    many,
    planting,
    several_hosts,
)
from benchmarks.grounds.pod.work import costs_of

Change = Callable[[Random, Job], Job]


def changed(wants: Want, change: Change) -> Make:
    """Return the maker of jobs as wanted, changed, with nothing planted."""

    def make(rng: Random, seed: int) -> Plan:
        return change(rng, drawn(rng, seed, wants)), ()

    return make


def _alike(rng: Random, job: Job) -> Job:
    return job


def _replicas(job: Job) -> bool:
    return job.layout.dp > 1


def _staged(job: Job) -> bool:
    return job.layout.pp > 1 and not job.model.tied


def _sharded(job: Job) -> bool:
    return job.trainer.fully_sharded


def _long(job: Job) -> bool:
    return job.layout.cp > 1


def _base(job: Job) -> bool:
    return not full(job)


def _small(job: Job) -> bool:
    return job.num_ranks <= 8


def _large(job: Job) -> bool:
    return job.num_ranks >= 64


def long_documents(rng: Random, job: Job) -> Fault:
    """Give one replica longer documents for good."""
    replica = int(rng.integers(job.layout.dp))
    ranks = [one for one in range(job.num_ranks) if job.layout.coordinates(one).dp == replica]
    factor = log_uniform(rng, 1.3, 2.5) if job.data.packed else log_uniform(rng, 1.08, 1.4)
    return Fault(
        kind="long_sequences", cause="sequence_imbalance", owner="job", law=Law.LENGTH,
        ranks=tuple(ranks), factor=factor,
    )  # fmt: skip


def _last_stage(job: Job) -> tuple[int, ...]:
    return tuple(job.ranks[-1].tolist())


def heavy_head(rng: Random, job: Job) -> Fault:
    """Give the last stage a far larger output layer than its layers leave room for."""
    factor = log_uniform(rng, 2.0, 5.0)
    costs = costs_of(job)
    head = costs.output.matrix_s + costs.output.memory_s + costs.loss.memory_s
    layer = sum(
        one.matrix_s + one.memory_s
        for one in (costs.qkv, costs.core, costs.projection, costs.mlp_first, costs.mlp_second)
    )
    rest = layer * job.num_layers(job.layout.pp - 1) / job.layout.vpp + head
    return Fault(
        kind="heavy_stage", cause="stage_imbalance", owner="job", law=Law.HEAD,
        ranks=_last_stage(job), factor=factor, told=1 + (factor - 1) * head / rest,
    )  # fmt: skip


def further_layer(rng: Random, job: Job) -> Fault:
    """Put an MTP layer, with an output layer of its own, on the last stage."""
    layers = job.num_layers(job.layout.pp - 1)
    return Fault(
        kind="mtp_stage", cause="stage_imbalance", owner="job", law=Law.FURTHER,
        ranks=_last_stage(job), factor=FURTHER_FACTOR, told=1 + 1.3 / (layers + 0.5),
    )  # fmt: skip


def _mtp(rng: Random, seed: int) -> Plan:
    job = drawn(rng, seed, _staged)
    job = replace(job, model=replace(job.model, mtp=True))
    return job, (further_layer(rng, job),)


def hot_expert(rng: Random, job: Job) -> Fault:
    """Let one rank's experts of each expert-parallel group get more tokens than the others."""
    place = int(rng.integers(job.layout.ep))
    ranks = [one for one in range(job.num_ranks) if job.layout.coordinates(one).ep == place]
    return Fault(
        kind="hot_expert", cause="expert_imbalance", owner="job", law=Law.EXPERT,
        ranks=tuple(ranks), factor=log_uniform(rng, 1.4, 2.6),
    )  # fmt: skip


def _lottery(rng: Random, job: Job) -> Job:
    return replace(job, disorder=replace(job.disorder, chip_spread=float(rng.uniform(0.03, 0.045))))


def _drifting(rng: Random, job: Job) -> Job:
    sigma, memory = float(rng.uniform(0.6, 1.2)), float(rng.uniform(0.3, 0.85))
    return replace(job, disorder=replace(job.disorder, router_sigma=sigma, router_memory=memory))


def _host_bound(rng: Random, job: Job) -> Job:
    """Make the model so small that kernels are shorter than their launches."""
    model = replace(job.model, hidden=pick(rng, 512, 768, 1024), ffn=pick(rng, 2048, 3072))
    data = replace(job.data, sequence=1024 * job.layout.cp, micro_batch=1, median_length=200)
    drift = float(rng.uniform(0.06, 0.2))
    disorder = replace(job.disorder, host_drift=drift)
    return replace(job, model=model, data=data, disorder=disorder)


def _congested(rng: Random, job: Job) -> Job:
    level, drift = float(rng.uniform(0.5, 3.0)), float(rng.uniform(0.05, 0.15))
    disorder = replace(job.disorder, congestion=level, network_drift=drift, network_sigma=0.25)
    return replace(job, disorder=disorder)


def _saving(rng: Random, job: Job) -> Job:
    trainer = replace(
        job.trainer, saves_every=max(2, int(job.tracing.interval * pick(rng, 1, 2, 3))),
        evaluates_every=pick(rng, 0, 10, 20),
    )  # fmt: skip
    return replace(job, trainer=trainer)


def _logging(rng: Random, job: Job) -> Job:
    trainer = replace(job.trainer, logs_every=1, evaluates_every=pick(rng, 5, 10, 15))
    return replace(job, trainer=trainer)


def _collecting(rng: Random, job: Job) -> Job:
    """Let every rank collect garbage at its own time, as Python does by itself."""
    pause_ms = log_uniform(rng, 15, 120)
    return replace(job, trainer=replace(job.trainer, collects_garbage=True, collector_ms=pause_ms))


def _slowly_loading(rng: Random, job: Job) -> Job:
    """Let all ranks load from one storage that is late now and then."""
    loading_ms, sigma = log_uniform(rng, 3, 30), float(rng.uniform(0.5, 1.1))
    return replace(job, trainer=replace(job.trainer, loading_ms=loading_ms, loading_sigma=sigma))


def _warming_up(rng: Random, job: Job) -> Job:
    count, settings = len(job.tracing.iterations), job.tracing
    numbers = [
        cycle * settings.interval + 1 + place
        for cycle in range(count)
        for place in range(settings.window)
    ][: max(min(count, 6), 3)]
    disorder = replace(job.disorder, warm_up_ratio=float(rng.uniform(5, 25)))
    return replace(job, tracing=replace(settings, iterations=tuple(numbers)), disorder=disorder)


def _unevenly_packed(rng: Random, job: Job) -> Job:
    sequence = pick(rng, 16384, 32768) * max(job.layout.cp // 2, 1)
    data = replace(
        job.data, packed=True, balanced=False, tail_sigma=float(rng.uniform(1.3, 2.0)),
        sequence=sequence, micro_batch=1,
    )  # fmt: skip
    return replace(job, data=data)


def _growing(rng: Random, job: Job) -> Job:
    data = replace(job.data, packed=False, curriculum_ratio=float(rng.uniform(1.3, 2.5)))
    return replace(job, data=data)


def _missing(rng: Random, job: Job) -> Job:
    count = pick(rng, 1, 1, 2, max(job.num_ranks // 8, 1))
    lost = rng.choice(np.arange(1, job.num_ranks), count, replace=False)
    tracing = replace(job.tracing, missing=tuple(sorted(int(one) for one in lost)))
    return replace(job, tracing=tracing)


def _stepping(rng: Random, job: Job) -> Job:
    steps = pick(rng, 1, 1, 2, 3)
    return replace(job, disorder=replace(job.disorder, clock_steps=steps))


def _unevenly_parted(rng: Random, job: Job) -> Job:
    """Leave the first and the last stage fewer layers, as embedding and output layer want."""
    layers = [list(each) for each in job.model.layers]
    for stage in (0, -1):
        if layers[stage][-1 if stage else 0] > 1:
            layers[stage][-1 if stage else 0] -= 1
    model = replace(job.model, layers=tuple(tuple(each) for each in layers))
    return replace(job, model=model)


LOOK_ALIKES: tuple[tuple[str, int, Make], ...] = (
    ("healthy", 12, changed(full, _alike)),
    ("healthy: experts", 9, changed(both(experts, full), _alike)),
    ("healthy: long context", 6, changed(_long, _alike)),
    ("healthy: sharded", 5, changed(_sharded, _alike)),
    ("healthy: large", 6, changed(_large, _alike)),
    ("healthy: small", 5, changed(_small, _alike)),
    ("healthy: base", 5, changed(_base, _alike)),
    ("look_alike: chip lottery", 8, changed(full, _lottery)),
    ("look_alike: long documents", 8, planting(both(_replicas, full), long_documents)),
    ("look_alike: heavy last stage", 7, planting(_staged, heavy_head)),
    ("look_alike: MTP stage", 6, _mtp),
    ("look_alike: hot expert", 8, planting(both(experts, full), hot_expert)),
    ("look_alike: drifting experts", 6, changed(both(experts, full), _drifting)),
    ("look_alike: host-bound", 6, changed(full, _host_bound)),
    ("look_alike: congestion", 6, changed(crosses, _congested)),
    ("look_alike: checkpoints", 6, changed(both(several_hosts, many), _saving)),
    ("look_alike: logging", 5, changed(anything, _logging)),
    ("look_alike: collectors", 5, changed(full, _collecting)),
    ("look_alike: slow loading", 5, changed(full, _slowly_loading)),
    ("look_alike: warm-up", 5, changed(full, _warming_up)),
    ("look_alike: uneven packing", 8, changed(both(_replicas, full), _unevenly_packed)),
    ("look_alike: curriculum", 6, changed(many, _growing)),
    ("look_alike: ranks missing", 5, changed(several_hosts, _missing)),
    ("look_alike: clock steps", 5, changed(both(several_hosts, many), _stepping)),
    ("look_alike: uneven partition", 5, changed(_staged, _unevenly_parted)),
)
"""Families, how many cases of each, and what draws one."""
