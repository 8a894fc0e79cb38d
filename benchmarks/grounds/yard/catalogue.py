"""List the cases: sound jobs and those that look like troubled ones, and faults of graded size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.yard.files import write_files
from benchmarks.grounds.yard.hardware import Site
from benchmarks.grounds.yard.jobs import Job
from benchmarks.grounds.yard.planting import (
    Change,
    changed,
    elsewhere,
    fault,
    heavy_stage,
    hot_expert,
    in_a_row,
    long_replica,
    run_somehow,
    slow_storage,
    two,
)
from benchmarks.grounds.yard.scenario import Scenario, pass_slowness, priced, simulate

_Line: TypeAlias = tuple[str, str, Change]
"""A family, the jobs it is tried on, and what is done to each of them."""

_NAME = "yard"

_H100, _H200 = Site(), Site(chip="h200", clocks="ptp", prefix="hgx-h200")
_A100 = Site(chip="a100", num_nics=4, nic_bytes_per_s=23e9, launch_s=5.5e-6, prefix="a100-pod2")
_H800 = Site(chip="h800", clocks="wandering", prefix="ml-bj")
_QUADS = Site(ranks_per_host=4, num_nics=4, prefix="quad", clocks="ptp")
_PAIRS = Site(ranks_per_host=8, num_nics=2, nic_bytes_per_s=46e9, prefix="cloud-vm")

_JOBS = {
    "dp4": Job(site=_QUADS, dp=4, hidden=6144, micro_batch=4),
    "tp2dp2": Job(site=_QUADS, tp=2, dp=2, hidden=5120, micro_batch=2, layers=(5,)),
    "pp4": Job(site=_QUADS, pp=4, layers=(3,) * 4, num_microbatches=8, hidden=5120),
    "dp8": Job(site=_H100, dp=8, micro_batch=2, layers=(6,)),
    "dp8q": Job(site=_QUADS, dp=8, micro_batch=2, layers=(5,)),
    "tp2dp4": Job(site=_H200, tp=2, dp=4, hidden=6144, layers=(5,)),
    "tp4dp2": Job(site=_H100, tp=4, dp=2, hidden=8192, layers=(5,), micro_batch=2),
    "tp2pp2dp2": Job(
        site=_A100, tp=2, pp=2, dp=2, layers=(3, 3), num_microbatches=6, hidden=5120
    ),
    "tp2pp2dp2q": Job(site=_QUADS, tp=2, pp=2, dp=2, layers=(4, 4), hidden=6144),
    "pp4dp2": Job(site=_H800, pp=4, dp=2, layers=(3,) * 4, num_microbatches=8, hidden=5120),
    "pp2v2dp4": Job(
        site=_H100, pp=2, vpp=2, dp=4, layers=(2,) * 4, num_microbatches=6, micro_batch=2
    ),
    "ep8": Job(
        site=_H100, dp=8, ep=8, experts=16, hidden=3072, ffn=6144, layers=(5,), micro_batch=2
    ),
    "ep4dp8q": Job(
        site=_QUADS, dp=8, ep=4, experts=8, hidden=3072, ffn=8192, layers=(4,), micro_batch=2
    ),
    "pp2ep4dp8": Job(
        site=_H100, pp=2, dp=8, ep=4, experts=8, hidden=3072, ffn=6144, layers=(3, 3),
        num_microbatches=6,
    ),
    "cp2tp2dp4": Job(site=_H100, cp=2, tp=2, dp=4, sequence=8192, layers=(4,), hidden=5120),
    "dp16": Job(site=_PAIRS, dp=16, hidden=5120, micro_batch=4, layers=(5,)),
    "tp8dp2": Job(site=_A100, tp=8, dp=2, hidden=8192, layers=(4,), micro_batch=4),
    "tp4pp2dp2": Job(site=_H800, tp=4, pp=2, dp=2, hidden=8192, layers=(3, 3)),
    "tp2dp8": Job(site=_H100, tp=2, dp=8, hidden=6144, layers=(5,)),
    "pp8dp2": Job(site=_H200, pp=8, dp=2, layers=(2,) * 8, num_microbatches=16, hidden=8192),
    "tp2pp4dp4": Job(
        site=_H100, tp=2, pp=4, dp=4, layers=(2,) * 4, hidden=6144, num_microbatches=8,
        granularity="base",
    ),
    "dp32": Job(site=_A100, dp=32, layers=(6,), hidden=4096, micro_batch=2),
    "tp8pp2dp2": Job(
        site=_H100, tp=8, pp=2, dp=2, layers=(3, 3), hidden=12288, micro_batch=4,
        granularity="base",
    ),
    "dp64": Job(site=_H100, dp=64, layers=(5,), micro_batch=2, granularity="base"),
    "small": Job(
        site=_QUADS, dp=8, hidden=1024, sequence=1024, layers=(10,), micro_batch=2,
        host_bound=1.6, num_microbatches=6,
    ),
    "smalltp": Job(
        site=_A100, tp=2, dp=8, hidden=1024, sequence=1024, layers=(6,), micro_batch=2,
        host_bound=2.0,
    ),
    "mid": Job(
        site=_QUADS, dp=8, hidden=2048, sequence=2048, layers=(8,), num_microbatches=8,
        vocabulary=32000,
    ),
    "midpp": Job(
        site=_H100, pp=2, dp=8, hidden=2048, sequence=2048, layers=(5, 5), num_microbatches=8,
        vocabulary=32000,
    ),
}  # fmt: skip


_PASSING = partial(fault, kind="gpu_clock", factor=1.4, onset=0.25, end=0.7)
_THROTTLING = partial(fault, kind="throttling", on=2, period=5)
_ECC = partial(fault, kind="ecc_pause", stall_s=0.15)
_NEIGHBOUR = partial(fault, kind="neighbour", factor=5.0, on=3, period=5)
_BURSTS = partial(fault, kind="loader", factor=8.0, where="a loader", on=2, period=5)
_SWAPPING = partial(fault, kind="host_memory", factor=4.0, stall_s=0.08)
_COLLECTING = partial(fault, kind="gc", stall_s=0.25)

_SOUND: tuple[_Line, ...] = (
    ("healthy", " ".join(_JOBS), changed),
    ("healthy", "dp8 tp2dp4 pp4dp2 ep8 tp4dp2 dp16 mid dp8q", changed),
    ("healthy: missing ranks", "tp2dp4 dp16 pp4dp2", partial(changed, missing=1)),
    ("healthy: cut short", "dp8 tp2pp2dp2 ep8", partial(changed, cut=1)),
    ("healthy: clocks set", "dp8q tp2dp8 pp8dp2", partial(elsewhere, clocks="stepping")),
    ("healthy: clocks wander", "dp16 tp2pp2dp2q tp8dp2", partial(elsewhere, clocks="wandering")),
    ("look_alike: chips spread by 3 %", "dp8 dp16 tp2dp4 pp4dp2 ep8 dp32",
     partial(elsewhere, chip_spread_ratio=0.012)),
    ("look_alike: congested fabric", "dp16 tp2dp8 pp8dp2 dp8q tp8dp2",
     partial(elsewhere, congestion_ratio=0.8)),
    ("look_alike: warm-up", "dp8 tp2dp4 pp4dp2 mid",
     partial(changed, first_iteration=1, interval=5, window=5, num_iterations=5)),
    ("look_alike: host-bound", "small smalltp mid small smalltp midpp", changed),
    ("look_alike: slow storage", "dp8 dp16 tp2dp4 mid pp4dp2", partial(slow_storage, share=1.3)),
    ("look_alike: checkpoints", "dp8 tp2dp4 pp2v2dp4 dp16", partial(changed, checkpoint_every=5)),
    ("look_alike: evaluations", "dp8 tp2pp2dp2 mid", partial(changed, evaluate_every=5)),
)  # fmt: skip

_UNEVEN: tuple[_Line, ...] = (
    ("look_alike: packed documents", "dp8 tp2dp4 cp2tp2dp4 pp4dp2 dp16",
     partial(changed, lengths="packed", length_spread=0.35)),
    ("look_alike: uneven lengths", "dp8 tp2dp4 tp4dp2 pp4dp2 dp16",
     partial(changed, lengths="unpacked", length_spread=0.4)),
    ("look_alike: long documents", "dp8 tp2dp4 tp2dp8 pp4dp2",
     partial(long_replica, lengths="packed")),
    ("look_alike: long documents", "dp16 tp4dp2", partial(long_replica, lengths="unpacked")),
    ("look_alike: hot expert", "ep8 ep4dp8q pp2ep4dp8 ep8 ep4dp8q", hot_expert),
    ("look_alike: hot expert drifts", "ep8 ep4dp8q pp2ep4dp8 ep8",
     partial(changed, expert_spread=0.15, expert_drift=0.4)),
    ("look_alike: heavier stage", "pp4dp2", partial(heavy_stage, layers=(3, 2, 2, 5))),
    ("look_alike: heavier stage", "pp4", partial(heavy_stage, layers=(2, 5, 3, 2))),
    ("look_alike: heavier stage", "tp2pp2dp2", partial(heavy_stage, layers=(2, 4))),
    ("look_alike: heavier stage", "tp4pp2dp2", partial(heavy_stage, layers=(4, 2))),
    ("look_alike: heavier stage", "midpp", partial(heavy_stage, layers=(4, 6))),
    ("look_alike: heavy head", "pp4dp2 tp2pp2dp2q pp4 tp4pp2dp2",
     partial(heavy_stage, vocabulary=256_000)),
)  # fmt: skip

_DEVICES: tuple[_Line, ...] = (
    *((f"gpu_clock {percent}%", jobs, partial(fault, kind="gpu_clock", factor=1 + percent / 100))
      for percent, jobs in (
        (3, "dp8 tp2dp4 pp4dp2 dp16"), (5, "dp8q tp4dp2 pp4dp2 dp32"),
        (8, "dp16 tp2pp2dp2 ep8 tp2dp8"), (12, "dp4 tp4dp2 pp8dp2"), (20, "dp8 tp2dp2 pp2v2dp4"),
        (40, "tp2pp2dp2q dp64 cp2tp2dp4"), (100, "dp8 pp4 tp2pp4dp4"))),
    *((f"gpu_clock: {where}", jobs, partial(fault, kind="gpu_clock", factor=1.15, where=where))
      for where, jobs in (
        ("TP not first", "tp2dp4 tp8dp2"), ("PP first", "pp4dp2 tp2pp2dp2"),
        ("PP last", "pp8dp2 pp2v2dp4"), ("an expert", "ep8 pp2ep4dp8"), ("DP last", "dp16 mid"))),
    ("gpu_clock onset", "dp8 tp2dp4 pp4dp2 ep8",
     partial(fault, kind="gpu_clock", factor=1.3, onset=0.5)),
    ("gpu_clock onset", "dp16 tp2pp2dp2", partial(fault, kind="gpu_clock", factor=1.1, onset=0.5)),
    ("gpu_clock passing", "dp8 tp4dp2", _PASSING),
    ("throttling", "dp8 pp4dp2 tp2dp8",
     partial(in_a_row, change=partial(_THROTTLING, factor=1.25))),
    ("throttling", "dp16 tp2dp4 ep8 mid",
     partial(in_a_row, change=partial(_THROTTLING, factor=1.6))),
    ("gpu_memory", "dp8 tp2dp4", partial(fault, kind="gpu_memory", factor=1.3)),
    ("gpu_memory", "pp4dp2 dp16", partial(fault, kind="gpu_memory", factor=1.7)),
    ("gpu_memory", "tp4dp2 ep8", partial(fault, kind="gpu_memory", factor=2.5)),
    ("ecc_pause", "dp8 tp2dp4 pp4dp2", partial(_ECC, num_stalls=0.5)),
    ("ecc_pause", "dp16 tp2pp2dp2q", partial(_ECC, num_stalls=1.5)),
)  # fmt: skip

_LINKS: tuple[_Line, ...] = (
    *((kind, jobs, partial(fault, kind=kind, factor=factor)) for kind, factor, jobs in (
        ("nvlink", 2.0, "tp2dp4 tp4dp2"), ("nvlink", 4.0, "tp2pp2dp2 tp8dp2 cp2tp2dp4"),
        ("nvlink", 8.0, "ep8 tp4pp2dp2"), ("pcie", 2.0, "dp16 tp2dp8"),
        ("pcie", 4.0, "dp8q tp8dp2 ep4dp8q"), ("nic", 2.0, "dp16 tp2dp8 tp2pp4dp4 dp8q"),
        ("nic", 4.0, "tp2pp4dp4 tp8dp2 pp8dp2 ep4dp8q"),
        ("host_nic", 2.0, "dp32 tp2dp8 tp2pp4dp4"), ("host_nic", 4.0, "dp16 tp2pp2dp2q"),
        ("rail", 2.0, "tp2dp8 tp8dp2 dp32"), ("rail", 4.0, "tp2pp4dp4 dp64"))),
    ("nic onset", "dp16 tp2dp8", partial(fault, kind="nic", factor=3.0, onset=0.5)),
)  # fmt: skip

_HOSTS: tuple[_Line, ...] = (
    *((kind, jobs, partial(fault, kind=kind, factor=factor)) for kind, factor, jobs in (
        ("host_cpu", 1.5, "small smalltp"), ("host_cpu", 3.0, "small mid midpp"),
        ("host_cpu", 6.0, "mid dp8q smalltp"), ("pinning", 2.0, "small smalltp"),
        ("pinning", 5.0, "mid midpp small"), ("host_power", 1.15, "dp16 tp2pp2dp2q"),
        ("host_power", 1.4, "dp8q tp2dp8 dp32"), ("storage", 4.0, "dp16 tp2dp8 mid"),
        ("storage", 8.0, "dp8q"))),
    *(("loader", jobs, partial(fault, kind="loader", factor=factor, where="a loader"))
      for factor, jobs in ((1.6, "dp8"), (5.0, "dp8 tp2dp4 pp4dp2"), (10.0, "dp16 mid"))),
    ("neighbour", "small smalltp mid midpp", partial(in_a_row, change=_NEIGHBOUR)),
    ("loader on and off", "dp8 tp2dp4 dp16", partial(in_a_row, change=_BURSTS)),
    ("host_memory", "dp16 mid tp2dp8", partial(_SWAPPING, num_stalls=1.0)),
    ("host_memory", "dp8q", partial(_SWAPPING, num_stalls=3.0)),
    ("host_memory", "midpp", partial(_SWAPPING, num_stalls=0.4)),
    ("gc", "dp8 mid tp2dp4", partial(_COLLECTING, num_stalls=1.0)),
    ("gc", "pp4dp2", partial(_COLLECTING, num_stalls=2.0)),
    ("gc", "small", partial(fault, kind="gc", stall_s=0.04, num_stalls=1.0)),
)  # fmt: skip

_PAIRED: tuple[_Line, ...] = tuple(
    ("two faults", jobs, partial(
        two, first=partial(fault, kind="gpu_clock", factor=1.3, where="PP first"), second=other,
    ))
    for jobs, other in (
        ("dp8 pp4dp2", partial(fault, kind="gpu_clock", factor=1.15, where="DP last")),
        ("dp16 tp2dp8", partial(fault, kind="nic", factor=4.0)),
        ("mid", partial(fault, kind="pinning", factor=3.0)),
        ("tp2dp4", partial(fault, kind="loader", factor=4.0, where="a loader")),
        ("ep8", partial(fault, kind="gpu_memory", factor=2.0)),
        ("tp2pp2dp2q", partial(fault, kind="nvlink", factor=5.0)),
    )
)  # fmt: skip


@lru_cache(maxsize=1)
def _entries() -> tuple[_Line, ...]:
    """Return the catalogue with one job a line."""
    tables = (_SOUND, _UNEVEN, _DEVICES, _LINKS, _HOSTS, _PAIRED)
    return tuple(
        (family, job, change)
        for table in tables
        for family, jobs, change in table
        for job in jobs.split()
    )


def _scenario_of(entry: _Line, seed: int) -> Scenario:
    """Draw a case: the same for the same seed."""
    _, template, change = entry
    rng = np.random.default_rng([seed, 0])
    return change(Scenario(job=run_somehow(_JOBS[template], rng), seed=seed), rng)


def _seed_of(place: int, draw: int) -> int:
    return crc32(f"{_NAME}/{draw}/{place}".encode()) & 0x7FFFFFFF


def _name_of(entry: _Line, seed: int) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", entry[0].lower()).strip("-")
    return f"{words}-{entry[1]}-s{seed}"


def cases(draw: int = 0) -> Iterable[Case]:
    """Yield all cases of a draw, the same ones in every process, without simulating any."""
    for place, entry in enumerate(_entries()):
        seed = _seed_of(place, draw)
        scenario = _scenario_of(entry, seed)
        yield Case(
            ground=_NAME,
            name=_name_of(entry, seed),
            family=entry[0],
            num_ranks=scenario.job.num_ranks,
            seed=seed,
            draw=draw,
            planted=scenario.planted,
        )


def scenario_of(case: Case) -> Scenario:
    """Return what is true of a case."""
    for place, entry in enumerate(_entries()):
        if _seed_of(place, case.draw) == case.seed:
            return _scenario_of(entry, case.seed)
    raise ValueError(f"{case.name} is no case of the ground {_NAME}")


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the rank files of a case; return what was planted, with its cost."""
    scenario = scenario_of(case)
    run = simulate(scenario, recording=True)
    write_files(run, directory)
    return tuple(priced(scenario, run))


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how much longer each rank's passes take than on even chips, (rank, iteration)."""
    return pass_slowness(scenario_of(case))


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Run the sound job of a case with other chips; return its passes' times, (rank, iteration)."""
    run = simulate(scenario_of(case).varied(variation), recording=directory is not None)
    if directory is not None:
        write_files(run, directory)
    return run.work_s
