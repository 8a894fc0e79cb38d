"""The ground "kernels": jobs simulated kernel by kernel, written as MegaScan's own rank files.

`job` says what kernels cost and in which order a stage works, `cluster` under which conditions,
`engine` runs the traced iterations, `files` writes them down by each rank's own clock, `run` takes
both sides of a cause's cost, and `catalogue` lists the cases.

Left out: messages and tensor-parallel collectives beside compute, congestion between jobs, links
that slow down within an iteration, and what an iteration does to the next one. Models are a tenth
of real ones in time (iterations of 10 to 500 ms), so what a host does weighs more than in a large
job.
"""

from benchmarks.grounds.kernels.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
