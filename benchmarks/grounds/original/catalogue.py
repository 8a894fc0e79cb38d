"""List the ground's cases by family, and write any of them with its truth.

A kind of fault is planted only where this format can show it: data loading leaves no record at all,
links between hosts show in the schedule's events alone, and links within a host where one group can
be held against others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, cycle
from pathlib import Path

import numpy as np

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.original.costs import generator, link_slowness
from benchmarks.grounds.original.files import write_files
from benchmarks.grounds.original.job import (
    Effect,
    Floats,
    Job,
    Kind,
    Noise,
    Ranks,
    Shape,
    Tracer,
    Tracing,
)
from benchmarks.grounds.original.schedule import Run, simulate

GROUND = "original"

CAUSES = {
    Kind.GPU_CLOCK: ("compute", "node"),
    Kind.THROTTLING: ("compute", "node"),
    Kind.NVLINK: ("link", "node"),
    Kind.NIC: ("link", "node"),
    Kind.RAIL: ("link", "node"),
    Kind.HOST_CPU: ("host", "node"),
    Kind.HOST_MEMORY: ("host", "node"),
    Kind.GC: ("gc", "node"),
    Kind.HEAVY_HEAD: ("stage_imbalance", "job"),
    Kind.HEAVY_STAGE: ("stage_imbalance", "job"),
    Kind.LONG_SEQUENCES: ("sequence_imbalance", "job"),
    Kind.HEAVY_REPLICA: ("sequence_imbalance", "job"),
    Kind.HOT_EXPERT: ("sequence_imbalance", "job"),
    Kind.MOVING_EXPERT: ("sequence_imbalance", "job"),
}
"""Cause and owner of what is planted; the kinds that are missing concern all ranks alike."""

SMALL = (
    Shape(dp=2),
    Shape(tp=2, pp=2, dp=2),
    Shape(pp=4),
    Shape(dp=8),
    Shape(tp=2, dp=4),
    Shape(pp=2, dp=4),
    Shape(tp=8),
    Shape(tp=2, pp=4),
    Shape(tp=4, dp=2),
    Shape(pp=8),
    Shape(pp=2, dp=2),
    Shape(pp=2),
)
MIDDLE = (
    Shape(tp=4, pp=2, dp=2),
    Shape(tp=2, pp=4, dp=2),
    Shape(tp=2, pp=2, dp=4, gpus_per_host=4),
    Shape(pp=4, dp=4),
    Shape(tp=2, dp=8),
    Shape(tp=4, pp=4, dp=2),
    Shape(dp=32),
    Shape(tp=8, dp=4),
)
LARGE = (
    Shape(tp=8, pp=2, dp=4),
    Shape(tp=4, pp=4, dp=4),
    Shape(pp=8, dp=8),
    Shape(tp=8, pp=4, dp=4),
)
ALL = SMALL + MIDDLE + LARGE
TENSOR = tuple(shape for shape in ALL if shape.tp > 1 and shape.num_ranks // shape.tp > 1)
HOST_STAGES = (Shape(tp=4, pp=4, dp=2), Shape(pp=4, dp=4, gpus_per_host=4), Shape(tp=8, pp=4))
HOST_REPLICAS = (Shape(tp=8, dp=4), Shape(tp=4, dp=8, gpus_per_host=4))
HOSTS = (*HOST_STAGES, *HOST_REPLICAS, *MIDDLE[:4], *LARGE[:3])
ACROSS = (
    Shape(tp=4, pp=4, dp=2),
    Shape(tp=8, pp=2, dp=4),
    Shape(pp=4, dp=4, gpus_per_host=4),
    Shape(tp=8, pp=4, dp=2),
    Shape(tp=4, pp=4, dp=4),
    Shape(tp=2, pp=4, dp=2, gpus_per_host=4),
)
PIPELINES = tuple(shape for shape in ALL if shape.pp > 1)
REPLICAS = tuple(shape for shape in ALL if shape.dp > 1 and shape.num_ranks > shape.dp)
EXPERTS = (Shape(pp=2, dp=4), Shape(dp=8), Shape(tp=2, pp=2, dp=4), Shape(pp=4, dp=8))

TRACINGS = (
    Tracing(tracer=Tracer.JUNE, base=True),
    Tracing(tracer=Tracer.HEAD, window=1),
    Tracing(tracer=Tracer.JUNE),
    Tracing(tracer=Tracer.JULY, base=True, window=1),
    Tracing(tracer=Tracer.JUNE, base=True, interval=10, window=5),
    Tracing(tracer=Tracer.JULY, window=1),
    Tracing(tracer=Tracer.HEAD),
    Tracing(tracer=Tracer.JUNE, interval=3, window=1),
    Tracing(tracer=Tracer.JULY, base=True),
)
SCHEDULED = tuple(tracing for tracing in TRACINGS if tracing.tracer is not Tracer.HEAD)
STEPS = (10, 24, 4, 16, 8, 40, 12, 2, 20, 60, 6)
SCALES = (1.0, 0.6, 1.6, 2.5)
_SEEDS = 10_000  # of a draw
MAX_CELLS = 900  # ranks, steps and copies of a step in one case


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hold a case's name, family and job."""

    name: str
    family: str
    job: Job


