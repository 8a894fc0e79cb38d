"""Writing Megatron's indexed files piece by piece, in memory that does not grow with the data.

megatron.core's own builder keeps the length of every document as a Python object until the end.
Here lengths go to a file of their own as they come, which also makes a file that was cut off
continuable: cut both back to a known size and go on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megascan.errors import InputError, OutputError
from training.data.encoding import EncodedTexts
from training.data.indexed import INDEX_HEADER, INDEX_MAGIC, TYPE_OF_CODE

_SMALL_VOCABULARY = 65500
"""Below this many ids megatron.core stores uint16, from there on int32."""

_CHUNK = 1 << 18
"""Lengths handled at a time when an index is written."""


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """How much of a data set there is."""

    num_documents: int = 0
    num_tokens: int = 0


def id_type_for(vocab_size: int) -> np.dtype[np.integer]:
    """Type that ids below ``vocab_size`` are stored in, the same as megatron.core's choice."""
    return np.dtype(np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32)


class IndexedWriter:
    """A data set in the making: ``FOLDER/NAME.bin`` and ``.lengths``, later ``.idx``.

    ``size`` says how much is kept of what an earlier writer left there; the rest is cut off.
    Raises InputError when less is there, OutputError when the disk is full or forbids it.
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
            with contextlib.suppress(OSError):  # a full disk was reported by what wrote last
                file.close()

    def add(self, texts: EncodedTexts) -> None:
        """Append documents."""
        with reported(self._paths[0]):
            self._bin.write(texts.ids.astype(self._id_type).data)
            self._lengths.write(texts.lengths.data)
        self._grow(num_documents=len(texts.lengths), num_tokens=len(texts.ids))

    def add_data(self, data: BinaryIO, lengths: Iterator[npt.NDArray[np.int32]]) -> None:
        """Append another data set of the same id type: its ``.bin`` and its lengths in pieces."""
        for piece in lengths:
            num_tokens = int(piece.sum(dtype=np.int64))
            with reported(self._paths[0]):
                self._lengths.write(piece.data)
                _copy(data, self._bin, num_tokens * self._id_type.itemsize)
            self._grow(num_documents=len(piece), num_tokens=num_tokens)

    def flush(self) -> DataSize:
        """Put everything on the disk for good; returns how much that is."""
        with reported(self._paths[0]):
            for file in (self._bin, self._lengths):
                file.flush()
                os.fdatasync(file.fileno())
        return self.size

    def finish(self) -> tuple[Path, Path]:
        """Write the index and end writing; returns where the ``.bin`` and the ``.idx`` are."""
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
    """Give a finished data set its final names; can be repeated after it was cut short.

    An older index goes first and the new one comes last: at no moment does an index stand beside
    data that is not its own.
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
    """Turn what the disk refuses into an OutputError that names the file."""
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
