"""Write a timeline to a file: format by suffix, blocks made where the spans are, written in order.

A file gets its name only when it is complete (`replacing`). Gzip is done block by block: members in
a row are one gzip file, so blocks compress in parallel. isal (Intel's library) is four times faster
than zlib at its fastest level and no larger. Members carry no time of day: same input, same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from megascan.errors import OutputError, UsageError
from megascan.export.blocks import Block
from megascan.export.chain import Hop
from megascan.export.chrome import chrome_blocks
from megascan.export.drawing import Drawing, Mark, Selection, make_drawing
from megascan.parallel import Here, Workers
from megascan.timeline import ShardedTimeline, Timeline, sharded

_GZIP_WINDOW = 31  # a 32 KiB window, with gzip's header and checksum
_FAST = 1


def gzip_member(block: bytes | memoryview) -> bytes:
    """Compress a block to one complete gzip member."""
    compressor = isal_zlib.compressobj(_FAST, isal_zlib.DEFLATED, _GZIP_WINDOW)
    return bytes(compressor.compress(block)) + bytes(compressor.flush())


def make_block(
    make: Callable[..., bytes | memoryview], gzipped: bool, num_events: int, *arguments: object
) -> tuple[int, bytes]:
    """Make the bytes of a block and encode them; return its number of events with them."""
    return num_events, encoded(make(*arguments), gzipped)


def encoded(block: bytes | memoryview, gzipped: bool) -> bytes:
    """Return what is written of a block."""
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


def check_free(path: Path, *, force: bool) -> None:
    """Raise OutputError, before any work is done, when a file must not or cannot be written.

    For an existing file without `force`, for a device or a pipe whatever `force` says, and for a
    folder that is not there or cannot be written.
    """
    folder = target_of(path).parent
    _check_name(path, force=force)
    if not folder.is_dir():
        raise OutputError(f"{path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{path}: the folder {folder} cannot be written to; choose another place")


def target_of(path: Path) -> Path:
    """Return the file that a name stands for: what links lead to is written, and the links stay.

    Raises OutputError for links that lead nowhere but to themselves.
    """
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OutputError(f"{path}: is a link that leads to itself; choose another name")
    return target


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when it is complete.

    The bytes go to `.<name>.part` next to it, are synced and renamed, so that a full disk or a
    killed process leaves no half file under the final name; the leftover of such a process is
    overwritten. Raises OutputError as `check_free`, and for everything the file system refuses.
    """
    check_free(path, force=force)
    target = target_of(path)
    partial, ours = _partial_of(target), None
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            ours = os.fstat(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not _is(partial, ours):
            raise OutputError(
                f"{path}: another process is writing it, too; wait for that one, or give another "
                "name"
            )
        _check_name(path, force=force)
        partial.replace(target)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "free some space or choose another place"
        ) from error
    finally:
        if ours is not None and _is(partial, ours):
            _remove_quietly(partial)


def leftovers(path: Path) -> list[Path]:
    """Return what killed processes have left of other timelines in the folder of `path`."""
    found = path.parent.glob(".*.part")
    endings = tuple(f"{suffix}.part" for suffix in _FORMATS)
    own = _partial_of(path)
    return sorted(each for each in found if each.name.endswith(endings) and each != own)


def _partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _is(partial: Path, file: os.stat_result) -> bool:
    """Tell whether a name still stands for a file, and not for what another process put there."""
    try:
        return os.path.samestat(partial.stat(), file)
    except OSError:
        return False


def _check_name(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise OutputError(
            f"{path}: is a device or a pipe, and a file would take its place; give the name of a "
            "file (--force does not allow this)"
        )
    if path.exists() and not force:
        raise OutputError(f"{path}: exists already; pass --force to replace it")


def _remove_quietly(partial: Path) -> None:
    try:
        partial.unlink(missing_ok=True)
    except OSError:
        return  # the reason it cannot be removed is the error being reported


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
    their own, and so is the `chain` that determines each iteration's end, whose hops name rows of
    the whole timeline (all spans come to this process for it). The same shards give the same bytes,
    whoever holds them. Raises UsageError for another suffix and OutputError when the file exists
    (without `force`) or cannot be written.
    """
    if chain and isinstance(timeline, ShardedTimeline):
        timeline = timeline.whole()
    if isinstance(timeline, Timeline):
        timeline = sharded(timeline, Here())
    file_format = format_of(path)
    with replacing(path, force=force) as file:
        drawing = make_drawing(timeline, selection or Selection(), marks, chain)
        num_events = 0
        blocks = _blocks(drawing, file_format.encoding)
        for count, data in _made(blocks, timeline.workers, file_format.gzipped):
            file.write(data)
            num_events += count
    return num_events


def _made(blocks: Iterable[Block], workers: Workers, gzipped: bool) -> Iterator[tuple[int, bytes]]:
    """Yield number of events and bytes of each block, in order; workers make those that are not."""
    for is_made, some in groupby(blocks, lambda block: isinstance(block.made, bytes)):
        if is_made:
            for block in some:
                if isinstance(block.made, bytes):
                    yield block.num_events, encoded(block.made, gzipped)
            continue
        tasks = ((one.made, gzipped, one.num_events, *one.arguments) for one in some)
        yield from workers.results(make_block, tasks)


def _blocks(drawing: Drawing, encoding: Encoding) -> Iterator[Block]:
    if encoding is Encoding.CHROME:
        return chrome_blocks(drawing)
    from megascan.export.perfetto import perfetto_blocks

    return perfetto_blocks(drawing)
