"""The machines under a job: how fast each chip, host and link is at each traced iteration, and
what ails them.

All conditions are arrays over (iteration, stage, expert replica, expert member, tensor member); a
trouble multiplies some of them, adds pauses of the host thread or bursts of a slow clock. Draws of
healthy noise never depend on the troubles, so that a job with and without one differ by that one
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.kernels.job import Job

Numbers: TypeAlias = "NDArray[np.float64]"
Flags: TypeAlias = "NDArray[np.bool_]"

NVLINK_BYTES_PER_NS = 320.0  # what one chip's collectives reach, of 450
NIC_BYTES_PER_NS = 42.0  # of 400 Gbit/s
MEMORY_SHARE = 0.25  # how much of a lower SM clock memory-bound kernels feel (L2, address units)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Sizes of everything that varies in a healthy cluster; ratios are standard deviations of
    logs.
    """

    chip_spread_ratio: float = 0.01  # slowest chip against the fastest, for the whole run
    kernel_ratio: float = 0.012
    chip_wander_ratio: float = 0.003  # from one iteration to the next, slowly
    host_wander_ratio: float = 0.002
    link_ratio: float = 0.05
    launch_ratio: float = 0.08
    spike_probability: float = 2e-4  # a kernel that takes a multiple of its time
    jitter_probability: float = 0.004  # a pass whose host thread loses the core
    jitter_ns: float = 4e5
    warm_up_factor: float = 2.0  # host time of the run's first iteration


USUAL = Noise()
NOISY = Noise(
    kernel_ratio=0.04,
    chip_wander_ratio=0.012,
    host_wander_ratio=0.01,
    link_ratio=0.2,
    launch_ratio=0.2,
    spike_probability=1e-3,
    jitter_probability=0.03,
    jitter_ns=1.5e6,
)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """State one cause: what it does to which ranks, and in which iterations.

    `cause` and `owner` are what a verdict should say. Bursts cover `share_of_time` and last
    `burst_iterations` iterations each. Pauses strike a pass of a rank with `pause_probability` for
    about `pause_ns`.
    """

    kind: str
    cause: str
    owner: str = "node"
    ranks: tuple[int, ...] = ()
    named: tuple[int, ...] = ()  # whom a finding may name, where that is more than `ranks`
    host: str = ""
    factor: float = 1.0
    first_iteration: int = 1
    last_iteration: int = 0
    share_of_time: float = 1.0
    burst_iterations: float = 1.0
    pause_probability: float = 0.0
    pause_ns: float = 0.0


@dataclass(kw_only=True)
class Pauses:
    """Say how often and how long the host threads of some ranks stand still."""

    kind: str
    where: Flags
    probability: float
    pause_ns: float


@dataclass(kw_only=True)
class Bursts:
    """Say when the chips of some ranks run with a slow clock; times are from the first iteration
    on.
    """

    where: Flags  # (stage, expert replica, expert member, tensor member)
    factor: float
    begins_ns: Numbers
    ends_ns: Numbers

    def now(self, stage: int, times_ns: Numbers) -> Numbers:
        """Return the factor that applies at each of a stage's times."""
        place = np.searchsorted(self.begins_ns, times_ns, side="right") - 1
        inside = (place >= 0) & (times_ns < self.ends_ns[place]) & self.where[stage]
        return np.where(inside, self.factor, 1.0)


@dataclass(kw_only=True)
class Conditions:
    """Hold every factor that a simulated job runs under."""

    compute: Numbers  # time of SM-bound kernels
    memory: Numbers  # time of HBM-bound kernels
    launch: Numbers  # host time of a launch
    loader: Numbers  # host time of a batch
    nvlink: Numbers  # bytes a ns
    nic: Numbers
    tokens: Numbers  # (iteration, stage: 1, expert replica, expert member, 1, microbatch)
    experts: Numbers  # (iteration, expert member, layer): share of the tokens against an even share
    stage_weight: Numbers  # (stage,)
    output_weight: float = 1.0
    pauses: list[Pauses] = field(default_factory=list)
    bursts: list[Bursts] = field(default_factory=list)


def conditions(
    job: Job, noise: Noise, troubles: tuple[Trouble, ...], seed: int, iteration_ns: float
) -> Conditions:
    """Draw the conditions of a job; `iteration_ns` is about how long its iterations are."""
    healthy = _healthy(job, noise, seed)
    for number, trouble in enumerate(troubles):
        _apply(job, healthy, trouble, seed + 7919 * (number + 1), iteration_ns)
    return healthy


