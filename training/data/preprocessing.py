"""From JSON Lines files to finished data sets, going on where an earlier run was ended.

    input files ─ read_line_batches ─► encode_batches (N processes) ─► writers, one a key
                                                                       │  Keeper: checkpoints
    PREFIX.partial/  ◄──────────────────────────────────────────────────┘
    PREFIX_KEY_document.{bin,json,idx}  ◄── publish, when all is there

This process reads, unpacks and writes, which is little work against tokenizing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megascan.errors import InputError, OutputError
from training.data.description import write_description
from training.data.documents import read_line_batches
from training.data.encoding import EncodedBatch, EncodingSettings, encode_batches
from training.data.index_writer import DataSize, IndexedWriter, id_type_for, publish
from training.data.indexed import output_paths
from training.data.restart import (
    Checkpoint,
    Keeper,
    RunSettings,
    has_checkpoint,
    read_checkpoint,
)
from training.data.work_folder import WorkFolder


class Progress(Protocol):
    """Is told how the work goes."""

    def resume(self, checkpoint: Checkpoint) -> None:
        """Work goes on from here."""

    def add(self, batch: EncodedBatch) -> None:
        """A batch is written."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be made: ``output_prefix`` is without ``_KEY_document``."""

    run: RunSettings
    encoding: EncodingSettings
    output_prefix: str
    num_workers: int
    skip_invalid: bool
    force: bool

    @property
    def paths(self) -> tuple[Path, ...]:
        """The input files."""
        return tuple(Path(path) for path, *_ in self.run.inputs)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Name of each output without its ending, by key."""
        return tuple(f"{self.output_prefix}_{key}_document" for key in self.run.json_keys)

    @property
    def folder(self) -> Path:
        """Where the outputs are made."""
        return Path(f"{self.output_prefix}.partial")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was made: ``sizes`` by key, and the number of lines that were left out."""

    sizes: tuple[DataSize, ...]
    num_invalid: int


def preprocess(request: Request, progress: Progress) -> Outcome:
    """Make the outputs.

    Raises InputError for input that cannot be used and for an interrupted run with other
    settings, OutputError when an output exists without ``force`` or cannot be written, ConfigError
    when a worker is killed. What was done until then stays for the next call, unless it is nothing.
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
    return Outcome(sizes=end.sizes, num_invalid=end.num_invalid)


def _begin(request: Request, folder: WorkFolder) -> Checkpoint:
    """Where to begin: at what an earlier run left, or at the start with an empty folder."""
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


def _check_free(request: Request) -> None:
    for path in (path for prefix in request.prefixes for path in output_paths(prefix)):
        if path.exists() and not request.force:
            raise OutputError(f"{path} exists: pass --force to replace it")


def _make(request: Request, begin: Checkpoint, progress: Progress) -> Checkpoint:
    """Write all that lies after ``begin``, up to the point where only the names are missing."""
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
    request: Request,
    batches: Iterable[EncodedBatch],
    writers: Sequence[IndexedWriter],
    keeper: Keeper,
    progress: Progress,
) -> None:
    for batch in batches:
        if batch.invalid and not request.skip_invalid:
            raise InputError(f"{batch.invalid[0]}; mend the line, or pass --skip-invalid")
        for writer, texts in zip(writers, batch.by_key, strict=True):
            writer.add(texts)
        keeper.advance(batch.end, num_invalid=len(batch.invalid))
        progress.add(batch)
