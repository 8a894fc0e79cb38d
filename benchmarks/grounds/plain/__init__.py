"""Plain PyTorch trainers on GPUs, as the tracer records them when it is given a model.

Written from the physics of GPUs, links and hosts, from how torch's trainers order their work, and
from what docs/format.md and docs/other-trainers.md say is recorded; by somebody who has read
neither the detector nor the simulator.

    machine     chips, links, NICs, clocks; process groups; what a collective takes
    job         trainers, models, habits, noise, and what is traced: all that is drawn of a job
    trouble     what goes wrong: which times grow, whose, when
    engine      host threads, streams and communicators of all ranks; spans
    passes      forward and backward passes, layers, tensor parallelism, experts, collectors
    loops       DDP, FSDP2, HSDP, DeepSpeed's ZeRO 1 to 3, tensor-parallel replicas
    pipeline    1F1B of torch.distributed.pipelining
    update      batches, copies, the optimizer, evaluations, checkpoints, logs
    run         a whole run, and how long its iterations took
    files       rank files, by every rank's own clock
    causes      what is planted, and who may be named for it
    catalogue   the cases, and what every ground offers

A case's cost compares two runs with the same draws, with its cause and without. A cause may cost
nothing: a slow CPU far ahead of its GPU, a slow chip in a job that its network bounds. Chips'
`chip_spread_ratio` is the range that they keep to, four standard deviations. Figures by iteration
are those of the traced ones.

Left out: context parallelism, interleaved and zero-bubble pipelines, FSDP within a pipeline, DDP
inside of stages, torch's own evaluation of shapes in a pipeline's first step, CUDA graphs, resumed
runs and lost windows, trainers with callbacks (Transformers, Lightning), armed runs, and faults of
two things at once.
"""

from benchmarks.grounds.plain.catalogue import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
