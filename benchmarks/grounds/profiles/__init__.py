"""A ground of PyTorch profiles: one Kineto file a rank, as `torch.profiler` exports them.

`job` says what a rank's host launches in one iteration, `engine` lets hosts launch, streams run and
collectives wait for the last to arrive, `files` writes what Kineto would have recorded in which
version, `catalogue` lists the cases.
"""

from benchmarks.grounds.profiles.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
