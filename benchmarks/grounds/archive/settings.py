"""Draw the surroundings of a job: layout, model, cluster and how it was traced.

Sizes of files bound the rest: a job of many ranks has fewer layers, microbatches and iterations in
its files, and of the largest ones only the schedule was traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.grounds.archive.costs import USUAL_VOCABULARY, layer_of, output_of
from benchmarks.grounds.archive.job import (
    CHIPS,
    Chip,
    Habits,
    Job,
    Layout,
    Model,
    Shape,
    Site,
    Tracer,
)

MOST_RECORDS = 80_000
LEAST_ITERATIONS, MOST_ITERATIONS = 5, 20
COPIES = {Tracer.JUNE: 1, Tracer.JULY: 2, Tracer.HEAD: 2}


LAYOUTS = tuple(
    Layout(*sizes)
    for sizes in (
        (2, 2, 2, 4),
        (4, 2, 2, 8),
        (2, 2, 4, 4),
        (4, 2, 4, 8),
        (2, 4, 2, 4),
        (1, 2, 4, 4),
        (2, 4, 4, 8),
        (8, 2, 2, 8),
        (1, 4, 4, 4),
        (4, 4, 4, 8),
        (2, 2, 4, 8),
        (2, 4, 8, 8),
        (4, 2, 8, 8),
        (8, 4, 2, 8),
        (2, 4, 2, 2),
        (4, 2, 4, 4),
    )
)
"""Pipelines with replicas, which most jobs are."""
FLAT = tuple(Layout(*sizes) for sizes in ((4, 1, 4, 4), (2, 1, 4, 8), (8, 1, 4, 8), (4, 1, 2, 4)))
"""One stage: the original traced forward passes, but neither backward passes nor gradients."""
LONELY = tuple(Layout(*sizes) for sizes in ((1, 4, 1, 4), (1, 8, 1, 8), (1, 4, 1, 2), (1, 8, 1, 4)))
"""Pipelines and nothing else: nobody does the same work."""
SMALL = tuple(Layout(*sizes) for sizes in ((2, 2, 1, 4), (2, 1, 2, 4), (1, 2, 2, 4), (1, 4, 1, 4)))


@dataclass(frozen=True, kw_only=True)
class Wish:
    """State what a family asks of its surroundings; None: whatever is drawn."""

    spread: float | None = None
    most_spread: float = 0.03
    tracers: tuple[Tracer, ...] = (Tracer.JUNE, Tracer.JUNE, Tracer.JULY, Tracer.JULY)
    is_small: bool = False  # so small that the host's launches decide
    least_iterations: int = LEAST_ITERATIONS
    most_iterations: int = MOST_ITERATIONS
    has_rails: bool | None = None
    is_noisy: bool = False
    has_nvlink: bool = False


def _site(rng: np.random.Generator, wish: Wish, layout: Layout) -> Site:
    spread = float(rng.choice([0.003, 0.006, 0.01, 0.02, 0.03]))
    noise = 3.0 if wish.is_noisy else 1.0
    chip = CHIPS[int(rng.integers(len(CHIPS) - wish.has_nvlink))]  # the last one has none
    rails = bool(rng.random() < 0.65) if wish.has_rails is None else wish.has_rails
    per_nic = float(rng.choice([11.0, 22.0, 43.0]))  # GB/s that 100 to 400 Gbit/s give
    nics = layout.gpus_per_host if rails else max(layout.gpus_per_host // 4, 1)
    return Site(
        chip=chip,
        chip_spread=min(spread, wish.most_spread) if wish.spread is None else wish.spread,
        wander=float(rng.uniform(0.0015, 0.005)),
        operation_cv=float(rng.uniform(0.008, 0.02)) * noise,
        rank_cv=float(rng.uniform(0.001, 0.003)) * noise,
        host_cv=float(rng.uniform(0.001, 0.004)) * noise,
        launch_us=float(rng.uniform(5.0, 9.0)),
        launch_cv=float(rng.uniform(0.04, 0.1)) * (1.8 if wish.is_noisy else 1),
        load_us=float(rng.uniform(300, 1000)),
        nic_gbps=per_nic * nics,
        nics_per_host=nics,
        transfer_cv=float(rng.uniform(0.02, 0.05)),
        hiccup_chance=0.015 if wish.is_noisy else 0.002,
    )


def _model(rng: np.random.Generator, wish: Wish, layout: Layout, site: Site) -> Model:
    sizes = (768, 1024, 1280) if wish.is_small else (3072, 4096, 5120, 6144, 8192)
    hidden = (
        int(rng.choice(sizes)) if wish.is_small else int(rng.choice(sizes[: 2 + layout.tp // 2]))
    )
    least = max(4, layout.pp)
    return Model(
        hidden=max(hidden, 128 * layout.tp),
        sequence=int(rng.choice([512, 1024])) if wish.is_small else 2048,
        samples=1
        if wish.is_small
        else int(rng.choice([1, 2] if site.chip.tflops < 150 else [2, 4])),
        vocabulary=USUAL_VOCABULARY,
        num_microbatches=int(rng.integers(least, max(least + 1, 17))),
    )


def records_of(shape: Shape, model: Model, habits: Habits) -> float:
    """Return about how many records one iteration has in all files."""
    layers = sum(shape.layers) / shape.pp
    of_a_pass = 8 * layers + 9 if habits.has_layers else 2 * layers + 7
    return 2 * COPIES[habits.tracer] * shape.num_ranks * of_a_pass * model.num_microbatches


def _layers(num: int, num_stages: int, output_layers: int) -> tuple[int, ...]:
    """Return the layers of all stages: the last one has as many less as its output layer weighs."""
    less = min(output_layers, num - 1)
    return tuple(num - less * (at == num_stages - 1 > 0) for at in range(num_stages))


def _output_layers(chip: Chip, model: Model, tp: int) -> int:
    """Return as how many layers the output layer counts."""
    output, layer = output_of(chip, model, tp, model.vocabulary), layer_of(chip, model, tp).whole()
    return max(1, round(output.alone_us / layer.alone_us))


def _fitted(
    shape: Shape, model: Model, habits: Habits, num: int, *, mutes: bool
) -> tuple[Model, Habits]:
    """Have fewer microbatches until `num` iterations fit into small files, or a coarser trace:
    where 8 microbatches are too many if it `mutes` early, else where 4 are.
    """
    least = max(4, shape.pp)
    early = max(least, 8) if mutes else least
    while num * records_of(shape, model, habits) > MOST_RECORDS:
        if model.num_microbatches > early:
            model = replace(model, num_microbatches=model.num_microbatches - 1)
        elif habits.has_layers and habits.tracer is Tracer.JULY and shape.pp > 1:
            habits = replace(habits, has_layers=False)
        elif model.num_microbatches > least:
            model = replace(model, num_microbatches=model.num_microbatches - 1)
        else:
            break
    return model, habits


def draw_job(seed: int, layout: Layout, wish: Wish) -> Job:
    """Draw a sound job on a layout."""
    rng = np.random.default_rng([seed, 1])
    site = _site(rng, wish, layout)
    model = _model(rng, wish, layout, site)
    tracer = wish.tracers[int(rng.integers(len(wish.tracers)))]
    if tracer is Tracer.JUNE and layout.num_ranks > 32:
        tracer = Tracer.JULY
    most = 6 if layout.num_ranks <= 8 else 4 if tracer is Tracer.JULY else 3
    num_layers = int(rng.integers(2 + (layout.pp > 1), most + 1)) if layout.num_ranks <= 32 else 2
    shape = Shape(
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        gpus_per_host=layout.gpus_per_host,
        layers=_layers(num_layers, layout.pp, _output_layers(site.chip, model, layout.tp)),
    )
    habits = Habits(
        tracer=tracer,
        has_layers=not (tracer is Tracer.JULY and layout.pp > 1 and rng.random() < 0.25),
        interval=int(rng.choice([2, 5, 10])),
        overlaps_gradients=bool(rng.random() < 0.6),
        warms_up=float(rng.uniform(1.0, 1.6)),
        heats_up=float(rng.uniform(0, 0.004)),
    )
    usual = min(max(8, wish.least_iterations), wish.most_iterations)
    model, habits = _fitted(shape, model, habits, usual, mutes=bool(rng.random() < 0.5))
    wanted = int(rng.integers(usual, min(MOST_ITERATIONS, wish.most_iterations) + 1))
    room = int(MOST_RECORDS / records_of(shape, model, habits))
    num = max(min(wanted, room), wish.least_iterations)
    return Job(seed=seed, shape=shape, model=model, site=site, habits=habits, num_iterations=num)
