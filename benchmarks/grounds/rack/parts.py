"""Lay out what one pass of one chunk does: kernels, communication, and the modules around them.

A plan is a list of steps in the order in which Megatron-Core's layers issue them. Tensor
parallelism communicates inside modules (Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv
2205.05198), and its backward beside the product that makes the weights' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.job import Job, num_parameters
from benchmarks.grounds.rack.roofline import (
    BYTES,
    Work,
    attention,
    attention_backward,
    passes_over,
    product,
)
from megascan.vocabulary import (
    ATTENTION,
    CORE_ATTENTION,
    EMBEDDING,
    LOSS,
    MLP,
    MOE,
    OUTPUT_LAYER,
    TRANSFORMER_LAYER,
    backward_of,
    recompute_of,
)

EXPERTS, HEAD = "experts", "head"
"""What else work depends on: the tokens that a router sends, the size of the vocabulary."""


@dataclass(frozen=True)
class Begin:
    """A module begins."""

    name: str
    layer: int
    phase: str


@dataclass(frozen=True)
class End:
    """The innermost module ends."""


@dataclass(frozen=True)
class Compute:
    """Kernels: a row of the plan's works."""

    row: int


@dataclass(frozen=True)
class Talk:
    """A collective; the stream waits for it at once, or at the next `Await` where it is beside."""

    axis: str
    op: str
    size_bytes: int
    layer: int
    phase: str
    beside: bool = False
    by: str = ""  # EXPERTS: its bytes follow the router, not the tokens
    returns: bool = False  # from the experts


@dataclass(frozen=True)
class Await:
    """The stream waits for what is under way beside it."""


@dataclass(frozen=True)
class HostWaits:
    """The host reads a number from the device: how many tokens each expert gets."""


@dataclass(frozen=True)
class Reduces:
    """The gradients of a bucket are complete."""

    bucket: int


@dataclass(frozen=True)
class Needs:
    """The parameters of a bucket are needed."""

    bucket: int


Step: TypeAlias = Begin | End | Compute | Talk | Await | HostWaits | Reduces | Needs


@dataclass
class Plan:
    """Steps of a pass, and its works as rows; `tags` say by what else a row is scaled."""

    steps: list[Step] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    tags: list[tuple[str, int]] = field(default_factory=list)

    def add(self, *steps: Step) -> None:
        """Append steps."""
        self.steps += steps

    def compute(self, work: Work, by: str = "", layer: int = 0) -> None:
        """Append kernels."""
        self.add(Compute(len(self.works)))
        self.works.append(work)
        self.tags.append((by, layer))

    def finish(self) -> None:
        """Make arrays of the works."""
        rows = [(one.product_s, one.attention_s, one.memory_s) for one in self.works]
        self.seconds: Floats = np.array(rows, dtype=np.float64).reshape(-1, 3)
        self.kernels: list[int] = [one.num_kernels for one in self.works]
        self.tagged = [(row, *tag) for row, tag in enumerate(self.tags) if tag[0]]


@dataclass(frozen=True, kw_only=True)
class LayerWorks:
    """The parts of one layer on a sound chip."""

    norm: Work
    qkv: Work
    core: Work
    core_backward: Work
    proj: Work
    add: Work
    fc1: Work
    act: Work
    fc2: Work
    router: Work
    experts: Work
    permute: Work


