"""Say what modules take on a nominal chip: operations, bytes and launches of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.depot.job import Job

BYTES = 2  # of a number in bf16


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of products (by tokens and by their squares) and of memory; kernels to launch."""

    linear_s: float = 0.0
    square_s: float = 0.0
    memory_s: float = 0.0
    launches: float = 1.0

    def times(self, factor: float) -> Cost:
        """Return it with that many times the kernels' time and as many launches as before."""
        return Cost(
            self.linear_s * factor, self.square_s * factor, self.memory_s * factor, self.launches
        )


class Costs:
    """The modules of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokens = job.sequence / job.cp
        self._chip = job.hardware.chip

    def _products(self, operations: float) -> float:
        return operations / self._chip.product_flops / self.job.tp

    def _memory(self, numbers: float, *, shared: bool) -> float:
        """Return the time of reading or writing so many numbers; `shared` by the TP group."""
        split = self.job.tp if shared or self.job.sequence_parallel else 1
        return numbers * BYTES / self._chip.memory_bytes_per_s / split

    @property
    def hidden_bytes(self) -> float:
        """Return the size of a microbatch's hidden states, without sequence parallelism."""
        return self.tokens * self.job.hidden * BYTES

    def attention(self, forward: bool) -> Cost:
        """Return the cost of a layer's attention, half of all pairs masked."""
        job, tokens = self.job, self.tokens
        square = self._products(2 * tokens * job.sequence * job.hidden) / 0.65
        memory = self._memory(14 * tokens * job.hidden, shared=False)
        linear = self._products(8 * tokens * job.hidden**2)
        if forward:
            return Cost(linear, square, memory, 16)
        return Cost(2 * linear, 2.5 * square, 1.7 * memory, 26)

    def mlp(self, forward: bool) -> Cost:
        """Return the cost of a layer's dense MLP, or of the experts of a rank in balance."""
        job, tokens = self.job, self.tokens * (self.job.top_k if self.job.experts else 1)
        wide = 2 * job.hidden if job.experts else 4 * job.hidden
        linear = self._products(4 * tokens * job.hidden * wide)
        memory = self._memory(6 * tokens * job.hidden, shared=False)
        memory += self._memory(3 * tokens * wide, shared=True)
        if forward:
            return Cost(linear, 0.0, memory, 10)
        return Cost(2 * linear, 0.0, 1.7 * memory, 15)

    def router(self, forward: bool) -> Cost:
        """Return the cost of choosing experts, sorting tokens and putting them back."""
        memory = self._memory(9 * self.tokens * self.job.hidden, shared=False)
        return Cost(0.0, 0.0, memory * (1.0 if forward else 1.3), 28 if forward else 22)

    def embedding(self, forward: bool) -> Cost:
        """Return the cost of looking tokens up."""
        memory = self._memory(5 * self.tokens * self.job.hidden, shared=False)
        return Cost(0.0, 0.0, memory * (1.0 if forward else 2.0), 5)

    def output(self, forward: bool) -> Cost:
        """Return the cost of the product with the vocabulary, and of the loss's first half."""
        job = self.job
        linear = self._products(2 * self.tokens * job.hidden * job.vocabulary)
        memory = self._memory(5 * self.tokens * job.vocabulary, shared=True)
        if forward:
            return Cost(linear, 0.0, memory, 12)
        return Cost(2 * linear, 0.0, memory, 9)

    def loss(self) -> Cost:
        """Return the cost of the trainer's loss function."""
        return Cost(0.0, 0.0, 6e-6, 7)

    def dense_parameters(self, part: int) -> float:
        """Return how many numbers a rank holds of a part's layers, experts left out."""
        job = self.job
        wide = 4.0 if job.experts else 12.0
        return wide * job.hidden**2 / job.tp * job.layers[part]

    def expert_parameters(self, part: int) -> float:
        """Return how many numbers a rank holds of a part's experts."""
        job = self.job
        if not job.experts:
            return 0.0
        return 4.0 * job.hidden**2 * job.experts / job.ep * job.layers[part]

    def end_parameters(self) -> float:
        """Return how many numbers a rank holds of the embedding or of the output layer."""
        return self.job.vocabulary * self.job.hidden / self.job.tp

    def update(self, numbers: float) -> Cost:
        """Return the cost of Adam's step over what a rank updates: 28 bytes a number."""
        share = self.job.dp * self.job.cp if self.job.distributed_optimizer else 1
        memory = numbers / share * 28 / self._chip.memory_bytes_per_s
        return Cost(0.0, 0.0, memory, 40)
