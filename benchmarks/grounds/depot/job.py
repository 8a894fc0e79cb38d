"""Describe one training job: its layout, its model, its habits, and the luck of its machines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.hardware import MACHINES, Machine
from megascan.topology import Layout


@dataclass(frozen=True, kw_only=True)
class Job:
    """Say all about a job but its faults and its seed. Chunks are numbered along the model: chunk
    c of stage p is the model's part number c·pp + p.
    """

    machine: str = "h100"
    ranks_per_host: int = 0  # fewer than a host has GPUs; 0: all of them
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    layers: tuple[int, ...] = (4,)  # of each part of the model
    microbatches: int = 4
    hidden: int = 4096
    sequence: int = 4096
    vocabulary: int = 64_000
    experts: int = 0  # of each layer; 0: dense layers
    top_k: int = 2
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    overlap_grads: bool = True
    gather: str = "after"  # parameters: after the update, "ahead" of the layers, in every "pass"
    recompute: bool = False
    heavy: tuple[tuple[int, float], ...] = ()  # parts of the model whose layers are dearer

    granularity: str = "full"
    interval: int = 5
    window: int = 5
    num_windows: int = 2
    first_iteration: int = 1  # later: tracing was switched on in a job that runs
    has_counters: bool = True
    gzip: bool = False

    lengths: str = "fixed"  # or "padded to the batch", or "packed"
    length_spread_ratio: float = 0.0
    fill_ratio: float = 1.0  # of a sequence, where all are equally long
    long_replica: float = 1.0  # how many times longer the data of the last replica are
    expert_spread_ratio: float = 0.04
    hot_expert: float = 1.0  # how many times more tokens the first rank's experts get

    chip_spread_ratio: float = 0.01
    kernel_noise_ratio: float = 0.006
    host_noise_ratio: float = 0.12
    stalls_per_s: float = 0.1  # other processes on the core of the launching thread
    stall_s: float = 0.002
    clock_error_s: float = 0.0005
    clock_drift_ppm: float = 8.0
    nic_noise_ratio: float = 0.04
    nic_jam_share: float = 0.0  # of transfers between hosts that meet a jam
    nic_jam_factor: float = 3.0
    launch_ratio: float = 1.0  # launches take so many times as long as usual
    load_s: float = 0.01  # one microbatch in the loader's processes
    load_noise_ratio: float = 0.2
    storage_jams: float = 0.0  # share of iterations in which the storage of all is slow
    num_prefetched: int = 4
    collects: str = "rarely"  # or "turns", "together"
    collect_s: float = 0.08
    log_s: float = 0.003  # what the first rank writes between iterations
    evaluates_every: int = 0
    saves_every: int = 0
    warm_up: float = 1.0  # how much dearer than usual the first iterations of a run are

    @property
    def hardware(self) -> Machine:
        """Return the machines it runs on."""
        return MACHINES[self.machine]

    @property
    def num_ranks(self) -> int:
        """Return how many GPUs it has."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def ranks_of_stage(self) -> int:
        """Return how many ranks hold one stage."""
        return self.tp * self.cp * self.dp

    @cached_property
    def layout(self) -> Layout:
        """Return its layout as files have it."""
        return Layout(tp=self.tp, cp=self.cp, ep=self.ep, dp=self.dp, pp=self.pp, vpp=self.vpp)

    @property
    def last_iteration(self) -> int:
        """Return the last one that is simulated."""
        return self.first_iteration + (self.num_windows - 1) * self.interval + self.window - 1

    @cached_property
    def traced(self) -> tuple[int, ...]:
        """Return the iterations that are traced."""
        return tuple(
            each
            for each in range(self.first_iteration, self.last_iteration + 1)
            if (each - 1) % self.interval < self.window
        )

    @cached_property
    def hosts(self) -> NDArray[np.int64]:
        """Return the host of each rank."""
        return np.arange(self.num_ranks) // self.gpus_used

    @property
    def gpus_used(self) -> int:
        """Return how many GPUs of a host it has."""
        return self.ranks_per_host or self.hardware.gpus

    @property
    def num_hosts(self) -> int:
        """Return how many hosts it has."""
        return int(self.hosts[-1]) + 1

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return tuple(map(int, np.flatnonzero(self.hosts == host)))

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank holds."""
        return rank // self.ranks_of_stage

    def replica_of(self, rank: int) -> int:
        """Return the data-parallel place of a rank."""
        return rank % self.ranks_of_stage // (self.tp * self.cp)

    def layers_of(self, part: int) -> range:
        """Return the numbers of the layers of one part of the model, from 1."""
        first = sum(self.layers[:part]) + 1
        return range(first, first + self.layers[part])

    def loads(self, rank: int) -> bool:
        """Tell whether a rank reads batches itself: the first of its TP group, at either end."""
        return rank % self.tp == 0 and self.stage_of(rank) in (0, self.pp - 1)
