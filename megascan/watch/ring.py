"""The last windows of a job, and what the detector says about them.

All of them are aligned, observed and judged together, anew for each window, by the functions that
`megascan detect` calls: a verdict here is the verdict there on the same windows, digit by digit.
What makes it quick enough is that only the new window is read.
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

from megascan.errors import InputError
from megascan.header import RankHeader
from megascan.probes import Probes
from megascan.reader.segments import Segment
from megascan.timeline import Trace
from megascan.watch.windows import JobWindow, headers_of

if TYPE_CHECKING:
    from detect import DetectorSettings, Report

KEPT_ITERATIONS = 20
"""Default length of the ring: enough for 5 %, short enough to forget."""
LEAST_ITERATIONS = 8
"""Kept however many spans they hold; with fewer, small slowdowns drown."""
SHOWN_ITERATIONS = 4
"""Newest iterations over which each rank's slowness is shown; verdicts take the whole ring."""
MOST_SPANS = 600_000
"""Of all windows together: 1,024 ranks at `base` are judged in about 5 s."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the detector said about the ring."""

    report: Report
    slowness: Mapping[int, float]
    """How much longer than its peers each rank computes in the newest iterations, median, 1.05 is
    5 %; ranks without peers are absent."""
    window: JobWindow
    """The newest of the ring."""
    num_windows: int
    cpu_s: float
    """CPU time of this process that judging took."""


@dataclass
class Ring:
    """Windows in their order; the oldest go when there are enough newer ones."""

    folders: tuple[Path, ...]
    """Where probes are; the first is named in notes and errors."""
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
        """Return the windows that end behind an iteration."""
        return [window for window in self.windows if window.last_iteration > iteration]

    def push(self, window: JobWindow) -> None:
        """Take the newest window; a window of another run begins anew."""
        if self.windows and self.windows[-1].run_id != window.run_id:
            self.windows.clear()
        self.windows.append(_undropped(window))
        while len(self.windows) > 1 and self._is_too_long():
            self.windows.popleft()

    def _is_too_long(self) -> bool:
        """Tell whether enough is left without the oldest window."""
        rest = self.num_iterations - self.windows[0].num_iterations
        num_spans = sum(window.num_spans for window in self.windows)
        least = min(LEAST_ITERATIONS, self.kept_iterations)
        return rest >= self.kept_iterations or (num_spans > self.most_spans and rest >= least)

    @property
    def headers(self) -> dict[int, RankHeader]:
        """Return the newest header of each rank."""
        return headers_of(self.windows)

    def judge(self) -> Judgement:
        """Align, observe and judge all windows. Raises InputError for ranks that contradict."""
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
        """Return all windows as one trace. Raises InputError for ranks that contradict."""
        from megascan.reader.trace import build_trace

        segments = [self._joined(rank) for rank in sorted(self.headers)]
        run_id = self.windows[-1].run_id
        return build_trace(self.folders[0], segments, run_id, allow_missing_ranks=True)

    def _newest_probes(self) -> Probes | None:
        """Return what lies next to the rank files; nothing is read again that has not changed."""
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
    """Forget that files lost windows to their bound: those of the ring are still in memory."""
    segments = {
        rank: replace(
            segment,
            header=replace(segment.header, num_windows_dropped=0, last_iteration_dropped=0),
        )
        for rank, segment in window.segments.items()
        if segment.header.last_iteration_dropped
    }
    return replace(window, segments={**window.segments, **segments}) if segments else window
