"""How the text of an append becomes bytes: as it is, or as one gzip member.

Both say where the appends of a finished file lie, so that a file can be continued after a kill and
its oldest windows can be taken off without rewriting the others.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import orjson

CLOSING = b"\n]\n"
_TAIL_BYTES = 1 << 22
"""More than any event is long, the header of a job of many thousand ranks included."""
_CHUNK_BYTES = 1 << 20
_COMPRESSION_LEVEL = 3
"""Half the time of the default level for a tenth more bytes."""
_GZIP_WINDOW = zlib.MAX_WBITS | 16


class DamagedError(OSError):
    """An existing file cannot be continued: its compressed data is damaged."""


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` of a file; `first` and `last` are the first and last event in them."""

    begin: int
    end: int
    first: bytes
    last: bytes


class Framing(Protocol):
    """A way to lay text down in a file."""

    def pack(self, text: bytes) -> bytes:
        """Bytes of one append."""

    def complete_length(self, file: BinaryIO) -> int:
        """Length of a file less its closing bracket and what a kill in mid-write left."""

    def pieces(self, file: BinaryIO) -> Iterator[Piece]:
        """What the file consists of, at least one piece for every header and every window."""


class Plain:
    """Text as it is; a piece is a line with the separator before it."""

    def pack(self, text: bytes) -> bytes:
        """The text."""
        return text

    def complete_length(self, file: BinaryIO) -> int:
        """Up to the last complete event."""
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        return start + _complete_length(file.read())

    def pieces(self, file: BinaryIO) -> Iterator[Piece]:
        """Every line is one."""
        file.seek(0)
        begin = end = 0
        for line in file:
            event = line.rstrip(b",\n")
            yield Piece(begin, end + len(event), event, event)
            begin, end = end + len(event), end + len(line)


class Gzip:
    """One gzip member an append; a piece is a member."""

    def pack(self, text: bytes) -> bytes:
        """The text as a member of its own."""
        return gzip.compress(text, _COMPRESSION_LEVEL, mtime=0)

    def complete_length(self, file: BinaryIO) -> int:
        """Up to the last complete member that holds events; raises DamagedError."""
        end = 0
        for begin, member_end, text in _members(file):
            end = begin if text == CLOSING else member_end
        return end

    def pieces(self, file: BinaryIO) -> Iterator[Piece]:
        """Every complete member is one; raises DamagedError."""
        for begin, end, text in _members(file):
            events = text.strip(b"[],\n")
            yield Piece(begin, end, events.partition(b",\n")[0], events.rpartition(b"\n")[2])


def framing(*, compress: bool) -> Framing:
    """Gzip or plain."""
    return Gzip() if compress else Plain()


def _complete_length(tail: bytes) -> int:
    """Length of a file's tail up to its last complete event; 0 when only the bracket is there."""
    start = tail.rfind(b"\n") + 1
    try:
        orjson.loads(tail[start:])
    except orjson.JSONDecodeError:
        tail = tail[:start].removesuffix(b"]\n").rstrip(b",\n")
    return 0 if tail == b"[" else len(tail)


def _members(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(begin, end, text) of each complete gzip member; one that is cut off ends the file."""
    file.seek(0)
    begin = position = 0
    inflater, parts, data = zlib.decompressobj(_GZIP_WINDOW), list[bytes](), b""
    while data or (data := file.read(_CHUNK_BYTES)):
        try:
            parts.append(inflater.decompress(data))
        except zlib.error as error:
            raise DamagedError(f"compressed data is damaged at byte {begin} ({error})") from error
        position += len(data) - len(inflater.unused_data)
        data = inflater.unused_data
        if inflater.eof:
            yield begin, position, b"".join(parts)
            begin = position
            inflater, parts = zlib.decompressobj(_GZIP_WINDOW), []
