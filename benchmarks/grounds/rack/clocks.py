"""Turn true time into what each rank writes down.

A rank's time is its host's: off by what NTP or PTP leave, and drifting as the crystal's temperature
does. At both ends of a window the GPU's clock is tied to it, each time within the tie's width, and
in between it is taken to run evenly, so the error of a tie moves linearly into that of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.rack.hardware import Floats, Places
from benchmarks.grounds.rack.job import Job

ORIGIN_S = 2.0
"""When tracing starts, in the time of the simulation."""
_BEND_PERIOD_S = 240.0


@dataclass(frozen=True, eq=False)
class Clocks:
    """The clocks of all ranks."""

    origins_s: Floats  # by rank
    offsets_s: Floats
    drifts: Floats  # seconds a second
    bends: Floats  # how far the drift itself swings
    phases: Floats
    ties_s: Floats  # (rank, window, end)
    widths_s: Floats  # (rank, window)

    def ns(self, true_s: Floats, ranks: Places, window: int, span: tuple[float, float]) -> Floats:
        """Return ns since each rank's origin, in a window from and to the true times of `span`."""
        since = true_s - self.origins_s[ranks]
        turn = 2.0 * np.pi / _BEND_PERIOD_S
        swings = self.bends[ranks] / turn
        swing = swings * (
            np.sin(turn * true_s + self.phases[ranks])
            - np.sin(turn * self.origins_s[ranks] + self.phases[ranks])
        )
        share = np.clip((true_s - span[0]) / max(1e-6, span[1] - span[0]), 0.0, 1.0)
        first, last = self.ties_s[ranks, window, 0], self.ties_s[ranks, window, 1]
        error = first + share * (last - first)
        found = since * (1.0 + self.drifts[ranks]) + swing + error
        return np.asarray(1e9 * found, dtype=np.float64)


def draw_clocks(job: Job) -> Clocks:
    """Draw the clocks of a job's hosts and the ties of its ranks."""
    draws, weather, rack = np.random.default_rng([job.seed, 7]), job.weather, job.rack
    hosts = np.array([rack.host_of(rank) for rank in range(job.num_ranks)])
    offsets = weather.clock_offset_s * draws.standard_t(3.0, rack.num_hosts)
    limit = 4.0 * weather.clock_offset_s
    drifts = 1e-6 * weather.clock_drift_ppm * draws.standard_normal(rack.num_hosts)
    bends = 1e-6 * weather.clock_bend_ppm * draws.uniform(-1.0, 1.0, rack.num_hosts)
    phases = draws.uniform(0.0, 2.0 * np.pi, rack.num_hosts)
    shape = (job.num_ranks, job.tracing.num_windows)
    widths = draws.uniform(12e-6, 32e-6, shape)
    return Clocks(
        origins_s=ORIGIN_S + draws.uniform(0.0, 0.05, job.num_ranks),
        offsets_s=np.clip(offsets, -limit, limit)[hosts],
        drifts=drifts[hosts],
        bends=bends[hosts],
        phases=phases[hosts],
        ties_s=widths[..., None] * draws.uniform(-0.3, 0.3, (*shape, 2)),
        widths_s=widths,
    )
