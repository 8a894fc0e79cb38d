"""Run a whole job: its traced iterations one after the other, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.rack.conditions import Conditions, sound, stacked
from benchmarks.grounds.rack.data import Loader
from benchmarks.grounds.rack.engine import Lane, Mark, Row
from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.job import Job, num_parameters
from benchmarks.grounds.rack.network import Network
from benchmarks.grounds.rack.noise import tails
from benchmarks.grounds.rack.parts import Planner, iteration_s
from benchmarks.grounds.rack.passes import Stage, plans_of
from benchmarks.grounds.rack.pipeline import Pipeline
from benchmarks.grounds.rack.places import Map
from benchmarks.grounds.rack.trouble import Trouble, afflict
from benchmarks.grounds.rack.update import Update
from megascan.schema import Granularity, Kind, Track
from megascan.vocabulary import ITERATION, SAVE_CHECKPOINT

_BEGIN_S = 5.0
"""When the first traced iteration begins, in the time of the simulation."""
_BETWEEN_S = 4e-4
"""What a trainer does between iterations: counters, timers, a line of its log."""


@dataclass(frozen=True, eq=False)
class Iteration:
    """What happened in one traced iteration; times of the first variant, by place."""

    number: int
    rows: list[Row]
    between: list[Row]  # host's work behind it
    begin_s: Floats
    end_s: Floats
    skipped_s: float  # what each of the iterations before it took that nobody traced


@dataclass(frozen=True, eq=False)
class Run:
    """A simulated job."""

    job: Job
    where: Map
    iterations: list[Iteration]
    times_s: Floats  # (variant, iteration)
    busy_s: Floats  # (variant, rank, iteration): kernels of the passes
    conditions: Conditions
    recorded: list[frozenset[int] | None]


def variants_of(job: Job, where: Map, troubles: tuple[Trouble, ...]) -> list[Conditions]:
    """Return the conditions with all troubles, and without each of them."""
    basis = sound(job, where)
    left_out = [-1, *range(len(troubles))]
    found = []
    for without in left_out:
        conditions = basis
        for number, trouble in enumerate(troubles):
            if number != without:
                conditions = afflict(job, where, conditions, trouble, number)
        found.append(conditions)
    return found


def simulate(job: Job, where: Map, variants: list[Conditions]) -> Run:
    """Run a job under several conditions at once; spans are those of the first."""
    return _Runner(job, where, stacked(variants)).run()


class _Runner:
    def __init__(self, job: Job, where: Map, conditions: Conditions) -> None:
        self.job, self.where, self.conditions = job, where, conditions
        self.network = Network(job, where, conditions)
        shape = (conditions.clock.shape[0], job.ranks_a_stage)
        self.stages = [self._stage(number, shape) for number in range(job.num_stages)]
        bytes_sent = Planner(job).message_bytes
        self.pipeline = Pipeline(self.stages, self.network, where, bytes_sent)
        self.update = Update(self.stages, self.network, where)
        self.draws = np.random.default_rng([job.seed, 6])
        self.took_s = np.zeros(shape[0])
        self.skipped_s = 0.0

    def _stage(self, number: int, shape: tuple[int, int]) -> Stage:
        job, part = self.job, self.where.of_stage(number)
        places = np.arange(job.num_ranks)[part]
        lane = Lane(
            stage=number,
            places=places,
            network=self.network,
            host=np.full(shape, _BEGIN_S) + 1e-4 * places,
            dev=np.full(shape, _BEGIN_S),
            groups=self.where.within[number],
            is_full=job.tracing.granularity is Granularity.FULL,
        )
        has_data = number in (0, job.num_stages - 1)
        return Stage(
            job=job,
            number=number,
            lane=lane,
            conditions=self.conditions,
            where=self.where,
            plans=plans_of(job, number),
            loader=Loader(job, self.conditions, part, _BEGIN_S) if has_data else None,
            num_parameters=num_parameters(job, number),
        )

    def run(self) -> Run:
        """Run all traced iterations."""
        numbers, found = self.job.tracing.iterations, []
        busy, times, recorded = [], [], []
        if numbers[0] > 1:
            self._settle(np.full((len(self.took_s), 1), iteration_s(self.job)), 0)
        for at, number in enumerate(numbers):
            if at and number != numbers[at - 1] + 1:
                self._skip(number - numbers[at - 1] - 1, at)
            recorded.append(self._recorded(at))
            found.append(self._iteration(at, number, recorded[-1]))
            times.append(self.took_s)
            busy.append(np.concatenate([stage.lane.busy for stage in self.stages], axis=1))
        by_rank = np.argsort(self.where.ranks)
        return Run(
            job=self.job,
            where=self.where,
            iterations=found,
            times_s=np.stack(times, axis=1),
            busy_s=np.stack(busy, axis=2)[:, by_rank],
            conditions=self.conditions,
            recorded=recorded,
        )

    def _recorded(self, at: int) -> frozenset[int] | None:
        """Return of which layers modules are recorded: of every n-th, in turns, at least two of
        each chunk; of all in the first iteration.
        """
        stride = self.job.tracing.layer_stride
        if stride == 1 or at == 0 or self.job.tracing.granularity is Granularity.BASE:
            return None
        chosen: set[int] = set()
        for stage in self.job.model.layers:
            for layers in stage:
                turns = max(1, min(stride, len(layers) // 2))
                chosen.update(layers[(at - 1) % turns :: turns])
        return frozenset(chosen)

    def _all(self, values: list[Floats]) -> Floats:
        return np.concatenate(values, axis=1)

    def _iteration(self, at: int, number: int, recorded: frozenset[int] | None) -> Iteration:
        self.network.begin(at)
        begins: list[Mark] = []
        began = self._all([np.maximum(one.lane.dev, one.lane.host) for one in self.stages])
        for stage in self.stages:
            stage.recorded = recorded
            stage.begin_iteration(at)
            stage.lane.busy = np.zeros_like(stage.lane.dev)
            begins.append(stage.lane.mark())
        self.pipeline.run()
        self.update.run()
        ended = self._all([np.maximum(one.lane.dev, one.lane.host) for one in self.stages])
        self.took_s = ended.max(axis=1) - began.max(axis=1)
        for stage, begin in zip(self.stages, begins, strict=True):
            row = stage.lane.row(
                Kind.ITERATION, ITERATION, Track.COMPUTE, (begin, stage.lane.mark()), {}
            )
            stage.lane.rows.append(row)
        rows = [row for stage in self.stages for row in stage.lane.rows]
        skipped, self.skipped_s = self.skipped_s, 0.0
        return Iteration(
            number=number,
            rows=rows,
            between=self._between(number),
            begin_s=np.concatenate([begin.at for begin in begins]),
            end_s=ended[0],
            skipped_s=skipped,
        )

    def _between(self, number: int) -> list[Row]:
        """Log, save and evaluate behind an iteration, as it is the turn of each."""
        habits, found = self.job.habits, []
        for stage in self.stages:
            if not number % habits.log_interval:
                stage.lane.sync()  # the losses are read
            slow = stage.now(self.conditions.launch_s) / habits.launch_s
            stage.lane.stall(_BETWEEN_S * slow)
        if habits.saves_every and not number % habits.saves_every:
            found = self._save()
        if habits.evaluates_every and not number % habits.evaluates_every:
            took = habits.evaluation_s * float(tails(self.draws, (1,), 0.05)[0])
            self._wait_for_all(took)
        return found

    def _save(self) -> list[Row]:
        """Save a checkpoint: each rank its part, to storage that all share; then all wait."""
        rows = []
        for stage in self.stages:
            lane = stage.lane
            lane.sync()
            begin = lane.host
            lane.stall(self.job.habits.save_s * tails(self.draws, (lane.places.size,), 0.25))
            if lane.is_full:
                times = begin, lane.host
                rows.append(lane.note_on_host(Kind.CHECKPOINT, SAVE_CHECKPOINT, times, {}))
                lane.rows.pop()
        self._wait_for_all(0.0)
        return rows

    def _wait_for_all(self, took_s: float) -> None:
        """Let everybody go on together, so much later."""
        latest = self._all([np.maximum(one.lane.dev, one.lane.host) for one in self.stages])
        at = latest.max(axis=1, keepdims=True) + took_s
        for stage in self.stages:
            own = 2e-5 * self.draws.random(stage.lane.places.size)
            stage.lane.host = np.broadcast_to(at, stage.lane.host.shape) + own
            stage.lane.sync()

    def _skip(self, num_iterations: int, at: int) -> None:
        """Let iterations pass that nobody traces: each as long as the last one, about."""
        each = self.took_s * float(tails(self.draws, (1,), 0.01)[0])
        self.skipped_s = float(each[0])
        took = (num_iterations * each)[:, None]
        for stage in self.stages:
            lane = stage.lane
            lane.sync()
            lane.host, lane.dev = lane.host + took, lane.dev + took
            lane.streams.clear()
            stage.gathering.clear()
        self._settle(each[:, None], at)

    def _settle(self, took_s: Floats, at: int) -> None:
        """Fill the loaders' queues as many iterations of that length leave them."""
        habits = self.job.habits
        for stage in self.stages:
            if stage.loader is not None:
                num_batches = 3 * habits.num_workers * habits.prefetch
                pace_s = took_s / habits.num_microbatches
                stage.loader.settle(num_batches, pace_s, stage.lane.host, at)
