"""Write jobs as operators of large clusters have published them: incidents, and what looks alike.

Hosts, devices and links are simulated event by event (`engine`), by trainers that run as
Megatron-Core, FSDP, HSDP and DDP do (`trainers`); what is planted (`causes`, `likenesses`) is drawn
by `catalogue`. A job with and without a cause are variants of one simulation, from the same draws.
Files are rank files, or profiles of torch.profiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.incidents.catalogue import plans
from benchmarks.grounds.incidents.hardware import placed
from benchmarks.grounds.incidents.jobs import Job
from benchmarks.grounds.incidents.profile_files import write_profiles
from benchmarks.grounds.incidents.rank_files import write_rank_files
from benchmarks.grounds.incidents.simulation import Outcome, chips_of, simulate

__all__ = ["cases", "slowness", "write", "write_varied"]


def cases(draw: int = 0) -> Iterable[Case]:
    """Yield all cases of a draw."""
    for case, _ in plans(draw).values():
        yield case


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with its cost."""
    job, troubles = plans(case.draw)[case.name][1]
    everything = frozenset(range(len(troubles)))
    variants = [everything, *(everything - {number} for number in range(len(troubles)))]
    chips = np.tile(chips_of(job, job.noise.chip_spread), (len(variants), 1))
    outcome = simulate(job, troubles, variants, chips, keeps=True)
    _write(job, outcome, directory)
    times = outcome.iteration_s
    return tuple(
        one.planted.priced(job.tracing.iterations, times[0], times[1 + number])
        for number, one in enumerate(troubles)
    )


def _write(job: Job, outcome: Outcome, directory: Path) -> None:
    if job.tracing.profile:
        write_profiles(job, outcome, directory)
        return
    if job.resumed:
        earlier = _earlier(job)
        chips = chips_of(earlier, job.noise.chip_spread)[None, :]
        run = simulate(earlier, (), [frozenset()], chips, keeps=True)
        write_rank_files(earlier, run, directory, goes_on=True)
    write_rank_files(job, outcome, directory)


def _earlier(job: Job) -> Job:
    """Return the run before a restart: on hosts in another order, some iterations of it traced."""
    rng = np.random.default_rng([job.seed, 41])
    cluster = placed(job.num_ranks, int(job.cluster.slots.max()) + 1, rng, restarted=False)
    count = min(4, len(job.tracing.iterations))
    numbers = (one - 200 * job.tracing.interval for one in job.tracing.iterations[:count])
    return replace(
        job,
        seed=job.seed + 1,
        cluster=replace(cluster, chip=job.cluster.chip),
        tracing=replace(job.tracing, iterations=tuple(numbers)),
        microbatches=job.microbatches[:count],
        run_id=f"{job.run_id[:-1]}x",
        epoch_ns=job.epoch_ns - 7_200_000_000_000,
    )


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer kernels of passes run than on chips that do not differ and
    without what was planted, (rank, iteration).
    """
    job, troubles = plans(case.draw)[case.name][1]
    everything = frozenset(range(len(troubles)))
    chips = np.stack([chips_of(job, job.noise.chip_spread), np.ones(job.num_ranks)])
    outcome = simulate(job, troubles, [everything, frozenset()], chips, keeps=False)
    return np.asarray(outcome.passes_s[0] / outcome.passes_s[1])


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate a case's job without what was planted, with other chips or one slow one."""
    job, _ = plans(case.draw)[case.name][1]
    spread = variation.chip_spread_ratio
    chips = chips_of(job, job.noise.chip_spread if spread is None else spread)
    if variation.slow_rank >= 0:
        chips[variation.slow_rank] *= variation.factor
    outcome = simulate(job, (), [frozenset()], chips[None, :], keeps=directory is not None)
    if directory is not None:
        _write(job, outcome, directory)
    return np.asarray(outcome.passes_s[0])
