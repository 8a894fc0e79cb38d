"""A training job of plain PyTorch: its trainer, model, habits, ranks, and what is traced of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np

from benchmarks.grounds.plain.machine import (
    Floats,
    GroupSet,
    Machine,
    Ranks,
    draw_machine,
    group_set,
    ring_bytes_per_s,
)
from megascan.schema import Granularity
from megascan.topology import DEFAULT_ORDER, Layout
from megascan.vocabulary import MESH_AXES


class Trainer(StrEnum):
    """How the ranks of a job share the work."""

    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    TENSOR = "tensor"
    """Replicas of tensor-parallel groups, whose gradients a loop of the trainer's own averages."""
    FSDP_TP = "fsdp-tp"
    PIPELINE = "pipeline"
    PIPELINE_DP = "pipeline-dp"
    MOE_DDP = "moe-ddp"
    MOE_FSDP = "moe-fsdp"


PIPELINES = (Trainer.PIPELINE, Trainer.PIPELINE_DP)
EXPERTS = (Trainer.MOE_DDP, Trainer.MOE_FSDP)
DEEPSPEED = (Trainer.ZERO1, Trainer.ZERO2, Trainer.ZERO3)
_MOST_STAGES = 8
SHARDED = (Trainer.FSDP, Trainer.HSDP, Trainer.FSDP_TP, Trainer.MOE_FSDP)
TENSOR_PARALLEL = (Trainer.TENSOR, Trainer.FSDP_TP)


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """What a rank computes for one microbatch of typical length on a typical chip."""

    forward_s: Floats
    """(layer,): of a rank's layers; those of a pipeline's stage."""
    head_s: float
    embedding_s: float
    layer_bytes: Floats
    """(layer,): weights, and gradients, of a layer."""
    ends_bytes: float
    memory_share: float
    """Of a layer's time that takes as long as its bytes, whatever the clock."""
    num_kernels: int
    """Of a layer's forward pass."""
    launch_s: float
    """What the host takes to launch a kernel."""
    recomputes: bool
    activation_bytes: float
    optimizer_s: float
    has_experts: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        """Return how many layers a rank has."""
        return len(self.forward_s)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """By how much times differ without anybody's fault."""

    kernel_ratio: float = 0.006
    """Standard deviation of a layer's time."""
    rank_ratio: float = 0.002
    """Of all that a rank does in an iteration, which wanders."""
    outlier_share: float = 0.001
    outlier_ratio: float = 0.8
    host_ratio: float = 0.06
    host_spread_ratio: float = 0.0
    """Standard deviation of how fast ranks' threads launch, always."""
    stall_share: float = 0.0
    """Of launches by all hosts, that are held up."""
    stall_s: float = 0.0
    congestion_ratio: float = 0.0
    """Of what crosses hosts: the scale of a long tail, the same for all members."""
    transfer_ratio: float = 0.03


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a trainer does beside its passes, and what its data are like."""

    has_loader: bool = True
    fetch_s: float = 0.0004
    input_bytes: float = 1e6
    copies_wait: bool = False
    """Copies to the device from pageable memory hold the host up."""
    tokens: int = 4096
    tokens_known: bool = True
    length_ratio: float = 0.0
    """Standard deviation of sequences' lengths; 0: all alike."""
    waits_at_end: bool = True
    """An iteration ends by reading the loss or the norm."""
    logs_loss: bool = False
    """By an all-reduce of one number."""
    clips: bool = True
    is_compiled: bool = False
    evaluates_every: int = 0
    evaluates_within: bool = True
    saves_every: int = 0
    save_s: float = 0.0
    saves_alone: bool = True
    """The first rank saves and the others wait; otherwise all save their shards."""
    collects_every: int = 0
    collection_s: float = 0.0
    collects_together: bool = False
    first_s: float = 0.0
    """By what hosts are late in the first iteration, which sets communicators up."""
    tunes: bool = False
    """Kernels are tuned in the first iterations."""
    uneven_ratio: float = 0.0
    """By how much shards of the optimizer differ."""
    keeps_gathered: bool = False
    """Parameters are not resharded after the forward pass."""
    bucket_bytes: float = 25e6
    interference_ratio: float = 0.04
    ends_are_bounds: bool = False
    """CUDA_DEVICE_MAX_CONNECTIONS=1: asynchronous works cannot be watched."""


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """What is traced, and of which ranks files are left."""

    granularity: Granularity = Granularity.FULL
    interval: int = 5
    window: int = 2
    num_windows: int = 3
    layer_stride: int = 1
    has_counters: bool = False
    compress: bool = False
    missing: tuple[int, ...] = ()

    @property
    def last_iteration(self) -> int:
        """Return the last traced iteration."""
        return (self.num_windows - 1) * self.interval + self.window

    def is_traced(self, iteration: int) -> bool:
        """Tell whether an iteration lies in a window."""
        return (iteration - 1) % self.interval < self.window

    def window_of(self, iteration: int) -> int:
        """Return the window's number of a traced iteration."""
        return (iteration - 1) // self.interval

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return all traced iterations."""
        return tuple(filter(self.is_traced, range(1, self.last_iteration + 1)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """All that is known of a job before anything goes wrong."""

    trainer: Trainer
    machine: Machine
    mesh: tuple[tuple[str, int], ...]
    """Dimensions of the device mesh, outermost first; none: the trainer gives none."""
    model: Model
    microbatches: int
    noise: Noise
    habits: Habits
    tracing: Tracing
    chip_spread_ratio: float
    expert_size: int = 1
    seed: int = 0

    @cached_property
    def num_ranks(self) -> int:
        """Return the size of the world."""
        return self.machine.num_ranks

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the size of each axis that the mesh has."""
        found: dict[str, int] = {}
        for name, size in self.mesh:
            found[MESH_AXES[name]] = found.get(MESH_AXES[name], 1) * size
        return found or {"dp": self.num_ranks}

    @property
    def layout(self) -> Layout:
        """Return it as the tracer reads it from the mesh."""
        if not self.mesh:
            return Layout(dp=self.num_ranks)
        innermost = list(dict.fromkeys(MESH_AXES[name] for name, _ in reversed(self.mesh)))
        rest = [axis for axis in DEFAULT_ORDER.split("-") if axis not in innermost]
        sizes = self.sizes
        return Layout(
            dp=sizes.get("dp", 1),
            tp=sizes.get("tp", 1),
            pp=sizes.get("pp", 1),
            order="-".join([*innermost, *rest]),
        )

    @cached_property
    def num_stages(self) -> int:
        """Return how many stages a pipeline has."""
        return self.sizes.get("pp", 1)

    @property
    def stage_of(self) -> Ranks:
        """Return the stage of each rank; a mesh has stages outermost."""
        return np.arange(self.num_ranks) // (self.num_ranks // self.num_stages)

    @property
    def replica_of(self) -> Ranks:
        """Return the number of the data that each rank gets."""
        layout = self.layout
        return np.array([layout.coordinates(rank).dp for rank in range(self.num_ranks)])

    def groups(self) -> dict[str, GroupSet]:
        """Return the process groups by what the trainer uses them for.

        Those of the mesh go by their dimension, `world` is that of all ranks, `experts` is made by
        the trainer itself.
        """
        numbers = np.arange(self.num_ranks)
        machine, found = self.machine, dict[str, GroupSet]()
        if not self.mesh:
            found["world"] = group_set("dp", numbers[None, :], machine)
        else:
            grid = numbers.reshape([size for _, size in self.mesh])
            axes = [MESH_AXES[name] for name, _ in self.mesh]
            for place, (name, size) in enumerate(self.mesh):
                axis = axes[place] if axes.count(axes[place]) == 1 else f"{axes[place]}-{name}"
                members = np.moveaxis(grid, place, -1).reshape(-1, size)
                found[name] = group_set(axis, members, machine)
            whole = [one for one in found.values() if one.size == self.num_ranks]
            found["world"] = whole[0] if whole else group_set("world", numbers[None, :], machine)
        if self.expert_size > 1:
            axis = "undefined" if self.mesh else "dp-undefined"
            members = numbers.reshape(-1, self.expert_size)
            found["experts"] = group_set(axis, members, machine, is_numbered=True)
        elif self.trainer in DEEPSPEED:
            whole_world = numbers[None, :]
            found["deepspeed"] = group_set("dp-undefined", whole_world, machine, is_numbered=True)
        return found


