"""Which jobs are simulated and what is planted into them: the list of all cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from zlib import crc32

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.kernels.cluster import NOISY, Noise, Numbers, Trouble
from benchmarks.grounds.kernels.job import Job
from benchmarks.grounds.kernels.run import Plan

GROUND = "kernels"

_JOBS = (
    Job(name="dp2", dp=2, layers=3),
    Job(name="dp4-overlapped", vocabulary=6400, dp=4, layers=3, overlap_gradients=True),
    Job(name="dp8-recompute", dp=8, recompute=True),
    Job(name="dp16-shared-nic", dp=16, gpus_per_host=4, shared_nic=True, hidden=2560),
    Job(name="dp32", dp=32, microbatches=3, overlap_gradients=True),
    Job(name="dp64", dp=64, microbatches=2),
    Job(name="fsdp8", dp=8, fsdp=True, layers=4, microbatches=2),
    Job(name="fsdp16", dp=16, fsdp=True, layers=4, microbatches=2, gpus_per_host=4),
    Job(name="fsdp64", dp=64, fsdp=True, layers=3, microbatches=1, sequence=8192),
    Job(name="tp4", tp=4, microbatches=6),
    Job(name="tp8", tp=8, hidden=8192),
    Job(name="tp8-dp2", tp=8, dp=2, hidden=8192, microbatches=3),
    Job(name="tp8-dp4", tp=8, dp=4, hidden=8192, microbatches=2),
    Job(name="tp8-dp8", tp=8, dp=8, hidden=8192, microbatches=2, layers=1),
    Job(name="pp2-dp2-blocking", vocabulary=6400, pp=2, dp=2, pinned=False),
    Job(name="pp4", vocabulary=6400, pp=4, microbatches=8),
    Job(name="pp8", vocabulary=6400, pp=8, microbatches=12, gpus_per_host=4, layers=1),
    Job(
        name="pp4-dp4-shared-nic",
        vocabulary=6400,
        pp=4,
        dp=4,
        microbatches=8,
        gpus_per_host=4,
        shared_nic=True,
    ),
    Job(name="pp4-dp2-recompute", vocabulary=6400, pp=4, dp=2, microbatches=8, recompute=True),
    Job(name="pp8-dp8", vocabulary=6400, pp=8, dp=8, microbatches=8, layers=1),
    Job(name="tp2-pp2-dp2", vocabulary=6400, tp=2, pp=2, dp=2, microbatches=6),
    Job(
        name="tp2-pp2-dp4",
        vocabulary=6400,
        tp=2,
        pp=2,
        dp=4,
        overlap_gradients=True,
        gpus_per_host=4,
    ),
    Job(name="tp4-pp2-dp2", vocabulary=6400, tp=4, pp=2, dp=2, hidden=6144),
    Job(
        name="tp4-pp4-dp2",
        vocabulary=6400,
        tp=4,
        pp=4,
        dp=2,
        hidden=6144,
        microbatches=8,
        layers=1,
    ),
    Job(name="tp8-pp4", vocabulary=6400, tp=8, pp=4, hidden=8192, microbatches=8, layers=1),
    Job(
        name="tp8-pp2-dp2",
        vocabulary=6400,
        tp=8,
        pp=2,
        dp=2,
        hidden=8192,
        microbatches=4,
        layers=1,
    ),
    Job(name="tp2-pp4-dp8", vocabulary=6400, tp=2, pp=4, dp=8, microbatches=4, layers=1),
    Job(
        name="tp8-pp4-dp4",
        vocabulary=6400,
        tp=8,
        pp=4,
        dp=4,
        hidden=8192,
        microbatches=4,
        layers=1,
    ),
    Job(name="pp2-vpp2-dp2", vocabulary=6400, pp=2, vpp=2, dp=2, layers=1, microbatches=6),
    Job(name="pp4-vpp2-dp2", vocabulary=6400, pp=4, vpp=2, dp=2, layers=1, microbatches=8),
    Job(
        name="tp2-pp4-vpp2-dp2", vocabulary=6400, tp=2, pp=4, vpp=2, dp=2, layers=1, microbatches=8
    ),
    Job(name="ep4-dp4", dp=4, ep=4, experts=True, hidden=3072, gpus_per_host=4),
    Job(name="ep8-dp8", dp=8, ep=8, experts=True, hidden=3072),
    Job(name="ep4-dp8", dp=8, ep=4, experts=True, hidden=3072, recompute=True, gpus_per_host=4),
    Job(name="ep8-dp16", dp=16, ep=8, experts=True, hidden=3072, microbatches=3),
    Job(
        name="ep4-pp2-dp8",
        vocabulary=6400,
        pp=2,
        dp=8,
        ep=4,
        experts=True,
        hidden=3072,
        microbatches=4,
    ),
    Job(name="ep4-tp2-dp8", tp=2, dp=8, ep=4, experts=True, hidden=4096, microbatches=2),
)
_SMALL = Job(name="host-bound", hidden=1024, sequence=1024, vocabulary=8192)
_HOST_BOUND = (
    replace(_SMALL, name="host-bound-dp4", dp=4),
    replace(_SMALL, name="host-bound-dp8", dp=8, overlap_gradients=True),
    replace(_SMALL, name="host-bound-dp16", dp=16, microbatches=2),
    replace(_SMALL, name="host-bound-tp2-pp2-dp2", tp=2, pp=2, dp=2),
    replace(_SMALL, name="host-bound-pp4-dp2", pp=4, dp=2, microbatches=8),
    replace(_SMALL, name="host-bound-ep4-dp8", dp=8, ep=4, experts=True),
)
_NAMED = {job.name: job for job in _JOBS + _HOST_BOUND}

_WINDOWS = {
    8: ((5, 2, 1), (5, 2, 3), (5, 2, 5), (5, 2, 10), (10, 10, 2), (5, 2, 30)),
    32: ((5, 2, 2), (5, 2, 3), (5, 2, 6), (10, 5, 2)),
    1 << 20: ((5, 2, 1), (5, 2, 2), (5, 2, 3)),
}
"""(interval, iterations a window, windows) by the largest world that traces so much."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Hold one kind of case before it gets a job: how its troubles are drawn, and its noise."""

    family: str
    name: str
    trouble: Callable[[Job, Random], tuple[Trouble, ...]] = lambda job, draw: ()
    noise: Noise | None = None
    pauses_between_ns: float = 0.0
    long_enough: int = 1  # windows that the case needs at least


