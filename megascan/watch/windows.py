"""Join windows of ranks into windows of the job while the ranks still write.

A window is handed out when all ranks have it:

    rank 0   w1 w2 w3
    rank 1   w1 w2 w3          w1, w2 are handed out; w3 waits for rank 2
    rank 2   w1 w2

A rank that stays behind by `PATIENCE_WINDOWS` is absent: windows are handed out without waiting for
this rank until it writes again. The ranks' files may lie in several folders (one a host). Of
several runs the newest counts, by the origin of its clocks, as in `megascan.reader`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascan.header import RankHeader
from megascan.reader.growing import GrowingFile, Wanted, polled
from megascan.reader.segments import Segment, event_schema
from megascan.reader.templates import Templates
from megascan.schema import SPAN_COLUMNS
from megascan.timeline import numbers
from megascan.topology import RANK_FILE_PATTERNS

PATIENCE_WINDOWS = 2
"""A rank without a window is absent when other ranks have written this many later windows."""
_MOST_WAITING = 64
"""Windows that wait for ranks at most; the oldest are dropped."""


@dataclass(frozen=True, kw_only=True)
class JobWindow:
    """One traced window of the job; `missing` ranks have not written it."""

    run_id: str
    first_iteration: int
    last_iteration: int
    segments: Mapping[int, Segment]
    missing: tuple[int, ...] = ()
    start_unix_ns: int
    end_unix_ns: int

    @classmethod
    def of(cls, segments: Mapping[int, Segment], missing: tuple[int, ...]) -> JobWindow:
        """Join the ranks' parts of a window; its times are the first rank's (0 without spans)."""
        windows = [segment.windows[0] for segment in segments.values()]
        first = next(iter(segments.values()))
        start = numbers(first.spans, "start_ns")
        end = start + numbers(first.spans, "duration_ns")
        return cls(
            run_id=first.header.run_id,
            first_iteration=min(window.first_iteration for window in windows),
            last_iteration=max(window.last_iteration for window in windows),
            segments=dict(sorted(segments.items())),
            missing=missing,
            start_unix_ns=int(start.min()) if len(start) else 0,
            end_unix_ns=int(end.max()) if len(end) else 0,
        )

    @property
    def num_iterations(self) -> int:
        """Return the number of traced iterations."""
        return self.last_iteration - self.first_iteration + 1

    @property
    def num_spans(self) -> int:
        """Return the number of spans of all ranks."""
        return sum(segment.spans.num_rows for segment in self.segments.values())


def headers_of(windows: Iterable[JobWindow]) -> dict[int, RankHeader]:
    """Return the newest header of each rank in some windows, the oldest window first."""
    return {rank: segment.header for window in windows for rank, segment in window.segments.items()}


_IS_RANK_FILE = re.compile("|".join(fnmatch.translate(one) for one in RANK_FILE_PATTERNS)).match


def _rank_files(folder: Path) -> list[str]:
    """Return the paths of a folder's rank files, sorted; none if it cannot be listed (yet).

    The folder is scanned in one pass over plain names, as this is done every second, also for
    thousands of ranks.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if _IS_RANK_FILE(entry.name))
    except OSError:
        return []


@dataclass
class JobFiles:
    """The rank files of one job; `poll` hands out windows and does not keep them."""

    folders: Sequence[Path]
    wanted: Wanted
    run_id: str = ""
    headers: dict[int, RankHeader] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    num_windows_dropped: int = 0
    _files: dict[str, GrowingFile] = field(default_factory=dict)
    _waiting: dict[int, dict[int, Segment]] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _handed: int = -1
    _parser: Templates = field(default_factory=lambda: Templates(event_schema(SPAN_COLUMNS)))

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job; 0 before the first header."""
        return next((header.world_size for header in self.headers.values()), 0)

    @property
    def newest_iteration(self) -> int:
        """Return the last iteration of the newest window of any rank; 0 without windows."""
        return max(self._last.values(), default=0)

    @property
    def behind(self) -> tuple[int, ...]:
        """Return the ranks that have not written the newest window."""
        newest, ranks = self.newest_iteration, range(self.world_size)
        return tuple(rank for rank in ranks if self._last.get(rank, 0) < newest)

    @property
    def is_closed(self) -> bool:
        """Return whether every rank has closed its file: the job has ended regularly."""
        there = [file for file in self._files.values() if file.is_there]
        return (
            bool(there)
            and len(there) >= self.world_size > 0
            and all(file.is_closed for file in there)
        )

    @property
    def changed_unix_s(self) -> float:
        """Return when any rank last wrote."""
        return max((file.changed_unix_s for file in self._files.values()), default=0.0)

    @property
    def has_more(self) -> bool:
        """Return whether finished windows are left for the next call of `poll`."""
        return any(file.has_more for file in self._files.values())

    def poll(self) -> list[JobWindow]:
        """Return the windows that have become whole since the last call, in their order."""
        for folder in self.folders:
            for path in _rank_files(folder):
                if path not in self._files:
                    self._files[path] = GrowingFile(Path(path), self.wanted, self._parser)
        for segment in polled(list(self._files.values()), self._parser):
            self._take(segment)
        return list(self._whole())

    def problems(self) -> list[str]:
        """Return what could not be read since the last call, a sentence each."""
        found = [file.problem for file in self._files.values() if file.problem]
        for file in self._files.values():
            file.problem = ""
        return found

    def _take(self, segment: Segment) -> None:
        header, window = segment.header, segment.windows[0]
        if header.run_id != self.run_id and not self._is_newer_run(header):
            return
        self.headers[header.rank] = header
        self._last[header.rank] = max(window.last_iteration, self._last.get(header.rank, 0))
        if window.last_iteration > self._handed:
            self.absent.discard(header.rank)
            self._waiting.setdefault(window.first_iteration, {})[header.rank] = segment

    def _is_newer_run(self, header: RankHeader) -> bool:
        """Return whether a header is of a newer run, by its clocks' origin; if so, begin anew."""
        known = [each.clock.origin_unix_ns for each in self.headers.values()]
        if known and header.clock.origin_unix_ns < max(known):
            return False
        self.run_id, self.headers, self._last = header.run_id, {}, {}
        self._waiting, self.absent, self._handed = {}, set(), -1
        return True

    def _whole(self) -> Iterator[JobWindow]:
        for first in sorted(self._waiting):
            there = self._waiting[first]
            missing = tuple(sorted(set(range(self.world_size)) - set(there)))
            if set(missing) <= self.absent or self._is_given_up(first):
                self.absent |= set(missing)
                window = JobWindow.of(self._waiting.pop(first), missing)
                self._handed = max(self._handed, window.last_iteration)
                yield window
            else:
                break
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[min(self._waiting)]
            self.num_windows_dropped += 1

    def _is_given_up(self, first: int) -> bool:
        """Return whether ranks without a window are given up: other ranks have gone on without it.

        Files are read one after the other, some 100 kB at a time: while any file has more to read,
        no rank is given up.
        """
        later = [begin for begin in self._waiting if begin > first]
        return len(later) >= PATIENCE_WINDOWS and not self.has_more
