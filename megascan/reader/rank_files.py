"""Read our own rank files: runs, finished windows, and what a killed process left behind them.

Spans wait for the mark that closes their window (`FileRuns`):

    header  span span span  window   span span ▏        the file ends here: killed
            └── kept: 3, as it says  └── left out and counted

A job of thousands of ranks has thousands of short files. The fixed cost of a file, some hundred
steps on small columns, is paid once for as many files as fill a block (`read_short_files`). If
anything in one of these files is unusual (damage, a torn end, another rank's spans), all of them
are read one by one, and it is named or left out.

**Shards** (`keep_rank_files`): short files are read together, a large file in stretches of windows.

    file     [ header  w1  w2  w3  w4  w5  w6  w7  w8 ]
    cuts                   ╵           ╵                  every some MB
    stretch  ├──────────────┤├──────────┤├────────────┤   from window to window

Each stretch is read by any worker that is free. The worker finds the borders by itself: the ends of
the first windows after the cuts. So no worker holds all of a large file, and many may work on it.

A stretch cannot know what stands before it, so it is read as if the file's first header were in
force. If anything in a stretch is unusual (a second run, or damage, which must be named by its
line), the file is read again as a whole. Compressed files have no places to begin at and are not
cut.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from megascan.arrays import Integers
from megascan.errors import InputError
from megascan.header import Json, RankHeader, WindowRecord
from megascan.parallel import Here, Kept, Workers, num_workers
from megascan.reader.lines import (
    Block,
    EventBlock,
    file_batches,
    parse_block,
    parsed_blocks,
    read_all,
)
from megascan.reader.segments import (
    Packed,
    Segment,
    event_schema,
    faulty_rows,
    is_mark,
    joined_ends,
    rows_of,
    settled_shard,
    span_columns,
)
from megascan.reader.templates import Templates
from megascan.schema import HEADER_EVENT, NOT_APPLICABLE, SPAN_COLUMNS, WINDOW_EVENT, Kind
from megascan.timeline import TRACE_SCHEMA, Extent, equals, in_order, is_launched, numbers, shifted


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used, and why (a predicate: "is not a JSON event")."""

    line: int
    reason: str


def read_mark(text: bytes, where: str) -> RankHeader | WindowRecord:
    """Read a header or the end of a window. Raises InputError naming `where` if it is damaged."""
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
    """What was read of one run so far."""

    header: RankHeader
    windows: list[WindowRecord] = field(default_factory=list)
    finished: list[pa.Table] = field(default_factory=list)
    num_unfinished: int = 0
    notes: list[str] = field(default_factory=list)


class FileRuns:
    """Follows a rank file from mark to mark.

    `is_settled` says that spans come in order, a window at a time.
    """

    def __init__(self, path: Path, *, is_settled: bool = False) -> None:
        self._path = path
        self._is_settled = is_settled
        self._runs: dict[str, _Run] = {}
        self._current: _Run | None = None
        self._pending: list[pa.Table] = []
        self._faults: list[BadLine] = []

    @property
    def header(self) -> RankHeader | None:
        """Return the header of the run that is being read; None before the first header."""
        return self._current.header if self._current else None

    @property
    def rank(self) -> int | None:
        """Return the rank whose spans are being read; None before the first header."""
        return self._current.header.rank if self._current else None

    def take(self, spans: pa.Table, *, in_unix_time: bool = False) -> None:
        """Take spans of the open window, relative to the run's origin unless `in_unix_time`."""
        if self._current is None:
            return
        if not in_unix_time:
            spans = shifted(spans, self._current.header.clock.origin_unix_ns)
        self._pending.append(spans)

    def fault(self, faults: Iterable[BadLine]) -> None:
        """Note lines of the open window, or before the first header, that cannot be used."""
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
            run.finished.append(in_order(pa.concat_tables(self._pending)))
        run.windows.append(window)
        self._pending = []

    def _drop_pending(self) -> None:
        """Leave out spans and faults after the last closed window, and note that.

        Before the first header, faults are kept: the first window then fails.
        """
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
        """Note that the compressed stream ended too early."""
        if self._current is not None:
            self._current.notes.append(
                f"rank {self._current.header.rank}: {self._path.name} is cut off inside its "
                "compressed data"
            )

    def take_finished(self) -> list[Segment]:
        """Return a segment for each window finished since the last call, and forget the window."""
        found = []
        for run in self._runs.values():
            tables = iter(run.finished)
            empty = TRACE_SCHEMA.empty_table()
            for window in run.windows:
                spans = next(tables) if window.num_spans else empty
                spans = _saves_between_windows_outside(spans, [window])
                found.append(
                    Segment(
                        path=self._path,
                        header=run.header,
                        windows=(window,),
                        spans=spans,
                        num_unfinished_spans=run.num_unfinished,
                        notes=tuple(run.notes),
                    )
                )
                run.notes, run.num_unfinished = [], 0
            run.windows, run.finished = [], []
        return found

    def segments(self) -> list[Segment]:
        """Return a segment for each run; call it after the last line."""
        self._drop_pending()
        return [
            Segment(
                path=self._path,
                header=run.header,
                windows=tuple(run.windows),
                spans=_saves_between_windows_outside(
                    pa.concat_tables(run.finished or [TRACE_SCHEMA.empty_table()]), run.windows
                ),
                num_unfinished_spans=run.num_unfinished,
                notes=tuple(run.notes),
            )
            for run in self._runs.values()
        ]


