"""Say what is trained, and what each module of it costs on a chip.

A product of matrices is computed in tiles, one on each processor at a time, so its time goes in
whole waves: 133 tiles on 132 processors take as long as 264. What a module costs is split into what
follows the chip's clock (products, attention) and what follows its memory (norms, activations).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.yard.hardware import Chip, Site
from megascan.topology import Layout

_TILE = (128, 256)
_EFFICIENCY_AT_DEPTH = 350.0  # a product over so many terms reaches half of the peak
_ATTENTION_EFFICIENCY = 0.55


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe one training job and how it was traced."""

    site: Site = field(default_factory=Site)
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    hidden: int = 4096
    ffn: int = 0  # 0: four times hidden
    vocabulary: int = 50304
    sequence: int = 4096
    micro_batch: int = 1
    layers: tuple[int, ...] = (4,)  # of each stage and chunk, in the order of the model
    num_microbatches: int = 4
    experts: int = 0
    top_k: int = 2
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    overlap: bool = True  # of gradients and parameters with passes
    recompute: str = ""  # full or selective
    host_bound: float = 1.0  # how many launches a module needs, of the usual number
    lengths: str = "fixed"  # packed, unpacked
    length_spread: float = 0.0
    expert_spread: float = 0.0
    expert_drift: float = 0.0  # how fast routing changes, of 1 an iteration
    loader_s: float = 0.05  # what one worker needs for a microbatch
    loader_workers: int = 2
    everyone_loads: bool = False  # False: the first rank of a TP group only, as Megatron-LM does
    storage_spread: float = 0.25
    noise: float = 1.0  # of kernels and iterations, over the usual
    granularity: str = "full"
    interval: int = 4
    window: int = 2
    num_iterations: int = 8  # that are traced
    first_iteration: int = 1
    has_counters: bool = True
    checkpoint_every: int = 0
    evaluate_every: int = 0
    manual_gc: bool = False
    missing: int = 0  # ranks whose files are lost
    cut: int = 0  # ranks whose files are cut short

    @property
    def layout(self) -> Layout:
        """Return the parallel axes as the tracer records them."""
        return Layout(
            tp=self.tp, cp=self.cp, ep=self.ep, dp=self.dp, pp=self.pp, vpp=self.vpp,
            etp=1 if self.experts else self.tp,
        )  # fmt: skip

    @property
    def num_ranks(self) -> int:
        """Return how many ranks train."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return the numbers of the traced iterations."""
        found: list[int] = []
        number = self.first_iteration
        while len(found) < self.num_iterations:
            if (number - 1) % self.interval < self.window:
                found.append(number)
            number += 1
        return tuple(found)

    def layers_of(self, stage: int, chunk: int) -> range:
        """Return the numbers of a chunk's layers, from 1."""
        place = chunk * self.pp + stage
        first = sum(self.layers[:place]) + 1
        return range(first, first + self.layers[place])

    @property
    def hidden_ffn(self) -> int:
        """Return the width between the two products of an MLP or expert."""
        return self.ffn or 4 * self.hidden

    @property
    def tokens(self) -> int:
        """Return how many tokens of a microbatch one rank of a CP group holds."""
        return self.micro_batch * self.sequence // self.cp

    def parameters(self, layers: int, *, experts: bool = False) -> int:
        """Return how many parameters of so many layers a rank holds, dense ones or its experts'."""
        mlp = 2 * self.hidden * self.hidden_ffn
        if experts:
            return layers * mlp * self.experts // self.ep
        return layers * (4 * self.hidden**2 + (0 if self.experts else mlp)) // self.tp

    @property
    def word_parameters(self) -> int:
        """Return how many parameters of the word embedding a rank of the first stage holds."""
        return self.hidden * self.vocabulary // self.tp


@dataclass(frozen=True)
class Cost:
    """State what a module costs: seconds by clock, by memory, of attention's scores; launches."""

    clock_s: float
    memory_s: float
    scores_s: float = 0.0
    num_kernels: float = 8.0

    def backward(self) -> Cost:
        """Return what its backward costs: two products for one, and more launches."""
        return Cost(
            2.0 * self.clock_s, 1.9 * self.memory_s, 2.5 * self.scores_s, 1.7 * self.num_kernels
        )

    @property
    def total_s(self) -> float:
        """Return its seconds on a typical chip."""
        return self.clock_s + self.memory_s + self.scores_s


