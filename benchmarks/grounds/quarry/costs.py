"""Say what each part of a model costs by roofline: products, attention, memory, launches.

A part takes  products / rate + attention / rate + bytes / memory's rate  for the tokens that a
microbatch has usually. Products and bytes grow with its tokens, attention with the sum of squares
of its documents' lengths. Only the first two follow the clock of the chip, only the last the rate
of its memory. Backward is twice of all three. Example, 8192 tokens of 4096 numbers, one rank, 0.5
PFLOP/s: the MLP's three products of 4096 x 14336 take 2·8192·3·4096·14336 / 0.5e15 = 5.8 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.quarry.jobs import Job


@dataclass(frozen=True, kw_only=True)
class Work:
    """State what a group of kernels takes on an average chip, in seconds by its bound."""

    products_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    kernels: int = 1

    @property
    def alone_s(self) -> float:
        """Return how long it takes when nothing disturbs it."""
        return self.products_s + self.attention_s + self.memory_s

    def times(self, factor: float, launches: float | None = None) -> Work:
        """Return so many times the work, with as many times the kernels unless said otherwise."""
        return Work(
            products_s=self.products_s * factor,
            attention_s=self.attention_s * factor,
            memory_s=self.memory_s * factor,
            kernels=max(1, round(self.kernels * (factor if launches is None else launches))),
        )


class Costs:
    """What the parts of a job's model cost on one rank, for one microbatch forward."""

    def __init__(self, job: Job) -> None:
        self.job = job
        layout = job.layout
        self.tokens = job.tokens / layout.cp
        self.width = 2 * job.hidden
        """Bytes of one token between layers."""
        self.shared = layout.tp if job.sequence_parallel else 1
        """Among how many ranks of a tensor-parallel group what is no product is divided."""

    def _work(self, flops: float, attention: float, memory: float, kernels: float) -> Work:
        machines = self.job.machines
        return Work(
            products_s=flops / machines.product_flops,
            attention_s=attention / machines.attention_flops,
            memory_s=memory / machines.memory_bytes,
            kernels=max(1, round(kernels * self.job.kernels_ratio)),
        )

    def attention(self) -> Work:
        """Return the self-attention of a layer, its norm and residual."""
        job, tp = self.job, self.job.layout.tp
        products = 2 * self.tokens * job.hidden**2 * (2 + 2 * job.kv_ratio) / tp
        causal = 4 * self.tokens * (job.sequence / 2) * job.hidden / tp
        memory = self.tokens * self.width * (9 / self.shared + 7 / tp)
        return self._work(products, causal, memory, 16)

    def mlp(self) -> Work:
        """Return the gated MLP of a layer, its norm and residual."""
        job, tp = self.job, self.job.layout.tp
        products = 2 * self.tokens * 3 * job.hidden**2 * job.ffn_ratio / tp
        memory = self.tokens * self.width * (9 / self.shared + 5 * job.ffn_ratio / tp)
        return self._work(products, 0, memory, 11)

    def mixer(self) -> Work:
        """Return a state-space layer: thin products, much memory."""
        job, tp = self.job, self.job.layout.tp
        products = 2 * self.tokens * 6 * job.hidden**2 / tp
        return self._work(products, 0, self.tokens * self.width * 40 / tp, 22)

    def router(self) -> Work:
        """Return norm, router and permutation of a layer with experts."""
        job, tp = self.job, self.job.layout.tp
        copies = 4 + 3 * job.experts_per_token
        return self._work(0, 0, self.tokens / tp * self.width * copies, 24)

    def experts(self) -> Work:
        """Return the experts of a rank, when all are sent as many tokens."""
        job, tp = self.job, self.job.layout.tp
        sent = self.tokens / tp * job.experts_per_token
        products = 2 * sent * 3 * job.hidden**2 * self.expert_ratio
        return self._work(products, 0, sent * self.width * (3 + 5 * self.expert_ratio), 14)

    @property
    def expert_ratio(self) -> float:
        """Return the width of one expert's MLP, as a share of the hidden size."""
        return self.job.ffn_ratio / max(2.0, self.job.experts_per_token)

    def embedding(self) -> Work:
        """Return the embedding of the first stage."""
        return self._work(0, 0, self.tokens * self.width * 4, 6)

    def output(self) -> Work:
        """Return the output layer of the last stage, with its cross entropy."""
        job, tp = self.job, self.job.layout.tp
        products = 2 * self.tokens * job.hidden * job.vocabulary / tp
        return self._work(products, 0, self.tokens * job.vocabulary / tp * 14, 14)

    def layer_weights(self, letter: str) -> float:
        """Return how many weights of a layer a rank holds, without experts."""
        job, tp = self.job, self.job.layout.tp
        wide = {"d": 2 + 2 * job.kv_ratio + 3 * job.ffn_ratio, "e": 2 + 2 * job.kv_ratio, "m": 6.0}
        return wide[letter] * job.hidden**2 / tp

    def expert_weights(self) -> float:
        """Return how many weights of one layer's experts a rank holds: four of them."""
        return 4 * 3 * self.job.hidden**2 * self.expert_ratio

    def end_weights(self) -> float:
        """Return how many weights of the embedding or the output layer a rank holds."""
        return self.job.vocabulary * self.job.hidden / self.job.layout.tp

    def update(self, weights: float) -> Work:
        """Return Adam over so many weights: 18 bytes of each are read, 14 written."""
        return self._work(0, 0, 32 * weights, 40)
