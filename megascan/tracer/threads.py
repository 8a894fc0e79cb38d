"""How long the threads that launch a rank's work had no core, and how long others of it ran.

Linux counts both for each thread (`/proc/<pid>/task/<tid>/schedstat`: ns on a core, ns that it
could have run and had none; proc(5)). A crowded host, or a container's quota of CPU time, shows
there and nowhere in a job's logs, and so does another thread of Python in the process (a logger, a
collector of metrics), which takes the interpreter's lock from the thread that trains. Launching are
the thread that trains and those of PyTorch's backward passes (`pt_autograd_…`). Where the kernel
does not tell, nothing is recorded.
"""

from __future__ import annotations

import os
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TASKS = Path("/proc/self/task")
_BACKWARD = b"pt_autograd"
"""How PyTorch names the threads in which backward passes of a GPU are launched."""
_OWN = "megascan-"
"""Begins the names of the tracer's own threads, which hold the lock for little at a time."""
_MOST_BYTES = 128
"""Of a schedstat: three numbers."""


class ThreadTimes(NamedTuple):
    """What threads did in an iteration, summed over threads."""

    waited_ns: int
    """For how long the launching threads could have run and had no core."""
    others_ns: int
    """For how long other threads of Python ran."""
    page_reads: int = 0
    """Pages that had to be read from swap or a disk before threads of the process could go on."""


class Threads:
    """Takes what a process's threads do from `begin` to `end`.

    Both are called by the thread that trains, and take some microseconds each: files stay open, and
    a thread's name is read once.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        """Open schedstats, by thread."""
        self._launching: set[str] = set()
        self._known: set[str] = set()
        """Threads that were asked whether they launch."""
        self._begun: dict[str, ThreadTimes] = {}
        self._num_page_reads = 0

    def begin(self) -> None:
        """Note what each thread has done so far."""
        self._begun = {}
        self._num_page_reads = _page_reads()
        with suppress(OSError):
            self._look_for_threads()
        for thread in tuple(self._files):
            times = self._read(thread)
            if times is not None:
                self._begun[thread] = times

    def end(self) -> ThreadTimes | None:
        """Return what the threads have done since `begin`; None: not told."""
        waited_ns = others_ns = 0
        is_told = False
        for thread, begun in self._begun.items():
            now = self._read(thread)
            if now is None:
                continue
            if thread in self._launching:
                waited_ns += now.waited_ns - begun.waited_ns
                is_told = True
            else:
                others_ns += now.others_ns - begun.others_ns
        if not is_told:
            return None
        return ThreadTimes(waited_ns, others_ns, _page_reads() - self._num_page_reads)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            with suppress(OSError):  # the trainer may have closed all files
                os.close(file)
        self._files = {}

    def _look_for_threads(self) -> None:
        """Open the schedstats of threads that are new, and forget those that ended."""
        threads = set(os.listdir(_TASKS))  # noqa: PTH208  # each iteration: no paths are needed
        for thread in self._files.keys() - threads:
            os.close(self._files.pop(thread))
        own = str(threading.get_native_id())
        for thread in threads - self._known:
            with suppress(OSError):
                if thread == own or _is_backward(thread):
                    self._open(thread)
                    self._launching.add(thread)
        for thread in _others_of_python() & threads - self._files.keys():
            with suppress(OSError):
                self._open(thread)
        self._known = threads
        self._launching &= threads

    def _open(self, thread: str) -> None:
        path = _TASKS / thread / "schedstat"
        self._files[thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, thread: str) -> ThreadTimes | None:
        """Return for how long a thread has waited, and ran as if it were another."""
        with suppress(OSError, KeyError, ValueError, IndexError):
            ran, waited = os.pread(self._files[thread], _MOST_BYTES, 0).split()[:2]
            return ThreadTimes(waited_ns=int(waited), others_ns=int(ran))
        return None


def _page_reads() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _is_backward(thread: str) -> bool:
    return (_TASKS / thread / "comm").read_bytes().startswith(_BACKWARD)


def _others_of_python() -> set[str]:
    """Return the threads of Python but for the tracer's own."""
    return {str(one.native_id) for one in threading.enumerate() if not one.name.startswith(_OWN)}
