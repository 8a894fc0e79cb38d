"""From JSON Lines files to finished data sets; an interrupted run is continued.

    input files ─ read_line_batches ─► encode_batches (N processes) ─► writers, one a key
                                                                       │  Keeper: checkpoints
    PREFIX.partial/  ◄──────────────────────────────────────────────────┘
    PREFIX_KEY_document.{bin,json,idx}  ◄── publish, when all is there

This process reads, unpacks and writes, which is little work compared with tokenizing. The folder
PREFIX.partial (`WorkFolder`) belongs to one process at a time and is removed when the work is done.

A `Checkpoint` names a position in the input and the size of each output for the documents before
it. A checkpoint is written after these outputs are on the disk, and replaced as a whole. Whatever
was written later is cut off when the run continues, so the result has the bytes of a run that was
never interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import orjson

from megascan.errors import InputError, OutputError
from megascan.overwriting import check_not_read
from training.data.documents import (
    EncodedBatch,
    EncodingSettings,
    Position,
    encode_batches,
    read_line_batches,
)
from training.data.indexed import (
    DataSize,
    IndexedWriter,
    Meaning,
    id_type_for,
    publish,
    published_paths,
    reported,
    write_description,
)

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class WorkFolder:
    """A folder that only this process writes to, until the context is left.

    The files in it stay, for a later process to continue, unless `remove` was called. Raises
    OutputError when the folder cannot be made, is in use by another process or holds files of
    another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reported(path):
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()) and not (path / "lock").exists():
                raise OutputError(
                    f"{path} would be this command's folder, and holds other files: move them, or "
                    "choose another --output-prefix"
                )
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
        """Remove the files that an earlier process left; keep the folder."""
        with reported(self.path):
            for entry in self.path.iterdir():
                if entry.name != "lock":
                    entry.unlink()

    def remove(self) -> None:
        """Remove the folder and all files in it."""
        shutil.rmtree(self.path, ignore_errors=True)


CHECKPOINT_INTERVAL_S = 1.0
"""Seconds between checkpoints: most work that a killed run loses; a checkpoint costs some 10 ms."""

_NAME = "checkpoint"  # has no ending, unlike the files of each key


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What must be equal for a run to be continued: inputs, in order, and what is done to them.

    ``inputs`` holds (path, size in bytes, time of change in ns) of each file.
    """

    inputs: tuple[tuple[str, int, int], ...]
    json_keys: tuple[str, ...]
    meaning: Meaning

    def difference(self, other: RunSettings) -> str | None:
        """Return the first difference from other settings; None if they are equal."""
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
    """How far a run has come; ``sizes`` are by key.

    ``complete`` means that only the outputs' final names are missing.
    """

    position: Position = field(default_factory=Position)
    num_invalid: int = 0
    sizes: tuple[DataSize, ...] = ()
    complete: bool = False


def inputs_of(paths: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return (path, size in bytes, time of change in ns) of input files, without reading them."""
    found = [(path, path.stat()) for path in paths]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)


def has_checkpoint(folder: Path) -> bool:
    """Return whether an interrupted run has left a checkpoint."""
    return (folder / _NAME).exists()


def read_checkpoint(folder: Path, settings: RunSettings) -> Checkpoint | None:
    """Read the checkpoint that an interrupted run has left; None when there is none.

    Raises InputError when that run had other settings, or when the checkpoint is damaged.
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
    """Write a checkpoint to the disk, whole or not at all."""
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
        """Note that the writers have all before a position; write a checkpoint when one is due.

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
        """Write and return a checkpoint that says that only the final names are missing."""
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


class ProgressListener(Protocol):
    """Follows the progress of preprocessing."""

    def resume(self, checkpoint: Checkpoint) -> None:
        """Note that an interrupted run continues from a checkpoint."""

    def add(self, batch: EncodedBatch) -> None:
        """Note that a batch was written."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Which outputs to make, from what; ``output_prefix`` is without ``_KEY_document``."""

    run: RunSettings
    encoding: EncodingSettings
    output_prefix: str
    num_workers: int
    skip_invalid: bool
    force: bool

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the input files."""
        return tuple(Path(path) for path, *_ in self.run.inputs)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return, by key, the path of each output without ending."""
        return tuple(f"{self.output_prefix}_{key}_document" for key in self.run.json_keys)

    @property
    def folder(self) -> Path:
        """Return the folder in which the outputs are made."""
        return Path(f"{self.output_prefix}.partial")


