"""Write jobs of present-day pods: racks of NVLink domains, hosts with rails, and what trains there.

Experts with uneven routers, packed documents, context parallelism, pipelines with and without
interleaving, sharded and replicated optimizers. `job` says what a job is, `work` prices its modules
and `load` its data; `machine` keeps chips, hosts and the network, `wires` times what travels,
`schedule` orders passes. `engine` runs all of it, by `stage`, `modules` and `ranks`; `recording`
keeps what ranks see, `rank_files` writes it. `draws` makes jobs, `faults` says what can be planted,
and `catalogue` lists the cases of `troubles` and `lookalikes`. A job with and without a cause are
variants of one simulation, from the same draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.pod.catalogue import plans
from benchmarks.grounds.pod.engine import simulate
from benchmarks.grounds.pod.machine import chips_of
from benchmarks.grounds.pod.rank_files import write_rank_files

__all__ = ["cases", "slowness", "write", "write_varied"]


def cases(draw: int = 0) -> Iterable[Case]:
    """Yield all cases of a draw."""
    for case, _ in plans(draw).values():
        yield case


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the rank files of a case; return what was planted, with its cost."""
    job, faults = plans(case.draw)[case.name][1]
    everything = frozenset(range(len(faults)))
    variants = [everything, *(everything - {number} for number in range(len(faults)))]
    chips = np.tile(chips_of(job, job.disorder.chip_spread), (len(variants), 1))
    outcome = simulate(job, faults, variants, chips, keeps=True)
    write_rank_files(job, outcome, directory, faults)
    times = outcome.iteration_s
    return tuple(
        fault.planted().priced(job.tracing.iterations, times[0], times[1 + number])
        for number, fault in enumerate(faults)
    )


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer kernels of passes run than on chips that do not differ and
    without what was planted, (rank, iteration).
    """
    job, faults = plans(case.draw)[case.name][1]
    everything = frozenset(range(len(faults)))
    chips = np.stack([chips_of(job, job.disorder.chip_spread), np.ones(job.num_ranks)])
    outcome = simulate(job, faults, [everything, frozenset()], chips, keeps=False)
    return np.asarray(outcome.passes_s[0] / outcome.passes_s[1])


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate a case's job without what was planted, with other chips or one slow one."""
    job, _ = plans(case.draw)[case.name][1]
    spread = variation.chip_spread_ratio
    chips = chips_of(job, job.disorder.chip_spread if spread is None else spread)
    if variation.slow_rank >= 0:
        chips[variation.slow_rank] *= variation.factor
    outcome = simulate(job, (), [frozenset()], chips[None, :], keeps=directory is not None)
    if directory is not None:
        write_rank_files(job, outcome, directory)
    return np.asarray(outcome.passes_s[0])
