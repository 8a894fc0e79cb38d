"""Describe a job of this ground: its grid, its tracer, its noise, and what is planted into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Place ranks on the grid: rank = tp + TP * (dp + DP * pp), hosts by consecutive ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    gpus_per_host: int = 8

    @property
    def num_ranks(self) -> int:
        """Return the world size."""
        return self.tp * self.pp * self.dp

    @property
    def num_hosts(self) -> int:
        """Return how many hosts the ranks fill."""
        return -(-self.num_ranks // self.gpus_per_host)

    def grid(self) -> Ranks:
        """Return all global ranks, shape (pp, dp, tp)."""
        return np.arange(self.num_ranks).reshape(self.pp, self.dp, self.tp)

    def hosts(self) -> Ranks:
        """Return the host of each rank, shape (pp, dp, tp)."""
        return self.grid() // self.gpus_per_host

    def name(self) -> str:
        """Return the sizes of all axes above 1, such as `tp2pp2dp4`, and small hosts."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        text = "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        return text if self.gpus_per_host == 8 else f"{text}h{self.gpus_per_host}"


class Tracer(StrEnum):
    """Name the three tracers that wrote this format.

    `june` records schedule events and names layers by number; each traced step stands once in the
    file. `july` gathers windows to rank 0, and repeats the first step of a window twice for each of
    its steps. `head` does the same, without any schedule event.
    """

    JUNE = "june"
    JULY = "july"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Say which tracer wrote the files, and with which flags."""

    tracer: Tracer = Tracer.JUNE
    base: bool = False  # schedule events, loss, _reduce and optimizer only
    interval: int = 5
    window: int = 2

    @property
    def num_copies(self) -> int:
        """Return how often each step stands in the file."""
        return 1 if self.tracer is Tracer.JUNE else 2 * self.window

    def is_window_start(self, step: int) -> bool:
        """Tell whether the step of this index (in the file, from 0) is the first of its window."""
        return self.tracer is not Tracer.JUNE or step % self.window == 0

    def num_steps_before(self, step: int) -> int:
        """Return how many steps passed untraced between the traced step before this one and it."""
        if step == 0 or not self.is_window_start(step):
            return 0
        traced = 1 if self.tracer is not Tracer.JUNE else self.window
        return self.interval - traced


class Kind(StrEnum):
    """Name what can be planted, by its physics."""

    GPU_CLOCK = "gpu_clock"
    THROTTLING = "throttling"
    NVLINK = "nvlink"
    NIC = "nic"
    RAIL = "rail"
    HOST_CPU = "host_cpu"
    HOST_MEMORY = "host_memory"
    GC = "gc"
    HEAVY_HEAD = "heavy_head"
    HEAVY_STAGE = "heavy_stage"
    LONG_SEQUENCES = "long_sequences"
    HEAVY_REPLICA = "heavy_replica"
    HOT_EXPERT = "hot_expert"
    MOVING_EXPERT = "moving_expert"
    WARM_UP = "warm_up"
    PAUSE = "pause"
    SLOW_FILES = "slow_files"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """State one thing that is planted.

    `place` is a rank, host, rail, stage, replica or expert, as the kind says. `factor` multiplies
    what the kind concerns; for stalls it is 1 and the share of time that they add. Steps count from
    1 in the order of the file. `share` is that of the time in bursts, of the steps with a pause, or
    of the microbatches that wait. `period` is the mean cycle of bursts, or from pause to pause, in
    steps.
    """

    kind: Kind
    factor: float = 1.0
    place: int = 0
    first_step: int = 1
    share: float = 1.0
    period: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Say how much healthy hardware varies; ratios are relative to the module's own time."""

    module_ratio: float = 0.015  # coefficient of variation of one module's gamma draw
    chip_spread_ratio: float = 0.01  # chips differ by up to so much, for the whole run
    drift_ratio: float = 0.002  # standing deviation of each rank's AR(1) from step to step
    host_ratio: float = 0.002  # the same, shared by all ranks of a host
    regime_ratio: float = 0.004  # a chip in its slower power state
    transfer_ratio: float = 0.05  # coefficient of variation of one transfer
    spike_probability: float = 0.0005  # of one module
    spike_us: float = 800.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """Hold all that one simulation needs; `layers` counts those of one stage."""

    shape: Shape
    seed: int
    num_steps: int = 10
    num_microbatches: int = 8
    layers: int = 2
    gpu_scale: float = 1.0  # bigger models: each kernel takes so many times longer
    launch_scale: float = 1.0  # slower hosts: each launch takes so many times longer
    tied_embeddings: bool = True
    experts: bool = False  # the MLPs are experts, one a data-parallel rank
    tracing: Tracing = field(default_factory=Tracing)
    noise: Noise = field(default_factory=Noise)
    effects: tuple[Effect, ...] = ()
