"""Merged timelines as `megascan.export` writes them in Chrome JSON, read back as a Timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa

from megascan.errors import ConfigError, InputError
from megascan.header import Json, RankHeader, WindowRecord
from megascan.pipeline import num_workers
from megascan.reader.columns import event_schema, rows_of, span_columns
from megascan.reader.formats import Format, sniff
from megascan.reader.lines import EventBlock, parsed_blocks
from megascan.reader.spans import faulty_rows, in_order, shifted
from megascan.reader.templates import Templates
from megascan.schema import SCHEMA_VERSION, TIMELINE_COLUMNS, TIMELINE_EVENT, Kind
from megascan.timeline import TIMELINE_SCHEMA, ClockFit, Completeness, Timeline, equals
from megascan.topology import Layout

_COLUMNS = tuple(
    replace(column, event_key="args.track") if column.name == "track" else column
    for column in TIMELINE_COLUMNS
)
"""A merged event's tid numbers the viewer's tracks, so the recorded track is an argument."""
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
    parser = Templates(event_schema(_COLUMNS))
    for block, events in parsed_blocks(path, parser, num_workers()):
        if block.torn:
            raise InputError(f"{path} is cut off inside its compressed data; {_AGAIN}")
        end = bytes(block.text[-8:]).strip() or end
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
        rows = np.flatnonzero(equals(table, "ph", "X") & equals(table, "cat", *map(str, Kind)))
        if not len(rows):
            return
        table = rows_of(table, rows)
        spans = span_columns(table, _COLUMNS)
        for row, reason in faulty_rows(spans, table, rank=None):
            line = events.numbers[int(rows[row])]
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
    found = np.flatnonzero(equals(events.table, "name", TIMELINE_EVENT))
    if not len(found):
        raise InputError(f"{path}: no {TIMELINE_EVENT} event before the first span; {_AGAIN}")
    record: dict[str, Any] = orjson.loads(events.rows_text([int(found[0])])[0])["args"]
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
    headers = [RankHeader.from_json(_whole(item, record), where) for item in record["headers"]]
    return _Record(
        run_id=record["run_id"],
        layout=Layout(**record["layout"]),
        headers={header.rank: header for header in headers},
        clocks={
            item["rank"]: ClockFit(**{"error_ns": item["residual_p99_ns"], **item})
            for item in record["clocks"]
        },
        windows={
            int(rank): tuple(WindowRecord.from_json(item, where) for item in items)
            for rank, items in record["windows"].items()
        },
        clock_method=record["clock_method"],
        origin_ns=int(record["origin_ns"]),
        completeness=_completeness(record["completeness"]),
    )


def _whole(header: Mapping[str, Json], record: Mapping[str, Any]) -> dict[str, Any]:
    """A header with what stands once for all ranks (older files repeat it in each)."""
    whole: dict[str, Any] = {**record.get("common_header", {}), **header}
    if isinstance(whole["groups"], list):
        whole["groups"] = {name: record["groups"][name] for name in whole["groups"]}
    return whole


def _completeness(record: Mapping[str, Json]) -> Completeness:
    fields = cast("dict[str, Any]", dict(record))
    for name in ("ranks", "missing_ranks", "notes"):
        fields[name] = tuple(fields.get(name, ()))
    return Completeness(**fields)
