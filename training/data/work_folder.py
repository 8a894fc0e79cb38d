"""The folder beside an output in which it is made: one process at a time, gone when it is done."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from megascan.errors import OutputError
from training.data.index_writer import reported

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class WorkFolder:
    """A folder that this process alone writes to, until the context is left.

    What is in it stays, for a later process to go on with, unless `remove` was called. Raises
    OutputError when it cannot be made or another process is at work in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reported(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:  # some cluster file systems are mounted without locks
                return
            os.close(self._lock)
            raise OutputError(
                f"another process is writing to {path}: wait for it, or choose another "
                "--output-prefix"
            ) from error

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def clear(self) -> None:
        """Remove what an earlier process left; the folder stays."""
        with reported(self.path):
            for entry in self.path.iterdir():
                if entry.name != "lock":
                    entry.unlink()

    def remove(self) -> None:
        """Remove the folder and what is left in it."""
        shutil.rmtree(self.path, ignore_errors=True)
