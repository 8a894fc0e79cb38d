"""How this process gives memory back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import pyarrow as pa

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_KEPT_BYTES = 32 << 20
_LARGE_TRACE_BYTES = 2 << 30
_SHARED_BYTES, _LARGE_SHARED_BYTES = 16 << 20, 2 << 20


def keep_freed_memory(trace_bytes: int) -> None:
    """Let freed arrays of some MB be used again instead of going back to the system each time.

    Work block by block frees and takes the same arrays thousands of times; fetching every page
    anew costs a quarter of the work. At most 32 MB a thread stay. Of a trace whose files are
    large, `trace_bytes`, arrays above 2 MB go back at once: there room matters more. Arrow's
    buffers come from the same place: its own pools keep a fifth of a large trace. Only glibc knows
    these settings; elsewhere nothing happens.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        is_large = trace_bytes >= _LARGE_TRACE_BYTES
        mallopt(_MMAP_THRESHOLD, _LARGE_SHARED_BYTES if is_large else _SHARED_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Give back what a stage has freed: the next one works on other sizes in other threads."""
    pa.default_memory_pool().release_unused()
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
