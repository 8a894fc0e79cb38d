"""The ground "yard": jobs on GPUs that heat up, launched by host threads, over NICs in rails.

`hardware` says what chips, hosts and networks are and how fast a chip's clock settles between heat
and power cap, `jobs` what a model's modules cost (products in whole waves of tiles), `trouble` what
ails whom and when, `network` how long a transfer takes and whose fault would show in it, `schedule`
in which order a stage works, `launching` how far host and device have come, `trainer` what each
rank does and when its batches are there, `engine` who waits for whom, `scenario` what is true,
`files` what is recorded by which clock, `planting` plants, `catalogue` lists the cases.

Left out: compute that slows beside communication, channels of unequal speed within one collective,
congestion that differs by switch, evaluations within an iteration, what a checkpoint does to the
network. Clocks and links change between iterations only, and a step of a host's clock lies
between two windows.
"""

from benchmarks.grounds.yard.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
