"""Follow one of our rank files while its job writes it: hand out each window once it is finished.

    looked at      [ header  w1  w2  w3 ]              hands out w1, w2, w3
    a second later [ header  w1  w2  w3  w4  w5▏       hands out w4; w5 is not whole yet

Changes of the file are followed, too: a clean close and a resumed run (the bracket at the end goes,
a second header comes), a successor that replaces the file (`--trace-max-bytes`), a fresh run after
the old file was moved away, truncation, deletion. A window is known by its run and its last
iteration, so no window is handed out twice, whatever was put in the file's place.

A long history is not read: the first look goes backwards from the end to the last windows wanted,
and takes the run's header from the beginning. Gzip files are walked in the same way, member by
member. Nothing is mapped into memory: a mapped file that shrinks would kill the process.
"""

from __future__ import annotations

import os
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import orjson

from megascan.errors import InputError
from megascan.header import RankHeader, WindowRecord
from megascan.reader.lines import BYTE_ORDER_MARK, Block, parse_block
from megascan.reader.rank_files import FileRuns, follow, follow_together, read_mark
from megascan.reader.segments import Segment, event_schema
from megascan.reader.templates import Templates
from megascan.schema import HEADER_EVENT, SPAN_COLUMNS, WINDOW_EVENT

_WINDOW_MARK = f'"name":"{WINDOW_EVENT}"'.encode()
_HEADER_MARK = f'"name":"{HEADER_EVENT}"'.encode()
_CLOSING = b"]"
_AROUND = b"[,\n"
_TOGETHER_BYTES = 2 << 20
"""Text that is parsed in one go."""
_STEP_BYTES = 1 << 18
"""Bytes of a file that are read at once: those of thousands of files must fit into memory."""
_HEADER_BYTES = 1 << 22
"""More than the header of a job of many thousand ranks."""
_HOLE_S = 30.0
"""How long zeros in a file may stay: over NFS a file may be long before its writes arrive."""
_TRACE_BYTES = 64
"""Bytes before the current place; if they change, the file is another file."""
_MEMBER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
"""First bytes of each gzip member of a rank file (no name, no time)."""
_GZIP_WINDOW = zlib.MAX_WBITS | 16


@dataclass(frozen=True)
class Wanted:
    """How far back the first look goes: the last `num_windows`, but of the run `run_id` only
    windows after `after_iteration`.
    """

    num_windows: int
    run_id: str = ""
    after_iteration: int = -1

    def reaches(self, window: WindowRecord, num_windows: int) -> bool:
        """Return whether a window with `num_windows` later windows is still wanted."""
        seen = window.run_id == self.run_id and window.last_iteration <= self.after_iteration
        return num_windows < self.num_windows and not seen


@dataclass
class _Place:
    """Place in a file where reading goes on, and the bytes before it."""

    offset: int = 0
    before: bytes = b""
    inode: int = -1
    seen: tuple[int, int] = (-1, -1)
    """Size and time of change at the last look."""


