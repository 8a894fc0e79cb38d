"""Draw a job: its layout, its model, its data, and what of it is traced.

Sizes are drawn one after the other and then made smaller until writing and reading the job takes
seconds: traced iterations, microbatches and layers give way in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.grounds.quarry.machines import Machines, Rng, drawn_machines, happens, log_uniform
from megascan.topology import Layout

MOST_OPERATIONS = 42_000
"""What all ranks do in all traced iterations together."""
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe one job without anything that is random in it.

    `chunks[chunk][stage]` are the kinds of the layers there, a letter each: `d` dense, `e` with
    experts, `m` a state-space layer. Iterations are traced in windows of `window` out of each
    `interval`, `num_iterations` of them in all.
    """

    machines: Machines
    layout: Layout
    style: str  # megatron, ddp, fsdp
    chunks: tuple[tuple[str, ...], ...]
    hidden: int
    ffn_ratio: float
    kv_ratio: float
    vocabulary: int
    experts_per_token: int
    sequence: int
    tokens: int  # of a microbatch, over all context-parallel ranks
    kernels_ratio: float  # kernels of a layer, compared with a fused implementation
    num_microbatches: int
    num_iterations: int
    first_iteration: int
    interval: int
    window: int
    granularity: str
    has_sizes: bool
    has_tokens: bool
    lengths: str  # fixed, packed (attention varies), ragged (tokens vary)
    length_ratio: float  # how heavy the tail of lengths is
    sequence_parallel: bool
    overlap_grads: bool
    overlap_gather: bool
    distributed_optimizer: bool
    tied: bool
    recompute: bool
    syncs: bool  # the loss is read at the end of each iteration
    loads_everywhere: bool  # else tensor-parallel rank 0 loads and broadcasts
    load_ratio: float  # how long a worker makes a batch, of a microbatch's time
    num_workers: int
    collections: str  # off, frequent, planned
    checkpoint_every: int  # 0: never
    evaluates_every: int

    @property
    def num_ranks(self) -> int:
        """Return the world size."""
        return self.layout.world_size

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts, the last of which may be filled in part."""
        return -(-self.num_ranks // self.machines.gpus_per_host)

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return the numbers of the traced iterations."""
        turns, begin = range(self.num_iterations), self.first_iteration
        return tuple(
            begin + turn // self.window * self.interval + turn % self.window for turn in turns
        )

    @property
    def num_chunks(self) -> int:
        """Return how many model chunks a rank holds."""
        return len(self.chunks)

    def layers_before(self, chunk: int, stage: int) -> int:
        """Return how many layers of the model lie before those of a chunk."""
        whole = sum(len(each) for row in self.chunks[:chunk] for each in row)
        return whole + sum(len(each) for each in self.chunks[chunk][:stage])

    @property
    def has_experts(self) -> bool:
        """Tell whether any layer has experts."""
        return any("e" in each for row in self.chunks for each in row)

    @property
    def num_operations(self) -> int:
        """Return about how many operations all ranks do in all traced iterations."""
        layers = sum(len(each) for row in self.chunks for each in row) / self.layout.pp
        a_layer = 14.0 if self.layout.tp > 1 or self.has_experts else 7.0
        a_layer += 6 if self.style == "fsdp" else 0
        a_pass = 8 * self.num_chunks + a_layer * layers * (1.5 if self.recompute else 1)
        return int(a_pass * self.num_microbatches * self.num_iterations * self.num_ranks)


def drawn_job(rng: Rng, fits: Callable[[Job], bool] = lambda job: True) -> Job:
    """Draw jobs until one fits."""
    while True:
        job = _reduced(_draw(rng), rng)
        if job is not None and fits(job):
            return job


