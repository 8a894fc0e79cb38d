"""Outputs harm nothing: they never take the place of what is read, and are whole or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megascan.errors import OutputError


def check_not_read(
    output: Path, read: Iterable[Path], is_input: Callable[[Path], bool] = lambda path: True
) -> None:
    """Raise OutputError when an output is one of the files that are read, by name or by a link.

    Files are the same when their inodes are, as those of symbolic and hard links. `is_input` is
    asked of such a file only: a folder holds more than what is read from it.
    """
    try:
        status = output.stat()
    except OSError:
        return  # nothing is there that could be lost, or the writer will say what is wrong
    for path in read:
        if _is(path, status) and is_input(path):
            raise OutputError(
                f"{output}: is what this command reads ({path}) and would be lost; choose another "
                "name for the output (--force does not allow this)"
            )


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, path.stat())
    except OSError:
        return False


def check_can_be_made(folder: Path) -> None:
    """Raise OutputError, before any work is done, unless a folder is there or can be made.

    Both for a file in its place, or on the way to it, and for one that may not be written to.
    """
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise OutputError(f"{folder}: {there} is no folder; give another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: {there} cannot be written to; give another folder")


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """Hold a folder in `folder` in which files are made that then get their names by a rename.

    However the block ends, it is gone afterwards, and so is `folder` when it was made for this and
    is empty. Raises OSError.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
