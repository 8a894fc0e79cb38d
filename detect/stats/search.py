"""Finds every slow row of a class: name the clearest, take it out of everybody's peers, look again.

Significance is controlled over all rows and classes by the Benjamini-Hochberg rule applied in the
order of removal: the k-th name is accepted when p · m / k stays below the false-discovery rate
(m = rows times classes that were tested). Besides, the effect must reach the floor within its 95 %
interval, and persist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from detect.observations import Bools, Floats
from detect.settings import DetectorSettings
from detect.stats.noise import Noise, estimate_noise
from detect.stats.persistence import Course, Stretch, best_stretches, follow

INTERVAL_SIGMAS = 1.96
FLAPPING_SHARE = 0.4
"""Of the iterations between the first and the last episode of a fault that comes and goes."""
NEAR_FLOOR = 0.8
"""A floor of 3 % must not hide a true 3 % in half of the cases: the estimate itself may fall short
of the floor by a fifth when its interval reaches it."""

Compare = Callable[[Bools], Floats]
"""Values (row, iteration) of all rows against peers that are not excluded."""


@dataclass(frozen=True)
class Suspect:
    """A row that is slower than its peers, beyond doubt and beyond the floor."""

    row: int
    course: Course
    q_value: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the effect, log units."""
        reach = INTERVAL_SIGMAS * self.course.standard_error
        return self.course.effect - reach, self.course.effect + reach


@dataclass(frozen=True)
class SearchResult:
    """Suspects in the order found, and the noise of everybody else."""

    suspects: tuple[Suspect, ...]
    noise: Noise


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """One class to search: `floor` in the values' own units, `num_tests` over all classes."""

    compare: Compare
    num_rows: int
    num_tests: int
    floor: float
    noise_floor: float
    forbidden: Bools
    """Rows that are not to be named here (known faults of another class explain them)."""
    bursty: bool = False
    """Healthy rows have rare bursts, which a median deviation would not see as noise."""


def search(task: SearchTask, settings: DetectorSettings) -> SearchResult:
    """All rows of one class that are slow."""
    excluded = np.zeros(task.num_rows, dtype=bool)
    found: list[tuple[Stretch, float]] = []
    value = task.compare(excluded)
    noise = estimate_noise(value, excluded, task.noise_floor, task.bursty)
    while len(found) < settings.max_findings:
        stretch = _clearest(value, noise, excluded, task, settings)
        if stretch is None:
            break
        found.append(stretch)
        excluded[stretch[0].row] = True
        if excluded.all():
            break
        value = task.compare(excluded)
        noise = estimate_noise(value, excluded, task.noise_floor, task.bursty)
    suspects = [_suspect(value, noise, stretch, q) for stretch, q in found]
    kept = [
        one
        for one in suspects  # the peers have changed since each was found
        if _persists(one.course, settings) and _reaches(one.course.effect, one.course, task.floor)
    ]
    return SearchResult(tuple(kept), noise)


def _clearest(
    value: Floats,
    noise: Noise,
    excluded: Bools,
    task: SearchTask,
    settings: DetectorSettings,
) -> tuple[Stretch, float] | None:
    stretches = best_stretches(value, noise, settings.min_iterations)
    closed = excluded | task.forbidden
    open_ones = [one for one in stretches if not closed[one.row] and one.effect > 0]
    for one in sorted(open_ones, key=lambda each: (each.p_value, -each.effect)):
        q_value = min(1.0, one.p_value * task.num_tests / (int(excluded.sum()) + 1))
        if q_value > settings.false_discovery_rate:
            return None
        course = follow(value[one.row], one, float(noise.sigma[one.row]), noise.inflation)
        if _persists(course, settings) and _reaches(course.effect, course, task.floor):
            return one, q_value
    return None


def _persists(course: Course, settings: DetectorSettings) -> bool:
    """Long enough, and most of the time between onset and end (less when it flaps)."""
    flaps = len(course.episodes) > 1 and course.share >= FLAPPING_SHARE
    least = min(settings.min_iterations, len(course.active))
    return int(course.active.sum()) >= least and (course.share >= settings.min_share or flaps)


def _reaches(effect: float, course: Course, floor: float) -> bool:
    reach = effect + INTERVAL_SIGMAS * course.standard_error
    return reach >= floor and effect >= NEAR_FLOOR * floor


def _suspect(value: Floats, noise: Noise, stretch: Stretch, q_value: float) -> Suspect:
    course = follow(value[stretch.row], stretch, float(noise.sigma[stretch.row]), noise.inflation)
    return Suspect(stretch.row, course, q_value)
