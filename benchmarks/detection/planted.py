"""Jobs with faults: every class at every severity.

Ranks, pairs and onsets are drawn from the seed, so that no place in the layout is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.detection.jobs import (
    ALL_LAYOUTS,
    FEW_PEERS,
    LAYOUTS,
    NUM_ITERATIONS,
    NUM_LAYERS,
    Case,
    Maker,
    base_job,
)
from megascan.simulate import Fault, FaultKind, JobModel
from megascan.topology import Coordinates, Layout

SEVERITIES = (0.03, 0.05, 0.08, 0.10, 0.20, 0.50)
LINK_SEVERITIES = (0.5, 1.0, 1.0, 3.0, 7.0)
NUM_SEVERAL = 2
"""Draws of three slow ranks in each cell."""
TRANSIENT = 5
"""Iterations of a transient fault."""
DURATIONS = ("permanent", "transient", "flapping")


def few_peer_makers(layout_name: str) -> Iterator[Maker]:
    """Slow ranks with one equal or none."""
    for severity in (0.1, 0.5):
        yield _fault_maker(
            FaultKind.COMPUTE, layout_name, "compute-bound", severity, "permanent", group=FEW_PEERS
        )


def fault_makers(layout_name: str, cost_name: str) -> Iterator[Maker]:
    """All faults of one layout and cost model."""
    layout = LAYOUTS[layout_name]
    for severity in SEVERITIES:
        for duration in DURATIONS:
            yield _fault_maker(FaultKind.COMPUTE, layout_name, cost_name, severity, duration)
    for kind in (FaultKind.HOST, FaultKind.LOADER, FaultKind.GC):
        for severity in (0.05, 0.10, 0.20, 0.50):
            yield _fault_maker(kind, layout_name, cost_name, severity, "permanent")
        yield _fault_maker(kind, layout_name, cost_name, 0.20, "transient")
    if layout.pp > 1 and layout.dp > 1:
        for severity in LINK_SEVERITIES:
            yield _fault_maker(FaultKind.LINK, layout_name, cost_name, severity, "permanent")
    for _ in range(NUM_SEVERAL):
        yield _several_maker(layout_name, cost_name)


def _fault_maker(
    kind: FaultKind,
    layout_name: str,
    cost_name: str,
    severity: float,
    duration: str,
    *,
    group: str = "",
) -> Maker:
    def make(seed: int) -> Case:
        job = base_job(ALL_LAYOUTS[layout_name], cost_name)
        generator = np.random.default_rng([seed, 7])
        rank, peer = _place(kind, job.layout, generator)
        first, last, period = _when(duration, generator)
        fault = Fault(
            rank=rank,
            kind=kind,
            factor=_factor(kind, job, severity),
            first_iteration=first,
            last_iteration=last,
            period=period,
            peer=peer,
        )
        return Case(
            group=group or str(kind),
            layout_name=layout_name,
            cost_name=cost_name,
            seed=seed,
            job=job,
            faults=(fault,),
            severity=severity,
            duration=duration,
        )

    return make


def _place(
    kind: FaultKind, layout: Layout, generator: np.random.Generator
) -> tuple[int, int | None]:
    """A rank that can have the fault; for links a pair of neighbouring stages."""
    rank = int(generator.integers(layout.world_size))
    place = layout.coordinates(rank)
    if kind == FaultKind.LOADER:
        stage = 0 if place.pp < layout.pp / 2 else layout.pp - 1
        return layout.rank_of(Coordinates(dp=place.dp, pp=stage)), None
    if kind == FaultKind.LINK:
        stage = min(place.pp, layout.pp - 2)
        ends = [replace(place, pp=stage), replace(place, pp=stage + 1)]
        return layout.rank_of(ends[0]), layout.rank_of(ends[1])
    return rank, None


def _when(duration: str, generator: np.random.Generator) -> tuple[int, int | None, int | None]:
    """First and last iteration and period; onsets leave healthy iterations before and after."""
    if duration == "transient":
        first = int(generator.integers(6, NUM_ITERATIONS - TRANSIENT - 1))
        return first, first + TRANSIENT - 1, None
    if duration == "flapping":
        return int(generator.integers(4, 7)), None, 4
    return 1, None, None


def _factor(kind: FaultKind, job: JobModel, severity: float) -> float:
    """Factor of a fault that costs its rank `severity` of its computation.

    A host that runs ahead of its GPU hides loading and pauses: without a pipeline all that it is
    ahead (with one it waits for the device at every exchange). They must exceed that to count.
    """
    costs = job.costs
    if kind not in (FaultKind.LOADER, FaultKind.GC):
        return 1.0 + severity
    ahead = 1.0 - costs.dispatch_ratio if job.layout.pp == 1 and job.device == "cuda" else 0.0
    if kind == FaultKind.GC:
        return 1.0 + severity + ahead / 2  # pauses come in mid-iteration
    layer = 2 * costs.norm_ns + costs.attention_ns + costs.mlp_ns
    microbatch = layer * (NUM_LAYERS / job.layout.pp) * (1 + costs.backward_ratio)
    return 1.0 + (severity + ahead) * microbatch / costs.load_ns


def _several_maker(layout_name: str, cost_name: str) -> Maker:
    """Slow ranks at once, 10, 20 and 30 %; never more than half of the ranks of a stage."""

    def make(seed: int) -> Case:
        job = base_job(LAYOUTS[layout_name], cost_name)
        ranks = _several_ranks(job.layout, np.random.default_rng([seed, 8]))
        faults = tuple(
            Fault(rank=rank, kind=FaultKind.COMPUTE, factor=factor)
            for rank, factor in zip(ranks, (1.1, 1.2, 1.3), strict=False)
        )
        return Case(
            group="several",
            layout_name=layout_name,
            cost_name=cost_name,
            seed=seed,
            job=job,
            faults=faults,
            severity=0.1,
            duration="permanent",
        )

    return make


def _several_ranks(layout: Layout, generator: np.random.Generator) -> list[int]:
    """Three ranks, two in a job of fewer than eight."""
    chosen: list[int] = []
    count = 3 if layout.world_size >= 8 else 2
    most = layout.world_size // layout.pp // 2
    for rank in generator.permutation(layout.world_size).tolist():
        stage = layout.coordinates(rank).pp
        if sum(layout.coordinates(other).pp == stage for other in chosen) < most:
            chosen.append(rank)
    return chosen[:count]
