"""Write a timeline to a file: format by suffix, blocks made where the spans are, written in order.

A file is a head and **blocks** after it, made by the file's format (`chrome.py`, `perfetto.py`;
only the one that is asked for is loaded). At the head stands a record, as JSON: from the record and
the spans a reader restores the timeline (`megascan.reader.timeline_files`).

A file gets its name only when it is complete (`megascan.overwriting`). Gzip is done block by block:
members in a row are one gzip file, so blocks compress in parallel. isal (Intel's library) is four
times faster than zlib's fastest level, and its output no larger. Members carry no time of day, so
the same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from isal import isal_zlib

from megascan.arrays import group_starts
from megascan.errors import UsageError
from megascan.export.arrows import Hop
from megascan.export.tracks import Drawing, Mark, Selection, make_drawing
from megascan.header import Json, RankHeader, packed
from megascan.overwriting import GrowingFile, partial_of, replacing
from megascan.parallel import Here, Task, Workers, appended
from megascan.schema import SCHEMA_VERSION
from megascan.timeline import ShardedTimeline, Timeline, give_back_memory, numbers, sharded

BLOCK_ROWS = 3 << 14
"""Spans of a block: enough for column operations, few enough for several blocks in memory."""


@dataclass(frozen=True)
class Block:
    """A piece of the file: its number of events, and its bytes or a function that makes them."""

    num_events: int
    made: bytes | Callable[..., bytes | memoryview]
    arguments: Task = ()


Head: TypeAlias = Callable[[], tuple[int, bytes]]
"""Function that makes the first piece of a file, and its number of events, in this process, while
workers make the blocks after it."""


def row_blocks(num_rows: int) -> Iterator[slice]:
    """Yield the rows of a shard, one block at a time."""
    for first in range(0, num_rows, BLOCK_ROWS):
        yield slice(first, min(first + BLOCK_ROWS, num_rows))


def timeline_record(drawing: Drawing) -> dict[str, Json]:
    """Return what a reader needs, in addition to the spans, to restore the timeline.

    Headers, clocks and windows are those of the ranks that are shown. They stay dataclasses, which
    orjson writes as objects: for thousands of ranks, copies would cost more.
    """
    timeline = drawing.timeline
    ranks = drawing.ranks
    shown = [timeline.headers[rank] for rank in ranks if rank in timeline.headers]
    headers = [cast("dict[str, Json]", header.known_fields()) for header in shown]
    groups = _shared_groups(shown, headers)
    common = _common_fields(headers)
    return {
        "schema": SCHEMA_VERSION,
        "run_id": timeline.run_id,
        "layout": {**timeline.layout.to_json()},
        "groups": groups,
        "common_header": common,
        "headers": [
            {name: value for name, value in header.items() if name not in common}
            for header in headers
        ],
        "clocks": cast(
            "Json", [timeline.clocks[rank] for rank in ranks if rank in timeline.clocks]
        ),
        "clock_method": timeline.clock_method,
        "origin_ns": timeline.origin_ns,
        "completeness": timeline.completeness.to_json(),
        "windows": {
            str(rank): [window.to_json() for window in timeline.windows.get(rank, ())]
            for rank in ranks
        },
        "selection": _selection_record(drawing.selection),
        "iterations": _iterations(drawing),
        "num_spans": drawing.num_spans,
    }


def _shared_groups(
    headers: Sequence[RankHeader], records: Sequence[dict[str, Json]]
) -> dict[str, Json]:
    """Return every group once, and give each header's record the ids of its groups.

    If any group of a header contradicts the groups so far, its record gets all its groups in full.
    A large group stands in the headers of all its members; so it is written only once.
    """
    shared: dict[str, tuple[int, ...]] = {}
    for header, record in zip(headers, records, strict=True):
        own = header.groups.items()
        if all(
            (known := shared.setdefault(name, ranks)) is ranks or known == ranks
            for name, ranks in own
        ):
            record["groups"] = list[Json](header.groups)
        else:
            record["groups"] = {name: cast("Json", packed(ranks)) for name, ranks in own}
    return {name: cast("Json", packed(ranks)) for name, ranks in shared.items()}


def _common_fields(headers: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Return the fields that are equal in all headers: run, layout, versions, …"""
    if not headers:
        return {}
    return {
        name: value
        for name, value in headers[0].items()
        if all(header.get(name) == value for header in headers)
    }


def _iterations(drawing: Drawing) -> Json:
    """Return [iteration, start, end] of each iteration over all shown ranks, ns from the origin."""
    spans = drawing.iterations
    iteration = numbers(spans, "iteration")
    order = np.argsort(iteration, kind="stable")
    first = group_starts(iteration[order])
    start_ns = (numbers(spans, "start_ns") - drawing.timeline.origin_ns)[order]
    end_ns = start_ns + numbers(spans, "duration_ns")[order]
    rows = np.column_stack(
        [
            iteration[order][first],
            np.minimum.reduceat(start_ns, first),
            np.maximum.reduceat(end_ns, first),
        ]
    )
    return cast("list[Json]", rows.tolist())


def _selection_record(selection: Selection) -> Json:
    if selection.takes_all:
        return None
    return {
        name: None if values is None else sorted(values) for name, values in vars(selection).items()
    }


