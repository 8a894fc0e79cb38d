"""Describe a job of this ground: its model, its data, its trainer, its machines and its trace.

Nothing is computed here. A job is drawn by `draws`, priced by `work` and run by `engine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megascan.topology import Coordinates, Layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What a GPU can do, by its data sheet and by what large products reach of that."""

    name: str
    matrix_tflops: float  # reached by large products, not the peak
    attention_tflops: float
    memory_tbps: float
    clock_mhz: float
    power_w: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """State where ranks run: hosts of some GPUs, NVLink domains of some hosts, a NIC per GPU.

    Rank r runs on host r // gpus_per_host and in domain r // domain. Rail i joins the i-th NICs of
    all hosts.
    """

    chip: Chip
    gpus_per_host: int
    domain: int
    nvlink_gbps: float  # gigabytes a second that a GPU sends within its domain
    nic_gbps: float  # gigabytes a second of a GPU's NIC
    hosts: tuple[str, ...]

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.gpus_per_host

    def rail_of(self, rank: int) -> int:
        """Return the number of the rail to which a rank's NIC is cabled."""
        return rank % self.gpus_per_host


@dataclass(frozen=True, kw_only=True)
class Model:
    """State what is trained: layers of attention and MLP, or of attention and experts.

    `layers[stage][chunk]` counts layers. The first `num_dense` layers of a model with experts have
    an ordinary MLP. With `mtp` the last stage holds one more layer, which predicts a further token,
    and applies the output layer twice.
    """

    hidden: int
    ffn: int
    vocabulary: int
    attention_ratio: float  # products of attention in units of tokens x hidden^2
    layers: tuple[tuple[int, ...], ...]
    tied: bool = False
    num_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    num_dense: int = 0
    mtp: bool = False

    def first_layer(self, stage: int, chunk: int) -> int:
        """Return the global number of a chunk's first layer; chunks go round the stages."""
        before = [
            self.layers[other][each]
            for each in range(len(self.layers[0]))
            for other in range(len(self.layers))
            if (each, other) < (chunk, stage)
        ]
        return 1 + sum(before)

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer's MLP is a router and experts."""
        return self.num_experts > 0 and layer > self.num_dense


@dataclass(frozen=True, kw_only=True)
class Data:
    """State what a microbatch holds.

    Packed sequences hold documents whose lengths are log-normal: attention costs the square of each
    length. `balanced`: the loader deals documents so that replicas cost nearly alike.
    """

    sequence: int
    micro_batch: int = 1
    packed: bool = False
    balanced: bool = False
    tail_sigma: float = 1.2
    median_length: int = 800
    curriculum_ratio: float = 1.0  # last traced iteration's over the first one's


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """State how an iteration is run."""

    num_microbatches: int
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    overlaps_gradients: bool = False
    overlaps_parameters: bool = False
    fully_sharded: bool = False
    recomputes: bool = False
    overlaps_messages: bool = False  # of interleaved pipelines
    ring_attention: bool = False  # context parallelism by messages, which nobody records
    experts_sync: bool = True  # the host reads how many tokens come
    collects_garbage: bool = False
    collector_ms: float = 0.0  # of a large collection, on each rank at its own time
    loading_ms: float = 0.35
    loading_sigma: float = 0.25
    saves_every: int = 0
    evaluates_every: int = 0
    logs_every: int = 1
    launch_us: float = 7.0
    gradient_bytes: int = 4


@dataclass(frozen=True, kw_only=True)
class Disorder:
    """State by how much what should be alike differs: chips, kernels, hosts, network, clocks."""

    chip_spread: float = 0.01
    kernel_sigma: float = 0.006
    tail_share: float = 0.001
    host_drift: float = 0.03
    network_drift: float = 0.04
    network_sigma: float = 0.05
    congestion: float = 0.0  # mean extra time of all transfers between domains
    router_sigma: float = 0.0  # of the load of experts
    router_memory: float = 0.9  # what of it stays from iteration to iteration
    warm_up_ratio: float = 1.0  # of host time in the run's first iteration
    connect_s: float = 0.0  # for the first collective of each group
    clock_offset_ms: float = 2.0
    clock_drift_ppm: float = 8.0
    clock_wander_us: float = 20.0
    clock_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """State which iterations are in the files, and how."""

    iterations: tuple[int, ...]
    interval: int = 5
    window: int = 2
    granularity: str = "full"
    layer_stride: int = 4
    missing: tuple[int, ...] = ()
    reads_device: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """Join all that describes one job; `seed` decides all draws of its run."""

    seed: int
    layout: Layout
    cluster: Cluster
    model: Model
    data: Data
    trainer: Trainer
    disorder: Disorder = field(default_factory=Disorder)
    tracing: Tracing

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def stage_size(self) -> int:
        """Return the number of ranks of a pipeline stage."""
        return self.num_ranks // self.layout.pp

    @cached_property
    def ranks(self) -> Ints:
        """Return global ranks, (stage, place): place counts tp first, then cp, then dp."""
        layout = self.layout
        return np.array(
            [
                [
                    layout.rank_of(Coordinates(tp=tp, cp=cp, dp=dp, pp=stage))
                    for dp in range(layout.dp)
                    for cp in range(layout.cp)
                    for tp in range(layout.tp)
                ]
                for stage in range(layout.pp)
            ]
        )

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch that a rank of a CP group holds."""
        return self.data.sequence * self.data.micro_batch // self.layout.cp

    def num_layers(self, stage: int) -> int:
        """Return how many layers a stage holds."""
        return sum(self.model.layers[stage])
