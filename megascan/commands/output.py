"""Results: text on stdout, and small files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from megascan.errors import OutputError
from megascan.header import Json


def say(text: object) -> None:
    """Print a result at once; a reader that has gone (`| head`) does not stop the command.

    What the command still has to write is written. Raises OutputError when stdout is refused for
    another reason, such as a full disk.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _silence_stdout()
    except OSError as error:
        _silence_stdout()
        raise OutputError(
            f"standard output cannot be written ({error.strerror or error}); "
            "free some space or send it elsewhere"
        ) from error


def _silence_stdout() -> None:
    """Let what is printed from now on, and at the interpreter's exit, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def check_free(path: Path, *, force: bool) -> None:
    """Raise OutputError, before any work is done, when `path` must not or cannot be written."""
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give the name of a file")
    if path.exists() and not force:
        raise OutputError(f"{path} exists; name another file or pass --force to replace it")
    if not path.parent.is_dir():
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
