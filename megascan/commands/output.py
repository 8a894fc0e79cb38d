"""Small result files: written whole or not at all, never over an existing one unasked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megascan.errors import OutputError
from megascan.header import Json


def check_free(path: Path, *, force: bool) -> None:
    """Raise OutputError, before any work is done, when `path` must not or cannot be written."""
    if path.exists() and not force:
        raise OutputError(f"{path} exists; name another file or pass --force to replace it")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist; make it first")


def write_bytes(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file; OutputError as `check_free`, or for what the file system refuses."""
    check_free(path, force=force)
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, record: Mapping[str, Json], *, force: bool) -> None:
    """Write a JSON document; errors as `write_bytes`."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode(), force=force)
