"""What a case is, and the healthy job that all of them begin with.

A severity is a share of a rank's computation (0.05: the rank needs 5 % longer for a microbatch);
for links it is the factor on transfer times less 1 (1.0: half the bandwidth).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megascan.simulate import (
    Clocks,
    CostModel,
    Fault,
    JobModel,
    ModelSize,
    Noise,
    communication_heavy,
    compute_bound,
)
from megascan.topology import Layout

NUM_LAYERS = 8
NUM_ITERATIONS = 20
SMALL_VOCABULARY = 8_192
"""Keeps the output layer, and with it the last stage of a healthy job, light."""

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


Maker = Callable[[int], Case]
"""Makes the case of a seed."""


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


def sampled(case: Case, layer_stride: int) -> Case:
    """The same case, traced with the modules of some layers only."""
    return replace(case, job=replace(case.job, layer_stride=layer_stride))