def _saves_between_windows_outside(spans: pa.Table, windows: Sequence[WindowRecord]) -> pa.Table:
    """Take the iteration off saves of checkpoints that were made between windows.

    The tracer keeps a save for the next window, under the number of the iteration behind which it
    was made. That one need not have been traced, and would look like an iteration that only saves.

    spans     all spans of the windows, window by window
    """
    saves = np.flatnonzero(equals(spans, "kind", Kind.CHECKPOINT))
    if not len(saves):
        return spans
    first = np.repeat(
        [window.first_iteration for window in windows], [window.num_spans for window in windows]
    )
    iteration = numbers(spans, "iteration").copy()
    iteration[saves[iteration[saves] < first[saves]]] = NOT_APPLICABLE
    place = spans.schema.get_field_index("iteration")
    field = spans.schema.field(place)
    return spans.set_column(place, field, pa.array(iteration, field.type))


def read_rank_files(paths: Sequence[Path], here: Here | None = None) -> list[Segment]:
    """Read all runs of all files, the files in parallel by threads of this process.

    Other workers read rank files by shards: `keep_rank_files`.
    """
    here = here or Here()
    batches = list(file_batches(paths, _TOGETHER_BYTES, _SHORT_BYTES))
    num_threads = (here.num_threads or num_workers()) // max(len(batches), 1)
    read = partial(_read_batch, num_threads=num_threads)
    parts = here.results(read, ((batch,) for batch in batches))
    return [segment for part in parts for segment in part]


@cache
def _templates() -> Templates:
    """Return the templates of lines that this process has met; rank files share most of them."""
    return Templates(event_schema(SPAN_COLUMNS))


def read_rank_file(
    path: Path, templates: Templates | None = None, num_threads: int = 1
) -> list[Segment]:
    """Read everything that a rank file holds, one segment a run, in file order.

    `templates` may be shared by files; with several threads a file's blocks are parsed in parallel.

    Spans, damaged lines and torn ends after a run's last window mark are left out and noted.
    Raises InputError for damage before a window mark, naming file and line.
    """
    runs = FileRuns(path)
    parser = templates or _templates()
    for block, events in parsed_blocks(path, parser, num_threads):
        if events is not None:
            follow(runs, events, path)
        if block.torn:
            runs.tear()
    return runs.segments()


def read_part(
    path: Path, header: RankHeader, part: tuple[int, int], num_threads: int
) -> list[Segment]:
    """Read the windows of a plain rank file that stand in bytes part[0] to part[1].

    Both bytes must follow a window's end, or be the file's begin or end; `header` is in force at
    the part's begin. Raises InputError as `read_rank_file`, but lines count from the part's begin.
    """
    runs = FileRuns(path)
    if part[0]:
        runs.mark(header, 1)
    for _, events in parsed_blocks(path, _templates(), num_threads, part):
        if events is not None:
            follow(runs, events, path)
    return runs.segments()


