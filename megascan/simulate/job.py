"""Declare the job to simulate: its shape, costs, noise, clocks, unevenness, and faults.

Costs are nanoseconds and bytes on one rank before noise and faults, given one by one (tests) or
derived from the sizes of a GPT and of the machine by `derive_costs`; `compute_bound` and
`communication_heavy` give the costs of two machines. Clocks of hosts are wrong by an offset and a
drift. A fault says what is wrong with which rank, how much, and in which iterations:

    rank=3,kind=compute,factor=1.5,from=5,to=10
    rank=3,kind=link,peer=7,factor=4           only the connection of ranks 3 and 7
    rank=3,kind=host,factor=1.4,period=4       on for four iterations, off for four, and so on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from megascan.arrays import Floats, Integers
from megascan.config import TraceConfig
from megascan.errors import ConfigError, UsageError
from megascan.header import Json
from megascan.schema import Granularity
from megascan.topology import Layout
from megascan.vocabulary import FaultKind


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Durations of single operations on one rank of the layout.

    Computation (`norm_ns` … `loss_ns`) is the time of one microbatch in the forward pass; the
    backward pass takes `backward_ratio` times as long. Communication is the transfer alone, when
    all members have arrived. Raises ConfigError for negative values.
    """

    norm_ns: float = 0.0
    """Layer norm and residual, which come twice in a transformer layer."""
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
    """Host time between two iterations (logging)."""
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
    """Any small all_reduce (a scalar), which is latency only."""

    activation_bytes: int = 0
    gradient_bytes: int = 0
    parameter_bytes: int = 0
    """What each rank has to give where parameters are gathered: its own part."""
    embedding_bytes: int = 0
    batch_bytes: int = 0

    def __post_init__(self) -> None:
        for name in (cost.name for cost in fields(self)):
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
    """Return the time of one pass around a ring, (n - 1) / n of the payload."""
    if size < 2:
        return 0.0
    return latency_ns + payload_bytes * (size - 1) / size / gbytes_per_s


def derive_costs(layout: Layout, model: ModelSize, machine: Machine) -> CostModel:
    """Derive costs from sizes: FLOPs of dense layers, bytes over bandwidths for the rest.

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
        parameter_bytes=int(weights * element / replicas),
        embedding_bytes=int(table * 4),
        batch_bytes=int(tokens * 8 * 3),
    )


def compute_bound(layout: Layout, model: ModelSize | None = None) -> CostModel:
    """Return costs of a job on fast links, in which most of an iteration is computation."""
    return derive_costs(layout, model or ModelSize(), Machine())


def communication_heavy(layout: Layout, model: ModelSize | None = None) -> CostModel:
    """Return costs of a job on slow links, in which transfers take a third of the time or more."""
    machine = Machine(node_gbytes_per_s=20.0, network_gbytes_per_s=9.0, latency_ns=30_000.0)
    return derive_costs(layout, model or ModelSize(), machine)


MOST_TIMES_SLOWER = 1e4
"""Largest factor of slowness; more would make times too large for any clock."""


def check_range(values: Mapping[str, float], most: float) -> None:
    """Raise ConfigError for the first named value that is not a number from 0 to `most`."""
    for name, value in values.items():
        if not 0 <= value <= most:
            raise ConfigError(f"{name} is {value:g}, expected a number from 0 to {most:g}")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one rank, in iterations first to last (from 1, both included; None: no end).

    COMPUTE multiplies every computation of the rank. LINK multiplies the transfer time of the
    rank's communications, or of those with one peer. HOST makes the host need `factor` times the
    device time to launch an operation, which starves the device (on the CPU: takes the thread away
    for the excess). LOADER multiplies the time to load a microbatch. GC adds collector pauses of
    `factor` - 1 times the rank's computation.

    `peer` (links only) restricts the fault to one pair; `period` switches the fault on and off
    every `period` iterations. Raises ConfigError for invalid values.
    """

    rank: int
    kind: FaultKind
    factor: float
    first_iteration: int = 1
    last_iteration: int | None = None
    peer: int | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.factor <= MOST_TIMES_SLOWER:
            raise ConfigError(
                f"fault factor is {self.factor:g}, expected 1 (as fast) to {MOST_TIMES_SLOWER:g} "
                "(1.5: takes 1.5 times as long)"
            )
        if self.first_iteration < 1:
            raise ConfigError(f"fault begins at {self.first_iteration}, iterations count from 1")
        if self.last_iteration is not None and self.last_iteration < self.first_iteration:
            raise ConfigError(
                f"fault ends at iteration {self.last_iteration}, before it begins at "
                f"{self.first_iteration}"
            )
        if self.peer is not None and (self.kind != FaultKind.LINK or self.peer == self.rank):
            raise ConfigError(f"fault peer is {self.peer}: give another rank, for kind=link only")
        if self.period is not None and self.period < 1:
            raise ConfigError(f"fault period is {self.period}, expected 1 iteration or more")

    def active(self, iteration: int) -> bool:
        """Return whether the fault slows an iteration (from 1)."""
        last = self.last_iteration
        inside = self.first_iteration <= iteration and (last is None or iteration <= last)
        if not inside or self.period is None:
            return inside
        return (iteration - self.first_iteration) // self.period % 2 == 0

    def check(self, layout: Layout) -> None:
        """Raise ConfigError if the job lacks the rank, or the rank has nothing to slow."""
        for rank in (self.rank, self.peer):
            if rank is not None and not 0 <= rank < layout.world_size:
                raise ConfigError(
                    f"fault names rank {rank}, the job has ranks 0 to {layout.world_size - 1}"
                )
        place = layout.coordinates(self.rank)
        loads = place.tp == 0 and place.pp in (0, layout.pp - 1)
        if self.kind == FaultKind.LOADER and not loads:
            raise ConfigError(
                f"rank {self.rank} loads no data, so that its loader cannot be slow; choose TP "
                "rank 0 of the first or last stage"
            )

    def to_json(self) -> dict[str, Json]:
        """Return the fault as it stands in the ground truth, with the keys of `parse_fault`."""
        record: dict[str, Json] = {
            "rank": self.rank,
            "kind": str(self.kind),
            "factor": self.factor,
            "from": self.first_iteration,
            "to": self.last_iteration,
        }
        optional: dict[str, Json] = {"peer": self.peer, "period": self.period}
        return record | {name: value for name, value in optional.items() if value is not None}


