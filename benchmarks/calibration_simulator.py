"""Offer MegaScan's own simulator as a ground (`benchmarks.grounds.ground`) of known chips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.cases import QUICK
from benchmarks.detection.cases import cases as own_cases
from benchmarks.detection.jobs import Case as OwnCase
from benchmarks.detection.runner import true_cost_ratio
from benchmarks.grounds.ground import Case, Planted, Variation
from megascan.simulate import Fault, FaultKind, JobModel, simulate_trace, write_rank_files
from megascan.simulate.execution import Draws
from megascan.simulate.program import compile_job

GROUND = "simulator"
_FAULTY = ("compute", "link", "host")


@cache
def _jobs() -> dict[str, OwnCase]:
    """Return the lasting faults and the sound jobs of the detection benchmark's short plan."""
    return {
        f"{case.group}-{case.layout_name}-{case.cost_name}-{case.severity}-s{case.seed}": case
        for case in own_cases(QUICK)
        if (case.group in _FAULTY and case.duration == "permanent") or case.group == "healthy"
    }


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for name, case in _jobs().items():
        yield Case(
            ground=GROUND,
            name=name,
            family=case.group,
            num_ranks=case.job.layout.world_size,
            seed=case.seed,
            planted=tuple(_planted(fault) for fault in case.faults),
        )


def _planted(fault: Fault, cost_ratio: float = 1.0) -> Planted:
    ends = (fault.rank,) if fault.peer is None else (fault.rank, fault.peer)
    return Planted(
        kind=str(fault.kind), cause=str(fault.kind), owner="node", ranks=ends,
        factor=fault.factor, cost_ratio=cost_ratio, held_cost_ratio=cost_ratio,
    )  # fmt: skip


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the rank files of a case; return what was planted, with its cost."""
    own = _jobs()[case.name]
    trace = simulate_trace(own.job, own.faults, own.seed)
    write_rank_files(trace, directory)
    cost = true_cost_ratio(own, trace) if own.faults else 1.0
    return tuple(_planted(fault, cost) for fault in own.faults)


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer each rank computes than the nominal chip, (rank, iteration)."""
    own = _jobs()[case.name]
    return _slowness(own.job, own.faults, own.seed)


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Simulate the sound job of a case, varied; return the slowness of its ranks."""
    own = _jobs()[case.name]
    job, faults = own.job, list[Fault]()
    if variation.chip_spread_ratio is not None:
        job = replace(job, noise=replace(job.noise, device_ratio=variation.chip_spread_ratio))
    if variation.slow_rank >= 0:
        faults.append(
            Fault(rank=variation.slow_rank, kind=FaultKind.COMPUTE, factor=variation.factor)
        )
    if directory is not None:
        write_rank_files(simulate_trace(job, faults, own.seed), directory)
    return _slowness(job, tuple(faults), own.seed)


def _slowness(job: JobModel, faults: tuple[Fault, ...], seed: int) -> NDArray[np.float64]:
    chips = Draws(job, compile_job(job), faults, seed).device
    planted = np.ones(len(chips))
    for fault in faults:
        if fault.kind == FaultKind.COMPUTE:
            planted[fault.rank] *= fault.factor
    return np.asarray((chips * planted)[:, None])
