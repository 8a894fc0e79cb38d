"""The ground "harbour": many ships at one quay, and all leave when the slowest has been unloaded.

A job is followed as arrays over traced iterations and ranks: each stage's ranks run one program,
wait for messages and collectives, and begin the next iteration after a reduction over the whole
job. `hardware` says what chips and sites are and how chips differ, `jobs` what a model's modules
cost, `trouble` what each rank feels of what goes wrong, `network` how long transfers take and whom
one may name for a slow one, `schedule` in which order a stage works, `engine` how host threads and
devices come along, `trainer` what ranks do in an iteration, `scenario` runs a job, `files` records
it, `layouts` draws jobs, `planting` plants, `catalogue` lists the cases.

Left out: what an iteration leaves for the next one but lateness and an empty queue, links that
change within an iteration, messages whose size follows a sequence's length, transfers that slow
each other down. Costs leave out the time of checkpoints and evaluations.
"""

from benchmarks.grounds.harbour.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
