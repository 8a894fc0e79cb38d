"""Small result files: written whole or not at all, never over an existing one unasked."""

from __future__ import annotations

from pathlib import Path

from megascan.errors import OutputError


def check_free(path: Path, *, force: bool) -> None:
    """Raise OutputError, before any work is done, when `path` must not or cannot be written."""
    if path.exists() and not force:
        raise OutputError(f"{path} exists; name another file or pass --force to replace it")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist; make it first")


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write a document; OutputError as `check_free`, or for what the file system refuses."""
    check_free(path, force=force)
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