def layer_works(job: Job) -> LayerWorks:
    """Return the parts of a layer: of a dense one, and what a layer of experts has instead."""
    chip, model, layout, habits = job.rack.chip, job.model, job.layout, job.habits
    hidden, tokens = model.hidden, model.tokens / layout.cp
    narrow = tokens / layout.tp if habits.sequence_parallel else tokens
    qkv_width = hidden * (1.0 + 2.0 * model.kv_share) / layout.tp
    width = hidden / layout.tp / layout.cp
    whole = BYTES * narrow * hidden
    routed = tokens / layout.tp * max(1, model.experts_a_token)
    up = product(chip, routed, 2 * model.ffn, hidden, kernels=3)
    down = product(chip, routed, hidden, model.ffn, kernels=2)
    return LayerWorks(
        norm=passes_over(chip, 3.0 * whole, kernels=2),
        qkv=product(chip, tokens, qkv_width, hidden, kernels=2)
        + passes_over(chip, 3.5 * BYTES * tokens * qkv_width, kernels=4),
        core=attention(chip, model.sequence, width, model.batch),
        core_backward=attention_backward(chip, model.sequence, width, model.batch),
        proj=product(chip, tokens, hidden, hidden / layout.tp, kernels=2),
        add=passes_over(chip, 4.5 * whole, kernels=3),
        fc1=product(chip, tokens, 2 * model.ffn / layout.tp, hidden, kernels=2),
        act=passes_over(chip, 4.5 * BYTES * tokens * model.ffn / layout.tp, kernels=2),
        fc2=product(chip, tokens, hidden, model.ffn / layout.tp, kernels=2),
        router=product(chip, narrow, max(1, model.num_experts), hidden, kernels=6),
        experts=up + down + passes_over(chip, 3.0 * BYTES * routed * model.ffn, kernels=3),
        permute=passes_over(chip, 2.0 * BYTES * routed * hidden, kernels=4),
    )


