"""Merged timelines as `megascan.export` writes them in Chrome JSON, read back as a Timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.errors import ConfigError, InputError
from megascan.header import Json, RankHeader, WindowRecord
from megascan.reader.bytestream import BLOCK_BYTES, read_blocks
from megascan.reader.columns import event_schema, span_columns, true_rows
from megascan.reader.formats import Format, sniff
from megascan.reader.lines import EventBlock, parse_block
from megascan.reader.spans import faulty_rows, in_order, shifted
from megascan.schema import SCHEMA_VERSION, TIMELINE_COLUMNS, TIMELINE_EVENT, Kind
from megascan.timeline import TIMELINE_SCHEMA, ClockFit, Completeness, Timeline
from megascan.topology import Layout

_COLUMNS = tuple(
    replace(column, event_key="args.track") if column.name == "track" else column
    for column in TIMELINE_COLUMNS
)
"""A merged event's tid numbers the viewer's tracks, so the recorded track is an argument."""
_EVENT_SCHEMA = event_schema(_COLUMNS)
_AGAIN = "write it again with megascan aggregate"


def read_timeline(path: Path) -> Timeline:
    """Read a merged timeline (.json or .json.gz), with its clocks, windows and completeness.

    What was selected when it was written (ranks, iterations, kinds) is what it holds. Raises
    InputError for other formats, a newer schema, and files that are damaged or cut off.
    """
    found = sniff(path)
    if found is not Format.TIMELINE:
        raise InputError(f"{path} holds {found.value}, expected a merged timeline (Chrome JSON)")
    reading = _Reading(path)
    for events in _blocks(path):
        reading.add(events)
    return reading.timeline()


def _blocks(path: Path) -> Iterator[EventBlock]:
    """Parsed blocks; a file that does not end as it should is an error."""
    end = b""
    for block in read_blocks(path, 4 * BLOCK_BYTES):
        if block.torn:
            raise InputError(f"{path} is cut off inside its compressed data; {_AGAIN}")
        end = bytes(block.text[-8:]).strip() or end
        events = parse_block(block, _EVENT_SCHEMA, parallel=True)
        if events is not None:
            for damage in events.damages:
                raise InputError(f"{path}: line {damage.line} {damage.reason}; {_AGAIN}")
            yield events
    if not end.endswith((b"]", b"]}")):
        raise InputError(f"{path} is cut off, its last bracket is missing; {_AGAIN}")


@dataclass(frozen=True)
class _Record:
    """The timeline's own event, before spans are there."""

    run_id: str
    layout: Layout
    headers: Mapping[int, RankHeader]
    clocks: Mapping[int, ClockFit]
    windows: Mapping[int, tuple[WindowRecord, ...]]
    clock_method: str
    origin_ns: int
    completeness: Completeness


class _Reading:
    """Gathers the timeline's record and its spans block by block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record: _Record | None = None
        self._spans: list[pa.Table] = []

    def add(self, events: EventBlock) -> None:
        """Take a block's record and spans; arrows, curves and names are passed over."""
        record = self._record or _record(events, self._path)
        self._record = record
        table = events.table
        is_span = pc.and_(
            pc.equal(table.column("ph"), "X"),
            pc.is_in(table.column("cat"), value_set=pa.array([str(kind) for kind in Kind])),
        )
        rows = true_rows(is_span)
        if not len(rows):
            return
        if len(rows) < table.num_rows:
            table = table.take(rows)
        spans = span_columns(table, _COLUMNS)
        for row, reason in faulty_rows(spans, table, rank=None):
            line = events.numbers[rows[row].as_py()]
            raise InputError(f"{self._path}: line {line} {reason}; {_AGAIN}")
        self._spans.append(shifted(spans, record.origin_ns))

    def timeline(self) -> Timeline:
        """Everything, after the last block."""
        record = self._record
        if record is None:
            raise InputError(f"{self._path} holds no {TIMELINE_EVENT} event; {_AGAIN}")
        spans = pa.concat_tables(self._spans) if self._spans else TIMELINE_SCHEMA.empty_table()
        return Timeline(
            run_id=record.run_id,
            layout=record.layout,
            headers=record.headers,
            spans=in_order(spans.unify_dictionaries()),
            windows=record.windows,
            clocks=record.clocks,
            clock_method=record.clock_method,
            origin_ns=record.origin_ns,
            completeness=record.completeness,
        )


def _record(events: EventBlock, path: Path) -> _Record:
    """The timeline's record, which stands first."""
    at = pc.index(events.table.column("name"), TIMELINE_EVENT).as_py()
    if at < 0:
        raise InputError(f"{path}: no {TIMELINE_EVENT} event before the first span; {_AGAIN}")
    record: dict[str, Any] = orjson.loads(events.rows_text([at])[0])["args"]
    version = record.get("schema")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise InputError(
            f"{path}: timeline of schema {version!r}, this MegaScan reads up to {SCHEMA_VERSION}; "
            "update MegaScan"
        )
    try:
        return _decoded(record, str(path))
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise InputError(f"{path}: damaged {TIMELINE_EVENT} event ({error}); {_AGAIN}") from error


def _decoded(record: dict[str, Any], where: str) -> _Record:
    headers = [RankHeader.from_json(item, where) for item in record["headers"]]
    return _Record(
        run_id=record["run_id"],
        layout=Layout(**record["layout"]),
        headers={header.rank: header for header in headers},
        clocks={item["rank"]: ClockFit(**item) for item in record["clocks"]},
        windows={
            int(rank): tuple(WindowRecord.from_json(item, where) for item in items)
            for rank, items in record["windows"].items()
        },
        clock_method=record["clock_method"],
        origin_ns=int(record["origin_ns"]),
        completeness=_completeness(record["completeness"]),
    )


def _completeness(record: Mapping[str, Json]) -> Completeness:
    fields = cast("dict[str, Any]", dict(record))
    for name in ("ranks", "missing_ranks", "notes"):
        fields[name] = tuple(fields.get(name, ()))
    return Completeness(**fields)