def draw_job(seed: int, trainer: Trainer, wanted: Mapping[str, object]) -> Job:
    """Draw a job of a trainer; `wanted` says what is not left to chance.

    Its keys are `num_ranks`, `gpus_per_host`, `has_rails`, `is_bound_by_host`, `microbatches`,
    `chip_spread_ratio` and the fields of Model, Noise, Habits and Tracing.
    """
    draws = np.random.default_rng([seed, 1])
    num_ranks, gpus_per_host = _sizes(draws, trainer, wanted)
    machine = draw_machine(draws, num_ranks, gpus_per_host)
    if "has_rails" in wanted:
        machine = replace(machine, has_rails=bool(wanted["has_rails"]))
    mesh, expert_size = _mesh(draws, trainer, num_ranks, gpus_per_host)
    num_stages = prod(size for name, size in mesh if name == "pp")
    by_host = bool(wanted.get("is_bound_by_host", draws.random() < 0.12))
    everybody = group_set("world", np.arange(num_ranks)[None, :], machine)
    wire_bytes_per_s = ring_bytes_per_s(machine, everybody)
    model = _model(draws, trainer, num_stages, wire_bytes_per_s, is_bound_by_host=by_host)
    microbatches = int(draws.choice([1, 1, 2, 2, 4]))
    if trainer in PIPELINES:
        rounds = int(draws.choice([1, 2, 2]))
        microbatches = num_stages * (rounds if num_stages < _MOST_STAGES else 1)
    job = Job(
        trainer=trainer,
        machine=machine,
        mesh=mesh,
        model=_adjusted(model, wanted),
        microbatches=int(str(wanted.get("microbatches", microbatches))),
        noise=_adjusted(_noise(draws), wanted),
        habits=_adjusted(_habits(draws, trainer), wanted),
        tracing=_adjusted(_tracing(draws, num_ranks), wanted),
        chip_spread_ratio=float(
            str(wanted.get("chip_spread_ratio", 10 ** draws.uniform(-2.5, -1.55)))
        ),
        expert_size=expert_size,
        seed=seed,
    )
    return job


