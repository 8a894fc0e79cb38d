"""Jobs on the shop floor: threads, devices and messages of every rank, event by event.

See `programs` for what each rank does, `simulation` for who waits for whom, `network` for what is
shared between hosts, `draws` for the luck of sound jobs, `faults` and `catalogue` for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.foundry.catalogue import Scenario, catalogue, scenario_of
from benchmarks.grounds.foundry.draws import Draws
from benchmarks.grounds.foundry.faults import Fault, effects_of
from benchmarks.grounds.foundry.files import write_files
from benchmarks.grounds.foundry.jobs import Job
from benchmarks.grounds.foundry.programs import Talks, programs_of
from benchmarks.grounds.foundry.simulation import Effects, Run, Simulation
from benchmarks.grounds.ground import Case, Planted, Variation

__all__ = ["Factory", "cases", "slowness", "write", "write_varied"]


def cases(draw: int = 0) -> Iterable[Case]:
    """Yield all cases of a draw, the same ones in every process."""
    yield from (case for case, _ in catalogue(draw).values())


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with its cost."""
    scenario = scenario_of(case)
    factory = Factory(scenario.job, case.seed)
    run = factory.run(scenario.faults, recording=True)
    write_files(factory.draws, run, factory.effects(scenario.faults), directory)
    return tuple(_prices(scenario, factory, run, case.seed))


def _prices(scenario: Scenario, factory: Factory, run: Run, seed: int) -> Iterable[Planted]:
    """Yield each truth with its cost: the job against the same one without it alone."""
    job = scenario.job
    for fault in scenario.faults:
        others = tuple(each for each in scenario.faults if each is not fault)
        without = factory.run(others)
        share = _share_of(fault, run)
        yield fault.planted(share).priced(
            job.iterations, factory.traced_s(run), factory.traced_s(without)
        )
    if scenario.own and scenario.without_own:
        without = Factory(scenario.without_own, seed).run()
        yield scenario.own.priced(job.iterations, factory.traced_s(run), factory.traced_s(without))


def _share_of(fault: Fault, run: Run) -> float | None:
    """Return which part of the time a fault's bursts cover in the end, None without bursts."""
    bursts = run.bursts.get(fault.ranks[0], ())
    if fault.kind not in ("throttling", "ecc", "shared_gpu") or not bursts:
        return None
    end_s = float(run.ends_s[-1])
    covered = sum(max(0.0, min(end, end_s) - begin) for begin, end, _ in bursts if begin < end_s)
    return round(float(covered) / end_s, 4)


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer each rank's passes take than on chips that are all alike and
    sound, (rank, iteration), of the traced iterations: kernels alone.
    """
    scenario = scenario_of(case)
    factory = Factory(scenario.job, case.seed)
    own = factory.own_s(factory.run(scenario.faults))
    alike = np.full(case.num_ranks, scenario.job.machines.slow_alike_ratio)
    return np.asarray(own / factory.own_s(factory.run(chips=alike)))


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate a case's job with nothing planted but this variation, and write it where asked to.

    A look-alike keeps what makes it one. Return the time of each rank's passes, (rank, iteration).
    """
    job = scenario_of(case).job
    if variation.chip_spread_ratio is not None:
        machines = replace(job.machines, chip_spread_ratio=variation.chip_spread_ratio)
        job = replace(job, machines=machines)
    factory = Factory(job, case.seed)
    slow: tuple[Fault, ...] = ()
    if variation.slow_rank >= 0:
        slow = (Fault(kind="gpu_clock", ranks=(variation.slow_rank,), factor=variation.factor),)
    run = factory.run(slow, recording=directory is not None)
    if directory is not None:
        write_files(factory.draws, run, factory.effects(slow), directory)
    return factory.own_s(run)


class Factory:
    """One job with its luck, run as often as one likes with one thing or another at fault."""

    def __init__(self, job: Job, seed: int) -> None:
        programs, self.talks = programs_of(job)
        self.job, self.draws = job, Draws(job, programs, seed)
        self._sound: Run | None = None

    def effects(self, faults: tuple[Fault, ...]) -> Effects:
        """Return what faults do to this job."""
        if not faults:
            return Effects.none(self.job)
        if self._sound is None:
            self._sound = self.run()
        return effects_of(self.draws, faults, self._sound)

    def run(
        self,
        faults: tuple[Fault, ...] = (),
        *,
        recording: bool = False,
        chips: NDArray[np.float64] | None = None,
    ) -> Run:
        """Run the job."""
        if not faults and not recording and chips is None and self._sound is not None:
            return self._sound
        effects = self.effects(faults)
        chips = self.draws.chips if chips is None else chips
        talks: Talks = self.talks
        return Simulation(self.draws, talks, effects, chips, recording=recording).result()

    @property
    def _traced(self) -> list[int]:
        return [each - self.job.first_iteration for each in self.job.iterations]

    def traced_s(self, run: Run) -> NDArray[np.float64]:
        """Return the time of the traced iterations."""
        return np.asarray(run.iteration_s[self._traced])

    def own_s(self, run: Run) -> NDArray[np.float64]:
        """Return the time of each rank's passes in them, (rank, iteration)."""
        return np.asarray(run.own_s[:, self._traced])
