"""What a preprocessing run has done so far, on the disk, so that a killed one can be continued.

The state names a position in the input and what belongs to the documents before it: so many bytes
of each output. It is written after those bytes are safe, and replaced as a whole. Whatever was
written later is cut off when the run goes on, so the result has the bytes of a run that was never
interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import orjson

from megascan.errors import InputError, OutputError
from training.data.description import Meaning
from training.data.documents import Position
from training.data.index_writer import DataSize, IndexedWriter, reported

CHECKPOINT_INTERVAL_S = 1.0
"""Work that a killed run loses at most; a checkpoint costs some 10 ms."""

_NAME = "checkpoint"  # without an ending: each key has files with one


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What must be the same for a run to be continued: inputs, in order, and what is done to them.

    ``inputs`` has of each file its path, size in bytes and time of change in ns.
    """

    inputs: tuple[tuple[str, int, int], ...]
    json_keys: tuple[str, ...]
    meaning: Meaning

    def difference(self, other: RunSettings) -> str | None:
        """Say where two differ first; None when they agree."""
        for (path, *ours), (other_path, *theirs) in zip(self.inputs, other.inputs, strict=False):
            if path != other_path:
                return f"--input ({path} and {other_path})"
            if ours != theirs:
                return f"the input file {path}, which was changed"
        if len(self.inputs) != len(other.inputs):
            return f"--input ({len(self.inputs)} and {len(other.inputs)} files)"
        if self.json_keys != other.json_keys:
            return f"--json-keys ({' '.join(self.json_keys)} and {' '.join(other.json_keys)})"
        return self.meaning.difference(other.meaning)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How far a run has come; ``sizes`` by key. ``complete``: only the final names are missing."""

    position: Position = field(default_factory=Position)
    num_invalid: int = 0
    sizes: tuple[DataSize, ...] = ()
    complete: bool = False


def inputs_of(paths: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Identify input files without reading them."""
    found = [(path, path.stat()) for path in paths]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run left something to go on with."""
    return (folder / _NAME).exists()


def read_checkpoint(folder: Path, settings: RunSettings) -> Checkpoint | None:
    """Read what an interrupted run left; None when there is none or it had nothing yet.

    Raises InputError when the run was one with other settings, or the state is damaged.
    """
    path = folder / _NAME
    if not has_checkpoint(folder):
        return None
    try:
        state = orjson.loads(path.read_bytes())
        before = _settings(state["settings"])
        found = _checkpoint(state["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}): remove {folder} and begin again") from error
    difference = before.difference(settings)
    if difference is not None:
        raise InputError(
            f"{folder} holds an interrupted run that differs from this one in {difference}: "
            "repeat that command to finish it, or pass --force to drop it and begin again"
        )
    return found


def write_checkpoint(folder: Path, settings: RunSettings, checkpoint: Checkpoint) -> None:
    """Put the state on the disk, whole or not at all."""
    path = folder / _NAME
    new = path.with_suffix(".new")
    with reported(path), new.open("wb") as file:
        file.write(orjson.dumps({"settings": asdict(settings), "checkpoint": asdict(checkpoint)}))
        file.flush()
        os.fsync(file.fileno())
    with reported(path):
        new.replace(path)


class Keeper:
    """Writes checkpoints while a run goes on, and when an error or Ctrl-C ends it early."""

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        writers: Sequence[IndexedWriter],
        begin: Checkpoint,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._writers = writers
        self._last = begin
        self._last_s = time.monotonic()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and any(size.num_documents for size in self._last.sizes):
            with contextlib.suppress(OutputError):  # then the checkpoint before this one counts
                self._write(self._last)

    def advance(self, position: Position, *, num_invalid: int) -> None:
        """Take note that all before a position is with the writers; now and then write it down.

        ``num_invalid`` counts the lines left out since the last call.
        """
        self._last = Checkpoint(
            position=position,
            num_invalid=self._last.num_invalid + num_invalid,
            sizes=tuple(writer.size for writer in self._writers),
        )
        if time.monotonic() - self._last_s >= CHECKPOINT_INTERVAL_S:
            self._write(self._last)

    def complete(self) -> Checkpoint:
        """Write down, and return, that only the final names are missing."""
        self._last = dataclasses.replace(self._last, complete=True)
        self._write(self._last)
        return self._last

    def _write(self, checkpoint: Checkpoint) -> None:
        for writer in self._writers:
            writer.flush()
        write_checkpoint(self._folder, self._settings, checkpoint)
        self._last_s = time.monotonic()


def _settings(state: dict[str, object]) -> RunSettings:
    inputs, keys, meaning = state["inputs"], state["json_keys"], state["meaning"]
    if not (isinstance(inputs, list) and isinstance(keys, list) and isinstance(meaning, dict)):
        raise TypeError("settings of another kind")
    return RunSettings(
        inputs=tuple((path, size, changed) for path, size, changed in inputs),
        json_keys=tuple(keys),
        meaning=Meaning(**meaning),
    )


def _checkpoint(state: dict[str, object]) -> Checkpoint:
    position, sizes = state["position"], state["sizes"]
    num_invalid = state["num_invalid"]
    if not (
        isinstance(position, dict) and isinstance(sizes, list) and isinstance(num_invalid, int)
    ):
        raise TypeError("a checkpoint of another kind")
    return Checkpoint(
        position=Position(**position),
        num_invalid=num_invalid,
        sizes=tuple(DataSize(**size) for size in sizes),
        complete=bool(state["complete"]),
    )
