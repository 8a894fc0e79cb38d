"""List the cases of a draw, and draw the job, the surroundings and the faults of each of them.

A case's name is its family and a number; all of it is drawn from the draw and this name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from benchmarks.grounds.ground import Case
from benchmarks.grounds.quarry.choices import DRAWN, FELT, FITS, is_long
from benchmarks.grounds.quarry.conditions import Surroundings
from benchmarks.grounds.quarry.estimates import is_sensible
from benchmarks.grounds.quarry.faults import OF_JOB, Fault
from benchmarks.grounds.quarry.files import host_name
from benchmarks.grounds.quarry.jobs import Job, drawn_job
from benchmarks.grounds.quarry.machines import Rng, happens, log_uniform

COUNTS = {
    "healthy": 56,
    "hot_expert": 7, "heavy_stage": 7, "long_sequences": 8, "noisy_rank": 7, "busy_machines": 7,
    "congestion": 6, "data_shift": 6, "stalls": 7,
    "gpu_clock": 11, "late_clock": 8, "throttling": 9, "thermal_ramp": 6, "hbm": 7, "row_remap": 6,
    "contention": 7, "fan": 6, "nvlink": 7, "nic": 8, "rail": 7, "nic_flap": 6, "switch_port": 5,
    "host_cpu": 7, "host_thread": 6, "host_memory": 6, "storage": 6, "loader": 6, "gc": 5,
    "two_faults": 8,
}  # fmt: skip
"""How many cases of each family a draw has."""
LOOK_ALIKES = (*OF_JOB, "noisy_rank", "busy_machines", "congestion", "data_shift", "stalls")
_PAIRS = (
    ("gpu_clock", "nic"), ("gpu_clock", "loader"), ("throttling", "host_thread"),
    ("gpu_clock", "gpu_clock"), ("hbm", "nvlink"), ("contention", "rail"), ("gpu_clock", "hbm"),
    ("gpu_clock", "long_sequences"), ("late_clock", "heavy_stage"), ("fan", "storage"),
)  # fmt: skip


FELT_SHARE = 0.75
"""In how many of the cases a fault hits something that the job often waits for."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """State all that decides a case beside the generators' noise."""

    job: Job
    around: Surroundings
    faults: tuple[Fault, ...]
    seed: int


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw, without simulating any."""
    for kind, count in COUNTS.items():
        for number in range(1, count + 1):
            yield _case(kind, f"{kind}-{number}", draw)


def _case(kind: str, name: str, draw: int) -> Case:
    scenario = _drawn(kind, name, draw)
    family = kind.replace("_", " ") if kind in LOOK_ALIKES else kind
    machines = scenario.job.machines
    return Case(
        ground="quarry",
        name=name,
        family=f"look_alike: {family}" if kind in LOOK_ALIKES else family,
        num_ranks=scenario.job.num_ranks,
        seed=scenario.seed,
        draw=draw,
        planted=tuple(
            fault.planted(host_name(scenario.seed, machines.host_of(fault.ranks[0])))
            for fault in scenario.faults
        ),
    )


def scenario_of(case: Case) -> Scenario:
    """Return what a case is made of."""
    return _drawn(case.name.rpartition("-")[0], case.name, case.draw)


def _drawn(kind: str, name: str, draw: int) -> Scenario:
    seed = crc32(f"quarry/{draw}/{name}".encode())
    rng = np.random.default_rng(np.random.SeedSequence([draw, crc32(name.encode())]))
    kinds = _kinds(kind, name)
    tests = [FITS.get(each, _any) for each in (kind, *kinds)]
    if happens(rng, FELT_SHARE):
        tests += [FELT.get(each, _any) for each in kinds]
    job = drawn_job(rng, lambda one: all(test(one) for test in (*tests, is_sensible)))
    around = _surroundings(rng, job)
    faults = tuple(DRAWN[each](rng, job) for each in kinds)
    if kind == "two_faults" and set(faults[0].ranks) == set(faults[-1].ranks):
        faults = faults[:1]
    if kind in LOOK_ALIKES and kind not in OF_JOB:
        job, around = _alike(kind, rng, job, around)
    return Scenario(job=job, around=around, faults=faults, seed=seed)


def _any(job: Job) -> bool:
    return True


def _kinds(kind: str, name: str) -> tuple[str, ...]:
    """Return the kinds of the faults of a case."""
    if kind == "two_faults":
        return _PAIRS[(int(name.rpartition("-")[2]) - 1) % len(_PAIRS)]
    return (kind,) if kind in DRAWN else ()


def _surroundings(rng: Rng, job: Job) -> Surroundings:
    """Draw what surrounds any job: little of most, often none."""
    afar = job.num_hosts > 1 and happens(rng, 0.25)
    return Surroundings(
        congestion_factor=1 + log_uniform(rng, 0.1, 1.0),
        congestion_share=rng.uniform(0.05, 0.3) if afar else 0.0,
        hiccups=1 if job.num_iterations > 7 and happens(rng, 0.15) else 0,
        stalls=int(rng.integers(1, 3)) if happens(rng, 0.2) else 0,
        stall_s=log_uniform(rng, 0.003, 0.08),
        busy_factor=log_uniform(rng, 0.95, 1.25),
        warms_up_ratio=log_uniform(rng, 0.001, 0.03),
        pauses_s=log_uniform(rng, 0.3, 6.0),
        collection_s=log_uniform(rng, 0.01, 0.1),
        collections_per_iteration=log_uniform(rng, 0.005, 0.06),
    )


def _alike(kind: str, rng: Rng, job: Job, around: Surroundings) -> tuple[Job, Surroundings]:
    """Return a job and what surrounds it with something that looks like a fault of a node."""
    if kind == "noisy_rank":
        ranks = tuple(int(r) for r in rng.permutation(job.num_ranks)[: max(1, job.num_ranks // 16)])
        return job, replace(around, noisy_ranks=ranks, noise_factor=log_uniform(rng, 2, 6))
    if kind == "busy_machines":
        machines = replace(
            job.machines,
            host_noise_ratio=min(0.6, 2 * job.machines.host_noise_ratio),
            kernel_noise_ratio=min(0.05, 2 * job.machines.kernel_noise_ratio),
        )
        return replace(job, machines=machines), replace(around, busy_factor=rng.uniform(1.3, 2.5))
    if kind == "congestion":
        share, factor = rng.uniform(0.2, 0.7), rng.uniform(1.5, 4.0)
        return job, replace(around, congestion_share=share, congestion_factor=factor)
    if kind == "data_shift":
        begin = job.iterations[int(rng.uniform(0.3, 0.7) * len(job.iterations))]
        factor = rng.uniform(1.15, 1.6 if job.lengths == "ragged" else 3.0)
        return job, replace(around, shift_iteration=begin, shift_factor=factor)
    return job, replace(around, stalls=int(rng.integers(3, 9)), stall_s=log_uniform(rng, 0.01, 0.1))


FITS |= {
    "congestion": lambda job: job.num_hosts > 1,
    "data_shift": lambda job: job.lengths != "fixed" and is_long(job),
}
