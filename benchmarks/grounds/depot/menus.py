"""Say which layouts there are, and choose a job's size, machines, windows and habits at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from benchmarks.grounds.depot.costs import Cost, Costs
from benchmarks.grounds.depot.job import Job

Choice = TypeVar("Choice")
MOST_SPANS = 70_000
"""Of one job: a file takes what it takes to read."""
MOST_ITERATIONS = 60
"""That are simulated, traced or not; above, all are traced."""

LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "replicas": (
        {"dp": 2}, {"dp": 4}, {"dp": 8}, {"dp": 8, "ranks_per_host": 4}, {"dp": 16}, {"dp": 32},
        {"dp": 8, "ranks_per_host": 1}, {"dp": 64, "microbatches": 2},
    ),
    "tensor": (
        {"tp": 2}, {"tp": 4}, {"tp": 2, "dp": 2}, {"tp": 2, "dp": 4}, {"tp": 4, "dp": 2},
        {"tp": 4, "dp": 4}, {"tp": 8, "dp": 2}, {"tp": 8, "dp": 4}, {"tp": 2, "dp": 8},
        {"tp": 2, "dp": 4, "sequence_parallel": False},
        {"tp": 4, "dp": 4, "sequence_parallel": False, "distributed_optimizer": False},
        {"tp": 8, "dp": 8, "microbatches": 2},
    ),
    "stages": (
        {"pp": 2}, {"pp": 4}, {"pp": 2, "dp": 2}, {"pp": 2, "dp": 4}, {"pp": 4, "dp": 2},
        {"pp": 4, "dp": 4}, {"pp": 8, "dp": 2}, {"pp": 4, "dp": 2, "ranks_per_host": 2},
        {"pp": 2, "dp": 8}, {"pp": 2, "vpp": 2, "dp": 4}, {"pp": 4, "vpp": 2, "dp": 2},
        {"pp": 2, "vpp": 2}, {"pp": 4, "vpp": 2, "dp": 4},
    ),
    "all": (
        {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "dp": 2}, {"tp": 2, "pp": 4, "dp": 2},
        {"tp": 4, "pp": 2, "dp": 2}, {"tp": 4, "pp": 2, "dp": 4}, {"tp": 2, "pp": 2, "dp": 4},
        {"tp": 4, "pp": 4, "dp": 2}, {"tp": 8, "pp": 2, "dp": 2}, {"tp": 4, "pp": 4, "dp": 4},
        {"tp": 8, "pp": 4, "dp": 4}, {"tp": 2, "pp": 2, "vpp": 2, "dp": 2},
        {"tp": 4, "pp": 2, "vpp": 2, "dp": 2},
    ),
    "experts": (
        {"dp": 8, "ep": 4}, {"dp": 8, "ep": 8}, {"dp": 16, "ep": 8}, {"dp": 16, "ep": 4},
        {"pp": 2, "dp": 8, "ep": 4}, {"pp": 2, "dp": 4, "ep": 2}, {"dp": 32, "ep": 8},
    ),
    "contexts": (
        {"cp": 2, "tp": 2, "dp": 2}, {"cp": 4, "dp": 2}, {"cp": 2, "tp": 4, "dp": 2},
        {"cp": 2, "tp": 2, "pp": 2, "dp": 2}, {"cp": 2, "dp": 4},
    ),
    "shards": (
        {"dp": 8, "gather": "pass"}, {"dp": 16, "gather": "pass"}, {"dp": 32, "gather": "pass"},
        {"dp": 8, "gather": "ahead"}, {"dp": 16, "gather": "ahead"}, {"dp": 4, "gather": "pass"},
        {"dp": 16, "gather": "ahead", "ranks_per_host": 4},
    ),
}  # fmt: skip
WEIGHTS = {
    "replicas": 3, "tensor": 4, "stages": 4, "all": 5, "experts": 2, "contexts": 1.5, "shards": 2,
}  # fmt: skip
HIDDEN = {1: (2048, 3072, 4096), 2: (3072, 4096, 5120), 4: (4096, 5120, 6144), 8: (6144, 8192)}


class Menu:
    """Chooses jobs with one generator of random numbers."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one(self, choices: Sequence[Choice]) -> Choice:
        """Return one of several, all equally likely."""
        return choices[int(self.rng.integers(len(choices)))]

    def between(self, low: float, high: float) -> float:
        """Return a number, rounded to three digits after the point."""
        return round(float(self.rng.uniform(low, high)), 3)

    def chance(self, share: float) -> bool:
        """Return whether something that happens so often happens."""
        return bool(self.rng.random() < share)

    def layout(
        self, kinds: Sequence[str] = tuple(LAYOUTS), *, hosts: int = 1, ranks: int = 2
    ) -> dict[str, Any]:
        """Return a layout of one of these kinds with so many hosts and ranks at least."""
        shares = np.array([WEIGHTS[kind] for kind in kinds])
        while True:
            kind = kinds[int(self.rng.choice(len(kinds), p=shares / shares.sum()))]
            chosen = self.one(LAYOUTS[kind])
            job = Job(**{**chosen, "layers": (1,) * chosen.get("pp", 1) * chosen.get("vpp", 1)})
            if job.num_hosts >= hosts and job.num_ranks >= ranks:
                return dict(chosen)

    def job(
        self, layout: dict[str, Any], *, iterations: tuple[int, int] = (2, 40), **given: Any
    ) -> Job:
        """Return a sound job of a layout, with what is given fixed."""
        settings = self._model(layout) | self._habits(layout) | layout | given
        job = Job(**settings)
        if job.load_s == Job.load_s:
            job = replace(job, load_s=self.between(0.15, 0.5) * microbatch_s(job))
        if "interval" not in given:
            job = self._windows(job, iterations)
        return job

    def _model(self, layout: dict[str, Any]) -> dict[str, Any]:
        tp, pp, vpp = (layout.get(axis, 1) for axis in ("tp", "pp", "vpp"))
        parts = pp * vpp
        layers = [self.one((1, 2) if vpp > 1 else (2, 3, 4) if parts > 1 else (3, 4, 6))] * parts
        hidden = self.one(HIDDEN[tp])
        if parts > 1 and self.chance(0.75):  # the output takes as long as so many layers
            layers[-1] = max(1, layers[-1] - round(32_000 / 12 / hidden))
        small = layout.get("dp", 1) * tp * pp >= 64
        batches = self.one((4, 8)) * (pp // 2 or 1) if pp > 1 else self.one((2, 4, 6))
        if small and pp > 1:
            batches = max(pp, 4)
        return {
            "layers": tuple(layers),
            "hidden": hidden,
            "sequence": self.one((2048, 4096)) if layout.get("cp", 1) == 1 else 8192,
            "vocabulary": 32_000 if parts > 1 else self.one((32_000, 64_000, 128_000)),
            "microbatches": batches,
            "experts": 2 * layout["ep"] if "ep" in layout else 0,
        }

    def _habits(self, layout: dict[str, Any]) -> dict[str, Any]:
        quads = layout.get("tp", 1) <= 4 and "ranks_per_host" not in layout
        machines = ["h100", "h100", "h100", "h800", "a100", "a100", "h20", "shared cards"]
        machines += ["quads"] if quads else []
        machines += ["pcie"] if layout.get("tp", 1) <= 2 and "ep" not in layout else []
        return {
            "machine": self.one(machines),
            "overlap_grads": self.chance(0.65),
            "recompute": self.chance(0.15),
            "granularity": "full" if self.chance(0.72) else "base",
            "has_counters": self.chance(0.6),
            "gzip": self.chance(0.15),
            "first_iteration": 1 if self.chance(0.4) else 1 + 100 * int(self.rng.integers(2, 400)),
            "warm_up": self.between(1.5, 4.0),
            "chip_spread_ratio": self.one((0.003, 0.006, 0.01, 0.015)),
            "kernel_noise_ratio": self.one((0.003, 0.005, 0.008, 0.012)),
            "host_noise_ratio": self.between(0.06, 0.2),
            "clock_error_s": self.one((1e-5, 1e-4, 5e-4, 2e-3)),
            "stalls_per_s": self.one((0.02, 0.1, 0.4)),
        }

    def _windows(self, job: Job, iterations: tuple[int, int]) -> Job:
        """Give a job as many windows as its files may have spans for, and shorter ones if need be.

        Where even few iterations are too many at granularity full, it is base.
        """
        if job.first_iteration != 1:
            job = replace(job, warm_up=1.0)
        low, high = iterations
        affordable = int(MOST_SPANS / spans_of_iteration(job))
        if affordable < max(4, low) and job.granularity == "full":
            return self._windows(replace(job, granularity="base"), iterations)
        wanted = int(self.rng.integers(low, high + 1)) if self.chance(0.7) else max(low, 10)
        wanted = max(low, min(wanted, affordable))
        interval, window = self.one(((5, 2), (5, 5), (1, 1), (10, 5), (4, 2), (20, 10), (10, 2)))
        if wanted <= 3:
            interval, window = 10, wanted
        windows = max(1, round(wanted / window))
        if windows * interval > MOST_ITERATIONS:
            interval = window
        return replace(job, interval=interval, window=window, num_windows=windows)


def spans_of_iteration(job: Job) -> float:
    """Return about how many spans all ranks together have in an iteration."""
    passes = job.microbatches * job.vpp
    each = 4.0 + (4 if job.pp > 1 else 0)
    if job.gather == "pass":
        each += 3 * sum(job.layers) / job.pp / job.vpp
    if job.granularity == "full":
        layer = 6.0 + (12 if job.tp > 1 else 0) + (8 if job.cp > 1 else 0)
        layer += 14 if job.experts else 0
        layer *= 1.4 if job.recompute else 1.0
        each += layer * sum(job.layers) / (job.pp * job.vpp) + (9 if job.tp > 1 else 3)
    return job.num_ranks * (passes * each + 10)


def microbatch_s(job: Job) -> float:
    """Return about how long one microbatch takes on one stage, both passes."""
    costs = Costs(job)

    def seconds(cost: Cost) -> float:
        return cost.linear_s + cost.square_s + cost.memory_s

    layer = sum(
        seconds(part(forward)) for part in (costs.attention, costs.mlp) for forward in (True, False)
    )
    ends = (seconds(costs.output(True)) + seconds(costs.output(False))) / job.pp
    return layer * sum(job.layers) / job.pp + ends
