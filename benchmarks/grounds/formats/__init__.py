"""Generate one simulated job in three formats: rank files, the original's files and profiles.

The physics is a simulation of operations: host threads launch kernels, streams run them one by one,
communications end when all have joined and the data is through.

    job.py         a job: parallel axes, model, habits; its process groups
    hardware.py    a cluster: chips, links, NICs and who shares them
    model.py       a transformer's parts as kernels and what they cost
    program.py     all operations of an iteration, and an order in which they can be timed
    trainer.py     what one rank issues: layers, passes, the update
    schedule.py    the order of passes: alone, 1F1B, interleaved
    troubles.py    what is wrong, and what it lengthens
    draws.py       how long everything takes: chips, noise, hosts, data, networks
    engine.py      when everything happens
    world.py       a job with and without what is planted, simulated
    clocks.py      what time a rank believes it is
    rankfiles.py   writes MegaScan's rank files
    original.py    writes the original MegaScan's files
    kineto.py      writes what torch.profiler exports
    settings.py    draws layouts, models and clusters
    causes.py      places causes, and says who may be named for them
    catalogue.py   all cases
    interface.py   what every ground offers: cases, write, slowness, write_varied
"""

from benchmarks.grounds.formats.interface import cases, slowness, write, write_varied

__all__ = ["cases", "slowness", "write", "write_varied"]
