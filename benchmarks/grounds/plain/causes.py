"""The causes that are planted: whom each hits, what it makes longer, and who may be named for it.

Links are the hard part: members of one group end together, so a slow link names the group at most.
Who may be named are the ranks that share every group that feels the link with the one that has it:

    tensor parallelism of pairs, GPU 5's NVLink     tp@4 is slow, dp@… are not: 4 or 5
    HSDP, the NIC of GPU 5                          dp-dp_replicate@5 is slow: all of its members
    DDP over all hosts, any NIC                     all are alike: nobody can be told, 5 it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.plain.job import EXPERTS, PIPELINES, Job
from benchmarks.grounds.plain.machine import GroupSet, ring_bytes_per_s
from benchmarks.grounds.plain.trouble import Hits, Trouble

_SLIGHT, _STRONG = (1.03, 1.05, 1.08, 1.12), (1.2, 1.3, 1.5, 2.0)
_FELT_RATIO = 1.05
_PAIR_SHARE = 0.3
_MANY_EVENTS = 16
"""Traced: so many batches that a quarter of them is some."""

NODE, OWN = "node", "job"
"""Owners."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """A job with what goes wrong in it, and the same job in good health."""

    job: Job
    sound: Job
    troubles: tuple[Trouble, ...] = ()
    extra: tuple[Planted, ...] = ()
    """Planted by the job itself, which differs from the sound one."""

    @property
    def planted(self) -> tuple[Planted, ...]:
        """Return what was planted, without its costs."""
        return tuple(one.planted for one in self.troubles) + self.extra


Cause: TypeAlias = Callable[[Job, np.random.Generator], Scenario]


def _scenario(job: Job, trouble: Trouble) -> Scenario:
    return Scenario(job=job, sound=job, troubles=(trouble,))


def _pick(draws: np.random.Generator, values: Sequence[float]) -> float:
    return float(values[int(draws.integers(len(values)))])


def _rank(job: Job, draws: np.random.Generator) -> int:
    present = [rank for rank in range(job.num_ranks) if rank not in job.tracing.missing]
    return int(draws.choice(present))


def _compute_s(job: Job) -> float:
    """Return about how long the passes of a rank take in an iteration."""
    return 3.2 * float(job.model.forward_s.sum()) * job.microbatches


def _late(job: Job, draws: np.random.Generator) -> int:
    """Return a traced iteration in the middle of what is traced, at which something may begin."""
    iterations = job.tracing.iterations
    return int(iterations[int(len(iterations) * draws.uniform(0.3, 0.6))])


# A GPU


def gpu_clock(job: Job, draws: np.random.Generator) -> Scenario:
    """Lower a GPU's clock: to the end, from some iteration on, or on and off."""
    rank, factor = _rank(job, draws), _pick(draws, (*_SLIGHT, *_STRONG))
    pattern = _pick(draws, (0, 0, 0, 1, 2))
    first = _late(job, draws) if pattern == 1 else 1
    every = int(draws.integers(1, 3)) + 1 if pattern == 2 else 1
    planted = Planted(
        kind="gpu_clock",
        cause="compute",
        owner=NODE,
        ranks=(rank,),
        factor=factor,
        first_iteration=first,
        share_of_time=0.5 if every > 1 else 1.0,
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.CLOCK,), ranks=(rank,), every=every))


def throttling(job: Job, draws: np.random.Generator) -> Scenario:
    """Throttle a GPU in bursts, by the clock on the wall."""
    rank = _rank(job, draws)
    planted = Planted(
        kind="throttling",
        cause="compute",
        owner=NODE,
        ranks=(rank,),
        factor=_pick(draws, (1.2, 1.3, 1.3, 1.6)),
        share_of_time=_pick(draws, (0.2, 0.2, 0.35)),
    )
    period_s = 10 ** draws.uniform(-1.7, 0.3)
    return _scenario(
        job, Trouble(planted=planted, hits=(Hits.CLOCK,), ranks=(rank,), period_s=period_s)
    )


def hbm(job: Job, draws: np.random.Generator) -> Scenario:
    """Slow a GPU's memory down: norms and the optimizer, not the products."""
    rank = _rank(job, draws)
    planted = Planted(
        kind="hbm", cause="compute", owner=NODE, ranks=(rank,), factor=draws.uniform(1.3, 2.5)
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.MEMORY,), ranks=(rank,)))


# A host


def _host_of(job: Job, draws: np.random.Generator) -> tuple[str, tuple[int, ...]]:
    host = int(draws.integers(job.machine.num_hosts))
    return job.machine.host_names[host], job.machine.ranks_of(host)


def host_gpus(job: Job, draws: np.random.Generator) -> Scenario:
    """Lower the clock of all GPUs of a host: power or cooling."""
    host, ranks = _host_of(job, draws)
    factor = _pick(draws, (1.08, 1.15, 1.3, 1.5))
    planted = Planted(
        kind="host_gpus", cause="compute", owner=NODE, ranks=ranks, host=host, factor=factor
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.CLOCK,), ranks=ranks))


