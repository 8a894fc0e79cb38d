"""Timeline to file: format by suffix, blocks made by several threads, written in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megascan.export.block import Block
from megascan.export.chrome import chrome_blocks
from megascan.export.compression import block_encoder
from megascan.export.destination import Encoding, format_of, replacing
from megascan.export.drawing import Drawing, make_drawing
from megascan.export.pipeline import num_workers, ordered_map
from megascan.export.selection import Mark, Selection
from megascan.timeline import Timeline


def write_timeline(
    timeline: Timeline,
    path: Path,
    *,
    force: bool = False,
    selection: Selection | None = None,
    marks: Sequence[Mark] = (),
) -> int:
    """Write a timeline for a viewer and return the number of events in the file.

    The suffix decides the format: `.json` and `.json.gz` are Chrome JSON, `.pftrace` and
    `.pftrace.gz` Perfetto's protobuf. `selection` limits the spans, `marks` are drawn on tracks
    of their own. The same timeline gives the same bytes. Raises UsageError for another suffix
    and OutputError when the file exists (without `force`) or cannot be written.
    """
    file_format = format_of(path)
    encode = block_encoder(file_format.gzipped)
    with replacing(path, force=force) as file:
        drawing = make_drawing(timeline, selection or Selection(), marks)
        num_events = 0
        for count, data in ordered_map(
            lambda block: (block.num_events, encode(block.make())),
            _blocks(drawing, file_format.encoding),
            num_workers(),
        ):
            file.write(data)
            num_events += count
    return num_events


def _blocks(drawing: Drawing, encoding: Encoding) -> Iterator[Block]:
    if encoding is Encoding.CHROME:
        return chrome_blocks(drawing)
    from megascan.export.perfetto import perfetto_blocks

    return perfetto_blocks(drawing)
