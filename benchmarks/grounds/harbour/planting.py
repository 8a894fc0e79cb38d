"""Plant troubles into drawn jobs, and say what is true of them.

Each function takes a job and random numbers and returns troubles, each with its truth; who may be
named for a trouble of a link is worked out from the job's groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.harbour.files import host_name
from benchmarks.grounds.harbour.jobs import Job
from benchmarks.grounds.harbour.network import suspects
from benchmarks.grounds.harbour.trouble import Trouble

Plant = Callable[[Job, np.random.Generator], list[tuple[Trouble, Planted]]]

_CAUSES = {
    "gpu_clock": "compute", "throttling": "compute", "power_cap": "compute", "hbm": "compute",
    "nvlink": "link", "nic": "link", "rail": "link", "pair": "link",
    "host_cpu": "host", "daemon": "host", "host_memory": "host",
    "loader": "loader", "gc": "gc",
    "long_sequences": "sequence_imbalance", "hot_expert": "sequence_imbalance",
    "heavy_stage": "stage_imbalance",
}  # fmt: skip
_OF_THE_JOB = ("long_sequences", "hot_expert", "heavy_stage")
_LINKS = ("nvlink", "nic", "rail", "pair")
_WOBBLE = 0.06  # by how much of its excess a factor differs from draw to draw


def _truth(
    job: Job, kind: str, ranks: tuple[int, ...], factor: float, host: str = "", /, **when: float
) -> tuple[Trouble, Planted]:
    """Return a trouble and its truth."""
    first, last = int(when.get("first", 1)), int(when.get("last", 0))
    share = when.get("share", 1.0)
    named = ranks
    if kind in _LINKS:
        named = suspects(job, kind, ranks)
    if kind == "nvlink" and job.tp == 2:  # a link has two ends
        named = tuple(sorted({rank - rank % 2 + end for rank in named for end in range(2)}))
    trouble = Trouble(
        kind=kind, ranks=ranks, factor=factor, first_iteration=first, last_iteration=last,
        share=share, burst_s=when.get("burst_s", 0.0),
    )  # fmt: skip
    planted = Planted(
        kind={"daemon": "host_cpu"}.get(kind, kind),
        cause=_CAUSES[kind],
        owner="job" if kind in _OF_THE_JOB else "node",
        ranks=named,
        host=host,
        factor=1.0 if kind == "gc" else factor,  # of gc, a trouble's is the length of its pauses
        first_iteration=first,
        last_iteration=last,
        share_of_time=share,
    )
    return trouble, planted


def wobbled(factor: float, random: np.random.Generator) -> float:
    """Return a factor that is a bit different in each draw."""
    return 1 + (factor - 1) * (1 + _WOBBLE * float(random.uniform(-1, 1)))


def _any_rank(job: Job, random: np.random.Generator) -> int:
    present = [rank for rank in range(job.num_ranks) if rank not in job.missing]
    return int(random.choice(present))


def slow_chip(
    job: Job, random: np.random.Generator, *, factor: float, kind: str = "gpu_clock",
    when: str = "", share: float = 1.0, burst_s: float = 0.0,
) -> list[tuple[Trouble, Planted]]:  # fmt: skip
    """Slow the products (or the memory, `hbm`) of one GPU, throughout, `from` some iteration on,
    or for a `stretch`.
    """
    times: dict[str, float] = {"share": share, "burst_s": burst_s}
    numbers = job.iterations
    if when:
        times["first"] = numbers[int(len(numbers) * random.uniform(0.35, 0.55))]
    if when == "stretch":
        times["last"] = numbers[int(len(numbers) * random.uniform(0.75, 0.85))]
    return [_truth(job, kind, (_any_rank(job, random),), wobbled(factor, random), **times)]


def slow_host(
    job: Job, random: np.random.Generator, *, factor: float, kind: str
) -> list[tuple[Trouble, Planted]]:
    """Let all ranks of one host have a trouble: its power, its cores, its memory, its NICs."""
    host = job.host_of(_any_rank(job, random))
    ranks = job.ranks_of_host(host)
    named = host_name(job, ranks[0])
    return [_truth(job, kind, ranks, wobbled(factor, random), named)]


def slow_thread(
    job: Job, random: np.random.Generator, *, factor: float, kind: str = "host_cpu"
) -> list[tuple[Trouble, Planted]]:
    """Slow the launching thread of one rank: a slow core, or a daemon that shares it."""
    return [_truth(job, kind, (_any_rank(job, random),), wobbled(factor, random))]


def slow_link(
    job: Job, random: np.random.Generator, *, factor: float, kind: str
) -> list[tuple[Trouble, Planted]]:
    """Slow one GPU's links to its host, a rail through all hosts, or the way between two ranks."""
    rank = _any_rank(job, random)
    ranks: tuple[int, ...] = (rank,)
    if kind == "rail":
        ranks = tuple(range(rank % job.site.ranks_per_host, job.num_ranks, job.site.ranks_per_host))
    if kind == "pair":
        step = job.stage_size if job.pp > 1 else job.tp
        first = rank if rank + step < job.num_ranks else rank - step
        ranks = (first, first + step)
    return [_truth(job, kind, ranks, wobbled(factor, random))]


def slow_loader(
    job: Job, random: np.random.Generator, *, factor: float, whole_host: bool = False
) -> list[tuple[Trouble, Planted]]:
    """Slow the loader of one reading rank, or of all ranks of its host."""
    rank = int(random.integers(job.stage_size // job.tp)) * job.tp
    host = job.host_of(rank)
    ranks = job.ranks_of_host(host) if whole_host else (rank,)
    named = host_name(job, rank) if whole_host else ""
    return [_truth(job, "loader", ranks, wobbled(factor, random), named)]


def collecting(
    job: Job, random: np.random.Generator, *, pause_ms: float
) -> list[tuple[Trouble, Planted]]:
    """Let the collector of one rank stop it once in every iteration."""
    return [_truth(job, "gc", (_any_rank(job, random),), wobbled(pause_ms, random))]


def long_replica(
    job: Job, random: np.random.Generator, *, factor: float
) -> list[tuple[Trouble, Planted]]:
    """Give one replica longer sequences than the others have."""
    replica, width = int(random.integers(job.dp)), job.tp * job.cp
    ranks = tuple(rank for rank in range(job.num_ranks) if rank // width % job.dp == replica)
    return [_truth(job, "long_sequences", ranks, wobbled(factor, random))]


def hot_expert(
    job: Job, random: np.random.Generator, *, factor: float
) -> list[tuple[Trouble, Planted]]:
    """Let the experts of one place in every expert-parallel group be liked more than others."""
    place = int(random.integers(job.ep))
    ranks = tuple(range(place, job.num_ranks, job.ep))
    return [_truth(job, "hot_expert", ranks, wobbled(factor, random))]


def heavy_stage(
    job: Job, random: np.random.Generator, *, factor: float
) -> list[tuple[Trouble, Planted]]:
    """Let the layers of one stage have more to do."""
    stage = int(random.integers(job.pp))
    ranks = tuple(range(stage * job.stage_size, (stage + 1) * job.stage_size))
    return [_truth(job, "heavy_stage", ranks, wobbled(factor, random))]


def both(one: Plant, other: Plant) -> Plant:
    """Plant two troubles whose ranks are not the same."""
    return partial(_both, one, other)


def _both(
    one: Plant, other: Plant, job: Job, random: np.random.Generator
) -> list[tuple[Trouble, Planted]]:
    first = one(job, random)
    for _ in range(50):
        second = other(job, random)
        if not set(first[0][1].ranks) & set(second[0][1].ranks):
            break
    return first + second