class Planner:
    """Makes the plans of a job's chunks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.works = layer_works(job)
        layout, model = job.layout, job.model
        tokens = model.tokens // layout.cp
        self.activation = BYTES * tokens * model.hidden
        self.kv = round(2 * BYTES * tokens * model.hidden * model.kv_share / layout.tp)
        routed = tokens // layout.tp * max(1, model.experts_a_token)
        self.routed = BYTES * routed * model.hidden

    @property
    def message_bytes(self) -> int:
        """Return what a stage sends to the next: with sequence parallelism, its rank's part."""
        if self.job.habits.sequence_parallel:
            return self.activation // self.job.layout.tp
        return self.activation

    def forward(self, stage: int, chunk: int) -> Plan:
        """Return the forward pass of a chunk."""
        job, plan, phase = self.job, Plan(), "forward"
        chip = job.rack.chip
        if stage == 0 and chunk == 0:
            plan.add(Needs(0), Begin(EMBEDDING, 0, phase))
            plan.compute(passes_over(chip, 2.0 * self.activation, kernels=5))
            if job.layout.tp > 1:
                op = "reduce_scatter" if job.habits.sequence_parallel else "all_reduce"
                plan.add(Talk("tp", op, self.activation, 0, phase))
            plan.add(End())
        layers = job.model.layers[stage][chunk]
        for number, layer in enumerate(layers):
            plan.add(Needs(self._bucket(number, len(layers))))
            self._layer(plan, layer, phase)
        if self._has_head(stage, chunk):
            self._head(plan)
        plan.finish()
        return plan

    def backward(self, stage: int, chunk: int) -> Plan:
        """Return the backward pass of a chunk, with what is computed anew."""
        job, plan = self.job, Plan()
        if self._has_head(stage, chunk):
            plan.add(Begin(backward_of(OUTPUT_LAYER), 0, "backward"))
            self._products_backward(plan, self._head_work(), Work(), HEAD)
            plan.add(End())
        layers = job.model.layers[stage][chunk]
        for number, layer in reversed(list(enumerate(layers))):
            if job.habits.recompute == "full":
                self._layer(plan, layer, "recompute")
            self._layer_backward(plan, layer)
            bucket = self._bucket(number, len(layers))
            if not number or self._bucket(number - 1, len(layers)) != bucket:
                plan.add(Reduces(bucket))
        if stage == 0 and chunk == 0:
            plan.add(Begin(backward_of(EMBEDDING), 0, "backward"))
            plan.compute(passes_over(job.rack.chip, 3.0 * self.activation, kernels=3))
            plan.add(End())
        plan.finish()
        return plan

    def _bucket(self, number: int, num_layers: int) -> int:
        return number * min(self.job.habits.num_buckets, num_layers) // num_layers

    def _has_head(self, stage: int, chunk: int) -> bool:
        return stage == self.job.num_stages - 1 and chunk == self.job.num_chunks - 1

    def _head_work(self) -> Work:
        job = self.job
        tokens = job.model.tokens / job.layout.cp
        vocabulary = job.model.vocabulary / job.layout.tp
        return product(job.rack.chip, tokens, vocabulary, job.model.hidden, kernels=2)

    def _head(self, plan: Plan) -> None:
        job, phase = self.job, "forward"
        plan.add(Begin(OUTPUT_LAYER, 0, phase))
        if job.layout.tp > 1 and job.habits.sequence_parallel:
            plan.add(Talk("tp", "all_gather", self.message_bytes, 0, phase))
        plan.compute(self._head_work(), HEAD)
        plan.add(End())
        tokens = job.model.tokens // job.layout.cp
        logits = 4.0 * tokens * job.model.vocabulary / job.layout.tp
        plan.compute(passes_over(job.rack.chip, 2.0 * logits, kernels=6), HEAD)
        if job.layout.tp > 1:  # the largest logit, the right one's, the sum of all
            plan.add(*(Talk("tp", "all_reduce", 4 * tokens, 0, phase) for _ in range(3)))
        plan.add(Begin(LOSS, 0, phase))
        plan.compute(passes_over(job.rack.chip, 8.0 * tokens, kernels=4))
        if job.habits.reduces_loss_each_microbatch and job.layout.dp * job.layout.cp > 1:
            plan.add(Talk("dp_cp", "all_reduce", 8, 0, phase))
        plan.add(End())

    def _layer(self, plan: Plan, layer: int, phase: str) -> None:
        """Add a layer's forward, also where it is computed anew."""
        title = recompute_of if phase == "recompute" else str
        works = self.works
        plan.add(Begin(title(TRANSFORMER_LAYER), layer, phase))
        plan.compute(works.norm)
        plan.add(Begin(title(ATTENTION), layer, phase))
        self._gathered(plan, layer, phase)
        plan.compute(works.qkv)
        if self.job.layout.cp > 1:
            plan.add(Talk("cp", "all_gather", self.kv, layer, phase))
        plan.compute(works.core + works.proj)
        self._summed(plan, layer, phase)
        plan.add(End())
        plan.compute(works.add + works.norm)
        if self.job.model.has_experts(layer):
            self._experts(plan, layer, phase, title(MOE))
        else:
            plan.add(Begin(title(MLP), layer, phase))
            self._gathered(plan, layer, phase)
            plan.compute(works.fc1 + works.act + works.fc2)
            self._summed(plan, layer, phase)
            plan.add(End())
        plan.compute(works.add)
        plan.add(End())

    def _gathered(self, plan: Plan, layer: int, phase: str) -> None:
        if self.job.layout.tp > 1 and self.job.habits.sequence_parallel:
            plan.add(Talk("tp", "all_gather", self.message_bytes, layer, phase))

    def _summed(self, plan: Plan, layer: int, phase: str) -> None:
        if self.job.layout.tp > 1:
            op = "reduce_scatter" if self.job.habits.sequence_parallel else "all_reduce"
            plan.add(Talk("tp", op, self.activation, layer, phase))

    def _experts(self, plan: Plan, layer: int, phase: str, name: str) -> None:
        works = self.works
        plan.add(Begin(name, layer, phase))
        plan.compute(works.router)
        plan.add(HostWaits())
        plan.compute(works.permute)
        self._exchange(plan, layer, phase)
        plan.compute(works.experts, EXPERTS, layer)
        self._exchange(plan, layer, phase, returns=True)
        plan.compute(works.permute)
        plan.add(End())

    def _exchange(self, plan: Plan, layer: int, phase: str, *, returns: bool = False) -> None:
        if self.job.layout.ep > 1:
            size = self.routed
            plan.add(Talk("ep", "all_to_all", size, layer, phase, by=EXPERTS, returns=returns))

    def _layer_backward(self, plan: Plan, layer: int) -> None:
        works, phase = self.works, "backward"
        plan.add(Begin(backward_of(TRANSFORMER_LAYER), layer, phase))
        plan.compute(works.add)
        if self.job.model.has_experts(layer):
            plan.add(Begin(backward_of(MOE), layer, phase))
            plan.compute(works.permute)
            self._exchange(plan, layer, phase)
            plan.compute(works.experts.times(2.0), EXPERTS, layer)
            self._exchange(plan, layer, phase, returns=True)
            plan.compute(works.permute + works.router.times(2.0))
            plan.add(End())
        else:
            plan.add(Begin(backward_of(MLP), layer, phase))
            before = works.fc2.times(2.0) + works.act.times(1.7)
            self._products_backward(plan, works.fc1, before)
            plan.add(End())
        plan.compute(works.norm.times(1.6) + works.add)
        plan.add(Begin(backward_of(ATTENTION), layer, phase))
        if self.job.habits.recompute == "selective":
            self._products_backward(plan, works.qkv, works.proj.times(2.0), layer=layer)
        else:
            before = works.proj.times(2.0) + works.core_backward
            self._products_backward(plan, works.qkv, before)
        plan.add(End())
        plan.compute(works.norm.times(1.6))
        plan.add(End())

    def _products_backward(
        self, plan: Plan, entry: Work, before: Work, by: str = "", layer: int = 0
    ) -> None:
        """Add the backward of a column-parallel product and what comes before it; its input's
        gradient is summed while its weight's is computed.
        """
        phase, layout = "backward", self.job.layout
        is_split = layout.tp > 1
        if is_split and self.job.habits.sequence_parallel and before.num_kernels:
            plan.add(Talk("tp", "all_gather", self.message_bytes, 0, phase))
        if before.num_kernels:
            plan.compute(before)
        if layer:
            plan.add(Begin(recompute_of(CORE_ATTENTION), layer, "recompute"))
            plan.compute(self.works.core)
            plan.add(End())
            plan.compute(self.works.core_backward)
        if layout.cp > 1 and entry is self.works.qkv:
            plan.add(Talk("cp", "reduce_scatter", self.kv * layout.cp, 0, phase))
        if is_split and self.job.habits.sequence_parallel:
            plan.add(Talk("tp", "all_gather", self.message_bytes, 0, phase, beside=True))
            plan.compute(entry, by)
            plan.add(Await(), Talk("tp", "reduce_scatter", self.activation, 0, phase, beside=True))
        else:
            plan.compute(entry, by)
            if is_split:
                plan.add(Talk("tp", "all_reduce", self.activation, 0, phase, beside=True))
        plan.compute(entry, by)
        if is_split:
            plan.add(Await())


def pass_s(job: Job) -> float:
    """Return about what a forward and a backward pass of all chunks of a stage take together."""
    planner = Planner(job)

    def seconds(plan: Plan) -> float:
        by_device = float(plan.seconds.sum())
        return max(by_device, sum(plan.kernels) * job.habits.launch_s)

    return sum(
        seconds(plan(0, chunk))
        for chunk in range(job.num_chunks)
        for plan in (planner.forward, planner.backward)
    )


def iteration_s(job: Job) -> float:
    """Return about what an iteration takes: passes, the pipeline's filling, gradients over NICs."""
    parameters = max(sum(num_parameters(job, stage)) for stage in range(job.num_stages))
    shared = min(job.rack.gpus_per_host / job.layout.tp, job.layout.dp)
    is_far = job.layout.tp * job.layout.cp * job.layout.dp > job.rack.gpus_per_host
    rate = job.rack.nic_share_bytes_s * shared if is_far else job.rack.chip.nvlink_bytes_s
    reduces_s = 2.0 * job.habits.gradient_bytes * parameters / rate
    passes = job.habits.num_microbatches + job.num_stages - 1
    return passes * pass_s(job) + reduces_s * (job.layout.dp > 1)
