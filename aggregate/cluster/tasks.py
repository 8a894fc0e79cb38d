"""What runs on the workers: plain functions of files and columns, so that no worker needs state."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megascan.export import gzip_member
from megascan.reader import Format, Packed, load_segments
from megascan.schema import SCHEMA_VERSION

_WORTH_THE_SAME = ("numpy", "pyarrow", "isal", "perfetto")
"""Packages whose version may change a byte of the output."""


@dataclass(frozen=True)
class WorkerView:
    """What a worker has and sees: versions by package, and how many of some files it can read."""

    versions: dict[str, str]
    num_readable: int


def look(paths: Sequence[Path]) -> WorkerView:
    """This process's view."""
    versions = {"MegaScan's schema": str(SCHEMA_VERSION)}
    for name in _WORTH_THE_SAME:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return WorkerView(versions, sum(os.access(path, os.R_OK) for path in paths))


def read_files(found: Format, paths: Sequence[Path]) -> Packed:
    """Segments of some files."""
    return Packed(tuple(load_segments(found, paths)))


def make_block(make: Callable[..., bytes | memoryview], gzipped: bool, *arguments: object) -> bytes:
    """Bytes of a block of the output file."""
    block = make(*arguments)
    return gzip_member(block) if gzipped else bytes(block)