def parse_fault(text: str) -> Fault:
    """Read a fault: `rank=3,kind=compute,factor=1.5[,from=5][,to=10][,peer=7][,period=4]`.

    Raises UsageError naming the part that cannot be read.
    """
    example = "expected for example rank=3,kind=compute,factor=1.5,from=5,to=10"
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in values:
            raise UsageError(f"fault {text!r}: cannot read {part!r}, {example}")
        values[name] = value.strip()
    unknown = sorted(set(values) - {"rank", "kind", "factor", "from", "to", "peer", "period"})
    missing = [name for name in ("rank", "kind", "factor") if name not in values]
    if unknown or missing:
        problem = f"unknown {', '.join(unknown)}" if unknown else f"missing {', '.join(missing)}"
        raise UsageError(f"fault {text!r}: {problem}, {example}")
    if values["kind"] not in list(FaultKind):
        raise UsageError(
            f"fault {text!r}: unknown kind {values['kind']!r}, expected one of "
            f"{', '.join(FaultKind)}"
        )
    try:
        return _fault_of(values)
    except ValueError as error:
        raise UsageError(f"fault {text!r}: {error}, {example}") from error


def _fault_of(values: dict[str, str]) -> Fault:
    def number(name: str) -> int | None:
        return int(values[name]) if name in values else None

    return Fault(
        rank=int(values["rank"]),
        kind=FaultKind(values["kind"]),
        factor=float(values["factor"]),
        first_iteration=int(values.get("from", "1")),
        last_iteration=number("to"),
        peer=number("peer"),
        period=number("period"),
    )


def rank_factors(
    faults: Iterable[Fault], kind: FaultKind, iteration: int, world_size: int
) -> Floats:
    """Return the product of a kind's active whole-rank faults, shape (rank,); 1 without faults."""
    factors = np.ones(world_size)
    for fault in faults:
        if fault.kind == kind and fault.peer is None and fault.active(iteration):
            factors[fault.rank] *= fault.factor
    return factors


ORIGIN_UNIX_NS = 1_767_225_600_000_000_000
"""Start of a simulated job by the true clock: 2026-01-01 00:00 UTC."""
_SETTLE_NS = 1_000_000_000
"""Clock origins are taken this long before the first iteration."""


