"""Draw jobs: which trainer, on how many ranks, with what model, traced how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from benchmarks.grounds.incidents.hardware import CHIPS, placed
from benchmarks.grounds.incidents.jobs import DDP, FSDP, HSDP, MEGATRON, Job, Noise, Tracing
from benchmarks.grounds.incidents.model import Model
from megascan.topology import Layout

Rng = np.random.Generator
Item = TypeVar("Item")

_MOST_SPANS = 330_000
"""Spans of the largest jobs: more take seconds to write."""
_MOST_STEPS = 26_000
_EPOCH_NS = 1_764_000_000_000_000_000


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What a family needs of its jobs: a form of files, hosts, a pipeline, experts, …"""

    forms: tuple[str, ...] = ("megatron", "plain", "profile")
    hosts: int = 1
    network: bool = False  # these hosts are joined by NICs only
    pipeline: bool = False
    experts: bool = False
    replicas: int = 1
    tensor: bool = False
    least_iterations: int = 2


def pick(rng: Rng, options: Mapping[Item, float]) -> Item:
    """Return one of the options, by their weights."""
    names, weights = list(options), np.array(list(options.values()), dtype=float)
    return names[int(rng.choice(len(names), p=weights / weights.sum()))]


def draw_job(rng: Rng, wants: Wants, seed: int) -> Job:
    """Draw a job that has what is wanted."""
    weights = {"megatron": 0.5, "plain": 0.27, "profile": 0.23}
    form = pick(rng, {one: weights[one] for one in wants.forms})
    for _ in range(400):
        inside = wants.tensor or wants.experts or rng.random() < 0.4
        of_megatron = form == "megatron" or (form == "profile" and inside)
        job = _megatron(rng, wants) if of_megatron else _plain(rng, wants)
        if form == "profile":
            job = _profiled(rng, job, wants)
        if _has(job, wants, form):
            break
    else:
        raise RuntimeError(f"no job of {form} has {wants}")
    job = replace(
        job,
        seed=seed,
        saves_after=int(rng.integers(1, 6)) if rng.random() < 0.2 else -1,
        run_id=f"202511{1 + seed % 28:02d}-{seed % 240000:06d}-{seed % 65536:04x}",
        epoch_ns=_EPOCH_NS + seed % 10**7 * 10**9,
    )
    bound = job.launch_s / job.pass_s
    if bound > 0.7 and rng.random() < 0.85:  # most jobs are not bound by launching
        job = replace(job, host_ahead=job.host_ahead * float(rng.uniform(0.2, 0.7)) / bound)
    return _within_budget(job, wants)


def _has(job: Job, wants: Wants, form: str) -> bool:
    num_hosts = len(np.unique(job.cluster.domains if wants.network else job.cluster.hosts))
    fits = num_hosts >= wants.hosts and job.layout.dp >= wants.replicas
    if form == "profile":  # profiles of large jobs are recorded of a few ranks at most
        fits &= job.layout.pp == 1 and job.num_ranks <= 16
    fits &= 2 * max(_spans_of(job) / _MOST_SPANS, _steps_of(job) / _MOST_STEPS) < 1
    return fits and (not wants.tensor or job.layout.tp > 1)


def _spans_of(job: Job) -> float:
    """Return about how many spans an iteration has."""
    layers = sum(len(chunk) for stage in job.stages for chunk in stage)
    parts = 90 if job.tracing.profile else 16 if job.tracing.stride == 1 else 11
    parts += 6 * (job.layout.tp > 1) * (not job.tracing.profile)
    return job.microbatches[0] * layers * parts * job.lanes


def _steps_of(job: Job) -> float:
    """Return about how many operations of stages an iteration has."""
    layers = sum(len(chunk) for stage in job.stages for chunk in stage)
    return job.microbatches[0] * layers * (90 if job.tracing.profile else 30)