def _read_batch(paths: Sequence[Path], num_threads: int) -> list[Segment]:
    found = read_short_files(paths, _templates()) if len(paths) > 1 else None
    if found is None:
        parts = (read_rank_file(path, num_threads=num_threads) for path in paths)
        found = [segment for part in parts for segment in part]
    return found


def follow(runs: FileRuns, events: EventBlock, path: Path) -> None:
    """Take a block's spans and marks in their order."""
    marks = np.flatnonzero(is_mark(events.table)).tolist()
    faults = [(damage.row, BadLine(damage.line, damage.reason)) for damage in events.damages]
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
    """Take the spans of rows `begin` to `end`; other events (names, counters) are passed over."""
    part: pa.Table = events.table.slice(begin, end - begin)
    rows = np.flatnonzero(equals(part, "ph", "X"))
    if runs.rank is None or not len(rows):
        return
    part = rows_of(part, rows)
    spans = span_columns(part, SPAN_COLUMNS)
    runs.fault(
        BadLine(events.numbers[begin + int(rows[row])], reason)
        for row, reason in faulty_rows(spans, part, runs.rank)
    )
    runs.take(spans)


def follow_together(
    runs: Sequence[FileRuns],
    events: EventBlock | None,
    counts: Sequence[int],
    paths: Sequence[Path],
) -> list[Callable[[], None]] | None:
    """Return a function for each file that does the work of `follow`.

    The events of all files were parsed together; `counts` are the numbers of lines of each file.
    Columns are made and ordered for all files in one go. Return None if anything is unusual: then
    each file must be followed by itself.
    """
    first_row = np.cumsum([0, *counts])
    if events is None or events.damages or events.table.num_rows != first_row[-1]:
        return None
    try:
        marks = _marks(events, first_row, paths)
    except InputError:
        return None
    headers = [each.header for each in runs]
    behind = []
    for mark in marks:  # the header in force for the spans behind each mark
        if isinstance(mark.record, RankHeader):
            headers[mark.file] = mark.record
        behind.append(headers[mark.file])
    parts = _spans_behind(events.table, marks, behind)
    if parts is None:
        return None
    by_file: list[list[tuple[_Mark, pa.Table]]] = [[] for _ in runs]
    for mark, spans in zip(marks, parts, strict=True):
        by_file[mark.file].append((mark, spans))
    return [partial(_follow_parts, *each) for each in zip(runs, by_file, strict=True)]


def _follow_parts(runs: FileRuns, parts: Sequence[tuple[_Mark, pa.Table]]) -> None:
    """Take each mark, then the spans behind it."""
    for mark, spans in parts:
        if mark.record is not None:
            runs.mark(mark.record, mark.line)
        if spans.num_rows:
            runs.take(spans, in_unix_time=True)


@dataclass(frozen=True)
class _Mark:
    """A header or window end, or without a record a file's begin: its row among the events, its
    file, and its line in the file.
    """

    row: int
    file: int
    line: int
    record: RankHeader | WindowRecord | None = None


def _marks(events: EventBlock, first_row: Integers, paths: Sequence[Path]) -> list[_Mark]:
    """Return all marks of some files in order; raises InputError for damaged ones."""
    rows = np.flatnonzero(is_mark(events.table))
    files = np.searchsorted(first_row, rows, side="right") - 1
    lines = rows - first_row[files] + 2  # line 1 is the opening bracket
    texts = events.rows_text(rows.tolist())
    found = [_Mark(row, file, 0) for file, row in enumerate(first_row[:-1].tolist())]
    for row, file, line, text in zip(
        rows.tolist(), files.tolist(), lines.tolist(), texts, strict=True
    ):
        found.append(_Mark(row, file, line, read_mark(text, f"{paths[file]}, line {line}")))
    return sorted(found, key=lambda mark: mark.row)  # a file's begin before a mark in its first row


