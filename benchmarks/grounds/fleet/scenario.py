"""One case of this ground: a job, what was done to it, and the truth about that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.grounds.fleet.files import write_files
from benchmarks.grounds.fleet.hardware import Floats, Trouble
from benchmarks.grounds.fleet.jobs import Job
from benchmarks.grounds.fleet.trainer import Run
from benchmarks.grounds.ground import Case, Planted, Variation


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What was done to a job, as the truth says it and as the machines feel it."""

    planted: Planted
    troubles: tuple[Trouble, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A named job with its causes."""

    name: str
    family: str
    seed: int
    draw: int
    job: Job
    causes: tuple[Cause, ...] = ()

    def case(self) -> Case:
        """Return what is known of it before it is simulated."""
        return Case(
            ground="fleet", name=self.name, family=self.family, num_ranks=self.job.num_ranks,
            seed=self.seed, draw=self.draw, planted=tuple(cause.planted for cause in self.causes),
        )  # fmt: skip

    def run(self, *left_out: Cause, recorded: bool = False) -> Run:
        """Simulate the job without some of its causes."""
        troubles = tuple(
            trouble for cause in self.causes if cause not in left_out for trouble in cause.troubles
        )
        return Run(self.job, self.seed, troubles, recorded=recorded)

    def write(self, directory: Path) -> tuple[Planted, ...]:
        """Write its files; return the truth, each cause priced by a run without it."""
        run = self.run(recorded=True)
        write_files(run, self.seed, directory)
        with_it = run.iteration_times()
        return tuple(
            cause.planted.priced(
                self.job.iterations, with_it, self.run(cause).iteration_times()
            )
            for cause in self.causes
        )  # fmt: skip

    def varied(self, variation: Variation) -> Scenario:
        """Return the sound job of this case with other chips, and perhaps a slow one."""
        job: Job = self.job
        causes: tuple[Cause, ...] = ()
        if variation.chip_spread_ratio is not None:
            job = replace(job, chip_spread=variation.chip_spread_ratio)
        if variation.slow_rank >= 0:
            ranks = (variation.slow_rank,)
            trouble = Trouble(kind="gpu_clock", ranks=ranks, factor=variation.factor)
            planted = Planted(kind="gpu_clock", cause="compute", owner="node", ranks=ranks)
            causes = (Cause(planted=planted, troubles=(trouble,)),)
        return replace(self, job=job, causes=causes)

    def pass_times_ns(self, directory: Path | None = None) -> Floats:
        """Return the time of each rank's kernels, (rank, iteration); write files if asked to."""
        run = self.run(recorded=directory is not None)
        if directory is not None:
            write_files(run, self.seed, directory)
        return run.pass_times()


def indistinguishable_by_link(job: Job, ranks: tuple[int, ...], *, remote: bool) -> tuple[int, ...]:
    """Return the ranks that take part in every slow communication, beside those whose link it is.

    Both ends of the only link there is are slow alike, and nothing tells them apart.
    """
    hit = set(ranks)
    slow = [
        set(group)
        for group in _communicating(job)
        if hit & set(group) and job.is_remote(group) == remote
    ]
    if not slow:
        return ranks
    shared = set.intersection(*slow)
    return tuple(sorted(hit | shared))


def indistinguishable_hosts(job: Job, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return all ranks of the hosts that take part in every slow communication between hosts."""
    hit = set(ranks)
    slow = [
        {job.host_of(rank) for rank in group}
        for group in _communicating(job)
        if hit & set(group) and job.is_remote(group)
    ]
    hosts = {job.host_of(rank) for rank in ranks}
    hosts |= set.intersection(*slow) if slow else set()
    return tuple(rank for rank in range(job.num_ranks) if job.host_of(rank) in hosts)


def _communicating(job: Job) -> set[tuple[int, ...]]:
    """Return the groups over which a job moves bytes, pairs of neighbouring stages included."""
    axes = ["tp", "cp", "dp_cp"] + (["ep", "expt_dp"] if job.ep > 1 else [])
    groups = {job.members(rank, axis) for rank in range(job.num_ranks) for axis in axes}
    for rank in range(job.num_ranks):
        stages = job.members(rank, "pp")
        groups |= set(pairwise(stages))
        if job.vpp > 1 and len(stages) > 1:
            groups.add((stages[0], stages[-1]))
    return {group for group in groups if len(group) > 1}
