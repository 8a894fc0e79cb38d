"""Find every slow row of a class.

Several slow rows hide each other: they shift their peers' medians and widen what seems the usual
spread. So the clearest is taken out of everybody's peers, then the next, each judged by rows that
are still in (Rosner's generalized extreme deviate test, Technometrics 25(2), 1983): all up to the
last significant one count, even if an earlier one was not while others were still in.

Significance is controlled over all rows and classes by the Benjamini-Hochberg rule: the k-th name
counts when p · m / k stays below the false-discovery rate (m = rows times classes that were
tested). Besides, the effect must reach the floor within its 95 % interval, and persist, and an
effect that begins or ends must be a change of the row itself, not of its peers. No more than half
of a group is ever taken out: nobody could tell which half is slow.

When a row was slow is told in `stretches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from detect.stats import robust
from detect.stats.noise import Noise, Usual, estimate_noise
from detect.stats.stretches import Course, Stretch, best_stretches, follow, rise_to
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.statistics import SEARCH
from megascan.arrays import Flags, Floats, Integers, mask_of


def interval_of_ratio(effect: float, error: float) -> tuple[float, float]:
    """Return the 95 % interval of a ratio whose log is known to a standard error.

    Example: log 0.26 ± 0.02 is a ratio of 1.30, between 1.25 and 1.35.
    """
    reach = SEARCH.interval_sigmas * error
    return float(np.exp(effect - reach)), float(np.exp(effect + reach))


def interval_of_share(share: float, error: float) -> tuple[float, float]:
    """Return the 95 % interval of a ratio of 1 and a share, which is known to a standard error.

    Example: 0.07 ± 0.02 of a step is between 1.03 and 1.11 times.
    """
    reach = SEARCH.interval_sigmas * error
    return 1.0 + max(0.0, share - reach), 1.0 + share + reach


@dataclass(frozen=True)
class Suspect:
    """A row that is slower than its peers, beyond doubt and beyond the floor."""

    row: int
    course: Course
    q_value: float
    between: float = 0.0
    """By how much sound rows differ for good, if the row is measured against its peers; else 0."""

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the slowdown, lasting differences of ranks included."""
        error = float(np.hypot(self.course.standard_error, self.between))
        return interval_of_ratio(self.course.effect, error)


@dataclass(frozen=True)
class SearchResult:
    """Suspects, clearest first, and the noise of everybody else."""

    suspects: tuple[Suspect, ...]
    noise: Noise


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """One class to search: `floor` in the values' own units, `num_tests` over all classes."""

    compare: Callable[[Flags], Floats]
    """Return values (row, iteration) of all rows against peers that are not excluded."""
    num_rows: int
    num_tests: int
    floor: float
    usual: Usual
    forbidden: Flags
    """Rows that are not to be named here (known faults of another class explain them)."""
    groups: tuple[Integers, ...] = ()
    """Rows that are each other's peers."""
    own: Floats | None = None
    """What the rows measured themselves, (row, iteration), in the units of the values: a change
    against its peers is a row's only if its own values changed. None: not checked."""
    by_majority: bool = False
    """Whether fewer than half of a group (one of a pair) may be suspects: values may be low for
    good reasons, too, so if two of four rows are high, they are not at fault."""
    patience: int = SEARCH.patience
    """Rows in a row that may be insignificant before the search ends."""

    def closed(self, excluded: Flags) -> Flags:
        """Return rows that may not be taken out next."""
        closed = excluded | self.forbidden
        for rows in self.groups:
            is_minority = self.by_majority and len(rows) != 2
            most = (len(rows) - 1) // 2 if is_minority else len(rows) // 2
            if int(excluded[rows].sum()) >= most:
                closed[rows] = True
        return closed


