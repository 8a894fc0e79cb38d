"""Old archives: jobs traced years ago, of which only the original MegaScan's files are left."""

from benchmarks.grounds.archive.catalogue import cases
from benchmarks.grounds.archive.interface import slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
