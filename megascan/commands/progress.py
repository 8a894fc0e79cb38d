"""One line on a terminal that says what a long command is doing.

Nothing when stderr is not a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Show `doing` while the block runs, and how long it took once it is done."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{doing} …", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        yield
    finally:
        print(f"\r{doing}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
