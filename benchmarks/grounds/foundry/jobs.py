"""What a job is: its layout and model, and what each of its parts costs on a perfect chip.

A part's cost has three sides: products (bound by the clock), attention (the same, growing with the
square of a document's length) and memory (norms, losses, updates). Counted as usual: a product of
(t, a) and (a, b) is 2·t·a·b operations; a backward pass is twice a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.grounds.foundry.hardware import Machines
from megascan.topology import Layout


@dataclass(frozen=True)
class Cost:
    """Seconds of a part on a perfect chip, and how many kernels it launches."""

    products_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    num_kernels: int = 10
    is_expert: bool = False  # grows with the tokens that the router sends here

    def times(self, factor: float, num_kernels: int) -> Cost:
        """Return the cost of so many times the work."""
        return Cost(
            self.products_s * factor,
            self.attention_s * factor,
            self.memory_s * factor,
            num_kernels,
            self.is_expert,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job; sizes as in Megatron's flags."""

    machines: Machines = field(default_factory=Machines)
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    layers: tuple[int, ...] = (4,)  # of each virtual stage, in the model's order
    hidden: int = 4096
    sequence: int = 4096
    vocabulary: int = 128_000
    num_microbatches: int = 8
    distributed_optimizer: bool = True
    overlap_grads: bool = True
    sequence_parallel: bool = True
    recompute: str = ""  # "", "selective", "full"
    experts: int = 0
    capacity_ratio: float = 0.0  # 0: none, all tokens are kept
    router_spread_ratio: float = 0.05  # how far experts' shares stray
    router_drift_ratio: float = 0.0  # per iteration
    lengths: str = "fixed"  # fixed, packed, uneven
    length_spread_ratio: float = 0.0
    long_replica: int = -1
    long_ratio: float = 1.0
    long_varies: bool = False
    growth_from: int = 0  # iteration from which microbatches are longer on all
    growth_ratio: float = 1.0
    collections: str = "off"  # off (by hand), usual, heavy
    load_ratio: float = 0.1  # a worker's time for a microbatch, as a part of the training's
    prefetch: int = 4
    loader_spread_ratio: float = 0.1
    checkpoint_every: int = 0
    checkpoint_s: float = 1.5
    logging_s: float = 0.0  # on the last rank, each iteration
    first_iteration: int = 1
    num_iterations: int = 12
    interval: int = 5
    window: int = 5
    granularity: str = "full"
    missing: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        """Return the layout as a header has it; experts keep the tensor parallelism of the rest."""
        return Layout(
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            dp=self.dp,
            pp=self.pp,
            vpp=self.vpp,
            etp=self.tp if self.ep > 1 else 1,
        )

    @property
    def is_tied(self) -> bool:
        """Tell whether embedding and output layer share their matrix: not in large vocabularies."""
        return self.vocabulary < 100_000

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def all_iterations(self) -> tuple[int, ...]:
        """Return the iterations that run."""
        return tuple(range(self.first_iteration, self.first_iteration + self.num_iterations))

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return the traced iterations."""
        return tuple(each for each in self.all_iterations if self.is_traced(each))

    def is_traced(self, iteration: int) -> bool:
        """Tell whether an iteration is traced."""
        return (iteration - 1) % self.interval < self.window

    def saves_after(self, place: int) -> bool:
        """Tell whether a checkpoint follows an iteration, counted from 0."""
        every = self.checkpoint_every
        return every > 0 and self.all_iterations[place] % every == 0

    @property
    def ranks_of_host(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks on each host."""
        hosts: dict[int, list[int]] = {}
        for rank in range(self.num_ranks):
            hosts.setdefault(self.machines.host_of(rank), []).append(rank)
        return {host: tuple(ranks) for host, ranks in hosts.items()}

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch on one rank, before tensor parallelism."""
        return self.sequence // self.cp

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of the activations that a rank hands on."""
        split = self.tp if self.sequence_parallel else 1
        return 2 * self.tokens * self.hidden // split

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of one layer's attention on one rank (grouped queries)."""
        return int(2.5 * self.hidden**2) // self.tp

    @property
    def mlp_parameters(self) -> int:
        """Return the parameters of one layer's MLP on one rank, of an expert where there are."""
        width = 3.5 if not self.experts else 1.75
        return int(3 * width * self.hidden**2) // self.tp

    def _products_s(self, flops: float) -> float:
        return flops / self.machines.gpu.product_flops

    def _memory_s(self, num_bytes: float) -> float:
        return num_bytes / self.machines.gpu.memory_bytes

    def attention(self) -> Cost:
        """Return the cost of attention forward, norm included."""
        flops = 2.0 * self.tokens * self.sequence * self.hidden / self.tp  # causal: half of 4
        return Cost(
            self._products_s(2.0 * self.tokens * self.attention_parameters),
            flops / self.machines.gpu.attention_flops,
            self._memory_s(7.0 * self.activation_bytes),
            24,
        )

    def mlp(self) -> Cost:
        """Return the cost of the MLP forward, or of a rank's experts: two of them a token."""
        num_active = 2 if self.experts else 1
        return Cost(
            self._products_s(2.0 * num_active * self.tokens * self.mlp_parameters),
            0.0,
            self._memory_s(8.0 * num_active * self.activation_bytes),
            40 if self.experts else 13,
            bool(self.experts),
        )

    def embedding(self) -> Cost:
        """Return the cost of the embedding forward."""
        return Cost(memory_s=self._memory_s(6.0 * self.activation_bytes), num_kernels=8)

    def output_layer(self) -> Cost:
        """Return the cost of the projection to the vocabulary."""
        return Cost(
            self._products_s(2.0 * self.tokens * self.hidden * self.vocabulary / self.tp),
            0.0,
            self._memory_s(2.0 * self.tokens * self.vocabulary / self.tp),
            6,
        )

    def loss(self) -> Cost:
        """Return the cost of the loss over the vocabulary."""
        return Cost(
            memory_s=self._memory_s(10.0 * self.tokens * self.vocabulary / self.tp), num_kernels=14
        )

    @property
    def microbatch_s(self) -> float:
        """Return about how long a microbatch keeps the last stage busy."""
        parts = [self.attention(), self.mlp()] * max(self.layers) * self.vpp
        parts += [self.output_layer(), self.loss()]
        return 3.0 * sum(each.products_s + each.attention_s + each.memory_s for each in parts)

    @property
    def num_operations(self) -> int:
        """Return about how many operations the ranks go through in an iteration."""
        in_layer = 10 + 4 * (self.tp > 1) + 4 * (self.experts > 0) + (self.cp > 1)
        layers = sum(self.layers) / self.pp * (3 if self.recompute == "full" else 2)
        return int(self.num_ranks * self.num_microbatches * (layers * in_layer + 10 * self.vpp))

    def update(self, num_parameters: float) -> Cost:
        """Return the cost of Adam's update: some 30 bytes a parameter."""
        shards = self.dp * self.cp if self.distributed_optimizer else 1
        return Cost(memory_s=self._memory_s(30.0 * num_parameters / shards), num_kernels=60)
