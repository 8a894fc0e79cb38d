"""Rank files as bytes: one line an event, appended a window at a time, valid after every append.

    [⏎ header ,⏎ names ,⏎ spans … ,⏎ window             ← after each append (⏎ is a line end)
    … ⏎]⏎                                               ← after a clean close

A separator stands before each event but the first, so a process killed at any moment leaves at most
one incomplete line behind. In a compressed file, each append is one gzip member of this text. In
either form it can be found where appends begin and end, so that `RankFile` continues a file after a
kill, and `LimitedFile` drops the oldest windows without encoding the other windows again. Files of
earlier runs are moved into a subfolder, never overwritten.

A file with a limit uses only half of it; the other half is for a successor, which is written next
to the file and then replaces it in one step. So the disk never holds more than the limit, and a
kill at any moment leaves the old file or the new file, each complete.

    before   [ header  w1  w2  w3  w4 ]      and w5 would pass half the limit
    after    [ header' w4  w5 ]              header' says that 3 windows are gone

The successor keeps as many of the newest windows as fit into a third of the limit, so that each
window is copied about twice before it is dropped.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import orjson

from megascan.errors import OutputError
from megascan.header import Json, RankHeader, WindowRecord
from megascan.schema import HEADER_EVENT, WINDOW_EVENT, Track
from megascan.topology import rank_file_name

__all__ = [
    "DamagedError",
    "LimitedFile",
    "RankFile",
    "SpanRecord",
    "encode_header",
    "encode_spans",
    "encode_window",
    "rank_file_path",
    "set_earlier_run_aside",
    "write_ground_truth",
]

_GROUND_TRUTH_FILE = "ground-truth.json"


SpanRecord = tuple[str, str, int, int, int, Mapping[str, int | str]]
"""(kind, name, track, start_ns, duration_ns, arguments): times relative to the header's clock
origin.

Arguments have names of `schema.SPAN_COLUMNS`; arguments that do not apply are absent.
"""


def rank_file_path(folder: Path, header: RankHeader) -> Path:
    """Return the path of a rank's file in a trace folder; `.json.gz` if it is compressed."""
    name = rank_file_name(header.layout, header.coordinates)
    return folder / (f"{name}.gz" if header.trace.compress else name)


def _metadata(name: str, pid: int, arguments: Mapping[str, Json], tid: int = 0) -> bytes:
    return orjson.dumps({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments})


def encode_header(header: RankHeader) -> list[bytes]:
    """Return the lines that open a run: the header, and the names that Perfetto shows."""
    rank = header.rank
    label = f"rank {rank} {header.layout.label(rank)} {header.host}".rstrip()
    lines = [
        _metadata(HEADER_EVENT, rank, header.to_json()),
        _metadata("process_name", rank, {"name": label}),
    ]
    lines += [
        _metadata("thread_name", rank, {"name": track.name.lower()}, tid=track) for track in Track
    ]
    return lines


def encode_spans(rank: int, spans: Iterable[SpanRecord]) -> list[bytes]:
    """Return one Chrome `X` event a span.

    Times are µs with three decimals, so that a double keeps the nanosecond. All events are encoded
    in one call and then split: between two events stands ``},{"name":``, which no event can
    contain, as quotes in texts are escaped and arguments are no lists.
    """
    events = [
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
        for kind, name, track, start_ns, duration_ns, arguments in spans
    ]
    if not events:
        return []
    return orjson.dumps(events)[1:-1].replace(b'},{"name":', b'},\n{"name":').split(b",\n")


def encode_window(rank: int, record: WindowRecord) -> bytes:
    """Return the line that ends a window; a window without it does not count."""
    return _metadata(WINDOW_EVENT, rank, record.to_json())


CLOSING = b"\n]\n"
_TAIL_BYTES = 1 << 22
"""More bytes than any event has, including the header of a job of many thousand ranks."""
_CHUNK_BYTES = 1 << 20
_COMPRESSION_LEVEL = 3
"""Takes half the time of the default level, for a tenth more bytes."""
_GZIP_WINDOW = zlib.MAX_WBITS | 16


