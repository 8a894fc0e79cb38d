"""The training jobs of this ground: their ranks on the parallel axes, their layers, their kernels.

A layer is a list of kernels, and a kernel two times on a sound chip: of its arithmetic and of its
traffic to memory. The larger of both is what it takes (roofline), so that a slow clock leaves
kernels alone that wait for memory, and slow memory those that multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from megascan.topology import Coordinates, Layout

MS = 1e6  # all times are in ns
US = 1e3

Kernels = tuple[tuple[float, float], ...]
"""(arithmetic, memory) of each kernel in ns."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What one sort of GPU attains in practice, not on its data sheet."""

    name: str
    flops_per_ns: float
    bytes_per_ns: float
    nvlink_bytes_per_ns: float
    nic_bytes_per_ns: float
    pcie_bytes_per_ns: float
    clock_mhz: float


H100 = Chip(
    name="NVIDIA H100 80GB HBM3", flops_per_ns=4.6e5, bytes_per_ns=2600, nvlink_bytes_per_ns=330,
    nic_bytes_per_ns=44, pcie_bytes_per_ns=50, clock_mhz=1980,
)  # fmt: skip
A100 = Chip(
    name="NVIDIA A100-SXM4-80GB", flops_per_ns=1.9e5, bytes_per_ns=1600, nvlink_bytes_per_ns=210,
    nic_bytes_per_ns=22, pcie_bytes_per_ns=24, clock_mhz=1410,
)  # fmt: skip
CPU = Chip(
    name="x86_64", flops_per_ns=60, bytes_per_ns=8, nvlink_bytes_per_ns=1.2, nic_bytes_per_ns=1.0,
    pcie_bytes_per_ns=8, clock_mhz=0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)  # what is remembered of it asks for it often
