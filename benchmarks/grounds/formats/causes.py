"""Choose where in a job a trouble sits, and say what somebody may name because of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.grounds.formats.hardware import Cluster
from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.settings import nominal_ms
from benchmarks.grounds.formats.troubles import Trouble
from benchmarks.grounds.formats.world import World
from benchmarks.grounds.ground import Planted


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A trouble to plant: its kind, the range of its factor, how long host threads stand, when.

    `stand` is that in shares of an iteration, of a microbatch's part of it where batches are late.
    """

    kind: str
    factor: tuple[float, float] = (1.0, 1.0)
    stand: tuple[float, float] = (0.0, 0.0)
    share: float = 1.0
    burst: tuple[float, float] = (1.0, 1.0)  # mean length of a burst, in iterations
    late: bool = False  # begins within the traced iterations
    whole_host: bool = False


Drawn = tuple[Trouble, Planted]
OF_NODE = {
    "gpu_clock": "compute", "throttling": "compute", "flapping": "compute", "hbm": "compute",
    "host_power": "compute", "nvlink": "link", "pcie": "link", "nic": "link", "one_nic": "link",
    "lossy": "link", "rail": "link", "host_cpu": "host", "neighbour": "host",
    "host_memory": "host", "loader": "loader", "gc": "gc",
}  # fmt: skip
OF_JOB = {
    "long_sequences": "sequence_imbalance", "shuffled_sequences": "sequence_imbalance",
    "hot_expert": "sequence_imbalance", "storage": "loader", "network": "link", "collector": "gc",
}  # fmt: skip
"""Which of the causes of a `Planted` a kind is."""
IN_BURSTS = ("throttling", "flapping")
NOW_AND_THEN = ("neighbour", "host_memory", "gc", "collector")
HOSTS = ("host_power", "nic", "lossy", "host_cpu", "neighbour", "host_memory")


def plant(
    world: World, causes: tuple[Cause, ...], rng: np.random.Generator
) -> tuple[World, tuple[Planted, ...]]:
    """Return the world with these causes, each at a place of its own, and what they are."""
    planted: list[Planted] = []
    for cause in causes:
        taken = {rank for one in planted for rank in one.ranks}
        if cause.kind in SHAPED:
            world, made = SHAPED[cause.kind](world, cause, rng)
        else:
            trouble, made = _draw(world.job, world.cluster, cause, taken, rng)
            world = replace(world, troubles=(*world.troubles, trouble))
        planted.append(made)
    return world, tuple(planted)


