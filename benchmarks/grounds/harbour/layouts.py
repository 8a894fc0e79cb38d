"""Draw jobs: the layouts of this ground, and what differs from one job to the next.

Nothing here is a fault. Small jobs are traced at length and in full, large ones for a few
iterations and mostly at base granularity, as their owners would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from benchmarks.grounds.harbour.hardware import Site
from benchmarks.grounds.harbour.jobs import Job

Choice = TypeVar("Choice")
_SITE_FIELDS = frozenset(one.name for one in fields(Site))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """State a layout, and on how many hosts it lies."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    per_host: int = 8
    experts: int = 0


SHAPES = {
    "dp4": Shape(dp=4, per_host=4),
    "tp2dp2": Shape(tp=2, dp=2, per_host=4),
    "pp4": Shape(pp=4, per_host=4),
    "pp2dp2": Shape(pp=2, dp=2, per_host=2),
    "dp8": Shape(dp=8),
    "tp2dp4": Shape(tp=2, dp=4),
    "tp4dp2": Shape(tp=4, dp=2, per_host=4),
    "tp2pp2dp2": Shape(tp=2, pp=2, dp=2, per_host=4),
    "tp2pp2dp2v2": Shape(tp=2, pp=2, dp=2, vpp=2),
    "pp4dp2": Shape(pp=4, dp=2, per_host=4),
    "pp8": Shape(pp=8),
    "tp2cp2dp2": Shape(tp=2, cp=2, dp=2),
    "ep4dp8": Shape(ep=4, dp=8, experts=8),
    "dp16": Shape(dp=16),
    "tp4pp2dp2": Shape(tp=4, pp=2, dp=2, per_host=4),
    "tp2pp2dp4": Shape(tp=2, pp=2, dp=4, per_host=4),
    "tp2cp2dp4": Shape(tp=2, cp=2, dp=4),
    "pp4dp4v2": Shape(pp=4, dp=4, vpp=2, per_host=4),
    "ep8dp8pp2": Shape(ep=8, dp=8, pp=2, experts=16),
    "tp4pp4dp2": Shape(tp=4, pp=4, dp=2),
    "tp4pp2dp4": Shape(tp=4, pp=2, dp=4),
    "ep8dp16pp2": Shape(ep=8, dp=16, pp=2, experts=16),
    "pp8dp4": Shape(pp=8, dp=4),
    "tp8pp4dp2": Shape(tp=8, pp=4, dp=2),
    "tp4pp4dp4": Shape(tp=4, pp=4, dp=4),
    "tp8dp8": Shape(tp=8, dp=8),
}
SMALL = ("dp4", "tp2dp2", "pp4", "pp2dp2")
MEDIUM = ("dp8", "tp2dp4", "tp4dp2", "tp2pp2dp2", "tp2pp2dp2v2", "pp4dp2", "tp2cp2dp2", "ep4dp8")
LARGE = ("dp16", "tp4pp2dp2", "tp2pp2dp4", "tp2cp2dp4", "pp4dp4v2", "ep8dp8pp2")
HUGE = ("tp4pp4dp2", "tp4pp2dp4", "ep8dp16pp2", "pp8dp4", "tp8pp4dp2", "tp4pp4dp4", "tp8dp8")
REPLICATED = ("dp4", "dp8", "tp2dp4", "tp2pp2dp4", "tp2cp2dp4", "dp16", "tp4pp2dp4", "pp8dp4")
EXPERT = ("ep4dp8", "ep8dp8pp2", "ep8dp16pp2")
STAGED = ("pp4", "pp4dp2", "tp2pp2dp2", "tp4pp2dp2", "pp4dp4v2", "tp4pp4dp2")
EVERYWHERE = (
    "dp8", "tp2pp2dp2", "tp2pp2dp4", "pp4dp2", "tp2cp2dp4", "dp4", "tp4pp4dp2", "ep4dp8",
    "tp2pp2dp2v2", "dp16", "tp2dp2", "tp4pp2dp2", "ep8dp8pp2", "tp4pp4dp4", "pp4dp4v2", "tp2dp4",
)  # fmt: skip
HOST_BOUND: dict[str, object] = {"hidden": 1024, "sequence": 1024, "launch_us": 11.0}
"""What makes a model so small that the launching threads decide how fast it trains."""


