"""Judge the last windows of a job, and say whether a new window may wait for that.

All windows of the ring are aligned, observed and judged together for each verdict, by the functions
that `megascan detect` calls: a verdict here is the verdict there on the same windows, digit by
digit. It is quick enough because only new windows are read.

A verdict takes some hundred ms of CPU, a check of a new window (`Spending`) a few ms. The time
that each rank spends on spans of each name is added up by iteration, and the newest iterations are
compared with the median of earlier iterations:

    rank 5, forward     100 101  99 100 102 100 101  99 | 105 106      unusual: 5 %, noise is 1 %
    rank 5, all_reduce   20  35  22  18  41  30  25  27 |  33  24      as before

The check decides nothing but the time: an unusual window is judged at once, a usual window a
little later, by the same detector, together with windows that have come meanwhile. The detector
needs some slow iterations before it names a rank, so what stands out is followed: the next windows
are compared with windows from before the change, and are judged at once, too, while they differ as
much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from megascan.arrays import Flags, Floats
from megascan.errors import InputError
from megascan.header import RankHeader
from megascan.probes import Probes
from megascan.reader.segments import Segment
from megascan.timeline import Trace, codes, numbers
from megascan.vocabulary import ITERATION
from megascan.watch.windows import JobWindow, headers_of

if TYPE_CHECKING:
    from detect import DetectorSettings, Report

KEPT_ITERATIONS = 20
"""Default length of the ring: enough for 5 %, short enough to forget."""
LEAST_ITERATIONS = 8
"""Iterations that are kept however many spans they hold; fewer would hide small slowdowns."""
SHOWN_ITERATIONS = 4
"""Newest iterations over which each rank's slowness is shown; verdicts take the whole ring."""
MOST_SPANS = 600_000
"""Spans of all windows together: 1,024 ranks at `base` are judged in about 5 s."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the detector said about the ring."""

    report: Report
    slowness: Mapping[int, float]
    """Median ratio of each rank's computing time to that of its peers in the newest iterations
    (1.05: 5 % longer); ranks without peers are absent."""
    window: JobWindow
    """The newest window of the ring."""
    num_windows: int
    cpu_s: float
    """CPU time that judging took in this process."""


@dataclass
class Ring:
    """Windows in their order; the oldest are dropped when there are enough newer windows."""

    folders: tuple[Path, ...]
    """Folders with rank files and probes; the first is named in notes and errors."""
    settings: DetectorSettings
    kept_iterations: int = KEPT_ITERATIONS
    most_spans: int = MOST_SPANS
    windows: deque[JobWindow] = field(default_factory=deque)
    _seen_probes: tuple[list[tuple[Path, int, int]], Probes | None] = ([], None)
    """Files of probes with size and time of change, and what they held."""

    @property
    def num_iterations(self) -> int:
        """Return the number of traced iterations of all windows."""
        return sum(window.num_iterations for window in self.windows)

    def newer_than(self, iteration: int) -> list[JobWindow]:
        """Return the windows that end after an iteration."""
        return [window for window in self.windows if window.last_iteration > iteration]

    def push(self, window: JobWindow) -> None:
        """Add the newest window; a window of another run empties the ring first."""
        if self.windows and self.windows[-1].run_id != window.run_id:
            self.windows.clear()
        self.windows.append(_undropped(window))
        while len(self.windows) > 1 and self._is_too_long():
            self.windows.popleft()

    def _is_too_long(self) -> bool:
        """Return whether the oldest window can be dropped: enough iterations are left."""
        rest = self.num_iterations - self.windows[0].num_iterations
        num_spans = sum(window.num_spans for window in self.windows)
        least = min(LEAST_ITERATIONS, self.kept_iterations)
        return rest >= self.kept_iterations or (num_spans > self.most_spans and rest >= least)

    @property
    def headers(self) -> dict[int, RankHeader]:
        """Return the newest header of each rank."""
        return headers_of(self.windows)

    def judge(self) -> Judgement:
        """Align, observe and judge all windows. Raises InputError for ranks that contradict each
        other.
        """
        from aggregate import build_timeline
        from detect.detector import examine
        from detect.stats.robust import median

        began = time.process_time()
        timeline = build_timeline(self.trace())
        examination = examine(timeline, self.settings, self._newest_probes())
        seen = examination.seen
        slowness: dict[int, float] = {}
        if len(seen.iterations):
            middle = np.exp(median(examination.slowness[:, -SHOWN_ITERATIONS:], axis=1))
            for ranks, value in zip(seen.members.workers, middle.tolist(), strict=True):
                slowness.update(dict.fromkeys(ranks, value) if np.isfinite(value) else {})
        return Judgement(
            report=examination.report,
            slowness=slowness,
            window=self.windows[-1],
            num_windows=len(self.windows),
            cpu_s=time.process_time() - began,
        )

    def trace(self) -> Trace:
        """Return all windows as one trace. Raises InputError if ranks contradict each other."""
        from megascan.reader.trace import build_trace

        segments = [self._joined(rank) for rank in sorted(self.headers)]
        run_id = self.windows[-1].run_id
        return build_trace(self.folders[0], segments, run_id, allow_missing_ranks=True)

    def _newest_probes(self) -> Probes | None:
        """Return the probes next to the rank files; they are read again only if files changed."""
        from megascan.probes import probe_files, read_probes

        try:
            status = [(path, path.stat()) for path in probe_files(*self.folders)]
            seen = [(path, each.st_size, each.st_mtime_ns) for path, each in status]
            if seen != self._seen_probes[0]:
                self._seen_probes = seen, read_probes(*self.folders)
        except OSError as error:
            raise InputError(f"cannot read probes ({error}); tried again with a window") from error
        return self._seen_probes[1]

    def _joined(self, rank: int) -> Segment:
        parts = [window.segments[rank] for window in self.windows if rank in window.segments]
        return Segment(
            path=parts[-1].path,
            header=parts[-1].header,
            windows=tuple(window for part in parts for window in part.windows),
            spans=pa.concat_tables([part.spans for part in parts]),
            num_unfinished_spans=sum(part.num_unfinished_spans for part in parts),
            notes=tuple(note for part in parts for note in part.notes),
        )