def _spans_behind(
    table: pa.Table, marks: Sequence[_Mark], headers: Sequence[RankHeader | None]
) -> list[pa.Table] | None:
    """Return the spans behind each mark, up to the next, in order and in unix time; None if any is
    unusable. `headers` are those in force there.
    """
    rows = np.flatnonzero(equals(table, "ph", "X"))
    if not len(rows):
        return None
    mark = np.searchsorted([mark.row for mark in marks], rows, side="right") - 1
    events = rows_of(table, rows)
    spans = span_columns(events, SPAN_COLUMNS)
    ranks = np.array([NOT_APPLICABLE if one is None else one.rank for one in headers])
    if faulty_rows(spans, events, rank=None) or (ranks[mark] != numbers(spans, "rank")).any():
        return None
    origin_ns = np.array([0 if one is None else one.clock.origin_unix_ns for one in headers])
    order = np.lexsort((-numbers(spans, "duration_ns"), numbers(spans, "start_ns"), mark))
    spans = shifted(spans, origin_ns[mark]).take(pa.array(order))
    bounds = np.searchsorted(mark, np.arange(len(marks) + 1))
    return [spans.slice(begin, end - begin) for begin, end in pairwise(bounds.tolist())]


_OPENING, _CLOSING = b"[\n", b"\n]"
_SHORT_BYTES = 1 << 20
_TOGETHER_BYTES = 2 << 20


def read_short_files(paths: Sequence[Path], templates: Templates) -> list[Segment] | None:
    """Read files together; return None unless all of them are whole and undamaged."""
    bodies = [_body(path) for path in paths]
    if not all(bodies):
        return None
    events = parse_block(Block(bytearray(b"\n").join(bodies), 1), templates)
    runs = [FileRuns(path, is_settled=True) for path in paths]
    counts = [body.count(b"\n") + 1 for body in bodies]
    followed = follow_together(runs, events, counts, paths)
    if followed is None:
        return None
    for follow_it in followed:
        follow_it()
    return [segment for each in runs for segment in each.segments()]


def _body(path: Path) -> bytes:
    """Return a file's lines without the brackets around them; b"" if the file is cut off."""
    content, torn = read_all(path)
    if torn or not content.startswith(_OPENING):
        return b""
    return content.rstrip(b"\n").removeprefix(_OPENING).removesuffix(_CLOSING)


STRETCH_BYTES = 16 << 20
"""Least bytes of a large rank file that one piece of work reads."""
_HEADER_LINE = b'{"name":"%s",' % HEADER_EVENT.encode()
_WINDOW_LINE = b'\n{"name":"%s",' % WINDOW_EVENT.encode()
"""How lines with headers and window ends begin, as `megascan.rankfile` writes them."""


@dataclass(frozen=True)
class _Stretch:
    """A part of a file, from one cut to the next; `size` is the size of the whole file."""

    path: Path
    cut: int
    until: int
    size: int


