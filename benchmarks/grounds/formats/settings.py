"""Draw what a job trains on what: layout, model, cluster and habits, as a case asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.formats.hardware import CHIPS, Cluster
from benchmarks.grounds.formats.job import Job, Shape

CHIP_SPREADS = (0.2, 0.2, 0.2, 0.15, 0.15, 0.06, 0.04)
LAUNCHES_A_CASE = 18_000
KERNELS_A_LAYER, KERNELS_AGAIN, KERNELS_OF_ENDS = 20, 8, 14
HOST_BOUND_SHARE = 0.12  # of jobs whose case does not ask for it
NATURAL_END = (0.04, 0.2)  # work of the output layer as a share of a stage's layers

SHAPES = {
    "pair": (Shape(dp=2), Shape(tp=2), Shape(pp=2)),
    "small": (
        Shape(dp=4), Shape(dp=8), Shape(tp=2, dp=2), Shape(tp=2, dp=4), Shape(tp=4, dp=2),
        Shape(tp=2, dp=2, pp=2), Shape(dp=4, pp=2), Shape(dp=2, pp=4), Shape(dp=16),
        Shape(dp=2, pp=2, vpp=2), Shape(dp=3, pp=2), Shape(tp=2, dp=3),
    ),
    "medium": (
        Shape(dp=16), Shape(tp=2, dp=8), Shape(tp=4, dp=4), Shape(tp=2, dp=4, pp=2),
        Shape(tp=4, dp=2, pp=2), Shape(tp=2, dp=2, pp=4), Shape(dp=4, pp=4), Shape(tp=8, dp=2),
        Shape(dp=4, pp=4, vpp=2), Shape(tp=2, dp=4, pp=2, vpp=2), Shape(dp=8, pp=2),
    ),
    "lean": (
        Shape(dp=16), Shape(tp=2, dp=8), Shape(tp=2, dp=4, pp=2), Shape(dp=8, pp=2),
        Shape(dp=4, pp=4), Shape(dp=4, pp=4, vpp=2),
    ),
    "large": (
        Shape(tp=4, dp=4, pp=2), Shape(tp=4, dp=8), Shape(dp=32), Shape(tp=8, dp=2, pp=2),
        Shape(tp=2, dp=4, pp=4), Shape(tp=4, dp=8, pp=2), Shape(tp=8, dp=4, pp=2),
    ),
    "tensor": (
        Shape(tp=2, dp=4), Shape(tp=4, dp=2), Shape(tp=4, dp=4), Shape(tp=2, dp=2, pp=2),
        Shape(tp=4, dp=2, pp=2), Shape(tp=8), Shape(tp=2, dp=4, pp=2),
    ),
    "stages": (
        Shape(dp=2, pp=4), Shape(dp=4, pp=2), Shape(tp=2, dp=2, pp=2), Shape(dp=4, pp=4),
        Shape(tp=2, dp=2, pp=4), Shape(dp=3, pp=2),
    ),
    "experts": (
        Shape(dp=8, ep=4), Shape(dp=8, ep=8), Shape(dp=16, ep=4), Shape(dp=4, pp=2, ep=4),
    ),
    "context": (Shape(tp=2, cp=2, dp=2), Shape(cp=4, dp=2), Shape(tp=2, cp=2, dp=2, pp=2)),
    "hosts": (
        Shape(tp=2, dp=8), Shape(dp=16), Shape(tp=2, dp=2, pp=4), Shape(tp=4, dp=4),
        Shape(tp=2, dp=4, pp=2), Shape(dp=4, pp=4), Shape(tp=4, dp=6), Shape(dp=4, pp=3),
    ),
    "rails": (Shape(tp=4, dp=4), Shape(tp=2, dp=8), Shape(tp=4, dp=3), Shape(tp=4, dp=4, pp=2)),
    "replicas": (Shape(dp=4), Shape(dp=8), Shape(tp=2, dp=4), Shape(dp=4, pp=2)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a case asks of its job."""

    shapes: str = "small"
    least_iterations: int = 3
    host_bound: bool = False
    overlap: bool | None = None
    chips: tuple[str, ...] = ("h100", "h100", "a100")
    least_nodes: int = 1
    least_nics: int = 1
    gaps: bool = False
    pcie_node: bool = False
    slow_network: bool = False
    experts_inside: bool = False  # a group of experts stays on a node


def shape_for(wish: Wish, rng: np.random.Generator) -> Shape:
    """Return one of the layouts that would do."""
    shapes = SHAPES[wish.shapes]
    return shapes[int(rng.integers(len(shapes)))]


