"""Which jobs there are: families of sound jobs, look-alikes and faults, drawn by a draw's seeds.

Layouts and sizes are those that small and middle-sized Megatron jobs have; models are cut to a few
layers a stage, as what follows layer by layer only repeats. A link's fault is planted where other
traffic of the same ranks can tell whose it is, but for the families `... in one ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks.grounds.foundry.faults import Fault, rail_of
from benchmarks.grounds.foundry.hardware import A100, H100, H200, PCIE_BYTES, Machines
from benchmarks.grounds.foundry.jobs import Job
from benchmarks.grounds.ground import Case, Planted

GROUND = "foundry"
MOST_OPERATIONS = 110_000  # of a job, all ranks and iterations
Luck = np.random.Generator
Sizes = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """A job, what is at fault in it, and what it would be without its own peculiarity."""

    job: Job
    faults: tuple[Fault, ...] = ()
    own: Planted | None = None  # a cause of the job
    without_own: Job | None = None

    @property
    def planted(self) -> tuple[Planted, ...]:
        """Return the truths, not priced yet."""
        own = (self.own,) if self.own else ()
        return (*(fault.planted() for fault in self.faults), *own)


ANY: tuple[Sizes, ...] = (
    {"dp": 2}, {"dp": 4}, {"dp": 8}, {"dp": 16}, {"dp": 8, "recompute": "full"},
    {"tp": 2, "dp": 4}, {"tp": 4, "dp": 4}, {"tp": 8, "dp": 2}, {"tp": 4, "dp": 2, "pp": 2},
    {"pp": 2, "dp": 4}, {"pp": 4, "dp": 2}, {"pp": 4, "dp": 4}, {"pp": 8, "dp": 2},
    {"pp": 4, "vpp": 2, "dp": 2}, {"pp": 2, "vpp": 2, "dp": 4, "tp": 2},
    {"tp": 2, "pp": 4, "dp": 2}, {"tp": 2, "pp": 2, "dp": 4}, {"tp": 4, "pp": 2, "dp": 4},
    {"tp": 2, "cp": 2, "dp": 2, "sequence": 16384}, {"cp": 2, "dp": 4, "pp": 2, "sequence": 8192},
    {"dp": 8, "ep": 4, "experts": 16}, {"dp": 16, "ep": 8, "experts": 32},
    {"dp": 4, "pp": 2, "ep": 4, "experts": 16},
    {"tp": 4, "pp": 4, "dp": 2, "recompute": "selective"}, {"dp": 32}, {"tp": 8, "pp": 2, "dp": 4},
)  # fmt: skip
SINGLE_STAGE = tuple(each for each in ANY if each.get("pp", 1) == 1)
WITH_REPLICAS = tuple(each for each in ANY if each.get("dp", 1) >= 4 and not each.get("experts"))
STAGES = tuple(each for each in ANY if each.get("pp", 1) > 1 and each.get("vpp", 1) == 1)
EXPERTS = tuple(each for each in ANY if each.get("experts"))
LINKED: tuple[Sizes, ...] = (
    {"tp": 2, "dp": 4}, {"tp": 4, "dp": 2},
    {"tp": 2, "dp": 4, "pp": 2}, {"tp": 4, "dp": 2, "pp": 2},
)  # fmt: skip
CARDED: tuple[Sizes, ...] = (
    {"tp": 4, "pp": 2, "dp": 2, "per_host": 4}, {"tp": 2, "pp": 2, "dp": 4, "per_host": 4},
    {"tp": 4, "pp": 2, "dp": 4, "per_host": 4}, {"tp": 2, "pp": 4, "dp": 2, "per_host": 2},
)  # fmt: skip
RINGS: tuple[Sizes, ...] = ({"dp": 16, "per_host": 4}, {"dp": 8, "per_host": 4})


def _some(luck: Luck, values: Any) -> Any:
    return values[int(luck.integers(len(values)))]


def job_of(luck: Luck, menu: tuple[Sizes, ...] = ANY, **changes: Any) -> Job:
    """Return a job of one of the layouts, all else drawn; `changes` are fields of `Job`, or of
    `Machines`, which win over what is drawn.
    """
    sizes = {**_some(luck, menu)}
    per_host = sizes.pop("per_host", 0)
    num_ranks = int(np.prod([sizes.get(axis, 1) for axis in ("tp", "cp", "dp", "pp")]))
    machines = _machines_of(luck, min(num_ranks, per_host or _some(luck, (8, 8, 4))))
    job = Job(machines=machines, **sizes, **_model_of(luck, sizes, num_ranks))
    job = replace(
        job,
        granularity="full" if luck.random() < 0.72 else "base",
        collections=_some(luck, ("off", "usual", "usual")),
        overlap_grads=bool(luck.random() < 0.7),
        distributed_optimizer=bool(luck.random() < 0.75),
        prefetch=_some(luck, (2, 4, 8)),
        load_s=job.microbatch_s * float(luck.uniform(0.05, 0.35)),
        length_spread_ratio=0.0,
    )
    own = {name: value for name, value in changes.items() if name in Job.__dataclass_fields__}
    others = {name: value for name, value in changes.items() if name not in own}
    job = replace(job, machines=replace(job.machines, **others), **own)
    return job if "num_iterations" in own else replace(job, **_windows_of(luck, job))


def _machines_of(luck: Luck, per_host: int) -> Machines:
    return Machines(
        gpu=_some(luck, (A100, H100, H100, H200)),
        ranks_per_host=per_host,
        num_nics=max(1, per_host // _some(luck, (1, 1, 1, 2))),
        chip_spread_ratio=float(np.exp(luck.uniform(np.log(0.003), np.log(0.02)))),
        wander_ratio=float(luck.uniform(0.001, 0.004)),
        kernel_noise_ratio=float(luck.uniform(0.002, 0.008)),
        launch_us=float(luck.uniform(4.5, 8.0)),
        clock_error_s=float(luck.uniform(0.0, 0.05)),
        clock_step_s=float(luck.uniform(0.001, 0.02)) if luck.random() < 0.2 else 0.0,
        readings=bool(luck.random() < 0.5),
        daemons_per_s=float(luck.uniform(0.0, 0.4)),
        congestion_share=float(luck.uniform(0.05, 0.2)) if luck.random() < 0.15 else 0.0,
    )


def _model_of(luck: Luck, sizes: Sizes, num_ranks: int) -> Sizes:
    """Return a model that fits a layout: layers are dealt evenly, but for those that its planner
    (not all have one) took off the last stage, which has the output layer as well.
    """
    pp, vpp = sizes.get("pp", 1), sizes.get("vpp", 1)
    each = (4 if num_ranks <= 16 else 3) if pp == 1 else 3 if vpp == 1 else 1
    tensor = sizes.get("tp", 1) * sizes.get("cp", 1)
    model = {
        "layers": (each,) * pp * vpp,
        "hidden": _some(luck, (6144, 8192) if tensor >= 4 else (4096, 6144)),
        "vocabulary": _some(luck, (32_000, 50_000, 128_000)),
        "num_microbatches": pp * _some(luck, (2, 2, 3)) if pp > 1 else _some(luck, (4, 6, 8)),
    }
    if pp > 1 and vpp == 1 and luck.random() < 0.6:
        job = Job(**sizes, **model)
        end, layer = (
            job.output_layer().products_s,
            job.attention().products_s + job.mlp().products_s,
        )
        num_less = min(each - 1, round(end / layer))
        model["layers"] = (each,) * (pp - 1) + (each - num_less,)
    return model


def _windows_of(luck: Luck, job: Job) -> Sizes:
    """Return when a job is traced: all the time, 2 of 5, 3 of 10, or two iterations in all."""
    most = MOST_OPERATIONS // job.num_operations
    begin = {"first_iteration": _some(luck, (1, 1, 101))}  # some are switched on in a running job
    which = luck.random()
    if which < 0.12:
        return {"first_iteration": 998, "num_iterations": 5, "interval": 1000, "window": 2}
    if which < 0.5:
        num = int(np.clip(luck.integers(8, 41), 8, max(8, most)))
        return {**begin, "num_iterations": num, "interval": 5, "window": 5}
    if which < 0.8:
        num = 5 * int(np.clip(luck.integers(2, 9), 2, max(2, most // 5))) + 2
        return {**begin, "num_iterations": num, "interval": 5, "window": 2}
    return {**begin, "num_iterations": 10 * (1 + (most >= 23)) + 3, "interval": 10, "window": 3}


# -- faults


Make = Callable[[Luck], Scenario]


def _rank(luck: Luck, job: Job) -> int:
    return int(luck.integers(job.num_ranks))


def _with(job: Job, *faults: Fault) -> Scenario:
    return Scenario(job, tuple(faults))


def gpu_clock(factor: float, when: str = "always") -> Make:
    """Return a maker of jobs with one slow chip: always, from an iteration on, or up to one."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck)
        if when != "always":
            while len(job.iterations) < 8:
                job = job_of(luck)
        return _with(job, _timed(luck, job, _clock(luck, job, factor), when))

    return make


