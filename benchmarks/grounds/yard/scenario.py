"""Say what is true of one job, and let it run: with all that was planted, without, or varied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import NUM_WARMING_UP, Planted, Variation
from benchmarks.grounds.yard.engine import Exchange
from benchmarks.grounds.yard.hardware import Chips
from benchmarks.grounds.yard.jobs import Job, Load, load_of
from benchmarks.grounds.yard.launching import Span
from benchmarks.grounds.yard.network import Network
from benchmarks.grounds.yard.trainer import Rank
from benchmarks.grounds.yard.trouble import Trouble, conditions

_CHECKPOINT_S = 1.8
_EVALUATION_S = 2.5
_STEADY = 0.9  # of a chip's power is capped within a pass, however long it waits between passes


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """State a job with everything that makes it unlike an even one.

    `even_job` is the job with a balanced pipeline, where an uneven one was planted. The first
    causes of `planted` are those of `troubles`, in their order.
    """

    job: Job
    seed: int
    troubles: tuple[Trouble, ...] = ()
    long_replica: int = -1
    hot_expert: int = -1
    even_job: Job | None = None
    planted: tuple[Planted, ...] = ()

    def without(self, cause: Planted) -> Scenario:
        """Return the same job without one cause that was planted."""
        if cause.kind == "long_sequences":
            return replace(self, long_replica=-1)
        if cause.kind == "hot_expert":
            return replace(self, hot_expert=-1)
        if cause.kind == "heavy_stage" and self.even_job:
            return replace(self, job=self.even_job)
        place = self.planted.index(cause)
        return replace(self, troubles=self.troubles[:place] + self.troubles[place + 1 :])

    def sound(self, chip_spread_ratio: float | None = None) -> Scenario:
        """Return the job without anything that was planted, its chips spread otherwise if asked."""
        job = self.even_job or self.job
        if chip_spread_ratio is not None:
            job = replace(job, site=replace(job.site, chip_spread_ratio=chip_spread_ratio))
        return Scenario(job=job, seed=self.seed)

    def varied(self, variation: Variation) -> Scenario:
        """Return the sound job with other chips, and one slow GPU among them."""
        scenario = self.sound(variation.chip_spread_ratio)
        if variation.slow_rank < 0:
            return scenario
        slow = Trouble(kind="gpu_clock", ranks=(variation.slow_rank,), factor=variation.factor)
        return replace(scenario, troubles=(slow,))

    def load(self) -> Load:
        """Return what its passes get to do."""
        return load_of(self.job, self.seed, self.long_replica, self.hot_expert)


@dataclass(frozen=True)
class Reading:
    """State what NVML says of a device when a window ends."""

    clock_mhz: float
    reasons: float
    power_w: float
    temperature_c: float


@dataclass(kw_only=True)
class Run:
    """What happened in the traced iterations; times in seconds of the true clock."""

    scenario: Scenario
    load: Load
    iteration_s: NDArray[np.float64]  # (iteration,)
    work_s: NDArray[np.float64]  # (rank, iteration): of passes, without waiting and communication
    bounds: list[tuple[float, float]]  # of each iteration: the first start, the last end
    spans: list[list[list[Span]]]  # of each rank and iteration
    readings: list[list[Reading]]  # of each iteration and rank


class _Simulation:
    """A run under way."""

    def __init__(self, scenario: Scenario, *, recording: bool) -> None:
        self.scenario, self.job = scenario, scenario.job
        self.recording = recording
        self.load = scenario.load()
        self.chips = Chips.drawn(self.job.site, self.job.num_ranks, scenario.seed)
        if self.job.first_iteration > 1:
            self.chips.warm_up()
        self.ranks = [
            Rank(self.job, self.load, rank, scenario.seed, recording=recording)
            for rank in range(self.job.num_ranks)
        ]
        self.busy = np.full(self.job.num_ranks, 0.9)
        self.rng = np.random.default_rng([scenario.seed, 6])

    def iterate(self, place: int, number: int) -> tuple[float, float]:
        """Run one iteration; return its first start and its last end."""
        ratio = self.chips.settle(_STEADY + (1 - _STEADY) * self.busy)
        felt = conditions(self.job, self.scenario.troubles, number, self.scenario.seed)
        cold = 1.0 + 0.6 * 0.25 ** (number - 1) if number <= NUM_WARMING_UP else 1.0
        unlike = self.rng.uniform(0.6, 1.4, size=len(felt))
        for rank, condition in enumerate(felt):
            condition.clock /= ratio[rank]
            condition.work *= 1 + 0.6 * (cold - 1) * unlike[rank]
            condition.launch *= cold**4
        network = Network(
            site=self.job.site,
            nvlink=[each.nvlink for each in felt],
            nic=[each.nic for each in felt],
            congestion=float(np.exp(self.job.site.congestion_ratio * abs(self.rng.normal())))
            * cold,
        )
        begin = min(rank.dev for rank in self.ranks)
        meet = Exchange(network)
        meet.run([rank.iteration(place, number, felt[rank.rank], meet) for rank in self.ranks])
        end = max(rank.dev for rank in self.ranks)
        self.busy = np.array([min(rank.busy_s / (end - begin), 1.0) for rank in self.ranks])
        self.chips.heat(end - begin, self.busy)
        self.felt = felt
        return begin, end

    def readings(self) -> list[Reading]:
        """Return what NVML says of each device now."""
        chip = self.job.site.gpu
        found = []
        for rank, condition in enumerate(self.felt):
            clock = chip.typical * chip.clock_mhz / condition.clock
            capped = 4.0 if self.busy[rank] > 0.7 and clock < 0.985 * chip.clock_mhz else 0.0
            found.append(
                Reading(
                    min(round(clock / 15) * 15.0, chip.clock_mhz),
                    condition.reasons or capped,
                    round(float(self.chips.power_w[rank] * self.busy[rank]), 3),
                    round(float(self.chips.temperature_c[rank]))
                    + (24.0 if condition.reasons == 32.0 else 0.0),
                )
            )
        return found

    def pass_between(self, number: int, following: int, seconds: float) -> None:
        """Let pass what lies between two traced iterations: logging, others, checkpoints."""
        rests = self.rng.uniform(1e-3, 3e-3, size=len(self.ranks))
        skipped = (following - number - 1) * seconds * float(self.rng.uniform(0.995, 1.01))
        pause = 0.0
        for every, lasts_s in (
            (self.job.checkpoint_every, _CHECKPOINT_S), (self.job.evaluate_every, _EVALUATION_S),
        ):  # fmt: skip
            if every and (number - 1) // every < (following - 1) // every:
                pause += lasts_s * float(self.rng.uniform(0.8, 1.4))
        for rank, rest in zip(self.ranks, rests, strict=True):
            if pause:
                self._save(rank, number, following, seconds, pause)
            rank.host = rank.dev = max(rank.host, rank.dev) + rest + skipped + pause
            rank.loader.skip(skipped)
        if skipped + pause:
            self.chips.heat(skipped + pause, self.busy)

    def _save(
        self, rank: Rank, number: int, following: int, iteration_s: float, seconds: float
    ) -> None:
        """Record that a checkpoint was written, in the window that comes next."""
        every = self.job.checkpoint_every
        if not (self.recording and every and self.job.granularity == "full"):
            return
        saved = (following - 1) // every * every
        start = rank.dev + iteration_s * (saved - number)
        arguments: dict[str, int | str] = {"iteration": saved}
        rank.spans.append(
            ("checkpoint", "save-checkpoint", 3, start, start + 0.9 * seconds, arguments)
        )


def simulate(scenario: Scenario, *, recording: bool = False) -> Run:
    """Run the traced iterations of a job."""
    simulation = _Simulation(scenario, recording=recording)
    job, numbers = scenario.job, scenario.job.iterations
    seconds, work = np.zeros(len(numbers)), np.zeros((job.num_ranks, len(numbers)))
    bounds, readings = [], []
    spans: list[list[list[Span]]] = [[] for _ in range(job.num_ranks)]
    for place, number in enumerate(numbers):
        if place:
            simulation.pass_between(numbers[place - 1], number, float(seconds[place - 1]))
        begin, end = simulation.iterate(place, number)
        bounds.append((begin, end))
        seconds[place] = end - begin
        work[:, place] = [rank.work_s for rank in simulation.ranks]
        readings.append(simulation.readings())
        for rank in simulation.ranks:
            spans[rank.rank].append(rank.spans)
            rank.spans = []
    return Run(
        scenario=scenario, load=simulation.load, iteration_s=seconds, work_s=work,
        bounds=bounds, spans=spans, readings=readings,
    )  # fmt: skip


def priced(scenario: Scenario, run: Run) -> Iterator[Planted]:
    """Yield what was planted with its cost: the run against one without it."""
    for cause in scenario.planted:
        without = simulate(scenario.without(cause))
        yield cause.priced(scenario.job.iterations, run.iteration_s, without.iteration_s)


def pass_slowness(scenario: Scenario) -> NDArray[np.float64]:
    """Return how much longer each rank's passes take than on even chips, with nothing planted.

    What was planted into the job itself, a long replica or an uneven pipeline, counts, too.
    """
    with_it, without = simulate(scenario), simulate(scenario.sound(chip_spread_ratio=0.0))
    return np.asarray(with_it.work_s / without.work_s, np.float64)
