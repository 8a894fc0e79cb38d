"""Declare what a ground is: a family of traced jobs with a known truth.

A ground is written from the physics of training clusters and from the literature, by somebody who
has read neither `detect` nor `megascan.simulate`; it writes ordinary files (rank files as
docs/format.md describes them, the original MegaScan's, or PyTorch profiles) and never imports the
product beyond what a trainer would. Each ground is one module with `cases()` and `write(case,
directory)`; what it knows of its chips, for a judge of figures, it says by `slowness(case)` and
`write_varied(case, …)`.
A third of all cases, drawn by a hash of their names, is unseen: it is judged at the end, never
looked at while the detector is changed. Draw 0 are the cases whose figures are reported; every
other draw is the same catalogue with other seeds, none of it unseen, as often as one likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

UNSEEN_SHARE = 3  # one case in so many is unseen
NUM_WARMING_UP = 2  # a run's first iterations allocate and compile


@dataclass(frozen=True, kw_only=True)
class Planted:
    """State one cause that was planted into a job, and what it costs.

    `kind` is the physics in one word (`gpu_clock`, `throttling`, `nvlink`, `nic`, `rail`,
    `host_cpu`, `host_memory`, `loader`, `gc`, `heavy_stage`, `long_sequences`, `hot_expert`, ...).
    `ranks` are all ranks that somebody may name without being wrong; a finding that names any other
    is wrong. `cost_ratio` is the mean iteration time with the cause divided by the one without it,
    both simulated from the same draws; `held_cost_ratio` is the same of the iterations in which it
    holds, without the run's first two where others are left.
    """

    kind: str
    cause: str  # compute, link, host, loader, gc, stage_imbalance, sequence_imbalance
    owner: str  # node or job
    ranks: tuple[int, ...]
    host: str = ""  # where the unit at fault is a whole host
    factor: float = 1.0  # how many times slower what it concerns becomes, while it lasts
    first_iteration: int = 1
    last_iteration: int = 0  # 0: to the end
    share_of_time: float = 1.0  # below 1: bursts that cover this share of the time
    cost_ratio: float = 1.0
    held_cost_ratio: float = 1.0

    def priced(
        self, iterations: Sequence[int], with_it: NDArray[np.float64], without: NDArray[np.float64]
    ) -> Planted:
        """Return it with its costs; iteration times with it and without it are (iteration,)."""
        numbers = np.array(iterations)
        holds = numbers >= self.first_iteration
        if self.last_iteration:
            holds &= numbers <= self.last_iteration
        settled = holds & (numbers > NUM_WARMING_UP)
        counted = next((one for one in (settled, holds) if one.any()), np.ones_like(holds))
        return replace(
            self,
            cost_ratio=float(with_it.mean() / without.mean()),
            held_cost_ratio=float(with_it[counted].mean() / without[counted].mean()),
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describe one traced job: where it comes from, what it is, what was planted."""

    ground: str
    name: str  # unique within the ground; holds the seed
    family: str  # what tables group by: "gpu_clock", "healthy", "look_alike: hot expert"
    num_ranks: int
    seed: int
    draw: int = 0
    planted: tuple[Planted, ...] = ()

    @property
    def unseen(self) -> bool:
        """Tell whether this case is kept back until the detector is finished."""
        return not self.draw and crc32(f"{self.ground}/{self.name}".encode()) % UNSEEN_SHARE == 0

    @property
    def at_fault(self) -> frozenset[int]:
        """Return the ranks that a finding with owner `node` may name, none in a healthy job."""
        return frozenset(
            rank for cause in self.planted if cause.owner == "node" for rank in cause.ranks
        )


@dataclass(frozen=True, kw_only=True)
class Variation:
    """State what a sound job is to differ by from a case: its chips, and one slow GPU among them.

    `chip_spread_ratio` is what a ground calls by how much chips differ, None to keep the case's.
    The clock of `slow_rank` is lower throughout, its products take `factor` times as long; -1:
    nobody's.
    """

    chip_spread_ratio: float | None = None
    slow_rank: int = -1
    factor: float = 1.0


class Ground(Protocol):
    """What the module of one ground offers."""

    def cases(self, draw: int = 0) -> Iterable[Case]:
        """Yield all cases of a draw, the same ones in every process, without simulating any."""
        ...

    def write(self, case: Case, directory: Path) -> tuple[Planted, ...]:
        """Write the files of `case` into `directory`; return what was planted, with its cost."""
        ...

    def slowness(self, case: Case) -> NDArray[np.float64]:
        """Return how many times longer the passes of each rank take than on chips without any
        difference and without what was planted, (rank, iteration): waiting and communication left
        out, all other draws alike.
        """
        ...

    def write_varied(
        self, case: Case, variation: Variation, directory: Path | None
    ) -> NDArray[np.float64]:
        """Simulate the job of a case without what was planted, but with this variation; write its
        files where a directory is given. Return the time of each rank's passes, (rank, iteration).
        """
        ...