def host_cpu(job: Job, draws: np.random.Generator) -> Scenario:
    """Slow down what launches: a host's CPU. It costs nothing where hosts are far ahead."""
    host, ranks = _host_of(job, draws)
    planted = Planted(
        kind="host_cpu",
        cause="host",
        owner=NODE,
        ranks=ranks,
        host=host,
        factor=draws.uniform(1.5, 3.5),
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.LAUNCHES,), ranks=ranks))


def host_memory(job: Job, draws: np.random.Generator) -> Scenario:
    """Have something else on a host take its memory's bandwidth, at times."""
    host, ranks = _host_of(job, draws)
    planted = Planted(
        kind="host_memory",
        cause="host",
        owner=NODE,
        ranks=ranks,
        host=host,
        factor=draws.uniform(1.3, 2.0),
    )
    trouble = Trouble(
        planted=planted,
        hits=(Hits.LAUNCHES, Hits.FETCHES),
        ranks=ranks,
        extra_s=_compute_s(job) * draws.uniform(0.05, 0.3),
        share_of_events=draws.uniform(0.2, 0.5),
    )
    return _scenario(job, trouble)


def loader(job: Job, draws: np.random.Generator) -> Scenario:
    """Deliver the batches of a rank, or of a host, late; always or often."""
    rank = _rank(job, draws)
    host = ""
    ranks: tuple[int, ...] = (rank,)
    if job.machine.num_hosts > 1 and draws.random() < 0.4:
        host, ranks = _host_of(job, draws)
    planted = Planted(kind="loader", cause="loader", owner=NODE, ranks=ranks, host=host)
    return _scenario(job, _late_batches(job, draws, planted))


def gc(job: Job, draws: np.random.Generator) -> Scenario:
    """Let Python's collector stop one rank, long and often."""
    rank = _rank(job, draws)
    planted = Planted(kind="gc", cause="gc", owner=NODE, ranks=(rank,))
    trouble = Trouble(
        planted=planted,
        hits=(Hits.COLLECTIONS,),
        ranks=(rank,),
        extra_s=max(0.02, _compute_s(job) * draws.uniform(0.3, 1.0)),
        share_of_events=draws.uniform(0.4, 1.0),
    )
    return _scenario(job, trouble)


def pcie(job: Job, draws: np.random.Generator) -> Scenario:
    """Slow down a GPU's link to its host: copies of batches, between the spans that are recorded.

    They take 5 to 50 % of the passes then, or hardly more than before where batches are small.
    """
    rank = _rank(job, draws)
    copies_s = job.microbatches * job.habits.input_bytes / job.machine.pcie_bytes_per_s
    factor = 1.0 + _compute_s(job) * draws.uniform(0.05, 0.5) / copies_s
    planted = Planted(
        kind="pcie", cause="host", owner=NODE, ranks=(rank,), factor=min(max(factor, 2.0), 12.0)
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.COPIES,), ranks=(rank,)))


# Links


def alike(job: Job, rank: int, feels: Callable[[GroupSet], bool]) -> tuple[int, ...]:
    """Return the ranks that share with this one every group that feels its link."""
    found = set(range(job.num_ranks))
    for groups in _used(job):
        if feels(groups):
            found &= set(groups.members_of(rank))
    return (rank,) if len(found) == job.num_ranks > 2 else tuple(sorted(found))


def _used(job: Job) -> list[GroupSet]:
    """Return the groups over which much is sent."""
    groups = job.groups()
    if job.mesh:
        names = [name for name, _ in job.mesh]
    else:
        names = ["world"] + (["experts"] if job.trainer in EXPERTS else [])
    return [groups[name] for name in names if groups[name].size > 1]


def nvlink(job: Job, draws: np.random.Generator) -> Scenario:
    """Slow down the NVLinks of a GPU, or of it and its neighbour."""
    rank, factor, machine = _rank(job, draws), _pick(draws, (1.5, 2.0, 3.0, 4.0)), job.machine

    def feels(groups: GroupSet) -> bool:
        reserve = machine.nvlink_bytes_per_s / ring_bytes_per_s(machine, groups)
        return groups.per_host > 1 and factor / reserve > _FELT_RATIO

    ranks = alike(job, rank, feels)
    owners: tuple[int, ...] = (rank,)
    if job.trainer in PIPELINES:
        ranks = _ends_of_messages(job, rank, within_host=True) or ranks
    elif draws.random() < _PAIR_SHARE:
        owners = tuple(sorted((rank, rank ^ 1)))
        ranks = tuple(sorted({*ranks, *owners}))
    planted = Planted(kind="nvlink", cause="link", owner=NODE, ranks=ranks, factor=factor)
    return _scenario(job, Trouble(planted=planted, hits=(Hits.NVLINK,), ranks=owners))