def _ranks_of_host(job: Job, host: int) -> tuple[int, ...]:
    return tuple(rank for rank, own in enumerate(job.hosts) if own == host)


def _on_host(trouble: Trouble, job: Job, draw: Random) -> tuple[Trouble, ...]:
    """Let a trouble strike one whole host."""
    host = draw.randrange(job.hosts[-1] + 1)
    return (replace(trouble, ranks=_ranks_of_host(job, host), host=f"node-{host:03d}"),)


def _rank(job: Job, draw: Random) -> tuple[int, ...]:
    return (draw.randrange(job.num_ranks),)


def _loading_ranks(job: Job) -> list[int]:
    """Return the ranks that fetch batches: first tensor member of the first and the last stage."""
    per_stage = job.num_ranks // job.pp
    return [
        rank
        for rank in range(job.num_ranks)
        if rank % job.tp == 0 and rank // per_stage in (0, job.pp - 1)
    ]


def _stage(job: Job, stage: int) -> tuple[int, ...]:
    per_stage = job.num_ranks // job.pp
    return tuple(range(stage * per_stage, (stage + 1) * per_stage))


def _gpu_clock(factor: float, *, onset: bool = False) -> Variant:
    def trouble(job: Job, draw: Random) -> tuple[Trouble, ...]:
        first = job.iterations[len(job.iterations) // 2] if onset else 1
        return (
            Trouble(
                kind="gpu_clock",
                cause="compute",
                ranks=_rank(job, draw),
                factor=factor,
                first_iteration=first,
            ),
        )

    return Variant(
        family="gpu_clock from an onset" if onset else "gpu_clock",
        name=f"gpu-clock-{factor:g}" + ("-onset" if onset else ""),
        trouble=trouble,
        long_enough=3 if onset else 1,
    )


def _throttling(burst_iterations: float) -> Variant:
    return Variant(
        family="throttling",
        name=f"throttling-{burst_iterations:g}",
        trouble=lambda job, draw: (
            Trouble(
                kind="throttling",
                cause="compute",
                ranks=_rank(job, draw),
                factor=1.3,
                share_of_time=0.2,
                burst_iterations=burst_iterations,
            ),
        ),
        long_enough=5,
    )


def _nvlink(factor: float) -> Variant:
    return Variant(
        family="nvlink",
        name=f"nvlink-{factor:g}",
        trouble=lambda job, draw: (
            Trouble(kind="nvlink", cause="link", ranks=_rank(job, draw), factor=factor),
        ),
    )


def _nic(factor: float) -> Variant:
    trouble = Trouble(kind="nic", cause="link", factor=factor)
    return Variant(family="nic", name=f"nic-{factor:g}", trouble=partial(_on_host, trouble))


def _rail(factor: float) -> Variant:
    def trouble(job: Job, draw: Random) -> tuple[Trouble, ...]:
        rail = draw.randrange(job.gpus_per_host)
        ranks = tuple(range(rail, job.num_ranks, job.gpus_per_host))
        return (Trouble(kind="rail", cause="link", ranks=ranks, factor=factor),)

    return Variant(family="rail", name=f"rail-{factor:g}", trouble=trouble)


def _host_cpu(factor: float) -> Variant:
    trouble = Trouble(
        kind="host_cpu", cause="host", factor=factor, pause_probability=0.1, pause_ns=2e6 * factor
    )
    return Variant(
        family="host_cpu", name=f"host-cpu-{factor:g}", trouble=partial(_on_host, trouble)
    )


def _host_clock(factor: float) -> Variant:
    """Let a host's cooling fail: all of its chips run slower."""

    trouble = Trouble(kind="gpu_clock", cause="compute", factor=factor)
    return Variant(
        family="host's chips slow",
        name=f"host-chips-{factor:g}",
        trouble=partial(_on_host, trouble),
    )


def _host_memory(pause_ms: float) -> Variant:
    trouble = Trouble(
        kind="host_memory", cause="host", pause_probability=0.08, pause_ns=pause_ms * 1e6
    )
    return Variant(
        family="host_memory", name=f"host-memory-{pause_ms:g}ms", trouble=partial(_on_host, trouble)
    )


def _loader(factor: float, *, whole_host: bool) -> Variant:
    def trouble(job: Job, draw: Random) -> tuple[Trouble, ...]:
        loading = _loading_ranks(job)
        chosen = draw.choice(loading)
        on_host = tuple(rank for rank in loading if job.hosts[rank] == job.hosts[chosen])
        host = f"node-{job.hosts[chosen]:03d}" if whole_host else ""
        ranks = on_host if whole_host else (chosen,)
        named = _ranks_of_host(job, job.hosts[chosen]) if whole_host else ()
        return (
            Trouble(
                kind="loader", cause="loader", ranks=ranks, named=named, host=host, factor=factor
            ),
        )

    return Variant(
        family="loader",
        name=f"loader-{factor:g}" + ("-host" if whole_host else ""),
        trouble=trouble,
    )


def _gc(pause_ms: float, per_iteration: float) -> Variant:
    return Variant(
        family="gc",
        name=f"gc-{pause_ms:g}ms",
        trouble=lambda job, draw: (
            Trouble(
                kind="gc",
                cause="gc",
                ranks=_rank(job, draw),
                pause_probability=per_iteration / (2 * job.microbatches * job.vpp),
                pause_ns=pause_ms * 1e6,
            ),
        ),
        long_enough=3,
    )


def _two(first: Variant, second: Variant) -> Variant:
    """Plant two faults that strike different ranks."""

    def trouble(job: Job, draw: Random) -> tuple[Trouble, ...]:
        one = first.trouble(job, draw)
        while True:
            other = second.trouble(job, draw)
            if set(one[0].ranks) != set(other[0].ranks):
                return one + other

    return Variant(family="two faults", name=f"{first.name}-and-{second.name}", trouble=trouble)


def _spread(percent: int) -> Variant:
    return Variant(
        family="healthy",
        name=f"healthy-spread-{percent}",
        noise=Noise(chip_spread_ratio=percent / 100),
    )


def _heavy_last(factor: float) -> Variant:
    return Variant(
        family="look_alike: heavy last stage",
        name=f"heavy-last-{factor:g}",
        trouble=lambda job, draw: (
            Trouble(
                kind="heavy_output",
                cause="stage_imbalance",
                owner="job",
                ranks=_stage(job, job.pp - 1),
                factor=factor,
            ),
        ),
    )


def _heavy_stage(factor: float) -> Variant:
    return Variant(
        family="look_alike: heavy stage",
        name=f"heavy-stage-{factor:g}",
        trouble=lambda job, draw: (
            Trouble(
                kind="heavy_stage",
                cause="stage_imbalance",
                owner="job",
                ranks=_stage(job, draw.randrange(job.pp)),
                factor=factor,
            ),
        ),
    )


def _uneven(spread: float) -> Variant:
    return Variant(
        family="look_alike: uneven sequences",
        name=f"uneven-{spread:g}",
        trouble=lambda job, draw: (
            Trouble(
                kind="uneven_sequences",
                cause="sequence_imbalance",
                owner="job",
                ranks=tuple(range(job.num_ranks)),
                factor=1 + spread,
            ),
        ),
    )


def _long_replica(percent: int) -> Variant:
    def trouble(job: Job, draw: Random) -> tuple[Trouble, ...]:
        replica = draw.randrange(job.dp)
        ranks = tuple(rank for rank in range(job.num_ranks) if rank // job.tp % job.dp == replica)
        return (
            Trouble(
                kind="long_sequences",
                cause="sequence_imbalance",
                owner="job",
                ranks=ranks,
                factor=1 + percent / 100,
            ),
        )

    return Variant(
        family="look_alike: one replica has more tokens",
        name=f"long-replica-{percent}",
        trouble=trouble,
    )


def _hot_expert(factor: float, *, moving: bool) -> Variant:
    def trouble(job: Job, draw: Random) -> tuple[Trouble, ...]:
        member = draw.randrange(job.ep)
        ranks = tuple(
            rank for rank in range(job.num_ranks) if moving or rank // job.tp % job.ep == member
        )
        return (
            Trouble(
                kind="moving_hot_expert" if moving else "hot_expert",
                cause="sequence_imbalance",
                owner="job",
                ranks=ranks,
                factor=factor,
            ),
        )

    name = f"hot-expert-{factor:g}" + ("-moving" if moving else "")
    return Variant(family="look_alike: hot expert", name=name, trouble=trouble)


def _storage(job: Job, draw: Random) -> tuple[Trouble, ...]:
    """Slow everybody's loader down: the shared file system, and nobody's node."""
    everyone = tuple(range(job.num_ranks))
    return (
        Trouble(
            kind="slow_storage",
            cause="loader",
            owner="job",
            ranks=everyone,
            factor=draw.choice((20.0, 60.0, 150.0)),
        ),
    )


def _checkpoint() -> Variant:
    """Let one window fall into all ranks' asynchronous checkpoint, with evaluations between."""

    def trouble(job: Job, draw: Random) -> tuple[Trouble, ...]:
        first = job.iterations[job.window * draw.randrange(1, job.windows)]
        return (
            Trouble(
                kind="checkpoint",
                cause="host",
                owner="job",
                ranks=tuple(range(job.num_ranks)),
                first_iteration=first,
                last_iteration=first + job.window - 1,
                pause_probability=0.25,
                pause_ns=2.5e7,
            ),
        )

    return Variant(
        family="look_alike: evaluation and checkpoints",
        name="checkpoint",
        trouble=trouble,
        pauses_between_ns=2e10,
        long_enough=3,
    )


_ANY = tuple(job.name for job in _JOBS)
_TRACED_LONG = tuple(job.name for job in _JOBS if job.num_ranks <= 32)
_SEVERAL_HOSTS = tuple(job.name for job in _JOBS if job.hosts[-1] > 0)
_MANY_HOSTS = tuple(job.name for job in _JOBS if job.hosts[-1] > 1)
_ON_NVLINK = tuple(job.name for job in _JOBS if job.tp > 1 or job.ep > 1 or job.hosts[-1] == 0)
_PIPELINES = tuple(job.name for job in _JOBS if job.pp > 1)
_REPLICAS = tuple(job.name for job in _JOBS if job.dp > 2)
_EXPERTS = tuple(job.name for job in _JOBS if job.experts)
_OF_HOST_BOUND = tuple(job.name for job in _HOST_BOUND)
_HOST_IS_STAGE = ("tp8-pp4", "pp8-dp8", "pp4-dp4-shared-nic", "tp2-pp2-dp4")
_HOST_IS_REPLICA = ("tp8-dp2", "tp8-dp4", "tp8-dp8", "fsdp16", "dp16-shared-nic")


def _faults() -> Iterator[tuple[Variant, tuple[str, ...], int]]:
    """Yield each variant of a fault with the jobs it may get and how many cases are made of it."""
    for factor, count in (
        (1.05, 5), (1.1, 5), (1.15, 4), (1.2, 4), (1.3, 4), (1.5, 4), (2.0, 3), (3.0, 3),
    ):  # fmt: skip
        yield _gpu_clock(factor), _ANY, count
    yield _gpu_clock(1.3), ("dp2", "pp4", "pp8"), 3
    yield _gpu_clock(1.5), _OF_HOST_BOUND, 3
    for factor in (1.1, 1.2, 1.5):
        yield _gpu_clock(factor, onset=True), _ANY, 4
    for length in (0.15, 0.5, 2.0, 6.0):
        yield _throttling(length), _TRACED_LONG, 4
    for factor in (1.5, 2.0, 4.0):
        yield _nvlink(factor), _ON_NVLINK, 5
    yield _nic(2.0), _SEVERAL_HOSTS, 10
    yield _nic(4.0), _MANY_HOSTS, 6
    yield _rail(2.0), _SEVERAL_HOSTS, 8
    yield _rail(4.0), _MANY_HOSTS, 4
    for factor in (2.0, 4.0, 8.0):
        yield _host_cpu(factor), _SEVERAL_HOSTS, 4
    yield _host_cpu(3.0), tuple(dict.fromkeys(_HOST_IS_STAGE + _HOST_IS_REPLICA)), 4
    yield _host_clock(1.1), _HOST_IS_STAGE, 3
    yield _host_clock(1.25), _HOST_IS_STAGE, 3
    yield _host_clock(1.1), _HOST_IS_REPLICA, 3
    yield _host_clock(1.25), _HOST_IS_REPLICA, 3
    for pause_ms in (5, 15, 40):
        yield _host_memory(pause_ms), _SEVERAL_HOSTS, 4
    for factor in (15.0, 50.0, 200.0):
        yield _loader(factor, whole_host=False), _ANY, 3
    for factor in (30.0, 120.0):
        yield _loader(factor, whole_host=True), _SEVERAL_HOSTS, 4
    for pause_ms, per_iteration in ((40, 1.0), (150, 0.5), (500, 0.25)):
        yield _gc(pause_ms, per_iteration), _ANY, 4
    yield _two(_gpu_clock(1.3), _gpu_clock(1.2)), _ANY, 4
    yield _two(_gpu_clock(1.4), _nic(2.0)), _MANY_HOSTS, 4
    yield _two(_gpu_clock(1.25), _gc(150, 0.5)), _ANY, 3
    yield _two(_loader(80.0, whole_host=False), _gpu_clock(1.3)), _ANY, 3


def _innocent() -> Iterator[tuple[Variant, tuple[str, ...], int]]:
    """Yield healthy jobs and those whose own work is uneven, as `_faults` does."""
    for percent in (0, 1, 2, 3, 5):
        yield _spread(percent), _ANY, 5
    noisy = Variant(family="noisy healthy", name="noisy", noise=NOISY)
    yield noisy, _ANY, 12
    bound = Variant(family="host-bound healthy", name="healthy")
    yield bound, _OF_HOST_BOUND, 12
    for factor in (5.0, 16.0):
        yield _heavy_last(factor), _PIPELINES, 5
    for factor in (1.08, 1.2):
        yield _heavy_stage(factor), _PIPELINES, 5
    for spread in (0.1, 0.25, 0.5):
        yield _uneven(spread), _REPLICAS, 4
    for percent in (3, 6, 12, 30):
        yield _long_replica(percent), _REPLICAS, 3
    for factor in (1.4, 2.2):
        yield _hot_expert(factor, moving=False), _EXPERTS, 4
        yield _hot_expert(factor, moving=True), _EXPERTS, 4
    warm = Variant(family="look_alike: warm-up", name="warm-up", noise=Noise(warm_up_factor=30.0))
    yield warm, _ANY, 10
    yield _checkpoint(), _ANY, 10
    storage = Variant(family="look_alike: slow storage", name="storage", trouble=_storage)
    yield storage, _ANY, 10


@cache
def _plans(draw: int) -> dict[str, tuple[Case, Plan]]:
    """Return every case of a draw with what it is simulated from, by name."""
    drawn = f"draw {draw} " if draw else ""
    found: dict[str, tuple[Case, Plan]] = {}
    for variant, jobs, count in (*_faults(), *_innocent()):
        order = sorted(jobs, key=lambda name: crc32(f"{drawn}{variant.name} {name}".encode()))
        for number in range(count):
            job_name = order[number % len(order)]
            name, repeat = "", number // len(order)
            while not name or name in found:
                text = f"{drawn}{variant.family} {variant.name} {job_name} {repeat}"
                seed = crc32(text.encode())
                name = f"{variant.name}-{job_name}-s{seed % 100000}"
                repeat += 1
            found[name] = _planned(variant, _NAMED[job_name], name, seed)
    return found


def _planned(variant: Variant, job: Job, name: str, seed: int) -> tuple[Case, Plan]:
    draw = Random(seed)
    interval, window, windows = _traced(job, draw, variant.long_enough)
    counters = draw.random() < 0.5
    job = replace(job, interval=interval, window=window, windows=windows, counters=counters)
    noise = variant.noise or Noise(chip_spread_ratio=draw.choice((0.0, 0.01, 0.02, 0.03)))
    troubles = variant.trouble(job, draw)
    plan = Plan(
        job=job, noise=noise, troubles=troubles, pauses_between_ns=variant.pauses_between_ns
    )
    case = Case(
        ground=GROUND,
        name=name,
        family=variant.family,
        num_ranks=job.num_ranks,
        seed=seed,
        planted=tuple(_planted(trouble) for trouble in troubles),
    )
    return case, plan


def _traced(job: Job, draw: Random, at_least: int) -> tuple[int, int, int]:
    """Choose how much is traced: less of a large job."""
    choices = next(each for size, each in _WINDOWS.items() if job.num_ranks <= size)
    fitting = [each for each in choices if each[2] >= at_least]
    return draw.choice(fitting)


def _planted(trouble: Trouble) -> Planted:
    return Planted(
        kind=trouble.kind,
        cause=trouble.cause,
        owner=trouble.owner,
        ranks=trouble.named or trouble.ranks,
        host=trouble.host,
        factor=trouble.factor,
        first_iteration=trouble.first_iteration,
        last_iteration=trouble.last_iteration,
        share_of_time=trouble.share_of_time,
    )


def cases(draw: int = 0) -> Iterable[Case]:
    """Return all cases of a draw; what a cause costs is known when its case is written."""
    return [replace(case, draw=draw) for case, _ in _plans(draw).values()]


def slowness(case: Case) -> Numbers:
    """Return how many times longer each rank's passes take than on equal chips, without a trouble,
    (rank, iteration).
    """
    _, plan = _plans(case.draw)[case.name]
    planted = plan.simulate(case.seed, plan.troubles).pass_times_ns
    return planted / write_varied(case, Variation(chip_spread_ratio=0.0), None)


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Numbers:
    """Simulate the sound job of a case, varied; return its pass times, (rank, iteration)."""
    _, plan = _plans(case.draw)[case.name]
    if variation.chip_spread_ratio is not None:
        noise = replace(plan.noise, chip_spread_ratio=variation.chip_spread_ratio)
        plan = replace(plan, noise=noise)
    slow = Trouble(
        kind="gpu_clock", cause="compute", ranks=(variation.slow_rank,), factor=variation.factor
    )
    result = plan.simulate(case.seed, (slow,))
    if directory is not None:
        plan.write_files(case.seed, result, directory)
    return result.pass_times_ns


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the rank files of a case; return what was planted, with its cost."""
    _, plan = _plans(case.draw)[case.name]
    whole, without = plan.write(case.seed, directory)
    return tuple(
        _planted(trouble).priced(plan.job.iterations, whole, rest)
        for trouble, rest in zip(plan.troubles, without, strict=True)
    )
