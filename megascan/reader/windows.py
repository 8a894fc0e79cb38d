"""The runs of one rank file: spans wait for the mark that closes their window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pyarrow as pa

from megascan.errors import InputError
from megascan.header import Json, RankHeader, WindowRecord
from megascan.reader.segments import Segment
from megascan.reader.spans import in_order
from megascan.schema import HEADER_EVENT
from megascan.timeline import TRACE_SCHEMA, shifted


@dataclass(frozen=True)
class Fault:
    """A line that cannot be used, and why (a predicate: "is not a JSON event")."""

    line: int
    reason: str


def read_mark(text: bytes, where: str) -> RankHeader | WindowRecord:
    """A header or the end of a window. Raises InputError naming `where` when it is damaged."""
    try:
        record: dict[str, Json] = orjson.loads(text)
    except orjson.JSONDecodeError as error:  # a number that no double holds
        raise InputError(f"{where}: a damaged mark ({error}); restore the file") from error
    arguments = record.get("args")
    if not isinstance(arguments, dict):
        raise InputError(f"{where}: a mark without arguments; restore the file")
    if record["name"] == HEADER_EVENT:
        return RankHeader.from_json(arguments, where)
    return WindowRecord.from_json(arguments, where)


@dataclass
class _Run:
    """One run while its file is read."""

    header: RankHeader
    windows: list[WindowRecord] = field(default_factory=list)
    finished: list[pa.Table] = field(default_factory=list)
    num_unfinished: int = 0
    notes: list[str] = field(default_factory=list)


class FileRuns:
    """Follows a rank file from mark to mark.

    `is_settled` says that spans come in order, a window at a time, in unix time.
    """

    def __init__(self, path: Path, *, is_settled: bool = False) -> None:
        self._path = path
        self._is_settled = is_settled
        self._runs: dict[str, _Run] = {}
        self._current: _Run | None = None
        self._pending: list[pa.Table] = []
        self._faults: list[Fault] = []

    @property
    def rank(self) -> int | None:
        """Whose spans these are; None before the first header."""
        return self._current.header.rank if self._current else None

    def take(self, spans: pa.Table) -> None:
        """Spans of the window that is open; times relative to the run's origin unless settled."""
        if self._current is not None:
            self._pending.append(spans)

    def fault(self, faults: Iterable[Fault]) -> None:
        """Lines of the window that is open, or before the first header, that cannot be used."""
        self._faults += faults

    def mark(self, mark: RankHeader | WindowRecord, line: int) -> None:
        """Open a run or close a window."""
        if isinstance(mark, RankHeader):
            self._open(mark)
        else:
            self._close(mark, f"{self._path}, line {line}")

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
        if self._is_settled:
            run.finished += self._pending
        elif num_spans:
            window_spans = in_order(pa.concat_tables(self._pending))
            run.finished.append(shifted(window_spans, run.header.clock.origin_unix_ns))
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
        """All runs, after the last line."""
        self._drop_pending()
        return [
            Segment(
                path=self._path,
                header=run.header,
                windows=tuple(run.windows),
                spans=pa.concat_tables(run.finished or [TRACE_SCHEMA.empty_table()]),
                num_unfinished_spans=run.num_unfinished,
                notes=tuple(run.notes),
            )
            for run in self._runs.values()
        ]
