"""Write outputs safely: they never replace an input, and are complete or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megascan.errors import OutputError


def check_not_read(
    output: Path, read: Iterable[Path], is_input: Callable[[Path], bool] = lambda path: True
) -> None:
    """Raise OutputError if an output is one of the files that are read, by name or by a link.

    Files are the same if their inodes are, as with symbolic and hard links. `is_input` is asked
    whether such a file is really read: a folder may have other files, too.
    """
    try:
        status = output.stat()
    except OSError:
        return  # no file to lose, or an error that the writer will report
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


def check_free(path: Path, *, force: bool) -> None:
    """Raise OutputError, before any work is done, if a file must not or cannot be written.

    It must not replace an existing file without `force`, and never a device or a pipe; it cannot be
    written if its folder is missing or not writable.
    """
    folder = target_of(path).parent
    _check_name(path, force=force)
    if not folder.is_dir():
        raise OutputError(f"{path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{path}: the folder {folder} cannot be written to; choose another place")


def target_of(path: Path) -> Path:
    """Return the file to write for a name: links stay, and the file that they lead to is written.

    Raises OutputError for links that lead to themselves.
    """
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OutputError(f"{path}: is a link that leads to itself; choose another name")
    return target


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when it is complete.

    The bytes go to `.<name>.part` next to the file, are synced and renamed, so that a full disk or
    a killed process leaves no half file under the final name; what a killed process left is
    overwritten. Raises OutputError as `check_free`, and for errors of the file system.
    """
    check_free(path, force=force)
    target = target_of(path)
    partial, ours = partial_of(target), None
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
        partial.replace(target)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "free some space or choose another place"
        ) from error
    finally:
        if ours is not None and _is(partial, ours):
            with suppress(OSError):  # the error being reported is also why it cannot be removed
                partial.unlink(missing_ok=True)


_BYTES_BEHIND = 32 << 20


class GrowingFile:
    """Writer of a file that grows piece by piece, by this or by other processes of this machine.

    After every _BYTES_BEHIND, writing to the disk is started, so that only the last bytes have to
    be synced at the end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write data; after every _BYTES_BEHIND let the system begin to write to the disk."""
        self._file.write(data)
        end = self._file.tell()
        if end - self._begun >= _BYTES_BEHIND:
            self._file.flush()
            _begin_to_sync(self._file.fileno(), self._begun, end - self._begun)
            self._begun = end

    def room(self, num_bytes: int) -> Room:
        """Leave room for bytes at the end of the file, which another process may fill."""
        begin = self._file.tell()
        self._file.seek(begin + num_bytes)
        self._begun = begin + num_bytes
        return Room(Path(self._file.name), os.fstat(self._file.fileno()).st_ino, begin)


@dataclass(frozen=True)
class Room:
    """Room in a file, from `begin` on; `inode` identifies the file if its name was taken since."""

    path: Path
    inode: int
    begin: int

    def fill(self, content: BinaryIO) -> None:
        """Copy a whole file into the room. Raises OSError as the system does.

        Nothing is written if another process has taken the name, which `replacing` reports.
        """
        try:
            file = self.path.open("r+b", buffering=0)
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_ino != self.inode:
                return
            file.seek(self.begin)
            size, done = os.fstat(content.fileno()).st_size, 0
            while done < size:
                done += os.sendfile(file.fileno(), content.fileno(), done, size - done)
            _begin_to_sync(file.fileno(), self.begin, size)


def _begin_to_sync(descriptor: int, begin: int, num_bytes: int) -> None:
    """Let the system begin to write: Linux writes bytes that are declared as no longer needed."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, num_bytes, os.POSIX_FADV_DONTNEED)


def partial_of(path: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return path.with_name(f".{path.name}.part")


def _check_name(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise OutputError(
            f"{path}: is a device or a pipe, and a file would take its place; give the name of a "
            "file (--force does not allow this)"
        )
    if path.exists() and not force:
        raise OutputError(f"{path}: exists already; pass --force to replace it")


def check_can_be_made(folder: Path) -> None:
    """Raise OutputError, before any work is done, unless a folder is there or can be made.

    A file in its place or on the way to it, and a folder that is not writable, are errors.
    """
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise OutputError(f"{folder}: {there} is no folder; give another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: {there} cannot be written to; give another folder")


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """Hold a temporary folder inside `folder`, for files that are then renamed to their places.

    The temporary folder is removed at the end of the block, and so is `folder` if it was made here
    and is empty. Raises OSError.
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
