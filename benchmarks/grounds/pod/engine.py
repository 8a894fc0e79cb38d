"""Run a job event by event: hosts launch, devices work in order, collectives wait for the last.

All ranks of a pipeline stage run the same program, so that one step is taken for all of them, and
for all variants of the job, at once. Times are arrays (variant, place) in seconds:

    host     when the launching thread has launched all so far
    device   when the compute stream will have done all so far
    streams  the same of each group's own stream

    a kernel       starts at max(device, host), ends not before its launch has ended
    a collective   starts on each member at max(device, host), ends when the last has come plus
                   what the transfer takes

Stages are generators that yield where they wait for another stage's message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.pod.faults import Fault
from benchmarks.grounds.pod.job import Floats, Job
from benchmarks.grounds.pod.load import Load
from benchmarks.grounds.pod.machine import Machine
from benchmarks.grounds.pod.ranks import World
from benchmarks.grounds.pod.recording import Recording
from benchmarks.grounds.pod.stage import Stage
from benchmarks.grounds.pod.wires import Mail
from benchmarks.grounds.pod.work import costs_of

EVALUATION_S = 6.0


@dataclass
class Outcome:
    """What a simulation found, for each variant; what the first one's ranks recorded."""

    iteration_s: Floats  # (variant, iteration)
    passes_s: Floats  # (variant, rank, iteration): kernels of passes, without waiting
    recording: Recording | None
    slow_ratio: Floats = field(default_factory=lambda: np.ones((0, 0)))  # (iteration, rank), of v 0
    temperature: Floats = field(default_factory=lambda: np.ones((0, 0)))


class Run:
    """Run the traced iterations of one job, and let time pass in between."""

    def __init__(
        self,
        job: Job,
        faults: Sequence[Fault],
        variants: Sequence[frozenset[int]],
        chips: Floats,
        *,
        keeps: bool,
    ) -> None:
        self._job = job
        self._machine = Machine(job, faults, variants, chips)
        self._load = Load(job)
        self._recording = Recording(job) if keeps else None
        self._mail = Mail(job, self._machine)
        world = World(job, self._machine, self._load, self._mail, costs_of(job), self._recording)
        self._stages = [Stage(world, number) for number in range(job.layout.pp)]
        self._rng = np.random.default_rng([job.seed, 29])

    def run(self) -> Outcome:
        """Run all traced iterations."""
        job, machine = self._job, self._machine
        times, passes, slow, warm = [], [], [], []
        for place, number in enumerate(job.tracing.iterations):
            machine.begin(number)
            self._load.begin(number)
            self._mail.begin()
            _interleave([stage.iteration(number) for stage in self._stages])
            lengths = np.concatenate([stage.length_s for stage in self._stages], axis=1)
            times.append(lengths.mean(axis=1))
            passes.append(self._by_rank([stage.passes_s for stage in self._stages]))
            slow.append(self._by_rank([stage.clock_ratio for stage in self._stages])[0])
            warm.append(machine.temperature[0].copy())
            self._pass_time(place, times[-1], passes[-1])
        return Outcome(
            iteration_s=np.stack(times, axis=1),
            passes_s=np.stack(passes, axis=2),
            recording=self._recording,
            slow_ratio=np.stack(slow),
            temperature=np.stack(warm),
        )

    def _by_rank(self, values: Sequence[Floats]) -> Floats:
        """Return values of stages, each (variant, place), as (variant, rank)."""
        found = np.empty((self._machine.num_variants, self._job.num_ranks))
        for stage, each in enumerate(values):
            found[:, self._job.ranks[stage]] = each
        return found

    def _pass_time(self, place: int, seconds: Floats, passes: Floats) -> None:
        """Let untraced iterations go by, evaluation and checkpoints among them, and chips warm."""
        job, numbers = self._job, self._job.tracing.iterations
        busy = passes / seconds[:, None]
        self._machine.heat(busy, float(seconds[0]))
        skipped = numbers[place + 1] - numbers[place] - 1 if place + 1 < len(numbers) else 0
        pause = skipped * seconds * (1 + 0.002 * self._rng.standard_normal())
        evaluates = job.trainer.evaluates_every
        if evaluates and any(
            number % evaluates == 0
            for number in range(numbers[place], numbers[place] + skipped + 1)
        ):
            pause = pause + EVALUATION_S
        if skipped:
            self._machine.heat(busy, float(pause[0]))
        for stage in self._stages:
            stage.rest(pause)


def _interleave(stages: Sequence[Iterator[None]]) -> None:
    """Run generators in turns until all have ended; raise RuntimeError if none can go on."""
    left = dict(enumerate(stages))
    num_idle = 0
    while left:
        ended = []
        for number, one in left.items():
            try:
                next(one)
            except StopIteration:
                ended.append(number)
        for number in ended:
            del left[number]
        num_idle = 0 if ended else num_idle + 1
        if num_idle > 1_000_000:
            raise RuntimeError("pipeline stages wait for each other")


def simulate(
    job: Job,
    faults: Sequence[Fault],
    variants: Sequence[frozenset[int]],
    chips: Floats,
    *,
    keeps: bool,
) -> Outcome:
    """Simulate variants of a job, each with some of the faults and its own chips."""
    return Run(job, faults, variants, chips, keeps=keeps).run()
