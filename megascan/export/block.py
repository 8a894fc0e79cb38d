"""A piece of an output file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BLOCK_ROWS = 3 << 14
"""Spans a block: large enough for column operations, small enough to have a few in memory."""


@dataclass(frozen=True)
class Block:
    """A piece of the file: its number of events, and what makes its bytes in any thread."""

    num_events: int
    make: Callable[[], bytes | memoryview]