@dataclass(frozen=True)
class RankClocks:
    """Offset and drift of every rank's clock, shape (rank): local = true + offset + drift·true."""

    offset_ns: Floats
    drift_ratio: Floats

    @classmethod
    def draw(cls, job: JobModel, seed: int) -> RankClocks:
        """Draw one clock a host; the ranks of a host share it."""
        generator = np.random.default_rng([seed, 1])
        world = job.layout.world_size
        hosts = np.arange(world) // job.ranks_per_host
        errors = generator.uniform(-1.0, 1.0, (2, int(hosts[-1]) + 1))[:, hosts]
        return cls(
            np.round(errors[0] * job.clocks.offset_ms * 1e6),
            errors[1] * job.clocks.drift_ppm * 1e-6,
        )

    def local(self, true_ns: Floats, ranks: Integers) -> Integers:
        """Return whole ns since each rank's origin by its clock; one time and rank a row."""
        own_ns = true_ns * (1.0 + self.drift_ratio[ranks])
        return np.rint(own_ns).astype(np.int64) + _SETTLE_NS

    def origins(self) -> Integers:
        """Return the unix time of every rank's origin by its own clock, shape (rank)."""
        return ORIGIN_UNIX_NS - _SETTLE_NS + self.offset_ns.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Random variation; ratios are standard deviations of the logarithm.

    Raises ConfigError for values that are no number, negative, or beyond any machine.
    """

    compute_ratio: float = 0.02
    transfer_ratio: float = 0.05
    device_ratio: float = 0.0
    """Spread between chips, fixed for each rank for the whole run."""
    end_jitter_ns: float = 2_000.0
    """Members see the end of a communication up to this long after its true end."""
    spike_probability: float = 0.0
    """Share of computations that take `spike_ns` longer (daemons, page faults)."""
    spike_ns: float = 2e6

    def __post_init__(self) -> None:
        ratios = {
            "compute noise": self.compute_ratio,
            "transfer noise": self.transfer_ratio,
            "device spread": self.device_ratio,
        }
        check_range(ratios, most=3.0)
        check_range({"spike probability": self.spike_probability}, most=1.0)
        check_range({"end jitter (ns)": self.end_jitter_ns, "spike (ns)": self.spike_ns}, most=1e12)


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Errors of host clocks, uniform within ±: one offset and drift a host.

    Raises ConfigError beyond ±a year and ±a tenth.
    """

    offset_ms: float = 0.0
    drift_ppm: float = 0.0

    def __post_init__(self) -> None:
        check_range({"clock offset (ms)": self.offset_ms}, most=365 * 86_400e3)
        check_range({"clock drift (ppm)": self.drift_ppm}, most=1e5)


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """What makes a healthy job uneven, without a fault of any node.

    stage_ratio: by stage, how much longer its forward takes than the layers alone; the excess is
    additive and equal for every microbatch and replica (the output layer of the last stage, the
    embedding of the first stage, or more expensive layers between).
    sequence_ratio: spread of the work in a microbatch, drawn for every iteration, replica and
    microbatch, and equal at all stages (standard deviation of the logarithm).
    warmup_ratio: how much longer the first iteration computes, different for every rank; it fades
    over the next two iterations.
    """

    stage_ratio: Mapping[int, float] = field(default_factory=dict)
    sequence_ratio: float = 0.0
    warmup_ratio: float = 0.0
    checkpoint_interval: int = 0
    """Iterations from one checkpoint to the next; 0: no checkpoints."""
    checkpoint_ns: float = 2e9
    gc_interval: int = 0
    """Iterations in which a rank's collector pauses once on average, for `gc_ns`; 0: never."""
    gc_ns: float = 30e6

    def __post_init__(self) -> None:
        check_range({"sequence imbalance": self.sequence_ratio}, most=3.0)
        check_range({"warm-up": self.warmup_ratio}, most=MOST_TIMES_SLOWER)
        intervals = {"checkpoint": self.checkpoint_interval, "gc": self.gc_interval}
        check_range({f"{name} interval": one for name, one in intervals.items()}, most=1e9)
        pauses = {"checkpoint (ns)": self.checkpoint_ns, "collector pause (ns)": self.gc_ns}
        check_range(pauses, most=1e12)

    def to_json(self) -> list[Json]:
        """Return the imbalances as they stand in the ground truth; empty for an even job."""
        stages: list[Json] = [
            {"kind": "stage_imbalance", "stage": stage, "ratio": ratio}
            for stage, ratio in sorted(self.stage_ratio.items())
        ]
        others: list[tuple[str, float]] = [
            ("sequence_imbalance", self.sequence_ratio),
            ("warmup", self.warmup_ratio),
            ("checkpoint", self.checkpoint_interval),
            ("gc", self.gc_interval),
        ]
        return stages + [{"kind": kind, "ratio": ratio} for kind, ratio in others if ratio]


