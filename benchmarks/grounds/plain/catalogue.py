"""The cases: which trainers, which causes, how many, and what a ground offers of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.plain import causes
from benchmarks.grounds.plain.causes import Cause, Scenario
from benchmarks.grounds.plain.files import write_files
from benchmarks.grounds.plain.job import EXPERTS, PIPELINES, Job, Trainer, draw_job
from benchmarks.grounds.plain.machine import chip_slowness
from benchmarks.grounds.plain.run import own_chips, simulate
from benchmarks.grounds.plain.trouble import Hits, Trouble
from megascan.schema import Granularity

NAME = "plain"

_ALL = tuple(Trainer)
_SPMD = tuple(one for one in Trainer if one not in PIPELINES)
_REPLICATED = tuple(one for one in _SPMD if one not in EXPERTS)
_WITHIN_HOST = (
    Trainer.TENSOR, Trainer.FSDP_TP, Trainer.MOE_DDP, Trainer.MOE_FSDP, Trainer.HSDP,
    Trainer.PIPELINE, Trainer.FSDP,
)  # fmt: skip
_BETWEEN_HOSTS = (
    Trainer.HSDP, Trainer.FSDP_TP, Trainer.PIPELINE_DP, Trainer.TENSOR, Trainer.PIPELINE,
    Trainer.DDP,
)  # fmt: skip
_OVER_RAILS = (Trainer.HSDP, Trainer.FSDP_TP, Trainer.TENSOR)
_WITH_BATCHES = (Trainer.DDP, Trainer.FSDP, Trainer.ZERO2)

_SEVERAL_HOSTS: Mapping[str, tuple[object, ...]] = {
    "num_ranks": (8, 16, 16, 32), "gpus_per_host": (4,),
}  # fmt: skip
_SIMILAR_CHIPS: Mapping[str, tuple[object, ...]] = {
    "chip_spread_ratio": (0.003, 0.006, 0.01, 0.02),
}
_BY_DEVICE: Mapping[str, tuple[object, ...]] = {"is_bound_by_host": (False,)}
_MISSING_SHARE = 0.06
_LEAST_WITH_MISSING = 8


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Cases of one kind: what is planted, how many, in which trainers, with what given.

    `given` has for each of `draw_job`'s keys the values of which one is drawn.
    """

    name: str
    count: int
    cause: Cause = causes.nothing
    trainers: tuple[Trainer, ...] = _ALL
    given: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    is_look_alike: bool = False

    @property
    def title(self) -> str:
        """Return what tables call it."""
        return f"look_alike: {self.name}" if self.is_look_alike else self.name


