"""Tell time as the tracer does: hosts whose clocks err and wander, GPUs tied to them at windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.job import Job

Figures = NDArray[np.float64]
_OF_CLOCKS = 2001


class Clocks:
    """The clocks of all hosts and GPUs of a job."""

    def __init__(self, job: Job, seed: int) -> None:
        rng = np.random.default_rng([seed, _OF_CLOCKS])
        shape = job.num_hosts
        self.job, self._seed = job, seed
        self.base_unix_s = 1_764_000_000 + int(rng.integers(0, 10_000_000))
        self._offsets = rng.normal(0, job.clock_error_s, shape)
        self._drifts = rng.normal(0, job.clock_drift_ppm * 1e-6, shape)
        self._swings = np.abs(rng.normal(0, 0.1 * job.clock_error_s, shape))
        self._periods = rng.uniform(20, 200, shape)
        self._phases = rng.uniform(0, 2 * np.pi, shape)
        self._device_ppm = rng.normal(0, 12.0, job.num_ranks)
        self._origins = -rng.uniform(0.2, 3.0, job.num_ranks)

    def _host_s(self, true_s: Figures, rank: int) -> Figures:
        """Return what a rank's host shows, less the whole seconds of the base."""
        host = self.job.hosts[rank]
        swing = self._swings[host] * np.sin(
            2 * np.pi * true_s / self._periods[host] + self._phases[host]
        )
        return np.asarray(true_s * (1 + self._drifts[host]) + self._offsets[host] + swing)

    def _origin_ns(self, rank: int) -> int:
        return round(float(self._host_s(np.array(self._origins[rank]), rank)) * 1e9)

    def origin_unix_ns(self, rank: int) -> int:
        """Return what the host's clock showed when the rank began to trace."""
        return self.base_unix_s * 1_000_000_000 + self._origin_ns(rank)

    def host_ns(self, true_s: Figures, rank: int) -> NDArray[np.int64]:
        """Return host times relative to the rank's origin."""
        shown = np.round(self._host_s(true_s, rank) * 1e9).astype(np.int64)
        return np.asarray(shown - self._origin_ns(rank))

    def tie_of(self, rank: int, window: int, bounds_s: tuple[float, float]) -> Tie:
        """Return how well a rank's GPU was tied to its host in a window."""
        rng = np.random.default_rng([self._seed, _OF_CLOCKS, rank, window])
        widths = 9e-6 * np.exp(np.abs(rng.normal(0, 0.35, 2)))
        errors = rng.uniform(-0.5, 0.5, 2) * widths * 0.8
        seconds = max(1e-3, bounds_s[1] - bounds_s[0])
        drift = self._device_ppm[rank] + (errors[1] - errors[0]) / seconds * 1e6
        certain = abs(drift) * 1e-6 * seconds > widths.mean()
        return Tie(bounds_s, errors, round(widths.max() * 1e9), float(drift) if certain else 0.0)


class Tie:
    """What a GPU's times are off by in one window, between the errors of its two ends."""

    def __init__(
        self, bounds_s: tuple[float, float], errors_s: Figures, width_ns: int, drift_ppm: float
    ) -> None:
        self._bounds, self._errors = bounds_s, errors_s
        self.width_ns, self.drift_ppm = width_ns, drift_ppm

    def seen_s(self, true_s: Figures) -> Figures:
        """Return moments on the device as the tracer places them in the host's time."""
        return np.asarray(true_s + np.interp(true_s, self._bounds, self._errors))
