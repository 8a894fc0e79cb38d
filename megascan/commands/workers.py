"""Who reads rank files and makes the output: this machine's cores, or a Dask cluster's workers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megascan.commands.packages import require
from megascan.errors import MissingError

if TYPE_CHECKING:
    from megascan.export import Block
    from megascan.pipeline import Spread
    from megascan.reader import Format, Segment

WORTH_PROCESSES_BYTES = 8 << 20
"""Of rank files: below, starting processes takes as long as it saves."""


class Workers(Protocol):
    """Those who do what can be divided."""

    def load(self, found: Format, files: Sequence[Path]) -> list[Segment]:
        """As `megascan.reader.load_segments`."""

    def encode(
        self, blocks: Iterable[Block], *, gzipped: bool
    ) -> Iterator[tuple[int, bytes | memoryview]]:
        """As `megascan.export.encode_here`."""


@dataclass(frozen=True)
class Cores:
    """This machine's: files are read as `spread` says, output is made by threads."""

    spread: Spread

    @classmethod
    def for_trace(cls, trace_bytes: int) -> Cores:
        """As it is worth for rank files of so many bytes."""
        if trace_bytes >= WORTH_PROCESSES_BYTES:
            from megascan.processes import across_processes

            return cls(across_processes)
        from megascan.pipeline import across_threads

        return cls(across_threads)

    def load(self, found: Format, files: Sequence[Path]) -> list[Segment]:
        """Read rank files."""
        from megascan.reader import load_segments

        return load_segments(found, files, self.spread)

    def encode(
        self, blocks: Iterable[Block], *, gzipped: bool
    ) -> Iterator[tuple[int, bytes | memoryview]]:
        """Make the blocks of an output file."""
        from megascan.export import encode_here

        return encode_here(blocks, gzipped=gzipped)


def size_bytes(path: Path) -> int:
    """Of the files in a folder, or of a file; 0 where they cannot be looked at."""
    try:
        files = path.iterdir() if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def add_scheduler_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag that moves work to a Dask cluster."""
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="let the workers of this Dask scheduler (tcp://host:8786) do what can be divided; "
        "the result is the same to the bit (docs/scale.md)",
    )


@contextmanager
def workers_from(arguments: argparse.Namespace, trace_bytes: int) -> Iterator[Workers]:
    """The cluster that --scheduler names while the block runs; without it this machine's cores."""
    if arguments.scheduler is None:
        yield Cores.for_trace(trace_bytes)
        return
    require("aggregate")
    try:
        from aggregate.cluster import connect
    except ModuleNotFoundError as error:
        raise MissingError(
            f"--scheduler needs {error.name}, which is not installed; install MegaScan with its "
            "extra `cluster` (pip install 'megascan[cluster]') or leave out --scheduler"
        ) from error
    with connect(arguments.scheduler) as cluster:
        yield cluster
