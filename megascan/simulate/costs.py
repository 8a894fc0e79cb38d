"""What operations cost on one rank, in nanoseconds and bytes, before noise and faults.

A model is either given number by number (tests) or derived from sizes of a GPT and of the machine
by `derive_costs`; `compute_bound` and `communication_heavy` are two such machines.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megascan.errors import ConfigError
from megascan.topology import Layout


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Durations of single operations on one rank of the layout.

    Computation (`norm_ns` … `loss_ns`) is that of one microbatch in the forward pass; the
    backward pass takes `backward_ratio` times as long. Communication is the transfer alone, once
    everybody is there. Raises ConfigError for negative values.
    """

    norm_ns: float = 0.0
    """Layer norm and residual, twice a transformer layer."""
    attention_ns: float = 0.0
    mlp_ns: float = 0.0
    embedding_ns: float = 0.0
    output_layer_ns: float = 0.0
    loss_ns: float = 0.0
    backward_ratio: float = 2.0
    optimizer_ns: float = 0.0
    load_ns: float = 0.0
    """Host time to hand over one microbatch of data, on TP rank 0 of the first and last stage."""
    between_iterations_ns: float = 0.0
    """Host time after an iteration (logging) before the next begins."""
    dispatch_ratio: float = 0.0
    """Host time to launch an operation / its device time; above 1 the job is host-bound."""

    tensor_ns: float = 0.0
    """One all_reduce of a layer's activations over TP."""
    context_ns: float = 0.0
    expert_ns: float = 0.0
    pipeline_ns: float = 0.0
    """One activation or gradient between neighbouring stages."""
    broadcast_ns: float = 0.0
    gradient_ns: float = 0.0
    """reduce_scatter (or all_reduce) of a rank's gradients over DP."""
    parameter_ns: float = 0.0
    embedding_sync_ns: float = 0.0
    norm_sync_ns: float = 0.0
    """Any small all_reduce: a scalar, latency only."""

    activation_bytes: int = 0
    gradient_bytes: int = 0
    parameter_bytes: int = 0
    embedding_bytes: int = 0
    batch_bytes: int = 0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"cost {name} is {getattr(self, name)}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of a cluster, as reached by a training job (not the data sheet's peaks).

    Defaults: an H100 node, 40 % of 989 TFLOP/s bf16, NVLink all_reduce at 200 GB/s of bus
    bandwidth, one 400 Gbit/s NIC a GPU at 90 %; latencies as NCCL tests show them.
    """

    teraflops: float = 400.0
    memory_gbytes_per_s: float = 2_500.0
    node_gbytes_per_s: float = 200.0
    network_gbytes_per_s: float = 45.0
    latency_ns: float = 15_000.0
    dispatch_ratio: float = 0.3


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a GPT, with Megatron's names."""

    hidden_size: int = 4096
    seq_length: int = 4096
    micro_batch_size: int = 1
    vocab_size: int = 50_304
    num_layers: int = 16
    bytes_per_element: int = 2


def _ring(size: int, payload_bytes: float, gbytes_per_s: float, latency_ns: float) -> float:
    """One pass around a ring of `size`, (n - 1) / n of the payload; an all_reduce takes two."""
    if size < 2:
        return 0.0
    return latency_ns + payload_bytes * (size - 1) / size / gbytes_per_s


def derive_costs(layout: Layout, model: ModelSize, machine: Machine) -> CostModel:
    """Costs from sizes: FLOPs of dense layers (2 a weight and token, plus the attention matrix),
    bytes over bandwidths for everything else.

    Source of the FLOP counts: Narayanan et al., arXiv 2104.04473, appendix; 24 B s h² + 4 B s² h
    a layer forward, split here into attention (8 B s h² + 4 B s² h) and MLP (16 B s h²).
    """
    hidden, element = model.hidden_size, model.bytes_per_element
    tokens = model.micro_batch_size * model.seq_length / layout.cp
    per_ns = machine.teraflops * 1e3
    shard = tokens * hidden / layout.tp
    activation = tokens * hidden * element
    weights = 12 * hidden**2 * model.num_layers / (layout.pp * layout.tp)
    table = model.vocab_size * hidden / layout.tp
    replicas = layout.dp * layout.cp
    latency, node, network = (
        machine.latency_ns,
        machine.node_gbytes_per_s,
        machine.network_gbytes_per_s,
    )
    optimizer_bytes = weights / replicas * 28  # fp32 weight, two moments, gradient: read, write
    return CostModel(
        norm_ns=3 * activation / machine.memory_gbytes_per_s,
        attention_ns=shard * (8 * hidden + 4 * model.seq_length) / per_ns,
        mlp_ns=shard * 16 * hidden / per_ns,
        embedding_ns=2 * activation / machine.memory_gbytes_per_s,
        output_layer_ns=2 * tokens * table / per_ns,
        loss_ns=4 * tokens * model.vocab_size / layout.tp * 4 / machine.memory_gbytes_per_s,
        optimizer_ns=optimizer_bytes / machine.memory_gbytes_per_s,
        load_ns=100_000.0,
        between_iterations_ns=500_000.0,
        dispatch_ratio=machine.dispatch_ratio,
        tensor_ns=2 * _ring(layout.tp, activation, node, latency),
        context_ns=_ring(layout.cp, 2 * activation / layout.tp, node, latency),
        expert_ns=_ring(layout.ep, activation, network, latency),
        pipeline_ns=latency + activation / network,
        broadcast_ns=latency,
        gradient_ns=_ring(replicas, weights * 4, network, latency),
        parameter_ns=_ring(replicas, weights * element, network, latency),
        embedding_sync_ns=2 * _ring(2, table * 4, network, latency),
        norm_sync_ns=3 * latency,
        activation_bytes=int(activation),
        gradient_bytes=int(weights * 4),
        parameter_bytes=int(weights * element),
        embedding_bytes=int(table * 4),
        batch_bytes=int(tokens * 8 * 3),
    )


def compute_bound(layout: Layout, model: ModelSize | None = None) -> CostModel:
    """A job on fast links: computation is most of every step."""
    return derive_costs(layout, model or ModelSize(), Machine())


def communication_heavy(layout: Layout, model: ModelSize | None = None) -> CostModel:
    """A job on slow links (TP over PCIe at 20 GB/s, 100 Gbit/s NICs): transfers take a third and
    more of the step."""
    machine = Machine(node_gbytes_per_s=20.0, network_gbytes_per_s=9.0, latency_ns=30_000.0)
    return derive_costs(layout, model or ModelSize(), machine)