@dataclass
class GrowingFile:
    """One rank's file; `poll` returns the windows that were finished since the last call.

    `problem` is a sentence about what could not be read, set once; `is_closed` tells that the job
    has closed the file.
    """

    path: Path
    wanted: Wanted
    parser: Templates = field(default_factory=lambda: Templates(event_schema(SPAN_COLUMNS)))
    is_closed: bool = False
    is_there: bool = False
    has_more: bool = False
    """Whether the last call of `poll` left finished windows for the next call."""
    changed_unix_s: float = 0.0
    problem: str = ""
    header: RankHeader | None = None
    _place: _Place = field(default_factory=_Place)
    _read: tuple[int, int] = (0, 0)
    """Begin and end of the text that was read last."""
    _hole_since_s: float | None = None
    """When zeros were first seen in the bytes to read next."""
    _runs: FileRuns | None = None
    _handed: dict[str, int] = field(default_factory=dict)
    """Last iteration handed out, by run."""

    def __post_init__(self) -> None:
        self._handed[self.wanted.run_id] = self.wanted.after_iteration

    @property
    def runs(self) -> FileRuns:
        """Return the follower of the file's marks; text must have been read before."""
        assert self._runs is not None
        return self._runs

    def poll(self) -> list[Segment]:
        """Return finished windows in the order of the file, at most some 100 kB at once."""
        return list(polled([self], self.parser))

    def read(self) -> bytes:
        """Return the text of windows that were finished since the last call, to be given to `take`.

        The text is empty if no window was finished.
        """
        try:
            with open(self.path, "rb", opener=_without_waiting) as file:
                return self._look(file)
        except FileNotFoundError:
            self.is_there = self.has_more = False
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror or error}; tried again"
        return b""

    def take(self, text: bytes, follow_it: Callable[[], None] | None = None) -> list[Segment]:
        """Return the windows of a text from `read`; `follow_it` follows a text parsed already."""
        return [segment for segment in self._parsed(text, follow_it) if self._is_new(segment)]

    def _is_new(self, segment: Segment) -> bool:
        run, last = segment.header.run_id, segment.windows[0].last_iteration
        if last <= self._handed.get(run, -1):
            return False
        self._handed[run] = last
        return True

    def _look(self, file: BinaryIO) -> bytes:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("is a pipe or a device, not a file")
        self.is_there, self.changed_unix_s = True, status.st_mtime
        now = (status.st_size, status.st_mtime_ns)
        if now == self._place.seen and status.st_ino == self._place.inode and not self.has_more:
            return b""
        if self._is_another(file, status):
            self._begin(file, status)
        text, end, whole = self._next_text(file)
        behind = 0 if text or not _is_gzip(file) else _next_whole_member(file, self._place.offset)
        if self._waits_for(b"\0" in text or behind > 0):
            self._place.seen, self.has_more = (-1, -1), False
            return b""
        if behind:
            self._leave_out(self._place.offset, behind, "compressed data that is damaged or gone")
            self._place.offset = behind
            text, end, whole = self._next_text(file)
        self.has_more = end > self._place.offset and not whole
        self._place.seen = now
        if text:
            self._read = self._place.offset, end
            self._place.offset = end
            file.seek(max(0, end - _TRACE_BYTES))
            self._place.before = file.read(min(_TRACE_BYTES, end))
        self.is_closed = whole and self._ends_closed(file)
        return text.removeprefix(BYTE_ORDER_MARK).strip(_AROUND)

    def _waits_for(self, has_hole: bool) -> bool:
        """Return whether to wait for a hole (zeros, or a torn member before a whole one) to be
        filled; after _HOLE_S it is damage.
        """
        if not has_hole:
            self._hole_since_s = None
            return False
        now = time.monotonic()
        self._hole_since_s = now if self._hole_since_s is None else self._hole_since_s
        return now - self._hole_since_s < _HOLE_S

    def _is_another(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Return whether the file is not the one that was read: new, replaced or truncated."""
        place = self._place
        if self._runs is None or status.st_ino != place.inode or status.st_size < place.offset:
            return True
        file.seek(max(0, place.offset - len(place.before)))
        return file.read(len(place.before)) != place.before

    def _begin(self, file: BinaryIO, status: os.stat_result) -> None:
        """Find the first wanted window, and the header before it."""
        marks = _backwards(file, _marks_in_members if _is_gzip(file) else _marks_in)
        offset, header = _first_wanted(file, marks, self.wanted)
        self._runs = FileRuns(self.path)
        if header is not None:
            self.header = header
            self._runs.mark(header, 1)
        self._place = _Place(offset=offset, inode=status.st_ino)

    def _next_text(self, file: BinaryIO) -> tuple[bytes, int, bool]:
        """Return text up to a window's end, the place of that end, and whether nothing follows."""
        return (_next_members if _is_gzip(file) else _next_lines)(file, self._place.offset)

    def _parsed(self, text: bytes, follow_it: Callable[[], None] | None) -> list[Segment]:
        try:
            if follow_it is not None:
                follow_it()
            elif (events := parse_block(Block(bytearray(text), 1), self.parser)) is not None:
                follow(self.runs, events, self.path)
        except InputError as error:
            found = self.runs.take_finished()
            self._leave_out(*self._read, str(error))
            return found  # the windows before the damage
        found = self.runs.take_finished()
        if found:
            self.header = found[-1].header
        return found

    def _leave_out(self, begin: int, end: int, reason: str) -> None:
        """Note bytes that are left out, and go on with the header that is known."""
        where = "" if str(self.path) in reason else f"{self.path}: "
        self.problem = f"{where}bytes {begin:,} to {end:,} were left out: {reason}"
        self._runs = FileRuns(self.path)
        if self.header is not None:
            self._runs.mark(self.header, 1)

    def _ends_closed(self, file: BinaryIO) -> bool:
        file.seek(self._place.offset)
        rest = file.read(_STEP_BYTES)
        if rest.startswith(_MEMBER):
            rest = b"".join(text for _, _, text in _members(rest))
        return rest.strip() == _CLOSING


def polled(files: Iterable[GrowingFile], parser: Templates) -> Iterator[Segment]:
    """Yield the segments that `poll` of each file would return; parse short texts in one go.

    Parsing 100 spans takes 5 ms, and so does parsing 1,000 spans: the cost is by column.
    """
    batch: list[tuple[GrowingFile, bytes]] = []
    for file in files:
        if text := file.read():
            batch.append((file, text))
        if sum(len(each) for _, each in batch) > _TOGETHER_BYTES:
            yield from _taken(batch, parser)
            batch = []
    yield from _taken(batch, parser)


def _taken(batch: Sequence[tuple[GrowingFile, bytes]], parser: Templates) -> Iterator[Segment]:
    together = _followed_together(batch, parser) if len(batch) > 1 else None
    for number, (file, text) in enumerate(batch):
        yield from file.take(text, together[number] if together else None)


def _followed_together(
    batch: Sequence[tuple[GrowingFile, bytes]], parser: Templates
) -> list[Callable[[], None]] | None:
    """Return a function for each text that follows it; None if any text has an unusual layout."""
    whole = bytearray(b"\n".join(text for _, text in batch))
    events = parse_block(Block(whole, 1), parser)
    counts = [text.count(b"\n") + 1 for _, text in batch]
    files = [file for file, _ in batch]
    return follow_together([file.runs for file in files], events, counts, [f.path for f in files])


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting: a pipe without a writer would block otherwise."""
    return os.open(path, flags | os.O_NONBLOCK)


def _is_gzip(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(2) == _MEMBER[:2]


def _next_lines(file: BinaryIO, offset: int) -> tuple[bytes, int, bool]:
    """Return the text from `offset` to the last whole window mark within a step.

    If no mark is within a step, the text goes to the first mark after that.
    """
    file.seek(offset)
    text = b""
    while piece := file.read(max(_STEP_BYTES, len(text))):
        text += piece
        end = _last_window_end(text)
        if end:
            whole = not file.read(1)
            return text[:end], offset + end, whole
    return b"", offset, True


def _last_window_end(text: bytes) -> int:
    """Return where the last complete window mark of a text ends; 0 without a complete mark."""
    at = text.rfind(_WINDOW_MARK)
    while at >= 0:
        begin, newline = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
        end = newline if newline >= 0 else len(text)
        if _is_json(text[begin:end]):
            return end - text[begin:end].endswith(b",")
        at = text.rfind(_WINDOW_MARK, 0, at)
    return 0


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line.rstrip(b","))
    except orjson.JSONDecodeError:
        return False
    return True


def _next_members(file: BinaryIO, offset: int) -> tuple[bytes, int, bool]:
    """Return the text of complete members from `offset` on, up to the end of a window."""
    raw, parts, end = b"", [], offset
    file.seek(offset)
    while piece := file.read(max(_STEP_BYTES, len(raw))):
        raw += piece
        parts = list(_members(raw))
        ends = [at for _, at, text in parts if _WINDOW_MARK in text]
        if ends:
            end = offset + ends[-1]
            text = b"".join(part for _, at, part in parts if at <= ends[-1])
            return text, end, not file.read(1)
    return b"", offset, True


def _next_whole_member(file: BinaryIO, offset: int) -> int:
    """Return where a complete member begins after a damaged or torn member, 0 if none does.

    Members are written one after the other, so data missing before a complete member was lost.
    """
    file.seek(offset)
    raw = file.read()
    whole_until = max((end for _, end, _ in _members(raw)), default=0)
    at = raw.find(_MEMBER, whole_until + 1)
    while at >= 0 and next(_members(raw[at:]), None) is None:
        at = raw.find(_MEMBER, at + 1)
    return offset + at if at >= 0 else 0


def _members(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (begin, end, text) of complete gzip members up to the first damaged or torn member."""
    begin = 0
    while begin < len(raw):
        inflater = zlib.decompressobj(_GZIP_WINDOW)
        try:
            text = inflater.decompress(raw[begin:])
        except zlib.error:
            return
        if not inflater.eof:
            return
        end = len(raw) - len(inflater.unused_data)
        yield begin, end, text
        begin = end


@dataclass(frozen=True)
class _Mark:
    """A window's or run's record, and where the text after it begins."""

    end: int
    record: RankHeader | WindowRecord


def _first_wanted(
    file: BinaryIO, marks: Iterator[_Mark], wanted: Wanted
) -> tuple[int, RankHeader | None]:
    """Return where the wanted windows begin, and the header in force there.

    The header is None if reading starts at the file's begin and meets the header itself.
    """
    start, num_windows = 0, 0
    run_id = ""
    for mark in marks:
        if isinstance(mark.record, RankHeader):
            if run_id and mark.record.run_id == run_id:
                return start, mark.record
            continue
        if run_id:
            continue
        if wanted.reaches(mark.record, num_windows):
            num_windows += 1
        else:
            start, run_id = mark.end, mark.record.run_id
            first = first_header(file)
            if first is not None and first.run_id == run_id:
                return start, first
    return 0, None


def first_header(file: BinaryIO) -> RankHeader | None:
    """Return the header at a rank file's beginning; None if no header can be read there."""
    file.seek(0)
    text = file.read(_HEADER_BYTES)
    if text.startswith(_MEMBER[:2]):
        text = next((part for _, _, part in _members(text)), b"")
    for line in text.split(b"\n", 2)[:2]:
        record = _record(line.strip(b"[,"), "the first line")
        if isinstance(record, RankHeader):
            return record
    return None


def _record(line: bytes, where: str) -> RankHeader | WindowRecord | None:
    """Read a mark from a line; return None if the line is no mark, or is damaged."""
    if _WINDOW_MARK not in line and _HEADER_MARK not in line:
        return None
    try:
        return read_mark(line, where)
    except InputError:
        return None


def _backwards(
    file: BinaryIO, marks_in: Callable[[bytes, int], Generator[_Mark, None, bytes]]
) -> Iterator[_Mark]:
    """Yield headers and window marks of a file from its end to its beginning.

    `marks_in` yields those of a part of the file, the last one first, given the place where the
    part begins; it returns the beginning of the part that belongs to the part before.
    """
    end = file.seek(0, os.SEEK_END)
    rest = b""
    while end > 0:
        begin = max(0, end - _STEP_BYTES)
        file.seek(begin)
        rest = yield from marks_in(file.read(end - begin) + rest, begin)
        end = begin


def _marks_in(text: bytes, begin: int) -> Generator[_Mark, None, bytes]:
    """Yield the marks of whole lines."""
    cut = 0 if begin == 0 else text.find(b"\n") + 1 or len(text)
    at = len(text)
    while (at := max(text.rfind(_WINDOW_MARK, cut, at), text.rfind(_HEADER_MARK, cut, at))) >= 0:
        line_begin, newline = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
        line_end = newline if newline >= 0 else len(text)
        line = text[line_begin:line_end]
        record = _record(line.rstrip(b","), "a mark")
        if record is not None:
            yield _Mark(begin + line_end - line.endswith(b","), record)
    return text[:cut]


def _marks_in_members(raw: bytes, begin: int) -> Generator[_Mark, None, bytes]:
    """Yield the marks of whole gzip members, which are found by their first bytes."""
    at = len(raw)
    while (at := raw.rfind(_MEMBER, 0, at)) >= 0:
        member = next(_members(raw[at:]), None)
        if member is None:
            continue
        for line in reversed(member[2].split(b"\n")):
            record = _record(line.rstrip(b","), "a mark")
            if record is not None:
                yield _Mark(begin + at + member[1], record)
        raw = raw[:at]
    return raw
