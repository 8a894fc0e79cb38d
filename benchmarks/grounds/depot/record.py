"""Keep what came of a run: iterations, kernels, marks, pauses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.luck import Luck
from benchmarks.grounds.depot.operations import Program

Figures = NDArray[np.float64]


@dataclass(frozen=True)
class Pause:
    """A pause of the collector, or a checkpoint that is saved, by the true clock."""

    rank: int
    name: str
    begin_s: float
    end_s: float
    iteration: int


@dataclass
class Recorded:
    """What one stage did in one iteration: when its marks were reached and launched, and bytes."""

    program: Program
    iteration: int
    luck: Luck
    reached_s: Figures  # (mark, rank of the stage)
    launched_s: Figures


@dataclass
class Run:
    """What came of a job."""

    iterations: list[int] = field(default_factory=list)
    begins_s: list[Figures] = field(default_factory=list)  # of each iteration, by rank
    ends_s: list[Figures] = field(default_factory=list)
    own_s: list[Figures] = field(default_factory=list)  # kernels of passes
    recorded: list[Recorded] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)

    @property
    def iteration_s(self) -> Figures:
        """Return how long each iteration took, from its first rank's begin to its last's end."""
        pairs = zip(self.begins_s, self.ends_s, strict=True)
        return np.array([end.max() - begin.min() for begin, end in pairs])

    @property
    def length_s(self) -> float:
        """Return how long the run took."""
        return float(self.ends_s[-1].max())
