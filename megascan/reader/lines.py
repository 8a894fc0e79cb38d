"""Read files as blocks of whole lines, and lines of JSON events as Arrow columns.

Files are plain or gzipped, complete or cut off. Indented JSON arrays, as the original MegaScan and
the PyTorch profiler write them, are cut between their events, block by block:

    [                             {"schemaVersion": 1, …,
      {                             "traceEvents": [
        "name": …                   {
      },                              "ph": "X", …
      {                             },

A line end cannot stand inside a JSON string, so a bracket on a line of its own separates
records, which may then be read where they stand. A file with another layout is read as a whole
document. There is no loop over events; damaged lines are set aside by number.

What takes longest, splitting blocks into lines and lines into numbers (`templates.py`), is also
there in C (`lines.c`), for installs that could compile it: `compiled` says whether it is in use.
"""

from __future__ import annotations

import ctypes
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.json

from megascan.arrays import Bytes, Flags, Integers
from megascan.errors import InputError
from megascan.parallel import across_threads

SOURCE = Path(__file__).with_name("lines.c")
LIBRARY = SOURCE.with_name("liblines.so")
"""What `hatch_build.py` makes of SOURCE; no name that Python would import in the place of a module.
"""
SWITCH = "MEGASCAN_COMPILED"
"""Environment variable that switches the compiled part off if it is 0."""


@cache
def compiled() -> ctypes.CDLL | None:
    """Return the compiled part of the reader; None if it is not there, or switched off.

    This alone decides whether lines are read by it or by numpy, with equal results.
    """
    return None if os.environ.get(SWITCH) == "0" else loaded(LIBRARY, SOURCE)


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "source": (ctypes.c_uint32, ()),
    "split": (_SIZE, (_POINTER, _SIZE, _POINTER, _SIZE, _POINTER)),
    "new_kinds": (_POINTER, ()),
    "free_kinds": (None, (_POINTER,)),
    "learn": (ctypes.c_int32, (_POINTER, ctypes.c_char_p, _SIZE, _POINTER, _SIZE)),
    "scan": (_SIZE, (_POINTER, _POINTER, _SIZE)),
    "is_exact": (ctypes.c_int32, (_POINTER,)),
}
"""What each function of lines.c returns and takes."""


def loaded(path: Path, source: Path) -> ctypes.CDLL | None:
    """Load a library; return None if there is none, or if it was made of another source."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (returns, takes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = returns, takes
        is_of_source = library.source() == zlib.crc32(source.read_bytes())
    except (OSError, AttributeError):
        return None
    return library if is_of_source else None


def address(array: npt.NDArray[Any]) -> int:
    """Return where an array begins in memory."""
    return int(array.ctypes.data)


BLOCK_BYTES = 4 << 20
_LINE_END = 10
_WORD_BYTES = 8
_LINE_ENDS_BLANKED = bytes.maketrans(b"\n", b" ")
_GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Mark that some editors put before UTF-8, without meaning."""
_GZIP_WINDOW = zlib.MAX_WBITS | 16
_STEP_BYTES = 1 << 15
"""Compressed bytes to decompress at a time: behind each member's end, zlib copies what is left."""


