"""How long the threads that launch a rank's work could have run and had no core.

Linux counts it for each thread (`/proc/<pid>/task/<tid>/schedstat`, second field, ns; proc(5)): a
crowded host, or a container's quota of CPU time, shows there and nowhere in a job's logs. Read are
the thread that trains and those of PyTorch's backward passes (`pt_autograd_…`). Where the kernel
does not tell, nothing is recorded.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import get_native_id

_TASKS = Path("/proc/self/task")
_BACKWARD = b"pt_autograd"
"""How PyTorch names the threads in which backward passes of a GPU are launched."""
_MOST_BYTES = 128
"""Of a schedstat: three numbers."""


class CoreWaits:
    """Takes the time from `begin` to `end` for which the launching threads waited for a core.

    Both are called by the thread that trains, and take some microseconds each: files stay open, and
    a thread's name is read once.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        """Open schedstats, by thread."""
        self._known: set[str] = set()
        self._begun: dict[str, int] = {}

    def begin(self) -> None:
        """Note how long each thread has waited so far."""
        self._begun = {}
        with suppress(OSError):
            self._look_for_threads()
        for thread in tuple(self._files):
            waited_ns = self._read_ns(thread)
            if waited_ns is not None:
                self._begun[thread] = waited_ns

    def end(self) -> int | None:
        """Return for how many ns the threads have waited since `begin`; None: not told."""
        now = {thread: self._read_ns(thread) for thread in self._begun}
        waits = [ns - self._begun[thread] for thread, ns in now.items() if ns is not None]
        return sum(waits) if waits else None

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            with suppress(OSError):  # the trainer may have closed all files
                os.close(file)
        self._files = {}

    def _look_for_threads(self) -> None:
        """Open the schedstats of launching threads that are new, and forget those that ended."""
        threads = set(os.listdir(_TASKS))  # noqa: PTH208  # each iteration: no paths are needed
        for thread in self._files.keys() - threads:
            os.close(self._files.pop(thread))
        own = str(get_native_id())
        for thread in threads - self._known:
            with suppress(OSError):
                if thread == own or _is_backward(thread):
                    path = _TASKS / thread / "schedstat"
                    self._files[thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._known = threads

    def _read_ns(self, thread: str) -> int | None:
        with suppress(OSError, KeyError, ValueError, IndexError):
            return int(os.pread(self._files[thread], _MOST_BYTES, 0).split()[1])
        return None


def _is_backward(thread: str) -> bool:
    return (_TASKS / thread / "comm").read_bytes().startswith(_BACKWARD)
