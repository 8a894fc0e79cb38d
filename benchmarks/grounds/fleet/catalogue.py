"""All cases of this ground: faults of every kind and severity, and jobs that only look like one.

A family is a function that takes a draft (a job in some layout and style, all of it drawn from the
case's seed) and does something to it. Layouts, severities and shapes in time go round, so that
every draw has the same families over the same layouts; everything else is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.grounds.fleet.hardware import Floats, Trouble
from benchmarks.grounds.fleet.jobs import A100, CPU, H100, Job
from benchmarks.grounds.fleet.scenario import (
    Cause,
    Scenario,
    indistinguishable_by_link,
    indistinguishable_hosts,
)
from benchmarks.grounds.ground import Case, Planted, Variation

T = TypeVar("T")
SECOND = 1e9
_DENSE, _MOE = "dense", "moe"

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "layers": (_DENSE,) * 6, "hidden": 3072},
    "tp2": {"tp": 2, "layers": (_DENSE,) * 6},
    "pp2": {"pp": 2, "layers": (_DENSE,) * 6, "num_microbatches": 6},
    "dp4n2": {"dp": 4, "ranks_per_host": 2, "layers": (_DENSE,) * 5, "hidden": 3072},
    "tp2dp2": {"tp": 2, "dp": 2, "layers": (_DENSE,) * 6},
    "tp2dp2n2": {"tp": 2, "dp": 2, "ranks_per_host": 2, "layers": (_DENSE,) * 6},
    "pp4n2": {"pp": 4, "ranks_per_host": 2, "layers": (_DENSE,) * 8, "num_microbatches": 8},
    "pp2dp2n2": {"pp": 2, "dp": 2, "ranks_per_host": 2, "layers": (_DENSE,) * 6},
    "ep4": {"dp": 4, "ep": 4, "layers": (_MOE,) * 4, "hidden": 2048},
    "dp8": {"dp": 8, "layers": (_DENSE,) * 4, "num_microbatches": 3},
    "dp8n4": {"dp": 8, "ranks_per_host": 2, "layers": (_DENSE,) * 4, "num_microbatches": 3},
    "tp2pp2dp2": {"tp": 2, "pp": 2, "dp": 2},
    "tp4dp2n2": {"tp": 4, "dp": 2, "ranks_per_host": 4, "layers": (_DENSE,) * 5, "hidden": 6144},
    "cp2tp2dp2": {"cp": 2, "tp": 2, "dp": 2, "layers": (_DENSE,) * 4, "sequence": 8192},
    "tp2pp2vpp2dp2n4": {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "ranks_per_host": 2},
    "ep4dp8pp1n2": {
        "dp": 8, "ep": 4, "ranks_per_host": 4, "layers": (_DENSE, _MOE, _MOE), "hidden": 2048,
        "num_microbatches": 3,
    },
    "ep2dp4pp2n2": {
        "dp": 4, "pp": 2, "ep": 2, "ranks_per_host": 4, "layers": (_MOE,) * 4, "hidden": 2048,
    },
    "hybrid-dp4pp2n2": {
        "dp": 4, "pp": 2, "ranks_per_host": 4, "layers": ("mamba", "mamba", _DENSE, "mamba") * 2,
    },
    "tp2dp8n4": {"tp": 2, "dp": 8, "ranks_per_host": 4, "layers": (_DENSE,) * 4,
                 "num_microbatches": 3},
    "tp4pp2dp2n4": {
        "tp": 4, "pp": 2, "dp": 2, "ranks_per_host": 4, "layers": (_DENSE,) * 6, "hidden": 6144,
    },
    "pp4dp4n4": {"pp": 4, "dp": 4, "ranks_per_host": 4, "layers": (_DENSE,) * 8},
    "tp8dp2n2": {"tp": 8, "dp": 2, "layers": (_DENSE,) * 4, "hidden": 8192},
    "dp16n2": {"dp": 16, "layers": (_DENSE,) * 3, "num_microbatches": 2},
    "tp8pp2dp2n4": {"tp": 8, "pp": 2, "dp": 2, "layers": (_DENSE,) * 4, "hidden": 8192},
    "tp4dp8n8": {
        "tp": 4, "dp": 8, "ranks_per_host": 4, "layers": (_DENSE,) * 3, "num_microbatches": 2,
    },
    "tp4pp4dp4n16": {
        "tp": 4, "pp": 4, "dp": 4, "ranks_per_host": 4, "layers": (_DENSE,) * 4,
        "granularity": "base",
    },
    "tp8dp8n8": {
        "tp": 8, "dp": 8, "layers": (_DENSE,) * 3, "num_microbatches": 2, "granularity": "base",
    },
}  # fmt: skip

SMALL = ("dp2", "tp2", "pp2", "tp2dp2", "ep4", "dp8", "tp2pp2dp2", "cp2tp2dp2")
SPREAD = (  # over several hosts
    "tp2dp8n4", "pp4dp4n4", "dp8n4", "tp4pp2dp2n4", "dp4n2", "tp8dp2n2", "pp2dp2n2",
    "ep4dp8pp1n2", "tp2pp2vpp2dp2n4", "dp16n2", "tp2dp2n2", "hybrid-dp4pp2n2", "tp4dp8n8",
    "tp8pp2dp2n4", "ep2dp4pp2n2", "tp4dp2n2", "tp4pp4dp4n16", "pp4n2", "tp8dp8n8",
)  # fmt: skip
ANY = tuple(name for pair in zip(SPREAD, SMALL * 3, strict=False) for name in pair)
LARGE = ("tp4pp4dp4n16", "tp8dp8n8", "tp4dp8n8", "tp8pp2dp2n4", "ep2dp4pp2n2")
FOUR_HOSTS = ("tp2dp8n4", "pp4dp4n4", "dp8n4", "tp4pp2dp2n4", "tp4dp8n8", "tp8dp8n8")

_MOST_EVENTS = 15_000  # of a case, so that it takes a second or two


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A job, the case's own source of chance, and its number within the family."""

    job: Job
    number: int
    draws: np.random.Generator

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of some choices, another one for each case of the family."""
        return choices[self.number % len(choices)]

    def rank(self, among: Sequence[int] = ()) -> int:
        """Return any rank, or one of these."""
        return int(self.draws.choice(among or range(self.job.num_ranks)))

    def host(self) -> tuple[int, tuple[int, ...]]:
        """Return any host and its ranks."""
        host = int(self.draws.integers(self.job.num_hosts))
        return host, tuple(r for r in range(self.job.num_ranks) if self.job.host_of(r) == host)

    def with_job(self, **changes: Any) -> Draft:
        """Return the draft of a changed job."""
        return replace(self, job=replace(self.job, **changes))


Family = Callable[[Draft], tuple[Job, tuple[Cause, ...]]]


def cases(draw: int = 0) -> Iterator[Case]:
    """Yield all cases of a draw without simulating any."""
    for scenario in _scenarios(draw).values():
        yield scenario.case()


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the files of a case; return what was planted, with its cost."""
    return _scenarios(case.draw)[case.name].write(directory)


