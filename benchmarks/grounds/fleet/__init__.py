"""A ground of a fleet's jobs: launching threads and device queues, rooflines, fluid networks.

`jobs` says what a job computes, `hardware` on what and what ails it, `trainer` what each rank does,
`engine` who waits for whom, `files` what is recorded, `scenario` what is true, `catalogue` lists.
"""

from benchmarks.grounds.fleet.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
