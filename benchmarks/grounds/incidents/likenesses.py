"""Change jobs in ways that look like a fault and are none, or plant what is the job's own.

Stages, sequences and experts that have more to do are planted with the owner `job`; everything
else (jitter, congestion, clocks, ramps, …) is how the whole job is, and nothing is planted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.grounds.incidents.draws import Rng, pick
from benchmarks.grounds.incidents.hardware import placed
from benchmarks.grounds.incidents.jobs import Job
from benchmarks.grounds.incidents.troubles import Trouble


def incomplete(job: Job, rng: Rng) -> Job:
    """Lose files of some ranks, or cut one short; profiles lose whole files only."""
    count = max(1, job.num_ranks // 8)
    lost = tuple(sorted(rng.permutation(np.arange(1, job.num_ranks))[:count].tolist()))
    if job.tracing.profile or rng.random() < 0.5:
        return replace(job, tracing=replace(job.tracing, missing=lost))
    return replace(job, tracing=replace(job.tracing, torn=lost))


def restarted(job: Job, rng: Rng) -> Job:
    """Start ranks again on hosts in another order, with a spare one for the host that was lost."""
    cluster, per_host = job.cluster, int(job.cluster.slots.max()) + 1
    again = placed(job.num_ranks, per_host, rng, restarted=True)
    again = replace(again, chip=cluster.chip, nics_per_gpu=cluster.nics_per_gpu)
    if job.tracing.profile:
        return replace(job, cluster=again)
    later = 1000 * job.tracing.interval
    numbers = tuple(number + later for number in job.tracing.iterations)
    tracing = replace(job.tracing, iterations=numbers)
    return replace(job, cluster=again, tracing=tracing, resumed=True)


def jitter(job: Job, rng: Rng) -> Job:
    """Let every kernel vary much, with a heavy tail."""
    noise = replace(
        job.noise,
        sigma=float(rng.uniform(0.03, 0.08)),
        tail_share=float(rng.uniform(0.004, 0.02)),
        tail=float(rng.uniform(0.5, 2.5)),
        host_sigma=0.6,
    )
    return replace(job, noise=noise)


def congestion(job: Job, rng: Rng) -> Job:
    """Share the network with other jobs, which slows everybody equally."""
    noise = replace(job.noise, congestion=float(rng.uniform(0.4, 1.5)), link_sigma=0.15)
    return replace(job, noise=noise)


def stalls(job: Job, rng: Rng) -> Job:
    """Let collectives stall now and then, whoever takes part."""
    length = float(rng.uniform(0.005, 0.08))
    return replace(job, noise=replace(job.noise, stalls=(float(rng.uniform(0.002, 0.01)), length)))


def clocks(job: Job, rng: Rng) -> Job:
    """Let hosts' clocks be far apart, drift, and be set between windows."""
    tracing = replace(
        job.tracing,
        wander_us=float(rng.uniform(2_000, 30_000)),
        walk_us=float(rng.uniform(5, 40)),
        drift_ppm=float(rng.uniform(20, 60)),
        step_us=float(rng.uniform(0, 8_000)),
    )
    return replace(job, tracing=tracing)


def chips(job: Job, rng: Rng) -> Job:
    """Let chips differ by some per cent (Sinha et al., Not All GPUs Are Created Equal, 2022)."""
    spread = float(rng.uniform(0.008, 0.016))
    return replace(job, noise=replace(job.noise, chip_spread=spread))


def compilation(job: Job, rng: Rng) -> Job:
    """Compile and allocate in the first iteration of the run, which is traced."""
    tracing = job.tracing
    if not tracing.profile:
        shift = tracing.iterations[0] - 1
        numbers = tuple(number - shift for number in tracing.iterations)
        tracing = replace(tracing, iterations=numbers)
    return replace(job, tracing=tracing, compiles_s=float(rng.uniform(3, 25)))


def evaluation(job: Job, rng: Rng) -> Job:
    """Let the first rank evaluate alone before windows, while all others wait for it."""
    tracing = replace(job.tracing, interval=5, window=2)
    first = job.tracing.iterations[0] // 5 * 5
    numbers = tuple(
        first + place // 2 * 5 + place % 2 + 1 for place in range(len(job.tracing.iterations))
    )
    tracing = replace(tracing, iterations=numbers)
    return replace(job, tracing=tracing, evaluates=float(rng.uniform(0.3, 3.0)))


