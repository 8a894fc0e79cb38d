"""Notice that training stands still, and write down where this rank stands.

A thread looks at the number of the current iteration once a second. When the number has not changed
for `PATIENCE_ITERATIONS` times the longest of the last iterations, the thread reads the Python
stack of the training thread and writes it into the trace folder, again and again, less and less
often. When training goes on, the file is removed. Training itself does nothing for that: no
collective costs more, and no collective is missed, since the stack is there whether the iteration
is traced or not.

A process that was stopped or killed writes nothing; that is how it is found.

The rank file gets a window when the window is finished, so it does not tell what the rank waits in
now. Therefore each rank has a small file, which `megascan watch` reads (`read_standstills`):

    {"schema": 1, "run_id": "…", "rank": 3, "host": "n07", "process_id": 4711, "iteration": 57,
     "since_unix_s": 1790000000.1, "patience_s": 5.0,
     "operation": "all_reduce", "group": "dp@0", "peer": null,
     "frames": ["all_reduce (distributed_c10d.py:2925)", "train_step (step.py:81)"]}

This file shows the host's view: with NCCL a host waits where it next needs a result, not in the
collective itself. Then the frames say where it waits, and PyTorch's flight recorder for which
collective.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import orjson

from megascan.header import Json, RankHeader
from megascan.tracer.tracer import IterationListener

STANDSTILL_SCHEMA = 1
_PATTERN = "megascan-standstill-*.json"
_MOST_BYTES = 1 << 16
_MOST_TEXT = 300
"""Most characters of any text that is taken from a file."""
_MOST_READ_FRAMES = 16


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Where one rank stands, and since when; the innermost of `frames` stands first."""

    run_id: str
    rank: int
    host: str
    process_id: int
    iteration: int
    """The iteration that the rank is in, or was in last."""
    since_unix_s: float
    """When the lookout first saw this iteration."""
    patience_s: float
    """After how long without a new iteration the lookout writes for the first time."""
    operation: str = ""
    """Function of torch.distributed that the rank is inside of; "" if it is in no such function."""
    group: str = ""
    """Id of the process group as in rank files; "" if the function names no group."""
    peer: int | None = None
    """The other rank of a send or receive."""
    frames: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return the place as "in all_reduce of group dp@0, iteration 57"."""
        if self.operation:
            peer = "" if self.peer is None else f" with rank {self.peer}"
            what = self.operation + f" of group {self.group}" * bool(self.group) + peer
        else:
            what = self.frames[0] if self.frames else "a place without Python code"
        return f"in {what}, iteration {self.iteration}"

    def encode(self) -> bytes:
        """Return the file's content."""
        return orjson.dumps({"schema": STANDSTILL_SCHEMA, **asdict(self)})

    @classmethod
    def decode(cls, content: bytes) -> Standstill:
        """Read a file's content. Raises KeyError, TypeError or ValueError for other content."""
        record = orjson.loads(content)
        if record["schema"] != STANDSTILL_SCHEMA:
            raise ValueError(f"schema {record['schema']!r}")
        frames, peer = record["frames"], record["peer"]
        if not isinstance(frames, list):
            raise TypeError("frames is no list")
        return cls(
            run_id=str(record["run_id"]),
            rank=int(record["rank"]),
            host=str(record["host"])[:_MOST_TEXT],
            process_id=int(record["process_id"]),
            iteration=int(record["iteration"]),
            since_unix_s=float(record["since_unix_s"]),
            patience_s=float(record["patience_s"]),
            operation=str(record["operation"])[:_MOST_TEXT],
            group=str(record["group"])[:_MOST_TEXT],
            peer=None if peer is None else int(peer),
            frames=tuple(str(frame)[:_MOST_TEXT] for frame in frames[:_MOST_READ_FRAMES]),
        )

    def to_json(self) -> dict[str, Json]:
        """Return the standstill for payloads."""
        return cast("dict[str, Json]", asdict(self) | {"frames": list(self.frames)})


def standstill_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's standstill file."""
    return folder / f"megascan-standstill-{rank}.json"


def read_standstills(folders: Sequence[Path], run_id: str) -> Iterator[tuple[Standstill, float]]:
    """Yield the standstills of a run's ranks, each with the time (unix s) at which it was written.

    Files that are damaged, too large, or just being removed are skipped.
    """
    for folder in folders:
        for path in sorted(folder.glob(_PATTERN)):
            try:
                with path.open("rb") as file:
                    content = file.read(_MOST_BYTES + 1)
                found, written = Standstill.decode(content), path.stat().st_mtime
            except (OSError, KeyError, TypeError, ValueError):
                continue
            if len(content) <= _MOST_BYTES and found.run_id == run_id:
                yield found, written


PATIENCE_ITERATIONS = 2.0
LEAST_PATIENCE_S = 5.0
"""Least patience; shorter than that of `megascan watch`, which then finds the file."""
FIRST_PATIENCE_S = 30.0
"""Patience before any iteration is over: compiling and connecting take long."""
_LOOK_S = 1.0
_KEPT_ITERATIONS = 16
_LONGEST_PAUSE_S = 300.0
_MOST_FRAMES = 8
_CLOSE_S = 5.0
_COMMUNICATION = "torch.distributed.distributed_c10d"
_MESSAGES = ("send", "recv")
"""Functions whose `dst` and `src` are the other side; in collectives they are the root."""


class Lookout(IterationListener):
    """Lookout over the thread that makes it, whose stack is read; it looks until tracing ends."""

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
        """Stop looking, and remove the file."""
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
        """Replace the file as a whole; errors of the disk are ignored."""
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
    """Return the outermost call of torch.distributed in a stack.

    Private functions (`_coalescing_manager`) count if they have a process group.
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
    """Return the id of the process group that a call was given; "" if it was given no group."""
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
