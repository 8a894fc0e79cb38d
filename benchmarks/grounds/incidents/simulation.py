"""Run a whole job: all stages, iteration by iteration, in several variants from the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.incidents.engine import Hub, Span, Spec, Stage
from benchmarks.grounds.incidents.hardware import Floats
from benchmarks.grounds.incidents.jobs import Job
from benchmarks.grounds.incidents.trainers import Trainer
from benchmarks.grounds.incidents.troubles import Conditions, Trouble


@dataclass(frozen=True)
class Outcome:
    """What happened: spans by stage, the time of each iteration, and of each rank's passes.

    `iteration_s` is (variant, iteration), the mean over ranks; `passes_s` (variant, rank,
    iteration) is the time that kernels of passes ran. `layers` are those recorded by iteration.
    """

    spans: tuple[list[Span], ...]
    iteration_s: Floats
    passes_s: Floats
    layers: tuple[frozenset[int] | None, ...]
    conditions: Conditions


def chips_of(job: Job, spread: float) -> Floats:
    """Return how many times longer products take on each rank's chip, (rank,)."""
    rng = np.random.default_rng([job.seed, 3])
    draws = np.clip(rng.standard_normal(job.num_ranks), -2.5, 2.5)
    return np.exp(spread * draws)


def simulate(
    job: Job,
    troubles: Sequence[Trouble],
    variants: Sequence[frozenset[int]],
    chips: Floats,
    *,
    keeps: bool,
) -> Outcome:
    """Simulate the traced iterations of a job. `chips` is (variant, rank)."""
    iterations = job.tracing.iterations
    conditions = Conditions(troubles, variants, chips, iterations, job.num_passes)
    hub = Hub(job, np.random.default_rng([job.seed, 5]))
    stages = [Stage(job, number, hub, conditions, len(variants)) for number in range(job.layout.pp)]
    trainers = [Trainer(job, stage) for stage in stages]
    shared = np.random.default_rng([job.seed, 6])
    congestion, times, passes, layers = 0.0, [], [], []
    for place, iteration in enumerate(iterations):
        congestion = 0.7 * congestion + 0.7 * job.noise.congestion * abs(shared.standard_normal())
        recorded = _recorded(job, place)
        layers.append(recorded)
        slower = job.shrinks_by if job.shrinks_at and iteration >= job.shrinks_at else 1.0
        for stage, trainer in zip(stages, trainers, strict=True):
            stage.keeps, stage.congestion, stage.extra = keeps, 1 + congestion, slower
            trainer.recorded = recorded
        begins = [np.maximum(stage.device, stage.host).copy() for stage in stages]
        _run(job, stages, trainers, place, iteration)
        lengths = [np.maximum(s.device, s.host) - b for s, b in zip(stages, begins, strict=True)]
        times.append(np.concatenate(lengths, axis=1).mean(1))
        passes.append(np.concatenate([one.passed for one in trainers], axis=1))
        _between(job, stages, place, float(times[-1][0].mean()), shared)
    return Outcome(
        spans=tuple(stage.spans for stage in stages),
        iteration_s=np.stack(times, axis=1),
        passes_s=np.stack(passes, axis=2),
        layers=tuple(layers),
        conditions=conditions,
    )


def _run(
    job: Job, stages: Sequence[Stage], trainers: Sequence[Trainer], place: int, iteration: int
) -> None:
    """Run the programs of all stages in turns until all are done."""
    number = job.microbatches[place]
    running = [trainer.run(place, iteration, number) for trainer in trainers]
    for _ in range(100_000):
        left = []
        for program in running:
            try:
                next(program)
                left.append(program)
            except StopIteration:
                continue
        running = left
        if not running:
            break
    else:
        raise RuntimeError("stages wait for each other for ever")
    for stage in stages:
        stage.finish()
    stages[0].hub.clear()


def _recorded(job: Job, place: int) -> frozenset[int] | None:
    """Return the layers whose modules are recorded: every so many in turns, all of them first."""
    stride = job.tracing.stride
    if stride == 1 or place == 0:
        return None
    chosen: set[int] = set()
    for stage in job.stages:
        for chunk in stage:
            step = max(1, min(stride, len(chunk) // 2))
            chosen.update(chunk[place % step :: step])
    return frozenset(chosen)


def _between(
    job: Job, stages: Sequence[Stage], place: int, length: float, rng: np.random.Generator
) -> None:
    """Let time pass between two traced iterations: gaps, evaluations, planned collections."""
    iterations = job.tracing.iterations
    gap = iterations[place + 1] - iterations[place] - 1 if place + 1 < len(iterations) else 0
    lasting = gap * length * float(np.exp(0.01 * rng.standard_normal()))
    if place == job.saves_after:
        _save(job, stages, rng)
    alone = job.evaluates * length if job.evaluates and gap else 0.0
    for stage in stages:
        stage.host = stage.host + lasting
        stage.device = stage.device + lasting
        stage.loaded = stage.loaded + lasting
        stage.streams = {name: at + lasting for name, at in stage.streams.items()}
        if alone and stage.number == 0:
            stage.host[:, 0] += alone


def _save(job: Job, stages: Sequence[Stage], rng: np.random.Generator) -> None:
    """Write a checkpoint between two iterations: hosts wait for the slowest of them."""
    usual = float(rng.uniform(0.5, 4.0))
    for stage in stages:
        begin = stage.host = np.maximum(stage.host, stage.device)
        stage.host = stage.host + usual * np.exp(0.2 * rng.standard_normal(job.lanes))
        stage.add_host(Spec("checkpoint", "save-checkpoint", 3), begin)
    done = np.max([stage.host.max(1) for stage in stages], axis=0)
    for stage in stages:
        stage.host = np.broadcast_to(done[:, None], stage.host.shape).copy()
