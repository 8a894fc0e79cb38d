"""Declare a job of the archive: its layout, model, site, tracer, habits and what was planted.

Global ranks follow Megatron's order, rank = tp + TP·(dp + DP·pp), and fill hosts in that order. So
an array (rank, …) is an array (pp, dp, tp, …) in other words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from benchmarks.grounds.ground import Planted


@dataclass(frozen=True, kw_only=True)
class Chip:
    """State what products, memory and links reach in practice, large sizes, no neighbours."""

    name: str
    tflops: float  # of bf16 or fp16 products
    hbm_gbps: float
    tp_gbps: float  # bus bandwidth of an all-reduce inside a host
    pair_gbps: float  # one message inside a host


CHIPS = (
    Chip(name="V100", tflops=88, hbm_gbps=780, tp_gbps=125, pair_gbps=45),
    Chip(name="A100", tflops=238, hbm_gbps=1450, tp_gbps=225, pair_gbps=190),
    Chip(name="H800", tflops=610, hbm_gbps=2750, tp_gbps=155, pair_gbps=140),
    Chip(name="L40S", tflops=205, hbm_gbps=740, tp_gbps=19, pair_gbps=20),
)
"""What vendors' and users' own GEMM, STREAM and nccl-tests runs reach, not what data sheets say."""


@dataclass(frozen=True)
class Layout:
    """State the parallel sizes, and how many GPUs a host has."""

    tp: int
    pp: int
    dp: int
    gpus_per_host: int

    @property
    def num_ranks(self) -> int:
        """Return the world size."""
        return self.tp * self.pp * self.dp

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts; the last one may be part of the job only."""
        return -(-self.num_ranks // self.gpus_per_host)

    @property
    def name(self) -> str:
        """Return it in a word."""
        return f"tp{self.tp}pp{self.pp}dp{self.dp}h{self.num_hosts}"


@dataclass(frozen=True, kw_only=True)
class Shape(Layout):
    """State a layout, and how many layers each stage has."""

    layers: tuple[int, ...]

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """Return a global rank."""
        return tp + self.tp * (dp + self.dp * pp)

    def host_ranks(self, host: int) -> tuple[int, ...]:
        """Return the ranks on one host."""
        first = host * self.gpus_per_host
        return tuple(range(first, min(first + self.gpus_per_host, self.num_ranks)))

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        """Return the ranks of one stage."""
        return tuple(range(self.rank(pp, 0, 0), self.rank(pp, 0, 0) + self.tp * self.dp))

    def replica_ranks(self, dp: int) -> tuple[int, ...]:
        """Return the ranks of one replica, all stages."""
        return tuple(self.rank(p, dp, t) for p in range(self.pp) for t in range(self.tp))

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the tensor-parallel group of a rank."""
        first = rank - rank % self.tp
        return tuple(range(first, first + self.tp))


@dataclass(frozen=True, kw_only=True)
class Model:
    """State the sizes of a dense GPT model and of its batch."""

    hidden: int
    sequence: int
    samples: int  # of a microbatch
    vocabulary: int
    num_microbatches: int

    @property
    def tokens(self) -> int:
        """Return the tokens of one microbatch."""
        return self.sequence * self.samples


@dataclass(frozen=True, kw_only=True)
class Site:
    """State how equal and how quiet a cluster is. All `_cv` are standard deviations by means."""

    chip: Chip
    chip_spread: float  # chips differ by up to so much either way; two standard deviations
    wander: float  # of one chip's clock from iteration to iteration
    operation_cv: float  # of each operation on each rank
    rank_cv: float  # common to all operations of a rank in one iteration
    host_cv: float  # common to all ranks of a host in one iteration
    launch_us: float  # the host's time to launch one kernel
    launch_cv: float
    load_us: float  # to fetch a microbatch's batch and copy it
    nic_gbps: float  # GB/s of one host, all its NICs together
    nics_per_host: int
    transfer_cv: float
    hiccup_chance: float  # that a host does something else during a pass, for some ms
    congestion: float = 1.0  # the network is so many times slower, for everybody
    slow_alike: float = 1.0  # all chips are so many times slower from the middle of the run on


class Tracer(StrEnum):
    """Which version of the original wrote the files."""

    JUNE = "june"  # every step, layers with their numbers
    JULY = "july"  # windows of one step, which is written twice
    HEAD = "head"  # as JULY, without the events of the pipeline's schedule


@dataclass(frozen=True, kw_only=True)
class Habits:
    """State how the job was run and traced."""

    tracer: Tracer
    has_layers: bool = True  # False: scopes of decoder, layers and modules were muted
    interval: int = 5  # of windows, in steps
    overlaps_gradients: bool = False
    warms_up: float = 1.0  # the first iterations' hosts are so many times slower
    heats_up: float = 0.0  # clocks of all chips fall by this share during the run
    checkpoint_every: int = 0
    lost_ranks: tuple[int, ...] = ()  # ranks whose files are lost


class Kind(StrEnum):
    """What can be planted; see `CAUSES` for what it counts as."""

    GPU_CLOCK = "gpu_clock"
    THROTTLING = "throttling"
    HBM = "hbm"
    SLOW_HOST = "slow_host"
    NVLINK = "nvlink"
    NIC = "nic"
    RAIL = "rail"
    HOST_CPU = "host_cpu"
    HOST_MEMORY = "host_memory"
    LOADER = "loader"
    GC = "gc"
    LONG_SEQUENCES = "long_sequences"
    UNEVEN_SEQUENCES = "uneven_sequences"
    HEAVY_STAGE = "heavy_stage"
    HEAVY_OUTPUT = "heavy_output"
    UNEVEN_LAYERS = "uneven_layers"


CAUSES = {
    Kind.GPU_CLOCK: ("compute", "node"),
    Kind.THROTTLING: ("compute", "node"),
    Kind.HBM: ("compute", "node"),
    Kind.SLOW_HOST: ("compute", "node"),
    Kind.NVLINK: ("link", "node"),
    Kind.NIC: ("link", "node"),
    Kind.RAIL: ("link", "node"),
    Kind.HOST_CPU: ("host", "node"),
    Kind.HOST_MEMORY: ("host", "node"),
    Kind.LOADER: ("loader", "node"),
    Kind.GC: ("gc", "job"),
    Kind.LONG_SEQUENCES: ("sequence_imbalance", "job"),
    Kind.UNEVEN_SEQUENCES: ("sequence_imbalance", "job"),
    Kind.HEAVY_STAGE: ("stage_imbalance", "job"),
    Kind.HEAVY_OUTPUT: ("stage_imbalance", "job"),
    Kind.UNEVEN_LAYERS: ("stage_imbalance", "job"),
}
"""Cause and owner of each kind, as `Planted` has them."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """State one planted cause: whom it hits, how hard, and in which iterations.

    `ranks` are slowed, `named` are all whom one may name. `share` below 1 means bursts.
    """

    kind: Kind
    factor: float
    ranks: tuple[int, ...]
    named: tuple[int, ...] = ()
    host: str = ""
    first: int = 1
    last: int = 0
    share: float = 1.0

    def planted(self) -> Planted:
        """Return what is to be found, without its price."""
        cause, owner = CAUSES[self.kind]
        return Planted(
            kind=str(self.kind),
            cause=cause,
            owner=owner,
            ranks=tuple(sorted(self.named or self.ranks)),
            host=self.host,
            factor=1.0 if self.kind is Kind.GC else self.factor,  # pauses: nothing is slower
            first_iteration=self.first,
            last_iteration=self.last,
            share_of_time=self.share,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe one traced job, everything but its draws."""

    seed: int
    shape: Shape
    model: Model
    site: Site
    habits: Habits
    num_iterations: int
    effects: tuple[Effect, ...] = ()
