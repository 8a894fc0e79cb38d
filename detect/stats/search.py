"""Finds every slow row of a class: name the clearest, take it out of everybody's peers, look again.

Several slow rows hide each other: they shift their peers' medians and widen what looks like the
usual spread. So suspects are taken out one after the other, each judged by rows that are still in
(Rosner's generalized extreme deviate test, Technometrics 25(2), 1983): all up to the last one that
is significant count, even if an earlier one was not while the others were still in.

Significance is controlled over all rows and classes by the Benjamini-Hochberg rule: the k-th name
counts when p · m / k stays below the false-discovery rate (m = rows times classes that were
tested). Besides, the effect must reach the floor within its 95 % interval, and persist, and one
that begins or ends must be a change of the row itself, not of its peers. Never is more than half of
a group taken out: which part is slow, nobody could tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from detect.stats import robust
from detect.stats.noise import Noise, Usual, estimate_noise
from detect.stats.persistence import Course, Stretch, best_stretches, follow
from detect.thresholds import SEARCH, DetectorSettings
from megascan.arrays import Flags, Floats, Integers

Compare = Callable[[Flags], Floats]
"""Values (row, iteration) of all rows against peers that are not excluded."""


@dataclass(frozen=True)
class Suspect:
    """A row that is slower than its peers, beyond doubt and beyond the floor."""

    row: int
    course: Course
    q_value: float
    between: float = 0.0
    """By how much sound rows differ for good, where the row is measured against its peers'."""

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the effect; lasting differences of all ranks are included."""
        error = float(np.hypot(self.course.standard_error, self.between))
        reach = SEARCH.interval_sigmas * error
        return self.course.effect - reach, self.course.effect + reach


@dataclass(frozen=True)
class SearchResult:
    """Suspects, clearest first, and the noise of everybody else."""

    suspects: tuple[Suspect, ...]
    noise: Noise


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """One class to search: `floor` in the values' own units, `num_tests` over all classes."""

    compare: Compare
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
    against its peers is a row's only if its own values changed. None where that is not asked."""
    by_majority: bool = False
    """Values may be low for good reasons too: of four rows two high ones are not at fault."""
    patience: int = SEARCH.patience
    """Rows in a row that may be insignificant before the search ends."""

    def closed(self, excluded: Flags) -> Flags:
        """Return rows that may not be taken out next."""
        closed = excluded | self.forbidden
        for rows in self.groups:
            most = (
                len(rows) // 2 if len(rows) == 2 or not self.by_majority else (len(rows) - 1) // 2
            )
            if int(excluded[rows].sum()) >= most:
                closed[rows] = True
        return closed


@dataclass(frozen=True)
class _View:
    """All rows against those that are not excluded."""

    value: Floats
    noise: Noise
    stretches: list[Stretch]
    courses: dict[int, Course] = field(default_factory=dict)
    """Of the rows that were asked for: each is, several times."""

    def course(self, row: int) -> Course:
        if row not in self.courses:
            self.courses[row] = follow(self.value[row], self.stretches[row], self.noise)
        return self.courses[row]


def search(task: SearchTask, settings: DetectorSettings) -> SearchResult:
    """Find all rows of one class that are slow."""
    order: list[int] = []
    num_accepted = 0
    views = [_view(task, settings, order)]  # without the first 0, 1, 2, … of them
    while len(order) - num_accepted < task.patience and len(order) < settings.max_findings:
        row = _clearest(views[-1], task.closed(_mask(order, task.num_rows)), task, settings)
        if row is None:
            break
        order.append(row)
        views.append(view := _view(task, settings, order))
        q_value = view.stretches[row].p_value * task.num_tests / len(order)
        if q_value <= settings.false_discovery_rate and _qualifies(view, row, task, settings):
            num_accepted = len(order)
    view = views[num_accepted]
    return SearchResult(tuple(_suspects(view, order[:num_accepted], task, settings)), view.noise)


def _mask(rows: list[int], num_rows: int) -> Flags:
    mask = np.zeros(num_rows, dtype=bool)
    mask[rows] = True
    return mask


def _view(task: SearchTask, settings: DetectorSettings, excluded: list[int]) -> _View:
    mask = _mask(excluded, task.num_rows)
    value = task.compare(mask)
    noise = estimate_noise(value, mask, task.usual)
    scattered = task.usual.scattered and not task.usual.bursty
    stretches = best_stretches(value, noise, settings.min_iterations, mask, scattered=scattered)
    return _View(value, noise, stretches)


def _clearest(
    view: _View, closed: Flags, task: SearchTask, settings: DetectorSettings
) -> int | None:
    """Return the next row to take out: the least probable one that is above the floor and
    persists.
    """
    rows = [one for one in view.stretches if not closed[one.row] and one.effect > 0]
    for one in sorted(rows, key=lambda each: (each.p_value, -each.effect)):
        if one.effect >= SEARCH.near_floor_share * task.floor / 2 and _qualifies(
            view, one.row, task, settings
        ):
            return one.row
    return None


def _qualifies(view: _View, row: int, task: SearchTask, settings: DetectorSettings) -> bool:
    course = view.course(row)
    if not _persists(course, settings) or not _reaches(course, task.floor, view.noise.between):
        return False
    return task.own is None or not peers_changed(view.value[row], task.own[row], course.active)


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


def _persists(course: Course, settings: DetectorSettings) -> bool:
    """Return whether it lasts long enough, and most of the time between onset and end (less when it
    flaps).

    Of a short window most of it is enough: 3 of 4 iterations.
    """
    flaps = len(course.episodes) > 1 and course.share >= SEARCH.flapping_share
    most_of_it = int(np.ceil(settings.min_share * len(course.active)))
    least = min(settings.min_iterations, most_of_it)
    return int(course.active.sum()) >= least and (course.share >= settings.min_share or flaps)


def _reaches(course: Course, floor: float, between: float) -> bool:
    """Return whether the effect may be as large as the floor, given its error and the rank's own
    level.
    """
    reach = course.effect + SEARCH.interval_sigmas * float(np.hypot(course.standard_error, between))
    return reach >= floor and course.effect >= SEARCH.near_floor_share * floor


def _suspects(
    view: _View, rows: list[int], task: SearchTask, settings: DetectorSettings
) -> list[Suspect]:
    """Return the rows that hold once all of them are out of each other's peers."""
    found = []
    ordered = sorted(rows, key=lambda row: (view.stretches[row].p_value, row))
    for number, row in enumerate(ordered, 1):
        q_value = min(1.0, view.stretches[row].p_value * task.num_tests / number)
        if q_value <= settings.false_discovery_rate and _qualifies(view, row, task, settings):
            course = view.course(row)
            is_level = bool(course.active.all())  # else it is measured against its own normal
            found.append(Suspect(row, course, q_value, view.noise.between if is_level else 0.0))
    return found
