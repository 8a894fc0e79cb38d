"""Draw jobs as users start them: layouts, models, trainers, windows, and a cluster's steadiness."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.grounds.rack.hardware import draw_rack
from benchmarks.grounds.rack.job import Habits, Job, Model, Tracing, Weather
from benchmarks.grounds.rack.parts import iteration_s
from megascan.schema import Granularity
from megascan.topology import Layout

_Sizes = dict[str, int]

_LAYOUTS: tuple[_Sizes, ...] = (
    {"dp": 4},
    {"tp": 2, "dp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 4},
    {"dp": 8},
    {"tp": 2, "dp": 4},
    {"tp": 4, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
    {"pp": 2, "dp": 4},
    {"pp": 4, "dp": 2},
    {"pp": 2, "dp": 4, "vpp": 2},
    {"tp": 2, "cp": 2, "dp": 2},
    {"dp": 8, "ep": 4},
    {"pp": 2, "dp": 4, "ep": 4},
    {"dp": 16},
    {"tp": 2, "dp": 8},
    {"tp": 4, "dp": 4},
    {"tp": 8, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 4},
    {"tp": 4, "pp": 2, "dp": 2},
    {"tp": 2, "pp": 4, "dp": 2},
    {"pp": 4, "dp": 4},
    {"pp": 4, "dp": 4, "vpp": 2},
    {"tp": 2, "cp": 2, "dp": 4},
    {"dp": 16, "ep": 8},
    {"tp": 2, "pp": 2, "dp": 4, "ep": 4},
    {"tp": 8, "dp": 4},
    {"tp": 4, "dp": 8},
    {"tp": 8, "pp": 2, "dp": 2},
    {"tp": 4, "pp": 2, "dp": 4},
    {"tp": 4, "pp": 4, "dp": 2},
    {"tp": 2, "pp": 4, "dp": 4},
    {"tp": 2, "pp": 4, "dp": 4, "vpp": 2},
    {"pp": 8, "dp": 4},
    {"tp": 4, "cp": 2, "dp": 4},
    {"dp": 32, "ep": 8},
    {"pp": 4, "dp": 8, "ep": 8},
    {"tp": 8, "pp": 2, "dp": 4},
    {"tp": 4, "pp": 4, "dp": 4},
    {"tp": 2, "pp": 4, "dp": 8},
)
_WEIGHT = {4: 1.6, 8: 3.2, 16: 2.7, 32: 2.0, 64: 1.0}
"""How often layouts of so many ranks are drawn, each."""
_WINDOWS = (
    (5, 2, 2),
    (5, 2, 3),
    (5, 2, 4),
    (3, 3, 1),
    (100, 3, 2),
    (10, 10, 1),
    (200, 10, 1),
    (20, 20, 1),
    (10, 5, 3),
    (40, 40, 1),
)
"""Interval, window, how many."""
_HIDDEN = {
    1: (2048, 2560, 3072, 4096),
    2: (3072, 4096, 5120),
    4: (4096, 6144, 8192),
    8: (8192, 10_240, 12_288),
}
"""Model widths by tensor parallelism: what is split is large enough to be."""
_MOST_SPANS = 45_000
_MOST_STEPS = 26_000
"""Of a simulation, all stages together: what writing a whole draw takes is bounded."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a case needs of its job; fields of None are drawn.

    `axes` must be larger than 1; `settled` keeps the run's first iterations out of the trace.
    """

    axes: tuple[str, ...] = ()
    least_hosts: int = 1
    most_ranks: int = 64
    least_ranks: int = 4
    least_iterations: int = 1
    settled: bool | None = None
    granularity: Granularity | None = None
    chip_spread: float | None = None
    is_small: bool | None = None  # a model that its hosts bound
    is_packed: bool | None = None
    offloads: bool | None = None
    vocabulary: int | None = None
    network_tail: float | None = None
    loads_much: bool | None = None  # a loader that is busy most of the time
    collects: bool | None = None
    saves_every: int | None = None
    clock_bend_ppm: float | None = None
    is_contiguous: bool | None = None
    extra_layers: int = 0  # of the last stage
    missing: int = 0


def draw_job(seed: int, wish: Wish) -> Job:
    """Draw a job that grants a wish."""
    draws = np.random.default_rng([seed, 0])
    layout, gpus_per_host = _layout(draws, wish)
    rack = draw_rack(draws, layout.world_size, gpus_per_host)
    is_small = _or(wish.is_small, draws.random() < 0.08)
    model = _model(draws, layout, wish, is_small=is_small)
    habits = _habits(draws, layout, wish, is_small=is_small)
    weather = _weather(draws, wish)
    tracing = _tracing(draws, layout, wish)
    job = Job(
        seed=seed,
        layout=layout,
        rack=rack,
        model=model,
        habits=habits,
        tracing=tracing,
        weather=weather,
    )
    job = _smaller(job, wish)
    return _with_paces(draws, job, wish)


def _or(wanted: bool | None, drawn: bool | np.bool_) -> bool:
    return bool(drawn) if wanted is None else wanted


def _layout(draws: np.random.Generator, wish: Wish) -> tuple[Layout, int]:
    found = []
    for sizes in _LAYOUTS:
        layout = Layout(**sizes)  # type: ignore[arg-type]  # sizes only
        num = layout.world_size
        for gpus in (4, 8):
            fits = num % gpus == 0 and layout.tp <= gpus and num // gpus >= wish.least_hosts
            wanted = wish.least_ranks <= num <= wish.most_ranks
            wanted &= layout.vpp == 1 or not wish.extra_layers
            if fits and wanted and all(getattr(layout, axis) > 1 for axis in wish.axes):
                found.append((layout, gpus, _WEIGHT[num]))
    weights = np.array([one[2] for one in found])
    layout, gpus, _ = found[int(draws.choice(len(found), p=weights / weights.sum()))]
    return layout, gpus


def _model(draws: np.random.Generator, layout: Layout, wish: Wish, *, is_small: bool) -> Model:
    hidden = int(draws.choice(_HIDDEN[layout.tp]))
    sequence = int(draws.choice((4096, 8192), p=(0.65, 0.35))) * layout.cp
    if is_small:
        hidden, sequence = 256 * layout.tp + int(draws.choice((512, 768))), 1024 * layout.cp
    per_chunk = int(draws.choice((2, 3, 4))) if layout.pp > 1 else int(draws.choice((3, 4, 6, 8)))
    if layout.tp > 1:
        per_chunk = min(per_chunk, 4)
    sizes = [[per_chunk] * layout.vpp for _ in range(layout.pp)]
    if wish.extra_layers:
        sizes[-1][-1] += wish.extra_layers
    elif layout.pp > 1 and layout.vpp == 1 and per_chunk > 2 and draws.random() < 0.5:
        sizes[-1][-1] -= 1  # room for the output layer
    layers: list[list[tuple[int, ...]]] = [[] for _ in range(layout.pp)]
    number = 1
    for chunk in range(layout.vpp):
        for stage in range(layout.pp):
            own = sizes[stage][chunk]
            layers[stage].append(tuple(range(number, number + own)))
            number += own
    vocabulary = wish.vocabulary or int(draws.choice((32_000, 50_304), p=(0.7, 0.3)))
    return Model(
        hidden=hidden,
        ffn=round(hidden * 2.6875 / 256) * 256,
        kv_share=float(draws.choice((1.0, 0.25))),
        vocabulary=vocabulary,
        sequence=sequence,
        batch=int(draws.choice((1, 2))) if sequence < 8192 else 1,
        num_experts=layout.ep * int(draws.choice((1, 2))) if layout.ep > 1 else 0,
        experts_a_token=2,
        moe_every=int(draws.choice((1, 2))),
        layers=tuple(map(tuple, layers)),
    )


def _habits(draws: np.random.Generator, layout: Layout, wish: Wish, *, is_small: bool) -> Habits:
    batches = int(draws.choice((1, 2, 4))) * layout.pp if layout.pp > 1 else 0
    batches = min(batches, 16) or int(draws.choice((2, 4, 6, 8)))
    distributed = bool(draws.random() < 0.6) and layout.dp * layout.cp > 1
    overlaps = bool(draws.random() < 0.55)
    is_bound = layout.vpp == 1 and bool(draws.random() < (0.85 if layout.tp > 1 else 0.15))
    offloads = _or(wish.offloads, draws.random() < 0.04)
    collects = _or(wish.collects, draws.random() < 0.15)
    return Habits(
        num_microbatches=batches,
        sequence_parallel=layout.tp > 1 and (layout.ep > 1 or bool(draws.random() < 0.7)),
        recompute=str(draws.choice(("none", "selective", "full"), p=(0.55, 0.25, 0.2))),
        distributed_optimizer=distributed,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=distributed and overlaps and bool(draws.random() < 0.5),
        num_buckets=1 if is_bound and overlaps else int(draws.choice((1, 2, 3))),
        gradient_bytes=int(draws.choice((2, 4))),
        offloads_optimizer=offloads,
        reduces_loss_each_microbatch=bool(draws.random() < 0.3),
        log_interval=int(draws.choice((1, 1, 5, 10))),
        counts_tokens=bool(draws.random() < 0.4),
        ends_are_bounds=is_bound,
        is_packed=_or(wish.is_packed, draws.random() < 0.15),
        num_workers=int(draws.choice((2, 4, 8))),
        prefetch=2,
        prepares_s=0.0,
        launch_s=float(draws.uniform(9e-6, 18e-6)) * (1.4 if is_small else 1.0),
        collects_every=int(draws.choice((3, 5, 8))) if collects else 0,
        collection_s=0.0,
        collects_together=bool(draws.random() < 0.75),
        saves_every=wish.saves_every or 0,
        save_s=float(draws.uniform(0.8, 6.0)),
        evaluates_every=int(draws.choice((0, 0, 0, 4, 10))),
        evaluation_s=float(draws.uniform(1.0, 6.0)),
    )


def _weather(draws: np.random.Generator, wish: Wish) -> Weather:
    spread = float(draws.uniform(0.0, 0.04)) if wish.chip_spread is None else wish.chip_spread
    offset = float(draws.choice((5e-5, 1e-3, 2e-2), p=(0.4, 0.4, 0.2)))
    tail = float(draws.uniform(0.01, 0.06)) if wish.network_tail is None else wish.network_tail
    return Weather(
        chip_spread=spread,
        chip_wander=float(draws.uniform(0.0008, 0.004)),
        kernel_tail=float(draws.uniform(0.002, 0.008)),
        warming=float(draws.uniform(0.0, 0.015)),
        launch_spread=float(draws.uniform(0.01, 0.05)),
        launch_tail=float(draws.uniform(0.01, 0.05)),
        detour_chance=float(draws.uniform(0.001, 0.02)),
        network_tail=tail,
        network_wander=float(draws.uniform(0.01, 0.05)) + 0.5 * max(0.0, tail - 0.06),
        clock_offset_s=offset,
        clock_drift_ppm=float(draws.uniform(0.5, 15.0)),
        clock_bend_ppm=0.2 if wish.clock_bend_ppm is None else wish.clock_bend_ppm,
    )


def _tracing(draws: np.random.Generator, layout: Layout, wish: Wish) -> Tracing:
    fitting = [
        one
        for one in _WINDOWS
        if one[1] * one[2] >= wish.least_iterations
        and (not wish.is_contiguous or (one[2] == 1 or one[0] == one[1]))
    ]
    interval, window, count = fitting[int(draws.integers(len(fitting)))]
    is_settled = _or(wish.settled, draws.random() < 0.5)
    is_full = draws.random() < 0.78
    drawn = Granularity.FULL if is_full else Granularity.BASE
    missing = draws.choice(layout.world_size, wish.missing, replace=False)
    return Tracing(
        granularity=wish.granularity or drawn,
        interval=interval,
        window=window,
        num_windows=count,
        first_window=int(draws.integers(4, 60)) if is_settled else 0,
        layer_stride=2 if draws.random() < 0.12 else 1,
        compress=bool(draws.random() < 0.25),
        has_counters=bool(draws.random() < 0.5),
        missing=tuple(sorted(int(rank) for rank in missing)),
    )


def _spans_an_iteration(job: Job) -> float:
    """Return about how many spans an iteration has."""
    layout, habits = job.layout, job.habits
    layers = len(job.model.layers[0][0])
    of_layer = 6.0
    if layout.tp > 1:
        of_layer += 10.0 if habits.sequence_parallel else 6.0
    of_layer += 2.0 * (layout.cp > 1) + 4.0 * (layout.ep > 1) + 5.0 * (habits.recompute == "full")
    if job.tracing.granularity is Granularity.BASE:
        of_layer = 0.0
    of_pass = layers * of_layer + 7.0
    return job.num_ranks * (habits.num_microbatches * layout.vpp * of_pass + 12.0)


def _steps_an_iteration(job: Job) -> float:
    """Return about how many steps a simulated iteration takes."""
    layers = sum(len(chunk) for stage in job.model.layers for chunk in stage)
    of_layer = 13.0 + 9.0 * (job.layout.tp > 1) + 6.0 * (job.model.num_experts > 0)
    return job.habits.num_microbatches * (layers * of_layer + 12.0 * job.num_stages)


def _smaller(job: Job, wish: Wish) -> Job:
    """Return the job with fewer microbatches, and then fewer iterations, where files got large."""
    habits, tracing = job.habits, job.tracing
    least = max(2, job.layout.pp)

    def is_large() -> bool:
        num = len(job.tracing.iterations)
        spans, steps = _spans_an_iteration(job), _steps_an_iteration(job)
        return spans * num > _MOST_SPANS or steps * num > _MOST_STEPS

    while is_large() and habits.num_microbatches >= 2 * least:
        habits = replace(habits, num_microbatches=habits.num_microbatches // 2)
        job = replace(job, habits=habits)
    while is_large() and tracing.window * tracing.num_windows > max(4, wish.least_iterations):
        if tracing.num_windows > 1:
            tracing = replace(tracing, num_windows=tracing.num_windows - 1)
        else:
            window = max(3, wish.least_iterations, tracing.window * 3 // 4)
            if window == tracing.window:
                break
            is_whole = tracing.interval == tracing.window
            interval = window if is_whole else tracing.interval
            tracing = replace(tracing, window=window, interval=interval)
        job = replace(job, tracing=tracing)
    return job


def _with_paces(draws: np.random.Generator, job: Job, wish: Wish) -> Job:
    """Return the job with workers that are busy for some share of the time, and a collector whose
    pauses are some share of an iteration.
    """
    is_busy = _or(wish.loads_much, draws.random() < 0.3)
    share = float(draws.uniform(0.6, 0.85) if is_busy else draws.uniform(0.1, 0.5))
    took_s = iteration_s(job)
    habits = replace(
        job.habits,
        prepares_s=share * job.habits.num_workers * took_s / job.habits.num_microbatches,
        collection_s=float(draws.uniform(0.03, 0.15)) * took_s,
    )
    return replace(job, habits=habits)
