"""Jobs from a depot of many machines: whole stages at a time, every wait in the simulation.

`costs` says what modules take, `schedule` and `programs` what each stage does in which order,
`engine` who waits for whom, `luck` what sound jobs differ by, `faults` what goes wrong, `places`
over which ways bytes go, `clocks`, `counters` and `files` what a tracer makes of it, and
`catalogue` which jobs there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.catalogue import catalogue, scenario_of
from benchmarks.grounds.depot.engine import Engine
from benchmarks.grounds.depot.faults import Fault, Trouble
from benchmarks.grounds.depot.files import Story, write_files
from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.depot.luck import Fortune
from benchmarks.grounds.depot.programs import program_of
from benchmarks.grounds.depot.record import Run
from benchmarks.grounds.depot.scenarios import Scenario
from benchmarks.grounds.ground import Case, Planted, Variation

__all__ = ["Workshop", "cases", "slowness", "write", "write_varied"]


def cases(draw: int = 0) -> Iterable[Case]:
    """Yield all cases of a draw, the same ones in every process."""
    yield from (case for case, _ in catalogue(draw).values())


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with its cost."""
    scenario = scenario_of(case)
    workshop = Workshop(scenario.job, case.seed)
    run = workshop.run(scenario.faults, recording=True)
    workshop.write(scenario.faults, run, directory)
    return tuple(_truths(scenario, workshop, run, case.seed))


def _truths(scenario: Scenario, workshop: Workshop, run: Run, seed: int) -> Iterator[Planted]:
    """Yield each truth with its cost: the job against the same one without it alone."""
    job = scenario.job
    for number, fault in enumerate(scenario.faults):
        others = tuple(each for each in scenario.faults if each is not fault)
        without = workshop.run(others)
        share = workshop.share_of(scenario.faults, number, run)
        truth = fault.planted(job, share)
        yield truth.priced(job.traced, workshop.traced_s(run), workshop.traced_s(without))
    if scenario.own is not None and scenario.without_own is not None:
        other = Workshop(scenario.without_own, seed)
        without = other.run(scenario.faults)
        yield scenario.own.priced(job.traced, workshop.traced_s(run), other.traced_s(without))


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer each rank's passes take than on chips that are all alike and
    sound, (rank, iteration), of the traced iterations: kernels alone.
    """
    scenario = scenario_of(case)
    workshop = Workshop(scenario.job, case.seed)
    alike = Workshop(scenario.job, case.seed, alike=True)
    own = workshop.own_s(workshop.run(scenario.faults))
    return np.asarray(own / alike.own_s(alike.run()))


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate a case's job with nothing planted but this variation, and write it where asked to.

    A look-alike keeps what makes it one. Return the time of each rank's passes, (rank, iteration).
    """
    job = scenario_of(case).job
    if variation.chip_spread_ratio is not None:
        job = replace(job, chip_spread_ratio=variation.chip_spread_ratio)
    workshop = Workshop(job, case.seed)
    slow: tuple[Fault, ...] = ()
    if variation.slow_rank >= 0:
        slow = (Fault(kind="gpu_clock", ranks=(variation.slow_rank,), factor=variation.factor),)
    run = workshop.run(slow, recording=directory is not None)
    if directory is not None:
        workshop.write(slow, run, directory)
    return workshop.own_s(run)


class Workshop:
    """One job with its luck, run as often as one likes with one thing or another at fault."""

    def __init__(self, job: Job, seed: int, *, alike: bool = False) -> None:
        self.job, self.seed = job, seed
        self.programs = tuple(program_of(job, stage) for stage in range(job.pp))
        self.fortune = Fortune(job, seed, alike=alike)
        self._sound: Run | None = None

    def trouble(self, faults: tuple[Fault, ...]) -> Trouble:
        """Return what faults do to this job; bursts are as long as its iterations make them."""
        if not faults:
            return Trouble(self.job, (), self.seed)
        if self._sound is None:
            self._sound = self.run()
        return Trouble(self.job, faults, self.seed, self._sound.length_s)

    def run(self, faults: tuple[Fault, ...] = (), *, recording: bool = False) -> Run:
        """Run the job."""
        if not faults and not recording and self._sound is not None:
            return self._sound
        engine = Engine(self.job, self.programs, self.fortune, self.trouble(faults))
        return engine.result(recording=recording)

    def write(self, faults: tuple[Fault, ...], run: Run, directory: Path) -> None:
        """Write the files of a run that was recorded."""
        story = Story(self.job, self.fortune, self.trouble(faults), run, self.seed)
        write_files(story, directory)

    def share_of(self, faults: tuple[Fault, ...], number: int, run: Run) -> float:
        """Return which share of the time that it holds a fault's bursts cover."""
        fault, trouble = faults[number], self.trouble(faults)
        held = [each for each in self.job.traced if fault.holds(each)]
        if fault.in_whole_iterations:
            return round(sum(trouble.hits(number, each) for each in held) / max(1, len(held)), 4)
        bursts = trouble.bursts_of(number)
        if not bursts or not held:
            return 1.0
        first = self.job.first_iteration
        begin = float(run.begins_s[held[0] - first].min())
        end = float(run.ends_s[held[-1] - first].max())
        covered = sum(max(0.0, min(end, b) - max(begin, a)) for a, b, _ in bursts)
        return round(covered / (end - begin), 4)

    def _traced(self) -> list[int]:
        return [each - self.job.first_iteration for each in self.job.traced]

    def traced_s(self, run: Run) -> NDArray[np.float64]:
        """Return the time of the traced iterations."""
        return np.asarray(run.iteration_s[self._traced()])

    def own_s(self, run: Run) -> NDArray[np.float64]:
        """Return the time of each rank's passes in them, (rank, iteration)."""
        return np.asarray(np.array(run.own_s).T[:, self._traced()])
