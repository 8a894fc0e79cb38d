"""Prepare batches: workers of a loader beside the training thread.

Each of W workers prepares every W-th batch, at most P of them ahead of their use, as
torch.utils.data.DataLoader does with `prefetch_factor` P. A thread that comes for a batch which is
not there waits for it. So a loader costs nothing until a worker takes longer for a batch than W of
them take to be used up.
"""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.rack.conditions import Conditions
from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.job import Job


class Loader:
    """The loaders of the ranks of a stage."""

    def __init__(self, job: Job, conditions: Conditions, places: slice, started_s: float) -> None:
        self._conditions = conditions
        self._places = places
        self._workers = job.habits.num_workers
        self._ahead = job.habits.num_workers * job.habits.prefetch
        self._started_s = started_s
        self._window = job.tracing.window
        self._done: list[Floats] = []
        self._used: list[Floats] = []

    def take(self, iteration: int, microbatch: int, now: Floats) -> Floats:
        """Return when the next batch is there for threads that come now, (variant, place)."""
        prepares = self._conditions.prepare_s[:, self._places, iteration, microbatch]
        return self._prepared(self._begins(now) + prepares, now)

    def _begins(self, now: Floats) -> Floats:
        """Return when a worker began with the next batch."""
        number = len(self._done)
        begun = np.full_like(now, self._started_s)
        if number >= self._workers:
            begun = self._done[number - self._workers]
        if number >= self._ahead:
            begun = np.maximum(begun, self._used[number - self._ahead])
        return begun

    def _prepared(self, done: Floats, now: Floats) -> Floats:
        self._done.append(done)
        self._used.append(np.maximum(now, done))
        return done

    def settle(self, num_batches: int, pace_s: Floats, until: Floats, iteration: int) -> None:
        """Forget what was, and take batches at this pace, or as they come, until some moment: what
        a queue holds after iterations that nobody traced.
        """
        self._done, self._used = [], []
        following = slice(iteration, iteration + self._window)
        drawn = self._conditions.prepare_s[:, self._places, following]
        usual = np.median(drawn, axis=(2, 3))
        now = np.full_like(until, self._started_s)
        for _ in range(num_batches):
            self._prepared(self._begins(now) + usual, now)
            now = self._used[-1] + pace_s
        self._done = [done + until - now for done in self._done]
        self._used = [used + until - now for used in self._used]
