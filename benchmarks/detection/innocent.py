"""Jobs in which no node is at fault: healthy ones, and those that look as if."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.detection.jobs import ALL_LAYOUTS, Case, Maker, base_job
from megascan.simulate import Imbalance, Noise


def null_makers(layout_name: str, cost_name: str) -> Iterator[Maker]:
    """All innocent jobs of one layout and cost model."""
    last = ALL_LAYOUTS[layout_name].pp - 1
    yield _null(layout_name, cost_name, "healthy")
    yield _null(layout_name, cost_name, "noisy", noise=Noise(compute_ratio=0.05))
    yield _null(layout_name, cost_name, "unequal_chips", noise=Noise(device_ratio=0.006))
    yield _null(layout_name, cost_name, "short", noise=Noise(device_ratio=0.003), iterations=6)
    missing = (ALL_LAYOUTS[layout_name].world_size - 1,)
    yield _null(layout_name, cost_name, "missing_rank", missing_ranks=missing)
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
