"""Which jobs teams of a campus run: draws of a job, from students' pairs to 64 GPUs.

A team is a kind of habit: what it trains, on which machines, with which trainer. Sizes are drawn so
that a traced iteration takes milliseconds to seconds and a case is written in about a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.grounds.campus.hardware import CHIPS, Site
from benchmarks.grounds.campus.job import (
    DDP,
    FSDP,
    MEGATRON,
    PACKED,
    PADDED,
    Habits,
    Job,
    Loading,
    Tracing,
)
from benchmarks.grounds.campus.links import nic_share_bytes_s, within_bytes_s
from benchmarks.grounds.campus.model import DENSE, EXPERTS, LOCAL, MAMBA, Model
from megascan.topology import Layout

Want = Callable[[Job], bool]
_ATTEMPTS, _ATTEMPTS_A_SIZE = 12_000, 60
_SIZES, _SHARES = (2, 4, 8, 16, 32, 64), (0.11, 0.19, 0.25, 0.21, 0.14, 0.1)
MOST_REPLICAS = 32  # of a job on plain PyTorch
MOST_SPANS = 260_000  # of all files of a job
MOST_COMMUNICATION = 0.6  # of what an iteration computes

_LAYOUTS = (
    {"tp": 2}, {"dp": 2}, {"pp": 2}, {"dp": 4}, {"tp": 2, "dp": 2}, {"tp": 2, "pp": 2},
    {"pp": 4}, {"cp": 2, "dp": 2}, {"dp": 8}, {"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "dp": 2},
    {"pp": 4, "dp": 2}, {"tp": 2, "dp": 4}, {"tp": 4, "pp": 2}, {"cp": 2, "tp": 2, "dp": 2},
    {"dp": 16}, {"tp": 4, "dp": 4}, {"tp": 2, "pp": 4, "dp": 2}, {"tp": 2, "pp": 2, "dp": 4},
    {"pp": 2, "dp": 8}, {"tp": 8, "dp": 2}, {"tp": 4, "pp": 4, "dp": 2},
    {"tp": 2, "pp": 4, "dp": 4}, {"tp": 2, "cp": 2, "pp": 2, "dp": 4}, {"tp": 8, "dp": 4},
    {"tp": 4, "pp": 4, "dp": 4}, {"tp": 8, "pp": 2, "dp": 4}, {"tp": 2, "pp": 8, "dp": 4},
    {"tp": 4, "pp": 2, "dp": 8},
)  # fmt: skip

_BY_SIZE = {size: [one for one in _LAYOUTS if math.prod(one.values()) == size] for size in _SIZES}


@dataclass(frozen=True)
class _Machines:
    """Machines of one room of the campus."""

    chip: str
    ranks_per_host: int
    nic_gbit: float
    num_nics: int


_ROOMS = (
    _Machines("NVIDIA H100 80GB HBM3", 8, 400, 8), _Machines("NVIDIA H100 80GB HBM3", 4, 400, 4),
    _Machines("NVIDIA A100-SXM4-80GB", 8, 200, 4), _Machines("NVIDIA A100-SXM4-80GB", 4, 200, 2),
    _Machines("NVIDIA A100-SXM4-80GB", 4, 200, 4), _Machines("NVIDIA L40S", 4, 100, 1),
    _Machines("NVIDIA L40S", 2, 100, 1), _Machines("NVIDIA RTX A6000", 2, 50, 1),
)  # fmt: skip


def draw_job(rng: np.random.Generator, want: Want, change: Callable[[Job], Job]) -> Job:
    """Return a job, changed as a family asks, that is as wanted."""
    for attempt in range(_ATTEMPTS):
        if not attempt % _ATTEMPTS_A_SIZE:
            size = int(rng.choice(_SIZES, p=_SHARES))
        trainer = str(rng.choice([MEGATRON, DDP, FSDP], p=[0.7, 0.16, 0.14]))
        is_large = size > MOST_REPLICAS
        job = (
            _megatron(rng, size) if trainer == MEGATRON or is_large else _plain(rng, trainer, size)
        )
        job = change(job)
        if _is_sensible(job) and want(job):
            return job
    raise ValueError("no job is as wanted")


def _is_sensible(job: Job) -> bool:
    """Tell whether anybody would run a job so: tensor ranks share a host, and links keep up."""
    step = job.pass_s() * job.microbatches[0]
    return (
        num_spans(job) <= MOST_SPANS
        and 0.004 < step < 20.0
        and job.site.ranks_per_host % job.layout.tp == 0
        and communication_s(job) < MOST_COMMUNICATION * step
    )


def communication_s(job: Job) -> float:
    """Return about what the communication of an iteration takes that compute cannot hide."""
    site, layout = job.site, job.layout
    count = job.microbatches[0]
    parameters, _ = job.parameters_of(0)
    leaves = job.num_ranks > site.ranks_per_host
    rate = nic_share_bytes_s(site) if leaves else within_bytes_s(site)
    members = max(1, site.ranks_per_host // layout.tp) if leaves else 1
    rate = min(rate * members, within_bytes_s(site))
    if job.trainer == FSDP:
        gathered = parameters * (2 + 2 + 4) / rate
        return max(0.0, gathered - 0.5 * job.pass_s()) * count
    replicas = layout.dp * layout.cp > 1
    found = 6 * parameters / rate * replicas * (0.5 if job.habits.overlap_gradients else 1.0)
    plane = job.model.tokens * job.model.hidden * 2 / layout.cp
    layers = sum(map(len, job.chunks)) / layout.pp
    if layout.tp > 1:
        found += 8 * layers * count * plane / within_bytes_s(site)
    if layout.ep > 1:
        found += 6 * layers * count * plane / layout.tp * job.model.top_k / 2 / rate
    return found


def num_spans(job: Job) -> int:
    """Return about how many spans the files of a job will have."""
    layers = sum(map(len, job.chunks)) / job.layout.pp
    modules = (9.0 if job.habits.recompute else 6.0) * job.tracing.is_full
    if job.trainer != MEGATRON:
        modules = 2.0 * job.tracing.is_full + 3.0 * (job.trainer == FSDP)
    if job.layout.tp > 1 and job.records("tp"):
        modules += 8.0
    a_pass = 8 * job.layout.vpp + layers * modules
    return round(job.num_ranks * max(job.microbatches) * a_pass * len(job.tracing.iterations))


def _site(rng: np.random.Generator, num_ranks: int) -> Site:
    rooms = [one for one in _ROOMS if num_ranks <= 16 * one.ranks_per_host]
    room = rooms[rng.integers(len(rooms))]
    per_host = min(room.ranks_per_host, num_ranks)
    if num_ranks <= 8 and rng.random() < 0.25:
        per_host = max(1, per_host // 2)  # a scheduler has placed it where there was room
    rails = room.num_nics >= room.ranks_per_host
    return Site(
        chip=CHIPS[room.chip], ranks_per_host=per_host, nic_bytes_s=room.nic_gbit * 1.25e8,
        num_nics=per_host if rails else max(1, min(room.num_nics, per_host)),
        chip_spread=float(rng.choice([0.0015, 0.003, 0.006, 0.01])),
        thermal_drift=float(rng.uniform(0.0005, 0.004)),
        noise=float(rng.choice([0.003, 0.008, 0.02, 0.04], p=[0.3, 0.4, 0.2, 0.1])),
        tail_share=float(rng.choice([0.0, 0.001, 0.004])),
        launch_s=float(rng.uniform(3.5e-6, 8e-6)), host_jitter=float(rng.uniform(0.05, 0.2)),
        host_spread=float(rng.uniform(0.01, 0.06)), link_noise=float(rng.uniform(0.02, 0.12)),
        busy_network=float(rng.choice([0.0, 0.05, 0.2])),
        clock_offset_s=float(rng.choice([2e-4, 2e-3, 0.02])),
        clock_drift_ppm=float(rng.uniform(1, 20)), tie_width_s=float(rng.uniform(1e-5, 4e-5)),
    )  # fmt: skip


def _tracing(rng: np.random.Generator, *, full: bool) -> Tracing:
    window = int(rng.choice([1, 2, 2, 2, 3, 5]))
    interval = int(rng.choice([window, 5, 5, 10])) if window < 5 else 5
    first_window = int(rng.choice([0, 1, 2, 20, 100]))
    count = int(rng.choice([2, 4, 6, 8, 10, 14, 20, 30, 40]))
    numbers = [
        number for period in range(count) for number in range(
            (first_window + period) * interval + 1, (first_window + period) * interval + 1 + window
        )
    ][:count]  # fmt: skip
    return Tracing(
        granularity="full" if full else "base", interval=interval, window=window,
        iterations=tuple(numbers), has_counters=bool(rng.random() < 0.25),
    )  # fmt: skip


def _loading(rng: np.random.Generator) -> Loading:
    workers = int(rng.choice([0, 2, 4, 8], p=[0.2, 0.2, 0.4, 0.2]))
    seconds = float(rng.uniform(0.0003, 0.0015) if not workers else rng.uniform(0.001, 0.01))
    return Loading(
        seconds=seconds, num_workers=workers, spread=float(rng.uniform(0.1, 0.4)),
        tail_share=float(rng.choice([0.0, 0.001, 0.003])),
    )  # fmt: skip


def _habits(rng: np.random.Generator, layout: Layout) -> Habits:
    return Habits(
        overlap_gradients=bool(rng.random() < 0.5),
        distributed_optimizer=bool(rng.random() < 0.65),
        sequence_parallel=layout.tp > 1 and bool(rng.random() < 0.7),
        recompute=bool(rng.random() < 0.15), tied_embeddings=bool(rng.random() < 0.4),
        context_by_ring=bool(rng.random() < 0.6), loading=_loading(rng),
        gc_share=float(rng.choice([0.0, 0.0, 0.01, 0.04])), gc_s=float(rng.uniform(0.005, 0.05)),
        expert_spread=float(rng.uniform(0.03, 0.12)),
    )  # fmt: skip


def _model(rng: np.random.Generator) -> Model:
    hidden = int(rng.choice([512, 1024, 2048, 4096, 5120], p=[0.12, 0.2, 0.28, 0.28, 0.12]))
    vocabularies = [32_000, 50_304, 128_256] if hidden > 2048 else [16_384, 32_000]
    return Model(
        hidden=hidden, sequence=int(rng.choice([1024, 2048, 4096, 8192], p=[0.2, 0.35, 0.35, 0.1])),
        micro_batch=int(rng.choice([1, 2, 4])), ffn_ratio=float(rng.choice([2.7, 4.0])),
        vocabulary=int(rng.choice(vocabularies)),
    )  # fmt: skip


def _megatron(rng: np.random.Generator, size: int) -> Job:
    fitting = _BY_SIZE[size]
    axes = dict(fitting[rng.integers(len(fitting))])
    model = _model(rng)
    experts = axes.get("dp", 1) * axes.get("cp", 1) >= 2 and rng.random() < 0.2
    if experts:
        replicas = axes.get("dp", 1) * axes.get("cp", 1)
        axes["ep"] = int(rng.choice([n for n in (2, 4, 8) if not replicas % n]))
        axes["etp"] = axes.get("tp", 1)
        model = replace(model, num_experts=axes["ep"] * int(rng.choice([1, 2, 4])), ffn_ratio=2.7)
    if axes.get("pp", 1) > 1 and rng.random() < 0.35:
        axes["vpp"] = 2
    layout = layout_of(axes)
    num_chunks = layout.pp * layout.vpp
    kind = EXPERTS if experts else DENSE
    per_chunk = int(rng.choice([2, 3, 4, 5])) if num_chunks > 1 else int(rng.choice([2, 4, 8]))
    chunks = _chunks(rng, model, kind, per_chunk, num_chunks)
    factor = int(rng.choice([1, 2, 4])) if layout.pp == 1 else int(rng.choice([1, 2, 3, 4]))
    microbatches = max(1, layout.pp * factor)
    return Job(
        layout=layout, model=model, site=_site(rng, layout.world_size),
        chunks=chunks, microbatches=(microbatches,),
        habits=_habits(rng, layout), tracing=_tracing(rng, full=bool(rng.random() < 0.75)),
    )  # fmt: skip


def layout_of(axes: dict[str, int]) -> Layout:
    """Return the layout with these sizes."""
    named = ("tp", "cp", "ep", "dp", "pp", "vpp", "etp")
    tp, cp, ep, dp, pp, vpp, etp = (axes.get(axis, 1) for axis in named)
    return Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, vpp=vpp, etp=etp)


def _chunks(
    rng: np.random.Generator, model: Model, kind: str, per_chunk: int, count: int
) -> tuple[tuple[str, ...], ...]:
    """Return the layers of chunks; two teams of three spare the last one what its output costs."""
    chunks = [(kind,) * per_chunk] * count
    if count > 1 and rng.random() < 0.67:
        output = round(model.vocabulary / (12 * model.hidden))
        chunks[-1] = (kind,) * max(1, per_chunk - output)
    return tuple(chunks)


def _plain(rng: np.random.Generator, trainer: str, dp: int) -> Job:
    layout, model = Layout(dp=dp), _model(rng)
    if trainer == DDP:
        model = replace(model, hidden=min(model.hidden, 2048))
    habits = replace(_habits(rng, layout), sequence_parallel=False, tied_embeddings=False)
    return Job(
        layout=layout, model=model, site=_site(rng, dp), trainer=trainer,
        chunks=((DENSE,) * int(rng.choice([4, 6, 8, 12])),),
        microbatches=(int(rng.choice([1, 1, 2, 4])),), habits=habits,
        tracing=_tracing(rng, full=bool(rng.random() < 0.7)),
    )  # fmt: skip


# What families ask for


def with_habits(**given: object) -> Callable[[Job], Job]:
    """Return a change of habits."""
    return lambda job: replace(job, habits=replace(job.habits, **given))  # type: ignore[arg-type]


def with_site(**given: object) -> Callable[[Job], Job]:
    """Return a change of machines."""
    return lambda job: replace(job, site=replace(job.site, **given))  # type: ignore[arg-type]


def with_tracing(**given: object) -> Callable[[Job], Job]:
    """Return a change of what is traced."""
    return lambda job: replace(job, tracing=replace(job.tracing, **given))  # type: ignore[arg-type]


def hybrid(job: Job) -> Job:
    """Return the job with layers of other kinds in between, unevenly over stages."""
    kinds = [DENSE if number % 4 == 3 else MAMBA for number in range(sum(map(len, job.chunks)))]
    return _relabelled(job, kinds)


def mixed_windows(job: Job) -> Job:
    """Return the job with attention within a window in most layers."""
    count = sum(map(len, job.chunks))
    return _relabelled(job, [DENSE if number % 3 == 2 else LOCAL for number in range(count)])


def _relabelled(job: Job, kinds: list[str]) -> Job:
    rest, chunks = list(kinds), []
    for chunk in job.chunks:
        chunks.append(tuple(rest[: len(chunk)]))
        rest = rest[len(chunk) :]
    return replace(job, chunks=tuple(chunks))


def heavy_end(job: Job) -> Job:
    """Return the job with a large vocabulary, or a layer more on its last stage."""
    if job.model.vocabulary < 100_000:
        return replace(job, model=replace(job.model, vocabulary=202_048))
    return replace(job, chunks=(*job.chunks[:-1], (*job.chunks[-1], DENSE)))


def host_bound(job: Job) -> Job:
    """Return the job with a model so small that launches take longer than kernels."""
    model = Model(
        hidden=512, sequence=1024, vocabulary=16_384, num_experts=job.model.num_experts
    )  # fmt: skip
    return replace(job, model=model)


def packed(job: Job) -> Job:
    """Return the job on documents that fill rows."""
    model = replace(job.model, sequence=8192, micro_batch=1)
    habits = replace(job.habits, lengths=PACKED, length_spread=0.45)
    return replace(job, model=model, habits=habits)


def padded(job: Job) -> Job:
    """Return the job on batches that are as long as their longest sequence."""
    return with_habits(lengths=PADDED, length_spread=0.25)(job)


def ramping(job: Job) -> Job:
    """Return the job while its batch size grows."""
    count = job.microbatches[0]
    return replace(job, microbatches=(count, 2 * count))


def from_the_first(job: Job) -> Job:
    """Return the job traced from its first iteration, which compiles and allocates."""
    count = max(6, len(job.tracing.iterations))
    period, window = job.tracing.interval, job.tracing.window
    numbers = [n for n in range(1, count * period + 1) if (n - 1) % period < window][:count]
    return with_habits(warms_up=True)(with_tracing(iterations=tuple(numbers))(job))