def cluster_for(wish: Wish, shape: Shape, rng: np.random.Generator) -> Cluster:
    """Return a cluster with enough nodes."""
    inner = max(shape.tp * shape.cp, 2)  # what talks most stays on one node
    inner = max(inner, shape.ep) if wish.experts_inside else inner
    sizes = [
        size for size in (8, 4, 2) if size >= inner and -(-shape.world // size) >= wish.least_nodes
    ] or [inner]
    gpus = sizes[0]
    if wish.least_nodes == 1 and shape.world <= 16:
        gpus = int(rng.choice([size for size in sizes if size > 2] or sizes))
    few = gpus // 4 if shape.tp == 1 else gpus
    nics = [each for each in (few, gpus // 2, gpus, gpus) if each >= wish.least_nics] or [gpus]
    rate = rng.choice([2.2e10, 4.2e10]) if wish.slow_network else rng.choice([4.2e10, 4.4e10])
    chip = CHIPS[str(rng.choice(wish.chips))]
    num_nodes = -(-shape.world // gpus)
    return Cluster(
        chip=chip, num_ranks=shape.world, gpus_a_node=gpus, nics_a_node=int(rng.choice(nics)),
        nic=float(rate),
        pcie_nodes=(int(rng.integers(num_nodes)),) if wish.pcie_node and num_nodes > 1 else (),
    )  # fmt: skip


def job_for(wish: Wish, shape: Shape, rng: np.random.Generator, *, barrier: bool) -> Job:
    """Return a job of this layout; its iterations are as many as a case may hold."""
    is_plain = shape.tp * shape.cp * shape.ep == 1
    host_bound = wish.host_bound or (bool(rng.random() < HOST_BOUND_SHARE) and is_plain)
    if host_bound:
        hidden, sequence, most_layers = int(rng.choice([768, 1024])), 1024, 4
        batch = 1
        most_layers = 2 if shape.world > 8 else most_layers
    else:
        hidden = int(rng.choice([3072, 4096, 5120, 6144]))
        hidden = hidden * (2 if shape.tp >= 4 else 1)
        sequence, most_layers = int(rng.choice([2048, 4096])), 2
        sequence *= 2 if shape.cp > 1 else 1
        batch = int(rng.choice([2, 4]))
    recompute = bool(rng.random() < 0.2)
    layers, count = _size(wish, shape, rng, most_layers, recompute=recompute)
    share = rng.uniform(*NATURAL_END) if shape.pp > 1 else rng.uniform(0.1, 0.9)
    vocabulary = int(12 * hidden * layers * share) // 128 * 128
    launches = _launches(shape, layers, count, recompute=recompute)
    most = int(np.clip(LAUNCHES_A_CASE // launches, 3, 24))
    num = max(min(wish.least_iterations, 24), round(most * rng.uniform(0.6, 1.0)))
    distributed = bool(rng.random() < 0.6)
    return Job(
        shape=shape,
        stage_layers=(layers,) * (shape.pp * shape.vpp),
        num_microbatches=count,
        iterations=numbers(num, wish, rng),
        hidden=hidden,
        sequence=sequence,
        batch=batch,
        vocabulary=vocabulary,
        num_experts=2 * shape.ep if shape.ep > 1 else 0,
        recompute=recompute,
        distributed_optimizer=distributed,
        overlap=bool(rng.random() < 0.5) if wish.overlap is None else wish.overlap,
        tied=bool(rng.random() < 0.5),
        loss_reduced=bool(rng.random() < 0.4),
        barrier=barrier,
        hidden_tp=bool(shape.tp > 1 and shape.ep == 1 and rng.random() < 0.12),
        launch_us=float(rng.uniform(8, 11) if host_bound else rng.uniform(3.5, 5.5)),
        module_us=float(rng.uniform(45, 70) if host_bound else rng.uniform(8, 20)),
        loader_us=float(rng.uniform(150, 500)),
        kernel_noise=float(rng.uniform(0.006, 0.02)),
        chip_spread=float(rng.choice([0.005, 0.01, 0.01, 0.02, 0.02, 0.03, 0.05], p=CHIP_SPREADS)),
        host_noise=float(rng.uniform(0.1, 0.25)),
        varied_lengths=float(rng.choice([0, 0, 0, 0.03, 0.1, 0.25])),
        checkpoint_every=int(rng.choice([0, 0, 0, 5])),
        evaluate_every=int(rng.choice([0, 0, 0, 0, 4])),
        collect_every=int(rng.choice([0, 0, 0, 6])),
    )


def _launches(shape: Shape, layers: int, count: int, *, recompute: bool) -> int:
    """Return about how many kernels and communications all ranks launch in an iteration."""
    shared = (shape.tp > 1) + (shape.cp > 1) + (shape.ep > 1)
    a_layer = KERNELS_A_LAYER + 4 * shared + recompute * (KERNELS_AGAIN + 2 * shared)
    return shape.world * (count * shape.vpp * (layers * a_layer + 4) + KERNELS_OF_ENDS)


def _size(
    wish: Wish, shape: Shape, rng: np.random.Generator, most_layers: int, *, recompute: bool
) -> tuple[int, int]:
    """Return layers a chunk and microbatches, few enough for the iterations that are asked for."""
    layers = int(rng.integers(1 if most_layers < 3 else 2, most_layers + 1))
    least = shape.pp * 2 if shape.pp > 1 else 2
    more = {1: 1, 2: 2}.get(shape.pp, 0) if shape.vpp == 1 else 0
    count = least + more * int(rng.integers(0, 3))
    while (
        layers > 1
        and _launches(shape, layers, count, recompute=recompute) * (wish.least_iterations)
        > LAUNCHES_A_CASE
    ):
        layers -= 1
    return layers, count


def nominal_ms(job: Job, cluster: Cluster) -> float:
    """Estimate how long an iteration takes: the longer of computing and launching, and a bubble."""
    shape = job.shape
    layers = sum(job.stage_layers) / shape.pp
    operations = 72.0 * job.tokens * job.hidden**2 * layers / shape.tp
    device = operations / cluster.chip.flops * 1e3 * (1.33 if job.recompute else 1.0)
    host = layers * (KERNELS_A_LAYER * job.launch_us + 4 * job.module_us) / 1e3
    return max(device, host) * (job.num_microbatches + shape.pp - 1)


def numbers(count: int, wish: Wish, rng: np.random.Generator) -> tuple[int, ...]:
    """Return the numbers of the traced iterations; those of a run's start in half of the jobs."""
    if wish.gaps:
        first = 1
        return tuple(first + place // 2 * 5 + place % 2 for place in range(count))
    first = int(rng.choice([1, 1, 11, 101]))
    return tuple(range(first, first + count))
