"""Write a timeline to a file: format by suffix, blocks made where the spans are, written in order.

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

from isal import isal_zlib

from megascan.errors import UsageError
from megascan.export.arrows import Hop
from megascan.export.blocks import Block, Head
from megascan.export.chrome import chrome_blocks, chrome_head
from megascan.export.tracks import Drawing, Mark, Selection, make_drawing
from megascan.overwriting import GrowingFile, partial_of, replacing
from megascan.parallel import Here, Workers, appended
from megascan.timeline import ShardedTimeline, Timeline, give_back_memory, sharded

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
        head, blocks = _blocks(drawing, file_format.encoding)
        return sum(_written(head, blocks, timeline.workers, file_format.gzipped, GrowingFile(file)))


def _written(
    head: Head, blocks: Iterable[Block], workers: Workers, gzipped: bool, output: GrowingFile
) -> Iterator[int]:
    """Write each piece, in order, and yield its number of events. Workers make unfinished blocks.

    The head of thousands of ranks takes seconds, so it is made after the workers have begun.
    """

    def written_head() -> int:
        count, text = head.make()
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


def _blocks(drawing: Drawing, encoding: Encoding) -> tuple[Head, Iterator[Block]]:
    if encoding is Encoding.CHROME:
        return chrome_head(drawing), chrome_blocks(drawing)
    from megascan.export.perfetto import perfetto_pieces

    return perfetto_pieces(drawing)
