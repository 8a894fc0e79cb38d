"""One rank's file: appended to durably, continued after any cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from megascan.rankfile.framing import CLOSING, framing


class RankFile:
    """Appends to one rank's file; every `append` is durable when it returns.

    Opening an existing file continues it (a resumed run): a closing bracket and an incomplete
    last line, which a kill in mid-write leaves, are taken off first. Raises OSError as the file
    system does, DamagedError where compressed data cannot be continued; an append that failed
    half-way is taken back as far as possible.
    """

    def __init__(self, path: Path, *, compress: bool = False) -> None:
        self.path = path
        self.framing = framing(compress=compress)
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._end = self._trim()

    def _trim(self) -> int:
        """Cut the file back to the end of its last complete event; return that position."""
        with self.path.open("rb") as reading:
            keep = self.framing.complete_length(reading)
        self._file.truncate(keep)
        return self._file.seek(keep)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._end

    def pack(self, lines: Sequence[bytes], *, first: bool) -> bytes:
        """Bytes that an append of these events writes; `first` of a file that is empty."""
        return self.framing.pack((b"[\n" if first else b",\n") + b",\n".join(lines))

    def append(self, lines: Sequence[bytes]) -> None:
        """Write events in one piece and wait until they are on disk."""
        if lines:
            self.write(self.pack(lines, first=not self._end))

    def write(self, data: bytes) -> None:
        """Write what was packed, and wait until it is on disk."""
        try:
            _write_all(self._file, data)
            self._check_reachable()
        except OSError:
            self._take_back()
            raise
        self._end += len(data)

    def become(self, parts: Sequence[bytes | tuple[int, int]], temporary: Path) -> None:
        """Replace the whole content at once: bytes, and (begin, end) of what is there now.

        The file is the old one or the new one at every moment. Raises OSError and leaves the old
        one when the new one cannot be written to `temporary`.
        """
        replacement = temporary.open("w+b", buffering=0)
        try:
            for part in parts:
                data = part if isinstance(part, bytes) else self._read(*part)
                _write_all(replacement, data, durably=False)
            os.fsync(replacement.fileno())
            self._check_reachable()
            temporary.replace(self.path)
        except OSError:
            replacement.close()
            temporary.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = replacement
        self._end = replacement.seek(0, os.SEEK_END)
        _make_durable(self.path.parent)

    def _read(self, begin: int, end: int) -> bytes:
        with self.path.open("rb") as reading:
            reading.seek(begin)
            return reading.read(end - begin)

    def _check_reachable(self) -> None:
        """A file that was deleted takes writes for ever, and nobody will read them."""
        if not self.path.exists() or not os.path.samestat(
            self.path.stat(), os.fstat(self._file.fileno())
        ):
            raise FileNotFoundError(f"{self.path} was removed while it was written")

    def _take_back(self) -> None:
        with contextlib.suppress(OSError):
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def close(self) -> None:
        """Close the JSON array and the file."""
        try:
            if self._end:
                self.write(self.framing.pack(CLOSING))
        finally:
            self._file.close()


def _write_all(file: BinaryIO, data: bytes, *, durably: bool = True) -> None:
    written = 0
    while written < len(data):
        written += file.write(data[written:])
    if durably:
        os.fsync(file.fileno())


def _make_durable(folder: Path) -> None:
    """Have the folder remember a renamed file, where the file system can be asked to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
