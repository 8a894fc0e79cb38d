"""Do to a job's conditions what goes wrong: each trouble by what it is in a machine room.

What is slow, and what it touches, follows reports from operation: clocks that heat or a power brake
lowers (Llama 3, arXiv 2407.21783, section 3.3.4; MegaScale, arXiv 2402.15627, section 5), slow
memory and hosts ("Fail-slow at scale", FAST 2018), degraded links (C4, arXiv 2406.04594), and what
is nobody's hardware: uneven stages, sequences, experts, collectors (arXiv 2505.05713).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.rack.conditions import Conditions, evened
from benchmarks.grounds.rack.hardware import Floats, Places
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.noise import detours, tails, telegraph, wander
from benchmarks.grounds.rack.places import Map

_MEMORY_FOLLOWS_CLOCK = 0.15
"""Of a lower clock reaches kernels that are bound by memory: caches and address units slow down."""
_NCCL_FOLLOWS_CLOCK = 0.1
"""Likewise of communication, whose kernels copy and add."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One thing that goes wrong: what was planted, and the ranks whose times it lengthens.

    `chance` and `length` shape what comes and goes: how likely a slice is hit, how many it covers;
    `turn_s` is the shortest turn that another process takes on a shared core.
    """

    planted: Planted
    touched: tuple[int, ...]
    chance: float = 0.0
    length: float = 1.0
    turn_s: float = 0.0
    persists: bool = True
    stage: int = -1


@dataclass(frozen=True, eq=False)
class Scene:
    """Where a trouble happens: the job, the places it touches, and when it holds."""

    job: Job
    where: Map
    trouble: Trouble
    places: Places
    holds: Floats  # (iteration, slice): 1 while it lasts
    draws: np.random.Generator

    @property
    def factor(self) -> float:
        """Return how many times slower what it concerns becomes."""
        return self.trouble.planted.factor

    def slowed(self, values: Floats, factor: float) -> None:
        """Lengthen what holds at the places touched, while it holds."""
        values[self.places] *= 1.0 + (factor - 1.0) * self.holds

    def slowed_batches(self, values: Floats, factor: float) -> None:
        """Lengthen likewise what is counted by microbatch."""
        holds = self.holds.max(axis=1, keepdims=True)
        values[self.places] *= 1.0 + (factor - 1.0) * holds


def afflict(
    job: Job, where: Map, conditions: Conditions, trouble: Trouble, number: int
) -> Conditions:
    """Return the conditions with one trouble more; equal for an equal number."""
    draws = np.random.default_rng([job.seed, 2, number])
    scene = Scene(
        job=job,
        where=where,
        trouble=trouble,
        places=np.array([where.place_of[rank] for rank in trouble.touched], dtype=np.int64),
        holds=holding(job, trouble, draws).astype(np.float64),
        draws=draws,
    )
    found = conditions.copy()
    _EFFECTS[trouble.planted.kind](scene, found)
    return found


def holding(
    job: Job, trouble: Trouble, draws: np.random.Generator
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return when a trouble holds, (iteration, slice): bursts where it takes a share of the time.

    Bursts are drawn until they cover about that share of what is traced: a burst that no trace
    saw is no case.
    """
    planted = trouble.planted
    numbers = np.array(job.tracing.iterations)
    lasts = numbers >= planted.first_iteration
    if planted.last_iteration:
        lasts &= numbers <= planted.last_iteration
    shape = (len(numbers), job.num_slices)
    found = np.repeat(lasts[:, None], shape[1], axis=1)
    if planted.share_of_time >= 1.0:
        return found
    best = found
    for _ in range(40):
        bursts = telegraph(draws, found.size, planted.share_of_time, trouble.length)
        best = bursts.reshape(shape) & found
        if abs(best.mean() / planted.share_of_time - 1.0) < 0.3:
            break
    return best


def _gpu_clock(scene: Scene, found: Conditions) -> None:
    scene.slowed(found.clock, scene.factor)
    scene.slowed(found.memory, 1.0 + _MEMORY_FOLLOWS_CLOCK * (scene.factor - 1.0))
    scene.slowed(found.nvlink, 1.0 + _NCCL_FOLLOWS_CLOCK * (scene.factor - 1.0))


def _hbm(scene: Scene, found: Conditions) -> None:
    scene.slowed(found.memory, scene.factor)


def _host_cpu(scene: Scene, found: Conditions) -> None:
    scene.slowed(found.launch_s, scene.factor)
    scene.slowed(found.host_stall_s, scene.factor)
    scene.slowed(found.collection_s, scene.factor)
    scene.slowed_batches(found.prepare_s, scene.factor)


