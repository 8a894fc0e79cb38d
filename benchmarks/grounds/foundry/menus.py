"""Which jobs are common: layouts, models cut to a few layers, machines, when they are traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from benchmarks.grounds.foundry.hardware import A100, H100, H200, Machines
from benchmarks.grounds.foundry.jobs import Job

MOST_OPERATIONS = 110_000  # of a job, all ranks and iterations
Luck = np.random.Generator
Sizes = dict[str, Any]
Menu = tuple[Sizes, ...]
Value = TypeVar("Value")

ANY: Menu = (
    {"dp": 2}, {"dp": 4}, {"dp": 8}, {"dp": 16}, {"dp": 8, "recompute": "full"}, {"dp": 32},
    {"tp": 2, "dp": 4}, {"tp": 4, "dp": 4}, {"tp": 8, "dp": 2}, {"tp": 4, "dp": 2, "pp": 2},
    {"pp": 2, "dp": 4}, {"pp": 4, "dp": 2}, {"pp": 4, "dp": 4}, {"pp": 8, "dp": 2},
    {"pp": 4, "vpp": 2, "dp": 2}, {"pp": 2, "vpp": 2, "dp": 4, "tp": 2},
    {"tp": 2, "pp": 4, "dp": 2}, {"tp": 2, "pp": 2, "dp": 4}, {"tp": 4, "pp": 2, "dp": 4},
    {"tp": 2, "cp": 2, "dp": 2, "sequence": 16384}, {"cp": 2, "dp": 4, "pp": 2, "sequence": 8192},
    {"dp": 8, "ep": 4, "experts": 16}, {"dp": 16, "ep": 8, "experts": 32},
    {"dp": 4, "pp": 2, "ep": 4, "experts": 16},
    {"tp": 4, "pp": 4, "dp": 2, "recompute": "selective"}, {"tp": 8, "pp": 2, "dp": 4},
)  # fmt: skip
REPLICAS = tuple(each for each in ANY if each["dp"] >= 4 and "experts" not in each)
STAGES = tuple(each for each in ANY if "pp" in each and "vpp" not in each)
EXPERTS = tuple(each for each in ANY if "experts" in each)
LARGE: Menu = ({"tp": 8, "pp": 2, "dp": 4}, {"tp": 4, "pp": 4, "dp": 4})
LINKED: Menu = (
    {"tp": 2, "dp": 4}, {"tp": 4, "dp": 2},
    {"tp": 2, "dp": 4, "pp": 2}, {"tp": 4, "dp": 2, "pp": 2},
)  # fmt: skip
"""Within a host every rank is in two groups, so that a slow link can be told from its mates'."""
CARDED: Menu = (
    {"tp": 4, "pp": 2, "dp": 2, "ranks_per_host": 4},
    {"tp": 2, "pp": 2, "dp": 4, "ranks_per_host": 4},
    {"tp": 4, "pp": 2, "dp": 4, "ranks_per_host": 4},
    {"tp": 2, "pp": 4, "dp": 2, "ranks_per_host": 2},
)
"""Replicas and stages both go over network cards, to different hosts."""
RINGS: Menu = ({"dp": 16, "ranks_per_host": 4}, {"dp": 8, "ranks_per_host": 4})


def one_of(luck: Luck, values: Sequence[Value]) -> Value:
    """Return one of some values."""
    return values[int(luck.integers(len(values)))]