_FULL: Mapping[str, tuple[object, ...]] = {"granularity": (Granularity.FULL,)}
_FAMILIES = (
    _Family(name="gpu_clock", count=42, cause=causes.gpu_clock, given=_SIMILAR_CHIPS),
    _Family(name="throttling", count=14, cause=causes.throttling, given=_SIMILAR_CHIPS),
    _Family(name="hbm", count=8, cause=causes.hbm),
    _Family(name="host_gpus", count=6, cause=causes.host_gpus, given=_SEVERAL_HOSTS),
    _Family(
        name="host_cpu",
        count=8,
        cause=causes.host_cpu,
        given={**_SEVERAL_HOSTS, "is_bound_by_host": (True, True, False)},
    ),
    _Family(name="host_memory", count=6, cause=causes.host_memory, given=_SEVERAL_HOSTS),
    _Family(
        name="loader", count=10, cause=causes.loader, given={"has_loader": (True, True, False)}
    ),
    _Family(name="gc", count=6, cause=causes.gc, given=_FULL),
    _Family(
        name="nvlink",
        count=10,
        cause=causes.nvlink,
        trainers=_WITHIN_HOST,
        given={**_BY_DEVICE, "num_ranks": (4, 8, 8, 16), "gpus_per_host": (4, 4, 2)},
    ),
    _Family(
        name="nic",
        count=8,
        cause=causes.nic,
        trainers=_BETWEEN_HOSTS,
        given={**_BY_DEVICE, "num_ranks": (8, 16), "gpus_per_host": (2, 4)},
    ),
    _Family(
        name="rail",
        count=5,
        cause=causes.rail,
        trainers=_OVER_RAILS,
        given={
            **_BY_DEVICE,
            "num_ranks": (16, 32),
            "gpus_per_host": (4, 8),
            "has_rails": (True,),
        },
    ),
    _Family(
        name="pcie",
        count=5,
        cause=causes.pcie,
        trainers=_WITH_BATCHES,
        given={"input_bytes": (3e7, 8e7, 1.5e8), "copies_wait": (True, False, False)},
    ),
    _Family(
        name="heavy_stage",
        count=8,
        cause=causes.heavy_stage,
        trainers=PIPELINES,
        is_look_alike=True,
    ),
    _Family(
        name="long_sequences",
        count=9,
        cause=causes.long_sequences,
        trainers=_REPLICATED,
        given={"tokens_known": (True, True, False), "length_ratio": (0.0, 0.05, 0.1)},
        is_look_alike=True,
    ),
    _Family(
        name="uneven_sequences",
        count=6,
        cause=causes.uneven_sequences,
        trainers=_SPMD,
        is_look_alike=True,
    ),
    _Family(
        name="hot_expert", count=6, cause=causes.hot_expert, trainers=EXPERTS, is_look_alike=True
    ),
    _Family(
        name="storage",
        count=6,
        cause=causes.storage,
        given={"has_loader": (True,)},
        is_look_alike=True,
    ),
    _Family(name="healthy", count=30),
    _Family(
        name="noisy_hosts",
        count=6,
        given={"stall_share": (0.05, 0.15), "stall_s": (0.001, 0.004, 0.015)},
        is_look_alike=True,
    ),
    _Family(
        name="evaluations",
        count=6,
        given={"evaluates_every": (2, 3, 6), "evaluates_within": (True, False)},
        is_look_alike=True,
    ),
    _Family(
        name="checkpoints",
        count=6,
        given={
            "saves_every": (2, 5, 6),
            "save_s": (0.05, 0.3, 2.0),
            "saves_alone": (True, True, False),
            "evaluates_within": (True, False),
        },
        is_look_alike=True,
    ),
    _Family(
        name="collectors",
        count=6,
        given={
            **_FULL,
            "collects_every": (1, 2, 4),
            "collection_s": (0.004, 0.02, 0.08),
            "collects_together": (True, False),
        },
        is_look_alike=True,
    ),
    _Family(
        name="congestion",
        count=6,
        trainers=_BETWEEN_HOSTS,
        given={**_SEVERAL_HOSTS, "congestion_ratio": (0.3, 0.8, 2.0)},
        is_look_alike=True,
    ),
    _Family(
        name="chip_spread",
        count=6,
        given={"chip_spread_ratio": (0.03, 0.04, 0.05)},
        is_look_alike=True,
    ),
    _Family(name="host_bound", count=6, given={"is_bound_by_host": (True,)}, is_look_alike=True),
    _Family(name="autotuning", count=4, given={"tunes": (True,)}, is_look_alike=True),
    _Family(
        name="uneven_shards",
        count=4,
        trainers=(Trainer.ZERO1, Trainer.ZERO2, Trainer.FSDP, Trainer.HSDP),
        given={"uneven_ratio": (0.1, 0.25)},
        is_look_alike=True,
    ),
)
_BY_TITLE = {family.title: family for family in _FAMILIES}


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw."""
    for family in _FAMILIES:
        first = crc32(family.name.encode())
        for number in range(family.count):
            trainer = family.trainers[(first + number) % len(family.trainers)]
            name = f"{trainer.value}-{family.name}-{number}"
            seed = crc32(f"{NAME}/{name}/{draw}".encode())
            scenario = _scenario(seed, trainer, family.title)
            yield Case(
                ground=NAME,
                name=name,
                family=family.title,
                num_ranks=scenario.job.num_ranks,
                seed=seed,
                draw=draw,
                planted=scenario.planted,
            )


def _of_case(case: Case) -> Scenario:
    trainer = next(one for one in Trainer if case.name.startswith(f"{one.value}-{_stem(case)}-"))
    return _scenario(case.seed, trainer, case.family)


def _stem(case: Case) -> str:
    return _BY_TITLE[case.family].name


@lru_cache(maxsize=512)
def _scenario(seed: int, trainer: Trainer, title: str) -> Scenario:
    family, draws = _BY_TITLE[title], np.random.default_rng([seed, 0])
    wanted = {key: values[int(draws.integers(len(values)))] for key, values in family.given.items()}
    job = draw_job(seed, trainer, wanted)
    if job.num_ranks >= _LEAST_WITH_MISSING and draws.random() < _MISSING_SHARE:
        missing = draws.choice(job.num_ranks, 1 + int(draws.integers(2)), replace=False)
        wanted["missing"] = tuple(sorted(int(rank) for rank in missing))
        job = draw_job(seed, trainer, wanted)
    return family.cause(job, draws)


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with its cost."""
    scenario = _of_case(case)
    run = simulate(scenario.job, scenario.troubles)
    write_files(scenario.job, run, scenario.troubles, directory)
    if not scenario.planted:
        return ()
    iterations = scenario.job.tracing.iterations
    without = simulate(scenario.sound, records=False)
    times = run.iteration_s(iterations), without.iteration_s(iterations)
    return tuple(one.priced(iterations, *times) for one in scenario.planted)


def slowness(case: Case) -> NDArray[np.float64]:
    """Return how many times longer each rank's passes take than on typical chips without what was
    planted, (rank, iteration), the traced iterations.
    """
    scenario = _of_case(case)
    job, iterations = scenario.job, scenario.job.tracing.iterations
    own = simulate(job, scenario.troubles, records=False).pass_times_s(iterations)
    alike = np.ones(job.num_ranks)
    typical = simulate(scenario.sound, chips=alike, records=False).pass_times_s(iterations)
    return own / typical


def write_varied(case: Case, variation: Variation, directory: Path | None) -> NDArray[np.float64]:
    """Write the job of a case without what was planted, with other chips or one slow GPU; return
    the time of each rank's passes, (rank, iteration), the traced iterations.
    """
    job = _of_case(case).sound
    troubles = _slow_gpu(variation)
    run = simulate(job, troubles, chips=_chips(job, variation), records=directory is not None)
    if directory is not None:
        write_files(job, run, troubles, directory)
    return run.pass_times_s(job.tracing.iterations)


def _chips(job: Job, variation: Variation) -> NDArray[np.float64]:
    if variation.chip_spread_ratio is None:
        return own_chips(job)
    draws = np.random.default_rng([job.seed, 2])
    return chip_slowness(draws, job.num_ranks, variation.chip_spread_ratio)


def _slow_gpu(variation: Variation) -> tuple[Trouble, ...]:
    if variation.slow_rank < 0:
        return ()
    ranks = (variation.slow_rank,)
    planted = Planted(
        kind="gpu_clock", cause="compute", owner="node", ranks=ranks, factor=variation.factor
    )
    return (Trouble(planted=planted, hits=(Hits.CLOCK,), ranks=ranks),)
