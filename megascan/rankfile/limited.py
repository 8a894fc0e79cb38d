"""A rank file that stays below a size: the oldest windows go, and the header says so.

The file keeps to half the limit, and the other half is for writing its successor beside it, which
then replaces it in one step. So the disk never holds more than the limit, and a kill at any moment
leaves the old file or the new one, each complete.

    before   [ header  w1  w2  w3  w4 ]      and w5 would pass half the limit
    after    [ header' w4  w5 ]              header' says that 3 windows are gone

The successor keeps as many of the newest windows as fit into a third of the limit, so that each
window is copied about twice before it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from megascan.header import Json, RankHeader, WindowRecord
from megascan.rankfile.encoding import encode_header
from megascan.rankfile.file import RankFile
from megascan.schema import HEADER_EVENT, WINDOW_EVENT

_HEADER_GROWTH_BYTES = 1024
"""A header that tells of dropped windows is longer by its digits."""


@dataclass(frozen=True)
class _Place:
    """Where a window lies, and its last iteration."""

    begin: int
    end: int
    last_iteration: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass
class _Run:
    header: RankHeader
    windows: list[_Place] = field(default_factory=list)


class LimitedFile:
    """Windows of one rank, at most `max_bytes` on disk at any moment; 0 is no limit."""

    def __init__(self, path: Path, *, compress: bool = False, max_bytes: int = 0) -> None:
        self._temporary = path.with_name(f".{path.name}.successor")
        self._temporary.unlink(missing_ok=True)
        self._max_bytes = max_bytes
        self._file = RankFile(path, compress=compress)
        self._runs = list(_runs(self._file)) if max_bytes else []

    def begin_run(self, header: RankHeader) -> None:
        """Append a run's header."""
        self._file.append(encode_header(header))
        if self._max_bytes:
            self._runs.append(_Run(header))

    def append(self, lines: Sequence[bytes], record: WindowRecord) -> bool:
        """Append a window, whose record is its last line; False when it can never fit.

        Durable when it returns. Raises OSError and leaves the file as it was.
        """
        data = self._file.pack(lines, first=False)
        if not self._max_bytes or self._file.size + len(data) <= self._max_bytes // 2:
            self._remember(self._file.size, len(data), record)
            self._file.write(data)
            return True
        return self._start_successor(data, record)

    def _remember(self, begin: int, size: int, record: WindowRecord) -> None:
        if self._max_bytes:
            self._runs[-1].windows.append(_Place(begin, begin + size, record.last_iteration))

    def _start_successor(self, data: bytes, record: WindowRecord) -> bool:
        num_header_bytes = sum(map(len, self._headers(self._runs))) + _HEADER_GROWTH_BYTES
        room_bytes = self._max_bytes // 2 - num_header_bytes - len(data)
        if room_bytes < 0:
            return False
        kept = _newest(self._runs, min(room_bytes, self._max_bytes // 3 - len(data)))
        headers = self._headers(kept)
        parts: list[bytes | tuple[int, int]] = []
        position = 0
        for header, run in zip(headers, kept, strict=True):
            parts.append(header)
            position += len(header)
            for number, window in enumerate(run.windows):
                parts.append((window.begin, window.end))
                run.windows[number] = replace(window, begin=position, end=position + window.size)
                position += window.size
        self._file.become([*parts, data], self._temporary)
        self._runs = kept
        self._remember(position, len(data), record)
        return True

    def _headers(self, runs: Sequence[_Run]) -> list[bytes]:
        return [
            self._file.pack(encode_header(run.header), first=number == 0)
            for number, run in enumerate(runs)
        ]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _newest(runs: Sequence[_Run], room_bytes: int) -> list[_Run]:
    """The runs with their newest windows, as many as fit; a run without any goes, but the last."""
    kept: list[_Run] = []
    for run in reversed(runs):
        windows: list[_Place] = []
        for window in reversed(run.windows):
            room_bytes -= window.size
            if room_bytes < 0:
                break
            windows.insert(0, window)
        if windows or run is runs[-1]:
            kept.insert(0, _Run(_without(run, len(run.windows) - len(windows)), windows))
    return kept


def _without(run: _Run, num_dropped: int) -> RankHeader:
    """The run's header when its oldest windows have gone."""
    if not num_dropped:
        return run.header
    return replace(
        run.header,
        num_windows_dropped=run.header.num_windows_dropped + num_dropped,
        last_iteration_dropped=run.windows[num_dropped - 1].last_iteration,
    )


def _runs(file: RankFile) -> Iterator[_Run]:
    """What an earlier process left in the file."""
    run: _Run | None = None
    begin = 0
    with file.path.open("rb") as reading:
        for piece in file.framing.pieces(reading):
            if header := _arguments(piece.first, HEADER_EVENT):
                if run is not None:
                    yield run
                run = _Run(RankHeader.from_json(header, str(file.path)))
            if window := _arguments(piece.last, WINDOW_EVENT):
                record = WindowRecord.from_json(window, str(file.path))
                if run is not None:
                    run.windows.append(_Place(begin, piece.end, record.last_iteration))
            if header or window or not _is_span(piece.last):
                begin = piece.end
    if run is not None:
        yield run


def _arguments(event: bytes, name: str) -> dict[str, Json]:
    """Arguments of the event if it is of this name, else nothing."""
    if f'"{name}"'.encode() not in event[:80]:
        return {}
    return dict(orjson.loads(event)["args"])


def _is_span(event: bytes) -> bool:
    return b'"ph":"X"' in event