Record = TypeVar("Record", Model, Noise, Habits, Tracing)


def _adjusted(record: Record, wanted: Mapping[str, object]) -> Record:
    names = {one.name for one in fields(record)}
    changes: dict[str, Any] = {key: value for key, value in wanted.items() if key in names}
    return replace(record, **changes)


def _sizes(
    draws: np.random.Generator, trainer: Trainer, wanted: Mapping[str, object]
) -> tuple[int, int]:
    choices, weights = (2, 4, 8, 16, 32, 64), (0.08, 0.22, 0.34, 0.22, 0.11, 0.03)
    num_ranks = int(draws.choice(choices, p=weights))
    least = {Trainer.HSDP: 8, Trainer.FSDP_TP: 8, Trainer.TENSOR: 4, Trainer.PIPELINE_DP: 8}
    num_ranks = max(num_ranks, least.get(trainer, 4 if trainer in EXPERTS else 2))
    num_ranks = int(str(wanted.get("num_ranks", num_ranks)))
    if trainer is Trainer.PIPELINE:
        num_ranks = min(num_ranks, _MOST_STAGES)
    gpus_per_host = int(draws.choice([2, 4, 8, 8]))
    if trainer in TENSOR_PARALLEL or num_ranks >= 16:
        gpus_per_host = max(gpus_per_host, 4)
    gpus_per_host = int(str(wanted.get("gpus_per_host", gpus_per_host)))
    return num_ranks, min(gpus_per_host, num_ranks)


