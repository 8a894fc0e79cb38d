"""Notice that training does not get on, and write down where this rank stands.

A thread looks at the number of the current iteration once a second. When it has not changed for
`PATIENCE_ITERATIONS` of the longest of late, it reads the Python stack of the training thread
and writes it into the trace folder (`megascan.standstill`), again and again, less and less often.
When training goes on the file is removed. Training itself does nothing for it: no collective
costs more, and none is missed, since the stack is there whether the iteration is traced or not.

A process that was stopped or killed writes nothing, and that is how it is found.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from megascan.header import RankHeader
from megascan.standstill import Standstill, standstill_path
from megascan.tracer.tracer import IterationListener

PATIENCE_ITERATIONS = 2.0
LEAST_PATIENCE_S = 5.0
"""Shorter than the least patience of `megascan watch`, which asks for the file then."""
FIRST_PATIENCE_S = 30.0
"""Before any iteration is over: compiling and connecting take long."""
_LOOK_S = 1.0
_KEPT_ITERATIONS = 16
_LONGEST_PAUSE_S = 300.0
_MOST_FRAMES = 8
_CLOSE_S = 5.0
_COMMUNICATION = "torch.distributed.distributed_c10d"
_MESSAGES = ("send", "recv")
"""Of these `dst` and `src` are the other side; of collectives they are the root."""


class Lookout(IterationListener):
    """Looks until tracing ends. The thread that makes it is the one whose stack is read."""

    def __init__(
        self,
        folder: Path,
        header: RankHeader,
        iteration: Callable[[], int],
        *,
        look_s: float = _LOOK_S,
        least_patience_s: float = LEAST_PATIENCE_S,
    ) -> None:
        self._path = standstill_path(folder, header.rank)
        self._header = header
        self._iteration = iteration
        self._look_s = look_s
        self._least_patience_s = least_patience_s
        self._training = threading.get_ident()
        self._durations_s: deque[float] = deque(maxlen=_KEPT_ITERATIONS)
        self._is_written = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megascan-lookout", daemon=True)
        self._thread.start()

    def tracing_ends(self) -> None:
        """Stop looking; what was written is taken away."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _patience_s(self) -> float:
        if not self._durations_s:
            return max(FIRST_PATIENCE_S, self._least_patience_s)
        return max(self._least_patience_s, PATIENCE_ITERATIONS * max(self._durations_s))

    def _run(self) -> None:
        number, since, due_s = self._iteration(), time.monotonic(), self._patience_s()
        is_first = True
        while not self._ended.wait(self._look_s):
            now = time.monotonic()
            if self._iteration() != number:
                if not is_first:
                    self._durations_s.append(now - since)
                is_first, number, since = False, self._iteration(), now
                due_s = self._patience_s()
                self._forget()
            elif now - since >= due_s:
                self._write(number, time.time() - (now - since))
                due_s += min(due_s, _LONGEST_PAUSE_S)
        self._forget()

    def _forget(self) -> None:
        if self._is_written:
            self._is_written = False
            with contextlib.suppress(OSError):  # a stale file carries its run's id and its time
                self._path.unlink(missing_ok=True)

    def _write(self, iteration: int, since_unix_s: float) -> None:
        """Replace the file as a whole; a disk that refuses costs the file and nothing else."""
        frame = sys._current_frames().get(self._training)
        place = _communication(frame)
        found = Standstill(
            run_id=self._header.run_id,
            rank=self._header.rank,
            host=self._header.host,
            process_id=os.getpid(),
            iteration=iteration,
            since_unix_s=since_unix_s,
            patience_s=self._patience_s(),
            operation=place.f_code.co_name.strip("_") if place else "",
            group=_group_id(place.f_locals, self._header.groups) if place else "",
            peer=_peer(place.f_locals) if place and place.f_code.co_name in _MESSAGES else None,
            frames=tuple(_places(frame)),
        )
        temporary = self._path.with_name(f".{self._path.name}.new")
        with contextlib.suppress(OSError):
            temporary.write_bytes(found.encode())
            temporary.replace(self._path)
            self._is_written = True


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _communication(frame: FrameType | None) -> FrameType | None:
    """Return the outermost call of torch.distributed that a stack is inside of.

    Inner functions (`_coalescing_manager`) count when they have a process group.
    """
    found = None
    for each in _outwards(frame):
        is_public = each.f_code.co_name[:1] != "_"
        if each.f_globals.get("__name__") == _COMMUNICATION and (
            is_public or "group" in each.f_locals
        ):
            found = each
    return found


def _places(frame: FrameType | None) -> Iterator[str]:
    """Yield "function (file:line)", innermost first, without the tracer's own wrappers."""
    own = Path(__file__).parents[1]
    shown = (each for each in _outwards(frame) if own not in Path(each.f_code.co_filename).parents)
    for each, _ in zip(shown, range(_MOST_FRAMES), strict=False):
        code = each.f_code
        yield f"{code.co_name} ({Path(code.co_filename).name}:{each.f_lineno})"


def _group_id(values: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> str:
    """Return the id of the process group that a call was given; None is the world."""
    distributed = sys.modules.get("torch.distributed")
    if "group" not in values or distributed is None:
        return ""
    try:
        ranks = tuple(distributed.get_process_group_ranks(values["group"]))
    except Exception:  # a group that is being destroyed has no ranks
        return ""
    named = [name for name, members in groups.items() if tuple(members) == ranks]
    return named[0] if named else f"of ranks {', '.join(map(str, ranks[:8]))}"


def _peer(values: Mapping[str, Any]) -> int | None:
    peers = [values.get(name) for name in ("dst", "src")]
    return next((peer for peer in peers if isinstance(peer, int)), None)
