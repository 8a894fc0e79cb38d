"""Choose jobs without a fault of hardware: healthy ones, and those that look as if they had one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.grounds.depot.faults import Fault
from benchmarks.grounds.depot.menus import Menu, microbatch_s
from benchmarks.grounds.depot.scenarios import Scenario, everyone, of_the_job, ranks_of_stage

DEEP = ("stages", "all")
BROAD = ("replicas", "tensor", "experts", "shards")


def healthy(spread: float) -> Callable[[Menu], Scenario]:
    """Return who chooses healthy jobs whose chips differ by so much."""

    def choose(menu: Menu) -> Scenario:
        return Scenario(job=menu.job(menu.layout(), chip_spread_ratio=spread))

    return choose


def noisy_hosts(menu: Menu) -> Scenario:
    """Choose a job whose hosts do all kinds of other things, now here, now there."""
    job = menu.job(
        menu.layout(), host_noise_ratio=menu.between(0.25, 0.5),
        stalls_per_s=menu.between(2.0, 12.0), stall_s=menu.between(0.002, 0.008),
        kernel_noise_ratio=0.02,
    )  # fmt: skip
    return Scenario(job=job)


def bound_by_hosts(menu: Menu) -> Scenario:
    """Choose a job of small kernels that takes as long as its launches."""
    job = menu.job(
        menu.layout(), hidden=menu.one((1024, 1536)), sequence=menu.one((512, 1024)),
        launch_ratio=menu.between(1.2, 2.5), host_noise_ratio=menu.between(0.1, 0.3),
        vocabulary=16_000,
    )  # fmt: skip
    return Scenario(job=job)


def heavy_stage(menu: Menu) -> Scenario:
    """Choose a pipeline whose first or last stage has more to do, or any other one."""
    job = menu.job(menu.layout(DEEP), iterations=(3, 24))
    parts = job.pp * job.vpp
    part = menu.one((parts - 1, parts - 1, 0, int(menu.rng.integers(parts))))
    if part == parts - 1 and menu.chance(0.5):
        heavy = replace(job, vocabulary=menu.one((100_000, 152_000, 256_000)))
        factor = microbatch_s(heavy) / microbatch_s(job)
    else:
        factor = menu.between(1.15, 2.0)
        heavy = replace(job, heavy=((part, factor),))
    own = of_the_job("heavy_stage", "stage_imbalance", ranks_of_stage(job, part % job.pp), factor)
    return Scenario(job=heavy, own=own, without_own=job)


def unequal_layers(menu: Menu) -> Scenario:
    """Choose a pipeline whose layers do not divide by its stages."""
    job = menu.job(menu.layout(DEEP), iterations=(3, 24))
    layers = list(job.layers)
    place = int(menu.rng.integers(len(layers) - 1))
    layers[place] += menu.one((1, 1, 2))
    stage = place % job.pp
    held = sum(layers[stage :: job.pp]) / sum(job.layers[stage :: job.pp])
    own = of_the_job("heavy_stage", "stage_imbalance", ranks_of_stage(job, stage), held)
    return Scenario(job=replace(job, layers=tuple(layers)), own=own, without_own=job)


def uneven_lengths(lengths: str) -> Callable[[Menu], Scenario]:
    """Return who chooses jobs whose microbatches are not equally long."""

    def choose(menu: Menu) -> Scenario:
        spread = menu.between(0.2, 0.6)
        layout = menu.layout(("replicas", "tensor", "stages", "all", "contexts", "shards"))
        sequence = menu.one((4096, 8192))
        job = menu.job(layout, lengths=lengths, length_spread_ratio=spread, sequence=sequence)
        own = of_the_job("long_sequences", "sequence_imbalance", everyone(job), 1 + spread)
        return Scenario(job=job, own=own, without_own=replace(job, length_spread_ratio=0.0))

    return choose


def long_replica(menu: Menu) -> Scenario:
    """Choose a job one replica of which reads longer documents than the others, always."""
    while True:
        layout = menu.layout(("replicas", "tensor", "stages", "all"))
        if layout.get("dp", 1) > 1:
            break
    factor = menu.between(1.1, 1.7)
    job = menu.job(layout, long_replica=factor)
    ranks = tuple(rank for rank in everyone(job) if job.replica_of(rank) == job.dp - 1)
    own = of_the_job("long_sequences", "sequence_imbalance", ranks, factor)
    without = replace(job, long_replica=1.0, fill_ratio=1 / factor)
    return Scenario(job=job, own=own, without_own=without)


def hot_expert(menu: Menu) -> Scenario:
    """Choose a job whose router prefers the experts of some ranks."""
    factor = menu.between(1.2, 2.2)
    job = menu.job(
        menu.layout(("experts",)), hot_expert=factor, expert_spread_ratio=menu.between(0.03, 0.15)
    )
    ranks = tuple(rank for rank in everyone(job) if job.replica_of(rank) % job.ep == 0)
    own = of_the_job("hot_expert", "sequence_imbalance", ranks, factor)
    return Scenario(job=job, own=own, without_own=replace(job, hot_expert=1.0))


def warming_up(menu: Menu) -> Scenario:
    """Choose a job that is traced from its first iteration on, for a short time."""
    job = menu.job(menu.layout(), first_iteration=1, warm_up=menu.between(4, 12), iterations=(2, 8))
    return Scenario(job=job)


def evaluating(menu: Menu) -> Scenario:
    """Choose a job that evaluates in the midst of what is traced."""
    job = menu.job(menu.layout(), iterations=(6, 20), evaluates_every=menu.one((3, 5, 8)))
    return Scenario(job=job)


def saving(menu: Menu) -> Scenario:
    """Choose a job that saves checkpoints in the midst of what is traced."""
    job = menu.job(
        menu.layout(), iterations=(6, 20), saves_every=menu.one((3, 5, 8)), granularity="full"
    )
    return Scenario(job=job)


def collecting(menu: Menu) -> Scenario:
    """Choose a job whose processes all collect garbage, each in its turn or all at once."""
    job = menu.job(
        menu.layout(BROAD + DEEP), iterations=(8, 24), granularity="full",
        collects=menu.one(("turns", "turns", "together")), collect_s=menu.between(0.03, 0.25),
    )  # fmt: skip
    return Scenario(job=job)


def one_collector(menu: Menu) -> Scenario:
    """Choose a job one process of which has more to collect than its peers."""
    job = menu.job(menu.layout(), iterations=(5, 24), granularity="full")
    pause_s = menu.between(0.3, 2.5) * microbatch_s(job) * job.microbatches / 2
    fault = Fault(
        kind="gc", ranks=(int(menu.rng.integers(job.num_ranks)),),
        seconds=round(max(0.02, pause_s), 4),
    )  # fmt: skip
    return Scenario(job=job, faults=(fault,))


def logging_rank(menu: Menu) -> Scenario:
    """Choose a job whose first rank writes logs between iterations."""
    return Scenario(job=menu.job(menu.layout(), log_s=menu.between(0.02, 0.15)))


def recomputing(menu: Menu) -> Scenario:
    """Choose a job that repeats its forward passes."""
    layout = menu.layout(("replicas", "tensor", "all", "stages"))
    return Scenario(job=menu.job(layout, recompute=True, granularity="full"))


def shared_storage(menu: Menu) -> Scenario:
    """Choose a job whose storage is now and then slow for all of its hosts."""
    layout = menu.layout(("replicas", "tensor", "all", "stages", "shards"))
    job = menu.job(
        layout, iterations=(6, 30), storage_jams=menu.between(0.2, 0.5),
        load_noise_ratio=menu.between(0.3, 0.8), num_prefetched=2,
    )  # fmt: skip
    return Scenario(job=replace(job, load_s=menu.between(0.3, 0.7) * microbatch_s(job)))


def congested(menu: Menu) -> Scenario:
    """Choose a job in whose network everybody's transfers meet others."""
    job = menu.job(
        menu.layout(hosts=2), iterations=(4, 30), nic_noise_ratio=menu.between(0.08, 0.3),
        nic_jam_share=menu.between(0.03, 0.25), nic_jam_factor=menu.between(1.5, 4.0),
    )  # fmt: skip
    return Scenario(job=job)


def wandering_clocks(menu: Menu) -> Scenario:
    """Choose a job whose hosts' clocks are far apart and drift."""
    job = menu.job(
        menu.layout(hosts=2), iterations=(4, 30), clock_error_s=menu.one((0.02, 0.2, 2.0)),
        clock_drift_ppm=menu.one((30.0, 80.0)),
    )  # fmt: skip
    return Scenario(job=job)