@dataclass(frozen=True, kw_only=True)
class MadeData:
    """The finished outputs: ``sizes`` by key, and the number of lines that were left out."""

    sizes: tuple[DataSize, ...]
    num_invalid: int


def preprocess(request: DataRequest, progress: ProgressListener) -> MadeData:
    """Make the outputs.

    Raises InputError for input that cannot be used and for an interrupted run with other settings,
    OutputError when an output exists without ``force`` or cannot be written, MissingError when a
    worker is killed. After an error the last checkpoint, if any, is kept for the next call.
    """
    with WorkFolder(request.folder) as folder:
        try:
            begin = _begin(request, folder)
            if begin.sizes:
                progress.resume(begin)
            end = begin if begin.complete else _make(request, begin, progress)
        except BaseException:
            if not has_checkpoint(folder.path):
                folder.remove()
            raise
        for key, prefix in zip(request.run.json_keys, request.prefixes, strict=True):
            publish(folder.path, key, prefix)
        folder.remove()
    return MadeData(sizes=end.sizes, num_invalid=end.num_invalid)


def _begin(request: DataRequest, folder: WorkFolder) -> Checkpoint:
    """Return where to begin: at an earlier run's checkpoint, or at the start in an empty folder."""
    try:
        found = read_checkpoint(folder.path, request.run)
    except InputError:
        if not request.force:
            raise
        found = None
    if found is None:
        folder.clear()
    if found is None or not found.complete:
        _check_free(request)
    if found is not None and found.num_invalid and not request.skip_invalid:
        raise InputError(
            f"the interrupted run in {folder.path} left out {found.num_invalid} invalid lines: "
            "pass --skip-invalid to go on with it"
        )
    return found or Checkpoint()


def _check_free(request: DataRequest) -> None:
    tokenizer = request.encoding.tokenizer
    named = (tokenizer.vocab_file, tokenizer.merge_file, tokenizer.tokenizer_model)
    read = [*request.paths, *(Path(name) for name in named if name is not None)]
    for prefix in request.prefixes:
        for path in published_paths(prefix):
            check_not_read(path, read)
            if path.exists() and not request.force:
                raise OutputError(f"{path} exists: pass --force to replace it")


def _make(request: DataRequest, begin: Checkpoint, progress: ProgressListener) -> Checkpoint:
    """Write the outputs from ``begin`` on, and a checkpoint: only the final names are missing."""
    lines = read_line_batches(request.paths, start=begin.position)
    batches = encode_batches(request.encoding, lines, num_workers=request.num_workers)
    meaning = request.run.meaning
    sizes = begin.sizes or (DataSize(),) * len(request.prefixes)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                IndexedWriter(
                    request.folder, key, id_type=id_type_for(meaning.vocab_size), size=size
                )
            )
            for key, size in zip(request.run.json_keys, sizes, strict=True)
        ]
        keeper = stack.enter_context(Keeper(request.folder, request.run, writers, begin))
        with contextlib.closing(batches):
            _write(request, batches, writers, keeper, progress)
        for writer, prefix in zip(writers, request.prefixes, strict=True):
            if writer.size.num_documents == 0:
                names = ", ".join(map(str, request.paths))
                raise InputError(f"{names}: no document for {prefix}, nothing was written")
            writer.finish()
            write_description(request.folder / f"{writer.name}.json", meaning, writer.size)
        return keeper.complete()


def _write(
    request: DataRequest,
    batches: Iterable[EncodedBatch],
    writers: Sequence[IndexedWriter],
    keeper: Keeper,
    progress: ProgressListener,
) -> None:
    for batch in batches:
        if batch.invalid and not request.skip_invalid:
            raise InputError(f"{batch.invalid[0]}; mend the line, or pass --skip-invalid")
        for writer, texts in zip(writers, batch.by_key, strict=True):
            writer.add(texts)
        keeper.advance(batch.end, num_invalid=len(batch.invalid))
        progress.add(batch)
