"""Say what ails which ranks, and what each iteration is like for each of them.

Everything random about a trouble is drawn apart from all else, so that a job with it and the same
job without it are told by the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.yard.jobs import Job

_CAUSES = {
    "compute": ("gpu_clock", "throttling", "gpu_memory", "host_power", "ecc_pause"),
    "link": ("nvlink", "pcie", "nic", "host_nic", "rail"),
    "host": ("host_cpu", "neighbour", "pinning", "host_memory"),
    "loader": ("loader", "storage"),
    "gc": ("gc",),
}
_LOADER_AT_MOST = 1.5  # workers, many and mostly waiting for storage, feel a slow host less
_REASONS = {"gpu_clock": 2.0, "throttling": 32.0, "host_power": 128.0}  # as NVML says them
_WHOLE_HOST = ("host_power", "host_nic", "host_cpu", "neighbour", "host_memory", "storage")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """State one fault: `ranks` suffer from it, while it lasts and `on` of `period` iterations.

    `stall_s` is how long one pause takes, and `num_stalls` how many an iteration has on average.
    """

    kind: str
    ranks: tuple[int, ...]
    factor: float = 1.0
    first_iteration: int = 1
    last_iteration: int = 0
    period: int = 0
    on: int = 0
    stall_s: float = 0.0
    num_stalls: float = 0.0

    @property
    def cause(self) -> str:
        """Return the cause that a finding should name."""
        return next(cause for cause, kinds in _CAUSES.items() if self.kind in kinds)

    @property
    def owner(self) -> str:
        """Return whose matter it is: a collector's pauses are the program's own."""
        return "job" if self.kind == "gc" else "node"

    @property
    def is_of_host(self) -> bool:
        """Return whether the unit at fault is a whole host."""
        return self.kind in _WHOLE_HOST

    @property
    def share_of_time(self) -> float:
        """Return the share of iterations that it touches while it lasts."""
        if self.period:
            return self.on / self.period
        return min(self.num_stalls, 1.0) if self.num_stalls else 1.0

    def holds(self, iteration: int) -> bool:
        """Return whether it is there in an iteration."""
        if iteration < self.first_iteration:
            return False
        if self.last_iteration and iteration > self.last_iteration:
            return False
        return not self.period or (iteration - self.first_iteration) % self.period < self.on


@dataclass
class Condition:
    """State what one iteration is like for one rank: how many times slower each part is."""

    work: float = 1.0  # of everything a device computes
    clock: float = 1.0
    memory: float = 1.0
    launch: float = 1.0
    loader: float = 1.0
    nvlink: float = 1.0
    nic: float = 1.0
    reasons: float = 0.0
    pauses: dict[int, float] = field(default_factory=dict)  # of the device, by number of the pass
    stalls: dict[int, float] = field(default_factory=dict)  # of the launching thread
    collections: dict[int, float] = field(default_factory=dict)


def conditions(job: Job, troubles: Sequence[Trouble], iteration: int, seed: int) -> list[Condition]:
    """Return what an iteration is like, by rank."""
    found = [Condition() for _ in range(job.num_ranks)]
    for trouble in troubles:
        if not trouble.holds(iteration):
            continue
        for rank in trouble.ranks:
            _apply(trouble, found[rank])
            if trouble.num_stalls:
                _stall(job, trouble, found[rank], (seed, rank, iteration))
    return found


def _apply(trouble: Trouble, condition: Condition) -> None:
    """Slow what a trouble slows throughout an iteration."""
    kind, factor = trouble.kind, trouble.factor
    if kind in _REASONS:
        condition.clock *= factor
        condition.reasons = _REASONS[kind]
    elif kind == "gpu_memory":
        condition.memory *= factor
    elif kind == "nvlink":
        condition.nvlink *= factor
    elif kind in ("nic", "host_nic", "rail", "pcie"):
        condition.nic *= factor
    elif kind in ("host_cpu", "pinning", "neighbour"):
        condition.launch *= factor
        condition.loader *= 1.0 if kind == "pinning" else min(factor, _LOADER_AT_MOST)
    elif kind in ("loader", "storage"):
        condition.loader *= factor
    elif kind == "host_memory":
        condition.loader *= min(factor, _LOADER_AT_MOST)


def _stall(job: Job, trouble: Trouble, condition: Condition, place: tuple[int, ...]) -> None:
    """Draw the pauses of one rank's iteration, each at some pass."""
    rng = np.random.default_rng([*place, 3])
    num_passes = 2 * job.num_microbatches * job.vpp
    pauses = {"ecc_pause": condition.pauses, "gc": condition.collections}
    target = pauses.get(trouble.kind, condition.stalls)
    for _ in range(rng.poisson(trouble.num_stalls)):
        at = int(rng.integers(num_passes))
        target[at] = target.get(at, 0.0) + trouble.stall_s * float(rng.uniform(0.6, 1.4))