def _healthy(job: Job, noise: Noise, seed: int) -> Conditions:
    draw = np.random.default_rng([seed, 1])
    shape = (len(job.iterations), *job.grid)
    hosts = np.reshape(job.hosts, job.grid)
    chips = 1 + noise.chip_spread_ratio * draw.beta(2, 2, job.grid)
    of_host = _wander(draw, job, noise.host_wander_ratio, (int(hosts.max()) + 1,))[:, hosts]
    of_chip = _wander(draw, job, noise.chip_wander_ratio, job.grid)
    launch = np.exp(0.03 * draw.standard_normal(job.grid)) * of_host**3 * np.ones(shape)
    launch[np.equal(job.iterations, 1)] *= noise.warm_up_factor
    nic = NIC_BYTES_PER_NS / (min(job.gpus_per_host, job.num_ranks) if job.shared_nic else 1)
    layers = job.layers * job.vpp * job.pp
    routing = np.exp(0.04 * draw.standard_normal((shape[0], job.ep, layers)))
    return Conditions(
        compute=chips * of_chip,
        memory=1 + 0.3 * (chips * of_chip - 1),
        launch=launch,
        loader=np.exp(0.1 * draw.standard_normal(job.grid)) * np.ones(shape),
        nvlink=np.full(shape, NVLINK_BYTES_PER_NS),
        nic=np.full(shape, nic),
        tokens=np.ones((shape[0], 1, shape[2], shape[3], 1, job.microbatches)),
        experts=routing / routing.mean(axis=1, keepdims=True),
        stage_weight=np.ones(job.pp),
    )


def _wander(draw: np.random.Generator, job: Job, ratio: float, shape: tuple[int, ...]) -> Numbers:
    """Return factors that drift from iteration to iteration, remembered for about ten of them."""
    gaps = np.diff((job.iterations[0], *job.iterations))
    state = draw.standard_normal(shape)
    states = []
    for gap in gaps:
        kept = 0.9**gap
        state = kept * state + np.sqrt(1 - kept**2) * draw.standard_normal(shape)
        states.append(state)
    return np.exp(ratio * np.array(states))


def _apply(job: Job, now: Conditions, trouble: Trouble, seed: int, iteration_ns: float) -> None:
    where = np.isin(np.arange(job.num_ranks), trouble.ranks).reshape(job.grid)
    numbers = np.array(job.iterations)
    last = trouble.last_iteration or numbers[-1]
    when = (numbers >= trouble.first_iteration) & (numbers <= last)
    struck = when[:, None, None, None, None] & where
    factor = np.where(struck, trouble.factor, 1.0)
    draw = np.random.default_rng([seed, crc32(trouble.kind.encode())])
    match trouble.kind:
        case "gpu_clock":
            now.compute = now.compute * factor
            now.memory = now.memory * (1 + MEMORY_SHARE * (factor - 1))
        case "throttling":
            now.bursts.append(_bursts(job, trouble, where, draw, iteration_ns))
        case "nvlink":
            now.nvlink = now.nvlink / factor
        case "nic" | "rail":
            now.nic = now.nic / factor
        case "host_cpu":
            now.launch = now.launch * factor
            now.loader = now.loader * (1 + 0.5 * (factor - 1))
        case "loader" | "slow_storage":
            now.loader = now.loader * factor * np.exp(0.3 * draw.standard_normal(factor.shape))
        case "heavy_stage":
            stages = where.any(axis=(1, 2, 3))
            now.stage_weight = np.where(stages, trouble.factor, now.stage_weight)
        case "heavy_output":
            now.output_weight = trouble.factor
        case "long_sequences":
            now.tokens = now.tokens * np.where(where[:1], trouble.factor, 1.0)[None, ..., :1, None]
        case "uneven_sequences":
            spread = trouble.factor - 1
            now.tokens = now.tokens * np.exp(spread * draw.standard_normal(now.tokens.shape))
        case "hot_expert" | "moving_hot_expert":
            _heat(job, now, trouble, where, draw)
    if trouble.pause_probability:
        now.pauses.append(
            Pauses(
                kind=trouble.kind,
                where=struck,
                probability=trouble.pause_probability,
                pause_ns=trouble.pause_ns,
            )
        )


def _heat(
    job: Job, now: Conditions, trouble: Trouble, where: Flags, draw: np.random.Generator
) -> None:
    """Give one expert member tokens of the others: always the same one, or ever another."""
    members = np.arange(job.ep)[None, :, None]
    if trouble.kind == "hot_expert":
        hot = np.isin(members, np.flatnonzero(np.any(where, axis=(0, 1, 3))))
    else:
        num_iterations, _, num_layers = now.experts.shape
        hot = members == draw.integers(0, job.ep, (num_iterations, 1, num_layers))
    others = (job.ep - trouble.factor) / (job.ep - 1)
    now.experts = now.experts * np.where(hot, trouble.factor, max(others, 0.1))


def _bursts(
    job: Job, trouble: Trouble, where: Flags, draw: np.random.Generator, iteration_ns: float
) -> Bursts:
    """Alternate bursts and pauses of random length over the whole run."""
    burst_ns = trouble.burst_iterations * iteration_ns
    calm_ns = burst_ns * (1 / trouble.share_of_time - 1)
    num_bursts = int(2.5 * job.iterations[-1] * iteration_ns / (burst_ns + calm_ns)) + 4
    lengths = np.stack(
        [
            calm_ns * draw.gamma(4, 1 / 4, num_bursts),
            burst_ns * draw.gamma(4, 1 / 4, num_bursts),
        ],
        axis=1,
    )
    edges = np.cumsum(lengths.ravel()) - draw.uniform() * (calm_ns + burst_ns)
    return Bursts(where=where, factor=trouble.factor, begins_ns=edges[0::2], ends_ns=edges[1::2])
