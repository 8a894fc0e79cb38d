"""Jobs of Megatron-Core in a machine room, as those see it who keep it running.

Written from the physics of GPUs, links and hosts, from published reports of operation, and from
docs/format.md; by somebody who has read neither the detector nor the simulator.

    hardware     chips, hosts, NICs: what the makers' data sheets say
    job          layout, model, trainer, tracing, steadiness: all that is drawn of a job
    settings     draws jobs as users start them
    places       process groups as arrays
    noise        heavy tails, wandering, bursts
    roofline     how long kernels take: by arithmetic in waves, or by memory
    parts        steps of a pass: kernels, collectives, modules; about how long passes take
    schedule     1F1B and interleaved
    conditions   what everything takes at every moment, drawn
    trouble      what goes wrong, done to conditions
    planting     where it is planted, and who may be named for it
    network      how long communication takes
    data         workers that prepare batches
    engine       host threads, streams and communicators; spans
    passes       runs passes
    pipeline     runs stages and the messages between them
    update       gradients, norm, optimizer
    run          iterations, and what lies between them
    clocks       what time a rank believes it is
    readings     what NVML says
    files        rank files
    catalogue    all cases
    interface    what every ground offers

Hosts launch ahead of their devices, devices wait for members and messages. All variants of a job
(with its troubles, and without each of them) run side by side with the same draws, so a cost is the
difference that a trouble makes, beside all others that are planted. A cost may be nothing: a slow
chip where the network bounds the step, a slow loader whose queue is long. Iteration times are those
of the traced iterations, from the last rank's begin to the last rank's end.

Left out: orders of ranks other than the default, expert tensor parallelism, messages of an
interleaved schedule and several buckets where ends are bounds, contention of overlapped
communication for one NIC, CUDA graphs, resumed runs, lost windows and spans, budgets, armed runs.
"""

from benchmarks.grounds.rack.interface import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
