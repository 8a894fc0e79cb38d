"""Traced jobs in the original MegaScan's format, with a known truth: `cases()` and `write()`."""

from benchmarks.grounds.original.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