class Job:
    """One training job as its flags would say it, and how it is traced."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    ranks_per_host: int = 8
    chip: Chip = H100
    layers: tuple[str, ...] = ("dense",) * 8  # dense, moe or mamba
    split: tuple[int, ...] = ()  # layers of each virtual stage, in order of the model
    num_microbatches: int = 4
    hidden: int = 4096
    sequence: int = 4096
    vocabulary: int = 64000
    sequence_parallel: bool = True
    recompute: bool = False
    distributed_optimizer: bool = True
    overlap: bool = True  # of gradient reduction and parameter gathering with compute
    offload: bool = False  # the optimizer's state lies in the host's memory
    rails: bool = True  # every GPU has a NIC of its own; else one for the host
    oversubscription: float = 1.0  # of the core between the two halves of the hosts
    granularity: str = "full"
    interval: int = 1
    window: int = 1
    num_traced: int = 8
    first_traced: int = 1
    chip_spread: float = 0.01  # by how much a job's chips differ at most
    noise: float = 0.015
    clock_wander: float = 0.004
    launch_us: float = 6.0  # host time a kernel
    host_jitter: float = 0.1
    loader_ms: float = 20.0  # what a worker needs for a microbatch; two are ahead
    length_spread: float = 0.0  # of microbatches' lengths, as sigma of their logarithm
    packed: bool = False  # lengths are inside packed sequences: only attention notices
    skew: float = 0.05  # of the experts' load
    warm_up: float = 4.0  # how many times longer the run's first iteration takes
    eval_every: int = 0
    save_every: int = 0
    log_every: int = 0
    counters: bool = True  # the tracer could read the chip's clock and power
    missing: tuple[int, ...] = ()

    @property
    def on_gpus(self) -> bool:
        """Tell whether devices have a queue of their own."""
        return self.chip is not CPU

    @cached_property
    def layout(self) -> Layout:
        """Return the layout as a trainer states it."""
        return Layout(
            tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, vpp=self.vpp, ep=self.ep
        )  # fmt: skip

    @property
    def num_ranks(self) -> int:
        """Return the size of the world."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return -(-self.num_ranks // self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.ranks_per_host

    @cached_property
    def places(self) -> tuple[Coordinates, ...]:
        """Return every rank's place on the axes."""
        return tuple(map(self.layout.coordinates, range(self.num_ranks)))

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers (from 1) of each virtual stage, in order of the model."""
        count = self.pp * self.vpp
        sizes = self.split or tuple(
            len(self.layers) // count + (each < len(self.layers) % count) for each in range(count)
        )
        ends = [sum(sizes[: each + 1]) for each in range(count)]
        return tuple(
            tuple(range(end - size + 1, end + 1)) for end, size in zip(ends, sizes, strict=True)
        )

    @cached_property
    def iterations(self) -> tuple[int, ...]:
        """Return the numbers of the traced iterations."""
        found: list[int] = []
        number = self.first_traced
        while len(found) < self.num_traced:
            if (number - 1) % self.interval < self.window:
                found.append(number)
            number += 1
        return tuple(found)

    def members(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks of one of a rank's groups, in order."""
        return _members(self, rank, axis)

    def group(self, rank: int, axis: str) -> str:
        """Return the id of one of a rank's groups."""
        return f"{axis}@{min(self.members(rank, axis))}"

    def is_remote(self, ranks: tuple[int, ...]) -> bool:
        """Tell whether ranks sit on several hosts."""
        first = ranks[0] // self.ranks_per_host
        return any(rank // self.ranks_per_host != first for rank in ranks)


AXES = (
    "tp", "pp", "dp", "dp_cp", "cp", "ep", "expt_dp", "expt_tp", "tp_ep", "tp_ep_pp", "mp", "embd",
    "tp_dp", "tp_dp_cp", "tp_cp", "intra_dist_opt", "world",
)  # fmt: skip
"""Groups that Megatron-Core makes, in the order in which a header lists them."""

_FIXED = {  # the axes on which members of a group differ
    "tp": ("tp",), "pp": ("pp",), "dp": ("dp",), "dp_cp": ("dp", "cp"), "cp": ("cp",),
    "mp": ("tp", "pp"), "tp_dp": ("tp", "dp"), "tp_dp_cp": ("tp", "dp", "cp"),
    "tp_cp": ("tp", "cp"), "intra_dist_opt": ("tp", "dp", "cp", "pp"),
    "world": ("tp", "dp", "cp", "pp"),
}  # fmt: skip


@lru_cache(maxsize=1 << 14)
def _members(job: Job, rank: int, axis: str) -> tuple[int, ...]:
    own = job.places[rank]
    if axis in ("ep", "tp_ep", "expt_dp", "expt_tp", "tp_ep_pp"):
        return _expert_members(job, rank, axis)
    if axis == "embd":
        ends = {0, job.pp - 1}
        return tuple(
            each for each in job.members(rank, "pp") if job.places[each].pp in ends or each == rank
        )
    free = _FIXED[axis]
    kept = [name for name in ("tp", "cp", "dp", "pp") if name not in free]
    return tuple(
        each
        for each, place in enumerate(job.places)
        if all(getattr(place, name) == getattr(own, name) for name in kept)
    )


def _expert_members(job: Job, rank: int, axis: str) -> tuple[int, ...]:
    """Experts split a stage's ranks once more, next to each other, each expert whole."""
    per_stage = job.num_ranks // job.pp
    stage, local = divmod(rank, per_stage)
    if axis == "expt_tp":
        return (rank,)
    if axis == "expt_dp":
        return tuple(stage * per_stage + each for each in range(local % job.ep, per_stage, job.ep))
    first = local - local % job.ep
    within = range(first, first + job.ep)
    stages = range(job.pp) if axis == "tp_ep_pp" else (stage,)
    return tuple(one * per_stage + each for one in stages for each in within)


@lru_cache(maxsize=1 << 13)
def kernels_of(job: Job, part: str, length: float) -> Kernels:
    """Return the kernels of a part's forward pass over one microbatch `length` times as long.

    Attention grows with the square of a length, everything else with the length.
    """
    chip, hidden, tokens = job.chip, job.hidden, job.sequence / job.cp
    shard = job.tp
    stretched = tokens if job.packed else tokens * length
    pairs = tokens * job.sequence * length**2 / 2
    local = stretched / (job.tp if job.sequence_parallel else 1)

    def product(flops: float, moved: float) -> tuple[float, float]:
        return flops / chip.flops_per_ns, moved / chip.bytes_per_ns

    square, norm = hidden**2, product(0, 6.0 * local * hidden)
    routed = 2 * tokens * length  # two experts a token, half as wide; `length` is their load
    parts = {
        "attention": (
            norm,
            product(6 * stretched * square / shard, 6.0 * square / shard),
            product(6.8 * pairs * hidden / shard, 8.0 * stretched * hidden / shard),
            product(2 * stretched * square / shard, 2.0 * square / shard),
            product(0, 6.0 * local * hidden),
        ),
        "mamba": (
            norm,
            product(8 * stretched * square / shard, 8.0 * square / shard),
            product(0, 40.0 * stretched * hidden / shard),
            product(4 * stretched * square / shard, 4.0 * square / shard),
        ),
        "mlp": (
            norm,
            product(8 * stretched * square / shard, 8.0 * square / shard),
            product(0, 16.0 * stretched * hidden / shard),
            product(8 * stretched * square / shard, 8.0 * square / shard),
            product(0, 6.0 * local * hidden),
        ),
        "experts": (
            product(4 * routed * square, 8.0 * square),
            product(0, 8.0 * routed * hidden),
            product(4 * routed * square, 8.0 * square),
        ),
        "router": (norm, product(32 * tokens * hidden, 12.0 * tokens * hidden)),
        "embedding": (product(0, 8.0 * stretched * hidden),),
        "output_layer": (
            norm,
            product(2 * stretched * hidden * job.vocabulary / shard, 2.0 * stretched * hidden),
        ),
        "loss": (product(0, 8.0 * stretched * job.vocabulary / shard),),
    }
    return parts[part]


@lru_cache(maxsize=1 << 13)
def backward_of(kernels: Kernels) -> Kernels:
    """Return the kernels of a backward pass: two products for one."""
    return tuple((2 * arithmetic, 2 * memory) for arithmetic, memory in kernels)


def taken(kernels: Kernels, clock: float, memory: float) -> float:
    """Return the time of kernels on a chip so many times slower than a sound one."""
    total = 0.0
    for arithmetic, moved in kernels:
        multiplying, reading = arithmetic * clock, moved * memory
        total += multiplying if multiplying > reading else reading
    return total


def layer_parameters(job: Job, kind: str) -> tuple[float, float]:
    """Return how many parameters of a layer a rank has: shared by all replicas, and experts'."""
    square = job.hidden**2
    if kind == "moe":
        return 4 * square / job.tp, 8.0 * square
    return 12 * square / job.tp, 0.0


def stage_parameters(job: Job, stage: int) -> tuple[float, float]:
    """Return the parameters of a pipeline stage on one rank: of the model, of experts."""
    dense = experts = 0.0
    for chunk in range(stage, job.pp * job.vpp, job.pp):
        for layer in job.chunks[chunk]:
            one, other = layer_parameters(job, job.layers[layer - 1])
            dense, experts = dense + one, experts + other
    if stage in (0, job.pp - 1):
        dense += job.vocabulary * job.hidden / job.tp
    return dense, experts


def order_of_work(job: Job, stage: int) -> tuple[list[tuple[str, int, int]], int]:
    """Return what a stage does in order, (pass, microbatch, chunk), and how much is warm-up."""
    count, depth = job.num_microbatches, job.pp
    if job.vpp == 1:
        ahead = min(depth - stage - 1, count)
        forward = [("forward", each, 0) for each in range(count)]
        backward = [("backward", each, 0) for each in range(count)]
    else:
        rounds = [
            (each, chunk)
            for first in range(0, count, depth)
            for chunk in range(job.vpp)
            for each in range(first, min(first + depth, count))
        ]
        ahead = min((depth - stage - 1) * 2 + (job.vpp - 1) * depth, len(rounds))
        forward = [("forward", *each) for each in rounds]
        backward = [("backward", each, job.vpp - 1 - chunk) for each, chunk in rounds]
    steady = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return [*forward[:ahead], *steady, *backward[len(forward) - ahead :]], ahead
