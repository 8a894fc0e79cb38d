"""List the cases: which causes are planted into which jobs, and in which formats they are written.

A third of the families' jobs differ from draw to draw in layout, ranks, factors and seeds; what is
planted how often is the same in each. The same job stands in all formats that can hold it: the
original's files know no context parallelism, a profile no gaps between its iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from benchmarks.grounds.formats.causes import Cause, plant
from benchmarks.grounds.formats.kineto import ProfileStyle
from benchmarks.grounds.formats.original import OriginalStyle
from benchmarks.grounds.formats.rankfiles import RankFileStyle
from benchmarks.grounds.formats.settings import Wish, cluster_for, job_for, shape_for
from benchmarks.grounds.formats.world import World
from benchmarks.grounds.ground import Case, Planted

GROUND = "formats"
FORMATS = ("rank_files", "original", "kineto")
PROFILED, PROFILED_SHARES = ("all", "trimmed", "device"), (0.7, 0.15, 0.15)
"""Everything; that without operators, which somebody took out; or by a profiler of the device."""
FIRST_SEED, SEEDS_A_DRAW = 61_000, 1_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One job of the catalogue."""

    family: str
    causes: tuple[Cause, ...] = ()
    wish: Wish = field(default_factory=Wish)
    habits: tuple[tuple[str, object], ...] = ()  # fields of the job that are as given
    formats: tuple[str, ...] = FORMATS


def _cause(kind: str, **given: object) -> Cause:
    return replace(Cause(kind=kind), **given)  # type: ignore[arg-type]  # fields of a Cause


def _clock(low: float, high: float, **given: object) -> Cause:
    return _cause("gpu_clock", factor=(low, high), **given)


def _bursts(low: float, high: float) -> Cause:
    return _cause("throttling", factor=(1.2, 1.5), share=0.2, burst=(low, high))


PLAIN = ("rank_files", "kineto")
NO_PROFILE = ("rank_files", "original")
LONG = Wish(shapes="small", least_iterations=10)
HOSTS = Wish(shapes="hosts", least_nodes=3, slow_network=True, overlap=False)
BUSY_HOSTS = Wish(shapes="small", least_nodes=2, host_bound=True, least_iterations=6)

FAULTS = (
    Entry(family="gpu_clock", causes=(_clock(1.03, 1.06),), wish=Wish(least_iterations=8)),
    Entry(family="gpu_clock", causes=(_clock(1.06, 1.12),), wish=Wish(shapes="medium")),
    Entry(family="gpu_clock", causes=(_clock(1.12, 1.3),), wish=Wish(shapes="large")),
    Entry(family="gpu_clock", causes=(_clock(1.3, 2.0),), wish=Wish(shapes="experts")),
    Entry(family="gpu_clock", causes=(_clock(1.15, 1.5),), wish=Wish(shapes="pair")),
    Entry(family="gpu_clock from an iteration on", causes=(_clock(1.1, 1.4, late=True),),
          wish=LONG),
    Entry(family="gpu_clock from an iteration on", causes=(_clock(1.06, 1.2, late=True),),
          wish=replace(LONG, shapes="stages", gaps=True), formats=NO_PROFILE),
    Entry(family="flapping", causes=(
        _cause("flapping", factor=(1.15, 1.4), share=0.5, burst=(1.0, 3.0)),), wish=LONG),
    Entry(family="throttling", causes=(_bursts(0.15, 0.3),), wish=LONG),
    Entry(family="throttling", causes=(_bursts(0.3, 0.8),), wish=LONG),
    Entry(family="throttling", causes=(_bursts(1.0, 1.6),), wish=LONG),
    Entry(family="throttling", causes=(_bursts(2.0, 3.5),),
          wish=replace(LONG, least_iterations=16)),
    Entry(family="hbm", causes=(_cause("hbm", factor=(1.3, 2.0)),)),
    Entry(family="hbm", causes=(_cause("hbm", factor=(1.15, 1.5)),), wish=Wish(shapes="context"),
          formats=PLAIN),
    Entry(family="host_power", causes=(_cause("host_power", factor=(1.1, 1.5)),),
          wish=Wish(shapes="medium", least_nodes=2)),
    Entry(family="nvlink", causes=(_cause("nvlink", factor=(1.5, 4.0)),),
          wish=Wish(shapes="tensor")),
    Entry(family="nvlink", causes=(_cause("nvlink", factor=(2.0, 6.0)),),
          wish=Wish(shapes="experts", experts_inside=True)),
    Entry(family="pcie", causes=(_cause("pcie", factor=(2.0, 4.0)),),
          wish=Wish(shapes="tensor", chips=("l40",))),
    Entry(family="nic", causes=(_cause("nic", factor=(2.0, 2.0)),), wish=HOSTS),
    Entry(family="nic", causes=(_cause("nic", factor=(4.0, 4.0)),), wish=HOSTS),
    Entry(family="nic", causes=(_cause("nic", factor=(4.0, 4.0), late=True),),
          wish=replace(HOSTS, least_iterations=8)),
    Entry(family="one_nic", causes=(_cause("one_nic", factor=(2.0, 4.0)),),
          wish=replace(HOSTS, least_nics=2)),
    Entry(family="lossy", causes=(_cause("lossy", factor=(2.0, 4.0)),), wish=HOSTS),
    Entry(family="rail", causes=(_cause("rail", factor=(2.0, 4.0)),),
          wish=replace(HOSTS, shapes="rails", least_nics=4)),
    Entry(family="host_cpu", causes=(_cause("host_cpu", factor=(1.3, 2.0)),), wish=BUSY_HOSTS),
    Entry(family="host_cpu", causes=(_cause("host_cpu", factor=(1.6, 3.0)),),
          wish=replace(BUSY_HOSTS, shapes="lean", least_iterations=3)),
    Entry(family="neighbour", causes=(
        _cause("neighbour", factor=(4.0, 12.0), stand=(0.02, 0.06)),), wish=BUSY_HOSTS),
    Entry(family="host_memory", causes=(
        _cause("host_memory", share=0.5, stand=(0.15, 0.6)),),
        wish=replace(BUSY_HOSTS, least_iterations=8)),
    Entry(family="loader", causes=(_cause("loader", stand=(0.15, 0.8)),),
          wish=Wish(least_iterations=6)),
    Entry(family="loader", causes=(_cause("loader", stand=(0.15, 0.6), whole_host=True),),
          wish=Wish(shapes="medium", least_nodes=2)),
    Entry(family="gc", causes=(_cause("gc", share=0.7, stand=(0.15, 0.6)),), wish=LONG),
    Entry(family="gc", causes=(_cause("gc", share=0.5, stand=(0.1, 0.4)),),
          wish=replace(LONG, shapes="replicas")),
    Entry(family="two faults", causes=(_clock(1.15, 1.4), _clock(1.1, 1.4)),
          wish=Wish(shapes="medium")),
    Entry(family="two faults", causes=(_clock(1.15, 1.4), _cause("nic", factor=(4.0, 4.0))),
          wish=HOSTS),
    Entry(family="two faults", causes=(
        _clock(1.1, 1.3), _cause("gc", share=0.6, stand=(0.15, 0.5))), wish=LONG),
)  # fmt: skip

