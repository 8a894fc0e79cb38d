"""The job to simulate: its shape, its noise, its clocks, and what is uneven by its own making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascan.config import TraceConfig
from megascan.errors import ConfigError, UsageError
from megascan.header import Json
from megascan.schema import Granularity
from megascan.simulate.costs import CostModel
from megascan.topology import Layout


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Random variation. Ratios are standard deviations of the logarithm."""

    compute_ratio: float = 0.02
    transfer_ratio: float = 0.05
    device_ratio: float = 0.0
    """Fixed per rank for the whole run: no two chips are alike."""
    end_jitter_ns: float = 2_000.0
    """Members see a communication end up to this much after its true end."""
    spike_probability: float = 0.0
    """Share of computations that take `spike_ns` longer (daemons, page faults)."""
    spike_ns: float = 2e6


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Errors of host clocks, uniform within ±: one offset and drift a host."""

    offset_ms: float = 0.0
    drift_ppm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """What makes a healthy job uneven. None of it is the fault of a node.

    stage_ratio: stage → how much longer its forward takes than the layers alone; the excess is
    additive and the same on every microbatch and replica (the output layer of the last stage, the
    embedding of the first, or dearer layers between).
    sequence_ratio: spread of the work in a microbatch, drawn anew for every iteration, replica
    and microbatch and the same at all stages (standard deviation of the logarithm).
    warmup_ratio: how much longer the first iteration computes, different for every rank; fades
    over the next two.
    """

    stage_ratio: Mapping[int, float] = field(default_factory=dict)
    sequence_ratio: float = 0.0
    warmup_ratio: float = 0.0
    checkpoint_interval: int = 0
    """Save a checkpoint every so many iterations; 0 never."""
    checkpoint_ns: float = 2e9
    gc_interval: int = 0
    """Every rank's collector pauses for `gc_ns`, in another iteration of each interval; 0 never."""
    gc_ns: float = 30e6

    def to_json(self) -> list[Json]:
        """As it stands in the ground truth; empty for an even job."""
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
    """(stage, ratio) from `last=1.4`, `first=1.2` or `3=1.1`. Raises UsageError otherwise."""
    name, _, value = text.partition("=")
    names = {"first": 0, "last": num_stages - 1} | {str(s): s for s in range(num_stages)}
    try:
        ratio = float(value)
    except ValueError:
        ratio = 0.0
    if name not in names or not 1.0 <= ratio < float("inf"):
        raise UsageError(
            f"stage imbalance {text!r}: expected first, last or a stage from 0 to "
            f"{num_stages - 1}, and a ratio of 1 or more, such as last=1.4"
        )
    return names[name], ratio


@dataclass(frozen=True, kw_only=True)
class JobModel:
    """A Megatron job. Raises ConfigError for sizes that do not fit together.

    `device` "cuda" gives spans a launch time and lets the host run ahead; "cpu" gives them CPU
    time. Spans are recorded for the iterations of windows as `--trace-interval` and
    `--continuous-trace-iterations` choose them; the default traces every iteration.
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
        """The tracer's window logic for this job."""
        return TraceConfig(
            enabled=True,
            interval=self.interval,
            window=self.window,
            granularity=self.granularity,
        )

    @property
    def layers_per_chunk(self) -> int:
        """Transformer layers of one model chunk."""
        return self.num_layers // (self.layout.pp * self.layout.vpp)
