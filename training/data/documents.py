"""Turn JSON Lines files into token ids, in this process or in several, in the order of the input.

    files ─ read_line_batches ─ batches of raw lines ─ encode_batches ─ ids by document and key
            one process         256 KiB each           one or many processes

Only a few batches are under way at any time, so memory stays flat whatever the size of the input,
and the number of workers never changes the output.
"""

from __future__ import annotations

import bz2
import functools
import io
import itertools
import lzma
import stat
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import orjson
from isal import igzip

from megascan.errors import InputError
from megascan.parallel import in_order, process_pool
from training.data.tokenizers import Tokenizer, TokenizerSettings, build_tokenizer

BATCH_BYTES = 256 * 1024
"""A batch is closed when it holds this many bytes: much against the cost of sending it to a worker,
little against memory."""

_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place between two lines of the input, from which to continue.

    ``file`` is the number of the file from 0; ``line`` and ``offset_bytes`` are the lines and the
    unpacked bytes of that file before the place.
    """

    file: int = 0
    line: int = 0
    offset_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LineBatch:
    """Consecutive lines of a file; ``first_line`` counts from 1, ``end`` is after the last line."""

    path: str
    first_line: int
    lines: tuple[bytes, ...]
    end: Position


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading; unpack gzip, xz and bzip2, which are recognized by the first bytes.

    Names do not matter: a ``corpus.jsonl`` that is really gzip reads as well as a ``corpus.gz``.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder: --input takes JSON Lines files")
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(
                f"{path} is a pipe or a device, and a run that is ended goes on from a place in "
                "its input: write it to a file first"
            )
        with path.open("rb") as file:
            magic = file.read(6)
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

    The part of a packed file before ``start`` is unpacked again, which is fast compared with
    tokenizing. Raises InputError, with the number of the last line that could be read, when a
    packed file is damaged.
    """
    begin = start or Position()
    for number in range(begin.file, len(paths)):
        yield from _batches_of_file(paths[number], begin, batch_bytes)
        begin = Position(file=number + 1)


def texts_of_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the text under each key of one line.

    Raises InputError that says what is wrong with the line, without file and line number.
    """
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"not a JSON document ({error})") from error
    if not isinstance(document, dict):
        raise InputError(f"expected a JSON object, got {type(document).__name__}")
    return [_text_under(document, key) for key in keys]


def _buffered(unpacking: object) -> BinaryIO:
    """Return a file that splits lines in C; the unpacking classes do so in Python."""
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


_BATCHES_PER_WORKER = 4  # enough that no worker waits while the results are written in order


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """How a line becomes ids: the keys of its texts, the tokenizer, whether an end id is added."""

    tokenizer: TokenizerSettings
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True, kw_only=True)
class EncodedTexts:
    """Ids of consecutive documents: ``ids`` (token,) of all documents, ``lengths`` (document,)."""

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """The result of one `LineBatch`: ids by key, and what could not be used.

    ``invalid`` has one sentence, ``file:line: what is wrong``, for each line left out; ``end`` is
    where the batch ends in the input.
    """

    by_key: tuple[EncodedTexts, ...]
    num_lines: int
    size_bytes: int
    invalid: tuple[str, ...]
    end: Position


def encode_batch(settings: EncodingSettings, batch: LineBatch) -> EncodedBatch:
    """Parse and tokenize the lines of a batch; blank lines and empty texts give no document."""
    tokenizer = _tokenizer(settings.tokenizer)
    documents: list[list[list[int]]] = [[] for _ in settings.json_keys]
    invalid: list[str] = []
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if not line.strip():
            continue
        try:
            ids_by_key = _encode_line(settings, tokenizer, line)
        except InputError as error:
            invalid.append(f"{batch.path}:{number}: {error}")
            continue
        for documents_of_key, ids in zip(documents, ids_by_key, strict=True):
            if ids:
                documents_of_key.append(ids)
    return EncodedBatch(
        by_key=tuple(_packed(ids) for ids in documents),
        num_lines=len(batch.lines),
        size_bytes=sum(len(line) for line in batch.lines),
        invalid=tuple(invalid),
        end=batch.end,
    )


def encode_batches(
    settings: EncodingSettings, batches: Iterable[LineBatch], *, num_workers: int
) -> Generator[EncodedBatch, None, None]:
    """Encode batches with ``num_workers`` processes; yield results in the order of the input.

    Raises MissingError when a worker is killed from outside.
    """
    encode = functools.partial(encode_batch, settings)
    if num_workers == 1:
        yield from map(encode, batches)
        return
    # Spawned, not forked: the parent may have torch's threads already.
    with process_pool(num_workers, "spawn", "pass fewer --workers") as pool:
        most_waiting = num_workers * _BATCHES_PER_WORKER
        yield from in_order(pool, encode, batches, most_waiting=most_waiting)


@functools.cache
def _tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Return this process's tokenizer, loaded once: that takes longer than to encode a batch."""
    return build_tokenizer(settings)


def _encode_line(settings: EncodingSettings, tokenizer: Tokenizer, line: bytes) -> list[list[int]]:
    """Return the ids of a line by key; InputError where the text of any key cannot be used."""
    encoded = [tokenizer.tokenize(text) for text in texts_of_line(line, settings.json_keys)]
    if settings.append_eod:
        return [[*ids, tokenizer.eod] if ids else ids for ids in encoded]
    return encoded


def _packed(documents: list[list[int]]) -> EncodedTexts:
    lengths = np.fromiter((len(ids) for ids in documents), dtype=np.int32, count=len(documents))
    ids = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.int32)
    return EncodedTexts(ids=ids, lengths=lengths)
