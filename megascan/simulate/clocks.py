"""Clocks of the hosts: wrong by an offset and a drift each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascan.simulate.grid import Floats, Integers
from megascan.simulate.job import JobModel

ORIGIN_UNIX_NS = 1_767_225_600_000_000_000
"""Start of a simulated job by the true clock: 2026-01-01 00:00 UTC."""
_SETTLE_NS = 1_000_000_000
"""Clock origins are taken this long before the first iteration."""


@dataclass(frozen=True)
class RankClocks:
    """Offset and drift of every rank's clock, shape (rank): local = true + offset + drift·true."""

    offset_ns: Floats
    drift_ratio: Floats

    @classmethod
    def draw(cls, job: JobModel, seed: int) -> RankClocks:
        """One draw a host; the ranks of a host share its clock."""
        generator = np.random.default_rng([seed, 1])
        world = job.layout.world_size
        hosts = np.arange(world) // job.ranks_per_host
        errors = generator.uniform(-1.0, 1.0, (2, int(hosts[-1]) + 1))[:, hosts]
        return cls(
            np.round(errors[0] * job.clocks.offset_ms * 1e6),
            errors[1] * job.clocks.drift_ppm * 1e-6,
        )

    def local(self, true_ns: Floats, ranks: Integers) -> Integers:
        """Whole ns since each rank's origin, of one time and rank a row."""
        own_ns = true_ns * (1.0 + self.drift_ratio[ranks])
        return np.rint(own_ns).astype(np.int64) + _SETTLE_NS

    def origins(self) -> Integers:
        """Unix time of every rank's origin by its own clock, shape (rank)."""
        return ORIGIN_UNIX_NS - _SETTLE_NS + self.offset_ns.astype(np.int64)
