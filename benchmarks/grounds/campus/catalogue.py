"""The cases of the ground: families, how often each, what is planted; and how a case is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from benchmarks.grounds.campus import teams
from benchmarks.grounds.campus.engine import Outcome, simulate
from benchmarks.grounds.campus.faults import CAUSES, OF_THE_JOB, Fault
from benchmarks.grounds.campus.files import Recorder
from benchmarks.grounds.campus.hardware import Floats, drawn_chips, even_chips
from benchmarks.grounds.campus.job import MEGATRON, Job
from benchmarks.grounds.campus.links import is_used, suspects
from benchmarks.grounds.campus.planting import Plant, plant
from benchmarks.grounds.campus.world import World
from benchmarks.grounds.ground import Case, Planted, Variation

GROUND = "campus"
_ATTEMPTS = 200


@dataclass(frozen=True, kw_only=True)
class Family:
    """State how many cases of a family there are, what jobs they are, and what is planted."""

    name: str
    count: int
    kinds: tuple[str, ...] = ()
    want: Callable[[Job], bool] = lambda job: True
    change: Callable[[Job], Job] = lambda job: job
    later: bool = False
    strength: tuple[float, float] = (0.0, 0.0)  # of a fault, where not its kind's own


def _crosses(job: Job) -> bool:
    return job.num_ranks > job.site.ranks_per_host


def _many_hosts(job: Job) -> bool:
    return job.num_ranks > 2 * job.site.ranks_per_host


def _two_hosts(job: Job) -> bool:
    return _crosses(job) and not _many_hosts(job)


def _many(job: Job) -> bool:
    return len(job.tracing.iterations) >= 6


def _full(job: Job) -> bool:
    return job.tracing.is_full


def _has_replicas(job: Job) -> bool:
    return job.layout.dp >= 4


def _stages(job: Job) -> bool:
    return job.layout.pp > 1 and not job.has_experts


def _large_stages(job: Job) -> bool:
    return _stages(job) and job.model.hidden >= 2048


def _hides(job: Job) -> bool:
    return job.layout.tp > 1 or job.layout.ep > 1


_unseen = teams.with_habits(unrecorded=frozenset({"tp", "cp", "ep"}))
_base = teams.with_tracing(granularity="base")

FAULTY = (
    Family(name="gpu_clock: slight", count=12, kinds=("gpu_clock",), strength=(1.05, 1.12)),
    Family(name="gpu_clock", count=14, kinds=("gpu_clock",), strength=(1.12, 1.4)),
    Family(name="gpu_clock: strong", count=10, kinds=("gpu_clock",), strength=(1.4, 2.0)),
    Family(
        name="gpu_clock: one of two", count=8, kinds=("gpu_clock",),
        want=lambda job: job.num_ranks == 2,
    ),
    Family(name="gpu_clock: later", count=10, kinds=("gpu_clock",), want=_many, later=True),
    Family(name="gpu_clock: base", count=8, kinds=("gpu_clock",), change=_base),
    Family(
        name="gpu_clock: waiting unseen", count=8, kinds=("gpu_clock",), change=_unseen, want=_hides
    ),
    Family(
        name="gpu_clock: documents", count=6, kinds=("gpu_clock",), change=teams.packed,
        want=lambda job: job.num_ranks >= 4,
    ),
    Family(name="gpu_memory", count=10, kinds=("gpu_memory",)),
    Family(name="throttling", count=12, kinds=("throttling",), want=_many),
    Family(
        name="power_brake", count=8, kinds=("power_brake",), want=_crosses
    ),
    Family(name="pcie", count=6, kinds=("pcie",)),
    Family(name="nvlink", count=6, kinds=("nvlink",), want=_full),
    Family(name="nvlink: pair", count=4, kinds=("nvlink_pair",), want=_full),
    Family(name="nic", count=6, kinds=("nic",), want=_many_hosts),
    Family(name="nic: two hosts", count=3, kinds=("nic",), want=_two_hosts),
    Family(
        name="rail", count=6, kinds=("rail",), want=lambda job: _crosses(job) and job.site.has_rails
    ),
    Family(
        name="flapping", count=6, kinds=("flapping",),
        want=lambda job: _many_hosts(job) and _many(job),
    ),
    Family(name="host_cpu", count=8, kinds=("host_cpu",), want=_crosses, change=teams.host_bound),
    Family(
        name="neighbour", count=6, kinds=("neighbour",), want=_crosses, change=teams.host_bound
    ),
    Family(name="loader", count=8, kinds=("loader",), want=_crosses),
    *(
        Family(
            name=f"{kind}: later", count=3, kinds=(kind,), later=True,
            want=lambda job: _crosses(job) and _many(job),
        )
        for kind in ("nic", "loader", "power_brake")
    ),
    Family(
        name="two faults", count=10, kinds=("gpu_clock", "any"),
        want=lambda job: _crosses(job) and job.num_ranks >= 8,
    ),
)  # fmt: skip

SOUND = (
    Family(name="gc", count=6, kinds=("gc",), want=_full),
    Family(name="healthy", count=26),
    Family(name="healthy: base", count=8, change=_base),
    Family(name="healthy: two ranks", count=6, want=lambda job: job.num_ranks == 2),
    Family(name="healthy: host-bound", count=8, change=teams.host_bound),
    Family(
        name="healthy: chips differ", count=8,
        change=teams.with_site(chip_spread=0.014, thermal_drift=0.004),
    ),
    Family(name="healthy: waiting unseen", count=8, change=_unseen, want=_hides),
    Family(name="look_alike: padded batches", count=7, change=teams.padded),
    Family(name="look_alike: packed documents", count=7, change=teams.packed),
    Family(
        name="look_alike: longer replica", count=8, kinds=("long_sequences",), change=teams.padded,
        want=_has_replicas,
    ),
    Family(
        name="look_alike: hot expert", count=7, kinds=("hot_expert",),
        want=lambda job: job.layout.ep > 1,
    ),
    Family(
        name="look_alike: uneven experts", count=4, change=teams.with_habits(expert_spread=0.3),
        want=lambda job: job.layout.ep > 1,
    ),
    Family(name="look_alike: heavy end", count=7, change=teams.heavy_end, want=_large_stages),
    Family(name="look_alike: hybrid model", count=6, change=teams.hybrid, want=_stages),
    Family(name="look_alike: windows", count=4, change=teams.mixed_windows, want=_stages),
    Family(
        name="look_alike: busy network", count=7, change=teams.with_site(busy_network=1.5),
        want=_crosses,
    ),
    Family(
        name="look_alike: checkpoints", count=6, want=_many,
        change=teams.with_habits(save_every=5, evaluate_every=10),
    ),
    Family(
        name="look_alike: rank 0 saves", count=4,
        want=lambda job: _many(job) and job.trainer != MEGATRON and job.tracing.window > 1,
        change=lambda job: teams.with_habits(
            save_every=job.tracing.interval, saves_alone=True, save_s=1.5
        )(job),
    ),
    Family(name="look_alike: warm-up", count=6, change=teams.from_the_first),
    Family(
        name="look_alike: noisy hosts", count=6,
        change=lambda job: teams.with_habits(noisy_hosts=0.2)(teams.host_bound(job)),
    ),
    Family(
        name="look_alike: collectors", count=4,
        change=teams.with_habits(gc_share=0.15, gc_s=0.08),
    ),
    Family(name="look_alike: batch grows", count=4, change=teams.ramping, want=_many),
    Family(
        name="look_alike: slow storage", count=6,
        change=lambda job: teams.with_habits(
            loading=replace(
                job.habits.loading, num_workers=2, seconds=0.6 * job.pass_s(), storage_stalls=0.3
            )
        )(job),
    ),
    Family(
        name="look_alike: clock steps", count=4, want=lambda job: job.tracing.windows[-1] > 0,
        change=teams.with_site(clock_steps=True, clock_offset_s=0.05, clock_drift_ppm=40.0),
    ),
)  # fmt: skip
FAMILIES = (*FAULTY, *SOUND)


def seed_of(draw: int, family: str, number: int) -> int:
    """Return the seed of a case: other ones in every draw."""
    return crc32(f"{GROUND}/{draw}/{family}/{number}".encode())


@lru_cache(maxsize=4)
def plans(draw: int) -> dict[str, tuple[Case, Job, tuple[Fault, ...]]]:
    """Return the cases of a draw by their names, with their jobs and faults."""
    found = {}
    for family in FAMILIES:
        for number in range(family.count):
            seed = seed_of(draw, family.name, number)
            job, faults = _planned(family, seed)
            title = family.name.replace("look_alike: ", "").replace(": ", "-").replace(" ", "-")
            case = Case(
                ground=GROUND, name=f"{title}-{job.num_ranks}-s{seed}", family=family.name,
                num_ranks=job.num_ranks, seed=seed, draw=draw,
                planted=tuple(_unpriced(job, fault) for fault in faults),
            )  # fmt: skip
            found[case.name] = case, job, faults
    return found


def _planned(family: Family, seed: int) -> tuple[Job, tuple[Fault, ...]]:
    rng = np.random.default_rng([seed, 1])
    for _ in range(_ATTEMPTS):
        job = teams.draw_job(rng, family.want, family.change)
        faults = plant(rng, job, Plant(family.kinds, family.later, family.strength))
        if faults is None or not all(_concerns(job, fault) for fault in faults):
            continue
        if len(faults) == 1 or _leaves_some(job, faults):
            return job, faults
    raise ValueError(f"{family.name}: no job can have these faults")


def _concerns(job: Job, fault: Fault) -> bool:
    """Tell whether a fault concerns anything that the job does."""
    if CAUSES[fault.kind] == "link":
        return is_used(job, fault)
    return True


def _leaves_some(job: Job, faults: tuple[Fault, ...]) -> bool:
    """Tell whether there is anybody left whom one must not name."""
    return len({rank for fault in faults for rank in _unpriced(job, fault).ranks}) < job.num_ranks


def _unpriced(job: Job, fault: Fault) -> Planted:
    ranks = fault.ranks
    if CAUSES[fault.kind] == "link":
        ranks = suspects(job, fault)
    return Planted(
        kind=fault.kind, cause=CAUSES[fault.kind],
        owner="job" if fault.kind in OF_THE_JOB else "node", ranks=ranks, host=fault.host,
        factor=1.0 if fault.kind == "gc" else fault.factor, first_iteration=fault.first_iteration,
        last_iteration=fault.last_iteration, share_of_time=fault.share,
    )  # fmt: skip


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw."""
    for case, _, _ in plans(draw).values():
        yield case


