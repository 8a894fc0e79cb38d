"""The ground "campus": jobs of many teams on a shared cluster, from two GPUs to 64.

`hardware` says what chips, hosts and clocks are and how they differ, `model` what the parts of a
model cost (products in waves of tiles, all else at the rate of memory), `job` what a job is and
which ranks form groups, `teams` which jobs there are, `faults` what ails whom and when, `planting`
plants, `links` says how long transfers take and whose fault would show in them, `schedule` in which
order a stage works, `world` what all stages share, `crew` how far hosts and devices have come,
`habits`, `megatron` and `plain` what trainers do, `engine` who waits for whom, `files` what is
recorded by which clock, `catalogue` lists the cases and prices what was planted.

All iterations and all variants of a job (with its faults, and without each of them) are computed
side by side, from the same draws.

Left out: trainers on the CPU; chips that slow down by their own power; parameters gathered beside
the next forward; congestion that differs by switch; microbatches that differ in number between
ranks; layers recorded in turns; evaluations within an iteration; ranks that are missing or killed.
A fault holds or not for a whole pass, and a host's clock is stepped between two windows only.
"""

from benchmarks.grounds.campus.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