class Book:
    """Write down the recipes, with a seed of its own for each."""

    def __init__(self, first_seed: int) -> None:
        """Start with no recipe."""
        self.recipes: dict[str, Recipe] = {}
        self._seeds = count(first_seed)

    def draw(self, shape: Shape, tracings: tuple[Tracing, ...] = TRACINGS) -> Job:
        """Return a healthy job of this shape; its tracer, length and scale follow from its seed."""
        seed = next(self._seeds)
        rng = generator(seed, "recipe")
        wanted = tracings[int(rng.integers(len(tracings)))]
        if shape.num_ranks > 16 and wanted.num_copies > 2:
            wanted = replace(wanted, window=1)
        steps = STEPS[int(rng.integers(len(STEPS)))]
        cells = shape.num_ranks * (1 if wanted.base else wanted.num_copies)
        return Job(
            shape=shape,
            seed=seed,
            num_steps=max(2, min(steps, MAX_CELLS // cells)),
            num_microbatches=max(4, min(2 * shape.pp, 12)),
            layers=1 if shape.num_ranks > 32 else int(rng.integers(2, 4)),
            gpu_scale=float(rng.choice(SCALES)),
            tied_embeddings=bool(rng.integers(2)),
            tracing=wanted,
            noise=Noise(module_ratio=float(rng.uniform(0.008, 0.025))),
        )

    def add(self, family: str, what: str, job: Job) -> None:
        """Write down one recipe."""
        tracing = job.tracing
        granularity = "base" if tracing.base else "full"
        name = f"{what}-{job.shape.name()}-{tracing.tracer}-{granularity}-{job.seed}"
        self.recipes[name] = Recipe(name=name, family=family, job=job)

    def plant(self, family: str, what: str, job: Job, *effects: Effect) -> None:
        """Write down one recipe with these effects."""
        self.add(family, what, replace(job, effects=effects))


def _any_rank(job: Job, key: str = "rank") -> int:
    return int(generator(job.seed, key).integers(job.shape.num_ranks))


def _any_host(job: Job) -> int:
    return int(generator(job.seed, "host").integers(job.shape.num_hosts))


def _clocks(book: Book) -> None:
    factors = cycle((1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0))
    for shape in ALL:
        factor, job = next(factors), book.draw(shape)
        effect = Effect(kind=Kind.GPU_CLOCK, factor=factor, place=_any_rank(job))
        book.plant("gpu_clock", f"clock-{factor}", job, effect)
    for shape, factor in zip(ALL[::2], factors, strict=False):
        job = book.draw(shape)
        job = replace(job, num_steps=max(job.num_steps, 6))
        onset = 1 + job.num_steps // 2
        effect = Effect(kind=Kind.GPU_CLOCK, factor=factor, place=_any_rank(job), first_step=onset)
        book.plant("gpu_clock from an onset", f"clock-{factor}-from-{onset}", job, effect)


def _bursts(book: Book) -> None:
    periods = cycle((0.3, 6.0, 1.5))
    for shape in SMALL + MIDDLE[::2]:
        job, period = book.draw(shape), next(periods)
        job = replace(job, num_steps=max(job.num_steps, 10 if period < 6 else 24))
        effect = Effect(
            kind=Kind.THROTTLING, factor=1.3, place=_any_rank(job), share=0.2, period=period
        )
        book.plant("throttling", f"bursts-{period}", job, effect)


def _links(book: Book) -> None:
    factors = cycle((2.0, 4.0, 1.5))
    for shape in TENSOR + TENSOR[::4]:
        factor, job = next(factors), book.draw(shape)
        effect = Effect(kind=Kind.NVLINK, factor=factor, place=_any_rank(job))
        book.plant("nvlink", f"nvlink-{factor}", job, effect)
    for shape in ACROSS * 2:
        job = book.draw(shape, SCHEDULED)
        effect = Effect(kind=Kind.NIC, factor=2.0, place=_any_host(job))
        book.plant("nic", "nic", job, effect)
    for shape in ACROSS * 2:
        job = book.draw(shape, SCHEDULED)
        rail = _any_rank(job) % shape.gpus_per_host
        book.plant("rail", f"rail-{rail}", job, Effect(kind=Kind.RAIL, factor=2.0, place=rail))


def _hosts(book: Book) -> None:
    factors, launches = cycle((3.0, 6.0, 10.0)), cycle((1.0, 3.0))
    for shape in HOSTS + HOST_STAGES + HOST_REPLICAS:
        factor, job = next(factors), replace(book.draw(shape), launch_scale=next(launches))
        effect = Effect(kind=Kind.HOST_CPU, factor=factor, place=_any_host(job))
        book.plant("host_cpu", f"busy-host-{factor}", job, effect)
    shares = cycle((1.1, 1.25, 1.05))
    for shape in HOSTS + HOST_STAGES[:2]:
        share, job = next(shares), book.draw(shape)
        effect = Effect(kind=Kind.HOST_MEMORY, factor=share, place=_any_host(job), share=0.6)
        book.plant("host_memory", f"host-short-of-memory-{share}", job, effect)
    shares = cycle((1.0, 0.35))
    for shape in ALL[::3] + MIDDLE:
        share, job = next(shares), book.draw(shape)
        job = replace(job, num_steps=max(job.num_steps, 8))
        effect = Effect(kind=Kind.GC, factor=1.5, place=_any_rank(job), share=share)
        book.plant("gc", f"collections-{share}", job, effect)


def _several(book: Book) -> None:
    for shape in (*SMALL[1::2], *MIDDLE[:6], LARGE[0]):
        job = book.draw(shape)
        first = _any_rank(job)
        second = (first + 1 + _any_rank(job, "other") % (shape.num_ranks - 1)) % shape.num_ranks
        effects = (
            Effect(kind=Kind.GPU_CLOCK, factor=1.3, place=first),
            Effect(kind=Kind.GPU_CLOCK, factor=1.6, place=second),
        )
        book.plant("two faults", "two-clocks", job, *effects)
    for shape in ACROSS:
        job = book.draw(shape, SCHEDULED)
        effects = (
            Effect(kind=Kind.GPU_CLOCK, factor=1.4, place=_any_rank(job)),
            Effect(kind=Kind.NIC, factor=2.0, place=_any_host(job)),
        )
        book.plant("two faults", "clock-and-nic", job, *effects)
    imbalances = cycle(
        (Effect(kind=Kind.HEAVY_HEAD, factor=2.5), Effect(kind=Kind.LONG_SEQUENCES, factor=1.2))
    )
    for shape in PIPELINES[::2]:
        job = book.draw(shape)
        clock = Effect(kind=Kind.GPU_CLOCK, factor=1.4, place=_any_rank(job))
        book.plant("fault and imbalance", "clock-imbalance", job, clock, next(imbalances))


def _healthy(book: Book) -> None:
    for spread in (0.0, 0.01, 0.02, 0.03, 0.05):
        for shape in ALL[int(spread * 100) % 3 :: 3]:
            job = book.draw(shape)
            noise = replace(job.noise, chip_spread_ratio=spread)
            book.add(f"healthy, spread {spread:.0%}", "healthy", replace(job, noise=noise))
    for shape in SMALL[::2] + MIDDLE[::2] + LARGE[:2]:
        job = book.draw(shape)
        ratio = float(generator(job.seed, "noisy").uniform(0.04, 0.1))
        noise = replace(job.noise, module_ratio=ratio, transfer_ratio=0.25, spike_probability=0.005)
        book.add("healthy, noisy", "noisy", replace(job, noise=noise))
    for shape in SMALL[1::2] + MIDDLE[1::2] + LARGE[:2]:
        job = replace(book.draw(shape), gpu_scale=0.3, launch_scale=8.0)
        book.add("healthy, bound by hosts", "launches", job)


def _imbalances(book: Book) -> None:
    heads = cycle((1.8, 3.0, 5.0))
    for shape in PIPELINES:
        effect = Effect(kind=Kind.HEAVY_HEAD, factor=next(heads))
        book.plant("look_alike: heavy last stage", "head", book.draw(shape), effect)
    for shape in PIPELINES:
        job = book.draw(shape)
        stage = int(generator(job.seed, "stage").integers(shape.pp))
        effect = Effect(kind=Kind.HEAVY_STAGE, factor=1.08, place=stage)
        book.plant("look_alike: heavy stage", f"stage-{stage}", job, effect)
    deviations = cycle((1.15, 1.3, 1.5))
    for shape in (shape for shape in ALL if shape.dp > 1):
        effect = Effect(kind=Kind.LONG_SEQUENCES, factor=next(deviations))
        book.plant("look_alike: uneven sequences", "sequences", book.draw(shape), effect)
    extra = cycle((1.03, 1.06, 1.12, 1.3))
    for shape in REPLICAS:
        job, factor = book.draw(shape), next(extra)
        replica = int(generator(job.seed, "replica").integers(shape.dp))
        effect = Effect(kind=Kind.HEAVY_REPLICA, factor=factor, place=replica)
        book.plant("look_alike: heavy replica", f"replica-{factor}", job, effect)
    loads = cycle((1.3, 1.6, 2.0))
    for kind in (Kind.HOT_EXPERT, Kind.MOVING_EXPERT) * 2:
        for shape in EXPERTS:
            job = replace(book.draw(shape, TRACINGS[1:3] + TRACINGS[5:8]), experts=True)
            expert = int(generator(job.seed, "expert").integers(shape.dp))
            effect = Effect(kind=kind, factor=next(loads), place=expert)
            book.plant("look_alike: hot expert", kind.value, job, effect)


def _common_events(book: Book) -> None:
    every = Tracing(tracer=Tracer.JUNE, interval=5, window=5, base=True)
    for shape in SMALL[1::2] + MIDDLE[::2] + LARGE[:2]:
        job = book.draw(shape, (every, replace(every, base=False)))
        effect = Effect(kind=Kind.WARM_UP, factor=4.0)
        book.plant("look_alike: warm-up", "warm-up", job, effect)
    for shape in SMALL[::2] + MIDDLE[1::2] + LARGE[:2]:
        effect = Effect(kind=Kind.PAUSE, factor=1.1, period=3)
        book.plant("look_alike: pauses of all", "pauses", book.draw(shape), effect)
    for shape in SMALL[::2] + MIDDLE[::2] + LARGE[1:3]:
        effect = Effect(kind=Kind.SLOW_FILES, factor=5.0, share=0.15)
        book.plant("look_alike: slow files for all", "slow-files", book.draw(shape), effect)


FAMILIES: tuple[Callable[[Book], None], ...] = (
    _clocks,
    _bursts,
    _links,
    _hosts,
    _several,
    _healthy,
    _imbalances,
    _common_events,
)


@cache
def recipes(draw: int = 0) -> dict[str, Recipe]:
    """Return all recipes of a draw by name, in a fixed order."""
    book = Book(_SEEDS * draw + 1)
    for family in FAMILIES:
        family(book)
    return book.recipes


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw; what they cost is known once they are written."""
    for recipe in recipes(draw).values():
        yield Case(
            ground=GROUND,
            name=recipe.name,
            family=recipe.family,
            num_ranks=recipe.job.shape.num_ranks,
            seed=recipe.job.seed,
            draw=draw,
            planted=tuple(_truth(recipe.job, e) for e in recipe.job.effects if e.kind in CAUSES),
        )


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Simulate a case, write its files, and return what was planted with what it costs."""
    job = recipes(case.draw)[case.name].job
    calm = simulate(replace(job, effects=()), 1.0)
    run = simulate(job, calm.step_us, records=True)
    write_files(job, run, directory)
    steps = range(1, job.num_steps + 1)
    planted = []
    for effect in job.effects:
        if effect.kind not in CAUSES:
            continue
        others = tuple(e for e in job.effects if e is not effect)
        rest = simulate(replace(job, effects=others), calm.step_us) if others else calm
        planted.append(_truth(job, effect).priced(steps, run.steps_us, rest.steps_us))
    return tuple(planted)


def slowness(case: Case) -> Floats:
    """Return how many times longer each rank's passes take than on equal chips, without an effect,
    (rank, step).
    """
    job = recipes(case.draw)[case.name].job
    calm_us = simulate(replace(job, effects=()), 1.0).step_us
    planted = _pass_times(job, simulate(job, calm_us))
    return planted / write_varied(case, Variation(chip_spread_ratio=0.0), None)


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Floats:
    """Simulate the sound job of a case, varied; return its pass times, (rank, step)."""
    job = recipes(case.draw)[case.name].job
    if variation.chip_spread_ratio is not None:
        noise = replace(job.noise, chip_spread_ratio=variation.chip_spread_ratio)
        job = replace(job, noise=noise)
    calm_us = simulate(replace(job, effects=()), 1.0).step_us
    slow = Effect(kind=Kind.GPU_CLOCK, factor=variation.factor, place=variation.slow_rank)
    varied = replace(job, effects=(slow,))
    run = simulate(varied, calm_us, records=directory is not None)
    if directory is not None:
        write_files(varied, run, directory)
    return _pass_times(varied, run)


def _pass_times(job: Job, run: Run) -> Floats:
    """Return pass times by rank, (rank, step)."""
    times = np.empty((job.shape.num_ranks, job.num_steps))
    times[job.shape.grid()] = run.passes_us
    return times


def _truth(job: Job, effect: Effect) -> Planted:
    """Return what may be said about an effect without being wrong."""
    cause, owner = CAUSES[effect.kind]
    ranks = _ranks_of(job, effect)
    hosts = set((ranks // job.shape.gpus_per_host).tolist())
    is_host = effect.kind in {Kind.HOST_CPU, Kind.HOST_MEMORY, Kind.NIC} and len(hosts) == 1
    stalls = effect.kind in {Kind.HOST_MEMORY, Kind.GC}
    return Planted(
        kind=effect.kind.value,
        cause=cause,
        owner=owner,
        ranks=tuple(int(rank) for rank in ranks),
        host=f"host-{hosts.pop()}" if is_host else "",
        factor=1.0 if stalls else effect.factor,
        first_iteration=effect.first_step,
        share_of_time=effect.share,
    )


def _ranks_of(job: Job, effect: Effect) -> Ranks:
    """Return the ranks that an effect concerns, or that nobody could tell from them."""
    shape, grid, place = job.shape, job.shape.grid(), effect.place
    ranks = grid
    match effect.kind:
        case Kind.GPU_CLOCK | Kind.THROTTLING | Kind.GC:
            ranks = grid[grid == place]
        case Kind.HOST_CPU | Kind.HOST_MEMORY:
            ranks = grid[job.shape.hosts() == place]
        case Kind.RAIL:
            ranks = grid[grid % shape.gpus_per_host == place]
        case Kind.NVLINK | Kind.NIC:
            ranks = _common_to_slow_links(job, effect)
        case Kind.HEAVY_HEAD:
            ranks = grid[-1]
        case Kind.HEAVY_STAGE:
            ranks = grid[place]
        case Kind.HEAVY_REPLICA | Kind.HOT_EXPERT:
            ranks = grid[:, place]
    return np.sort(ranks, axis=None)


def _common_to_slow_links(job: Job, effect: Effect) -> Ranks:
    """Return the ranks (or all ranks of the hosts) that every slowed transfer has in common.

    With TP2 PP2 DP2, the slow link of rank 3 slows the tensor group {2, 3} and the pair {3, 7}: it
    is rank 3. With TP2 DP4 only the tensor group shows it, and nobody can tell which of both it is.
    """
    grid, shape = job.shape.grid(), job.shape
    kinds: list[Ranks] = []
    if shape.tp > 1:
        kinds.append(grid.reshape(-1, shape.tp))
    if shape.pp > 1 and job.tracing.tracer is not Tracer.HEAD:
        kinds.append(np.stack([grid[:-1].ravel(), grid[1:].ravel()], axis=-1))
        kinds.append(np.moveaxis(grid, 1, -1).reshape(-1, shape.dp))
    common = set(grid.ravel().tolist())
    for members in kinds:
        slow = link_slowness(job, members, (effect,)).max(axis=-1) > 1
        for group in members[slow]:
            if effect.kind is Kind.NIC:
                hosts = np.isin(grid // shape.gpus_per_host, group // shape.gpus_per_host)
                common &= set(grid[hosts].tolist())
            else:
                common &= set(group.tolist())
    return np.array(sorted(common))
