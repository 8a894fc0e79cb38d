"""A job in, a trace out."""

from __future__ import annotations

from collections.abc import Sequence

from megascan.simulate.clocks import RankClocks
from megascan.simulate.compiler import compile_job
from megascan.simulate.draws import Draws
from megascan.simulate.engine import Engine, Recording, empty_recording
from megascan.simulate.faults import Fault
from megascan.simulate.grid import Grid
from megascan.simulate.job import JobModel
from megascan.simulate.records import run_id_of, trace_of
from megascan.simulate.table import TableBuilder
from megascan.timeline import Trace


def simulate_trace(job: JobModel, faults: Sequence[Fault] = (), seed: int = 0) -> Trace:
    """Run a job and return what its ranks would have recorded.

    Deterministic: the same arguments give the same trace. Raises ConfigError for a job whose
    sizes do not fit together or a fault outside it.

        job = JobModel(layout=layout, costs=compute_bound(layout))
        trace = simulate_trace(job, [parse_fault("rank=3,kind=compute,factor=1.5")], seed=1)
    """
    for fault in faults:
        fault.check(job.layout)
    grid = Grid(job.layout)
    programs = compile_job(job)
    engine = Engine(grid, programs)
    draws = Draws(job, programs, tuple(faults), seed)
    config = job.trace_config()
    traced: list[int] = []
    recorded: list[list[Recording]] = [[] for _ in programs]
    for iteration in range(1, job.iterations + 1):
        recordings = [empty_recording(len(p.spans), grid.num_places) for p in programs]
        engine.run(draws.iteration(iteration), recordings)
        if config.traces(iteration):
            traced.append(iteration)
            for stage, recording in enumerate(recordings):
                recorded[stage].append(recording)
    run_id = run_id_of(job, tuple(faults), seed)
    builder = TableBuilder(job, grid, RankClocks.draw(job, seed))
    for stage, program in enumerate(programs):
        builder.add_stage(program, traced, recorded[stage])
        recorded[stage].clear()
    return trace_of(builder, run_id, traced)
