"""Megatron's indexed files: how they are laid out, and described without opening the data.

A data set is ``PREFIX.bin`` (the ids of all documents one after the other) and ``PREFIX.idx``:
a header (magic, version, type code, counts), then of each sequence its length in ids (int32) and
its offset in bytes (int64), then the document ends as numbers of sequences (int64, the first is
0). `read_index` looks at the lengths alone, so that a wrong path or a cut-off copy is a sentence
instead of an assertion on every rank.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megascan.errors import InputError

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
