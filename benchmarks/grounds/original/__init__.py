"""Traced jobs in the original MegaScan's format, with a known truth: `cases()` and `write()`."""

from benchmarks.grounds.original.catalogue import cases, write

__all__ = ["cases", "write"]