def _draw(rng: Rng) -> Job:
    style = str(rng.choice(["megatron", "ddp", "fsdp"], p=[0.78, 0.1, 0.12]))
    layout = _layout(rng) if style == "megatron" else Layout(dp=int(log_uniform(rng, 2, 33)))
    machines = drawn_machines(rng)
    gpus = machines.gpus_per_host
    if layout.tp > gpus or (gpus % layout.tp) or layout.world_size > MOST_RANKS:
        layout = Layout(dp=2 * layout.dp if layout.dp < MOST_RANKS // 2 else layout.dp)
    hidden = int(round(log_uniform(rng, 1024, 8192) / 256) * 256)
    sequence = int(2 ** rng.integers(10, 15))
    letters = _letters(rng, style, layout)
    interval, window = _windows(rng)
    packed = str(rng.choice(["fixed", "packed", "ragged"], p=[0.55, 0.3, 0.15]))
    return Job(
        machines=machines,
        layout=layout,
        style=style,
        chunks=letters,
        hidden=hidden,
        ffn_ratio=rng.uniform(2.5, 4.0),
        kv_ratio=float(rng.choice([1.0, 0.25, 0.125])),
        vocabulary=int(log_uniform(rng, 32_000, 260_000)),
        experts_per_token=int(rng.integers(1, 9)),
        sequence=sequence,
        tokens=max(sequence, int(2 ** rng.integers(11, 15))),
        kernels_ratio=log_uniform(rng, 0.6, 2.5),
        num_microbatches=_microbatches(rng, layout),
        num_iterations=int(log_uniform(rng, 3, 31)),
        first_iteration=1 if happens(rng, 0.35) else 1 + interval * int(log_uniform(rng, 2, 3000)),
        interval=interval,
        window=window,
        granularity="full" if happens(rng, 0.75) else "base",
        has_sizes=happens(rng, 0.85),
        has_tokens=happens(rng, 0.7),
        lengths=packed,
        length_ratio=rng.uniform(0.1, 0.9),
        sequence_parallel=happens(rng, 0.75),
        overlap_grads=happens(rng, 0.55),
        overlap_gather=happens(rng, 0.4),
        distributed_optimizer=happens(rng, 0.65),
        tied=happens(rng, 0.3),
        recompute=happens(rng, 0.2),
        syncs=happens(rng, 0.6),
        loads_everywhere=happens(rng, 0.5),
        load_ratio=log_uniform(rng, 0.02, 0.7),
        num_workers=int(rng.integers(1, 9)),
        collections=str(rng.choice(["off", "frequent", "planned"], p=[0.35, 0.5, 0.15])),
        checkpoint_every=int(rng.integers(3, 16)) if happens(rng, 0.15) else 0,
        evaluates_every=int(rng.integers(3, 16)) if happens(rng, 0.1) else 0,
    )


def _layout(rng: Rng) -> Layout:
    """Draw sizes of the axes of a Megatron job; one that uses a single axis is not rare."""
    while True:
        tp = int(rng.choice([1, 2, 4, 8], p=[0.4, 0.3, 0.2, 0.1]))
        pp = int(rng.choice([1, 2, 3, 4, 6, 8], p=[0.38, 0.22, 0.05, 0.22, 0.03, 0.1]))
        cp = int(rng.choice([1, 2, 4], p=[0.82, 0.13, 0.05]))
        dp = int(rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 32], p=_REPLICAS))
        world = tp * pp * cp * dp
        if not 2 <= world <= MOST_RANKS or (world in {tp, cp * tp} and happens(rng, 0.7)):
            continue
        shared = [size for size in (2, 4, 8) if (tp * cp * dp) % size == 0 and size <= 8]
        ep = int(rng.choice(shared)) if shared and happens(rng, 0.28) else 1
        vpp = int(rng.integers(2, 4)) if pp > 1 and happens(rng, 0.3) else 1
        return Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, vpp=vpp)


_REPLICAS = (0.14, 0.25, 0.05, 0.24, 0.04, 0.16, 0.02, 0.07, 0.03)


def _microbatches(rng: Rng, layout: Layout) -> int:
    if layout.pp == 1:
        return int(log_uniform(rng, 1, 9))
    if layout.vpp > 1:
        return layout.pp * int(rng.integers(2, 5))
    return max(2, int(layout.pp * rng.uniform(1.0, 4.0)))


def _windows(rng: Rng) -> tuple[int, int]:
    """Draw (interval, window): each iteration, the flags' defaults, or a few now and then."""
    if happens(rng, 0.5):
        return 5, 5
    window = int(rng.integers(2, 6))
    return max(window + 1, int(log_uniform(rng, 4, 200))), window


def _letters(rng: Rng, style: str, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Draw the layers of each chunk and stage, fewer in the first or last where the job says so."""
    if style != "megatron":
        return (("d" * int(log_uniform(rng, 3, 17)),),)
    size = int(log_uniform(rng, 2, 9)) if layout.vpp == 1 else int(rng.integers(1, 4))
    stages = layout.pp
    sizes = np.full((layout.vpp, stages), size)
    if stages > 1 and size > 1 and happens(rng, 0.3):
        sizes[-1, -1] -= 1
        sizes[0, 0] -= int(happens(rng, 0.5))
    if layout.ep > 1:
        letter = "e" if happens(rng, 0.7) else "ed"
    else:
        letter = "dmm" if layout.vpp == 1 and layout.cp == 1 and happens(rng, 0.08) else "d"
    return tuple(
        tuple("".join(letter[at % len(letter)] for at in range(count)) for count in row)
        for row in sizes.tolist()
    )


def _reduced(job: Job, rng: Rng) -> Job | None:
    """Return the job made small enough, or None if nothing is left to make smaller."""
    for _ in range(200):
        if job.num_operations <= MOST_OPERATIONS:
            return _balanced(job, rng)
        part = int(rng.choice(3, p=[0.2, 0.4, 0.4]))
        multiple = job.layout.pp if job.layout.vpp > 1 else 1
        if part == 0 and job.num_iterations > 3:
            job = replace(job, num_iterations=max(3, int(job.num_iterations * 0.8)))
        elif part == 1 and job.num_microbatches > max(multiple, job.layout.pp):
            job = replace(job, num_microbatches=job.num_microbatches - multiple)
        elif min(len(each) for row in job.chunks for each in row) > 1:
            shorter = tuple(tuple(each[:-1] for each in row) for row in job.chunks)
            job = replace(job, chunks=shorter)
    return None


def _balanced(job: Job, rng: Rng) -> Job:
    """Return a pipeline with a vocabulary of which the output layer is no longer than the layers
    before it on its stage, or not by much: whoever splits a model sees to that.
    """
    if job.layout.pp == 1:
        return job
    layer = (2 + 2 * job.kv_ratio + 3 * job.ffn_ratio) * job.hidden
    most = rng.uniform(0.2, 1.1) * layer * len(job.chunks[-1][-1])
    return replace(job, vocabulary=max(1024, int(min(job.vocabulary, most))))