def drawn_job(
    name: str, random: np.random.Generator, changes: Mapping[str, object] | None = None
) -> Job:
    """Return a job of a layout; `changes` are fields of Job or Site that are not to be drawn."""
    shape = SHAPES[name]
    num_ranks = shape.tp * shape.cp * shape.dp * shape.pp
    site = Site(
        chip=_one_of(random, ("h100", "h100", "a100")),
        ranks_per_host=shape.per_host,
        num_nics=shape.per_host // _one_of(random, (1, 1, 2)),
        nic_bytes_s=float(random.uniform(0.7, 1.1)) * 45e9,
        chip_spread_ratio=float(np.exp(random.uniform(np.log(0.005), np.log(0.03)))),
        wander_ratio=float(random.uniform(0.001, 0.006)),
        host_wander_ratio=float(random.uniform(0.001, 0.005)),
        wander_s=float(random.uniform(40, 240)),
        kernel_noise_ratio=float(random.uniform(0.005, 0.02)),
        hiccup_ms=_one_of(random, (0.0, 0.0, 0.3, 1.0)),
        clock_offset_ms=float(np.exp(random.uniform(np.log(0.5), np.log(30)))),
        clock_drift_ppm=float(random.uniform(2, 30)),
    )
    dense = not shape.experts
    job = Job(
        site=site,
        tp=shape.tp, cp=shape.cp, ep=shape.ep, dp=shape.dp, pp=shape.pp, vpp=shape.vpp,
        experts=shape.experts,
        layers=_layers(shape, num_ranks, random),
        vocabulary=32_000 if num_ranks <= 16 and shape.vpp == 1 else 16_000,
        hidden=_one_of(random, _widths(shape)),
        sequence=_one_of(random, (2048, 4096, 4096) if shape.tp == 1 else (4096,)) * shape.cp,
        num_microbatches=_microbatches(shape, random),
        sequence_parallel=bool(random.random() < 0.7) and shape.tp > 1,
        recompute=_one_of(random, ("", "", "selective", "full") if dense else ("", "", "full")),
        overlap_grads=bool(random.random() < 0.65),
        distributed_optimizer=bool(random.random() < 0.7),
        reads_devices=bool(random.random() < 0.3),
        load_spread_ratio=float(random.uniform(0.03, 0.12)),
    )  # fmt: skip
    job = changed(job, _tracing(num_ranks, random))
    if job.distributed_optimizer and job.overlap_grads and random.random() < 0.5:
        job = replace(job, overlap_params=True)
    return changed(job, changes or {})


def changed(job: Job, changes: Mapping[str, object]) -> Job:
    """Return a job with other values of fields of its own or of its site."""
    of_site = {name: value for name, value in changes.items() if name in _SITE_FIELDS}
    of_job = {name: value for name, value in changes.items() if name not in _SITE_FIELDS}
    site = replace(job.site, **of_site)  # type: ignore[arg-type]
    return replace(job, site=site, **of_job)  # type: ignore[arg-type]


def _one_of(random: np.random.Generator, values: tuple[Choice, ...]) -> Choice:
    return values[int(random.integers(len(values)))]


def _widths(shape: Shape) -> tuple[int, ...]:
    """Return the widths of models that one would lay out so: narrow ones are not split."""
    if shape.experts:
        return (2048, 3072)
    return {1: (3072, 4096), 2: (4096, 5120), 4: (5120, 6144), 8: (6144, 8192)}[shape.tp]


def _layers(shape: Shape, num_ranks: int, random: np.random.Generator) -> tuple[int, ...]:
    """Return the layers of each chunk; the last of a pipeline often has one less, as it has the
    output layer.
    """
    if num_ranks > 16 or shape.vpp > 1:
        return (1,) * (shape.pp * shape.vpp)
    fewer = shape.pp > 1 and random.random() < 0.7
    return (2,) * (shape.pp - 1) + (1 if fewer else 2,)


def _microbatches(shape: Shape, random: np.random.Generator) -> int:
    """Return microbatches of an iteration: whole rounds where stages are interleaved."""
    if shape.pp == 1:
        return int(random.integers(3, 6))
    return shape.pp * 2 if shape.vpp > 1 or shape.pp == 2 else shape.pp + int(random.integers(1, 4))


def _tracing(num_ranks: int, random: np.random.Generator) -> dict[str, int | str]:
    """Return what is traced of a job of so many ranks."""
    full = random.random() < (0.85 if num_ranks <= 8 else 0.55 if num_ranks <= 16 else 0.25)
    most = 24 if num_ranks <= 8 else 16 if num_ranks <= 16 else 12 if not full else 6
    count = int(random.integers(max(4, most // 2), most + 1))
    sparse = {"interval": 5, "window": 2} if random.random() < 0.25 else {}
    return {
        "granularity": "full" if full else "base",
        "num_iterations": count + count % 2 if sparse else count,
        "first_iteration": _one_of(random, (21, 51, 101, 301)),
        **sparse,
    }
