"""Where an output goes: its format by suffix, and all or nothing on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from megascan.errors import OutputError, UsageError


class Encoding(StrEnum):
    """How the events of a timeline are written."""

    CHROME = "Chrome JSON"
    PERFETTO = "Perfetto protobuf"


@dataclass(frozen=True)
class Format:
    """An encoding, gzipped or not."""

    encoding: Encoding
    gzipped: bool


_FORMATS = {
    ".json": Format(Encoding.CHROME, False),
    ".json.gz": Format(Encoding.CHROME, True),
    ".pftrace": Format(Encoding.PERFETTO, False),
    ".pftrace.gz": Format(Encoding.PERFETTO, True),
}


def format_of(path: Path) -> Format:
    """Format that a file name asks for. Raises UsageError for a suffix nothing is known of."""
    for suffix, file_format in _FORMATS.items():
        if path.name.lower().endswith(suffix):
            return file_format
    raise UsageError(
        f"{path}: the suffix decides the format and must be one of {', '.join(_FORMATS)}"
    )


def check_output(path: Path, *, force: bool = False) -> None:
    """Raise, before any work is done, what writing a timeline there would raise.

    UsageError for an unknown suffix, OutputError as `check_free`.
    """
    format_of(path)
    check_free(path, force=force)


def check_free(path: Path, *, force: bool) -> None:
    """Raise OutputError, before any work is done, when a file must not or cannot be written.

    For an existing file without `force`, and for a folder that is not there or cannot be written.
    """
    _check_name(path, force=force)
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(
            f"{path}: the folder {path.parent} cannot be written to; choose another place"
        )


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when it is complete.

    The bytes go to `.<name>.part` beside it, are synced and renamed, so that a full disk or a
    killed process leaves no half file under the final name; the leftover of such a process is
    overwritten. Raises OutputError when `path` exists and `force` is not given, and for
    everything the file system refuses.
    """
    check_free(path, force=force)
    partial, ours = _partial_of(path), None
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            ours = os.fstat(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not _is(partial, ours):
            raise OutputError(
                f"{path}: another process is writing it, too; wait for that one, or give another "
                "name"
            )
        _check_name(path, force=force)
        partial.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "free some space or choose another place"
        ) from error
    finally:
        if ours is not None and _is(partial, ours):
            _remove_quietly(partial)


def leftovers(path: Path) -> list[Path]:
    """What killed processes have left of other timelines in the folder of `path`."""
    found = path.parent.glob(".*.part")
    endings = tuple(f"{suffix}.part" for suffix in _FORMATS)
    own = _partial_of(path)
    return sorted(each for each in found if each.name.endswith(endings) and each != own)


def _partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _is(partial: Path, file: os.stat_result) -> bool:
    """Whether a name still stands for a file, and not for what another process put there."""
    try:
        return os.path.samestat(partial.stat(), file)
    except OSError:
        return False


def _check_name(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give the name of a file")
    if path.exists() and not force:
        raise OutputError(f"{path}: exists already; pass --force to replace it")


def _remove_quietly(partial: Path) -> None:
    try:
        partial.unlink(missing_ok=True)
    except OSError:
        return  # the reason it cannot be removed is the error being reported
