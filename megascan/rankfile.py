"""Rank files as bytes: one line an event, appended a window at a time, valid after every append.

    [\\n header ,\\n names ,\\n spans … ,\\n window            ← after each append
    … \\n]\\n                                                 ← after a clean close

A separator stands before what it separates, so a process killed at any moment leaves at most one
incomplete line behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from megascan.header import Json, RankHeader, WindowRecord
from megascan.schema import HEADER_EVENT, WINDOW_EVENT, Track
from megascan.topology import rank_file_name

RANK_FILE_PATTERN = "benchmark-data-*.json"
_CLOSING = b"\n]\n"
_TAIL_BYTES = 1 << 22
"""More than any event is long, the header of a job of many thousand ranks included."""

SpanRecord = tuple[str, str, int, int, int, Mapping[str, int | str]]
"""(kind, name, track, start_ns, duration_ns, arguments): times relative to the header's clock
origin.

Arguments use the names of `schema.SPAN_COLUMNS` and hold only what applies.
"""


def rank_file_path(folder: Path, header: RankHeader) -> Path:
    """Where a rank's file lies in a trace folder."""
    return folder / rank_file_name(header.layout, header.coordinates)


def _metadata(name: str, pid: int, arguments: Mapping[str, Json], tid: int = 0) -> bytes:
    return orjson.dumps({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments})


def encode_header(header: RankHeader) -> list[bytes]:
    """Lines that open a run.

    The header and the names Perfetto shows when the file is opened by itself.
    """
    rank = header.rank
    label = f"rank {rank} {header.layout.label(rank)} {header.host}"
    lines = [
        _metadata(HEADER_EVENT, rank, header.to_json()),
        _metadata("process_name", rank, {"name": label}),
    ]
    lines += [
        _metadata("thread_name", rank, {"name": track.name.lower()}, tid=track) for track in Track
    ]
    return lines


def encode_spans(rank: int, spans: Iterable[SpanRecord]) -> Iterator[bytes]:
    """One Chrome `X` event a span.

    Μs with three decimals, so that a double keeps the nanosecond.
    """
    for kind, name, track, start_ns, duration_ns, arguments in spans:
        yield orjson.dumps(
            {
                "name": name,
                "cat": kind,
                "ph": "X",
                "ts": start_ns / 1000,
                "dur": duration_ns / 1000,
                "pid": rank,
                "tid": int(track),
                "args": arguments,
            }
        )


def encode_window(rank: int, record: WindowRecord) -> bytes:
    """The line that makes a window count."""
    return _metadata(WINDOW_EVENT, rank, record.to_json())


class RankFile:
    """Appends to one rank's file; every `append` is durable when it returns.

    Opening an existing file continues it (a resumed run): a closing bracket and an incomplete
    last line, which a kill in mid-write leaves, are taken off first. Raises OSError as the file
    system does; an append that failed half-way is taken back as far as possible.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._end = self._trim()

    def _trim(self) -> int:
        """Cut the file back to the end of its last complete event; return that position."""
        size = self._file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        self._file.seek(start)
        keep = start + _complete_length(self._file.read())
        self._file.truncate(keep)
        return self._file.seek(keep)

    def append(self, lines: Sequence[bytes]) -> None:
        """Write events in one piece and wait until they are on disk."""
        if not lines:
            return
        opening = b",\n" if self._end else b"[\n"
        self._write(opening + b",\n".join(lines))

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
            self._check_reachable()
        except OSError:
            self._take_back()
            raise
        self._end += len(data)

    def _check_reachable(self) -> None:
        """A file that was deleted takes writes for ever, and nobody will read them."""
        if not self._path.exists() or not os.path.samestat(
            self._path.stat(), os.fstat(self._file.fileno())
        ):
            raise FileNotFoundError(f"{self._path} was removed while it was written")

    def _take_back(self) -> None:
        with contextlib.suppress(OSError):
            self._file.truncate(self._end)

    def close(self) -> None:
        """Close the JSON array and the file."""
        try:
            if self._end:
                self._write(_CLOSING)
        finally:
            self._file.close()


def _complete_length(tail: bytes) -> int:
    """Length of a file's tail up to its last complete event; 0 when only the bracket is there."""
    start = tail.rfind(b"\n") + 1
    try:
        orjson.loads(tail[start:])
    except orjson.JSONDecodeError:
        tail = tail[:start].removesuffix(b"]\n").rstrip(b",\n")
    return 0 if tail == b"[" else len(tail)


def set_earlier_run_aside(path: Path) -> None:
    """Move an existing rank file into a subfolder named by its run id; nothing is overwritten."""
    if not path.exists():
        return
    folder = path.parent / _run_id_of(path)
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    number = 1
    while target.exists():
        number += 1
        target = folder / f"{path.stem}.{number}{path.suffix}"
    path.rename(target)


def _run_id_of(path: Path) -> str:
    """Run id of a file's first header, or "unknown-run" for a file that is not ours."""
    with path.open("rb") as file:
        for line in (file.readline(), file.readline()):
            try:
                record = orjson.loads(line.strip().rstrip(b","))
                return str(record["args"]["run_id"])
            except (orjson.JSONDecodeError, KeyError, TypeError):
                continue
    return "unknown-run"
