"""Draw jobs: machines that are bought today, models that are trained on them, layouts that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.grounds.pod.job import Chip, Cluster, Data, Disorder, Job, Model, Tracing, Trainer
from megascan.topology import Layout

Want = Callable[[Job], bool]

A100 = Chip(
    name="NVIDIA A100-SXM4-80GB", matrix_tflops=215, attention_tflops=125, memory_tbps=1.6,
    clock_mhz=1410, power_w=400,
)  # fmt: skip
H100 = Chip(
    name="NVIDIA H100 80GB HBM3", matrix_tflops=590, attention_tflops=390, memory_tbps=2.7,
    clock_mhz=1980, power_w=700,
)  # fmt: skip
H200 = replace(H100, name="NVIDIA H200", matrix_tflops=610, memory_tbps=3.9)
B200 = Chip(
    name="NVIDIA B200", matrix_tflops=1350, attention_tflops=800, memory_tbps=6.3,
    clock_mhz=1965, power_w=1000,
)  # fmt: skip
GB200 = replace(B200, name="NVIDIA GB200", matrix_tflops=1450, power_w=1200)

MOST_SPANS = 200_000
MOST_STEPS = 120_000
LEAST_ITERATIONS, MOST_ITERATIONS = 4, 40
_TRIES = 20_000


def drawn(rng: np.random.Generator, seed: int, wants: Want) -> Job:
    """Return a job that is as wanted; raise RuntimeError if none can be found."""
    for _ in range(_TRIES):
        job = _job(rng, seed)
        if job is not None and wants(job):
            return job
    raise RuntimeError(f"no job is as wanted, seed {seed}")


def pick(rng: np.random.Generator, *choices: float) -> int:
    """Return one of some numbers."""
    return int(rng.choice(choices))


def _layout(rng: np.random.Generator, with_experts: bool) -> Layout | None:
    tp = pick(rng, 1, 1, 2, 4, 8) if not with_experts else pick(rng, 1, 1, 1, 2, 4)
    pp = pick(rng, 1, 1, 2, 2, 4, 4, 8)
    cp = pick(rng, 1, 1, 1, 1, 2, 4)
    dp = pick(rng, 1, 2, 2, 3, 4, 4, 6, 8, 8, 16, 32)
    if not 4 <= tp * pp * cp * dp <= 128:
        return None
    ep = 1
    if with_experts:
        ep = pick(rng, 2, 4, 8, 8, 16, 32)
        if (tp * cp * dp) % ep:
            return None
    vpp = pick(rng, 1, 1, 2) if pp > 1 else 1
    order = "tp-cp-ep-pp-dp" if pp > 1 and not with_experts and rng.random() < 0.12 else None
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, vpp=vpp, order=order or "tp-cp-ep-dp-pp")


def _cluster(rng: np.random.Generator, num_ranks: int) -> Cluster:
    kind = rng.choice(["rack", "rack", "eight", "eight", "eight", "four"])
    if kind == "rack":
        per_host, domain, chip = 4, pick(rng, 32, 32, 36, 64, 72), GB200
        nvlink, nic = 680.0, float(rng.choice([44.0, 88.0]))
    elif kind == "eight":
        per_host = domain = 8
        chip = (A100, H100, H100, H200, B200)[int(rng.integers(5))]
        nvlink = {A100: 220.0, B200: 680.0}.get(chip, 360.0)
        nic = 22.0 if chip is A100 else 44.0
    else:
        per_host = domain = 4
        chip = (A100, H100)[int(rng.integers(2))]
        nvlink, nic = 180.0, 22.0
    count = math.ceil(num_ranks / per_host)
    if kind == "rack":
        rack = int(rng.integers(1, 40))
        trays = rng.permutation(18)
        hosts = [f"nvl-r{rack + at // 18:02d}-t{trays[at % 18]:02d}" for at in range(count)]
    else:
        hosts = [f"gpu-{one:04d}" for one in rng.choice(4000, count, replace=False)]
    return Cluster(
        chip=chip, gpus_per_host=per_host, domain=domain, nvlink_gbps=nvlink, nic_gbps=nic,
        hosts=tuple(hosts),
    )  # fmt: skip


def _model(rng: np.random.Generator, layout: Layout, with_experts: bool) -> Model:
    hidden = pick(rng, 2048, 2560, 4096, 4096, 5120, 6144, 8192)
    depth = pick(rng, 1, 2, 2, 3, 4, 6) if layout.pp * layout.vpp > 1 else pick(rng, 3, 4, 6, 8, 10)
    chunks = [[depth] * layout.vpp for _ in range(layout.pp)]
    large = layout.pp == 1 or (depth > 2 and hidden >= 4096)  # or the head outweighs a stage
    vocabulary = pick(rng, 50_304, 128_256, 152_064) if large else pick(rng, 32_000, 50_304)
    ffn_ratio = float(rng.choice([2.7, 3.5, 4.0]))
    # grouped queries: Q and output whole, keys and values a part; MLA: by low ranks
    attention_ratio = float(rng.choice([2.25, 2.5, 3.2, 4.0]))
    head = vocabulary / (hidden * (attention_ratio + 3 * ffn_ratio))  # in layers
    if layout.pp > 1 and head > 0.4 and rng.random() < 0.8:
        chunks[-1][-1] = max(depth - max(round(head), 1), 1)  # room for the output layer
    model = Model(
        hidden=hidden,
        ffn=int(hidden * ffn_ratio),
        layers=tuple(tuple(each) for each in chunks),
        vocabulary=vocabulary,
        attention_ratio=attention_ratio,
        tied=bool(rng.random() < 0.25),
    )
    if not with_experts:
        return model
    hidden = min(hidden, 5120)
    local = pick(rng, 1, 2, 4)
    return replace(
        model,
        hidden=hidden,
        ffn=int(hidden * 3.5),
        num_experts=layout.ep * local,
        top_k=min(pick(rng, 1, 2, 4, 6, 8), layout.ep * local),
        expert_ffn=pick(rng, 1024, 1536, 2048, 4096),
        shared_ffn=pick(rng, 0, 0, 2048, 4096),
        num_dense=pick(rng, 0, 0, 1, 2),
    )


def _trainer(rng: np.random.Generator, layout: Layout, model: Model) -> Trainer:
    count = pick(rng, 1, 2, 4, 4, 6, 8, 8, 12, 16)
    if layout.vpp > 1:
        count = max(count // layout.pp, 1) * layout.pp
    if layout.pp > 1:
        count = max(count, layout.pp)
    alone = layout.tp * layout.pp * layout.cp * layout.ep == 1
    distributed = bool(rng.random() < 0.75)
    return Trainer(
        num_microbatches=count,
        sequence_parallel=bool(layout.tp > 1 and (model.num_experts or rng.random() < 0.7)),
        distributed_optimizer=distributed,
        overlaps_gradients=bool(rng.random() < 0.7),
        overlaps_parameters=bool(distributed and rng.random() < 0.5),
        fully_sharded=bool(alone and rng.random() < 0.5),
        recomputes=bool(rng.random() < 0.2),
        ring_attention=bool(layout.cp > 1 and rng.random() < 0.55),
        experts_sync=bool(rng.random() < 0.7),
        collects_garbage=bool(rng.random() < 0.5),
        logs_every=pick(rng, 1, 1, 5, 10),
        launch_us=float(rng.uniform(4.5, 9.5)),
        gradient_bytes=pick(rng, 2, 4),
    )


def _data(rng: np.random.Generator, layout: Layout) -> Data:
    packed = bool(rng.random() < 0.3)
    sequence = pick(rng, 4096, 4096, 8192) * layout.cp
    return Data(
        sequence=sequence * (pick(rng, 1, 2) if packed else 1),
        micro_batch=pick(rng, 1, 2, 4) if sequence <= 4096 else pick(rng, 1, 1, 2),
        packed=packed,
        balanced=bool(rng.random() < 0.5),
        tail_sigma=float(rng.uniform(0.8, 1.6)),
        median_length=pick(rng, 400, 800, 1500, 3000),
    )


def _disorder(rng: np.random.Generator) -> Disorder:
    return Disorder(
        chip_spread=float(rng.choice([0.005, 0.008, 0.012, 0.018, 0.025])),
        kernel_sigma=float(rng.uniform(0.002, 0.012)),
        tail_share=float(10 ** rng.uniform(-4.5, -2.6)),
        host_drift=float(rng.uniform(0.01, 0.08)),
        network_drift=float(rng.uniform(0.01, 0.1)),
        network_sigma=float(rng.uniform(0.02, 0.15)),
        congestion=float(rng.choice([0.0, 0.05, 0.15])),
        router_sigma=float(rng.uniform(0.05, 0.35)),
        router_memory=float(rng.uniform(0.5, 0.97)),
        warm_up_ratio=float(rng.uniform(1.5, 4.0)),
        connect_s=float(rng.uniform(0.01, 0.3)),
        clock_offset_ms=float(10 ** rng.uniform(-0.7, 1.2)),
        clock_drift_ppm=float(rng.uniform(0.5, 12.0)),
        clock_wander_us=float(rng.uniform(3, 60)),
    )


def _tracing(rng: np.random.Generator, granularity: str, num_iterations: int) -> Tracing:
    interval, window = [(5, 2), (5, 2), (5, 2), (5, 5), (10, 3), (20, 4)][int(rng.integers(6))]
    first = 0 if rng.random() < 0.5 else pick(rng, *range(3, 400))
    numbers = [
        cycle * interval + 1 + place
        for cycle in range(first, first + num_iterations)
        for place in range(window)
    ]
    return Tracing(
        iterations=tuple(numbers[:num_iterations]),
        interval=interval,
        window=window,
        granularity=granularity,
        layer_stride=4 if rng.random() < 0.75 else 1,
        reads_device=bool(rng.random() < 0.4),
    )


def _job(rng: np.random.Generator, seed: int) -> Job | None:
    with_experts = bool(rng.random() < 0.45)
    layout = _layout(rng, with_experts)
    if layout is None:
        return None
    model = _model(rng, layout, with_experts)
    job = Job(
        seed=seed,
        layout=layout,
        cluster=_cluster(rng, layout.world_size),
        model=model,
        data=_data(rng, layout),
        trainer=_trainer(rng, layout, model),
        disorder=_disorder(rng),
        tracing=_tracing(rng, "full" if rng.random() < 0.85 else "base", 4),
    )
    most = most_iterations(job)
    if layout.tp > job.cluster.domain:
        return None
    if most < LEAST_ITERATIONS:
        return None
    count = int(rng.integers(min(max(most // 3, LEAST_ITERATIONS), most), most + 1))
    granularity = job.tracing.granularity
    return replace(job, tracing=_tracing(rng, granularity, count))


def most_iterations(job: Job) -> int:
    """Return how many iterations fit into a case's bytes and seconds."""
    spans, steps = spans_of(job)
    by_spans = MOST_SPANS // (spans * job.num_ranks)
    return int(min(by_spans, MOST_STEPS // (steps * job.layout.pp), MOST_ITERATIONS))


def spans_of(job: Job) -> tuple[int, int]:
    """Return about how many spans a rank records in an iteration, and what a stage simulates."""
    layout, trainer = job.layout, job.trainer
    per_stage = max(job.num_layers(stage) for stage in range(layout.pp))
    recorded = per_stage if job.tracing.layer_stride == 1 else min(per_stage, 2 * layout.vpp)
    modules = 6 + 3 * trainer.recomputes
    inner = (8 if trainer.sequence_parallel else 4) * (layout.tp > 1)
    inner += 9 * bool(job.model.num_experts) + 3 * (layout.cp > 1)
    if trainer.recomputes:
        inner = int(inner * 1.6)
    passes = trainer.num_microbatches
    outside = 9 * layout.vpp + 4 * (layout.tp > 1)
    spans = passes * (recorded * modules + per_stage * inner + outside) + 20
    if job.tracing.granularity == "base":
        spans = passes * 7 * layout.vpp + 3 * per_stage + 20
    if trainer.fully_sharded:
        spans += passes * 3 * per_stage
    steps = passes * (per_stage * (22 + inner) + 20)
    return spans, steps
