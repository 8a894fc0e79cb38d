"""Our own rank files: runs, finished windows, and what a killed process left behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from megascan.errors import InputError
from megascan.header import Json, RankHeader, WindowRecord
from megascan.pipeline import num_workers
from megascan.reader.columns import event_schema, rows_of, span_columns
from megascan.reader.lines import EventBlock, parsed_blocks
from megascan.reader.segments import Segment, in_parallel
from megascan.reader.spans import faulty_rows, in_order, shifted
from megascan.reader.templates import Templates
from megascan.schema import HEADER_EVENT, SPAN_COLUMNS, WINDOW_EVENT
from megascan.timeline import TRACE_SCHEMA, equals


def read_rank_files(paths: Sequence[Path]) -> list[Segment]:
    """All runs of all files, read by as many threads as there are cores."""
    read = partial(
        read_rank_file,
        templates=Templates(event_schema(SPAN_COLUMNS)),
        num_threads=num_workers() // max(len(paths), 1),
    )
    return [segment for part in in_parallel(read, paths) for segment in part]


def read_rank_file(
    path: Path, templates: Templates | None = None, num_threads: int = 1
) -> list[Segment]:
    """Everything a rank file holds, a segment a run, in file order.

    `templates` may be shared by files; with several threads its blocks are parsed side by side.

    Spans, damaged lines and torn ends behind a run's last window mark are left out and noted.
    Raises InputError for damage before a window mark, naming file and line.
    """
    reading = _Reading(path)
    parser = templates or Templates(event_schema(SPAN_COLUMNS))
    for block, events in parsed_blocks(path, parser, num_threads):
        if events is not None:
            reading.add(events)
        if block.torn:
            reading.tear()
    return reading.segments()


@dataclass(frozen=True)
class _Fault:
    """A line that cannot be used, and why (a predicate: "is not a JSON event")."""

    line: int
    reason: str


@dataclass
class _Run:
    """One run while its file is read."""

    header: RankHeader
    windows: list[WindowRecord] = field(default_factory=list)
    finished: list[pa.Table] = field(default_factory=list)
    num_unfinished: int = 0
    notes: list[str] = field(default_factory=list)


class _Reading:
    """Follows a rank file from mark to mark; what stands between waits for its window to close."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[str, _Run] = {}
        self._current: _Run | None = None
        self._pending: list[pa.Table] = []
        self._faults: list[_Fault] = []

    def add(self, events: EventBlock) -> None:
        """Take a block's spans and marks in their order."""
        table = events.table
        is_mark = equals(table, "ph", "M") & equals(table, "name", HEADER_EVENT, WINDOW_EVENT)
        marks = np.flatnonzero(is_mark).tolist()
        faults = [(damage.row, _Fault(damage.line, damage.reason)) for damage in events.damages]
        begin = 0
        for row, text in zip(marks, events.rows_text(marks) if marks else [], strict=True):
            self._take(events, begin, row)
            self._faults += [fault for at, fault in faults if at <= row]
            faults = [(at, fault) for at, fault in faults if at > row]
            self._mark(text, events.numbers[row])
            begin = row + 1
        self._take(events, begin, table.num_rows)
        self._faults += [fault for _, fault in faults]

    def _take(self, events: EventBlock, begin: int, end: int) -> None:
        """Spans of rows `begin` to `end`; other events (names, counters) are passed over."""
        if self._current is None:
            return
        part = events.table.slice(begin, end - begin)
        rows = np.flatnonzero(equals(part, "ph", "X"))
        if not len(rows):
            return
        part = rows_of(part, rows)
        spans = span_columns(part, SPAN_COLUMNS)
        for row, reason in faulty_rows(spans, part, self._current.header.rank):
            line = events.numbers[begin + int(rows[row])]
            self._faults.append(_Fault(line, reason))
        self._pending.append(spans)

    def _mark(self, text: bytes, line: int) -> None:
        where = f"{self._path}, line {line}"
        try:
            record: dict[str, Json] = orjson.loads(text)
        except orjson.JSONDecodeError as error:  # a number that no double holds
            raise InputError(f"{where}: a damaged mark ({error}); restore the file") from error
        arguments = record.get("args")
        if not isinstance(arguments, dict):
            raise InputError(f"{where}: a mark without arguments; restore the file")
        if record["name"] == HEADER_EVENT:
            self._open(RankHeader.from_json(arguments, where))
        else:
            self._close(WindowRecord.from_json(arguments, where), where)

    def _open(self, header: RankHeader) -> None:
        self._drop_pending()
        self._current = self._runs.setdefault(header.run_id, _Run(header))
        self._current.header = header

    def _close(self, window: WindowRecord, where: str) -> None:
        run = self._current
        if run is None or run.header.run_id != window.run_id:
            raise InputError(
                f"{where}: a window of run {window.run_id} without that run's header before it; "
                "the file is damaged, restore it or leave this rank out"
            )
        if self._faults:
            fault = self._faults[0]
            others = f" (and {len(self._faults) - 1} more)" if len(self._faults) > 1 else ""
            raise InputError(
                f"{self._path}: line {fault.line} {fault.reason}{others}; the file is damaged, "
                "restore it or move it away and pass --allow-missing-ranks"
            )
        num_spans = sum(table.num_rows for table in self._pending)
        if num_spans != window.num_spans:
            raise InputError(
                f"{where}: window {window.window} says it holds {window.num_spans} spans, found "
                f"{num_spans}; the file is damaged, restore it or move it away and pass "
                "--allow-missing-ranks"
            )
        origin = run.header.clock.origin_unix_ns
        if num_spans:
            window_spans = in_order(pa.concat_tables(self._pending))
            run.finished.append(shifted(window_spans, origin))
        run.windows.append(window)
        self._pending = []

    def _drop_pending(self) -> None:
        """Leave out what no window closed; damage before the first header stays a fault."""
        run = self._current
        if run is None:
            return
        num_spans = sum(table.num_rows for table in self._pending)
        if num_spans or self._faults:
            run.num_unfinished += num_spans
            torn = f" and {len(self._faults)} torn or damaged lines" if self._faults else ""
            run.notes.append(
                f"rank {run.header.rank}: {num_spans} spans{torn} behind the last finished window "
                f"of {self._path.name} were left out"
            )
        self._pending, self._faults = [], []

    def tear(self) -> None:
        """The compressed stream ended too early."""
        if self._current is not None:
            self._current.notes.append(
                f"rank {self._current.header.rank}: {self._path.name} is cut off inside its "
                "compressed data"
            )

    def segments(self) -> list[Segment]:
        """All runs, after the last block."""
        self._drop_pending()
        empty = [TRACE_SCHEMA.empty_table()]
        return [
            Segment(
                path=self._path,
                header=run.header,
                windows=tuple(run.windows),
                spans=pa.concat_tables(run.finished or empty),
                num_unfinished_spans=run.num_unfinished,
                notes=tuple(run.notes),
            )
            for run in self._runs.values()
        ]