def _contention(scene: Scene, found: Conditions) -> None:
    """Let another process take turns on the cores of some ranks' threads, and cool their caches."""
    shape = (len(scene.places), *scene.holds.shape)
    turns = detours(scene.draws, shape, scene.trouble.chance, scene.trouble.turn_s)
    found.host_stall_s[scene.places] += turns * scene.holds
    scene.slowed(found.launch_s, 1.15)
    scene.slowed_batches(found.prepare_s, 1.3)


def _loader(scene: Scene, found: Conditions) -> None:
    scene.slowed_batches(found.prepare_s, scene.factor)


def _storage(scene: Scene, found: Conditions) -> None:
    """Slow all readers in some iterations, each a little otherwise: a file system for all."""
    busy = np.exp(np.abs(wander(scene.draws, (scene.holds.shape[0],), 0.8, 0.6)))
    own = tails(scene.draws, (len(scene.places), len(busy), 1), 0.15)
    found.prepare_s[scene.places] *= scene.factor * busy[None, :, None] * own


def _nic(scene: Scene, found: Conditions) -> None:
    scene.slowed(found.nic, scene.factor)


def _nvlink(scene: Scene, found: Conditions) -> None:
    scene.slowed(found.nvlink, scene.factor)


def _pcie(scene: Scene, found: Conditions) -> None:
    scene.slowed(found.pcie, scene.factor)


def _collector(scene: Scene, found: Conditions) -> None:
    """Let collections take long: of some ranks, each in a pass of its own, often or seldom.

    Such a heap is also walked more often, as allocations pass the collector's thresholds.
    """
    shape = (len(scene.places), *scene.holds.shape)
    hits = scene.draws.random(shape) < scene.trouble.chance
    lengths = scene.job.habits.collection_s * tails(scene.draws, shape, 0.1)
    pauses = np.where(hits, lengths, 0.0) * scene.holds
    pauses[..., -1] = 0.0  # an update allocates too little
    found.collection_s[scene.places] += scene.factor * pauses


def _network(scene: Scene, found: Conditions) -> None:
    """Slow all NICs, each when others' traffic meets it: a fabric that is shared."""
    shape = (scene.where.job.rack.num_hosts, scene.holds.shape[0])
    busy = np.exp(np.abs(wander(scene.draws, shape, np.log(scene.factor), 0.5)))
    found.nic *= busy[scene.where.hosts][:, :, None]


def _heavy_stage(scene: Scene, found: Conditions) -> None:
    if scene.trouble.stage < 0:
        found.head *= scene.factor
    else:
        found.stage[scene.trouble.stage] *= scene.factor


def _long_sequences(scene: Scene, found: Conditions) -> None:
    """Give replicas microbatches of other lengths: drawn anew each time, or by replica for good.

    Lengths of documents are about log-normal; what does not fit the window is cut.
    """
    job, dp = scene.job, scene.job.layout.dp
    shape = (dp, *found.tokens.shape[1:])
    if scene.trouble.persists:
        touched = {job.layout.coordinates(rank).dp for rank in scene.trouble.touched}
        lengths = np.where(np.isin(np.arange(dp), sorted(touched)), scene.factor, 1.0)
        lengths = lengths[:, None, None] * tails(scene.draws, shape, 0.03)
    else:
        spread = np.log(scene.factor)
        lengths = np.exp(np.clip(spread * scene.draws.standard_normal(shape), -0.8, 0.8))
    replica = np.concatenate([scene.where.dp] * job.num_stages)
    if job.habits.is_packed:
        found.squares *= lengths[replica] ** 2
    else:
        found.tokens *= lengths[replica]
        found.squares *= lengths[replica] ** 2


def _hot_expert(scene: Scene, found: Conditions) -> None:
    """Send more tokens to the experts of some places, in all layers or in one that changes."""
    n = scene.job.ranks_a_stage
    local = np.unique(scene.places % n)
    load = found.load
    hot = np.ones(load.shape[:3])
    if scene.trouble.persists:
        hot[:, local] = scene.factor
    else:
        order = scene.draws.random(load.shape[:3])
        hot[order > 0.85] = scene.factor
    found.load = evened(load * hot[..., None], scene.where)


_EFFECTS: dict[str, Callable[[Scene, Conditions], None]] = {
    "gpu_clock": _gpu_clock,
    "throttling": _gpu_clock,
    "power_brake": _gpu_clock,
    "hbm": _hbm,
    "host_cpu": _host_cpu,
    "contention": _contention,
    "loader": _loader,
    "storage": _storage,
    "nic": _nic,
    "rail": _nic,
    "nvlink": _nvlink,
    "pcie": _pcie,
    "gc": _collector,
    "network": _network,
    "heavy_stage": _heavy_stage,
    "long_sequences": _long_sequences,
    "hot_expert": _hot_expert,
}
