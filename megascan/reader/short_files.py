"""Many short rank files read as one: a job of thousands of ranks has thousands of them.

What a file costs by itself, some hundred steps on small columns, is paid once for as many files
as fill a block. Whatever is out of the ordinary in one of them (damage, a torn end, another rank's
spans) makes all of them be read one by one, where it is named or left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.header import RankHeader, WindowRecord
from megascan.reader.bytestream import Block, read_all
from megascan.reader.columns import rows_of, span_columns
from megascan.reader.lines import EventBlock, parse_block
from megascan.reader.segments import Segment
from megascan.reader.spans import faulty_rows, is_mark
from megascan.reader.templates import Templates
from megascan.reader.windows import FileRuns, read_mark
from megascan.schema import SPAN_COLUMNS
from megascan.timeline import equals, numbers, shifted

Integers = npt.NDArray[np.int64]

_OPENING, _CLOSING = b"[\n", b"\n]"
_SHORT_BYTES = 1 << 20
_TOGETHER_BYTES = 2 << 20


@dataclass(frozen=True)
class _Mark:
    """A header or window end: row of the events, and file and line it stands in."""

    row: int
    file: int
    line: int
    record: RankHeader | WindowRecord


def file_batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Rank files to be read in one go: long ones alone, short ones up to some MB."""
    batch: list[Path] = []
    room = _TOGETHER_BYTES
    for path in paths:
        size = path.stat().st_size
        if batch and (size > _SHORT_BYTES or size > room):
            yield batch
            batch, room = [], _TOGETHER_BYTES
        batch.append(path)
        room -= size
    if batch:
        yield batch


def read_short_files(paths: Sequence[Path], templates: Templates) -> list[Segment] | None:
    """Segments of whole and undamaged files, in order; None when one of them is anything else.

    Raises InputError for damaged marks, naming file and line.
    """
    bodies = [_body(path) for path in paths]
    if not all(bodies):
        return None
    events = parse_block(Block(bytearray(b"\n").join(bodies), 1), templates)
    first_row = np.cumsum([0, *(body.count(b"\n") + 1 for body in bodies)])
    if events is None or events.damages or events.table.num_rows != first_row[-1]:
        return None
    marks = list(_marks(events, first_row, paths))
    spans = _settled(events.table, marks)
    return None if spans is None else _segments(paths, marks, spans)


def _body(path: Path) -> bytes:
    """A file's lines without the brackets around them; nothing for one that is cut off."""
    content, torn = read_all(path)
    if torn or not content.startswith(_OPENING):
        return b""
    return content.rstrip(b"\n").removeprefix(_OPENING).removesuffix(_CLOSING)


def _marks(events: EventBlock, first_row: Integers, paths: Sequence[Path]) -> Iterator[_Mark]:
    rows = np.flatnonzero(is_mark(events.table))
    files = np.searchsorted(first_row, rows, side="right") - 1
    lines = rows - first_row[files] + 2  # the opening bracket has the first
    texts = events.rows_text(rows.tolist())
    for row, file, line, text in zip(
        rows.tolist(), files.tolist(), lines.tolist(), texts, strict=True
    ):
        yield _Mark(row, file, line, read_mark(text, f"{paths[file]}, line {line}"))


def _settled(table: pa.Table, marks: Sequence[_Mark]) -> list[pa.Table] | None:
    """Spans behind each mark, in order and in unix time; None when one cannot be used."""
    rows = np.flatnonzero(equals(table, "ph", "X"))
    part = rows_of(table, rows)
    spans = span_columns(part, SPAN_COLUMNS)
    mark = np.searchsorted([mark.row for mark in marks], rows) - 1
    headers = list(_headers(marks))
    ranks = np.array([header.rank for header in headers])
    if (
        not len(rows)
        or mark[0] < 0
        or faulty_rows(spans, part, rank=None)
        or (ranks[mark] != numbers(spans, "rank")).any()
    ):
        return None
    origin_ns = np.array([header.clock.origin_unix_ns for header in headers])
    order = np.lexsort((-numbers(spans, "duration_ns"), numbers(spans, "start_ns"), mark))
    spans = shifted(spans, origin_ns[mark]).take(pa.array(order))
    bounds = np.searchsorted(mark, np.arange(len(marks) + 1))
    return [spans.slice(begin, end - begin) for begin, end in pairwise(bounds.tolist())]


def _headers(marks: Sequence[_Mark]) -> Iterator[RankHeader]:
    """The header that stands at or before each mark; none before the first."""
    header: RankHeader | None = None
    for mark in marks:
        if isinstance(mark.record, RankHeader):
            header = mark.record
        if header is not None:
            yield header


def _segments(
    paths: Sequence[Path], marks: Sequence[_Mark], spans: Sequence[pa.Table]
) -> list[Segment]:
    runs = [FileRuns(path, is_settled=True) for path in paths]
    for mark, behind in zip(marks, spans, strict=True):
        runs[mark.file].mark(mark.record, mark.line)
        if behind.num_rows:
            runs[mark.file].take(behind)
    return [segment for each in runs for segment in each.segments()]
