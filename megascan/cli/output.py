"""Print and write what commands have to say: results on stdout, progress on stderr, whole files.

Progress is one line on a terminal, nothing elsewhere. `require` guards against namesakes:
`training`, `aggregate` and `detect` are also other people's package names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megascan.errors import MissingError, OutputError
from megascan.header import Json


def require(name: str) -> None:
    """Make sure that `import name` finds MegaScan's package.

    MissingError says which other one it found.
    """
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise MissingError(
                f"MegaScan's package {name!r} needs {error.name!r}, which is not installed; "
                "install MegaScan again with pip"
            ) from error
        raise MissingError(
            f"MegaScan's package {name!r} is not installed; install MegaScan with pip, "
            "or run from its checkout"
        ) from error
    if not getattr(package, "__megascan__", False):
        place = getattr(package, "__file__", None) or "an unknown place"
        raise MissingError(
            f"`import {name}` finds another package at {place}, not MegaScan's; "
            "uninstall that one or put MegaScan's checkout first on PYTHONPATH"
        )


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Show `doing` while the block runs, and how long it took once it is done."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{doing} …", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        yield
    finally:
        print(f"\r{doing}: {time.perf_counter() - started:.1f} s", file=sys.stderr)


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


def write_bytes(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file whole or not at all; OutputError as `megascan.export.check_free`."""
    from megascan.export.writing import replacing  # heavy; most commands write nothing

    with replacing(path, force=force) as file:
        file.write(content)


def write_json(path: Path, record: Mapping[str, Json], *, force: bool) -> None:
    """Write a JSON document; errors as `write_bytes`."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode(), force=force)
