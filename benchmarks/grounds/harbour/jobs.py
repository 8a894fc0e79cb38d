"""Say what a job is: its layout, its model, what is traced; and what the parts of a layer cost.

Operations follow Narayanan et al. 2021 (a product of m × k by k × n takes 2mkn), bytes follow
Korthikanti et al. 2022 (what a layer reads and writes beside its products, in bf16). A backward
pass takes twice the products, one half for its input's gradient, one for its weights'.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.grounds.harbour.hardware import CHIPS, Chip, Site
from megascan.topology import Layout

_BYTES = 2  # bf16
_STATE_BYTES = 30  # an Adam step reads and writes: gradient, weight, master weight, two moments
_KERNELS = {"attention": 15, "mlp": 9, "moe": 28, "embedding": 4, "output_layer": 5, "loss": 7}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one module asks of a sound chip: seconds of products, of memory, kernels to launch.

    `grows` is the share of the products that grows with the square of a sequence's length, the
    rest grows with the length.
    """

    matrix_s: float
    memory_s: float
    kernels: int
    grows: float = 0.0

    def times(self, products: float, memory: float, kernels: float) -> Work:
        """Return work that is so many times as much."""
        return Work(
            matrix_s=self.matrix_s * products,
            memory_s=self.memory_s * memory,
            kernels=round(self.kernels * kernels),
            grows=self.grows,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """State one job; `layers` has the number of layers of each chunk, in the model's order.

    `heavy_chunk` has layers that are `heavy_ratio` times as wide by design. `lengths` says how
    sequences differ: "" not at all, "counted" with numbers of tokens in the files, "packed"
    without. `moving_ratio`: an expert with so much more to do, another one in each iteration.
    """

    site: Site = field(default_factory=Site)
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    layers: tuple[int, ...] = (2,)
    hidden: int = 4096
    sequence: int = 4096
    vocabulary: int = 32_000
    experts: int = 0
    top_k: int = 2
    load_spread_ratio: float = 0.05
    moving_ratio: float = 1.0
    num_microbatches: int = 4
    sequence_parallel: bool = True
    recompute: str = ""  # full, selective
    overlap_grads: bool = True
    overlap_params: bool = False
    distributed_optimizer: bool = True
    heavy_chunk: int = -1
    heavy_ratio: float = 1.0
    lengths: str = ""
    length_spread_ratio: float = 0.0
    loader_ms: float = 0.8
    granularity: str = "full"
    first_iteration: int = 21
    num_iterations: int = 10
    interval: int = 1
    window: int = 1
    checkpoint_every: int = 0
    evaluate_every: int = 0
    collections: str = "none"  # pauses of Python's collector: none, scattered, together
    congestion: float = 1.0  # the network between hosts, shared with others, at its worst
    reads_devices: bool = False
    missing: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        """Return the layout as headers have it."""
        return Layout(tp=self.tp, cp=self.cp, ep=self.ep, dp=self.dp, pp=self.pp, vpp=self.vpp)

    @property
    def stage_size(self) -> int:
        """Return the number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.stage_size * self.pp

    @property
    def chip(self) -> Chip:
        """Return what GPUs the job has."""
        return CHIPS[self.site.chip]

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return the numbers of the traced iterations."""
        traced = (i for i in itertools.count(self.first_iteration) if self._is_traced(i))
        return tuple(itertools.islice(traced, self.num_iterations))

    def _is_traced(self, iteration: int) -> bool:
        return (iteration - 1) % self.interval < self.window

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.site.ranks_per_host

    def ranks_of_host(self, host: int) -> tuple[int, ...]:
        """Return all ranks of a host."""
        size = self.site.ranks_per_host
        return tuple(range(host * size, min(self.num_ranks, (host + 1) * size)))

    def numbers(self, chunk: int) -> range:
        """Return the numbers of a chunk's layers, from 1; chunks are counted in model order."""
        before = sum(self.layers[:chunk])
        return range(before + 1, before + self.layers[chunk] + 1)

    def words(self, stage: int, more: float = 1.0) -> Iterator[tuple[int, str]]:
        """Yield each layer of a stage, with what it is made of in words; layers that do `more` than
        others are built in another way.
        """
        for chunk in range(stage, self.pp * self.vpp, self.pp):
            for number in self.numbers(chunk):
                width = self.heavy_ratio if chunk == self.heavy_chunk else 1.0
                yield number, "" if self.experts else f"gpt {self.hidden} {width * more:.2f}"

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch on one rank, before sequence parallelism."""
        return self.sequence // self.cp

    @property
    def message_bytes(self) -> int:
        """Return the size of what a rank hands to the next stage."""
        share = self.tp if self.sequence_parallel else 1
        return self.tokens * self.hidden * _BYTES // share

    @property
    def activation_bytes(self) -> int:
        """Return the size of a layer's whole input on one context-parallel rank."""
        return self.tokens * self.hidden * _BYTES

    def parameters(self, stage: int, *, experts: bool = False) -> float:
        """Return the parameters on a rank of a stage, of experts or of all else."""
        chunks = range(stage, self.pp * self.vpp, self.pp)
        square = self.hidden**2
        if experts:
            layers = sum(self.layers[chunk] for chunk in chunks)
            return layers * 4.0 * square * self.experts / self.ep if self.experts else 0.0
        feed = 0.0 if self.experts else 8.0
        wide = [self.heavy_ratio if chunk == self.heavy_chunk else 1.0 for chunk in chunks]
        sums = sum(
            self.layers[chunk] * (4 + feed * width)
            for chunk, width in zip(chunks, wide, strict=True)
        )
        ends = (stage == 0) + (stage == self.pp - 1)
        return (sums * square + ends * self.vocabulary * self.hidden) / self.tp

    def update_s(self, stage: int) -> float:
        """Return how long a sound chip's Adam step takes, bound by memory."""
        shards = self.dp * self.cp if self.distributed_optimizer else 1
        spread = max(1, shards // self.ep)
        own = self.parameters(stage) / shards + self.parameters(stage, experts=True) / spread
        return own * _STATE_BYTES / self.chip.memory_bytes_s

    def work(self, module: str, chunk: int = -1) -> Work:
        """Return the forward work of a module; of one in a heavy chunk if it lies there."""
        width = self.heavy_ratio if chunk == self.heavy_chunk else 1.0
        flops, share, num_bytes = self._needs(module, width)
        return Work(
            matrix_s=flops / self.tp / self.chip.matrix_flops_s,
            memory_s=num_bytes / self.chip.memory_bytes_s,
            kernels=_KERNELS[module],
            grows=share,
        )

    def _needs(self, module: str, width: float) -> tuple[float, float, float]:
        """Return floating-point operations, the share of them that is quadratic, and bytes."""
        tokens, hidden = self.tokens, self.hidden
        pass_bytes = self.activation_bytes
        split = self.tp if self.sequence_parallel else 1
        if module == "attention":
            core = 2.0 * tokens * self.sequence * hidden
            flops = 8.0 * tokens * hidden**2 + core
            return flops, core / flops, pass_bytes * (6 / split + 8 / self.tp)
        if module == "mlp":
            return 16.0 * tokens * hidden**2 * width, 0.0, pass_bytes * (6 / split + 12 / self.tp)
        if module == "moe":
            flops = 8.0 * tokens * hidden**2 * self.top_k  # experts twice as wide as the model
            return flops, 0.0, pass_bytes * (6 / split + 10.0 * self.top_k / self.tp)
        logits = tokens * self.vocabulary / self.tp * _BYTES
        if module == "output_layer":
            return 2.0 * tokens * hidden * self.vocabulary, 0.0, pass_bytes + logits
        return 0.0, 0.0, 4 * logits if module == "loss" else 4 * pass_bytes / split