def ramp(job: Job, rng: Rng) -> Job:
    """Ramp the batch size up: iterations have more and more microbatches."""
    unit = job.layout.pp if job.layout.pp > 1 else 1
    count = len(job.microbatches)
    most = max(2 * unit, job.microbatches[0])
    steps = np.linspace(unit, most, count)
    ramped = tuple(max(unit, int(step) // unit * unit) for step in steps)
    return replace(job, microbatches=ramped)


def everybody(job: Job, rng: Rng) -> Job:
    """Slow all chips from some iteration on: a hot afternoon, a lower cap for the whole hall."""
    numbers = job.tracing.iterations
    begin = numbers[int(rng.integers(2, len(numbers) - 1))]
    return replace(job, shrinks_at=begin, shrinks_by=float(rng.uniform(1.08, 1.6)))


def launch_bound(job: Job, rng: Rng) -> Job:
    """Let all hosts launch slowly: eager Python on small kernels."""
    noise = replace(job.noise, host_sigma=0.4)
    return replace(job, host_ahead=float(rng.uniform(3, 8)), noise=noise)


def uneven(job: Job, rng: Rng) -> Job:
    """Give one stage a layer more and another one less."""
    if job.layout.pp < 2:
        return job
    stages = [list(map(list, stage)) for stage in job.stages]
    fewer, more = rng.permutation(job.layout.pp)[:2].tolist()
    moved = len(stages[fewer][0]) // 2
    counts = [[len(chunk) for chunk in stage] for stage in stages]
    counts[fewer][0] -= moved
    counts[more][0] += moved
    number, built = 1, [[() for _ in stage] for stage in stages]
    for chunk in range(job.layout.vpp):
        for stage in range(job.layout.pp):
            last = number + counts[stage][chunk]
            built[stage][chunk] = tuple(range(number, last))  # type: ignore[assignment]
            number = last
    return replace(job, stages=tuple(tuple(stage) for stage in built))


def encoder(job: Job, rng: Rng) -> Job:
    """Put a vision encoder before the first stage's layers."""
    layers = len(job.stages[0][0])
    count = max(1, int(layers * rng.uniform(0.3, 1.0)))
    return replace(job, model=replace(job.model, encoder_layers=count))


def last_stage(job: Job, rng: Rng) -> Job:
    """Give the last stage a large vocabulary's logits and loss."""
    return replace(job, model=replace(job.model, vocabulary=int(rng.choice([151936, 256000]))))


def distillation(job: Job, rng: Rng) -> Job:
    """Run a teacher's layers before the loss, on the last stage."""
    return replace(job, model=replace(job.model, teacher_share=float(rng.uniform(0.1, 0.35))))


def packed(job: Job, rng: Rng) -> Job:
    """Let the work of microbatches vary with the lengths of documents, packed or padding-free."""
    if rng.random() < 0.5:
        return replace(_long_context(job), lengths=float(rng.uniform(0.3, 0.9)))
    return replace(job, lengths=float(rng.uniform(0.06, 0.3)))


def _long_context(job: Job) -> Job:
    """Return the job with packed sequences so long that attention's core matters."""
    model = job.model
    long = replace(
        model, sequence=max(model.sequence, 16384), batch=1, hidden=min(4096, model.hidden)
    )
    return replace(job, model=long, packs=True)


def routing(job: Job, rng: Rng) -> Job:
    """Let the loads of experts differ, and drift."""
    return replace(job, routing=float(rng.uniform(0.2, 0.5)))


def _own(kind: str, cause: str, **values: object) -> Trouble:
    return Trouble(kind=kind, cause=cause, owner="job", **values)  # type: ignore[arg-type]


def heavy_stage(job: Job, rng: Rng) -> Trouble:
    """Give a stage more work in all of its layers."""
    stage = int(rng.integers(job.layout.pp))
    factor = float(rng.uniform(1.15, 1.8))
    return _own(
        "heavy_stage",
        "stage_imbalance",
        ranks=tuple(job.ranks_of(stage)),
        effect={"work": factor},
        factor=factor,
    )


def long_sequences(job: Job, rng: Rng) -> tuple[Job, tuple[Trouble, ...]]:
    """Give one replica longer sequences throughout."""
    width = job.layout.tp * job.layout.cp
    replica = int(rng.integers(job.layout.dp))
    ranks = tuple(
        stage * job.lanes + replica * width + one
        for stage in range(job.layout.pp)
        for one in range(width)
    )
    packs = rng.random() < 0.5
    factor = float(rng.uniform(1.8, 4.0) if packs else rng.uniform(1.12, 1.7))
    trouble = _own(
        "long_sequences", "sequence_imbalance", ranks=ranks, effect={"work": factor}, factor=factor
    )
    job = _long_context(job) if packs else job
    return replace(job, lengths=float(pick(rng, {0.0: 1, 0.05: 2}))), (trouble,)


def hot_expert(job: Job, rng: Rng) -> tuple[Job, tuple[Trouble, ...]]:
    """Send one expert more tokens in all replicas of it: its place in all groups."""
    place = int(rng.integers(job.layout.ep))
    ranks = tuple(
        rank for rank in range(job.num_ranks) if rank % job.lanes % job.layout.ep == place
    )
    factor = float(rng.uniform(1.3, 2.5))
    trouble = _own(
        "hot_expert", "sequence_imbalance", ranks=ranks, effect={"experts": factor}, factor=factor
    )
    return replace(job, routing=max(job.routing, 0.08)), (trouble,)


def shared_storage(job: Job, rng: Rng) -> Trouble:
    """Slow the storage that all ranks read from."""
    factor = max(1.5, float(rng.uniform(1.5, 5.0)) / job.loader_share)
    return _own(
        "storage",
        "loader",
        ranks=tuple(range(job.num_ranks)),
        effect={"storage": factor},
        factor=factor,
    )


def mixed_chips(job: Job, rng: Rng) -> tuple[Job, tuple[Trouble, ...]]:
    """Run on two types of chips, as the job's owner chose: the headers say which."""
    hosts = np.unique(job.cluster.hosts)
    slower = hosts[len(hosts) // 2 :]
    ranks = tuple(rank for host in slower.tolist() for rank in job.cluster.ranks_on(host))
    factor = float(rng.uniform(1.15, 1.6))
    trouble = _own(
        "mixed_chips", "compute", ranks=ranks, effect={"flop": factor, "memory": 1.2}, factor=factor
    )
    name = "NVIDIA A100-SXM4-80GB" if "A100" not in job.cluster.chip.name else "Tesla V100-SXM2"
    return replace(job, mixed=ranks, mixed_name=name), (trouble,)