def parse_stage_imbalance(text: str, num_stages: int) -> tuple[int, float]:
    """Read (stage, ratio) from `last=1.4`, `first=1.2` or `3=1.1`. Raises UsageError otherwise."""
    name, _, value = text.partition("=")
    names = {"first": 0, "last": num_stages - 1} | {str(s): s for s in range(num_stages)}
    try:
        ratio = float(value)
    except ValueError:
        ratio = 0.0
    if name not in names or not 1.0 <= ratio <= MOST_TIMES_SLOWER:
        raise UsageError(
            f"stage imbalance {text!r}: expected first, last or a stage from 0 to "
            f"{num_stages - 1}, and a ratio of 1 or more, such as last=1.4"
        )
    return names[name], ratio


@dataclass(frozen=True, kw_only=True)
class JobModel:
    """A Megatron job. Raises ConfigError for sizes that do not fit together.

    `device` "cuda" gives spans a launch time and lets the host run ahead; "cpu" gives spans a CPU
    time. Spans are recorded in windows of iterations, which `interval` and `window` choose as
    `--trace-interval` and `--continuous-trace-iterations` do; the default traces every iteration.
    `layer_stride` leaves modules out as `--trace-layer-stride` does, by default none.
    """

    layout: Layout
    costs: CostModel
    iterations: int = 20
    num_microbatches: int = 8
    num_layers: int = 16
    noise: Noise = field(default_factory=Noise)
    clocks: Clocks = field(default_factory=Clocks)
    imbalance: Imbalance = field(default_factory=Imbalance)
    distributed_optimizer: bool = True
    tied_embeddings: bool = True
    device: str = "cuda"
    ranks_per_host: int = 8
    granularity: Granularity = Granularity.FULL
    layer_stride: int = field(default=1, repr=False)  # not in run ids: the job is the same
    interval: int = 5
    window: int = 5
    missing_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        layout = self.layout
        num_chunks = layout.pp * layout.vpp
        if self.num_layers < 1 or self.num_layers % num_chunks:
            raise ConfigError(
                f"{self.num_layers} layers cannot be split evenly over pp {layout.pp} × vpp "
                f"{layout.vpp} = {num_chunks} chunks; choose a multiple of {num_chunks}"
            )
        if self.iterations < 1 or self.ranks_per_host < 1:
            raise ConfigError(
                f"got {self.iterations} iterations and {self.ranks_per_host} ranks per host, "
                "expected 1 or more for both"
            )
        if self.device not in ("cuda", "cpu"):
            raise ConfigError(f"device is {self.device!r}, expected cuda or cpu")
        outside = [rank for rank in self.missing_ranks if not 0 <= rank < layout.world_size]
        outside += [stage for stage in self.imbalance.stage_ratio if not 0 <= stage < layout.pp]
        if outside:
            raise ConfigError(
                f"missing ranks or uneven stages outside the job: {outside}; it has "
                f"{layout.world_size} ranks and {layout.pp} stages"
            )
        self.trace_config()

    def trace_config(self) -> TraceConfig:
        """Return the tracer's settings for this job, which choose windows and layers."""
        return TraceConfig(
            enabled=True,
            interval=self.interval,
            window=self.window,
            granularity=self.granularity,
            layer_stride=self.layer_stride,
        )

    @property
    def recorded_ranks(self) -> tuple[int, ...]:
        """Return the ranks that write a file."""
        ranks = range(self.layout.world_size)
        return tuple(rank for rank in ranks if rank not in self.missing_ranks)

    @property
    def layers_per_chunk(self) -> int:
        """Return the number of transformer layers of one model chunk."""
        return self.num_layers // (self.layout.pp * self.layout.vpp)