def _layout(rng: Rng, wants: Wants) -> Layout:
    """Draw parallel sizes whose product is a power of two from 2 to 128."""
    world = int(pick(rng, {2: 1.5, 4: 3, 8: 6, 16: 6, 32: 5, 64: 3.5, 128: 2.5}))
    sizes = {"tp": 1, "cp": 1, "pp": 1, "ep": 1}
    left = max(world, 4 * wants.hosts, 8 if wants.pipeline and wants.replicas > 1 else 1)
    if wants.replicas > 1:
        left = max(left, 2 * wants.replicas)
    total, least = left, max(wants.replicas, 1)

    def take(axis: str, options: Mapping[int, float]) -> None:
        nonlocal left
        fitting = {one: weight for one, weight in options.items() if left // one >= least}
        sizes[axis] = pick(rng, fitting or {1: 1.0})
        left //= sizes[axis]

    take("pp", {2: 4, 4: 3, 8: 1} if wants.pipeline else {1: 5, 2: 3, 4: 2, 8: 0.4})
    take("tp", {2: 3, 4: 2} if wants.tensor else {1: 4, 2: 3, 4: 2, 8: 1})
    take("cp", {1: 5, 2: 1.6, 4: 0.5})
    if wants.experts or rng.random() < 0.3:
        lanes = total // sizes["pp"]
        options = {size: 1.0 for size in (2, 4, 8, 16) if size <= lanes}
        sizes["ep"] = pick(rng, options) if options else 1
    return Layout(dp=left, tp=sizes["tp"], cp=sizes["cp"], pp=sizes["pp"], ep=sizes["ep"])


def _model(rng: Rng, layout: Layout, layers: int, experts: bool) -> Model:
    hidden = int(pick(rng, {2048: 2, 3072: 1, 4096: 4, 5120: 2, 8192: 2}))
    if layout.tp == 1:
        hidden = min(hidden, 5120)
    vocabulary = int(pick(rng, {32000: 2, 50304: 2, 128256: 2}))
    if layout.pp > 1:  # a head that is worth layers would make the last stage everybody's pace
        hidden, vocabulary = max(hidden, 4096), min(vocabulary, 32000)
    sequence = int(pick(rng, {2048: 2, 4096: 4, 8192: 3}))
    sequence *= layout.cp if layout.cp > 1 else 1
    gated = bool(rng.random() < 0.75)
    return Model(
        hidden=hidden,
        ffn=int(hidden * (2.75 if gated else 4.0) / (2 if experts else 1)) // 128 * 128,
        heads=hidden // 128,
        kv_share=float(pick(rng, {1.0: 2, 0.25: 4, 0.125: 2})),
        vocabulary=vocabulary,
        layers=layers,
        sequence=sequence,
        batch=1 if sequence > 4096 else int(pick(rng, {1: 2, 2: 1})),
        experts=layout.ep * int(pick(rng, {1: 1, 2: 2, 4: 1})) if experts else 0,
        top_k=int(pick(rng, {1: 1, 2: 3, 4: 1})),
        gated=gated,
    )


def _stages(rng: Rng, layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return global numbers of layers, evenly over stages; chunks are dealt in turns."""
    per_chunk = int(
        pick(rng, {2: 3, 3: 2, 4: 3} if layout.pp * layout.vpp > 4 else {4: 2, 6: 2, 8: 1})
    )
    return tuple(
        tuple(
            tuple(
                1 + (chunk * layout.pp + stage) * per_chunk + number for number in range(per_chunk)
            )
            for chunk in range(layout.vpp)
        )
        for stage in range(layout.pp)
    )


def _cluster_of(rng: Rng, num_ranks: int, most_a_host: int | None = None) -> dict[str, object]:
    chip = pick(
        rng, {"H100": 6, "H200": 2, "H800": 2, "A100": 3, "GB200": 2, "L40S": 0.7, "V100": 0.7}
    )
    per_host = {"GB200": 4, "V100": 16, "L40S": 2}.get(chip, 8)
    if chip in ("H100", "A100") and rng.random() < 0.25:
        per_host = 4
    if most_a_host:
        per_host = min(per_host, most_a_host)
    cluster = placed(num_ranks, per_host, rng, restarted=bool(rng.random() < 0.2))
    shared = 0.5 if rng.random() < 0.15 else 1.0
    return {"cluster": replace(cluster, chip=CHIPS[chip], nics_per_gpu=shared)}


def _tracing(rng: Rng, least: int) -> Tracing:
    """Draw windows of traced iterations, with gaps or none, from the begin or in a resumed run."""
    window, interval = pick(
        rng,
        {(2, 5): 5, (1, 4): 1, (3, 10): 2, (4, 20): 2, (5, 5): 2, (10, 100): 1.5, (20, 200): 0.6},
    )
    count = int(pick(rng, {2: 0.7, 4: 2, 6: 3, 8: 3, 10: 3, 14: 1.5, 20: 1, 40: 0.4}))
    count = max(count, least)
    first = 0 if rng.random() < 0.4 else interval * int(rng.integers(2, 4000))
    numbers = [first + number // window * interval + number % window + 1 for number in range(count)]
    return Tracing(
        iterations=tuple(numbers),
        interval=interval,
        window=window,
        stride=int(pick(rng, {1: 2, 2: 1, 4: 4})),
        wander_us=float(pick(rng, {20.0: 2, 200.0: 3, 3000.0: 1})),
        drift_ppm=float(pick(rng, {1.0: 2, 8.0: 2, 25.0: 1})),
        has_counters=bool(rng.random() < 0.5),
        has_tokens=bool(rng.random() < 0.8),
        compress=bool(rng.random() < 0.15),
    )


def _noise(rng: Rng) -> Noise:
    return Noise(
        sigma=float(pick(rng, {0.002: 2, 0.006: 3, 0.012: 2, 0.025: 1})),
        tail_share=float(pick(rng, {0.0: 1, 0.0005: 3, 0.003: 1})),
        tail=float(pick(rng, {0.2: 2, 0.6: 2, 1.5: 1})),
        chip_spread=float(pick(rng, {0.002: 2, 0.005: 3, 0.009: 2})),
        link_sigma=float(pick(rng, {0.02: 2, 0.05: 3, 0.12: 1})),
        stalls=pick(rng, {(0.0, 0.0): 4, (0.0006, 0.004): 2, (0.0003, 0.03): 1}),
        congestion=float(pick(rng, {0.0: 4, 0.08: 2, 0.25: 1})),
        host_sigma=float(pick(rng, {0.08: 2, 0.2: 2, 0.4: 1})),
        interference=float(pick(rng, {0.0: 2, 0.03: 2, 0.08: 1})),
    )


def _megatron(rng: Rng, wants: Wants) -> Job:
    layout = _layout(rng, wants)
    if layout.pp > 1 and rng.random() < 0.35:
        layout = replace(layout, vpp=int(pick(rng, {2: 3, 3: 1})))
    stages = _stages(rng, layout)
    experts = layout.ep > 1
    model = _model(rng, layout, layout.pp * layout.vpp * len(stages[0][0]), experts)
    tracing = _tracing(rng, wants.least_iterations)
    multiple = int(pick(rng, {1: 3, 2: 4, 4: 2}))
    count = (
        layout.pp * multiple
        if layout.pp > 1
        else int(pick(rng, {1: 2, 2: 2, 4: 3, 8: 1.2, 16: 0.8, 32: 0.5, 64: 0.4}))
    )
    count = min(count, 64)
    most = None if wants.hosts == 1 else layout.world_size // wants.hosts
    return Job(
        trainer=MEGATRON,
        layout=layout,
        model=model,
        tracing=tracing,
        noise=_noise(rng),
        stages=stages,
        microbatches=(count,) * len(tracing.iterations),
        sequence_parallel=bool(rng.random() < 0.75),
        async_tp=bool(rng.random() < 0.25),
        recompute=bool(rng.random() < 0.25),
        shards_optimizer=bool(rng.random() < 0.75),
        overlaps_gradients=bool(rng.random() < 0.65),
        overlaps_parameters=bool(rng.random() < 0.45),
        syncs_messages=bool(rng.random() < 0.6),
        syncs_steps=bool(rng.random() < 0.6),
        copies_block=bool(rng.random() < 0.4),
        routing=float(pick(rng, {0.05: 2, 0.15: 2})) if experts else 0.0,
        host_ahead=float(pick(rng, {0.6: 2, 1.0: 3, 1.5: 1})),
        loader_share=float(pick(rng, {0.1: 2, 0.3: 2, 0.6: 1})),
        loader_depth=int(pick(rng, {2: 2, 4: 1})),
        collects_together=int(pick(rng, {0: 4, 5: 1})),
        compiles_s=float(pick(rng, {0.0: 3, 4.0: 1})),
        **_cluster_of(rng, layout.world_size, most),  # type: ignore[arg-type]
    )


def _plain(rng: Rng, wants: Wants) -> Job:
    world = int(pick(rng, {2: 2, 4: 3, 8: 5, 16: 4, 32: 2.5, 64: 1.5}))
    world = max(world, 4 * wants.hosts if wants.hosts > 1 else 1, 2 * wants.replicas)
    trainer = pick(rng, {FSDP: 5, HSDP: 3 if world > 8 else 0, DDP: 2})
    layout = Layout(dp=world, order="dp-tp-cp-ep-pp")
    layers = int(pick(rng, {4: 2, 6: 3, 8: 2}))
    model = replace(_model(rng, layout, layers, experts=False), batch=1)
    if trainer == DDP:
        model = replace(model, hidden=2048, ffn=5632, heads=16)
    tracing = replace(_tracing(rng, wants.least_iterations), has_tokens=False)
    count = int(pick(rng, {1: 4, 2: 2, 4: 1, 16: 0.3}))
    most = None if wants.hosts == 1 and trainer != HSDP else world // max(wants.hosts, 2)
    return Job(
        trainer=trainer,
        layout=layout,
        model=model,
        tracing=tracing,
        noise=_noise(rng),
        stages=((tuple(range(1, layers + 1)),),),
        microbatches=(count,) * len(tracing.iterations),
        sequence_parallel=False,
        recompute=bool(rng.random() < 0.4),
        shards_optimizer=trainer != DDP,
        host_ahead=float(pick(rng, {0.5: 2, 1.0: 3})),
        loader_share=float(pick(rng, {0.1: 2, 0.3: 2, 0.6: 1})),
        syncs_steps=bool(rng.random() < 0.6),
        copies_block=bool(rng.random() < 0.5),
        **_cluster_of(rng, world, most),  # type: ignore[arg-type]
    )


def _profiled(rng: Rng, job: Job, wants: Wants) -> Job:
    """Return the job as a profiler records it: some steps without gaps, whole kernels."""
    count = max(int(pick(rng, {3: 1, 5: 3, 8: 2, 10: 1})), wants.least_iterations)
    first = int(rng.integers(3, 500))
    tracing = replace(
        job.tracing,
        profile=True,
        iterations=tuple(range(first, first + count)),
        interval=1 << 20,
        window=1 << 20,
        stride=1,
        compress=bool(rng.random() < 0.3),
    )
    return replace(
        job, tracing=tracing, microbatches=(job.microbatches[0],) * count, compiles_s=0.0
    )


def _within_budget(job: Job, wants: Wants) -> Job:
    """Trace fewer iterations of jobs that are too large to be written quickly."""
    count = len(job.tracing.iterations)
    most = min(_MOST_SPANS / _spans_of(job), _MOST_STEPS / _steps_of(job))
    kept = max(wants.least_iterations, min(count, math.floor(most)), 2)
    tracing = replace(job.tracing, iterations=job.tracing.iterations[:kept])
    return replace(job, tracing=tracing, microbatches=job.microbatches[:kept])
