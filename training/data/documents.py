"""JSON Lines files to batches of raw lines, and one raw line to its texts.

Reading is split in two because it runs in two places: one process reads and unpacks the files
(`read_line_batches`), many processes parse and tokenize the lines (`texts_of_line`).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import orjson

from megascan.errors import InputError

BATCH_BYTES = 256 * 1024
"""A batch is closed when it holds this much: large against the cost of sending it to a worker,
small against memory."""

_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class LineBatch:
    """Consecutive lines of one file; ``first_line`` counts from 1."""

    path: str
    first_line: int
    lines: tuple[bytes, ...]


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
        return cast(BinaryIO, gzip.open(path, "rb"))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    if magic.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path, "rb"))
    return path.open("rb")


def read_line_batches(
    paths: Iterable[Path], *, batch_bytes: int = BATCH_BYTES
) -> Iterator[LineBatch]:
    """Read files one after the other, in batches of about ``batch_bytes``.

    Raises InputError, with the last line that could be read, when a packed file is damaged.
    """
    for path in paths:
        yield from _batches_of_file(path, batch_bytes)


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


def _batches_of_file(path: Path, batch_bytes: int) -> Iterator[LineBatch]:
    lines: list[bytes] = []
    first_line, num_lines, size_bytes = 1, 0, 0
    with open_plain(path) as file:
        try:
            for line in file:
                num_lines += 1
                lines.append(line if num_lines > 1 else line.removeprefix(_UTF8_MARK))
                size_bytes += len(line)
                if size_bytes >= batch_bytes:
                    yield LineBatch(path=str(path), first_line=first_line, lines=tuple(lines))
                    lines, first_line, size_bytes = [], num_lines + 1, 0
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise InputError(
                f"{path} is damaged or cut off after line {num_lines} ({error}): fetch it again"
            ) from error
    if lines:
        yield LineBatch(path=str(path), first_line=first_line, lines=tuple(lines))


def _text_under(document: dict[str, object], key: str) -> str:
    if key not in document:
        there = ", ".join(list(document)[:8]) or "none"
        raise InputError(f"no key {key!r} (keys there: {there}); choose with --json-keys")
    text = document[key]
    if not isinstance(text, str):
        raise InputError(f"key {key!r} holds {type(text).__name__}, expected a string")
    return text