def keep_rank_files(
    batches: Sequence[Sequence[Path]], workers: Workers, meanwhile: Callable[[], None]
) -> Iterator[tuple[Kept, Packed]]:
    """Read batches of files by shards that stay with the workers, numbered in their order.

    The segment of a file that is read in stretches comes with the file's last stretch. `meanwhile`
    is called in this process when the workers have begun.
    """
    parts = [part for files in batches for part in _divided(files)]
    num_threads = max(num_workers() // max(len(parts), 1), 1)
    tasks = ((part, num_threads, number) for number, part in enumerate(parts))
    reading = workers.keep(_read_shard, tasks)
    meanwhile()
    stretches: list[Segment | None] = []
    again: list[Path] = []
    for part, (kept, packed) in zip(parts, reading, strict=True):
        found = packed
        if isinstance(part, _Stretch):
            stretches += packed.segments or (None,)
            found = Packed(())
            if part.until == part.size:
                whole = _joined_stretches(stretches)
                found = Packed((whole,) if whole else ())
                again += () if whole else (part.path,)
                stretches = []
        yield kept, found
    tasks = (([path], num_threads, len(parts) + place) for place, path in enumerate(again))
    yield from workers.keep(_read_shard, tasks)


def _divided(files: Sequence[Path]) -> list[Sequence[Path] | _Stretch]:
    """Return the parts to read: all files together, or a single large file in stretches."""
    size = files[0].stat().st_size
    count = size // STRETCH_BYTES
    if len(files) > 1 or count < 2 or _opening(files[0]) != _OPENING:
        return [files]
    cuts = [size * number // count for number in range(count + 1)]
    return [_Stretch(files[0], low, high, size) for low, high in pairwise(cuts)]


def _opening(path: Path) -> bytes:
    """Return a file's first bytes; b"" if it cannot be read, which raises an error later."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_OPENING))
    return b""


def _read_shard(
    part: Sequence[Path] | _Stretch, num_threads: int, number: int
) -> tuple[pa.Table, Packed]:
    """Return shard `number` with all spans of some files or of a stretch, and their segments with
    the ends only. For a stretch that cannot be read by itself both are empty.
    """
    if not isinstance(part, _Stretch):
        return settled_shard(read_rank_files(part, Here(num_threads)), number)
    segment = _segment_of_stretch(part, num_threads)
    if segment is None:
        return TRACE_SCHEMA.empty_table(), Packed(())
    spans, packed = settled_shard([segment], number)
    (ends,) = packed.segments
    stays = tuple(replace(one, extent=_extent(spans, ends.spans.num_rows)) for one in ends.stays)
    return spans, Packed((replace(ends, stays=stays),))


def _segment_of_stretch(stretch: _Stretch, num_threads: int) -> Segment | None:
    """Read a stretch; return None if it has damage or another run than the file's first header."""
    path = stretch.path
    try:
        header = _first_header(path)
        if header is None:
            return None
        part = _between_windows(stretch)
        if part is None:
            return Segment(path=path, header=header, windows=(), spans=TRACE_SCHEMA.empty_table())
        found = read_part(path, header, part, num_threads)
    except (InputError, OSError):  # reading the whole file will name the line
        return None
    return found[0] if len(found) == 1 and found[0].header == header else None


def _first_header(path: Path) -> RankHeader | None:
    """Return the header on a file's second line; None if that line is no header."""
    with path.open("rb") as file:
        file.readline()
        line = file.readline()
    if not line.startswith(_HEADER_LINE):
        return None
    mark = read_mark(line.rstrip(b",\n"), str(path))
    return mark if isinstance(mark, RankHeader) else None


def _between_windows(stretch: _Stretch) -> tuple[int, int] | None:
    """Return (begin, end) of a stretch's windows: from after the first window end at or after the
    cut to after the first window end at or after the next cut; None if there is none between cuts.
    """
    begin, end = 0, stretch.size
    with (
        stretch.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        if stretch.cut:
            line = text.find(_WINDOW_LINE, stretch.cut, stretch.until + len(_WINDOW_LINE) - 1)
            if line < 0:
                return None
            begin = _behind(text, line, stretch.size)
        if stretch.until < stretch.size:
            line = text.find(_WINDOW_LINE, stretch.until, stretch.size)
            end = _behind(text, line, stretch.size) if line >= 0 else end
    return begin, end


def _behind(text: mmap.mmap, line: int, size: int) -> int:
    """Return where the next line begins; `line` is the line end before the current line."""
    return text.find(b"\n", line + 1, size) + 1 or size


def _extent(spans: pa.Table, num_ends: int) -> Extent | None:
    """Return the times and iterations that a stretch's spans cover; None without spans."""
    if not spans.num_rows:
        return None
    start_ns, duration_ns = numbers(spans, "start_ns"), numbers(spans, "duration_ns")
    end_ns, iteration = start_ns + duration_ns, numbers(spans, "iteration")
    on_device = np.flatnonzero(is_launched(spans))

    def span(row: int) -> tuple[int, int]:
        return int(start_ns[row]), int(duration_ns[row])

    return Extent(
        num_ends=num_ends,
        start_ns=int(start_ns[0]),
        last_start_ns=int(start_ns[-1]),
        last=span(int(end_ns.argmax())),
        device=span(int(on_device[end_ns[on_device].argmax()])) if len(on_device) else None,
        first_iteration=int(iteration.min(where=iteration >= 1, initial=np.iinfo(np.int64).max)),
        last_iteration=int(iteration.max()),
    )


def _joined_stretches(stretches: Sequence[Segment | None]) -> Segment | None:
    """Join the segments of a file's stretches; return None if any of them is None."""
    found = [one for one in stretches if one is not None]
    if len(found) < len(stretches):
        return None
    stays = tuple(stay for one in found for stay in one.stays if stay.extent)
    return replace(
        found[0],
        windows=tuple(window for one in found for window in one.windows),
        spans=in_order(joined_ends(found)),
        num_unfinished_spans=sum(one.num_unfinished_spans for one in found),
        notes=tuple(note for one in found for note in one.notes),
        stays=stays or found[0].stays,
    )