_GZIP_WINDOW = 31  # a 32 KiB window, with gzip's header and checksum
_FAST = 1


def gzip_member(block: bytes | memoryview) -> bytes:
    """Compress a block to one complete gzip member."""
    compressor = isal_zlib.compressobj(_FAST, isal_zlib.DEFLATED, _GZIP_WINDOW)
    return bytes(compressor.compress(block)) + bytes(compressor.flush())


def make_block(
    make: Callable[..., bytes | memoryview], gzipped: bool, num_events: int, *arguments: object
) -> tuple[int, bytes]:
    """Make and encode the bytes of a block; return (num_events, bytes)."""
    return num_events, encoded(make(*arguments), gzipped)


def encoded(block: bytes | memoryview, gzipped: bool) -> bytes:
    """Return the bytes that are written for a block: gzipped or as they are."""
    return gzip_member(block) if gzipped else bytes(block)


class Encoding(StrEnum):
    """How the events of a timeline are written."""

    CHROME = "Chrome JSON"
    PERFETTO = "Perfetto protobuf"


@dataclass(frozen=True)
class FileFormat:
    """An encoding, gzipped or not."""

    encoding: Encoding
    gzipped: bool


_FORMATS = {
    ".json": FileFormat(Encoding.CHROME, False),
    ".json.gz": FileFormat(Encoding.CHROME, True),
    ".pftrace": FileFormat(Encoding.PERFETTO, False),
    ".pftrace.gz": FileFormat(Encoding.PERFETTO, True),
}


def format_of(path: Path) -> FileFormat:
    """Return the format that a file name asks for. Raises UsageError for an unknown suffix."""
    for suffix, file_format in _FORMATS.items():
        if path.name.lower().endswith(suffix):
            return file_format
    raise UsageError(
        f"{path}: the suffix decides the format and must be one of {', '.join(_FORMATS)}"
    )


def leftovers(path: Path) -> list[Path]:
    """Return partial files of other timelines, left by killed processes next to `path`."""
    found = path.parent.glob(".*.part")
    endings = tuple(f"{suffix}.part" for suffix in _FORMATS)
    own = partial_of(path)
    return sorted(each for each in found if each.name.endswith(endings) and each != own)


def write_timeline(
    timeline: Timeline | ShardedTimeline,
    path: Path,
    *,
    force: bool = False,
    selection: Selection | None = None,
    marks: Sequence[Mark] = (),
    chain: Sequence[Hop] = (),
) -> int:
    """Write a timeline for a viewer and return the number of events in the file.

    The suffix decides the format: `.json` and `.json.gz` are Chrome JSON, `.pftrace` and
    `.pftrace.gz` Perfetto's protobuf. `selection` limits the spans; `marks` are drawn on tracks of
    their own, and so is the `chain` that determines each iteration's end. Its hops name rows of
    the whole timeline, so with a chain all spans come to this process. The same shards give the
    same bytes, wherever they are. Raises UsageError for another suffix and OutputError if the file
    exists (without `force`) or cannot be written.
    """
    if chain and isinstance(timeline, ShardedTimeline):
        timeline = timeline.whole()
    if isinstance(timeline, Timeline):
        timeline = sharded(timeline, Here())
    file_format = format_of(path)
    with replacing(path, force=force) as file:
        give_back_memory()
        drawing = make_drawing(timeline, selection or Selection(), marks, chain)
        give_back_memory()
        head, blocks = _pieces(drawing, file_format.encoding)
        return sum(_written(head, blocks, timeline.workers, file_format.gzipped, GrowingFile(file)))


def _written(
    head: Head, blocks: Iterable[Block], workers: Workers, gzipped: bool, output: GrowingFile
) -> Iterator[int]:
    """Write each piece, in order, and yield its number of events. Workers make unfinished blocks.

    The head of thousands of ranks takes seconds, so it is made after the workers have begun.
    """

    def written_head() -> int:
        count, text = head()
        output.write(encoded(text, gzipped))
        return count

    is_head_written = False
    for is_made, some in groupby(blocks, lambda block: isinstance(block.made, bytes)):
        written = appended(_encoded_here(some, gzipped), output)
        if not is_made:
            tasks = ((one.made, gzipped, one.num_events, *one.arguments) for one in some)
            written = workers.append(make_block, tasks, output)
        if not is_head_written:
            is_head_written = True
            yield written_head()
        yield from written
    if not is_head_written:  # there are no blocks
        yield written_head()


def _encoded_here(blocks: Iterable[Block], gzipped: bool) -> Iterator[tuple[int, bytes]]:
    for block in blocks:
        if isinstance(block.made, bytes):
            yield block.num_events, encoded(block.made, gzipped)


def _pieces(drawing: Drawing, encoding: Encoding) -> tuple[Head, Iterator[Block]]:
    """Return the head and the blocks of a file, in order; any worker may make any block."""
    if encoding is Encoding.CHROME:
        from megascan.export.chrome import chrome_pieces

        return chrome_pieces(drawing)
    from megascan.export.perfetto import perfetto_pieces

    return perfetto_pieces(drawing)
