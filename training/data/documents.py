"""JSON Lines files to batches of raw lines, and one raw line to its texts.

Reading is split in two because it runs in two places: one process reads and unpacks the files
(`read_line_batches`), many processes parse and tokenize the lines (`texts_of_line`).
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import orjson
from isal import igzip

from megascan.errors import InputError

BATCH_BYTES = 256 * 1024
"""A batch is closed when it holds this much: large against the cost of sending it to a worker,
small against memory."""

_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place between two lines of the input, to go on from.

    ``file`` counts from 0; ``line`` lines and ``offset_bytes`` unpacked bytes of it lie before.
    """

    file: int = 0
    line: int = 0
    offset_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LineBatch:
    """Consecutive lines of one file; ``first_line`` counts from 1, ``end`` lies after the last."""

    path: str
    first_line: int
    lines: tuple[bytes, ...]
    end: Position


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading, unpacking gzip, xz and bzip2, which its first bytes tell.

    Names are not asked: a ``corpus.jsonl`` that is really gzip reads as well as a ``corpus.gz``.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(6)
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder: --input takes JSON Lines files") from error
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): check --input") from error
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        raise InputError(f"{path} is packed with Zstandard: unpack it first, or pack it with xz")
    if magic.startswith(b"\x1f\x8b"):
        return _buffered(igzip.open(path, "rb"))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return _buffered(lzma.open(path, "rb"))
    if magic.startswith(b"BZh"):
        return _buffered(bz2.open(path, "rb"))
    return path.open("rb")


def read_line_batches(
    paths: Sequence[Path], *, start: Position | None = None, batch_bytes: int = BATCH_BYTES
) -> Iterator[LineBatch]:
    """Read files one after the other from ``start`` on, in batches of about ``batch_bytes``.

    In a packed file what lies before ``start`` is unpacked again, which is fast against
    tokenizing it. Raises InputError, with the last line that could be read, when a packed file
    is damaged.
    """
    begin = start or Position()
    for number in range(begin.file, len(paths)):
        yield from _batches_of_file(paths[number], begin, batch_bytes)
        begin = Position(file=number + 1)


def texts_of_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Give the text under each key of one line.

    Raises InputError that says what is wrong with the line, without its place.
    """
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"not a JSON document ({error})") from error
    if not isinstance(document, dict):
        raise InputError(f"expected a JSON object, got {type(document).__name__}")
    return [_text_under(document, key) for key in keys]


def _buffered(unpacking: object) -> BinaryIO:
    """Lines at the speed of C: the unpacking classes split lines in Python."""
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, unpacking), 1 << 20))


def _batches_of_file(path: Path, begin: Position, batch_bytes: int) -> Iterator[LineBatch]:
    lines: list[bytes] = []
    num_lines, offset, size_bytes = begin.line, begin.offset_bytes, 0

    def batch() -> LineBatch:
        return LineBatch(
            path=str(path),
            first_line=num_lines - len(lines) + 1,
            lines=tuple(lines),
            end=Position(file=begin.file, line=num_lines, offset_bytes=offset),
        )

    with open_plain(path) as file:
        try:
            file.seek(offset)
            for line in file:
                num_lines += 1
                offset += len(line)
                size_bytes += len(line)
                lines.append(line if num_lines > 1 else line.removeprefix(_UTF8_MARK))
                if size_bytes >= batch_bytes:
                    yield batch()
                    lines, size_bytes = [], 0
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise InputError(
                f"{path} is damaged or cut off after line {num_lines} ({error}): fetch it again"
            ) from error
    if lines:
        yield batch()


def _text_under(document: dict[str, object], key: str) -> str:
    if key not in document:
        there = ", ".join(list(document)[:8]) or "none"
        raise InputError(f"no key {key!r} (keys there: {there}); choose with --json-keys")
    text = document[key]
    if not isinstance(text, str):
        raise InputError(f"key {key!r} holds {type(text).__name__}, expected a string")
    return text