@dataclass(frozen=True)
class Block:
    """Whole lines of a file, without the line end of the last line; `first_line` counts from 1.

    `torn` marks the last block of a compressed stream that was cut off. If `bounds` are given,
    event i stands in text[bounds[i]:bounds[i + 1]], on any number of lines, and `first_line`
    counts events.
    """

    text: bytearray
    first_line: int
    torn: bool = False
    bounds: Integers | None = None

    def one_a_line(self) -> Block:
        """Return the block with every event on a line of its own."""
        if self.bounds is None:
            return self
        text, cuts = self.text.translate(_LINE_ENDS_BLANKED), self.bounds[1:-1]
        np.frombuffer(text, dtype=np.uint8)[cuts - 1] = _LINE_END
        indent = text[cuts[0] : text.index(b"{", cuts[0])] if len(cuts) else b""
        return Block(text.replace(b"\n" + indent, b"\n"), self.first_line, self.torn)


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, decompressed; `torn` is as in a Block."""

    data: bytes
    torn: bool = False


def file_batches(paths: Sequence[Path], most_bytes: int, short_bytes: int) -> Iterator[list[Path]]:
    """Yield batches of up to `most_bytes` to read together; files above `short_bytes` are alone."""
    batch: list[Path] = []
    room = most_bytes
    for path in paths:
        size = path.stat().st_size
        if batch and (size > short_bytes or size > room):
            yield batch
            batch, room = [], most_bytes
        batch.append(path)
        room -= size
    if batch:
        yield batch


def read_start(path: Path, num_bytes: int) -> bytes:
    """Read the first bytes of a file's (decompressed) content. Raises InputError if unreadable."""
    start = _first_bytes(path, num_bytes)
    if not start.startswith(_GZIP_MAGIC):
        return start.removeprefix(BYTE_ORDER_MARK)
    collected = b""
    for piece in read_pieces(path, num_bytes):
        collected += piece.data
        if len(collected) >= num_bytes:
            break
    return collected[:num_bytes]


def read_blocks(path: Path, part: tuple[int, int] | None = None) -> Iterator[Block]:
    """Yield a file's content in blocks of whole lines, about BLOCK_BYTES each.

    Memory is bounded by the block and the longest line. Gzip is recognised by its first bytes;
    members that follow one another are read as one. If a stream was cut off, the last block has
    what is there, and is `torn`. For a plain file, `part` may give the first byte and the byte to
    stop before; lines then count from the part's begin. Raises InputError for a file that cannot be
    read or whose compression is damaged.
    """
    held: list[bytes] = []
    line, torn = 1, False
    for piece in read_pieces(path, BLOCK_BYTES) if part is None else _plain_pieces(path, *part):
        torn = torn or piece.torn
        cut = piece.data.rfind(b"\n")
        if cut < 0:
            held.append(piece.data)
            continue
        text = bytearray().join((*held, memoryview(piece.data)[:cut]))
        held = [piece.data[cut + 1 :]]
        yield Block(text, line)
        line += int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == _LINE_END)) + 1
    yield Block(bytearray().join(held), line, torn)


def read_all(path: Path) -> tuple[bytes, bool]:
    """Return a whole file's content, and whether its compressed stream was torn."""
    start = _first_bytes(path, BLOCK_BYTES)
    if len(start) < BLOCK_BYTES and not start.startswith(_GZIP_MAGIC):
        return start.removeprefix(BYTE_ORDER_MARK), False
    pieces = list(read_pieces(path, BLOCK_BYTES))
    return b"".join(piece.data for piece in pieces), any(piece.torn for piece in pieces)


_MORE_BYTES = 1 << 16
"""Bytes to read at a time from a pipe or a file that has grown: each call allocates all of them."""


def _first_bytes(path: Path, size: int) -> bytes:
    """Return up to `size` first bytes of a file as they are, by five system calls.

    For thousands of short files, Python's file objects take longer than reading the bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            start = os.read(descriptor, min(size, os.fstat(descriptor).st_size + 1))
            while len(start) < size and (
                more := os.read(descriptor, min(size - len(start), _MORE_BYTES))
            ):
                start += more
            return start
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> InputError:
    reason = error.strerror or str(error)
    return InputError(f"cannot read {path}: {reason}; check its path and permissions")


def read_pieces(path: Path, size: int) -> Iterator[Piece]:
    """Yield a file's (decompressed) bytes piece by piece. Raises InputError as `read_blocks`."""
    try:
        with path.open("rb") as file:
            first = file.read(size)
            raw = chain([first], iter(lambda: file.read(size), b""))
            gzipped = first.startswith(_GZIP_MAGIC)
            yield from _unmarked(
                _inflated(raw, size, path) if gzipped else (Piece(data) for data in raw)
            )
    except OSError as error:
        raise _unreadable(path, error) from error


