"""Print and write the output of commands: results on stdout, progress on stderr, whole files.

Progress is one line on a terminal, and nothing elsewhere. `require` guards against other packages
of the same name: `training`, `aggregate` and `detect` are common names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megascan.errors import InputError, MissingError, OutputError, UsageError
from megascan.header import Json
from megascan.overwriting import check_free, check_not_read, replacing


def require(name: str) -> None:
    """Make sure that `import name` finds MegaScan's package.

    Raises MissingError, which names the other package that was found.
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
    """Show `doing` while the block runs, and how long the block took when it is done."""
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
    """Print a result at once; a reader that has gone (`| head`) does not stop the command, which
    still writes its files.

    Raises OutputError if stdout fails for another reason, such as a full disk.
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
    """Discard everything that is printed from now on, and at the interpreter's exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def check_folder(folder: Path, advice: str) -> None:
    """Raise InputError unless a folder exists and can be read; `advice` says what to do.

    `Path.glob` would find nothing in a folder that it must not read.
    """
    try:
        found = next(folder.iterdir(), None)
        if found is not None:
            found.lstat()
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror or error}; {advice}") from error


def check_outputs(outputs: Iterable[Path | None], *, read: Sequence[Path], force: bool) -> None:
    """Raise, before any work is done, if a file must not be written.

    `outputs` are the files to write (None for a flag that was not given), `read` the files and
    trace folders that the command reads. Raises UsageError if two outputs are the same file;
    OutputError as `megascan.overwriting.check_free`, and, even with `force`, for a file that is
    read: under another name, through a link, or as one of the rank files of a folder or of its
    earlier runs.
    """
    wanted = [path for path in outputs if path is not None]
    named: dict[str, Path] = {}
    for path in wanted:
        earlier = named.setdefault(os.path.realpath(path), path)
        if earlier is not path:
            raise UsageError(
                f"{earlier} and {path} are to be written, and are the same file; "
                "give them different names"
            )
    for path in wanted:
        for place in read:
            _check_not_read(path, place)
        check_free(path, force=force)


def _check_not_read(output: Path, read: Path) -> None:
    """Raise OutputError if an output is the file `read`, or a rank file of the folder `read` or of
    one of its earlier runs. Other files of a trace folder, such as its timeline, are not read.
    """
    if not read.is_dir():
        check_not_read(output, [read])
        return
    from megascan.reader import holds_ranks

    check_not_read(output, [*read.glob("*.json*"), *read.glob("*/*.json*")], holds_ranks)


def write_bytes(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file whole or not at all; raises OutputError as `megascan.overwriting.check_free`."""
    with replacing(path, force=force) as file:
        file.write(content)


def write_json(path: Path, record: Mapping[str, Json], *, force: bool) -> None:
    """Write a JSON document; raises OutputError as `write_bytes`."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    content = f"{text}\n".encode(errors="backslashreplace")  # a path's bytes as JSON's escapes
    write_bytes(path, content, force=force)
