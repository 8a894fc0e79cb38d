"""Read every rank's clock: hosts' clocks are apart, drift, wander, and are set by time daemons."""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.incidents.hardware import Floats, Integers
from benchmarks.grounds.incidents.jobs import Job


class Clocks:
    """What ranks' clocks show at true times. Ranks of a host share its clock."""

    def __init__(self, job: Job, times: Floats) -> None:
        """Take the true times at which traced iterations begin, in seconds."""
        tracing = job.tracing
        rng = np.random.default_rng([job.seed, 21])
        self._job, self._times = job, times
        hosts = np.unique(job.cluster.hosts)
        count = len(times)
        self._offset_s: dict[int, Floats] = {}
        self._steps_s: dict[int, Floats] = {}
        for host in hosts.tolist():
            apart = tracing.wander_us * 1e-6 * rng.standard_normal()
            walk = tracing.walk_us * 1e-6 * rng.standard_normal(count).cumsum()
            drift = tracing.drift_ppm * 1e-6 * rng.standard_normal() * times
            self._offset_s[host] = apart + walk + drift
            steps = np.zeros(count)
            if tracing.step_us and rng.random() < 0.4:
                steps[int(rng.integers(count)) :] = tracing.step_us * 1e-6 * rng.standard_normal()
            self._steps_s[host] = steps
        self._ties_s = 2e-6 * rng.standard_normal((job.num_ranks, count))

    def shown(self, rank: int, times: Floats, windows: Integers) -> Floats:
        """Return what a rank's clock shows, in seconds; `windows` are the places of the iterations
        that begin the windows of these times: a clock is tied anew with each of them.
        """
        host = int(self._job.cluster.hosts[rank])
        offset = np.interp(times, self._times, self._offset_s[host])
        settled = self._steps_s[host][windows] + self._ties_s[rank][windows]
        return np.asarray(times + offset + settled)
