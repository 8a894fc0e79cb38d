"""Say what goes wrong: what a fault does to rates, when, and who may be named for it.

A fault never lengthens a span by itself: it lowers a rate (of clocks, memory, launching, loading,
links) or stops something for a while, and everything else follows in `engine`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.mill.job import Job

Floats = NDArray[np.float64]
RATES = ("clock", "memory", "host", "loader", "nic", "nvlink")
STANDSTILL = 1e-4  # rate of what stands still
_CLOCK_IN_MEMORY = 0.15
"""Caches run with the processors: so much of a lower clock is felt by what moves bytes."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """State a fault. `kinds_of_rate` are slowed by `factor`; by bursts where `share` is below 1."""

    kind: str
    cause: str
    ranks: tuple[int, ...]
    factor: float
    rates: tuple[str, ...]
    owner: str = "node"
    host: int = -1  # where a whole host is at fault
    share: float = 1.0
    burst_s: float = 0.0
    is_periodic: bool = False
    stops: bool = False  # bursts stop it instead of slowing it
    first: int = 1
    last: int = 0
    pause_s: float = 0.0  # collections of garbage
    pause_every: float = 0.0
    seed: int = 0

    def holds(self, iteration: int) -> bool:
        """Return whether it holds in an iteration."""
        return iteration >= self.first and (not self.last or iteration <= self.last)

    def planted(self, host: str) -> Planted:
        """Return what is told of it, without costs."""
        return Planted(
            kind=self.kind,
            cause=self.cause,
            owner=self.owner,
            ranks=self.ranks,
            host=host if self.host >= 0 else "",
            factor=self.factor,
            first_iteration=self.first,
            last_iteration=self.last,
            share_of_time=self.share,
        )


class Timeline:
    """Give the rate of one unit over time: bursts of a lower rate, drawn as far as asked for."""

    def __init__(self, rng: Generator, fault: Fault) -> None:
        self._rng, self._fault = rng, fault
        self._slow = STANDSTILL if fault.stops else 1 / fault.factor
        self._bounds, self._rates = [-1.0, 0.0], [1.0]
        self._is_burst = bool(rng.random() < fault.share)

    def _extend(self, time_s: float) -> None:
        fault = self._fault
        while self._bounds[-1] <= time_s:
            mean = fault.burst_s if self._is_burst else fault.burst_s / fault.share - fault.burst_s
            length = mean if fault.is_periodic else self._rng.gamma(2, mean / 2)
            self._rates.append(self._slow if self._is_burst else 1.0)
            self._bounds.append(self._bounds[-1] + max(length, 1e-6))
            self._is_burst = not self._is_burst

    def rate_at(self, time_s: float) -> float:
        """Return the rate at a moment."""
        self._extend(time_s)
        return self._rates[bisect_right(self._bounds, time_s) - 1]

    def end_of(self, start_s: float, work_s: float) -> float:
        """Return when work that takes so long at full rate is done."""
        self._extend(start_s)
        place = bisect_right(self._bounds, start_s) - 1
        while True:
            if place + 1 >= len(self._bounds):
                self._extend(self._bounds[-1])
            room = (self._bounds[place + 1] - start_s) * self._rates[place]
            if work_s <= room:
                return start_s + work_s / self._rates[place]
            work_s -= room
            start_s = self._bounds[place + 1]
            place += 1


@dataclass(frozen=True, kw_only=True)
class World:
    """State under what one and the same job is simulated."""

    faults: tuple[Fault, ...] = ()
    chip_spread: float | None = None  # None: the job's
    slow_rank: int = -1
    factor: float = 1.0

    def rates(self, job: Job, iteration: int) -> dict[str, Floats]:
        """Return how many times longer each thing takes on each rank: rate → (rank,)."""
        found = {name: np.ones(job.num_ranks) for name in RATES}
        if self.slow_rank >= 0:
            found["clock"][self.slow_rank] *= self.factor
        for fault in self.faults:
            if fault.holds(iteration) and fault.share == 1.0:
                for name in fault.rates:
                    found[name][list(fault.ranks)] *= fault.factor
        found["memory"] *= found["clock"] ** _CLOCK_IN_MEMORY
        return found


@dataclass(kw_only=True)
class Bursts:
    """Hold the timelines of all worlds: what they concern → [(world, rank, timeline, fault)]."""

    by_rate: dict[str, list[tuple[int, int, Timeline, Fault]]] = field(default_factory=dict)

    @classmethod
    def of(cls, worlds: Sequence[World]) -> Bursts:
        """Draw them: the same ones of a fault in each world that has it."""
        bursts = cls()
        for number, world in enumerate(worlds):
            for fault in world.faults:
                if fault.share < 1.0 and not fault.pause_every:
                    shared = fault.host >= 0 or "nic" in fault.rates
                    one = Timeline(np.random.default_rng(fault.seed), fault)
                    for rank in fault.ranks:
                        own = np.random.default_rng((fault.seed, rank))
                        line = one if shared else Timeline(own, fault)
                        for name in fault.rates:
                            bursts.by_rate.setdefault(name, []).append((number, rank, line, fault))
        return bursts
