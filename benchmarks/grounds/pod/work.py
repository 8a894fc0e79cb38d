"""Price the modules of a model by a roofline: seconds of products and seconds of memory traffic.

A module is a few pieces between its collectives. A piece takes `matrix_s` at the chip's clock plus
`memory_s` at the speed of its memory: a lower clock lengthens the first, sick memory the second.

    attention   norm and QKV | core (square of the documents' lengths) | projection
    mlp         norm and first product | second product
    moe         router and permutation | experts | combination      (and a shared expert)
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.pod.job import Job

BYTES = 2  # of an activation or weight in bf16
BACKWARD_MATRIX = 2.0  # products of a backward pass: by the input and by the weight
BACKWARD_MEMORY = 1.7
OPTIMIZER_BYTES = 26  # read and written for one parameter by Adam with fp32 copies


@dataclass(frozen=True)
class Piece:
    """Kernels that run one after another without communication."""

    matrix_s: float
    memory_s: float
    num_kernels: int
    core: bool = False  # its products grow with the square of documents' lengths

    def backward(self) -> Piece:
        """Return the same for the backward pass."""
        return Piece(
            self.matrix_s * (2.5 if self.core else BACKWARD_MATRIX),
            self.memory_s * BACKWARD_MEMORY,
            self.num_kernels + self.num_kernels // 2,
            self.core,
        )


@dataclass(frozen=True)
class Costs:
    """Hold the pieces of one job and the bytes of its messages."""

    qkv: Piece
    core: Piece
    projection: Piece
    mlp_first: Piece
    mlp_second: Piece
    router: Piece
    experts: Piece
    combination: Piece
    shared: Piece
    embedding: Piece
    output: Piece
    loss: Piece
    activation_bytes: int  # of a rank: what a message between stages holds
    gathered_bytes: int  # of a TP group
    keys_bytes: int  # of attention, for context parallelism
    dispatched_bytes: int
    dense_parameters: int  # of a layer, a rank: all but experts
    mlp_parameters: int
    expert_parameters: int
    end_parameters: int  # embedding or output layer


def costs_of(job: Job) -> Costs:
    """Return the costs of a job's modules on a chip without disorder."""
    model, chip, tp = job.model, job.cluster.chip, job.layout.tp
    tokens, hidden = job.tokens, model.hidden
    own_tokens = tokens / tp if job.trainer.sequence_parallel else tokens
    rows = own_tokens * hidden * BYTES

    def product(flops: float) -> float:
        return flops / (chip.matrix_tflops * 1e12)

    def traffic(num_bytes: float) -> float:
        return num_bytes / (chip.memory_tbps * 1e12)

    linear = 2 * tokens * hidden**2 * model.attention_ratio / tp
    causal = 2.0 * tokens * job.data.sequence * hidden / tp
    core_s = causal / (chip.attention_tflops * 1e12)
    ffn = 2 * tokens * hidden * model.ffn / tp
    routed = tokens / tp * max(model.top_k, 1)
    expert = 6 * routed * hidden * model.expert_ffn
    logits = tokens * model.vocabulary / tp
    return Costs(
        qkv=Piece(product(linear * 0.6), traffic(7 * rows), 9),
        core=Piece(core_s, traffic(4 * tokens * hidden * BYTES / tp), 4, core=True),
        projection=Piece(product(linear * 0.4), traffic(5 * rows), 5),
        mlp_first=Piece(product(2 * ffn), traffic(6 * rows + 6 * tokens * model.ffn / tp), 8),
        mlp_second=Piece(product(ffn), traffic(4 * rows), 4),
        router=Piece(
            product(2 * tokens / tp * hidden * model.num_experts),
            traffic(5 * rows + 2 * routed * hidden * BYTES),
            22,
        ),
        experts=Piece(
            product(expert) * 1.25, traffic(3 * routed * (hidden + model.expert_ffn) * BYTES), 12
        ),
        combination=Piece(0.0, traffic(3 * routed * hidden * BYTES + 2 * rows), 9),
        shared=Piece(product(6 * tokens / tp * hidden * model.shared_ffn), traffic(3 * rows), 6),
        embedding=Piece(0.0, traffic(6 * tokens * hidden * BYTES), 5),
        output=Piece(product(2 * tokens * hidden * model.vocabulary / tp), traffic(3 * logits), 4),
        loss=Piece(0.0, traffic(8 * logits), 14),
        activation_bytes=int(rows),
        gathered_bytes=int(tokens * hidden * BYTES),
        keys_bytes=int(tokens * hidden * BYTES * 0.5 / tp),
        dispatched_bytes=int(routed * hidden * BYTES),
        dense_parameters=int(hidden**2 * model.attention_ratio / tp),
        mlp_parameters=int(3 * hidden * model.ffn / tp),
        expert_parameters=int(
            3 * hidden * model.expert_ffn * model.num_experts / max(job.layout.ep, 1)
        ),
        end_parameters=int(hidden * model.vocabulary / tp),
    )


def layer_parameters(job: Job, costs: Costs, layer: int) -> tuple[int, int]:
    """Return the parameters of a layer on one rank: those of all replicas, those of experts."""
    if not job.model.has_experts(layer):
        return costs.dense_parameters + costs.mlp_parameters, 0
    shared = 3 * job.model.hidden * job.model.shared_ffn
    return costs.dense_parameters + shared, costs.expert_parameters


def rough_iteration_s(job: Job) -> float:
    """Return about how long an iteration takes, to choose how long bursts last."""
    costs, per_stage = costs_of(job), job.num_layers(0)
    second = (
        (costs.router, costs.experts, costs.combination, costs.shared)
        if job.model.num_experts
        else (costs.mlp_first, costs.mlp_second)
    )
    layer: float = sum(
        one.matrix_s + one.memory_s for one in (costs.qkv, costs.core, costs.projection, *second)
    )
    count = job.trainer.num_microbatches + (job.layout.pp - 1) / job.layout.vpp
    return count * (per_stage * layer * (4 if job.trainer.recomputes else 3)) * 1.15 + 0.03


def launching_ratio(job: Job) -> float:
    """Return how many times longer a pass keeps the device busy than the host launches for it."""
    per_layer = 75 + 60 * bool(job.model.num_experts)  # kernels, forward and backward
    host_s = job.num_layers(0) * per_layer * job.trainer.launch_us * 1e-6
    return rough_iteration_s(job) / (job.trainer.num_microbatches + job.layout.pp - 1) / host_s