def nic(job: Job, draws: np.random.Generator) -> Scenario:
    """Halve a NIC: that of a GPU where there are rails, else that of a host."""
    rank, machine = _rank(job, draws), job.machine
    owners = (rank,) if machine.has_rails else machine.ranks_of(int(machine.host_of[rank]))
    ranks = owners
    if machine.has_rails and job.trainer in PIPELINES:
        ranks = _ends_of_messages(job, rank, within_host=False) or owners
    elif machine.has_rails:
        ranks = alike(job, rank, lambda groups: groups.crosses_hosts)
    host = "" if machine.has_rails else machine.host_names[int(machine.host_of[rank])]
    planted = Planted(
        kind="nic",
        cause="link",
        owner=NODE,
        ranks=ranks,
        host=host,
        factor=_pick(draws, (2.0, 2.0, 4.0)),
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.NIC,), ranks=owners))


def rail(job: Job, draws: np.random.Generator) -> Scenario:
    """Slow down a switch: the NICs of one place on all hosts."""
    owners = job.machine.rail(int(draws.integers(job.machine.gpus_per_host)))
    ranks: set[int] = set()
    for rank in owners:
        ranks |= set(alike(job, rank, lambda groups: groups.crosses_hosts))
    planted = Planted(
        kind="rail",
        cause="link",
        owner=NODE,
        ranks=owners if len(ranks) == job.num_ranks else tuple(sorted(ranks)),
        factor=_pick(draws, (1.5, 2.0, 3.0)),
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.NIC,), ranks=owners))


def _ends_of_messages(job: Job, rank: int, *, within_host: bool) -> tuple[int, ...]:
    """Return who may be named for a rank's slow messages: itself where it has several partners by
    such links, else either end; nobody where none of its messages takes such a link.
    """
    per_stage, hosts = job.num_ranks // job.num_stages, job.machine.host_of
    partners = [
        other
        for other in (rank - per_stage, rank + per_stage)
        if 0 <= other < job.num_ranks and (hosts[other] == hosts[rank]) == within_host
    ]
    if not partners:
        return ()
    return (rank,) if len(partners) > 1 else tuple(sorted((rank, *partners)))


# The job's own doing


def heavy_stage(job: Job, draws: np.random.Generator) -> Scenario:
    """Give the last stage of a pipeline a large vocabulary."""
    ranks = tuple(int(one) for one in np.flatnonzero(job.stage_of == job.num_stages - 1))
    planted = Planted(
        kind="heavy_stage",
        cause="stage_imbalance",
        owner=OWN,
        ranks=ranks,
        factor=draws.uniform(3.0, 7.0),
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.HEAD,), ranks=ranks))


def long_sequences(job: Job, draws: np.random.Generator) -> Scenario:
    """Give one replica longer data in every iteration."""
    replica = int(draws.integers(job.layout.dp))
    ranks = tuple(int(one) for one in np.flatnonzero(job.replica_of == replica))
    planted = Planted(
        kind="long_sequences",
        cause="sequence_imbalance",
        owner=OWN,
        ranks=ranks,
        factor=draws.uniform(1.12, 1.5),
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.LENGTHS,), ranks=ranks))


def uneven_sequences(job: Job, draws: np.random.Generator) -> Scenario:
    """Let lengths vary from batch to batch; the sound job's are all alike."""
    ratio = draws.uniform(0.2, 0.45)
    planted = Planted(
        kind="uneven_sequences",
        cause="sequence_imbalance",
        owner=OWN,
        ranks=tuple(range(job.num_ranks)),
        factor=1.0 + ratio,
    )
    uneven = replace(job, habits=replace(job.habits, length_ratio=ratio))
    sound = replace(job, habits=replace(job.habits, length_ratio=0.0))
    return Scenario(job=uneven, sound=sound, extra=(planted,))


def hot_expert(job: Job, draws: np.random.Generator) -> Scenario:
    """Let the router prefer the experts of one rank in every group."""
    size = job.expert_size
    place = int(draws.integers(size))
    ranks = tuple(range(place, job.num_ranks, size))
    planted = Planted(
        kind="hot_expert",
        cause="expert_imbalance",
        owner=OWN,
        ranks=ranks,
        factor=draws.uniform(1.4, 2.5),
    )
    return _scenario(job, Trouble(planted=planted, hits=(Hits.EXPERTS,), ranks=ranks))


def storage(job: Job, draws: np.random.Generator) -> Scenario:
    """Let batches come late for everybody."""
    ranks = tuple(range(job.num_ranks))
    planted = Planted(kind="storage", cause="loader", owner=OWN, ranks=ranks)
    return _scenario(job, _late_batches(job, draws, planted))


def _late_batches(job: Job, draws: np.random.Generator, planted: Planted) -> Trouble:
    each_s = _compute_s(job) / job.microbatches
    is_often_seen = len(job.tracing.iterations) * job.microbatches >= _MANY_EVENTS
    return Trouble(
        planted=planted,
        hits=(Hits.FETCHES,),
        ranks=planted.ranks,
        extra_s=each_s * draws.uniform(0.3, 1.6),
        share_of_events=_pick(draws, (1.0, 1.0, 0.5, 0.25) if is_often_seen else (1.0, 0.7)),
    )


def nothing(job: Job, draws: np.random.Generator) -> Scenario:
    """Plant nothing."""
    del draws
    return Scenario(job=job, sound=job)