def job_of(luck: Luck, menu: Menu = ANY, **changes: Any) -> Job:
    """Return a job of one of the layouts, all else drawn; `changes` are fields of `Job` or of
    `Machines`, which win over what is drawn.
    """
    sizes = one_of(luck, menu)
    drawn = {**_machines_of(luck), **_habits_of(luck), **_model_of(luck, sizes), **sizes, **changes}
    of_machines = {name: drawn.pop(name) for name in Machines.__dataclass_fields__ if name in drawn}
    job = Job(**drawn)
    per_host = min(job.num_ranks, of_machines["ranks_per_host"])
    cards = of_machines.pop("num_nics", max(1, per_host // one_of(luck, (1, 1, 1, 2))))
    of_machines |= {"ranks_per_host": per_host, "num_nics": min(cards, per_host)}
    job = replace(job, machines=Machines(**of_machines))
    return job if "num_iterations" in changes else replace(job, **_windows_of(luck, job))


def _machines_of(luck: Luck) -> Sizes:
    return {
        "gpu": one_of(luck, (A100, H100, H100, H200)),
        "ranks_per_host": one_of(luck, (8, 8, 4)),
        "chip_spread_ratio": float(np.exp(luck.uniform(np.log(0.003), np.log(0.02)))),
        "wander_ratio": float(luck.uniform(0.001, 0.004)),
        "kernel_noise_ratio": float(luck.uniform(0.002, 0.008)),
        "launch_us": float(luck.uniform(4.5, 8.0)),
        "clock_error_s": float(luck.uniform(0.0, 0.05)),
        "clock_step_s": float(luck.uniform(0.001, 0.02)) if luck.random() < 0.2 else 0.0,
        "readings": bool(luck.random() < 0.5),
        "daemons_per_s": float(luck.uniform(0.0, 0.4)),
        "congestion_share": float(luck.uniform(0.05, 0.2)) if luck.random() < 0.15 else 0.0,
    }


def _habits_of(luck: Luck) -> Sizes:
    return {
        "granularity": "full" if luck.random() < 0.72 else "base",
        "collections": one_of(luck, ("off", "usual", "usual")),
        "overlap_grads": bool(luck.random() < 0.7),
        "distributed_optimizer": bool(luck.random() < 0.75),
        "prefetch": one_of(luck, (2, 4, 8)),
        "load_ratio": float(luck.uniform(0.05, 0.35)),
    }


def _model_of(luck: Luck, sizes: Sizes) -> Sizes:
    """Return a model that fits a layout: layers are dealt evenly, but for those that its planner
    (not all have one) took off the last stage, which has the output layer as well.
    """
    pp, vpp, tensor = sizes.get("pp", 1), sizes.get("vpp", 1), sizes.get("tp", 1)
    each = (4 if pp * tensor * sizes["dp"] <= 16 else 3) if pp == 1 else 3 if vpp == 1 else 1
    model: Sizes = {
        "layers": (each,) * pp * vpp,
        "hidden": one_of(luck, (6144, 8192) if tensor >= 4 else (4096, 6144)),
        "vocabulary": one_of(luck, (32_000, 50_000, 128_000)),
        "num_microbatches": pp * one_of(luck, (2, 2, 3)) if pp > 1 else one_of(luck, (4, 6, 8)),
    }
    if pp > 1 and vpp == 1 and luck.random() < 0.6:
        # products of the vocabulary against those of a layer's 13 squares
        num_less = round(model["vocabulary"] / (13 * model["hidden"]))
        model["layers"] = (each,) * (pp - 1) + (each - min(each - 1, num_less),)
    return model


def _windows_of(luck: Luck, job: Job) -> Sizes:
    """Return when a job is traced: all the time, 2 of 5, 3 of 10, or two iterations in all."""
    most = MOST_OPERATIONS // job.num_operations
    begin = {"first_iteration": one_of(luck, (1, 1, 101))}  # some are switched on in a running job
    which = luck.random()
    if which < 0.12:
        return {"first_iteration": 998, "num_iterations": 5, "interval": 1000, "window": 2}
    if which < 0.5:
        num = int(np.clip(luck.integers(8, 41), 8, max(8, most)))
        return {**begin, "num_iterations": num, "interval": 5, "window": 5}
    if which < 0.8:
        num = 5 * int(np.clip(luck.integers(2, 9), 2, max(2, most // 5))) + 2
        return {**begin, "num_iterations": num, "interval": 5, "window": 2}
    return {**begin, "num_iterations": 10 * (1 + (most >= 23)) + 3, "interval": 10, "window": 3}
