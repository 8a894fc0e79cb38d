"""Draw what a sound job is: its layout, model, machines, habits, noise, and what is traced of it.

Nothing is listed: sizes and rates come from wide distributions, most of them log-uniform, and a job
that would be too dear to simulate or to write is drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from numpy.random import Generator

from megascan.topology import Layout

MOST_TURNS = 11_000
"""Operations of one rank of each stage, over all traced iterations: what a simulation costs."""
MOST_SPANS = 50_000
"""Spans of all ranks: what writing costs."""
_LEAST_COMPUTING, _LEAST_ITERATIONS = 0.45, 6
_EXCEPTIONS = 0.1
"""So many jobs in one may communicate more, or be traced more briefly."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe a job; `slow_…` and the like are how sound jobs differ, never faults."""

    layout: Layout
    style: str  # megatron, ddp (gradients reduced behind passes), fsdp (ZeRO-3)
    seed: int
    # machines
    gpus_per_host: int
    num_nics: int  # of a host
    product_flops: float
    memory_bytes_s: float
    nvlink_bytes_s: float
    nic_bytes_s: float
    launch_s: float  # of one kernel, by the host
    queue: int  # operations that a host launches ahead at most
    # model
    chunks: tuple[tuple[str, ...], ...]  # (stage · vpp + chunk): letters of layers, d e m
    hidden: int
    sequence: int
    tokens: int  # of a microbatch
    vocabulary: int
    experts_per_token: int
    num_microbatches: int
    growth: int = 0  # microbatches more in each later window
    sequence_parallel: bool
    ulysses: bool
    distributed_optimizer: bool
    overlap_grads: bool
    recompute: bool
    tied: bool
    # data
    lengths: str = "even"  # even, uneven, packed, long (one replica has more)
    length_spread: float = 0.0
    expert_spread: float = 0.1
    long_replica: int = 0
    hot_place: int = 0  # among expert-parallel ranks
    hot_expert: float = 0.0  # how many more tokens one of the expert-parallel ranks gets
    hot_moves: bool = False
    stage_extra: tuple[float, ...] = ()  # how many times longer layers of each stage take
    # noise
    kernel_noise: float
    chip_spread: float  # by which chips differ at most, at the same clock
    host_noise: float
    stalls_s: float  # mean length of what preempts a launching thread
    stall_share: float  # of operations at which that happens
    link_noise: float
    tenants: float = 0.0  # share of transfers between hosts that others disturb
    congestion: float = 1.0  # how many times longer all transfers between hosts take
    batch_share: float = 0.3  # of a pass, that the workers of a loader need for one batch
    storage_hiccups: float = 0.0  # share of batches that come late, by `hiccup` passes
    hiccup: float = 6.0
    loads_everywhere: bool
    collects_every: float = 0.0  # operations between full collections of garbage
    collection_s: float = 0.0
    logger: int = -1  # a rank that logs after each iteration, for `log_s`
    log_s: float = 0.0
    saves_every: int = 0
    save_s: float = 0.0
    saves_alone: bool = False  # rank 0 only
    evaluates_every: int = 0
    warm_up: float = 1.0  # how much longer a run's first iterations take
    unlike_hosts: float = 0.0  # how differently noisy launching threads are
    # clocks
    offset_s: float
    drift_ppm: float
    wander_s: float
    # what is traced
    granularity: str
    first_iteration: int
    window: int
    interval: int
    num_windows: int
    layer_stride: int
    has_counters: bool
    has_tokens: bool
    has_kinds: bool
    has_sizes: bool
    lost: str = ""  # "", missing, truncated
    compress: bool

    @property
    def num_ranks(self) -> int:
        """Return how many ranks it has."""
        return self.layout.world_size

    @property
    def num_hosts(self) -> int:
        """Return how many hosts it runs on."""
        return -(-self.num_ranks // self.gpus_per_host)

    @property
    def is_megatron(self) -> bool:
        """Return whether it is a Megatron-Core trainer."""
        return self.style == "megatron"

    @property
    def has_experts(self) -> bool:
        """Return whether any layer has experts."""
        return any("e" in chunk for chunk in self.chunks)

    @property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """Return the traced iterations of each window."""
        return tuple(
            tuple(range(begin, begin + self.window))
            for begin in range(
                self.first_iteration,
                self.first_iteration + self.num_windows * self.interval,
                self.interval,
            )
        )

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return all traced iterations."""
        return tuple(number for window in self.windows for number in window)

    def microbatches(self, window: int) -> int:
        """Return how many microbatches an iteration of a window has."""
        return self.num_microbatches + window * self.growth

    def host_of(self, rank: int) -> int:
        """Return the number of the host of a rank."""
        return rank // self.gpus_per_host

    def ranks_of_host(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return tuple(r for r in range(self.num_ranks) if self.host_of(r) == host)

    def nic_of(self, rank: int) -> tuple[int, int]:
        """Return host and number of the NIC through which a rank leaves its host."""
        host, device = divmod(rank, self.gpus_per_host)
        return host, device * self.num_nics // self.gpus_per_host

    def _layer_s(self) -> float:
        """Return about how long the forward of a layer takes."""
        act = 2.0 * self.tokens / self.layout.cp * self.hidden
        flops = act / 2 * (32 * self.hidden + 2 * self.sequence) / self.layout.tp
        return flops / self.product_flops + 20 * act / self.memory_bytes_s

    def launch_share(self) -> float:
        """Return about how long launching takes compared with computing."""
        kernels = 23.0 + 8 * (self.layout.tp > 1) + 16 * self.has_experts
        return kernels * self.launch_s / self._layer_s()

    def nominal_s(self) -> float:
        """Return about how long an iteration takes."""
        layout, num = self.layout, self.num_microbatches
        layers = sum(map(len, self.chunks)) / layout.pp
        passes_s = 3 * layers * self._layer_s() * (num + (layout.pp - 1) / layout.vpp)
        return passes_s * max(1.0, self.launch_share()) / self.computing_share()

    def computing_share(self) -> float:
        """Return about which share of an iteration ranks compute, bubbles left out."""
        layout, num = self.layout, self.num_microbatches
        layers = sum(map(len, self.chunks)) / layout.pp
        act = 2.0 * self.tokens / layout.cp * self.hidden
        square = self.hidden**2 / layout.tp
        layer_s = self._layer_s()
        far_s = self.gpus_per_host / self.num_nics / self.nic_bytes_s
        near_s = 1 / self.nvlink_bytes_s

        def byte_s(size: int) -> float:
            return (far_s if size > self.gpus_per_host else near_s) if size > 1 else 0.0

        routed = act * self.experts_per_token * byte_s(layout.tp * layout.ep) * (layout.ep > 1)
        inside_s = 4 * act * byte_s(layout.tp) + 2 * act * byte_s(layout.tp * layout.cp) * (
            layout.cp > 1
        )
        sent = 12 * square * (3 if self.has_experts else 1) * layers
        sent += self.vocabulary * self.hidden / layout.tp * self.is_megatron
        sync_s = 6 * sent * byte_s(layout.tp * layout.cp * layout.dp) * (layout.dp * layout.cp > 1)
        sync_s *= 1 - 0.7 * (self.style != "megatron" or self.overlap_grads)
        sync_s *= num if self.style == "fsdp" else 1
        compute_s = 3 * num * layers * layer_s
        return compute_s / (compute_s + sync_s + 3 * num * layers * (inside_s + routed))

    def num_turns(self) -> int:
        """Return about how many operations an iteration has, of one rank of each stage."""
        layout, layers = self.layout, sum(map(len, self.chunks))
        each = 3.0 + (2 * (2 if self.sequence_parallel else 1) if layout.tp > 1 else 0)
        each += 3.0 * ("e" in "".join(map("".join, self.chunks))) + (layout.cp > 1)
        each *= 2 + self.recompute
        most = self.microbatches(self.num_windows - 1)
        return int(most * (layers * each + layout.pp * layout.vpp * 10) + 12 * layout.pp)

    def num_spans(self) -> int:
        """Return about how many spans are written."""
        per_stage = self.num_turns() / self.layout.pp
        share = 0.3 if self.granularity == "base" else 1.0 / min(self.layer_stride, 2)
        return int(per_stage * share * self.num_ranks * len(self.iterations))


def draw(
    rng: Generator,
    seed: int,
    wants: Callable[[Job], bool],
    altered: Callable[[Job, Generator], Job],
) -> tuple[Job, Job]:
    """Return the first job drawn that is cheap enough, is as `wants` says, and what is altered."""
    for _ in range(8000):
        plain = _sized(rng, _drawn(rng, seed))
        nominal_s = plain.nominal_s()
        plain = replace(
            plain,
            collection_s=min(plain.collection_s, 0.1 * nominal_s),
            log_s=min(plain.log_s, 0.03 * nominal_s),
        )
        if not wants(plain):
            continue
        job = altered(plain, rng)
        is_usual = rng.random() >= _EXCEPTIONS
        if (
            job.num_turns() * len(job.iterations) < MOST_TURNS
            and job.num_spans() < MOST_SPANS
            and job.computing_share() > (_LEAST_COMPUTING if is_usual else 0.2)
            and len(job.iterations) >= (_LEAST_ITERATIONS if is_usual else 2)
        ):
            return plain, job
    raise ValueError("no job is as wanted; want less")


def log_uniform(rng: Generator, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _is_so(rng: Generator, share: float) -> bool:
    return bool(rng.random() < share)


def _layout(rng: Generator, style: str, num_ranks: int, gpus: int) -> Layout:
    if style != "megatron":
        return Layout(dp=num_ranks)
    tp = cp = pp = num_ranks
    while num_ranks % (tp * cp * pp):
        tp = min(int(rng.choice((1, 1, 2, 2, 4, 8))), gpus)
        cp, pp = int(rng.choice((1, 1, 1, 1, 2, 4))), int(rng.choice((1, 2, 2, 3, 4, 4, 8)))
    dp = num_ranks // (tp * cp * pp)
    ep = int(rng.choice((1, 1, 2, 4, 8)))  # 8 experts of a layer or more
    order = "tp-cp-ep-dp-pp" if rng.random() < 0.75 else "tp-cp-ep-pp-dp"
    if ep > 1 and dp * cp % ep == 0:
        return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=tp, order=order)
    vpp = 2 if pp > 1 and rng.random() < 0.25 else 1
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, vpp=vpp, order=order)


def _most_words(rng: Generator, chunks: Sequence[tuple[str, ...]], hidden: int) -> float:
    """Return of how many words the output layer is as dear as it is in deeper models."""
    return 16.0 * hidden * max(1, len(chunks[-1])) * log_uniform(rng, 0.04, 0.4)


def _drawn(rng: Generator, seed: int) -> Job:
    gpus = int(rng.choice((1, 2, 4, 8, 8)))
    num_ranks = int(rng.choice((2, 4, 6, 8, 8, 12, 16, 16, 24, 32, 32, 48, 64)))
    style = str(rng.choice(("megatron",) * 8 + ("ddp", "fsdp")))
    layout = _layout(rng, style, num_ranks, gpus)
    hidden = 512 * int(log_uniform(rng, 2, 17))
    sequence = int(rng.choice((1024, 2048, 4096, 8192, 16384))) * layout.cp
    letter = "e" if layout.ep > 1 or (style == "megatron" and rng.random() < 0.05) else "d"
    num_layers = int(log_uniform(rng, 1, 7))
    chunks = [(letter,) * num_layers] * (layout.pp * layout.vpp)
    if num_layers > 1 and layout.pp > 1 and rng.random() < 0.3:  # room for the output layer
        chunks[-1] = chunks[-1][1:]
    microbatches = int(log_uniform(rng, 1, 17)) if style == "megatron" else int(rng.integers(1, 5))
    if layout.pp > 1:
        microbatches = max(microbatches, layout.pp * int(rng.choice((1, 2, 4))))
    if layout.vpp > 1:
        microbatches = layout.pp * max(1, microbatches // layout.pp)
    fast, slow_storage = rng.random() < 0.5, float(rng.choice((0.0, 0.0, 0.0005, 0.003)))
    ratio, is_so = partial(log_uniform, rng), partial(_is_so, rng)
    # fmt: off
    return Job(
        layout=layout, style=style, seed=seed, chunks=tuple(chunks), hidden=hidden,
        gpus_per_host=gpus, num_nics=max(1, gpus // int(rng.choice((1, 1, 2, 4, 8)))),
        product_flops=ratio(1.2e14, 6e14), memory_bytes_s=ratio(1.2e12, 3.6e12),
        nvlink_bytes_s=ratio(1e11, 3.6e11) if fast else ratio(1.2e10, 4e10),
        nic_bytes_s=ratio(2e10, 4.8e10) if fast else ratio(5e9, 2.4e10),
        launch_s=ratio(2e-6, 1.2e-5), queue=int(ratio(25, 120)),
        sequence=sequence, tokens=sequence * int(rng.choice((1, 1, 2, 4))),
        vocabulary=int(min(ratio(32_000, 256_000), _most_words(rng, chunks, hidden))),
        experts_per_token=int(rng.choice((1, 2, 4))), num_microbatches=microbatches,
        sequence_parallel=layout.tp > 1 and is_so(0.6), ulysses=is_so(0.5),
        distributed_optimizer=is_so(0.6), overlap_grads=is_so(0.4), recompute=is_so(0.2),
        tied=layout.pp > 1 and is_so(0.4),
        lengths=str(rng.choice(("even", "even", "even", "packed"))),
        length_spread=ratio(0.01, 0.08), expert_spread=ratio(0.02, 0.15),
        kernel_noise=ratio(0.003, 0.03),
        chip_spread=float(rng.choice((0.0, 0.003, 0.01, 0.02, 0.05))) * rng.uniform(0.6, 1.0),
        host_noise=ratio(0.03, 0.3), stalls_s=ratio(2e-4, 6e-3), stall_share=ratio(1e-5, 3e-3),
        link_noise=ratio(0.01, 0.2), tenants=float(rng.choice((0.0, 0.0, 0.002, 0.02))),
        batch_share=ratio(0.02, 0.7), storage_hiccups=slow_storage, loads_everywhere=is_so(0.15),
        collects_every=float(rng.choice((0.0, 0.0, 300.0, 2000.0))) * rng.uniform(0.7, 1.5),
        collection_s=ratio(0.003, 0.08), warm_up=ratio(1.0, 4.0),
        logger=int(rng.choice((-1, -1, 0, num_ranks - 1))), log_s=ratio(2e-4, 5e-3),
        saves_every=int(rng.choice((0, 0, 0, 5, 10, 20))), save_s=ratio(0.1, 3.0),
        evaluates_every=int(rng.choice((0, 0, 0, 10, 25))),
        offset_s=ratio(1e-6, 2e-2), drift_ppm=ratio(0.05, 30.0), wander_s=ratio(2e-7, 2e-5),
        granularity=str(rng.choice(("base", "full", "full"))), window=2, interval=2, num_windows=1,
        first_iteration=int(rng.choice((1, 1, 1, 101, 1001, 20_001))),
        layer_stride=int(rng.choice((1, 1, 2, 4))), has_counters=is_so(0.55),
        has_tokens=is_so(0.6), has_kinds=is_so(0.6), has_sizes=is_so(0.85), compress=is_so(0.15),
        lost=str(rng.choice(("",) * 7 + ("missing", "truncated"))),
    )
    # fmt: on


def _sized(rng: Generator, job: Job) -> Job:
    """Return the job with as many iterations as it can pay for, in windows from 2 to 40."""
    affordable = min(
        MOST_TURNS / job.num_turns(), MOST_SPANS / max(job.num_spans() / job.window, 1.0)
    )
    least = 3 if affordable < 6 else 6
    total = int(min(log_uniform(rng, least, 60), affordable * 0.95))
    window = max(2, min(int(log_uniform(rng, 2, 41)), 40, total))
    interval = window if rng.random() < 0.2 else window + int(log_uniform(rng, 1, 60))
    return replace(job, window=window, interval=interval, num_windows=max(1, total // window))
