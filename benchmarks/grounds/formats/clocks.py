"""Tell what time a rank believes it is: offset, drift and wander of its host, ties of its GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.formats.hardware import Cluster

Floats = NDArray[np.float64]
ORIGIN_NS = 1_764_000_000_000_000_000
MOST_OFFSET_NS = 5e7
MOST_DRIFT = 30e-6
TIE_NS = 8_000.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """One rank's clock; `steps` are its wander at equal distances of true time."""

    offset_ns: float
    drift: float
    every_ns: float
    steps: Floats

    def read(self, true_ns: Floats) -> Floats:
        """Return what the clock shows, relative to the common origin."""
        wander = np.interp(true_ns, np.arange(len(self.steps)) * self.every_ns, self.steps)
        return np.asarray(true_ns * (1 + self.drift) + self.offset_ns + wander)


def clocks_of(cluster: Cluster, seed: int, length_ns: float) -> list[Clock]:
    """Return the clocks of all ranks; ranks of a host differ only by their GPU's tie."""
    rng = np.random.default_rng((seed, 10))
    every = max(length_ns / 40, 1.0)
    hosts = [
        (
            rng.uniform(-MOST_OFFSET_NS, MOST_OFFSET_NS),
            rng.uniform(-MOST_DRIFT, MOST_DRIFT),
            np.cumsum(rng.normal(0, 1e-6 * every * 0.3, 43)),
        )
        for _ in range(cluster.num_nodes)
    ]
    clocks = []
    for rank in range(cluster.num_ranks):
        offset, drift, steps = hosts[cluster.node(rank)]
        tie = rng.normal(0, TIE_NS)
        clocks.append(
            Clock(offset_ns=offset + tie, drift=drift, every_ns=every, steps=np.asarray(steps))
        )
    return clocks
