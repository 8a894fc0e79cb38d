"""Which format a path holds, found by looking at its content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import pyarrow as pa

from megascan.errors import InputError
from megascan.reader.bytestream import read_start

_LOOK_BYTES = 1 << 16
_EXPECTED = (
    "expected rank files of MegaScan (schema 1), rank files of the original MegaScan, PyTorch "
    "profiler JSON or a timeline of megascan aggregate"
)


class Format(StrEnum):
    """What a file, or the files of a folder, are."""

    RANK_FILES = "rank_files"
    ORIGINAL = "original"
    KINETO = "kineto"
    TIMELINE = "timeline"
    PERFETTO = "perfetto"
    OP_TABLE = "op_table"


RANK_FORMATS = (Format.RANK_FILES, Format.ORIGINAL, Format.KINETO)
MERGED_FORMATS = (Format.TIMELINE, Format.PERFETTO)

_JSON_SIGNS: tuple[tuple[Format, re.Pattern[bytes]], ...] = (
    (Format.TIMELINE, re.compile(rb'"name"\s*:\s*"megascan_timeline"')),
    (Format.RANK_FILES, re.compile(rb'"name"\s*:\s*"megascan(_window)?"')),
    (Format.ORIGINAL, re.compile(rb'"(pad_before|rel_ts)"\s*:')),
    (
        Format.KINETO,
        re.compile(
            rb'"(deviceProperties|distributedInfo|traceName|record_shapes|baseTimeNanoseconds)"\s*:'
            rb'|"cat"\s*:\s*"(cpu_op|kernel|user_annotation|gpu_user_annotation)"'
        ),
    ),
)


def sniff(path: Path) -> Format:
    """Format of a file, or of the rank files of a folder.

    Raises InputError that says what a foreign path looks like and what is expected.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; {_EXPECTED}")
    if not path.is_dir() and not path.is_file():
        raise InputError(
            f"{path}: is neither a file nor a folder (a pipe or a device); {_EXPECTED}"
        )
    return sniff_folder(path)[0] if path.is_dir() else sniff_file(path)


def sniff_file(path: Path) -> Format:
    """Format of one file."""
    start = read_start(path, _LOOK_BYTES)
    if not start:
        raise InputError(f"{path} is empty; {_EXPECTED}")
    found = _json_format(start)
    if found is None and start.startswith(b"PAR1") and _is_op_table(path):
        found = Format.OP_TABLE
    if found is None and not _is_json(start) and _is_perfetto(start):
        found = Format.PERFETTO
    if found is None:
        raise InputError(f"{path} looks like {_description(start)}; {_EXPECTED}")
    return found


def sniff_folder(folder: Path) -> tuple[Format, list[Path]]:
    """Format of a folder's rank files, and those files in the order of their names.

    Files named as rank files come first; other JSON counts only where there are none, and only if
    it is a rank's trace. Everything else in the folder (ground truth, logs) is passed over.
    """
    named = _matching(folder, "benchmark-data-*.json")
    if named:
        return _common_format(folder, {path: _sniff_named(path) for path in named})
    formats = {path: _sniff_stray(path) for path in _matching(folder, "*.json")}
    ranks = {path: found for path, found in formats.items() if found in RANK_FORMATS}
    if not ranks:
        raise InputError(f"no rank files in {folder}{_hint(folder)}; {_EXPECTED}")
    return _common_format(folder, ranks)


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        paths = [*folder.glob(pattern), *folder.glob(pattern + ".gz")]
    except OSError as error:
        raise InputError(f"cannot list {folder}: {error.strerror}; check permissions") from error
    return sorted(path for path in paths if path.is_file())


def _sniff_named(path: Path) -> Format | None:
    """An empty file is what a rank killed at its start leaves: no format, no error."""
    return sniff_file(path) if read_start(path, 1) else None


def _sniff_stray(path: Path) -> Format | None:
    try:
        return sniff_file(path)
    except InputError:
        return None


def _common_format(folder: Path, found: Mapping[Path, Format | None]) -> tuple[Format, list[Path]]:
    formats = sorted({fmt for fmt in found.values() if fmt is not None})
    if len(formats) > 1:
        raise InputError(
            f"{folder} holds files of several formats ({', '.join(formats)}); put each run into a "
            "folder of its own"
        )
    return (formats[0] if formats else Format.RANK_FILES), sorted(found)


def _hint(folder: Path) -> str:
    """Where the rank files are when they are one level deeper."""
    inner = sorted({path.parent.name for path in folder.glob("*/benchmark-data-*.json*")})
    return f" itself, but there are some in its subfolder {inner[0]}" if inner else ""


def _json_format(start: bytes) -> Format | None:
    if not _is_json(start):
        return None
    return next((found for found, sign in _JSON_SIGNS if sign.search(start)), None)


def _is_json(start: bytes) -> bool:
    return start.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] in (b"[", b"{")


def _is_op_table(path: Path) -> bool:
    from pyarrow import parquet  # takes longer to import than other formats take to find

    try:
        names = parquet.read_schema(path).names
    except (pa.ArrowException, OSError):
        return False
    return {"optype", "start_ts", "duration", "rank", "step"} <= set(names)


def _is_perfetto(start: bytes) -> bool:
    """A Trace message: repeated packets, each 0x0A and a length."""
    return len(start) > 2 and start[0] == 0x0A and not start.isascii()


def _description(start: bytes) -> str:
    if _is_json(start):
        chrome = b'"ph"' in start or b'"traceEvents"' in start
        return "a Chrome trace of another tool" if chrome else "JSON that is no trace"
    if start.startswith(b"PAR1"):
        return "a Parquet file without the columns of an op table"
    return "text" if b"\0" not in start and start.isascii() else "a binary file"