def _plain_pieces(path: Path, begin: int, end: int) -> Iterator[Piece]:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            for at in range(begin, end, BLOCK_BYTES):
                yield Piece(file.read(min(BLOCK_BYTES, end - at)))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unmarked(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Leave out the BYTE_ORDER_MARK with which a text may begin."""
    for first in pieces:
        yield Piece(first.data.removeprefix(BYTE_ORDER_MARK), first.torn)
        yield from pieces


def _inflated(raw: Iterator[bytes], size: int, path: Path) -> Iterator[Piece]:
    """Decompress gzip members one after the other; yield pieces of `size` bytes, then the rest.

    A rank file has a member for each append, often a few kB, while parsing a piece takes some ms
    however short it is: many members make a piece. What stands in whole members before damage is
    yielded before the damage is raised.
    """
    inflater, inside = zlib.decompressobj(_GZIP_WINDOW), False
    held: list[bytes] = []
    room, num_whole = size, 0
    try:
        for step in _steps(raw):
            data = step
            while data:
                inside = True
                held.append(inflater.decompress(data, room))
                room -= len(held[-1])
                data = inflater.unconsumed_tail
                if inflater.eof:
                    data = inflater.unused_data.lstrip(b"\0")
                    inflater, inside = zlib.decompressobj(_GZIP_WINDOW), False
                    num_whole = len(held)
                if not room:
                    yield Piece(b"".join(held))
                    held, room, num_whole = [], size, 0
        if inside:
            held.append(inflater.flush())
        if held:
            yield Piece(b"".join(held), torn=inside and not inflater.eof)
    except zlib.error as error:
        if num_whole:
            yield Piece(b"".join(held[:num_whole]))
        raise InputError(
            f"{path}: compressed data is damaged ({error}); restore the file from a good copy"
        ) from error


def _steps(raw: Iterator[bytes]) -> Iterator[bytes | memoryview]:
    """Cut compressed data into _STEP_BYTES each."""
    for chunk in raw:
        for begin in range(0, len(chunk), _STEP_BYTES):
            yield memoryview(chunk)[begin : begin + _STEP_BYTES]


_ARRAY_END = re.compile(rb"\s*\]")
_FIRST_RECORD = re.compile(
    rb"(?:\A\s*|\"traceEvents\"\s*:\s*)(?P<array>\[)\s*\n(?P<indent>[ \t]*)\{[ \t]*\n"
)


@dataclass(frozen=True)
class Document:
    """The text around a file's array of events, and the events with their bounds, block by block.

    `tail` is what follows the array; it is filled while the blocks are read.
    """

    preamble: bytes
    blocks: Iterator[Block]
    tail: bytearray = field(default_factory=bytearray)


def open_document(path: Path) -> Document:
    """Open a JSON file of another tool as a document of events.

    A block's `first_line` counts records from 1; `torn` marks a file whose array does not close.
    Raises InputError for files that cannot be read, or that have neither the layout above nor a
    whole JSON document.
    """
    source = read_blocks(path)
    first = next(source)
    layout = _FIRST_RECORD.search(first.text)
    if layout is None:
        return _whole_document(path)
    closing, tail = b"\n" + layout["indent"] + b"}", bytearray()
    head = bytes(first.text[: layout.start("array")])
    del first.text[: layout.end("indent")]
    return Document(head, _separated(first.text, source, closing, tail), tail)


def _separated(
    text: bytearray, source: Iterator[Block], closing: bytes, tail: bytearray
) -> Iterator[Block]:
    """Cut the stream after each record's closing bracket and comma.

    The array ends where a square bracket, not a comma, follows a record. Text after the array may
    have the layout of records; it is put into `tail`.
    """
    record = 1
    cuts, end = _cuts(text, closing)
    for block in source:
        if end is None and len(cuts):
            rest = text[cuts[-1] :]
            del text[cuts[-1] - 1 :]
            yield _records(text, cuts[:-1], record)
            record += len(cuts)
            text = rest
        text += b"\n"
        text += block.text
        if end is None:
            cuts, end = _cuts(text, closing)
    if end is None:
        stop = text.rfind(closing) + len(closing) if closing in text else 0
    else:
        stop = end
        tail += text[text.index(b"]", end) + 1 :]
    del text[stop:]
    yield _records(text, cuts[cuts < stop], record, torn=end is None)


def _cuts(text: bytearray, closing: bytes) -> tuple[Integers, int | None]:
    """Find the places after the commas between records, and the end of the array's last record.

    This end is None if the text ends before the array does.
    """
    view = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(view == _CLOSE) + 1
    ends = ends[ends >= len(closing)]
    between = closing + b"," + closing[:-1] + b"{"
    near_end = int(np.searchsorted(ends, len(text) - len(between) + len(closing), side="right"))
    is_cut = np.zeros(len(ends), dtype=np.bool_)
    is_cut[:near_end] = _stand_at(view, ends[:near_end] - len(closing), between)
    others = ends[~is_cut]
    cuts = ends[is_cut] + 1
    for end in others[_stand_at(view, others - len(closing), closing)].tolist():
        if _ARRAY_END.match(text, end):
            return cuts[cuts <= end], end
    return cuts, None


def _stand_at(view: Bytes, places: Integers, text: bytes) -> Flags:
    """Return at which places of a block a text stands; it fits into the block at all of them."""
    found = np.ones(len(places), dtype=np.bool_)
    at = 0
    while len(text) - at >= _WORD_BYTES and len(places):
        words = np.ndarray((len(view) - _WORD_BYTES + 1,), "<u8", view, strides=(1,))
        found &= words[places + at] == int.from_bytes(text[at : at + _WORD_BYTES], "little")
        at += _WORD_BYTES
    for byte in text[at:]:
        found &= view[places + at] == byte
        at += 1
    return found


def _records(text: bytearray, cuts: Integers, first: int, *, torn: bool = False) -> Block:
    """Return a block of records, whose commas are blanked."""
    np.frombuffer(text, dtype=np.uint8)[cuts - 1] = _BLANK
    return Block(text, first, torn, np.concatenate(([0], cuts, [len(text)])))


def _whole_document(path: Path) -> Document:
    """Parse a file with another layout (compact, other indentation) as a whole; write it anew."""
    text, torn = read_all(path)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        cut = "is cut off" if torn or "end of data" in str(error) else "is not valid JSON"
        raise InputError(
            f"{path} {cut} ({error}) and its events do not stand on lines of their own, so nothing "
            "of it can be read; restore the file"
        ) from error
    rest = dict(document) if isinstance(document, dict) else {}
    events = rest.pop("traceEvents", None) if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(f"{path} holds JSON without an array of events; restore the file")
    rest["traceEvents"] = []  # now the last key, wherever it stood
    try:
        lines = bytearray(b"\n".join(map(orjson.dumps, events)))
        preamble = orjson.dumps(rest).removesuffix(b"[]}")
    except orjson.JSONEncodeError as error:  # too deep nesting
        raise InputError(f"{path} holds a damaged event ({error}); restore the file") from error
    return Document(preamble, iter([Block(lines, 1)]), bytearray(b"}"))


_AROUND_EVENTS = b" \t\r,[]"
_END_BYTES = 8
_NO_EVENT = "is not a JSON event"
_MISFIT = "has a value of the wrong type or size"
_ENDING, _COMMA, _BLANK, _OPEN, _CLOSE = b"\n, {}"


@dataclass(frozen=True)
class Damage:
    """A line that cannot be used, and how many good rows stand before it in its block.

    `is_json` is true for an event whose values do not fit the columns, false for a line that is no
    event.
    """

    line: int
    reason: str
    row: int
    is_json: bool


@dataclass(frozen=True)
class Lines:
    """Lines of a text: line i begins at `bounds[i]` and ends before `bounds[i + 1]`."""

    text: bytearray
    bounds: Integers

    def __getitem__(self, line: int) -> bytes:
        return bytes(self.text[self.bounds[line] : self.bounds[line + 1]]).rstrip()


@dataclass(frozen=True)
class EventBlock:
    """Events of one block as columns; row i is `source[i]`, in file line `numbers[i]`."""

    table: pa.Table
    numbers: Sequence[int]
    damages: tuple[Damage, ...]
    source: Lines | tuple[bytes, ...]

    def rows_text(self, rows: Sequence[int]) -> list[bytes]:
        """Return the JSON of some rows (the few records that are not spans)."""
        return [self.source[row] for row in rows]


class LineParser(Protocol):
    """Parser that turns lines with one event each into columns."""

    def table(self, text: bytes | bytearray, bounds: Integers) -> pa.Table | None:
        """Return columns of the lines text[bounds[i]:bounds[i + 1]], a row for each line.

        Return None if a line is no JSON or does not fit the columns. `text` is UTF-8 without NUL,
        and blank outside of these lines.
        """

    def empty(self) -> pa.Table:
        """Return columns without rows."""


@dataclass(frozen=True)
class GeneralParser:
    """Arrow's JSON parser: any JSON of a schema, nested columns as structs, absent values null."""

    schema: pa.Schema

    def table(self, text: bytes | bytearray, bounds: Integers) -> pa.Table | None:
        """Return columns as `LineParser.table`; the parser finds the lines itself."""
        try:
            table = pyarrow.json.read_json(
                pa.BufferReader(pa.py_buffer(text)),
                read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
                parse_options=pyarrow.json.ParseOptions(
                    explicit_schema=self.schema, unexpected_field_behavior="ignore"
                ),
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
        return table if table.num_rows == len(bounds) - 1 else None

    def empty(self) -> pa.Table:
        """Return columns without rows."""
        return self.schema.empty_table()


def parsed_blocks(
    path: Path, parser: LineParser, num_threads: int, part: tuple[int, int] | None = None
) -> Iterator[tuple[Block, EventBlock | None]]:
    """Yield the blocks of a file, or of a `part` of it, in order, each with its events.

    Only the end of a block's text is kept, as it stands in the file. Blocks are parsed by
    `num_threads` threads.
    """

    def parsed(block: Block) -> tuple[Block, EventBlock | None]:
        end = Block(block.text[-_END_BYTES:], block.first_line, block.torn)  # before it is blanked
        return end, parse_block(block, parser)

    if num_threads > 1:
        return across_threads(parsed, read_blocks(path, part), num_threads)
    return map(parsed, read_blocks(path, part))


def parse_block(block: Block, parser: LineParser) -> EventBlock | None:
    """Parse the events of a block; return None if it holds only brackets.

    Events with known bounds, and lines as `megascan.rankfile` writes them, are parsed fast:
    separators and brackets are blanked in place. Anything else (several events on a line, CRLF,
    damage) is cleaned line by line.
    """
    if not block.text:
        return None
    if _is_text(block.text):
        rows, bounds = (
            _blank_separators(block.text)
            if block.bounds is None
            else (range(len(block.bounds) - 1), block.bounds)
        )
        table = parser.table(block.text, bounds) if rows else None
        if table is not None:
            first = block.first_line + rows.start
            numbers = range(first, first + len(rows))
            return EventBlock(table, numbers, (), Lines(block.text, bounds))
        if block.bounds is not None:
            return parse_block(block.one_a_line(), parser)
    return _parse_line_by_line(block.one_a_line(), parser)


def _blank_separators(text: bytearray) -> tuple[range, Integers]:
    """Overwrite what stands between events by spaces; return the lines that remain, and their
    bounds.

    No lines are returned unless all of them begin with `{` and end with `}`. The columnar parser
    relies on that: it takes `null` for a row, and crashes if the first row is `null`.
    """
    ends, others = _split(text)
    start, stop = 0, len(ends)
    view = np.frombuffer(text, dtype=np.uint8)
    if text[: ends[0]].strip() == b"[":
        view[0] = _BLANK
        start = 1
    if stop > start + 1 and text[ends[-2] :].strip() == b"]":
        view[ends[-2] + 1 :] = _BLANK
        stop -= 1
    bounds = np.concatenate(([0], ends + 1))
    bounds[-1] -= 1
    rows = range(start, start if any(start <= line < stop for line in others) else stop)
    return rows, bounds[rows.start : rows.stop + 1]


_LEAST_LINE_BYTES = 16
"""Texts with shorter lines, on average, are split by numpy."""


def _split(text: bytearray) -> tuple[Integers, list[int]]:
    """Overwrite commas at line ends by spaces; return the ends of all lines, and which lines do not
    begin with `{` and end with `}` (of more than two at least three).
    """
    view = np.frombuffer(text, dtype=np.uint8)
    library = compiled()
    if library is not None:
        ends, others = np.empty(len(view) // _LEAST_LINE_BYTES + 3, np.int64), np.empty(4, np.int64)
        num = library.split(address(view), len(view), address(ends), len(ends), address(others))
        if num <= len(ends):
            return ends[:num].copy(), others[: min(others[3], 3)].tolist()
    ends = np.append(np.flatnonzero(view == _ENDING), len(view))
    last = np.maximum(ends - 1, 0)
    view[last[view[last] == _COMMA]] = _BLANK
    begins = np.concatenate(([0], ends[:-1] + 1))
    closes = last - (view[last] == _BLANK)
    is_object = (ends > begins) & (view[np.minimum(begins, len(view) - 1)] == _OPEN)
    return ends, np.flatnonzero(~(is_object & (view[closes] == _CLOSE))).tolist()


def _is_text(text: bytearray) -> bool:
    """Return whether a text is UTF-8 without NUL, on which the columnar parser relies."""
    if b"\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _parse_line_by_line(block: Block, parser: LineParser) -> EventBlock | None:
    """Clean every line, set lines aside that are no events, and read all other lines as columns."""
    good: list[tuple[int, bytes]] = []
    damages: dict[int, str] = {}
    for number, raw in enumerate(bytes(block.text).split(b"\n"), block.first_line):
        line = raw.strip(_AROUND_EVENTS)
        events = _events(line) if line else []
        if events is None:
            damages[number] = _NO_EVENT
        else:
            good += [(number, event) for event in events]
    damages |= dict.fromkeys(_misfits(good, parser), _MISFIT)
    good = [(number, line) for number, line in good if number not in damages]
    if not good and not damages:
        return None
    numbers = [number for number, _ in good]
    lines = [line for _, line in good]
    table = _table_in_parts(lines, parser) if lines else parser.empty()
    faults = tuple(
        Damage(number, reason, bisect_left(numbers, number), reason is _MISFIT)
        for number, reason in sorted(damages.items())
    )
    return EventBlock(table, numbers, faults, tuple(lines))


def _events(line: bytes) -> list[bytes] | None:
    """Return the events of a line (several in a file without line ends); None if it is no JSON."""
    try:
        if isinstance(orjson.loads(line), dict):
            return [line]
    except orjson.JSONDecodeError:
        pass
    try:
        events = orjson.loads(b"[" + line + b"]")
        are_objects = all(isinstance(event, dict) for event in events)
        return [orjson.dumps(event) for event in events] if are_objects else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # dumps: too deep nesting
        return None


def _misfits(lines: list[tuple[int, bytes]], parser: LineParser) -> list[int]:
    """Return the numbers of lines that are JSON but do not fit the columns, found by halving."""
    if not lines or _table([line for _, line in lines], parser) is not None:
        return []
    if len(lines) == 1:
        return [lines[0][0]]
    middle = len(lines) // 2
    return _misfits(lines[:middle], parser) + _misfits(lines[middle:], parser)


def _table_in_parts(lines: list[bytes], parser: LineParser) -> pa.Table:
    """Parse lines each of which fits the columns; in halves if they do not fit together."""
    table = _table(lines, parser)
    if table is not None or len(lines) == 1:
        return parser.empty() if table is None else table
    middle = len(lines) // 2
    halves = (lines[:middle], lines[middle:])
    return pa.concat_tables([_table_in_parts(half, parser) for half in halves])


def _table(lines: list[bytes], parser: LineParser) -> pa.Table | None:
    text = b"\n".join(lines)
    bounds = np.cumsum([0, *(len(line) + 1 for line in lines)])
    bounds[-1] -= 1
    return parser.table(text, bounds) if b"\0" not in text else None
