"""Megatron's indexed files: written whole or not at all, and described without opening the data.

A data set is ``PREFIX.bin`` (the ids of all documents one after the other) and ``PREFIX.idx``
(magic, version, type code, counts, then lengths, byte offsets and document ends). Writing is
megatron.core's `IndexedDatasetBuilder`; `read_index` looks at the lengths alone, so that a wrong
path or a cut-off copy is a sentence instead of an assertion on every rank.
"""

from __future__ import annotations

import contextlib
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megascan.errors import InputError, OutputError
from training.data.encoding import EncodedTexts

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, number of sequences, of documents
_TYPE_OF_CODE: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


@dataclass(frozen=True, kw_only=True)
class IndexSummary:
    """What ``PREFIX.idx`` says: ``lengths`` (documents,) in tokens, and the type of an id."""

    prefix: str
    lengths: npt.NDArray[np.int32]
    id_type: np.dtype[np.integer]

    @property
    def num_documents(self) -> int:
        """Number of sequences, which for GPT data are documents."""
        return len(self.lengths)

    def fingerprint(self) -> int:
        """Checksum of the lengths, which decide every sample index built over this data."""
        return zlib.crc32(self.lengths.data)

    def largest_id(self, max_tokens: int = 1 << 20) -> int:
        """Largest id among the first ``max_tokens`` tokens."""
        ids = np.memmap(f"{self.prefix}.bin", mode="r", dtype=self.id_type)
        return int(ids[:max_tokens].max())


def output_paths(prefix: str) -> tuple[Path, Path]:
    """Give the ``.bin`` and the ``.idx`` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def read_index(prefix: str) -> IndexSummary:
    """Read and check the index of a data set.

    Raises InputError when a file is missing, is none of Megatron's, is cut off or is empty.
    """
    bin_path, idx_path = output_paths(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise InputError(
                f"{path} is not there: --data-path takes the name of a .bin/.idx pair without "
                "its ending, as python -m training.preprocess_data prints it"
            )
    with idx_path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise InputError(f"{idx_path} is not an index of Megatron's: write it again")
        _, version, code, num_sequences, num_ends = _HEADER.unpack(header)
        if version != 1 or code not in _TYPE_OF_CODE:
            raise InputError(
                f"{idx_path} has version {version} and type {code}, expected 1 and 1-8"
            )
        # Per sequence a length (4 bytes) and an offset (8), then the document ends (8).
        index_bytes = _HEADER.size + 12 * num_sequences + 8 * num_ends
        if idx_path.stat().st_size < index_bytes:
            raise InputError(
                f"{idx_path} is cut off: it has {idx_path.stat().st_size} of {index_bytes} bytes"
            )
        lengths = np.frombuffer(file.read(4 * num_sequences), dtype=np.int32)
    id_type: np.dtype[np.integer] = np.dtype(_TYPE_OF_CODE[code])
    expected_bytes = int(lengths.sum(dtype=np.int64)) * id_type.itemsize
    if bin_path.stat().st_size != expected_bytes:
        raise InputError(
            f"{bin_path} has {bin_path.stat().st_size} bytes and {idx_path} tells of "
            f"{expected_bytes}: one of them is cut off or from another run, write both again"
        )
    if expected_bytes == 0:
        raise InputError(f"{bin_path} holds no tokens: preprocess a file with documents")
    return IndexSummary(prefix=prefix, lengths=lengths, id_type=id_type)


class IndexedWriter:
    """A ``.bin``/``.idx`` pair in the making, under names of its own until `commit`.

    Leaving the context without `commit` removes what was written, so a file that bears the
    final name is always complete.
    """

    def __init__(self, prefix: str, *, vocab_size: int) -> None:
        self.prefix = prefix
        self.num_documents = 0
        self.num_tokens = 0
        self._temporary = output_paths(f"{prefix}.partial-{os.getpid()}")
        self._vocab_size = vocab_size
        self._builder: IndexedDatasetBuilder | None = None
        with self._reported():
            self._temporary[0].touch()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._builder is not None:
            with contextlib.suppress(OSError):  # a full disk was reported by what wrote last
                self._builder.data_file.close()
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def add(self, texts: EncodedTexts) -> None:
        """Append documents; OutputError when they cannot be written."""
        if self._builder is None:  # late: importing megatron.core takes seconds, input may be bad
            self._builder = _new_builder(self._temporary[0], self._vocab_size)
        ends = np.cumsum(texts.lengths)
        documents = zip(np.split(texts.ids, ends[:-1]), texts.lengths.tolist(), strict=True)
        with self._reported():
            for ids, length in documents:
                self._builder.add_document(ids, [length])
        self.num_documents += len(texts.lengths)
        self.num_tokens += len(texts.ids)

    def commit(self) -> None:
        """Write the index and give both files their final names; InputError without documents."""
        if self._builder is None or self.num_documents == 0:
            raise InputError(f"no document for {self.prefix}: nothing was written")
        with self._reported():
            self._builder.finalize(str(self._temporary[1]))
            for temporary, final in zip(self._temporary, output_paths(self.prefix), strict=True):
                temporary.replace(final)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write {self._temporary[0]} ({error.strerror}): choose another "
                "--output-prefix, or make room"
            ) from error


def _new_builder(bin_path: Path, vocab_size: int) -> IndexedDatasetBuilder:
    with warnings.catch_warnings():
        # megatron.core warns four times that Transformer Engine is missing; no matter here.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder(str(bin_path), dtype=DType.optimal_dtype(vocab_size))
