"""Say what a job is: its layout, its model, how its trainer is set up and what is traced.

Nothing here happens; it is what a user would find in the job's launch script.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.rack.hardware import Rack
from megascan.schema import Granularity
from megascan.topology import Coordinates, Layout


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer; every `moe_every`-th layer has experts, none where `num_experts` is 0.

    `layers` are the numbers of each stage's layers by stage and chunk, from 1.
    """

    hidden: int
    ffn: int
    kv_share: float  # of the query heads: grouped-query attention
    vocabulary: int
    sequence: int
    batch: int
    num_experts: int
    experts_a_token: int
    moe_every: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]

    def has_experts(self, layer: int) -> bool:
        """Tell whether a router feeds this layer."""
        return bool(self.num_experts) and not layer % self.moe_every

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch."""
        return self.sequence * self.batch


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a trainer is set up; the names are those of Megatron-LM's flags, more or less."""

    num_microbatches: int
    sequence_parallel: bool
    recompute: str  # "none", "selective", "full"
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    num_buckets: int
    gradient_bytes: int  # of a number that is reduced
    offloads_optimizer: bool
    reduces_loss_each_microbatch: bool
    log_interval: int
    counts_tokens: bool  # one more small sum over the replicas
    ends_are_bounds: bool  # CUDA_DEVICE_MAX_CONNECTIONS is 1: nobody can wait on the side
    is_packed: bool  # several documents a sequence
    num_workers: int
    prefetch: int
    prepares_s: float  # a worker's time for one microbatch
    launch_s: float  # a host's time for one kernel
    collects_every: int  # iterations between collections of everything; 0: switched off
    collection_s: float
    collects_together: bool  # all ranks in the same iteration, as --manual-gc does
    saves_every: int
    save_s: float
    evaluates_every: int
    evaluation_s: float


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """What is traced: windows of `window` iterations, one every `interval`, from `first_window`."""

    granularity: Granularity
    interval: int
    window: int
    num_windows: int
    first_window: int
    layer_stride: int
    compress: bool
    has_counters: bool
    missing: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """Return the iterations of each window."""
        firsts = (1 + (self.first_window + n) * self.interval for n in range(self.num_windows))
        return tuple(tuple(range(first, first + self.window)) for first in firsts)

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return all that are traced, ascending."""
        return tuple(number for window in self.windows for number in window)


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How much chips, hosts and networks differ, wander and jump: scales of `noise`."""

    chip_spread: float  # how far the slowest sound chip is from the fastest, of the product's time
    chip_wander: float
    kernel_tail: float
    warming: float  # how much slower a chip is when its temperature has settled
    launch_spread: float
    launch_tail: float
    detour_chance: float  # a pass of a host's
    network_tail: float
    network_wander: float
    clock_offset_s: float
    clock_drift_ppm: float
    clock_bend_ppm: float  # how far a clock's drift itself wanders


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything about a job but what goes wrong."""

    seed: int
    layout: Layout
    rack: Rack
    model: Model
    habits: Habits
    tracing: Tracing
    weather: Weather

    @property
    def num_ranks(self) -> int:
        """Return the size of the world."""
        return self.layout.world_size

    @property
    def num_stages(self) -> int:
        """Return the stages of the pipeline."""
        return self.layout.pp

    @property
    def num_chunks(self) -> int:
        """Return the model chunks of a stage."""
        return self.layout.vpp

    @property
    def ranks_a_stage(self) -> int:
        """Return how many ranks hold a part of one stage."""
        return self.num_ranks // self.layout.pp

    @property
    def num_slices(self) -> int:
        """Return into how many slices an iteration is cut: the passes of a rank, and the update."""
        return 2 * self.habits.num_microbatches * self.num_chunks + 1

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage, by (dp, cp, tp), tp fastest."""
        layout = self.layout
        return tuple(
            layout.rank_of(Coordinates(tp=tp, cp=cp, dp=dp, pp=stage))
            for dp in range(layout.dp)
            for cp in range(layout.cp)
            for tp in range(layout.tp)
        )


def num_parameters(job: Job, stage: int) -> tuple[float, ...]:
    """Return how many parameters of each chunk one rank holds."""
    model, layout = job.model, job.layout
    attention = (2.0 + 2.0 * model.kv_share) * model.hidden**2 / layout.tp
    dense = 3.0 * model.hidden * model.ffn / layout.tp
    held = 3.0 * model.hidden * model.ffn * model.num_experts / layout.ep
    ends = model.hidden * model.vocabulary / layout.tp
    found = []
    for chunk, layers in enumerate(model.layers[stage]):
        own = sum(attention + (held if model.has_experts(each) else dense) for each in layers)
        virtual = chunk * job.num_stages + stage
        own += ends * ((virtual == 0) + (virtual == job.num_stages * job.num_chunks - 1))
        found.append(own)
    return tuple(found)
