"""Say when batches are there: workers read ahead, and their storage is now fast, now slow."""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.yard.jobs import Job


class Loader:
    """Workers that read ahead for one rank: each has two batches in hand at most."""

    def __init__(self, job: Job, rng: np.random.Generator, now: float) -> None:
        self._job = job
        self._rng = rng
        self._ready = [now] * job.loader_workers
        self._taken = [now] * job.loader_workers

    def take(self, now: float, factor: float) -> float:
        """Return when the next batch is there for somebody who asks now."""
        number, workers = len(self._taken), self._job.loader_workers
        spread = self._job.storage_spread
        seconds = self._job.loader_s * float(np.exp(spread * self._rng.normal()))
        begin = self._ready[number - workers]
        if number >= 2 * workers:
            begin = max(begin, self._taken[number - 2 * workers])
        self._ready.append(begin + seconds * factor)
        self._taken.append(max(now, self._ready[-1]))
        return self._taken[-1]

    def skip(self, seconds: float) -> None:
        """Pass over iterations that are not traced: what was read ahead stays as it was."""
        self._ready = [each + seconds for each in self._ready]
        self._taken = [each + seconds for each in self._taken]