@dataclass(frozen=True)
class _View:
    """All rows against those that are not excluded."""

    task: SearchTask
    settings: DetectorSettings
    value: Floats
    noise: Noise
    stretches: list[Stretch]
    courses: dict[int, Course] = field(default_factory=dict)
    """Courses computed so far, by row: each is asked for several times."""

    @classmethod
    def of(cls, task: SearchTask, settings: DetectorSettings, excluded: list[int]) -> _View:
        mask = mask_of(excluded, task.num_rows)
        value = task.compare(mask)
        noise = estimate_noise(value, mask, task.usual)
        scattered = task.usual.scattered and not task.usual.bursty
        stretches = best_stretches(
            value, noise, settings.min_iterations, mask, scattered=scattered, groups=task.groups
        )
        return cls(task, settings, value, noise, stretches)

    def course(self, row: int) -> Course:
        if row not in self.courses:
            self.courses[row] = follow(self.value[row], self.stretches[row], self.noise)
        return self.courses[row]

    def q_value(self, row: int, number: int) -> float:
        """Return the false-discovery rate at which a row counts as the `number`-th name, from 1."""
        return min(1.0, self.stretches[row].p_value * self.task.num_tests / number)

    def is_named(self, row: int, number: int) -> bool:
        """Return whether a row counts as the `number`-th name, from 1."""
        is_significant = self.q_value(row, number) <= self.settings.false_discovery_rate
        return is_significant and self._qualifies(row)

    def clearest(self, closed: Flags) -> int | None:
        """Return the next row to take out: the least probable of those that qualify."""
        least = SEARCH.near_floor_share * self.task.floor / 2
        rows = [one for one in self.stretches if not closed[one.row] and one.effect > 0]
        for one in sorted(rows, key=lambda each: (each.p_value, -each.effect)):
            if one.effect >= least and self._qualifies(one.row):
                return one.row
        return None

    def _qualifies(self, row: int) -> bool:
        """Return whether a row is slow for long enough, by enough, and by its own doing.

        Long enough is most of a short window: 3 of 4 iterations. It must be slow for most of the
        time between onset and end, less when it flaps. The effect may be as large as the floor,
        given its error and what sound ranks differ by.
        """
        course, task, settings = self.course(row), self.task, self.settings
        flaps = len(course.episodes) > 1 and course.share >= SEARCH.flapping_share
        most_of_it = int(np.ceil(settings.min_share * len(course.active)))
        if int(course.active.sum()) < min(settings.min_iterations, most_of_it):
            return False
        if not (course.share >= settings.min_share or flaps):
            return False
        error = float(np.hypot(course.standard_error, self.noise.between))
        is_far = course.effect + SEARCH.interval_sigmas * error >= task.floor
        if not (is_far and course.effect >= SEARCH.near_floor_share * task.floor):
            return False
        return task.own is None or not peers_changed(self.value[row], task.own[row], course.active)

    def suspects(self, rows: list[int]) -> Iterator[Suspect]:
        """Yield the rows that are still suspect once none of them is a peer of the others."""
        ordered = sorted(rows, key=lambda row: (self.stretches[row].p_value, row))
        for number, row in enumerate(ordered, 1):
            if self.is_named(row, number):
                course = self.course(row)
                is_level = bool(course.active.all())  # else it is measured against its own normal
                between = self.noise.between if is_level else 0.0
                course = replace(course, rise=rise_to(self.value[row], course))
                yield Suspect(row, course, self.q_value(row, number), between)


def search(task: SearchTask, settings: DetectorSettings) -> SearchResult:
    """Find all rows of one class that are slow."""
    order: list[int] = []
    num_accepted = 0
    views = [_View.of(task, settings, order)]  # views[n] excludes the first n rows of `order`
    while len(order) - num_accepted < task.patience and len(order) < settings.max_findings:
        row = views[-1].clearest(task.closed(mask_of(order, task.num_rows)))
        if row is None:
            break
        order.append(row)
        views.append(_View.of(task, settings, order))
        if views[-1].is_named(row, len(order)):
            num_accepted = len(order)
    view = views[num_accepted]
    return SearchResult(tuple(view.suspects(order[:num_accepted])), view.noise)


def peers_changed(value: Floats, own: Floats, active: Flags) -> bool:
    """Return whether a row that exceeds its peers in some iterations stayed as it was itself.

    All are (iteration,). Its own values must be shown to have changed by less than half of what
    `value` did: where all vary together, by their data, nothing is shown.

    Example: 103 ms until iteration 12, 103 ms from then on, and its peers went from 80 to 143 ms.
    """
    use = np.isfinite(value) & np.isfinite(own)
    slow, normal = use & active, use & ~active
    num_slow, num_normal = int(slow.sum()), int(normal.sum())
    if min(num_slow, num_normal) < SEARCH.min_own_iterations:
        return False
    change = float(robust.centre(value[slow]) - robust.centre(value[normal]))
    own_change = float(robust.centre(own[slow]) - robust.centre(own[normal]))
    parts = [own[part] - robust.mean(own[part]) for part in (slow, normal)]
    square = sum(float((part**2).sum()) for part in parts) / (num_slow + num_normal - 2)
    error = float(np.sqrt(square * (1.0 / num_slow + 1.0 / num_normal)))
    return own_change + SEARCH.interval_sigmas * error < SEARCH.own_change_share * change
