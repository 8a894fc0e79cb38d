"""The ground "quarry": every job is drawn anew from continuous distributions, no two are alike.

Layout, model, data, machines, noise, what is traced and what goes wrong are drawn, not listed
(`machines`, `jobs`, `catalogue`, `choices`). Costs are roofline (`costs`), schedules those of
Megatron-Core, DDP and FSDP (`programs`), transfers take bytes over the least bandwidth of their way
(`network`), and all waiting follows from a simulation of threads, devices, streams and collectives
(`devices`, `engine`). A fault changes a rate or stops something for a while (`faults`,
`conditions`), never a time; what it costs is told by a second simulation of the same draws without
it. About 45 of 100 jobs have no fault at any node; half of these have what looks like one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.quarry.catalogue import Scenario, cases, scenario_of
from benchmarks.grounds.quarry.conditions import Drawer
from benchmarks.grounds.quarry.costs import Costs
from benchmarks.grounds.quarry.devices import Run
from benchmarks.grounds.quarry.engine import Engine
from benchmarks.grounds.quarry.faults import Fault
from benchmarks.grounds.quarry.files import Writer, host_name
from benchmarks.grounds.quarry.groups import Groups
from benchmarks.grounds.quarry.programs import LAUNCHED, WORK, Program

__all__ = ["Quarry", "cases", "slowness", "write", "write_varied"]


class Quarry:
    """One case's job, to be simulated with and without its faults."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.job = scenario, scenario.job
        self.groups = Groups(self.job)
        costs = Costs(self.job)
        ranks = range(self.job.num_ranks)
        self.programs = [Program(self.job, costs, self.groups, rank) for rank in ranks]
        self.drawer = Drawer(
            self.job,
            scenario.around,
            scenario.seed,
            [_places(program, LAUNCHED) for program in self.programs],
            [_places(program, {WORK}) for program in self.programs],
        )

    def run(
        self,
        faults: Sequence[Fault] = (),
        variation: Variation | None = None,
        folder: Path | None = None,
    ) -> Run:
        """Simulate the job with these faults; write its files where a folder is given."""
        conditions = self.drawer.conditions(faults, variation or Variation())
        engine = Engine(
            self.drawer, self.programs, self.groups, conditions, recording=folder is not None
        )
        run = engine.run()
        if folder is not None:
            Writer(self.drawer, self.groups, conditions, run).write(folder)
        return run


def _places(program: Program, codes: set[int]) -> list[int]:
    """Return behind which operations of these codes an iteration's counter stands."""
    return [at for at, each in enumerate(program.operations, start=1) if each[0] in codes]


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with what it costs."""
    scenario = scenario_of(case)
    quarry = Quarry(scenario)
    with_all = quarry.run(scenario.faults, folder=directory)
    priced = []
    for fault in scenario.faults:
        others = [each for each in scenario.faults if each is not fault]
        without = quarry.run(others)
        host = host_name(scenario.seed, scenario.job.machines.host_of(fault.ranks[0]))
        planted = fault.planted(host)
        priced.append(
            planted.priced(scenario.job.iterations, with_all.iteration_s, without.iteration_s)
        )
    return tuple(priced)


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer passes take than on even chips without faults, (rank, turn)."""
    scenario = scenario_of(case)
    quarry = Quarry(scenario)
    even = quarry.run(variation=Variation(chip_spread_ratio=0.0))
    return quarry.run(scenario.faults).own_s / even.own_s


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate the job without its faults, but with this variation; return the times of passes."""
    return Quarry(scenario_of(case)).run((), variation, directory).own_s
