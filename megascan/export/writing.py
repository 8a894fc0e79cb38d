"""Timeline to file: format by suffix, blocks made by several threads, written in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from megascan.export.block import Block
from megascan.export.chrome import chrome_blocks
from megascan.export.compression import block_encoder
from megascan.export.destination import Encoding, format_of, replacing
from megascan.export.drawing import Drawing, make_drawing
from megascan.export.selection import Mark, Selection
from megascan.pipeline import across_threads
from megascan.timeline import Timeline


class Encoder(Protocol):
    """Makes and encodes blocks, and gives them back in order with their numbers of events."""

    def __call__(
        self, blocks: Iterable[Block], *, gzipped: bool
    ) -> Iterator[tuple[int, bytes | memoryview]]:
        """See `encode_here`."""


def encode_here(
    blocks: Iterable[Block], *, gzipped: bool
) -> Iterator[tuple[int, bytes | memoryview]]:
    """By threads of this process."""
    encode = block_encoder(gzipped)
    return across_threads(lambda block: (block.num_events, encode(block.make())), blocks)


def write_timeline(
    timeline: Timeline,
    path: Path,
    *,
    force: bool = False,
    selection: Selection | None = None,
    marks: Sequence[Mark] = (),
    encode: Encoder = encode_here,
) -> int:
    """Write a timeline for a viewer and return the number of events in the file.

    The suffix decides the format: `.json` and `.json.gz` are Chrome JSON, `.pftrace` and
    `.pftrace.gz` Perfetto's protobuf. `selection` limits the spans, `marks` are drawn on tracks
    of their own. The same timeline gives the same bytes, whoever encodes its blocks
    (`aggregate.cluster`). Raises UsageError for another suffix
    and OutputError when the file exists (without `force`) or cannot be written.
    """
    file_format = format_of(path)
    with replacing(path, force=force) as file:
        drawing = make_drawing(timeline, selection or Selection(), marks)
        num_events = 0
        blocks = _blocks(drawing, file_format.encoding)
        for count, data in encode(blocks, gzipped=file_format.gzipped):
            file.write(data)
            num_events += count
    return num_events


def _blocks(drawing: Drawing, encoding: Encoding) -> Iterator[Block]:
    if encoding is Encoding.CHROME:
        return chrome_blocks(drawing)
    from megascan.export.perfetto import perfetto_blocks

    return perfetto_blocks(drawing)
