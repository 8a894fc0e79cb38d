"""A ground of whole clusters: hosts as shared resources, GPUs as speed states, jobs that wait.

`hardware` is the cluster, `jobs` what runs on it, `engine` lets the one run on the other, `files`
writes what a tracer would have written, `catalogue` lists the cases.
"""

from benchmarks.grounds.cluster.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
