"""Our own rank files: runs, finished windows, and what a killed process left behind them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from megascan.pipeline import Spread, across_threads, num_workers
from megascan.reader.columns import event_schema, rows_of, span_columns
from megascan.reader.lines import EventBlock, parsed_blocks
from megascan.reader.segments import Packed, Segment
from megascan.reader.short_files import file_batches, read_short_files
from megascan.reader.spans import faulty_rows, is_mark
from megascan.reader.templates import Templates
from megascan.reader.windows import Fault, FileRuns, read_mark
from megascan.schema import SPAN_COLUMNS
from megascan.timeline import equals


def read_rank_files(paths: Sequence[Path], spread: Spread = across_threads) -> list[Segment]:
    """All runs of all files, the files being read side by side."""
    batches = list(file_batches(paths))
    read = partial(
        _read_batch,
        templates=Templates(event_schema(SPAN_COLUMNS)),
        num_threads=num_workers() // max(len(batches), 1),
    )
    return [segment for part in spread(read, batches) for segment in part.segments]


def read_rank_file(
    path: Path, templates: Templates | None = None, num_threads: int = 1
) -> list[Segment]:
    """Everything a rank file holds, a segment a run, in file order.

    `templates` may be shared by files; with several threads its blocks are parsed side by side.

    Spans, damaged lines and torn ends behind a run's last window mark are left out and noted.
    Raises InputError for damage before a window mark, naming file and line.
    """
    runs = FileRuns(path)
    parser = templates or Templates(event_schema(SPAN_COLUMNS))
    for block, events in parsed_blocks(path, parser, num_threads):
        if events is not None:
            _follow(runs, events, path)
        if block.torn:
            runs.tear()
    return runs.segments()


def _read_batch(paths: Sequence[Path], templates: Templates, num_threads: int) -> Packed:
    found = read_short_files(paths, templates) if len(paths) > 1 else None
    if found is None:
        parts = (read_rank_file(path, templates, num_threads) for path in paths)
        found = [segment for part in parts for segment in part]
    return Packed(tuple(found))


def _follow(runs: FileRuns, events: EventBlock, path: Path) -> None:
    """Take a block's spans and marks in their order."""
    marks = np.flatnonzero(is_mark(events.table)).tolist()
    faults = [(damage.row, Fault(damage.line, damage.reason)) for damage in events.damages]
    begin = 0
    for row, text in zip(marks, events.rows_text(marks) if marks else [], strict=True):
        _take(runs, events, begin, row)
        runs.fault(fault for at, fault in faults if at <= row)
        faults = [(at, fault) for at, fault in faults if at > row]
        line = events.numbers[row]
        runs.mark(read_mark(text, f"{path}, line {line}"), line)
        begin = row + 1
    _take(runs, events, begin, events.table.num_rows)
    runs.fault(fault for _, fault in faults)


def _take(runs: FileRuns, events: EventBlock, begin: int, end: int) -> None:
    """Spans of rows `begin` to `end`; other events (names, counters) are passed over."""
    part: pa.Table = events.table.slice(begin, end - begin)
    rows = np.flatnonzero(equals(part, "ph", "X"))
    if runs.rank is None or not len(rows):
        return
    part = rows_of(part, rows)
    spans = span_columns(part, SPAN_COLUMNS)
    runs.fault(
        Fault(events.numbers[begin + int(rows[row])], reason)
        for row, reason in faulty_rows(spans, part, runs.rank)
    )
    runs.take(spans)
