"""Where a rank stands while its training does not get on: a small file a rank in the trace folder.

A rank's own file gets a window when the window is finished, so it says nothing of what the rank
waits in. When an iteration takes far too long, the tracer's lookout (`megascan.tracer.lookout`)
writes this one, and takes it away when training goes on. `megascan watch` reads it.

    {"schema": 1, "run_id": "…", "rank": 3, "host": "n07", "process_id": 4711, "iteration": 57,
     "since_unix_s": 1790000000.1, "patience_s": 5.0,
     "operation": "all_reduce", "group": "dp@0", "peer": null,
     "frames": ["all_reduce (distributed_c10d.py:2925)", "train_step (step.py:81)"]}

It is the host's view: with NCCL a host waits where it next needs a result, not in the collective
itself. There the frames say where, and PyTorch's flight recorder which collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import orjson

from megascan.header import Json

STANDSTILL_SCHEMA = 1
_PATTERN = "megascan-standstill-*.json"
_MOST_BYTES = 1 << 16
_MOST_TEXT = 300
"""Characters of any text that is taken from a file."""


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Where one rank stands, and since when. Innermost of `frames` first."""

    run_id: str
    rank: int
    host: str
    process_id: int
    iteration: int
    """The iteration it is in, or was in last."""
    since_unix_s: float
    """When that iteration began, as far as was looked."""
    patience_s: float
    """After how long a lookout of this job writes for the first time."""
    operation: str = ""
    """Function of torch.distributed that it is inside of; "" for none."""
    group: str = ""
    """Id of the process group as in rank files, "" where the function names none."""
    peer: int | None = None
    """The other rank of a send or receive."""
    frames: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return "in all_reduce of group dp@0, iteration 57"."""
        if self.operation:
            peer = "" if self.peer is None else f" with rank {self.peer}"
            what = self.operation + f" of group {self.group}" * bool(self.group) + peer
        else:
            what = self.frames[0] if self.frames else "a place without Python code"
        return f"in {what}, iteration {self.iteration}"

    def encode(self) -> bytes:
        """Return the file's content."""
        return orjson.dumps({"schema": STANDSTILL_SCHEMA, **asdict(self)})

    def to_json(self) -> dict[str, Json]:
        """Return it for payloads."""
        return cast("dict[str, Json]", asdict(self) | {"frames": list(self.frames)})


def standstill_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"megascan-standstill-{rank}.json"


def decoded(content: bytes) -> Standstill:
    """Read a file's content. Raises KeyError, TypeError or ValueError for what is none."""
    record = orjson.loads(content)
    if record["schema"] != STANDSTILL_SCHEMA:
        raise ValueError(f"schema {record['schema']!r}")
    frames, peer = record["frames"], record["peer"]
    if not isinstance(frames, list):
        raise TypeError("frames is no list")
    return Standstill(
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
        frames=tuple(str(frame)[:_MOST_TEXT] for frame in frames[:16]),
    )


def read_standstills(folders: Sequence[Path], run_id: str) -> Iterator[tuple[Standstill, float]]:
    """Yield what the ranks of a run say, with the time (unix s) at which it was written.

    Passes over what is damaged, too large, or about to be taken away.
    """
    for folder in folders:
        for path in sorted(folder.glob(_PATTERN)):
            try:
                with path.open("rb") as file:
                    content = file.read(_MOST_BYTES + 1)
                found, written = decoded(content), path.stat().st_mtime
            except (OSError, KeyError, TypeError, ValueError):
                continue
            if len(content) <= _MOST_BYTES and found.run_id == run_id:
                yield found, written
