"""Read rank files by shards: short ones together, a large one in stretches of its windows.

    file     [ header  w1  w2  w3  w4  w5  w6  w7  w8 ]
    cuts                   ╵           ╵                  every some MB
    stretch  ├──────────────┤├──────────┤├────────────┤   from window to window

Each stretch is read by whoever is free, who finds its borders himself: the ends of the first
windows behind the cuts. So nobody holds all of a large file, and many may work on it.

What a stretch cannot know is what stands before it. It is read as if the file's first header were
in force; whatever is out of the ordinary in one of them (a second run, damage, which is named by
its line) makes the file be read again as a whole. Compressed files have no such places to begin at
and are not cut.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from megascan.errors import InputError
from megascan.header import RankHeader
from megascan.parallel import Here, Kept, Workers, num_workers
from megascan.reader.rank_files import read_mark, read_part, read_rank_files
from megascan.reader.segments import Packed, Segment, joined_ends, settled_shard
from megascan.schema import HEADER_EVENT, WINDOW_EVENT
from megascan.timeline import TRACE_SCHEMA, Extent, in_order, is_launched, numbers

STRETCH_BYTES = 16 << 20
"""Of a large rank file: what one piece of work reads, at least."""
_OPENING = b"[\n"
_HEADER_LINE = b'{"name":"%s",' % HEADER_EVENT.encode()
_WINDOW_LINE = b'\n{"name":"%s",' % WINDOW_EVENT.encode()
"""How lines of headers and windows begin, as `megascan.rankfile` writes them."""


@dataclass(frozen=True)
class _Stretch:
    """A file from one cut to the next; `size` is the file's."""

    path: Path
    cut: int
    until: int
    size: int


def keep_rank_files(
    batches: Sequence[Sequence[Path]], workers: Workers, meanwhile: Callable[[], None]
) -> Iterator[tuple[Kept, Packed]]:
    """Read batches of files by shards that stay with the workers, numbered in their order.

    Segments of a file that is read in stretches come with the last of these. `meanwhile` is done
    here when the workers have begun.
    """
    parts = [part for files in batches for part in _parts(files)]
    num_threads = max(num_workers() // max(len(parts), 1), 1)
    tasks = ((part, num_threads, number) for number, part in enumerate(parts))
    reading = workers.keep(_read, tasks)
    meanwhile()
    stretches: list[Segment | None] = []
    again: list[Path] = []
    for part, (kept, packed) in zip(parts, reading, strict=True):
        found = packed
        if isinstance(part, _Stretch):
            stretches += packed.segments or (None,)
            found = Packed(())
            if part.until == part.size:
                whole = _joined(stretches)
                found = Packed((whole,) if whole else ())
                again += () if whole else (part.path,)
                stretches = []
        yield kept, found
    tasks = (([path], num_threads, len(parts) + place) for place, path in enumerate(again))
    yield from workers.keep(_read, tasks)


def _parts(files: Sequence[Path]) -> list[Sequence[Path] | _Stretch]:
    """Return files that are read together, or one of them in stretches."""
    size = files[0].stat().st_size
    count = size // STRETCH_BYTES
    if len(files) > 1 or count < 2 or _opening(files[0]) != _OPENING:
        return [files]
    cuts = [size * number // count for number in range(count + 1)]
    return [_Stretch(files[0], low, high, size) for low, high in pairwise(cuts)]


def _opening(path: Path) -> bytes:
    """Return how a file begins; nothing where it cannot be read, which its reader will tell."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_OPENING))
    return b""


def _read(
    part: Sequence[Path] | _Stretch, num_threads: int, number: int
) -> tuple[pa.Table, Packed]:
    """Return all spans of some files or of a stretch, the shard of a number, and their segments
    with the ends only; of a stretch that does not stand by itself, neither.
    """
    if not isinstance(part, _Stretch):
        return settled_shard(read_rank_files(part, Here(num_threads)), number)
    segment = _segment(part, num_threads)
    if segment is None:
        return TRACE_SCHEMA.empty_table(), Packed(())
    spans, packed = settled_shard([segment], number)
    (ends,) = packed.segments
    stays = tuple(replace(one, extent=_extent(spans, ends.spans.num_rows)) for one in ends.stays)
    return spans, Packed((replace(ends, stays=stays),))


def _segment(stretch: _Stretch, num_threads: int) -> Segment | None:
    """Read a stretch; None when it is not of one run, that of the file's first header."""
    path = stretch.path
    try:
        header = _first_header(path)
        if header is None:
            return None
        part = _between_windows(stretch)
        if part is None:
            return Segment(path=path, header=header, windows=(), spans=TRACE_SCHEMA.empty_table())
        found = read_part(path, header, part, num_threads)
    except (InputError, OSError):  # which reading the whole file tells by its line
        return None
    return found[0] if len(found) == 1 and found[0].header == header else None


def _first_header(path: Path) -> RankHeader | None:
    """Return the header on a file's second line; None where there is none."""
    with path.open("rb") as file:
        file.readline()
        line = file.readline()
    if not line.startswith(_HEADER_LINE):
        return None
    mark = read_mark(line.rstrip(b",\n"), str(path))
    return mark if isinstance(mark, RankHeader) else None


def _between_windows(stretch: _Stretch) -> tuple[int, int] | None:
    """Return the bytes from behind the first window at or after the cut to behind the first one at
    or after the next cut; None where no window stands between the cuts.
    """
    begin, end = 0, stretch.size
    with stretch.path.open("rb") as file, _mapped(file) as text:
        if stretch.cut:
            line = text.find(_WINDOW_LINE, stretch.cut, stretch.until + len(_WINDOW_LINE) - 1)
            if line < 0:
                return None
            begin = _behind(text, line, stretch.size)
        if stretch.until < stretch.size:
            line = text.find(_WINDOW_LINE, stretch.until, stretch.size)
            end = _behind(text, line, stretch.size) if line >= 0 else end
    return begin, end


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _behind(text: mmap.mmap, line: int, size: int) -> int:
    """Return where the line behind the one at a line end begins."""
    return text.find(b"\n", line + 1, size) + 1 or size


def _extent(spans: pa.Table, num_ends: int) -> Extent | None:
    """Return where the spans of a stretch lie; None where there are none."""
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


def _joined(stretches: Sequence[Segment | None]) -> Segment | None:
    """Return the segment of a file by those of its stretches; None when one of them is none."""
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
