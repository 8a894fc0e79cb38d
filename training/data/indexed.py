"""Read and write Megatron's indexed files.

A data set is ``PREFIX.bin`` (the ids of all documents one after the other) and ``PREFIX.idx``:
a header (magic, version, type code, counts), then the lengths of all sequences in ids (int32),
their offsets in bytes (int64), and the document ends as numbers of sequences (int64, the first is
0). ``PREFIX.json`` adds what Megatron's two files do not say: which tokenizer the ids come from.

`read_index` reads only the lengths; it reports a wrong path or a cut-off copy by a sentence, where
megatron.core would raise an assertion on every rank.

`IndexedWriter` writes piece by piece, in memory that does not grow with the data (megatron.core's
builder keeps the length of every document as a Python object until the end). Lengths are written to
a separate file as they come, so that an interrupted run can continue: it cuts both files back to a
known size.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from megascan.errors import InputError, OutputError
from training.data.documents import EncodedTexts
from training.data.tokenizers import Tokenizer, TokenizerSettings

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type code, number of sequences, number of document ends."""

TYPE_OF_CODE: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


@dataclass(frozen=True, kw_only=True)
class IndexSummary:
    """What ``PREFIX.idx`` says: ``lengths`` (document,) in tokens, and the type of an id."""

    prefix: str
    lengths: npt.NDArray[np.int32]
    id_type: np.dtype[np.integer]

    @property
    def num_documents(self) -> int:
        """Return the number of documents (in GPT data each sequence is a document)."""
        return len(self.lengths)

    def fingerprint(self) -> int:
        """Return a checksum of the lengths, which determine the sample indices."""
        return zlib.crc32(self.lengths.data)

    def largest_id(self, max_tokens: int = 1 << 20) -> int:
        """Return the largest id among the first ``max_tokens`` tokens."""
        ids = np.memmap(f"{self.prefix}.bin", mode="r", dtype=self.id_type)
        return int(ids[:max_tokens].max())


def output_paths(prefix: str) -> tuple[Path, Path]:
    """Return the ``.bin`` and the ``.idx`` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def published_paths(prefix: str) -> tuple[Path, ...]:
    """Return all paths that `publish` writes or removes under a prefix."""
    return *output_paths(prefix), Path(f"{prefix}.json")


def read_index(prefix: str) -> IndexSummary:
    """Read and check the index of a data set.

    Raises InputError when a file is missing, is not Megatron's, is cut off or holds no tokens.
    """
    bin_path, idx_path = output_paths(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise InputError(
                f"{path} is not there: a data set is given by the name of its .bin/.idx pair "
                "without its ending, as python -m training.preprocess_data prints it"
            )
    with idx_path.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
        if len(header) < INDEX_HEADER.size or not header.startswith(INDEX_MAGIC):
            raise InputError(f"{idx_path} is not an index of Megatron's: write it again")
        _, version, code, num_sequences, num_ends = INDEX_HEADER.unpack(header)
        if version != 1 or code not in TYPE_OF_CODE:
            raise InputError(
                f"{idx_path} has version {version} and type {code}, expected 1 and 1-8"
            )
        # Per sequence a length (4 bytes) and an offset (8), then the document ends (8).
        index_bytes = INDEX_HEADER.size + 12 * num_sequences + 8 * num_ends
        if idx_path.stat().st_size < index_bytes:
            raise InputError(
                f"{idx_path} is cut off: it has {idx_path.stat().st_size} of {index_bytes} bytes"
            )
        lengths = np.frombuffer(file.read(4 * num_sequences), dtype=np.int32)
    id_type: np.dtype[np.integer] = np.dtype(TYPE_OF_CODE[code])
    expected_bytes = int(lengths.sum(dtype=np.int64)) * id_type.itemsize
    if bin_path.stat().st_size != expected_bytes:
        raise InputError(
            f"{bin_path} has {bin_path.stat().st_size} bytes and {idx_path} tells of "
            f"{expected_bytes}: one of them is cut off or from another run, write both again"
        )
    if expected_bytes == 0:
        raise InputError(f"{bin_path} holds no tokens: preprocess a file with documents")
    return IndexSummary(prefix=prefix, lengths=lengths, id_type=id_type)


_SMALL_VOCABULARY = 65500
"""Below this many ids megatron.core stores uint16, otherwise int32."""

_CHUNK = 1 << 18
"""Number of lengths handled at a time when an index is written."""


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Number of documents and of tokens in a data set."""

    num_documents: int = 0
    num_tokens: int = 0


