"""What a job is: its layout, model, trainer, habits and tracing; which ranks form which groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.campus.hardware import Site
from benchmarks.grounds.campus.model import EXPERTS, MAMBA, Model, Parts, parts_of
from megascan.topology import Layout
from megascan.vocabulary import group_id

MEGATRON, DDP, FSDP = "megatron", "ddp", "fsdp"
FIXED, PADDED, PACKED = "fixed", "padded", "packed"
"""How long sequences are: all alike; as long as the longest of a batch; documents in a full row."""


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """State what was traced of a run."""

    granularity: str = "full"
    interval: int = 5
    window: int = 2
    iterations: tuple[int, ...] = (11, 12, 16, 17)
    has_counters: bool = False

    @property
    def is_full(self) -> bool:
        """Tell whether modules and all collectives are recorded."""
        return self.granularity == "full"

    @property
    def windows(self) -> tuple[int, ...]:
        """Return the window of each traced iteration, numbered from 0."""
        periods = [(number - 1) // self.interval for number in self.iterations]
        known = sorted(set(periods))
        return tuple(known.index(period) for period in periods)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """State how batches come: how long a worker prepares one, and how many workers there are.

    Without workers the trainer's own thread prepares them.
    """

    seconds: float = 0.004
    num_workers: int = 4
    spread: float = 0.25
    tail_share: float = 0.005
    storage_stalls: float = 0.0  # share of iterations in which the storage that all share is slow


@dataclass(frozen=True, kw_only=True)
class Habits:
    """State what a team's trainer does."""

    overlap_gradients: bool = False
    distributed_optimizer: bool = True
    sequence_parallel: bool = True
    recompute: bool = False
    tied_embeddings: bool = False
    unrecorded: frozenset[str] = frozenset()  # axes whose communication only passes hold
    context_by_ring: bool = True  # else by gathering keys and values, which is recorded
    lengths: str = FIXED
    length_spread: float = 0.0
    expert_spread: float = 0.0
    loading: Loading = field(default_factory=Loading)
    collects_every: int = 0  # iterations between full collections of garbage; 0: at no fixed time
    gc_share: float = 0.0  # chance of a pause in an iteration, on each rank
    gc_s: float = 0.03
    save_every: int = 0
    save_s: float = 4.0
    saves_alone: bool = False  # rank 0 writes, all others go on at once
    evaluate_every: int = 0
    noisy_hosts: float = 0.0  # share of passes during which a host's cores are busy otherwise
    warms_up: bool = False  # the first two iterations compile, allocate and connect


@dataclass(frozen=True, kw_only=True)
class Job:
    """State everything about a job that is no chance."""

    layout: Layout
    model: Model
    site: Site
    trainer: str = MEGATRON
    chunks: tuple[tuple[str, ...], ...] = (("dense", "dense"),)
    """Kinds of the layers of each chunk of the model, from its begin."""
    microbatches: tuple[int, ...] = (4,)
    """Of an iteration; several: of equal shares of the traced iterations, one after the other."""
    habits: Habits = field(default_factory=Habits)
    tracing: Tracing = field(default_factory=Tracing)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def ranks_a_stage(self) -> int:
        """Return the number of ranks of a pipeline stage, which are consecutive."""
        return self.num_ranks // self.layout.pp

    @cached_property
    def parts(self) -> Parts:
        """Return the costs of the model's parts on a rank."""
        return parts_of(
            self.model, self.site.chip, tp=self.layout.tp, cp=self.layout.cp, ep=self.layout.ep,
            spread_norms=self.habits.sequence_parallel,
        )  # fmt: skip

    @property
    def has_experts(self) -> bool:
        """Tell whether any layer has experts."""
        return any(EXPERTS in kinds for kinds in self.chunks)

    @property
    def is_hybrid(self) -> bool:
        """Tell whether any layer is no transformer's."""
        return any(MAMBA in kinds for kinds in self.chunks)

    def layers_of(self, stage: int, chunk: int) -> list[tuple[int, str]]:
        """Return the layers of a chunk of a stage: their numbers, from 1, and kinds."""
        place = chunk * self.layout.pp + stage
        first = 1 + sum(map(len, self.chunks[:place]))
        return list(enumerate(self.chunks[place], start=first))

    def parameters_of(self, stage: int) -> tuple[float, float]:
        """Return how many parameters a rank of a stage has: all, and of these its experts'."""
        kinds = [
            kind for chunk in range(self.layout.vpp) for _, kind in self.layers_of(stage, chunk)
        ]
        table = self.parts.parameters
        all_of = sum(table[kind] for kind in kinds)
        experts = sum(table[kind] - 4.0 * self.model.hidden**2 / self.layout.tp
                      for kind in kinds if kind == EXPERTS)  # fmt: skip
        ends = (stage == 0) + (stage == self.layout.pp - 1)
        return all_of + ends * table["embedding"], experts

    def microbatches_of(self, place: int) -> int:
        """Return the number of microbatches of the traced iteration at a place."""
        share = place * len(self.microbatches) // len(self.tracing.iterations)
        return self.microbatches[share]

    def records(self, axis: str) -> bool:
        """Tell whether collectives over groups of an axis are recorded."""
        if axis in ("dp", "dp_cp", "expt_dp"):
            return True
        return self.tracing.is_full and axis not in self.habits.unrecorded

    def message_bytes(self) -> int:
        """Return the size of an activation that travels between stages."""
        shared = self.layout.tp if self.habits.sequence_parallel else 1
        return round(self.model.tokens * self.model.hidden * 2 / self.layout.cp / shared)

    def pass_s(self, stage: int = 0) -> float:
        """Return what a stage takes for a microbatch, forward and backward, without waiting."""
        kinds = [
            kind for chunk in range(self.layout.vpp) for _, kind in self.layers_of(stage, chunk)
        ]
        forward = sum(self.parts.layer_s(kind) for kind in kinds)
        if stage == self.layout.pp - 1:
            forward += self.parts.output.total_s + self.parts.loss.total_s
        return forward * (4.0 if self.habits.recompute else 3.0)


