"""Files as blocks of whole lines: plain or gzipped, complete or cut off."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascan.errors import InputError

BLOCK_BYTES = 4 << 20
_LINE_END = 10
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = zlib.MAX_WBITS | 16


@dataclass(frozen=True)
class Block:
    """Whole lines of a file, without the last one's line end; `first_line` counts from 1.

    `torn` marks the last block of a compressed stream that was cut off.
    """

    text: bytearray
    first_line: int
    torn: bool = False


@dataclass(frozen=True)
class _Piece:
    data: bytes
    torn: bool = False


def read_start(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file's (decompressed) content. Raises InputError if unreadable."""
    collected = b""
    for piece in _pieces(path, num_bytes):
        collected += piece.data
        if len(collected) >= num_bytes:
            break
    return collected[:num_bytes]


def read_blocks(path: Path) -> Iterator[Block]:
    """A file's content in blocks of whole lines, about BLOCK_BYTES each.

    Memory is bounded by the block and the longest line. Gzip is recognised by its first bytes;
    members that follow one another are read as one; a stream that was cut off ends with what is
    there and `torn`. Raises InputError for a file that cannot be read or whose compression is
    damaged.
    """
    held: list[bytes] = []
    line, torn = 1, False
    for piece in _pieces(path, BLOCK_BYTES):
        torn = torn or piece.torn
        cut = piece.data.rfind(b"\n")
        if cut < 0:
            held.append(piece.data)
            continue
        text = bytearray().join((*held, memoryview(piece.data)[:cut]))
        held = [piece.data[cut + 1 :]]
        yield Block(text, line)
        line += int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == _LINE_END)) + 1
    yield Block(bytearray().join(held), line, torn)


def read_all(path: Path) -> tuple[bytes, bool]:
    """A whole file's content, and whether its compressed stream was torn."""
    pieces = list(_pieces(path, BLOCK_BYTES))
    return b"".join(piece.data for piece in pieces), any(piece.torn for piece in pieces)


def _pieces(path: Path, size: int) -> Iterator[_Piece]:
    try:
        with path.open("rb") as file:
            first = file.read(size)
            raw = _continued(first, iter(lambda: file.read(size), b""))
            if first.startswith(_GZIP_MAGIC):
                yield from _inflated(raw, size, path)
            else:
                yield from (_Piece(data) for data in raw)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read {path}: {reason}; check its path and permissions") from error


def _continued(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _inflated(raw: Iterator[bytes], size: int, path: Path) -> Iterator[_Piece]:
    """Decompress gzip members one after the other, at most `size` bytes at a time."""
    inflater, inside = zlib.decompressobj(_GZIP_WINDOW), False
    try:
        for chunk in raw:
            data = chunk
            while data:
                inside = True
                yield _Piece(inflater.decompress(data, size))
                data = inflater.unconsumed_tail
                if inflater.eof:
                    data = inflater.unused_data.lstrip(b"\0")
                    inflater, inside = zlib.decompressobj(_GZIP_WINDOW), False
        if inside:
            yield _Piece(inflater.flush(), torn=not inflater.eof)
    except zlib.error as error:
        raise InputError(
            f"{path}: compressed data is damaged ({error}); restore the file from a good copy"
        ) from error


def read_pieces(path: Path, size: int) -> Iterator[tuple[bytes, bool]]:
    """A file's (decompressed) bytes piece by piece, and whether its stream was torn there.

    For files that have no lines; errors as `read_blocks`.
    """
    for piece in _pieces(path, size):
        yield piece.data, piece.torn