def product_s(chip: Chip, rows: float, columns: int, depth: int) -> float:
    """Return the seconds of one product of matrices, in whole waves of tiles."""
    tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    waves = math.ceil(tiles / chip.num_processors)
    efficiency = 0.93 * depth / (depth + _EFFICIENCY_AT_DEPTH)
    per_tile = 2.0 * _TILE[0] * _TILE[1] * depth / (chip.flops / chip.num_processors * efficiency)
    return waves * per_tile


@lru_cache(maxsize=64)
def costs_of(job: Job) -> dict[str, Cost]:
    """Return what each module of a job costs in its forward pass."""
    chip, rows, hidden = job.site.gpu, job.tokens, job.hidden
    memory = chip.memory_bytes_per_s
    share = rows * hidden * 2 / memory / (job.tp if job.sequence_parallel else 1)
    scores = 2.0 * rows * job.sequence * hidden / job.tp
    many = job.host_bound
    attention = Cost(
        product_s(chip, rows, 3 * hidden // job.tp, hidden)
        + product_s(chip, rows, hidden, hidden // job.tp),
        9 * share,
        scores / (chip.flops * _ATTENTION_EFFICIENCY),
        14 * many,
    )
    wide = job.hidden_ffn // (1 if job.experts else job.tp)
    rows_mlp = rows * (job.top_k / job.tp if job.experts else 1)
    local_experts = max(job.experts // job.ep, 1)
    each = product_s(chip, rows_mlp / local_experts, wide, hidden) + product_s(
        chip, rows_mlp / local_experts, hidden, wide
    )
    mlp = Cost(local_experts * each, 7 * share + rows_mlp * wide * 6 / memory, 0.0, 9 * many)
    router = Cost(product_s(chip, rows, 256, hidden), 4 * share, 0.0, 16 * many)
    words = job.vocabulary // job.tp
    return {
        "attention": attention,
        "mlp": mlp,
        "router": router,
        "between": Cost(0.0, 2 * share, 0.0, 2 * many),
        "embedding": Cost(0.0, 6 * rows * hidden * 2 / memory, 0.0, 6 * many),
        "output_layer": Cost(product_s(chip, rows, words, hidden), share, 0.0, 5 * many),
        "entropy": Cost(0.0, rows * words * 14 / memory, 0.0, 8 * many),
        "loss": Cost(0.0, 8e-6, 0.0, 4 * many),
    }


@dataclass(frozen=True)
class Load:
    """State what passes get to do: shares of (replica, iteration, microbatch) and of experts."""

    tokens: NDArray[np.float64]  # 1 where the sequence is full
    scores: NDArray[np.float64]  # attention's work, 1 for full attention over the sequence
    experts: NDArray[np.float64]  # (iteration, layer, expert rank), mean 1


def load_of(job: Job, seed: int, long_replica: int = -1, hot_expert: int = -1) -> Load:
    """Draw how long documents are and where tokens are routed; a skew changes no other draw.

    The documents of `long_replica` are all long; `hot_expert` is the rank of an expert group that
    gets half as many tokens again.
    """
    rng = np.random.default_rng([seed, 2])
    shape = (job.dp, job.num_iterations, job.num_microbatches)
    skew = job.length_spread * rng.normal(size=shape)
    if long_replica >= 0:
        skew[long_replica] = np.abs(skew[long_replica]) + 2.0 * job.length_spread
    tokens, scores = np.ones(shape), np.ones(shape)
    if job.lengths == "packed":
        scores = np.clip(0.45 * np.exp(skew), 0.08, 1.0)
    elif job.lengths == "unpacked":
        tokens = np.clip(0.62 * np.exp(0.6 * skew), 0.15, 1.0)
        tokens = np.ceil(tokens * job.sequence / 64) * 64 / job.sequence
        scores = tokens**2
    steps = rng.normal(size=(job.num_iterations, sum(job.layers), job.ep))
    walk = job.expert_spread * (steps[:1] + job.expert_drift * np.cumsum(steps, axis=0))
    experts = np.exp(walk + 0.02 * steps)
    if hot_expert >= 0:
        experts[:, :, hot_expert] *= 1.5
    return Load(tokens, scores, experts / experts.mean(axis=2, keepdims=True))
