"""What an importer hands over: what one rank recorded of one run in one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa

from megascan.header import RankHeader, WindowRecord

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Finished windows of one rank and run, from one file.

    `spans` has schema TRACE_SCHEMA with `start_ns` in unix time by the rank's clock, in any order.
    `notes` are sentences about what was left out.
    """

    path: Path
    header: RankHeader
    windows: tuple[WindowRecord, ...]
    spans: pa.Table
    num_unfinished_spans: int = 0
    notes: tuple[str, ...] = ()


Importer: TypeAlias = Callable[[Sequence[Path]], list[Segment]]
"""Reads the rank files of a folder: a segment for every rank and run in them, none for a file that
ends before it says whose it is. Raises InputError for damage inside finished windows."""


def in_parallel(read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Files read by as many threads as there are cores (the parser holds no interpreter lock)."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(read, items))