def job_of(case: Case) -> Job:
    """Return the job of a case."""
    return plans(case.draw)[case.name][1]


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with its cost.

    The first variant has all faults; each further one lacks one of them.
    """
    _, job, faults = plans(case.draw)[case.name]
    every = frozenset(range(len(faults)))
    variants = (every, *(every - {number} for number in range(len(faults))))
    chips = np.tile(drawn_chips(job.site, job.num_ranks, case.seed), (len(variants), 1))
    outcome = simulate(job, case.seed, chips, faults=faults, variants=variants)
    _record(job, case.seed, outcome, faults, directory)
    lasted = outcome.iteration_s
    return tuple(
        one.priced(job.tracing.iterations, lasted[0], lasted[1 + number])
        for number, one in enumerate(case.planted)
    )


def _record(
    job: Job, seed: int, outcome: Outcome, faults: tuple[Fault, ...], directory: Path
) -> None:
    chips = even_chips(job.num_ranks)[None]
    first = World(
        job=job, seed=seed, numbers=job.tracing.iterations,
        num_microbatches=job.microbatches_of(0), chips=chips, faults=faults,
        variants=(frozenset(range(len(faults))),),
    )  # fmt: skip
    Recorder(job=job, seed=seed, outcome=outcome, world=first).write(directory)


def slowness(case: Case) -> Floats:
    """Return by how much chips and faults stretch each rank's passes, (rank, iteration).

    Faults that stretch data rather than machines are no slowness: they are in both jobs.
    """
    _, job, faults = plans(case.draw)[case.name]
    own = frozenset(n for n, fault in enumerate(faults) if fault.kind in OF_THE_JOB)
    chips = np.stack([drawn_chips(job.site, job.num_ranks, case.seed), even_chips(job.num_ranks)])
    variants = (frozenset(range(len(faults))), own)
    found = simulate(job, case.seed, chips, faults=faults, variants=variants, keeps=False).own_s
    return np.asarray(found[0] / found[1])


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Floats:
    """Simulate the job of a case without faults, but with other chips; return its passes' times."""
    job = job_of(case)
    chips = drawn_chips(job.site, job.num_ranks, case.seed, variation.chip_spread_ratio)
    faults: tuple[Fault, ...] = ()
    if variation.slow_rank >= 0:
        faults = (Fault(kind="gpu_clock", ranks=(variation.slow_rank,), factor=variation.factor),)
    outcome = simulate(
        job, case.seed, chips[None], faults=faults,
        variants=(frozenset(range(len(faults))),), keeps=directory is not None,
    )  # fmt: skip
    if directory is not None:
        _record(job, case.seed, outcome, faults, directory)
    return np.asarray(outcome.own_s[0])