def slowness(case: Case) -> Floats:
    """Return how many times longer each rank's passes take than on equal chips without a trouble,
    (rank, iteration).
    """
    scenario = _scenarios(case.draw)[case.name]
    equal = scenario.varied(Variation(chip_spread_ratio=0.0))
    return scenario.pass_times_ns() / equal.pass_times_ns()


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Floats:
    """Simulate the sound job of a case, varied; return its pass times, (rank, iteration)."""
    return _scenarios(case.draw)[case.name].varied(variation).pass_times_ns(directory)


@cache
def _scenarios(draw: int) -> dict[str, Scenario]:
    found = {}
    for place, (family, make, count, layouts) in enumerate(_FAMILIES):
        for number in range(count):
            seed = draw * 100_000 + (place + 1) * 100 + number
            layout = layouts[number % len(layouts)]
            draws = np.random.default_rng((seed, 2027))
            draft = Draft(job=_styled(layout, draws), number=number, draws=draws)
            job, causes = make(draft)
            name = f"{family.removeprefix('look_alike: ').replace(' ', '-')}-{layout}-s{seed}"
            found[name] = Scenario(
                name=name, family=family, seed=seed, draw=draw, job=job, causes=causes
            )
    return found


def _styled(layout: str, draws: np.random.Generator) -> Job:
    """Return a job in a layout, its flags, its hardware's quality and its tracing drawn."""
    shape = LAYOUTS[layout]
    interval, window = [(1, 1), (1, 1), (5, 2), (5, 2), (10, 3), (25, 5), (40, 1)][
        int(draws.integers(7))
    ]
    style: dict[str, Any] = {
        "chip": H100 if draws.random() < 0.65 else A100,
        "chip_spread": float(draws.choice((0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05))),
        "noise": float(draws.choice((0.006, 0.012, 0.02, 0.04))),
        "clock_wander": float(draws.choice((0.001, 0.003, 0.006, 0.01))),
        "launch_us": float(draws.uniform(3.5, 9)),
        "host_jitter": float(draws.uniform(0.05, 0.3)),
        "sequence_parallel": bool(draws.random() < 0.6),
        "overlap": bool(draws.random() < 0.6),
        "distributed_optimizer": bool(draws.random() < 0.7),
        "recompute": bool(draws.random() < 0.2),
        "rails": bool(draws.random() < 0.6),
        "oversubscription": float(draws.choice((1.0, 1.0, 2.0, 4.0))),
        "length_spread": float(draws.choice((0.0, 0.0, 0.0, 0.08, 0.25))),
        "packed": bool(draws.random() < 0.4),
        "skew": float(draws.choice((0.02, 0.06, 0.15))),
        "granularity": "base" if draws.random() < 0.25 else "full",
        "log_every": int(draws.choice((0, 5, 10))),
        "counters": bool(draws.random() < 0.5),
        "first_traced": 1 if draws.random() < 0.5 else 1 + 1000 * interval,
        "interval": interval,
        "window": window,
    } | shape
    if shape.get("ep", 1) > 1:
        style["sequence_parallel"] = False
    job = Job(**style)
    per_layer = 14 if job.recompute else 10
    layers = len(job.layers) / job.pp * job.num_microbatches
    events = job.num_ranks * layers * per_layer * (1.6 if job.tp > 1 else 1.0)
    most = int(min(max(_MOST_EVENTS / events, 3), 30))
    return replace(job, num_traced=int(draws.integers(max(3, most // 2), most + 1)))


# --- when a fault holds -------------------------------------------------------------------------


def _lasting(draft: Draft) -> dict[str, Any]:
    return {}


def _onset(draft: Draft) -> dict[str, Any]:
    """Return a fault that begins after a third of what is traced."""
    numbers = draft.job.iterations
    return {"first_iteration": numbers[len(numbers) // 3]}


def _on_and_off(draft: Draft) -> dict[str, Any]:
    """Return a fault of every second or third stretch of iterations."""
    on = 1 + int(draft.draws.integers(2))
    return {"on_iterations": on, "of_iterations": on * 2 + int(draft.draws.integers(2))}


def _ramp(draft: Draft) -> dict[str, Any]:
    numbers = draft.job.iterations
    return {
        "first_iteration": numbers[0],
        "ramp_iterations": max(2, (numbers[-1] - numbers[0]) * 2 // 3),
    }


def _bursts(draft: Draft) -> dict[str, Any]:
    """Return bursts that are shorter than an iteration."""
    return {
        "period_ns": float(draft.draws.uniform(0.12, 0.5)) * SECOND,
        "share": float(draft.draws.choice((0.2, 0.35, 0.5))),
    }


_SHAPES = (_lasting, _lasting, _onset, _bursts, _lasting, _on_and_off, _ramp)


def _fault(
    draft: Draft, kind: str, cause: str, factor: float, ranks: tuple[int, ...],
    *, when: dict[str, Any] | None = None, named: tuple[int, ...] = (), host: str = "",
    owner: str = "node",
) -> Cause:  # fmt: skip
    """Return a fault of some ranks; `named` are all that may be named for it."""
    timing: dict[str, Any] = draft.pick(_SHAPES)(draft) if when is None else when
    planted = Planted(
        kind=kind, cause=cause, owner=owner, ranks=named or ranks, host=host, factor=factor,
        first_iteration=timing.get("first_iteration", 1),
        share_of_time=timing.get("share", 1.0),
    )  # fmt: skip
    trouble = Trouble(kind=kind, ranks=ranks, factor=factor, **timing)
    return Cause(planted=planted, troubles=(trouble,))


def _host_name(host: int) -> str:
    return f"node-{host:02d}"


# --- faults -------------------------------------------------------------------------------------


def _one_gpu(kind: str, factors: Sequence[float], shaped: bool = True) -> Family:
    def make(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
        when: dict[str, Any] | None = None if shaped else {}
        ranks = (draft.rank(),)
        return draft.job, (_fault(draft, kind, "compute", draft.pick(factors), ranks, when=when),)

    return make


def _power_brake(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    factor, ranks = draft.pick((1.6, 2.5, 2.0)), (draft.rank(),)
    cause = _fault(draft, "power_brake", "compute", factor, ranks, when=_bursts(draft))
    return draft.job, (cause,)


def _pcie(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Slow the copies of a job whose optimizer keeps its state in the host's memory."""
    draft = draft.with_job(offload=True)
    ranks = (draft.rank(),)
    return draft.job, (_fault(draft, "pcie", "compute", draft.pick((2.0, 4.0, 8.0)), ranks),)


def _nvlink(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    ranks = (draft.rank(),)
    named = indistinguishable_by_link(draft.job, ranks, remote=False)
    factor = draft.pick((4.0, 8.0, 2.0, 6.0))
    return draft.job, (_fault(draft, "nvlink", "link", factor, ranks, named=named),)


def _nic(kind: str, factors: Sequence[float]) -> Family:
    """Slow one NIC: that of a GPU on rails, else that of a host."""

    def make(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
        host, of_host = draft.host()
        factor = draft.pick(factors)
        when = _bursts(draft) if kind == "nic_flap" else None
        if not draft.job.rails or kind == "uplink":
            named = indistinguishable_hosts(draft.job, of_host)
            name = _host_name(host)
            cause = _fault(draft, kind, "link", factor, of_host, when=when, named=named, host=name)
        else:
            ranks = (draft.rank(of_host),)
            named = indistinguishable_by_link(draft.job, ranks, remote=True)
            cause = _fault(draft, kind, "link", factor, ranks, when=when, named=named)
        return draft.job, (cause,)

    return make


def _whole_host(kind: str, cause: str, factors: Sequence[float], **changes: Any) -> Family:
    def make(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
        changed = draft.with_job(**changes)
        host, ranks = changed.host()
        factor = changed.pick(factors)
        return changed.job, (_fault(changed, kind, cause, factor, ranks, host=_host_name(host)),)

    return make


def _loader(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    job = replace(draft.job, loader_ms=float(draft.draws.uniform(15, 50)))
    rank = draft.rank(_loading(job))
    return job, (_fault(draft, "loader", "loader", draft.pick((6.0, 12.0, 3.0)), (rank,)),)


def _storage(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Slow the storage of one host: all its ranks that load are late."""
    job = replace(draft.job, loader_ms=float(draft.draws.uniform(15, 50)))
    host = job.host_of(draft.rank(_loading(job)))
    ranks = tuple(rank for rank in range(job.num_ranks) if job.host_of(rank) == host)
    factor = draft.pick((5.0, 10.0, 3.0))
    cause = _fault(draft, "storage", "loader", factor, ranks, host=_host_name(host))
    return job, (cause,)


def _loading(job: Job) -> tuple[int, ...]:
    return tuple(
        rank
        for rank, place in enumerate(job.places)
        if place.tp == 0 and place.pp in (0, job.pp - 1)
    )


def _gc(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Let Python collect everything on one rank in most iterations, for so many ms."""
    job = replace(draft.job, granularity="full")
    ranks = (draft.rank(),)
    cause = _fault(draft, "gc", "gc", draft.pick((60.0, 200.0, 20.0)), ranks, when={})
    return job, (cause,)


def _two_faults(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    job = draft.job
    one, other = (int(each) for each in draft.draws.choice(job.num_ranks, 2, replace=False))
    first = _fault(draft, "gpu_clock", "compute", draft.pick((1.3, 1.15, 1.6)), (one,), when={})
    if draft.number % 3 == 0:
        second = _fault(draft, "hbm", "compute", 2.0, (other,), when=_onset(draft))
    elif draft.number % 3 == 1:
        second = _fault(draft, "stolen_gpu", "compute", 1.5, (other,), when={})
    else:
        rank = draft.rank([each for each in _loading(job) if each != one] or _loading(job))
        job = replace(job, loader_ms=40.0)
        second = _fault(draft, "loader", "loader", 8.0, (rank,), when={})
    return job, (first, second)


# --- sound jobs, and those that look as if they were not -----------------------------------------


def _healthy(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    return draft.job, ()


def _missing_ranks(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    return replace(draft.job, missing=(draft.rank(),)), ()


def _long_replica(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Give one replica longer data throughout."""
    replica = int(draft.draws.integers(draft.job.dp))
    ranks = _of_replica(draft.job, replica)
    factor = draft.pick((1.15, 1.06, 1.4))
    job = replace(draft.job, packed=draft.number % 2 == 0)
    cause = _fault(
        draft, "long_sequences", "sequence_imbalance", factor, ranks, when={}, owner="job"
    )  # fmt: skip
    return job, (cause,)


def _of_replica(job: Job, replica: int) -> tuple[int, ...]:
    return tuple(rank for rank, place in enumerate(job.places) if place.dp == replica)


def _by_turns(kind: str, groups: list[tuple[int, ...]], cause: str, factor: float) -> Cause:
    """Let another group be slow in each iteration."""
    everybody = tuple(sorted(rank for group in groups for rank in group))
    troubles = tuple(
        Trouble(kind=kind, ranks=group, factor=factor, turn=turn, turns=len(groups))
        for turn, group in enumerate(groups)
    )
    planted = Planted(kind=kind, cause=cause, owner="job", ranks=everybody, factor=factor)
    return Cause(planted=planted, troubles=troubles)


def _long_by_turns(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    groups = [_of_replica(draft.job, replica) for replica in range(draft.job.dp)]
    factor = draft.pick((1.3, 1.6))
    return draft.job, (_by_turns("long_by_turns", groups, "sequence_imbalance", factor),)


def _moving(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Let another GPU be slow in each iteration."""
    groups: list[tuple[int, ...]] = [(rank,) for rank in range(draft.job.num_ranks)]
    return draft.job, (_by_turns("moving", groups, "compute", draft.pick((1.2, 1.5))),)


def _hot_expert(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    job = draft.job
    groups = [
        tuple(rank for rank, place in enumerate(job.places) if place.ep == expert)
        for expert in range(job.ep)
    ]
    if draft.number % 3 == 2:
        return job, (_by_turns("moving_expert", groups, "sequence_imbalance", 1.8),)
    ranks = groups[int(draft.draws.integers(job.ep))]
    factor = draft.pick((1.3, 1.8))
    cause = _fault(draft, "hot_expert", "sequence_imbalance", factor, ranks, when={}, owner="job")
    return job, (cause,)


def _uneven_stages(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Split the layers unevenly over the stages, the first or last one with most of them."""
    job = draft.job
    count = job.pp * job.vpp
    sizes = [max(1, len(job.layers) // count)] * count
    sizes[-1 if draft.number % 2 else 0] += 1 + draft.number % 3
    return replace(job, split=tuple(sizes), layers=job.layers[:1] * sum(sizes)), ()


def _heavy_ends(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    return replace(draft.job, vocabulary=draft.pick((128_000, 256_000))), ()


def _hybrid(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Let layers of different kinds be unevenly spread over the stages."""
    half = len(draft.job.layers) // 2
    layers = ("mamba",) * half + (_DENSE,) * (len(draft.job.layers) - half)
    return replace(draft.job, layers=layers), ()


def _pauses(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Log on rank 0, save and evaluate often."""
    every: dict[str, Any] = draft.pick(({"log_every": 1}, {"save_every": 3}, {"eval_every": 2}))
    return replace(draft.job, interval=1, window=1, **every), ()


def _warm_up(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    job = replace(draft.job, first_traced=1, warm_up=draft.pick((8.0, 20.0)))
    return replace(job, num_traced=max(3, job.num_traced // 2)), ()


def _everybody(kind: str, cause: str, factors: Sequence[float]) -> Family:
    """Slow the whole job alike."""

    def make(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
        ranks = tuple(range(draft.job.num_ranks))
        factor = draft.pick(factors)
        return draft.job, (_fault(draft, kind, cause, factor, ranks, when={}, owner="job"),)

    return make


def _file_server(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    job = replace(draft.job, loader_ms=40.0)
    make = _everybody("file_server", "loader", (4.0, 8.0))
    return make(replace(draft, job=job))


def _gc_everywhere(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Let every rank collect when it likes: each pause holds up all."""
    job = replace(draft.job, granularity="full")
    ranks = tuple(range(job.num_ranks))
    planted = Planted(kind="gc_everywhere", cause="gc", owner="job", ranks=ranks, factor=40.0)
    trouble = Trouble(kind="gc_everywhere", ranks=ranks, factor=40.0, share=0.2)
    return job, (Cause(planted=planted, troubles=(trouble,)),)


def _cpu_job(job: Job, draws: np.random.Generator) -> Job:
    """Return the small model that somebody trains on a shared machine's cores."""
    return replace(
        job, chip=CPU, hidden=256, sequence=256, vocabulary=4000, launch_us=30.0, loader_ms=2.0,
        ranks_per_host=job.num_ranks, noise=0.05, host_jitter=float(draws.uniform(0.2, 0.6)),
        log_every=5, warm_up=1.5,
    )  # fmt: skip


def _noisy_cpu(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    return _cpu_job(draft.job, draft.draws), ()


def _slow_on_cpu(draft: Draft) -> tuple[Job, tuple[Cause, ...]]:
    """Slow one rank of a job on CPUs."""
    job = _cpu_job(draft.job, draft.draws)
    ranks = (draft.rank(),)
    return job, (_fault(draft, "gpu_clock", "compute", draft.pick((1.3, 1.6)), ranks, when={}),)


_REPLICATED = ("dp8", "tp2dp2n2", "dp8n4", "tp2pp2dp2", "pp4dp4n4", "ep4dp8pp1n2", "tp2dp8n4")
_STAGED = ("pp2", "pp4n2", "tp2pp2dp2", "pp4dp4n4", "pp2dp2n2", "tp4pp2dp2n4")
_EXPERTS = ("ep4", "ep4dp8pp1n2", "ep2dp4pp2n2")
_TENSOR = ("tp2dp2", "tp2", "tp8dp2n2", "tp4pp2dp2n4", "cp2tp2dp2", "tp2pp2dp2", "tp4dp2n2", "pp2")
_CPU = ("dp2", "tp2dp2", "tp2pp2dp2", "pp2")

_BUSY_HOSTS = {"launch_us": 13.0, "hidden": 2048}  # kernels so short that launching counts
_CLOCK = (1.1, 1.05, 1.3, 1.02, 1.15, 2.0, 1.08)
_FAMILIES: tuple[tuple[str, Family, int, tuple[str, ...]], ...] = (
    ("gpu_clock", _one_gpu("gpu_clock", _CLOCK), 20, ANY),
    ("gpu_clock at scale", _one_gpu("gpu_clock", (1.3, 1.1, 1.6)), 6, LARGE),
    ("power_brake", _power_brake, 8, ANY[3:]),
    ("hbm", _one_gpu("hbm", (1.5, 3.0, 1.2, 2.0)), 8, ANY[5:]),
    ("row_remap", _one_gpu("row_remap", (3.0, 8.0, 5.0), shaped=False), 5, ANY[8:]),
    ("stolen_gpu", _one_gpu("stolen_gpu", (1.5, 3.0, 1.2, 5.0)), 8, ANY[10:]),
    ("hot_host", _whole_host("hot_host", "compute", (1.1, 1.2, 1.35)), 6, SPREAD),
    ("pcie", _pcie, 4, SPREAD[2:]),
    ("nvlink", _nvlink, 8, _TENSOR),
    ("nic", _nic("nic", (2.0, 4.0, 3.0)), 10, SPREAD),
    ("nic_flap", _nic("nic_flap", (4.0, 8.0)), 5, SPREAD[3:]),
    ("uplink", _nic("uplink", (2.0, 4.0)), 5, FOUR_HOSTS),
    ("host_cpu", _whole_host("host_cpu", "host", (3.0, 8.0, 15.0), **_BUSY_HOSTS), 7, SPREAD),
    ("host_memory", _whole_host("host_memory", "host", (6.0, 12.0), loader_ms=30.0), 4, SPREAD[4:]),
    ("loader", _loader, 7, ANY[2:]),
    ("storage", _storage, 4, FOUR_HOSTS),
    ("gc", _gc, 5, ANY[4:]),
    ("two faults", _two_faults, 8, ("dp8", *SPREAD)),
    ("cpu job", _slow_on_cpu, 4, _CPU),
    ("healthy", _healthy, 10, ANY[1:]),
    ("healthy: large", _healthy, 4, LARGE),
    ("healthy: missing ranks", _missing_ranks, 3, ("dp8", "tp2dp8n4", "pp4dp4n4")),
    ("look_alike: long replica", _long_replica, 6, _REPLICATED),
    ("look_alike: long by turns", _long_by_turns, 4, _REPLICATED[2:]),
    ("look_alike: moving straggler", _moving, 4, ANY[6:]),
    ("look_alike: hot expert", _hot_expert, 5, _EXPERTS),
    ("look_alike: uneven stages", _uneven_stages, 4, _STAGED),
    ("look_alike: heavy ends", _heavy_ends, 3, _STAGED[1:]),
    ("look_alike: hybrid stages", _hybrid, 3, _STAGED[1:]),
    ("look_alike: pauses", _pauses, 5, ANY[1:]),
    ("look_alike: warm-up", _warm_up, 3, ANY[7:]),
    ("look_alike: uniform", _everybody("uniform", "compute", (1.3, 2.0)), 2, ANY[9:]),
    ("look_alike: slow network", _everybody("slow_network", "link", (2.0, 4.0)), 4, SPREAD),
    ("look_alike: file server", _file_server, 3, ANY[11:]),
    ("look_alike: collectors", _gc_everywhere, 3, ANY[12:]),
    ("look_alike: noisy cpu", _noisy_cpu, 5, _CPU),
)