def _mesh(
    draws: np.random.Generator, trainer: Trainer, num_ranks: int, gpus_per_host: int
) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the mesh's dimensions and the size of expert-parallel groups."""
    shard = min(gpus_per_host, num_ranks // 2)
    tensor = 2 if num_ranks < 8 else int(draws.choice([2, 2, 4]))
    stages = 2 if num_ranks < 16 else int(draws.choice([2, 4, 4]))
    gives_mesh = draws.random() < 0.4
    meshes = {
        Trainer.HSDP: (("dp_replicate", num_ranks // shard), ("dp_shard", shard)),
        Trainer.FSDP_TP: (("fsdp", num_ranks // tensor), ("tp", tensor)),
        Trainer.TENSOR: (("dp", num_ranks // tensor), ("tp", tensor)),
        Trainer.PIPELINE: (("pp", num_ranks),),
        Trainer.PIPELINE_DP: (("pp", stages), ("dp", num_ranks // stages)),
        Trainer.FSDP: (("dp_shard", num_ranks),) if gives_mesh else (),
    }
    experts = min(gpus_per_host, num_ranks) if trainer in EXPERTS else 1
    return meshes.get(trainer, ()), experts


def _model(
    draws: np.random.Generator,
    trainer: Trainer,
    num_stages: int,
    wire_bytes_per_s: float,
    *,
    is_bound_by_host: bool,
) -> Model:
    num_layers = int(draws.integers(2, 5)) if num_stages > 1 else int(draws.integers(4, 9))
    forward_s = 10 ** draws.uniform(-2.95, -2.0)
    num_kernels = int(draws.integers(25, 70))
    launch_s = draws.uniform(5e-6, 1e-5)
    if is_bound_by_host:
        forward_s = num_kernels * launch_s * draws.uniform(0.4, 0.85)
    shape = draws.random()
    layers = np.full(num_layers, forward_s)
    if shape < 0.15:  # every other layer has the dearer mixer of a hybrid model
        layers[1::2] *= draws.uniform(1.5, 2.5)
    elif shape < 0.25:
        layers[-1] *= draws.uniform(1.4, 2.2)
    # A layer of 12 h² weights does 24 h² operations a token: 4,096 tokens a pass are 100 GB/s of
    # weights. Whoever has slow links gives more tokens to a pass.
    layer_bytes = layers * min(
        draws.uniform(2e10, 1e11), draws.uniform(0.25, 1.2) * wire_bytes_per_s
    )
    has_experts = [trainer in EXPERTS and number % 2 == 1 for number in range(num_layers)]
    weight_bytes = float(layer_bytes.sum())
    shards = 4.0 if trainer in (*SHARDED, *DEEPSPEED) else 1.0
    return Model(
        forward_s=layers,
        head_s=forward_s * draws.uniform(0.3, 1.2),
        embedding_s=forward_s * draws.uniform(0.02, 0.08),
        layer_bytes=layer_bytes,
        ends_bytes=float(layer_bytes[0]) * draws.uniform(0.3, 1.0),
        memory_share=draws.uniform(0.08, 0.3),
        num_kernels=num_kernels,
        launch_s=launch_s,
        recomputes=bool(draws.random() < 0.25),
        activation_bytes=forward_s * draws.uniform(6e9, 2e10),
        optimizer_s=max(3e-4, 7 * weight_bytes / 2.2e12 / shards),
        has_experts=tuple(has_experts),
    )


def _noise(draws: np.random.Generator) -> Noise:
    return Noise(
        kernel_ratio=10 ** draws.uniform(-2.6, -1.9),
        rank_ratio=10 ** draws.uniform(-3.2, -2.5),
        outlier_share=10 ** draws.uniform(-3.7, -2.5),
        outlier_ratio=draws.uniform(0.3, 1.5),
        host_ratio=draws.uniform(0.03, 0.15),
        host_spread_ratio=draws.uniform(0.0, 0.02),
        transfer_ratio=draws.uniform(0.01, 0.06),
    )


def _habits(draws: np.random.Generator, trainer: Trainer) -> Habits:
    is_vision = trainer is Trainer.DDP and draws.random() < 0.25
    varies = not is_vision and trainer not in PIPELINES and draws.random() < 0.2
    return Habits(
        has_loader=bool(draws.random() < 0.8),
        fetch_s=10 ** draws.uniform(-4.0, -2.9),
        input_bytes=draws.uniform(4e7, 1.6e8) if is_vision else 10 ** draws.uniform(4.5, 6),
        copies_wait=bool(draws.random() < 0.4),
        tokens=int(draws.choice([2048, 4096, 8192])),
        tokens_known=bool(draws.random() < 0.6) and trainer not in EXPERTS,
        length_ratio=draws.uniform(0.05, 0.3) if varies else 0.0,
        waits_at_end=bool(draws.random() < 0.7),
        logs_loss=bool(draws.random() < 0.3),
        clips=bool(draws.random() < 0.6),
        is_compiled=bool(draws.random() < 0.08),
        collects_every=int(draws.choice([0, 0, 0, 7, 13])),
        collection_s=draws.uniform(0.0002, 0.002),
        first_s=10 ** draws.uniform(-2.0, -0.5),
        keeps_gathered=bool(draws.random() < 0.2),
        bucket_bytes=draws.uniform(2.5e7, 1e8),
        interference_ratio=draws.uniform(0.01, 0.07),
        ends_are_bounds=bool(draws.random() < 0.1),
    )


def _tracing(draws: np.random.Generator, num_ranks: int) -> Tracing:
    choices = ((5, 2, 4), (5, 2, 5), (5, 2, 3), (10, 3, 2), (8, 8, 1), (12, 12, 1), (6, 4, 2))
    interval, window, num_windows = choices[int(draws.integers(len(choices)))]
    if num_ranks <= 8 and draws.random() < 0.2:
        interval, window, num_windows = 20, 20, 1
    if num_ranks >= 32:
        interval, window, num_windows = (5, 2, 3) if draws.random() < 0.7 else (6, 6, 1)
    return Tracing(
        granularity=Granularity.BASE if draws.random() < 0.15 else Granularity.FULL,
        interval=interval,
        window=window,
        num_windows=num_windows,
        layer_stride=2 if draws.random() < 0.06 else 1,
        has_counters=bool(draws.random() < 0.3),
        compress=bool(draws.random() < 0.05),
    )
