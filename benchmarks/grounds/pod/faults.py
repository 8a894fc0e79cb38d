"""Declare what can be planted: which law of the machine it bends, for whom, by how much, when.

A law is a factor of 1 that a fault raises. Bursts follow the clock on the wall, not iterations:

    period_s 0.8, share 0.2     on for about 0.16 s of each 0.8 s, the period wandering a little
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.pod.job import Floats


class Law(StrEnum):
    """What a fault bends."""

    CLOCK = "clock"  # products of matrices
    HEAT = "heat"  # how far a chip warms up
    MEMORY = "memory"  # traffic of a GPU's memory
    NVLINK = "nvlink"  # transfers within a domain
    NIC = "nic"  # transfers between domains
    LAUNCH = "launch"  # the host's time for launching
    STALL = "stall"  # the host is not scheduled for a while
    LOADER = "loader"  # each `next` of the data iterator
    COLLECTOR = "collector"  # pauses of Python's collector
    LENGTH = "length"  # documents of a replica
    EXPERT = "expert"  # tokens for the experts of a rank
    HEAD = "head"  # output layer and loss
    FURTHER = "further"  # the MTP layer, which is next to nothing unless this law is bent


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Plant one cause; `factor` is by how much the law is bent while the cause holds.

    STALL and COLLECTOR have no factor but pauses: of about `pause_ms`, in a `pause_share` of the
    passes.
    """

    kind: str
    cause: str
    owner: str
    law: Law
    ranks: tuple[int, ...]
    factor: float = 1.5
    host: str = ""
    first: int = 1
    last: int = 0
    share: float = 1.0
    period_s: float = 0.0
    phase: float = 0.0
    pause_ms: float = 0.0
    pause_share: float = 0.0
    told: float = 0.0  # the factor that is told, where that of the law means nothing
    also: tuple[tuple[Law, float], ...] = ()  # other laws that the same cause bends

    @property
    def in_bursts(self) -> bool:
        """Tell whether the fault comes and goes by the clock on the wall."""
        return self.period_s > 0

    def laws(self) -> tuple[tuple[Law, float], ...]:
        """Return all laws that it bends, with their factors."""
        return ((self.law, self.factor), *self.also)

    def holds(self, iteration: int) -> bool:
        """Tell whether the fault is there in an iteration."""
        return self.first <= iteration and (not self.last or iteration <= self.last)

    def is_on(self, time_s: Floats) -> Floats:
        """Return 1 where a burst is under way, else 0."""
        turn = time_s / self.period_s + self.phase
        wobble = 0.22 * np.sin(1.7 * turn + 9 * self.phase) + 0.13 * np.sin(0.61 * turn)
        return np.asarray(((turn + wobble) % 1.0) < self.share, dtype=np.float64)

    def planted(self) -> Planted:
        """Return it as the truth that a ground tells."""
        return Planted(
            kind=self.kind,
            cause=self.cause,
            owner=self.owner,
            ranks=self.ranks,
            host=self.host,
            factor=self.told or self.factor,
            first_iteration=self.first,
            last_iteration=self.last,
            share_of_time=self.share if self.in_bursts else 1.0,
        )
