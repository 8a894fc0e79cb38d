"""The ground "archive": old jobs, of which only the original MegaScan's files are left.

A stage's ranks are followed as arrays over replicas, TP ranks and iterations: host threads launch,
devices work, groups wait for their slowest member and messages for both sides. `settings` and
`costs` say what models, chips and modules take, `noise` how that scatters, `conditions` what each
rank feels of its chip and of what goes wrong, `network` how long transfers take, `job` what a job
is, `stage` how a stage's time goes on, `schedule` what stages do in which order, `files` records
it as three versions of the original tracer did, `plants` plants, `catalogue` lists the cases,
`interface` writes and prices them.

Left out, because the format cannot say it: interleaved stages, experts, context parallelism, hosts
and absolute times, spans of loaders, checkpoints and garbage collection. Nobody waits between
iterations.
"""

from benchmarks.grounds.archive.catalogue import cases
from benchmarks.grounds.archive.interface import slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