def _draw(
    job: Job, cluster: Cluster, cause: Cause, taken: set[int], rng: np.random.Generator
) -> Drawn:
    touched, named, node, nic = _place(job, cluster, cause, taken, rng)
    factor = float(np.exp(rng.uniform(*np.log(cause.factor))))
    first = job.iterations[len(job.iterations) * 2 // 5] if cause.late else 1
    stand_ms = float(rng.uniform(*cause.stand)) * nominal_ms(job, cluster)
    if cause.kind in ("loader", "storage"):
        stand_ms /= job.num_microbatches
    trouble = Trouble(
        kind=cause.kind, touched=touched, factor=round(factor, 3),
        amount_ms=stand_ms, first=first, share=cause.share,
        burst=float(rng.uniform(*cause.burst)), node=node, nic=nic,
    )  # fmt: skip
    is_of_host = cause.whole_host or cause.kind in HOSTS
    return trouble, Planted(
        kind=cause.kind,
        cause=OF_NODE.get(cause.kind) or OF_JOB[cause.kind],
        owner="node" if cause.kind in OF_NODE else "job",
        ranks=named,
        host=cluster.host(named[0]) if is_of_host else "",
        factor=_slowed(job, trouble),
        first_iteration=first,
        share_of_time=cause.share if cause.kind in IN_BURSTS else 1.0,
    )


def _slowed(job: Job, trouble: Trouble) -> float:
    """Return how many times longer what is concerned takes; 1 where it stands now and then."""
    if trouble.kind in ("loader", "storage"):
        return round(1 + trouble.amount_ms * 1e3 / job.loader_us, 3)
    return 1.0 if trouble.kind in NOW_AND_THEN else trouble.factor


Place = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""What is touched, what may be named, the node and the NIC."""


def _place(
    job: Job, cluster: Cluster, cause: Cause, taken: set[int], rng: np.random.Generator
) -> Place:
    kind = cause.kind
    free = [rank for rank in range(job.shape.world) if rank not in taken]
    loading = [rank for rank in free if loads(job, rank)]
    if kind in ("nvlink", "pcie"):
        return _port(job, cluster, free, rng)
    node = nic = -1
    if kind in HOSTS or cause.whole_host:
        node = cluster.node(int(rng.choice(loading if kind == "loader" else free)))
        ranks = cluster.ranks_on(node)
    elif kind in ("one_nic", "rail"):
        nics = sorted({cluster.nic_of(rank) for rank in free})
        node, nic = nics[int(rng.integers(len(nics)))]
        ranks = cluster.users_of((node, nic))
        if kind == "rail":
            ranks = tuple(rank for rank in range(job.shape.world) if cluster.nic_of(rank)[1] == nic)
    elif kind in OF_JOB:
        ranks = _in_common(job, kind, rng)
    else:
        ranks = (int(rng.choice(loading if kind == "loader" else free)),)
    return ranks, ranks, node, nic


def _in_common(job: Job, kind: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Return the ranks that share what the data or the job bring with them."""
    shape = job.shape
    axis = {"long_sequences": "dp", "hot_expert": "ep"}.get(kind)
    ranks = tuple(range(shape.world))
    if axis is None:
        return ranks
    place = int(rng.integers(getattr(shape, axis)))
    return tuple(rank for rank in ranks if shape.place(rank)[axis] == place)


def loads(job: Job, rank: int) -> bool:
    """Tell whether a rank takes batches from the loader."""
    place = job.shape.place(rank)
    return place["tp"] == 0 and place["pp"] in (0, job.shape.pp - 1)


def _port(job: Job, cluster: Cluster, free: list[int], rng: np.random.Generator) -> Place:
    """Choose the link of a GPU that is in use, and between two GPUs where they have no switch.

    Where a rank talks inside its node to one partner only, and that one to nobody else, both are
    ends of the only link that anybody sees.
    """
    groups = [
        members
        for name, members in job.shape.groups.items()
        if name.partition("@")[0] in ("tp", "dp_cp", "ep", "cp")
        and len(members) > 1
        and not cluster.crosses(members)
    ]
    able = [rank for rank in free if any(rank in members for members in groups)] or free
    rank = int(rng.choice(able))
    mine = {members for members in groups if rank in members}
    others = sorted({each for members in mine for each in members} - {rank})
    if cluster.gpus_a_node == 4 and others and not cluster.pcie_nodes:
        pair = tuple(sorted((rank, int(rng.choice(others)))))
        return pair, pair, cluster.node(rank), -1
    partner = [
        other for other in others
        if len(others) == 1 and {members for members in groups if other in members} == mine
    ]  # fmt: skip
    return (rank,), tuple(sorted((rank, *partner))), cluster.node(rank), -1


def _shape_of_model(world: World, cause: Cause, rng: np.random.Generator) -> tuple[World, Planted]:
    """Give one stage more to do than the others: a large vocabulary at its end, or more layers."""
    job, shape = world.job, world.job.shape
    if cause.kind == "heavy_stage":
        stage = shape.pp - 1
        per_stage = job.stage_layers[0] * shape.vpp
        ratio = float(rng.uniform(*cause.factor)) - 1.0
        vocabulary = int(12 * job.hidden * per_stage * ratio) // 128 * 128
        changed = replace(job, vocabulary=max(vocabulary, 2 * job.vocabulary))
    else:
        stage = int(rng.integers(shape.pp))
        layers = list(job.stage_layers)
        layers[stage] += 1
        changed = replace(job, stage_layers=tuple(layers))
    made = Planted(
        kind=cause.kind, cause="stage_imbalance", owner="job", ranks=shape.stage(stage),
    )  # fmt: skip
    return replace(world, job=changed, sound_job=job), made


SHAPED: dict[str, Callable[[World, Cause, np.random.Generator], tuple[World, Planted]]] = {
    "heavy_stage": _shape_of_model,
    "uneven_layers": _shape_of_model,
}