class DamagedError(OSError):
    """An existing file cannot be continued: its compressed data is damaged."""


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` of a file; `first` and `last` are the first and last event in them."""

    begin: int
    end: int
    first: bytes
    last: bytes


class Framing(Protocol):
    """A way to store text in a file: plain or gzip."""

    def pack(self, text: bytes) -> bytes:
        """Return the bytes of one append."""

    def complete_length(self, file: BinaryIO) -> int:
        """Return a file's length without its closing bracket and what a kill left incomplete."""

    def pieces(self, file: BinaryIO) -> Iterator[Piece]:
        """Yield the pieces of a file; each header and window begins a piece."""


class Plain:
    """Text as it is; a piece is a line with the separator before it."""

    def pack(self, text: bytes) -> bytes:
        """Return the text."""
        return text

    def complete_length(self, file: BinaryIO) -> int:
        """Return the length up to the last complete event."""
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        return start + _complete_length(file.read())

    def pieces(self, file: BinaryIO) -> Iterator[Piece]:
        """Yield every line."""
        file.seek(0)
        begin = end = 0
        for line in file:
            event = line.rstrip(b",\n")
            yield Piece(begin, end + len(event), event, event)
            begin, end = end + len(event), end + len(line)


class Gzip:
    """One gzip member an append; a piece is a member."""

    def pack(self, text: bytes) -> bytes:
        """Return the text as a gzip member."""
        return gzip.compress(text, _COMPRESSION_LEVEL, mtime=0)

    def complete_length(self, file: BinaryIO) -> int:
        """Return the length up to the last complete member with events; raise DamagedError."""
        end = 0
        for begin, member_end, text in _members(file):
            end = begin if text == CLOSING else member_end
        return end

    def pieces(self, file: BinaryIO) -> Iterator[Piece]:
        """Yield every complete member; raise DamagedError."""
        for begin, end, text in _members(file):
            events = text.strip(b"[],\n")
            yield Piece(begin, end, events.partition(b",\n")[0], events.rpartition(b"\n")[2])


def _complete_length(tail: bytes) -> int:
    """Return the length of a tail up to its last complete event; 0 if it is only a bracket."""
    start = tail.rfind(b"\n") + 1
    try:
        orjson.loads(tail[start:])
    except orjson.JSONDecodeError:
        tail = tail[:start].removesuffix(b"]\n").rstrip(b",\n")
    return 0 if tail == b"[" else len(tail)


def _members(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield (begin, end, text) of each complete gzip member, up to a member that is cut off."""
    file.seek(0)
    begin = position = 0
    inflater, parts, data = zlib.decompressobj(_GZIP_WINDOW), list[bytes](), b""
    while data or (data := file.read(_CHUNK_BYTES)):
        try:
            parts.append(inflater.decompress(data))
        except zlib.error as error:
            raise DamagedError(f"compressed data is damaged at byte {begin} ({error})") from error
        position += len(data) - len(inflater.unused_data)
        data = inflater.unused_data
        if inflater.eof:
            yield begin, position, b"".join(parts)
            begin = position
            inflater, parts = zlib.decompressobj(_GZIP_WINDOW), []


def set_earlier_run_aside(path: Path) -> None:
    """Move an existing rank file into a subfolder with its run id as name; overwrite nothing."""
    if path.exists():
        _move_into(path.parent / _run_id_of(path), path)


def write_ground_truth(truth: Mapping[str, Json], folder: Path) -> Path:
    """Write which faults were planted next to the rank files; move an earlier run's file aside.

    Raises OutputError if the file cannot be written.
    """
    path = folder / _GROUND_TRUTH_FILE
    partial = path.with_name(f".{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(orjson.dumps(truth, option=orjson.OPT_INDENT_2) + b"\n")
        _set_earlier_truth_aside(path)
        return partial.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _set_earlier_truth_aside(path: Path) -> None:
    """Move an existing record of planted faults into a subfolder with its run id as name."""
    if not path.exists():
        return
    try:
        run_id = str(orjson.loads(path.read_bytes())["run_id"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        run_id = _UNKNOWN_RUN
    _move_into(path.parent / run_id, path)


_UNKNOWN_RUN = "unknown-run"


def _move_into(folder: Path, path: Path) -> None:
    folder.mkdir(exist_ok=True)
    name, dot, suffixes = path.name.partition(".")
    target = folder / path.name
    number = 1
    while target.exists():
        number += 1
        target = folder / f"{name}.{number}{dot}{suffixes}"
    path.rename(target)


def _run_id_of(path: Path) -> str:
    """Return the run id of a file's first header, or "unknown-run" if it has no such header."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in (file.readline(), file.readline()):
                try:
                    record = orjson.loads(line.strip().rstrip(b","))
                    return str(record["args"]["run_id"])
                except (orjson.JSONDecodeError, KeyError, TypeError):
                    continue
    except (EOFError, gzip.BadGzipFile, zlib.error):  # cut off before its header was whole
        pass
    return _UNKNOWN_RUN


class RankFile:
    """Appends to one rank's file; every `append` is durable when it returns.

    Opening an existing file continues it (a resumed run): a closing bracket and an incomplete last
    line, which a kill leaves, are removed first. Raises OSError as the file system does,
    DamagedError if compressed data cannot be continued; an append that fails half-way is undone as
    far as possible.
    """

    def __init__(self, path: Path, *, compress: bool = False) -> None:
        self.path = path
        self.framing: Framing = Gzip() if compress else Plain()
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self.size = self._trim()
        """Bytes in the file."""

    def _trim(self) -> int:
        """Cut the file back to the end of its last complete event; return that position."""
        with self.path.open("rb") as reading:
            keep = self.framing.complete_length(reading)
        self._file.truncate(keep)
        return self._file.seek(keep)

    def pack(self, lines: Sequence[bytes], *, first: bool) -> bytes:
        """Return the bytes that an append of events writes; `first` if the file is empty."""
        return self.framing.pack((b"[\n" if first else b",\n") + b",\n".join(lines))

    def append(self, lines: Sequence[bytes]) -> None:
        """Write events in one piece and wait until they are on disk."""
        if lines:
            self.write(self.pack(lines, first=not self.size))

    def write(self, data: bytes) -> None:
        """Write packed bytes, and wait until they are on disk."""
        try:
            _write_all(self._file, data)
            self._check_reachable()
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self.size)
                self._file.seek(self.size)
            raise
        self.size += len(data)

    def become(self, parts: Sequence[bytes | tuple[int, int]], temporary: Path) -> None:
        """Replace the whole content at once by parts: bytes, or (begin, end) of the old content.

        At every moment the file has the old or the new content. If the new content cannot be
        written to `temporary`, raises OSError and leaves the old content.
        """
        replacement = temporary.open("w+b", buffering=0)
        try:
            for part in parts:
                data = part if isinstance(part, bytes) else self._read(*part)
                _write_all(replacement, data, durably=False)
            os.fsync(replacement.fileno())
            self._check_reachable()
            temporary.replace(self.path)
        except OSError:
            replacement.close()
            temporary.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = replacement
        self.size = replacement.seek(0, os.SEEK_END)
        _make_durable(self.path.parent)

    def _read(self, begin: int, end: int) -> bytes:
        with self.path.open("rb") as reading:
            reading.seek(begin)
            return reading.read(end - begin)

    def _check_reachable(self) -> None:
        """Raise OSError if the file was deleted, as nothing can read what is written then."""
        if not self.path.exists() or not os.path.samestat(
            self.path.stat(), os.fstat(self._file.fileno())
        ):
            raise FileNotFoundError(f"{self.path} was removed while it was written")

    def close(self) -> None:
        """Close the JSON array and the file."""
        try:
            if self.size:
                self.write(self.framing.pack(CLOSING))
        finally:
            self._file.close()


def _write_all(file: BinaryIO, data: bytes, *, durably: bool = True) -> None:
    written = 0
    while written < len(data):
        written += file.write(data[written:])
    if durably:
        os.fsync(file.fileno())


def _make_durable(folder: Path) -> None:
    """Make a rename in the folder durable, if the file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_HEADER_GROWTH_BYTES = 1024
"""Room for a header to grow by the digits of the numbers of dropped windows."""


@dataclass(frozen=True)
class _Place:
    """Bytes of a window in the file, and its last iteration."""

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
        """Append a window, whose record is its last line; return False if it can never fit.

        The window is durable on return. Raises OSError and leaves the file as it was.
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
    """Return runs with as many of the newest windows as fit; the last run is always kept."""
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
    """Return the run's header after its `num_dropped` oldest windows were dropped."""
    if not num_dropped:
        return run.header
    return replace(
        run.header,
        num_windows_dropped=run.header.num_windows_dropped + num_dropped,
        last_iteration_dropped=run.windows[num_dropped - 1].last_iteration,
    )


def _runs(file: RankFile) -> Iterator[_Run]:
    """Read the runs that an earlier process left in the file."""
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
            if header or window or b'"ph":"X"' not in piece.last:
                begin = piece.end
    if run is not None:
        yield run


def _arguments(event: bytes, name: str) -> dict[str, Json]:
    """Return the arguments of an event if it has the name, else an empty dict."""
    if f'"{name}"'.encode() not in event[:80]:
        return {}
    return dict(orjson.loads(event)["args"])
