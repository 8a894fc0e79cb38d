"""Tell cheaply whether a window looks like those before it, so that the verdict on it may wait.

A verdict takes some hundred ms of CPU, a glance a few. What each rank spends on each kind of span
is added up by iteration, and the newest iterations are held against the median of those before:

    rank 5, forward     100 101  99 100 102 100 101  99 | 105 106      unusual: 5 % where 1 % is
    rank 5, all_reduce   20  35  22  18  41  30  25  27 |  33  24      as ever

Nothing is decided here: an unusual window is judged at once, a usual one a little later, by the
same detector, together with those that have come meanwhile. The detector wants some slow iterations
before it names anybody, so what stands out is followed: the next windows are held against those
before it, and are judged at once, too, while they are as far off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megascan.arrays import Flags, Floats
from megascan.reader.segments import Segment
from megascan.timeline import codes, numbers
from megascan.vocabulary import ITERATION
from megascan.watch.windows import JobWindow

UNUSUAL_SIGMAS = 4.0
"""By chance one of some hundred kinds of span is so far off in about one window of 50."""
UNUSUAL_AGAIN = 1.2
"""It must also be so many times further off than earlier iterations were: spans have long tails."""
LEAST_SHARE = 0.005
"""A change by less than this share of the iteration is no reason to hurry."""
LEAST_HISTORY = 6
"""Iterations before the new ones, without which everything is unusual."""
FOLLOWED = 8
"""Iterations for which something that stands out is followed: twice the detector's least."""
LEAST_FOLLOWED = 4
"""From so many followed iterations on their mean is compared, too: small changes add up."""
_MEDIAN_VARIANCE = np.pi / 2
"""The variance of a median over that of a mean."""


@dataclass
class Glance:
    """Remembers what ranks spent on what, by iteration; `kept` iterations of it."""

    kept: int
    _rows: dict[tuple[int, str], int] = field(default_factory=dict)
    _values: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """(rank and name, iteration), ns."""
    _num_followed: int = 0
    """Newest iterations that came since something stood out; 0 when nothing is followed."""

    def clear(self) -> None:
        """Forget everything: another run begins."""
        self._rows, self._values, self._num_followed = {}, np.zeros((0, 0)), 0

    def push(self, window: JobWindow) -> None:
        """Take the newest window."""
        num = window.num_iterations
        spent: list[tuple[int, Floats]] = []
        for rank, segment in window.segments.items():
            for name, values in _spent(segment, window.first_iteration, num):
                spent.append((self._rows.setdefault((rank, name), len(self._rows)), values))
        newest = np.zeros((len(self._rows), num))
        for row, values in spent:
            newest[row] = values
        before = np.zeros((len(self._rows), self._values.shape[1]))
        before[: len(self._values)] = self._values
        self._values = np.concatenate([before, newest], axis=1)[:, -self.kept :]
        self._forget_unused()
        if self._num_followed:
            self._num_followed += num
        if self._num_followed > FOLLOWED:
            self._num_followed = 0

    def _forget_unused(self) -> None:
        """Drop what no kept iteration has, once that is most of it: memory stays bounded."""
        used: Flags = np.asarray(np.any(self._values, axis=1), dtype=bool)
        if 2 * np.count_nonzero(used) < len(used):
            kept = [key for key, row in self._rows.items() if used[row]]
            self._rows = {key: row for row, key in enumerate(kept)}
            self._values = self._values[used]

    def is_unusual(self, num_new: int, num_newest: int) -> bool:
        """Tell whether the last `num_new` iterations, or the last `num_newest` of them, stand out.

        The former are those without a verdict, the latter those of the newest window.
        """
        history = self._values[:, : -max(num_new, self._num_followed) or None]
        if history.shape[1] < LEAST_HISTORY:
            return True
        lengths = {num_new, num_newest}
        if self._num_followed >= LEAST_FOLLOWED:
            lengths.add(self._num_followed)
        if not any(self._stand_out(history, num) for num in lengths):
            return False
        self._num_followed = self._num_followed or max(num_new, num_newest)
        return True

    def _stand_out(self, history: Floats, num: int) -> bool:
        """Tell whether the last `num` iterations are far off those of a history, all in all."""
        from detect.stats.robust import median, spread

        middle, noise = median(history, axis=1), spread(history, axis=1)
        whole = max(
            (middle[row] for (_, name), row in self._rows.items() if name == ITERATION), default=0.0
        )
        error = noise * np.sqrt(1.0 / num + _MEDIAN_VARIANCE / history.shape[1])
        change = np.abs(self._values[:, -num:].mean(axis=1) - middle)
        least = np.maximum(UNUSUAL_SIGMAS * error, LEAST_SHARE * whole)
        before = np.abs(_means(history, num) - middle[:, None]).max(axis=1)
        return bool((change > np.maximum(least, UNUSUAL_AGAIN * before)).any())


def _means(values: Floats, num: int) -> Floats:
    """Return the means over each `num` neighbouring values (over all, where there are fewer).

    Example: `num` 2 of [[1, 3, 5]] gives [[2, 4]].
    """
    num = min(num, values.shape[1])
    total = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)
    return np.asarray((total[:, num:] - total[:, :-num]) / num)


def _spent(segment: Segment, first: int, num: int) -> list[tuple[str, Floats]]:
    """Return for each name of a rank's spans the total duration by iteration, ns."""
    if not segment.spans.num_rows:
        return []
    name_codes, names = codes(segment.spans, "name")
    iteration = np.clip(numbers(segment.spans, "iteration") - first, 0, num - 1)
    total = np.bincount(
        name_codes * num + iteration,
        weights=numbers(segment.spans, "duration_ns"),
        minlength=len(names) * num,
    ).reshape(len(names), num)
    return [(name, total[code]) for code, name in enumerate(names) if total[code].any()]