def _clock(luck: Luck, job: Job, factor: float) -> Fault:
    return Fault(kind="gpu_clock", ranks=(_rank(luck, job),), factor=factor)


def _timed(luck: Luck, job: Job, fault: Fault, when: str) -> Fault:
    traced = job.iterations
    middle = traced[int(luck.integers(len(traced) // 3, max(2 * len(traced) // 3, 2)))]
    if when == "from":
        return replace(fault, first_iteration=middle)
    return replace(fault, last_iteration=middle) if when == "ended" else fault


def burst(kind: str, low: float, high: float, shares: tuple[float, float]) -> Make:
    """Return a maker of jobs with one device that is slow, or stands still, in bursts."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck)
        fault = Fault(
            kind=kind,
            ranks=(_rank(luck, job),),
            factor=float(luck.uniform(low, high)),
            share=float(luck.uniform(*shares)),
            burst_iterations=float(np.exp(luck.uniform(np.log(0.05), np.log(3.0)))),
        )
        if kind != "throttling":
            fault = replace(fault, burst_iterations=float(luck.uniform(0.05, 0.3)))
        return _with(job, fault)

    return make


def hbm(luck: Luck) -> Scenario:
    """Return a job with one slow memory."""
    job = job_of(luck)
    factor = float(luck.uniform(1.5, 3.0))
    return _with(job, Fault(kind="hbm", ranks=(_rank(luck, job),), factor=factor))


def _of_host(luck: Luck, job: Job) -> tuple[tuple[int, ...], str]:
    host = int(_some(luck, list(job.ranks_of_host)))
    return job.ranks_of_host[host], f"node{host:03d}"


def _has_peers(job: Job, ranks: tuple[int, ...]) -> bool:
    """Tell whether every stage of some ranks has other ranks, too: nobody could tell a slow host
    from a heavy stage otherwise.
    """
    stage_of = [job.layout.coordinates(rank).pp for rank in range(job.num_ranks)]
    others = {stage_of[rank] for rank in range(job.num_ranks) if rank not in ranks}
    return {stage_of[rank] for rank in ranks} <= others


def host(kind: str, low: float, high: float, share: float = 1.0, **changes: Any) -> Make:
    """Return a maker of jobs in which something concerns all ranks of one of several hosts."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck, **changes)
        ranks, name = _of_host(luck, job)
        while len(job.ranks_of_host) < 2 or not _has_peers(job, ranks):
            job = job_of(luck, **changes)
            ranks, name = _of_host(luck, job)
        factor = float(luck.uniform(low, high))
        return _with(job, Fault(kind=kind, ranks=ranks, host=name, factor=factor, share=share))

    return make


def cpu_limit(luck: Luck) -> Scenario:
    """Return a job with one process that gets too little of a CPU."""
    job = job_of(luck)
    factor, share = float(luck.uniform(1.5, 6.0)), float(luck.uniform(0.02, 0.25))
    fault = Fault(kind="cpu_limit", ranks=(_rank(luck, job),), factor=factor, share=share)
    return _with(job, fault)


def loader(whole_host: bool) -> Make:
    """Return a maker of jobs with slow loading on a rank, or on a host."""

    def make(luck: Luck) -> Scenario:
        menu = tuple(e for e in ANY if e.get("dp", 1) >= 4)
        job = job_of(luck, menu)
        while whole_host and len(job.ranks_of_host) < 2:
            job = job_of(luck, menu)
        job = replace(job, load_s=0.3 * job.microbatch_s, prefetch=2)
        factor = float(luck.uniform(5.0, 14.0))
        loading = [r for r in range(job.num_ranks) if _loads(job, r)]
        rank = int(_some(luck, loading))
        fault = Fault(kind="loader", ranks=(rank,), factor=factor)
        if whole_host:
            at = job.machines.host_of(rank)
            fault = replace(fault, ranks=job.ranks_of_host[at], host=f"node{at:03d}")
        return _with(job, fault)

    return make


def _loads(job: Job, rank: int) -> bool:
    place = job.layout.coordinates(rank)
    return place.tp == 0 and place.pp in (0, job.pp - 1)


def collecting(luck: Luck) -> Scenario:
    """Return a job with one process that collects large heaps."""
    job = job_of(luck, granularity="full", collections="usual")
    pause_s, share = float(luck.uniform(0.2, 0.7)), float(luck.uniform(0.25, 0.8))
    return _with(job, Fault(kind="gc", ranks=(_rank(luck, job),), pause_s=pause_s, share=share))


def nvlink(kind: str) -> Make:
    """Return a maker of jobs with one slow NVLink, a slow pair of chips, or one left to PCIe."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck, LINKED, granularity="full", ranks_per_host=8, overlap_grads=False)
        rank = _rank(luck, job)
        factor = float(luck.uniform(2.0, 8.0))
        if kind == "pcie":
            factor = job.machines.gpu.nvlink_bytes / PCIE_BYTES
        ranks: tuple[int, ...] = (rank,)
        if kind == "nvlink_pair":
            mate = job.layout.group(rank, "tp")[0]
            ranks = (mate, mate + 1)
        return _with(job, Fault(kind=kind, ranks=ranks, factor=factor))

    return make


def nic(kind: str, of: str, menu: tuple[Sizes, ...] = CARDED) -> Make:
    """Return a maker of jobs with slow network cards: of a host, of a rank, of a rail."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck, menu, overlap_grads=bool(luck.random() < 0.3), congestion_share=0.0)
        per_host = job.machines.ranks_per_host
        cards = max(1, per_host // 2) if of == "host" else per_host
        job = replace(job, machines=replace(job.machines, num_nics=cards))
        ranks, name = _of_host(luck, job)
        if of == "rank":
            ranks, name = (int(_some(luck, ranks)),), ""
        if of == "rail":
            ranks, name = rail_of(job, int(luck.integers(cards))), ""
        fault = Fault(kind=kind, ranks=ranks, host=name, factor=float(_some(luck, (2.0, 3.0))))
        if kind == "nic_flap":
            share, length = float(luck.uniform(0.1, 0.4)), float(luck.uniform(0.3, 2.0))
            factor = float(luck.uniform(5.0, 20.0))
            fault = replace(fault, factor=factor, share=share, burst_iterations=length)
        return _with(job, fault)

    return make


def two_faults(luck: Luck) -> Scenario:
    """Return a job with two faults of different kinds on different ranks."""
    makers = (
        gpu_clock(float(luck.uniform(1.15, 1.6))),
        burst("throttling", 1.3, 2.5, (0.15, 0.4)),
        cpu_limit,
        hbm,
        burst("ecc", 1.0, 1.0, (0.05, 0.15)),
    )
    first, second = luck.choice(len(makers), 2, replace=False)
    scenario = makers[first](luck)
    (other,) = makers[second](luck).faults
    job = scenario.job
    mine = scenario.faults[0].ranks[0]
    rank = (mine + 1 + int(luck.integers(job.num_ranks - 1))) % job.num_ranks
    return _with(job, scenario.faults[0], replace(other, ranks=(rank,)))


# -- sound jobs


def healthy(menu: tuple[Sizes, ...] = ANY, **changes: Any) -> Make:
    """Return a maker of sound jobs."""
    return lambda luck: Scenario(job_of(luck, menu, **changes))


def _own(kind: str, cause: str, ranks: tuple[int, ...]) -> Planted:
    return Planted(kind=kind, cause=cause, owner="job", ranks=ranks)


def heavy_stage(luck: Luck) -> Scenario:
    """Return a job whose first or last stage has more to do than all others."""
    job = job_of(luck, STAGES, vocabulary=50_000)
    even = replace(job, layers=(3,) * job.pp)
    place = _some(luck, (0, job.pp - 1))
    others = [stage for stage in range(job.pp) if stage != place]
    layers = list(even.layers)
    for stage in luck.permutation(others)[: int(luck.integers(1, 3))]:
        layers[stage] -= 1
        layers[place] += 1
    heavy = replace(job, layers=tuple(layers))
    ranks = tuple(r for r in range(job.num_ranks) if job.layout.coordinates(r).pp == place)
    return Scenario(heavy, (), _own("heavy_stage", "stage_imbalance", ranks), even)


def long_sequences(varies: bool) -> Make:
    """Return a maker of jobs in which one replica gets longer sequences."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck, WITH_REPLICAS)
        replica = int(luck.integers(job.dp))
        ratio = float(luck.uniform(1.1, 1.5))
        longer = replace(job, long_replica=replica, long_ratio=ratio, long_varies=varies)
        ranks = tuple(r for r in range(job.num_ranks) if job.layout.coordinates(r).dp == replica)
        return Scenario(longer, (), _own("long_sequences", "sequence_imbalance", ranks), job)

    return make


def uneven(lengths: str) -> Make:
    """Return a maker of jobs whose microbatches differ: in tokens, or in how they are packed."""

    def make(luck: Luck) -> Scenario:
        sequence = 16384 if lengths == "packed" else 4096
        job = job_of(luck, WITH_REPLICAS, sequence=sequence)
        other = replace(job, lengths=lengths, length_spread_ratio=float(luck.uniform(0.1, 0.35)))
        truth = _own("uneven_sequences", "sequence_imbalance", tuple(range(job.num_ranks)))
        return Scenario(other, (), truth, job) if lengths == "uneven" else Scenario(other)

    return make


def hot_experts(drift: bool) -> Make:
    """Return a maker of jobs whose routers prefer some experts, for good or in turn."""

    def make(luck: Luck) -> Scenario:
        job = job_of(luck, EXPERTS)
        hot = replace(
            job,
            router_spread_ratio=0.1 if drift else float(luck.uniform(0.3, 0.8)),
            router_drift_ratio=float(luck.uniform(0.1, 0.3)) if drift else 0.0,
            capacity_ratio=_some(luck, (0.0, 0.0, 1.5)),
        )
        truth = _own("hot_expert", "sequence_imbalance", tuple(range(job.num_ranks)))
        return Scenario(hot, (), truth, job)

    return make


def collecting_everywhere(luck: Luck) -> Scenario:
    """Return a job all of whose processes collect large heaps, each at its own moments."""
    job = job_of(luck, granularity="full", collections="off")
    truth = _own("gc", "gc", tuple(range(job.num_ranks)))
    return Scenario(replace(job, collections="heavy"), (), truth, job)


def slow_storage(luck: Luck) -> Scenario:
    """Return a job whose loaders all wait for the same slow storage."""
    job = job_of(luck)
    share = float(luck.uniform(1.1, 1.8))
    return Scenario(
        replace(job, load_s=share * job.microbatch_s, prefetch=2, loader_spread_ratio=0.25)
    )


def host_bound(luck: Luck) -> Scenario:
    """Return a job of a small model, whose devices wait for launches."""
    job = job_of(luck, hidden=1024, sequence=2048, vocabulary=32_000, launch_us=8.0)
    return Scenario(replace(job, load_s=0.002))


def missing_ranks(luck: Luck) -> Scenario:
    """Return a job of which some files are not there."""
    job = job_of(luck, tuple(e for e in ANY if e.get("dp", 1) >= 4))
    missing = luck.choice(job.num_ranks, int(luck.integers(1, 3)), replace=False)
    return Scenario(replace(job, missing=tuple(sorted(int(each) for each in missing))))


def growth(luck: Luck) -> Scenario:
    """Return a job whose microbatches get longer at some iteration, on all ranks alike."""
    job = job_of(luck)
    return Scenario(replace(job, growth_from=job.iterations[len(job.iterations) // 2],
                            growth_ratio=1.25))  # fmt: skip


def warming_up(luck: Luck) -> Scenario:
    """Return a job of which only the first iterations are traced."""
    return Scenario(job_of(luck, num_iterations=4, interval=5, window=5, first_iteration=1))


FAMILIES: tuple[tuple[str, int, Make], ...] = (
    ("gpu_clock 5%", 5, gpu_clock(1.05)),
    ("gpu_clock 10%", 6, gpu_clock(1.1)),
    ("gpu_clock 20%", 6, gpu_clock(1.2)),
    ("gpu_clock 35%", 5, gpu_clock(1.35)),
    ("gpu_clock 50%", 5, gpu_clock(1.5)),
    ("gpu_clock 100%", 4, gpu_clock(2.0)),
    ("gpu_clock from an iteration on", 7, gpu_clock(1.25, "from")),
    ("gpu_clock ended", 5, gpu_clock(1.3, "ended")),
    ("gpu_clock of a host", 7, host("gpu_clock", 1.08, 1.5)),
    ("throttling", 14, burst("throttling", 1.2, 3.0, (0.1, 0.4))),
    ("hbm", 7, hbm),
    ("ecc", 5, burst("ecc", 1.0, 1.0, (0.04, 0.2))),
    ("shared_gpu", 7, burst("shared_gpu", 1.5, 3.0, (0.5, 0.9))),
    ("host_cpu", 4, host("host_cpu", 2.0, 6.0)),
    ("host_cpu: small model", 4, host("host_cpu", 1.5, 4.0, hidden=2048, sequence=2048)),
    ("cpu_limit", 8, cpu_limit),
    ("host_memory", 6, host("host_memory", 1.0, 1.0, 0.15)),
    ("loader", 6, loader(False)),
    ("loader of a host", 4, loader(True)),
    ("gc", 6, collecting),
    ("nvlink", 7, nvlink("nvlink")),
    ("nvlink of a pair", 4, nvlink("nvlink_pair")),
    ("pcie", 5, nvlink("pcie")),
    ("nic of a host", 7, nic("nic", "host")),
    ("nic of a host in one ring", 2, nic("nic", "host", RINGS)),
    ("nic of a rank", 5, nic("nic", "rank")),
    ("nic flapping", 5, nic("nic_flap", "host")),
    ("rail", 4, nic("rail", "rail")),
    ("two faults", 10, two_faults),
    ("healthy", 54, healthy()),
    ("healthy: large", 5, healthy(({"tp": 8, "pp": 2, "dp": 4}, {"tp": 4, "pp": 4, "dp": 4}),
                                  granularity="base", num_iterations=7, window=2)),
    ("look_alike: chips differ", 8, healthy(chip_spread_ratio=0.03)),
    ("look_alike: heavy stage", 8, heavy_stage),
    ("look_alike: long sequences", 6, long_sequences(False)),
    ("look_alike: long sequences now and then", 5, long_sequences(True)),
    ("look_alike: uneven sequences", 6, uneven("uneven")),
    ("look_alike: packed documents", 5, uneven("packed")),
    ("look_alike: hot experts", 5, hot_experts(False)),
    ("look_alike: drifting experts", 5, hot_experts(True)),
    ("look_alike: slow storage", 4, slow_storage),
    ("look_alike: gc everywhere", 5, collecting_everywhere),
    ("look_alike: checkpoints", 4, healthy(checkpoint_every=4)),
    ("look_alike: host-bound", 6, host_bound),
    ("look_alike: missing ranks", 4, missing_ranks),
    ("look_alike: warm-up", 3, warming_up),
    ("look_alike: congestion", 5, healthy(CARDED, congestion_share=0.3)),
    ("look_alike: logging rank", 4, healthy(logging_s=0.03)),
    ("look_alike: growth", 3, growth),
    ("look_alike: all slow", 3, healthy(slow_alike_ratio=1.3)),
)  # fmt: skip
"""Name, how many, and who makes them."""


@lru_cache(maxsize=4)
def catalogue(draw: int) -> dict[str, tuple[Case, Scenario]]:
    """Return all cases of a draw by name, with what each of them is."""
    return {case.name: (case, scenario) for case, scenario in _drawn(draw)}


def _drawn(draw: int) -> Iterator[tuple[Case, Scenario]]:
    for family, number, make in FAMILIES:
        for place in range(number):
            seed = crc32(f"{draw} {family} {place}".encode())
            scenario = make(np.random.default_rng([seed, draw, 77]))
            yield (
                Case(
                    ground=GROUND,
                    name=f"{family.replace(' ', '-').replace(':', '')}-{place}-{seed:08x}",
                    family=family,
                    num_ranks=scenario.job.num_ranks,
                    seed=seed,
                    draw=draw,
                    planted=scenario.planted,
                ),
                scenario,
            )


def scenario_of(case: Case) -> Scenario:
    """Return what a case is."""
    return catalogue(case.draw)[case.name][1]
