"""List the cases: what is planted into which jobs, and what only looks like a fault.

Each family draws a job that its cause can hold up, then the cause; the seed decides both.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from benchmarks.grounds.ground import Case
from benchmarks.grounds.pod.faults import Fault
from benchmarks.grounds.pod.job import Job
from benchmarks.grounds.pod.lookalikes import LOOK_ALIKES
from benchmarks.grounds.pod.troubles import TROUBLES

GROUND = "pod"
Plan = tuple[Job, tuple[Fault, ...]]
_SEEDS_OF_A_DRAW = 1000


@lru_cache(maxsize=4)
def plans(draw: int) -> dict[str, tuple[Case, Plan]]:
    """Return the cases of a draw by name, with job and faults."""
    found: dict[str, tuple[Case, Plan]] = {}
    seed = 500_000_000 + _SEEDS_OF_A_DRAW * draw
    for family, count, make in (*TROUBLES, *LOOK_ALIKES):
        for number in range(count):
            seed += 1
            job, faults = make(np.random.default_rng([seed, 7]), seed)
            slug = family.replace(": ", "-").replace(" ", "_")
            name = f"{slug}-{number}-r{job.num_ranks}-s{seed}"
            case = Case(
                ground=GROUND,
                name=name,
                family=family,
                num_ranks=job.num_ranks,
                seed=seed,
                draw=draw,
                planted=tuple(fault.planted() for fault in faults),
            )
            found[name] = case, (job, faults)
    return found
