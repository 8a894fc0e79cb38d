"""What is simulated: every class of fault at every severity, and jobs in which no node is at fault.

A severity is a share of a rank's computation (0.05: the rank needs 5 % longer for a microbatch);
for links it is the factor on transfer times less 1 (1.0: half the bandwidth). Ranks, pairs and
onsets are drawn from the seed, so that no place in the layout is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from megascan.simulate import (
    Clocks,
    CostModel,
    Fault,
    FaultKind,
    Imbalance,
    JobModel,
    ModelSize,
    Noise,
    communication_heavy,
    compute_bound,
)
from megascan.topology import Coordinates, Layout

SEVERITIES = (0.03, 0.05, 0.08, 0.10, 0.20, 0.50)
LINK_SEVERITIES = (0.5, 1.0, 3.0, 7.0)
NUM_LAYERS = 8
NUM_ITERATIONS = 20
SMALL_VOCABULARY = 8_192
"""Keeps the output layer, and with it the last stage of a healthy job, light."""
TRANSIENT = 5
"""Iterations of a transient fault."""

LAYOUTS = {
    "tp2-pp2-dp2": Layout(tp=2, pp=2, dp=2),
    "dp4": Layout(dp=4),
    "tp2-dp2": Layout(tp=2, dp=2),
    "pp2-dp4": Layout(pp=2, dp=4),
    "pp2-vpp2-dp4": Layout(pp=2, vpp=2, dp=4),
    "tp4-pp2-dp4": Layout(tp=4, pp=2, dp=4),
    "tp2-pp4-dp8": Layout(tp=2, pp=4, dp=8),
}
SMALL_LAYOUTS = {"dp2": Layout(dp=2), "pp2-dp2": Layout(pp=2, dp=2), "pp4": Layout(pp=4)}
"""Too few peers for certainty: at most two ranks do the same work."""
ALL_LAYOUTS = LAYOUTS | SMALL_LAYOUTS
FEW_PEERS = "few_peers"
COST_MODELS: dict[str, Callable[[Layout, ModelSize], CostModel]] = {
    "compute-bound": compute_bound,
    "communication-heavy": communication_heavy,
    "cpu": compute_bound,
}
DURATIONS = ("permanent", "transient", "flapping")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job to judge. `group` is the class of its fault, or the look-alike that it is.

    `job_cause` is what the detector ought to say of the job itself, "" for nothing.
    """

    group: str
    layout_name: str
    cost_name: str
    seed: int
    job: JobModel
    faults: tuple[Fault, ...] = ()
    severity: float = 0.0
    duration: str = ""
    job_cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is simulated: number of repetitions of each cell, and which cells."""

    repetitions: int
    null_repetitions: int
    cells: tuple[tuple[str, str], ...]
    """(layout, cost model)."""


QUICK = Plan(
    repetitions=1,
    null_repetitions=2,
    cells=(
        ("tp2-pp2-dp2", "compute-bound"),
        ("dp4", "compute-bound"),
        ("pp2-vpp2-dp4", "communication-heavy"),
    ),
)
FULL = Plan(
    repetitions=1,
    null_repetitions=2,
    cells=(
        *(
            (layout, cost)
            for layout in LAYOUTS
            for cost in ("compute-bound", "communication-heavy")
        ),
        ("tp2-pp2-dp2", "cpu"),
        ("pp2-dp4", "cpu"),
    ),
)


def base_job(layout: Layout, cost_name: str, **changes: object) -> JobModel:
    """A healthy job: 20 traced iterations, 2 % noise, hosts of eight ranks with clocks apart."""
    model = ModelSize(num_layers=NUM_LAYERS, vocab_size=SMALL_VOCABULARY)
    job = JobModel(
        layout=layout,
        costs=COST_MODELS[cost_name](layout, model),
        iterations=NUM_ITERATIONS,
        num_microbatches=8,
        num_layers=NUM_LAYERS,
        noise=Noise(device_ratio=0.003),
        clocks=Clocks(offset_ms=50.0, drift_ppm=20.0),
        ranks_per_host=4,
        device="cpu" if cost_name == "cpu" else "cuda",
    )
    return replace(job, **changes)  # type: ignore[arg-type]


def cases(plan: Plan) -> list[Case]:
    """All cases of a plan; the seed numbers them."""
    numbered = []
    for seed, make in enumerate(_makers(plan)):
        numbered.append(make(seed))
    return numbered


Maker = Callable[[int], Case]


def _makers(plan: Plan) -> Iterator[Maker]:
    for layout_name in SMALL_LAYOUTS:
        for severity in (0.1, 0.5) * plan.repetitions:
            yield _fault_maker(
                FaultKind.COMPUTE,
                layout_name,
                "compute-bound",
                severity,
                "permanent",
                group=FEW_PEERS,
            )
        yield from _null_makers(layout_name, "compute-bound")
    for layout_name, cost_name in plan.cells:
        for _ in range(plan.repetitions):
            yield from _fault_makers(layout_name, cost_name)
        for _ in range(plan.null_repetitions):
            yield from _null_makers(layout_name, cost_name)


def _fault_makers(layout_name: str, cost_name: str) -> Iterator[Maker]:
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


def _null_makers(layout_name: str, cost_name: str) -> Iterator[Maker]:
    last = ALL_LAYOUTS[layout_name].pp - 1
    yield _null(layout_name, cost_name, "healthy")
    yield _null(layout_name, cost_name, "noisy", noise=Noise(compute_ratio=0.05))
    yield _null(
        layout_name,
        cost_name,
        "spikes",
        noise=Noise(spike_probability=0.002, spike_ns=3e6, device_ratio=0.003),
    )
    for ratio in (0.1, 0.3, 0.5):
        skewed = Imbalance(sequence_ratio=ratio)
        cause = "sequence_imbalance" if ratio > 0.1 else ""
        yield _null(layout_name, cost_name, "sequence_skew", cause, imbalance=skewed)
    if last:
        for stage, ratio in ((last, 1.4), (last, 2.0), (0, 1.3)):
            heavy = Imbalance(stage_ratio={stage: ratio})
            yield _null(layout_name, cost_name, "heavy_stage", "stage_imbalance", imbalance=heavy)
    yield _null(layout_name, cost_name, "collector", imbalance=Imbalance(gc_interval=4))
    yield _null(layout_name, cost_name, "first_iterations", imbalance=Imbalance(warmup_ratio=2.0))
    yield _null(layout_name, cost_name, "checkpoints", imbalance=Imbalance(checkpoint_interval=5))
    yield _null(layout_name, cost_name, "host_bound", dispatch_ratio=1.3)


def _null(
    layout_name: str, cost_name: str, group: str, job_cause: str = "", **changes: object
) -> Maker:
    def make(seed: int) -> Case:
        dispatch = changes.get("dispatch_ratio")
        others = {name: value for name, value in changes.items() if name != "dispatch_ratio"}
        job = base_job(ALL_LAYOUTS[layout_name], cost_name, **others)
        if isinstance(dispatch, float):
            job = replace(job, costs=replace(job.costs, dispatch_ratio=dispatch))
        return Case(
            group=group,
            layout_name=layout_name,
            cost_name=cost_name,
            seed=seed,
            job=job,
            job_cause=job_cause,
        )

    return make