SOUND = (
    Entry(family="healthy", wish=Wish(shapes="pair")),
    Entry(family="healthy", wish=LONG),
    Entry(family="healthy", wish=Wish(shapes="small", gaps=True, least_iterations=8),
          formats=NO_PROFILE),
    Entry(family="healthy", wish=Wish(shapes="medium")),
    Entry(family="healthy", wish=Wish(shapes="medium", least_nodes=3, slow_network=True)),
    Entry(family="healthy", wish=Wish(shapes="large")),
    Entry(family="healthy", wish=Wish(shapes="tensor", chips=("l40",))),
    Entry(family="healthy", wish=Wish(shapes="stages")),
    Entry(family="healthy", wish=Wish(shapes="experts")),
    Entry(family="healthy", wish=Wish(shapes="context"), formats=PLAIN),
    Entry(family="healthy", wish=Wish(shapes="small", pcie_node=True, least_nodes=2)),
    Entry(family="healthy", wish=Wish(shapes="replicas", least_iterations=16)),
    Entry(family="look_alike: uneven chips", wish=Wish(shapes="small"),
          habits=(("chip_spread", 0.05),)),
    Entry(family="look_alike: uneven chips", wish=Wish(shapes="medium"),
          habits=(("chip_spread", 0.03),)),
    Entry(family="look_alike: lengths vary", wish=Wish(shapes="replicas"),
          habits=(("varied_lengths", 0.25),)),
    Entry(family="look_alike: lengths vary", wish=Wish(shapes="stages"),
          habits=(("varied_lengths", 0.35),)),
    Entry(family="look_alike: pauses", wish=LONG,
          habits=(("checkpoint_every", 3), ("evaluate_every", 4), ("collect_every", 2))),
    Entry(family="look_alike: host-bound", wish=BUSY_HOSTS),
    Entry(family="look_alike: host-bound",
          wish=replace(BUSY_HOSTS, shapes="lean", least_iterations=3),
          habits=(("host_noise", 0.35),)),
    Entry(family="look_alike: noisy kernels", wish=Wish(shapes="small"),
          habits=(("kernel_noise", 0.05),)),
    Entry(family="look_alike: heavy stage", causes=(_cause("heavy_stage", factor=(1.5, 2.2)),),
          wish=Wish(shapes="stages")),
    Entry(family="look_alike: heavy stage", causes=(_cause("heavy_stage", factor=(1.3, 1.7)),),
          wish=Wish(shapes="stages")),
    Entry(family="look_alike: uneven layers", causes=(_cause("uneven_layers"),),
          wish=Wish(shapes="stages")),
    Entry(family="look_alike: long sequences", causes=(
        _cause("long_sequences", factor=(1.15, 1.5)),), wish=Wish(shapes="replicas")),
    Entry(family="look_alike: shuffled sequences", causes=(
        _cause("shuffled_sequences", factor=(1.2, 1.6)),),
        wish=Wish(shapes="replicas", least_iterations=8)),
    Entry(family="look_alike: hot expert", causes=(_cause("hot_expert", factor=(1.4, 2.2)),),
          wish=Wish(shapes="experts")),
    Entry(family="look_alike: slow storage", causes=(_cause("storage", stand=(0.2, 0.8)),),
          wish=Wish(shapes="small")),
    Entry(family="look_alike: slow network", causes=(_cause("network", factor=(2.0, 4.0)),),
          wish=HOSTS),
    Entry(family="look_alike: collector on all ranks", causes=(
        _cause("collector", share=0.4, stand=(0.1, 0.4)),), wish=LONG),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Style:
    """In which format a case is written, and how."""

    format: str
    rank_files: RankFileStyle
    original: OriginalStyle
    profile: ProfileStyle


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw."""
    for number, entry in enumerate((*FAULTS, *SOUND)):
        for which, written_as in enumerate(FORMATS):
            if written_as in entry.formats:
                yield _case(draw, number, which)


def _seed(draw: int, number: int, which: int) -> int:
    return FIRST_SEED + draw * SEEDS_A_DRAW + number * len(FORMATS) + which


@lru_cache(maxsize=512)
def _case(draw: int, number: int, which: int) -> Case:
    entry = (*FAULTS, *SOUND)[number]
    world, planted = _world(draw, number)
    seed, shape = _seed(draw, number, which), world.job.shape
    axes = "".join(
        f"{axis}{getattr(shape, axis)}"
        for axis in ("tp", "cp", "dp", "pp", "vpp", "ep")
        if getattr(shape, axis) > 1
    )
    slug = entry.family.replace(": ", "-").replace(" ", "-")
    return Case(
        ground=GROUND, name=f"{slug}-{axes}-{FORMATS[which]}-{seed}", family=entry.family,
        num_ranks=shape.world, seed=seed, draw=draw, planted=planted,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _world(draw: int, number: int) -> tuple[World, tuple[Planted, ...]]:
    """Draw the job of an entry; the same in all its formats."""
    entry = (*FAULTS, *SOUND)[number]
    seed = _seed(draw, number, 0)
    rng = np.random.default_rng((seed, 0))
    shape = shape_for(entry.wish, rng)
    cluster = cluster_for(entry.wish, shape, rng)
    has_original = "original" in entry.formats
    job = job_for(entry.wish, shape, rng, barrier=has_original or bool(rng.random() < 0.3))
    job = replace(job, **dict(entry.habits))  # type: ignore[arg-type]  # fields of a Job
    world = World(job=job, cluster=cluster, seed=seed)
    return plant(world, entry.causes, rng)


def world_of(case: Case) -> World:
    """Return the job of a case with all that is planted."""
    number = _number(case)
    return _world(case.draw, number)[0]


def _number(case: Case) -> int:
    return (case.seed - FIRST_SEED - case.draw * SEEDS_A_DRAW) // len(FORMATS)


def style_of(case: Case) -> Style:
    """Return how a case is written."""
    rng = np.random.default_rng((case.seed, 14))
    job = world_of(case).job
    shape, interleaved = job.shape, job.shape.vpp > 1
    head = bool(rng.random() < 0.3) or interleaved
    has_little = shape.pp == 1 or interleaved or (head and shape.tp == 1)
    profiled = str(rng.choice(PROFILED, p=PROFILED_SHARES))
    return Style(
        format=FORMATS[(case.seed - FIRST_SEED - case.draw * SEEDS_A_DRAW) % len(FORMATS)],
        rank_files=RankFileStyle(
            full=bool(rng.random() < 0.65),
            counters=bool(rng.random() < 0.4),
            packed=bool(rng.random() < 0.5 and job.varied_lengths > 0),
        ),
        original=OriginalStyle(head=head, full=bool(rng.random() < 0.75) or has_little),
        profile=ProfileStyle(
            operators=profiled == "all",
            steps=profiled != "device",
            arguments=profiled != "device",
            descriptions=bool(rng.random() < 0.8),
            base=str(rng.choice(["absolute", "common", "common", "own"])),
        ),
    )
