"""Simulate a job from its first iteration to its last traced one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.plain.engine import Engine, Recorder, Row
from benchmarks.grounds.plain.job import PIPELINES, Job
from benchmarks.grounds.plain.loops import loop_of
from benchmarks.grounds.plain.machine import Floats, Ranks, chip_slowness
from benchmarks.grounds.plain.passes import Passes
from benchmarks.grounds.plain.pipeline import Pipeline
from benchmarks.grounds.plain.trouble import Conditions, Trouble
from benchmarks.grounds.plain.update import Update
from megascan.schema import Kind
from megascan.vocabulary import ITERATION

BEGIN_S = 1.5
"""From the start of tracing until the first iteration."""


@dataclass(eq=False)
class Run:
    """What happened, by iteration from 1 on."""

    rows: list[list[Row]] = field(default_factory=list)
    begins_s: list[Floats] = field(default_factory=list)
    """(rank,) each, by the streams."""
    ends_s: list[Floats] = field(default_factory=list)
    passes_s: list[Floats] = field(default_factory=list)
    tokens: list[Ranks] = field(default_factory=list)
    layers: list[tuple[int, ...] | None] = field(default_factory=list)

    def iteration_s(self, iterations: Sequence[int]) -> Floats:
        """Return how long these iterations took, (iteration,): from one's end to the next one's."""
        ends = np.array([BEGIN_S, *(float(one.max()) for one in self.ends_s)])
        return np.asarray(np.diff(ends)[np.array(iterations) - 1], dtype=np.float64)

    def pass_times_s(self, iterations: Sequence[int]) -> Floats:
        """Return what the kernels of each rank's passes took, (rank, iteration)."""
        return np.stack([self.passes_s[one - 1] for one in iterations], axis=1)


def simulate(
    job: Job,
    troubles: Sequence[Trouble] = (),
    *,
    chips: Floats | None = None,
    records: bool = True,
) -> Run:
    """Run a job; the chips are those of the job unless others are given."""
    recorder, run = Recorder(), Run()
    engine = Engine(
        job, Conditions(job, own_chips(job) if chips is None else chips, troubles), recorder
    )
    engine.device += BEGIN_S
    engine.host += BEGIN_S
    passes = Passes(engine)
    update = Update(engine, passes)
    loop = (Pipeline if job.trainer in PIPELINES else loop_of)(engine, passes, update)
    for iteration in range(1, job.tracing.last_iteration + 1):
        engine.begin_iteration(iteration)
        recorder.is_on = recorder.is_on and records
        passes.begin_iteration()
        begin = engine.mark()
        loop.iterate()
        update.finish()
        end = engine.mark()
        engine.span(Kind.ITERATION, ITERATION, begin, end.at_s, {})
        run.begins_s.append(begin.at_s)
        run.ends_s.append(end.at_s)
        run.passes_s.append(engine.pass_s.copy())
        run.tokens.append(passes.tokens)
        run.layers.append(passes.layers)
        run.rows.append(recorder.rows)
        recorder.rows = []
        update.between()
        # Without reading anything the host is ahead by one iteration at most: queues are full.
        engine.host = np.maximum(engine.host, begin.at_s)
    return run


def own_chips(job: Job) -> Floats:
    """Return by how much longer the chips of a job take."""
    return chip_slowness(np.random.default_rng([job.seed, 2]), job.num_ranks, job.chip_spread_ratio)
