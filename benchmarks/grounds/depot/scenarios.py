"""Say what a scenario is: a job, its faults, and what the job itself does to its step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.grounds.depot.faults import Fault
from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.ground import Planted


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One job, and what is planted into it.

    `own` is what the job is slow by itself for, `without_own` the same job without that.
    """

    job: Job
    faults: tuple[Fault, ...] = ()
    own: Planted | None = None
    without_own: Job | None = None

    def with_fault(self, fault: Fault) -> Scenario:
        """Return it with one fault more."""
        return replace(self, faults=(*self.faults, fault))


def of_the_job(kind: str, cause: str, ranks: tuple[int, ...], factor: float) -> Planted:
    """Return what a job does to itself, without its cost."""
    return Planted(kind=kind, cause=cause, owner="job", ranks=ranks, factor=round(factor, 4))


def everyone(job: Job) -> tuple[int, ...]:
    """Return all ranks of a job."""
    return tuple(range(job.num_ranks))


def ranks_of_stage(job: Job, stage: int) -> tuple[int, ...]:
    """Return the ranks that hold one stage."""
    first = stage * job.ranks_of_stage
    return tuple(range(first, first + job.ranks_of_stage))