@dataclass(frozen=True)
class Axis:
    """State how the ranks of a stage fall into groups: as a block, of which one dimension meets."""

    name: str
    shape: tuple[int, int, int]
    dimension: int

    @property
    def size(self) -> int:
        """Return the number of members of a group."""
        return self.shape[self.dimension]

    def members(self) -> NDArray[np.int64]:
        """Return (local rank, member): who is in the group of each rank of a stage."""
        block = np.arange(math.prod(self.shape)).reshape(self.shape)
        groups = np.moveaxis(block, self.dimension, -1)
        found = np.empty((block.size, self.size), dtype=np.int64)
        for group in groups.reshape(-1, self.size):
            found[group] = group
        return found

    def latest(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each rank (the last dimension) the largest value of its group."""
        if self.size == 1:
            return times
        block = times.reshape(*times.shape[:-1], *self.shape)
        most = block.max(axis=times.ndim - 1 + self.dimension, keepdims=True)
        return np.broadcast_to(most, block.shape).reshape(times.shape)

    def mean(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each rank the mean of its group's values."""
        block = values.reshape(*values.shape[:-1], *self.shape)
        mean = block.mean(axis=values.ndim - 1 + self.dimension, keepdims=True)
        return np.broadcast_to(mean, block.shape).reshape(values.shape)

    def shared(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each rank the value of its group's first member."""
        if self.size == 1:
            return values
        block = values.reshape(*values.shape[:-1], *self.shape)
        first = block.take([0], axis=values.ndim - 1 + self.dimension)
        return np.broadcast_to(first, block.shape).reshape(values.shape)


def axes_of(layout: Layout) -> dict[str, Axis]:
    """Return the axes along which the ranks of a stage meet.

    Experts are split over context and data parallelism together; within an expert, tensor
    parallelism is that of the rest.
    """
    tp, cp, dp, ep = layout.tp, layout.cp, layout.dp, layout.ep
    replicas = dp * cp // ep
    return {
        "tp": Axis("tp", (dp * cp, 1, tp), 2),
        "cp": Axis("cp", (dp, cp, tp), 1),
        "dp": Axis("dp", (dp, cp, tp), 0),
        "dp_cp": Axis("dp_cp", (dp * cp, 1, tp), 0),
        "ep": Axis("ep", (replicas, ep, tp), 1),
        "expt_dp": Axis("expt_dp", (replicas, ep, tp), 0),
    }


def groups_of(job: Job, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the process groups of a rank, by their ids."""
    layout = job.layout
    if job.trainer != MEGATRON:
        return {"dp@0": tuple(range(job.num_ranks))}
    count = job.ranks_a_stage
    stage, local = divmod(rank, count)
    found: dict[str, tuple[int, ...]] = {}

    def enter(axis: str, ranks: tuple[int, ...]) -> None:
        found.setdefault(group_id(axis, ranks), ranks)

    for name, axis in axes_of(layout).items():
        enter(name, tuple(int(one) + stage * count for one in axis.members()[local]))
    line = tuple(local + place * count for place in range(layout.pp))
    enter("pp", line)
    ends = (line[0], line[-1])
    if rank in ends:
        enter("embd", ends if layout.pp > 1 else ends[:1])
    mates = [local - local % layout.tp + one for one in range(layout.tp)]
    enter("mp", tuple(one + place * count for place in range(layout.pp) for one in mates))
    enter("intra_dist_opt", tuple(range(job.num_ranks)))
    enter("world", tuple(range(job.num_ranks)))
    return found
