"""Lines of JSON events to Arrow columns, without a loop over events; damaged lines by number."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.json

from megascan.pipeline import ordered_map
from megascan.reader.bytestream import Block, read_blocks

_AROUND_EVENTS = b" \t\r,[]"
_END_BYTES = 8
_NO_EVENT = "is not a JSON event"
_MISFIT = "has a value of the wrong type or size"
_LINE_END, _COMMA, _BLANK, _OPEN, _CLOSE = b"\n, {}"

Bounds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Damage:
    """A line that is no event, and how many good rows stand before it in its block.

    `is_json` tells an event whose values do not fit the columns from a line that is none at all.
    """

    line: int
    reason: str
    row: int
    is_json: bool


@dataclass(frozen=True)
class EventBlock:
    """Events of one block as columns; row i stands in file line `numbers[i]`."""

    table: pa.Table
    first_line: int
    numbers: Sequence[int]
    damages: tuple[Damage, ...]
    source: bytearray | tuple[bytes, ...]

    def rows_text(self, rows: Sequence[int]) -> list[bytes]:
        """The JSON of some rows (the few records that are not spans)."""
        if isinstance(self.source, tuple):
            return [self.source[row] for row in rows]
        ends = np.flatnonzero(np.frombuffer(self.source, dtype=np.uint8) == _LINE_END)
        bounds = [-1, *ends.tolist(), len(self.source)]
        first = self.numbers[0] - self.first_line
        return [
            bytes(self.source[bounds[first + row] + 1 : bounds[first + row + 1]]) for row in rows
        ]


class LineParser(Protocol):
    """Turns lines that hold an event each into columns."""

    def table(self, text: bytes | bytearray, bounds: Bounds) -> pa.Table | None:
        """Columns of the lines text[bounds[i]:bounds[i + 1]], a row a line; what else `text` holds
        is blank.

        None when a line is no JSON or does not fit the columns. `text` is UTF-8 without NUL.
        """

    def empty(self) -> pa.Table:
        """Columns without rows."""


@dataclass(frozen=True)
class GeneralParser:
    """Arrow's JSON parser: any JSON of a schema, nested columns as structs, absent values null."""

    schema: pa.Schema

    def table(self, text: bytes | bytearray, bounds: Bounds) -> pa.Table | None:
        """Columns as LineParser says; the parser finds the lines itself."""
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
        """Columns without rows."""
        return self.schema.empty_table()


def parsed_blocks(
    path: Path, parser: LineParser, num_threads: int
) -> Iterator[tuple[Block, EventBlock | None]]:
    """A file's blocks in order, each with its events, by as many threads.

    Of a block's text only the end is kept, as it stands in the file.
    """

    def parsed(block: Block) -> tuple[Block, EventBlock | None]:
        end = Block(block.text[-_END_BYTES:], block.first_line, block.torn)  # before it is blanked
        return end, parse_block(block, parser)

    if num_threads > 1:
        return ordered_map(parsed, read_blocks(path), num_threads)
    return map(parsed, read_blocks(path))


def parse_block(block: Block, parser: LineParser) -> EventBlock | None:
    """Events of a block, None when it holds only brackets.

    The fast way takes lines as `megascan.rankfile` writes them: separators and brackets are
    blanked in place. Anything else (several events a line, CRLF, damage) is cleaned line by line.
    """
    if not block.text:
        return None
    if _is_text(block.text):
        rows, bounds = _blank_separators(block.text)
        table = parser.table(block.text, bounds) if rows else None
        if table is not None:
            first = block.first_line + rows.start
            numbers = range(first, first + len(rows))
            return EventBlock(table, block.first_line, numbers, (), block.text)
    return _parse_line_by_line(block, parser)


def _blank_separators(text: bytearray) -> tuple[range, Bounds]:
    """Overwrite what stands between events by spaces; the lines that remain and their bounds.

    The range is empty unless every one of these lines begins with `{` and ends with `}`. The
    columnar parser relies on that: it takes `null` for a row, and crashes where it is the first.
    """
    view = np.frombuffer(text, dtype=np.uint8)
    ends = np.append(np.flatnonzero(view == _LINE_END), len(view))
    last = np.maximum(ends - 1, 0)
    view[last[view[last] == _COMMA]] = _BLANK
    start, stop = 0, len(ends)
    if text[: ends[0]].strip() == b"[":
        view[0] = _BLANK
        start = 1
    if stop > start + 1 and text[ends[-2] :].strip() == b"]":
        view[ends[-2] + 1 :] = _BLANK
        stop -= 1
    bounds = np.concatenate(([0], ends + 1))
    bounds[-1] -= 1
    begins = bounds[start:stop]
    closes = last[start:stop] - (view[last[start:stop]] == _BLANK)
    whole = (ends[start:stop] > begins).all() and np.all(view[begins] == _OPEN)
    rows = range(start, stop if whole and np.all(view[closes] == _CLOSE) else start)
    return rows, bounds[rows.start : rows.stop + 1]


def _is_text(text: bytearray) -> bool:
    """UTF-8 without NUL: what the columnar parser takes for granted."""
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
    """Clean every line, set those aside that are no event, and read the rest as columns."""
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
    return EventBlock(table, block.first_line, numbers, faults, tuple(lines))


def _events(line: bytes) -> list[bytes] | None:
    """The events of a line (several in a file without line ends); None if it is damaged."""
    try:
        if isinstance(orjson.loads(line), dict):
            return [line]
    except orjson.JSONDecodeError:
        pass
    try:
        events = orjson.loads(b"[" + line + b"]")
        return [orjson.dumps(event) for event in events] if _are_objects(events) else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # the latter for what nests too deep
        return None


def _are_objects(events: list[object]) -> bool:
    return all(isinstance(event, dict) for event in events)


def _misfits(lines: list[tuple[int, bytes]], parser: LineParser) -> list[int]:
    """Numbers of lines that are JSON but do not fit the columns, found by halving."""
    if not lines or _table([line for _, line in lines], parser) is not None:
        return []
    if len(lines) == 1:
        return [lines[0][0]]
    middle = len(lines) // 2
    return _misfits(lines[:middle], parser) + _misfits(lines[middle:], parser)


def _table_in_parts(lines: list[bytes], parser: LineParser) -> pa.Table:
    """Columns of lines that fit, each of them or in halves; not all may fit beside each other."""
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