def id_type_for(vocab_size: int) -> np.dtype[np.integer]:
    """Return the type in which megatron.core stores ids below ``vocab_size``."""
    return np.dtype(np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32)


class IndexedWriter:
    """Writes a data set: ``FOLDER/NAME.bin`` and ``.lengths``, at the end ``.idx``.

    ``size`` is how much to keep of what an earlier writer left there; the rest is cut off. Raises
    InputError when less is there, OutputError when the files cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        id_type: np.dtype[np.integer],
        size: DataSize | None = None,
    ) -> None:
        self.name = name
        self.size = size or DataSize()
        self._id_type = id_type
        self._paths = (folder / f"{name}.bin", folder / f"{name}.lengths")
        kept_bytes = (self.size.num_tokens * id_type.itemsize, self.size.num_documents * 4)
        with reported(self._paths[0]):
            self._bin, self._lengths = (
                _open_at(path, length) for path, length in zip(self._paths, kept_bytes, strict=True)
            )

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in (self._bin, self._lengths):
            with contextlib.suppress(OSError):  # the last write has reported a full disk already
                file.close()

    def add(self, texts: EncodedTexts) -> None:
        """Append documents."""
        with reported(self._paths[0]):
            self._bin.write(texts.ids.astype(self._id_type).data)
            self._lengths.write(texts.lengths.data)
        self._grow(num_documents=len(texts.lengths), num_tokens=len(texts.ids))

    def add_data(self, data: BinaryIO, lengths: Iterator[npt.NDArray[np.int32]]) -> None:
        """Append a data set of the same id type, given as its ``.bin`` and lengths in pieces."""
        for piece in lengths:
            num_tokens = int(piece.sum(dtype=np.int64))
            with reported(self._paths[0]):
                self._lengths.write(piece.data)
                _copy(data, self._bin, num_tokens * self._id_type.itemsize)
            self._grow(num_documents=len(piece), num_tokens=num_tokens)

    def flush(self) -> DataSize:
        """Sync everything to the disk; return the size so far."""
        with reported(self._paths[0]):
            for file in (self._bin, self._lengths):
                file.flush()
                os.fdatasync(file.fileno())
        return self.size

    def finish(self) -> tuple[Path, Path]:
        """Write the index and end writing; return the paths of the ``.bin`` and the ``.idx``."""
        self.flush()
        bin_path, lengths_path = self._paths
        idx_path = bin_path.with_name(f"{self.name}.idx")
        with reported(idx_path), idx_path.open("wb") as idx:
            _write_index(idx, lengths_path, self.size.num_documents, self._id_type)
            idx.flush()
            os.fdatasync(idx.fileno())
        return bin_path, idx_path

    def _grow(self, *, num_documents: int, num_tokens: int) -> None:
        self.size = DataSize(
            num_documents=self.size.num_documents + num_documents,
            num_tokens=self.size.num_tokens + num_tokens,
        )


def publish(folder: Path, name: str, prefix: str) -> None:
    """Give a finished data set its final names; call again after an interruption to complete it.

    An older index is removed first and the new index comes last, so that an index never lies next
    to other data.
    """
    with reported(Path(f"{prefix}.bin")):
        if (folder / f"{name}.bin").exists():
            for suffix in (".idx", ".json"):
                Path(f"{prefix}{suffix}").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            made = folder / f"{name}{suffix}"
            if made.exists():
                made.replace(f"{prefix}{suffix}")


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """While inside, turn an OSError into an OutputError that names the file `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {path} ({error.strerror}): choose another --output-prefix, or make room"
        ) from error


def _open_at(path: Path, kept_bytes: int) -> BinaryIO:
    path.touch()
    if path.stat().st_size < kept_bytes:
        raise InputError(
            f"{path} has {path.stat().st_size} bytes of the {kept_bytes} that were written before: "
            f"remove the folder {path.parent} and begin again"
        )
    file = path.open("r+b")
    file.truncate(kept_bytes)
    file.seek(kept_bytes)
    return file


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        piece = source.read(min(num_bytes, 1 << 22))
        if not piece:
            raise InputError(f"{source.name} is cut off: {num_bytes} bytes are missing")
        target.write(piece)
        num_bytes -= len(piece)


def _write_index(
    idx: BinaryIO, lengths_path: Path, num_documents: int, id_type: np.dtype[np.integer]
) -> None:
    code = next(code for code, kind in TYPE_OF_CODE.items() if np.dtype(kind) == id_type)
    idx.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, num_documents, num_documents + 1))
    for lengths in _pieces(lengths_path):
        idx.write(lengths.data)
    offset = 0
    for lengths in _pieces(lengths_path):
        ends = offset + np.cumsum(lengths, dtype=np.int64) * id_type.itemsize
        idx.write(np.concatenate([[offset], ends[:-1]]).astype(np.int64).data)
        offset = int(ends[-1])
    for first in range(0, num_documents + 1, _CHUNK):
        last = min(first + _CHUNK, num_documents + 1)
        idx.write(np.arange(first, last, dtype=np.int64).data)


def _pieces(lengths_path: Path) -> Iterator[npt.NDArray[np.int32]]:
    with lengths_path.open("rb") as file:
        while len(piece := np.fromfile(file, dtype=np.int32, count=_CHUNK)):
            yield piece


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What must be equal for the ids of two data sets to mean the same.

    ``files`` has the SHA-256 of each tokenizer file by flag, so that a tokenizer may be moved but
    not changed.
    """

    tokenizer_type: str
    vocab_size: int
    eod: int
    files: dict[str, str]
    append_eod: bool

    @classmethod
    def of(cls, settings: TokenizerSettings, tokenizer: Tokenizer, *, append_eod: bool) -> Meaning:
        """Return the meaning of a tokenizer's ids; InputError when a file cannot be read."""
        named = {
            "--vocab-file": settings.vocab_file,
            "--merge-file": settings.merge_file,
            "--tokenizer-model": settings.tokenizer_model,
        }
        return cls(
            tokenizer_type=settings.tokenizer_type.value,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            files={flag: _digest(Path(name)) for flag, name in named.items() if name is not None},
            append_eod=append_eod,
        )

    def difference(self, other: Meaning) -> str | None:
        """Return the first difference, as in ``append_eod (True and False)``; None if equal."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs and field.name == "files":
                return f"the contents of {' and '.join(_unequal(ours, theirs))}"
            if ours != theirs:
                return f"{field.name} ({ours} and {theirs})"
        return None


def write_description(path: Path, meaning: Meaning, size: DataSize) -> None:
    """Write ``PREFIX.json``."""
    content = orjson.dumps(
        {"meaning": asdict(meaning), **asdict(size)},
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    with reported(path):
        path.write_bytes(content)


def read_description(prefix: str) -> Meaning | None:
    """Read ``PREFIX.json``; None when there is none, InputError when it is damaged."""
    path = Path(f"{prefix}.json")
    if not path.exists():
        return None
    try:
        return Meaning(**orjson.loads(path.read_bytes())["meaning"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} does not describe a data set ({error}): remove it, or write it again with "
            "python -m training.preprocess_data"
        ) from error


def _digest(path: Path) -> str:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


def _unequal(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return sorted(flag for flag in {*ours, *theirs} if ours.get(flag) != theirs.get(flag))
