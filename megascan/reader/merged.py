"""Merged timelines as `megascan.export` writes them, read back as a Timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from megascan.errors import InputError
from megascan.pipeline import num_workers
from megascan.reader.columns import event_schema, rows_of, span_columns
from megascan.reader.formats import Format, sniff
from megascan.reader.lines import EventBlock, parsed_blocks
from megascan.reader.merged_protobuf import read_protobuf
from megascan.reader.merged_record import AGAIN, MergedRecord, merged_record
from megascan.reader.spans import faulty_rows
from megascan.reader.templates import Templates
from megascan.schema import TIMELINE_COLUMNS, TIMELINE_EVENT, Kind
from megascan.timeline import Timeline, equals, shifted

_COLUMNS = tuple(
    replace(column, event_key="args.track") if column.name == "track" else column
    for column in TIMELINE_COLUMNS
)
"""A merged event's tid numbers the viewer's tracks, so the recorded track is an argument."""


def read_timeline(path: Path) -> Timeline:
    """Read a merged timeline, Chrome JSON or protobuf, with its clocks, windows and completeness.

    What was selected when it was written (ranks, iterations, kinds) is what it holds. Raises
    InputError for other formats, a newer schema, and files that are damaged or cut off.
    """
    found = sniff(path)
    if found is Format.PERFETTO:
        return read_protobuf(path)
    if found is not Format.TIMELINE:
        raise InputError(
            f"{path} holds {found.value.replace('_', ' ')}, expected a merged timeline; "
            "make one with megascan aggregate"
        )
    reading = _Reading(path)
    for events in _blocks(path):
        reading.add(events)
    return reading.timeline()


def _blocks(path: Path) -> Iterator[EventBlock]:
    """Parsed blocks; a file that does not end as it should is an error."""
    end = b""
    parser = Templates(event_schema(_COLUMNS))
    for block, events in parsed_blocks(path, parser, num_workers()):
        if block.torn:
            raise InputError(f"{path} is cut off inside its compressed data; {AGAIN}")
        end = bytes(block.text[-8:]).strip() or end
        if events is not None:
            for damage in events.damages:
                raise InputError(f"{path}: line {damage.line} {damage.reason}; {AGAIN}")
            yield events
    if not end.endswith((b"]", b"]}")):
        raise InputError(f"{path} is cut off, its last bracket is missing; {AGAIN}")


class _Reading:
    """Gathers the timeline's record and its spans block by block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record: MergedRecord | None = None
        self._spans: list[pa.Table] = []

    def add(self, events: EventBlock) -> None:
        """Take a block's record and spans; arrows, curves and names are passed over."""
        record = self._record or _record(events, self._path)
        self._record = record
        table = events.table
        rows = np.flatnonzero(equals(table, "ph", "X") & equals(table, "cat", *map(str, Kind)))
        if not len(rows):
            return
        table = rows_of(table, rows)
        spans = span_columns(table, _COLUMNS)
        for row, reason in faulty_rows(spans, table, rank=None):
            line = events.numbers[int(rows[row])]
            raise InputError(f"{self._path}: line {line} {reason}; {AGAIN}")
        self._spans.append(shifted(spans, record.origin_ns))

    def timeline(self) -> Timeline:
        """Everything, after the last block."""
        if self._record is None:
            raise InputError(f"{self._path} holds no {TIMELINE_EVENT} event; {AGAIN}")
        return self._record.timeline(self._spans, self._path)


def _record(events: EventBlock, path: Path) -> MergedRecord:
    """The timeline's record, which stands first."""
    found = np.flatnonzero(equals(events.table, "name", TIMELINE_EVENT))
    if not len(found):
        raise InputError(f"{path}: no {TIMELINE_EVENT} event before the first span; {AGAIN}")
    try:
        record = orjson.loads(events.rows_text([int(found[0])])[0]).get("args")
    except orjson.JSONDecodeError as error:  # a number that no double holds, too many brackets
        raise InputError(f"{path}: damaged {TIMELINE_EVENT} event ({error}); {AGAIN}") from error
    return merged_record(record, path)