def _undropped(window: JobWindow) -> JobWindow:
    """Forget that files lost windows to their size bound: the ring's windows are in memory."""
    segments = {
        rank: replace(
            segment, header=replace(segment.header, num_windows_dropped=0, last_iteration_dropped=0)
        )
        for rank, segment in window.segments.items()
        if segment.header.last_iteration_dropped
    }
    return replace(window, segments={**window.segments, **segments}) if segments else window


UNUSUAL_SIGMAS = 4.0
"""A change is unusual beyond this many standard errors: by chance about one window of 50 has such a
change in one of some hundred names of spans."""
UNUSUAL_AGAIN = 1.2
"""A change must also exceed earlier changes by this factor: durations have long tails."""
LEAST_SHARE = 0.005
"""A change by less than this share of the iteration is no reason to hurry."""
LEAST_HISTORY = 6
"""With fewer iterations before the new ones, everything is unusual."""
FOLLOWED = 8
"""Iterations for which something that stands out is followed: twice the detector's least."""
LEAST_FOLLOWED = 4
"""The mean of all followed iterations is compared, too, if there are this many: small changes add
up."""
_MEDIAN_VARIANCE = np.pi / 2
"""The variance of a median over the variance of a mean."""


@dataclass
class Spending:
    """Time that each rank spent on spans of each name, for the last `kept` iterations."""

    kept: int
    _rows: dict[tuple[int, str], int] = field(default_factory=dict)
    _values: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """(rank and name, iteration), ns."""
    _num_followed: int = 0
    """How many iterations have come since something stood out; 0 when nothing is followed."""

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
        """Drop rows that no kept iteration uses once they are the majority, to bound memory."""
        used: Flags = np.asarray(np.any(self._values, axis=1), dtype=bool)
        if 2 * np.count_nonzero(used) < len(used):
            kept = [key for key, row in self._rows.items() if used[row]]
            self._rows = {key: row for row, key in enumerate(kept)}
            self._values = self._values[used]

    def is_unusual(self, num_new: int, num_newest: int) -> bool:
        """Return whether the last `num_new` iterations, or the last `num_newest`, stand out.

        The last `num_new` iterations had no verdict yet; the newest window has `num_newest`.
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
        """Return whether the mean of the last `num` iterations is far off a history in any row."""
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
    """Return the means over each `num` neighbouring values (over all if there are fewer).

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
