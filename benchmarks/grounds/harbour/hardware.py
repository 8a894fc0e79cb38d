"""Say how fast chips, hosts and links of a site are, and how chips of one kind differ.

Speeds are what kernels reach, not what data sheets promise: about 60 % of the peak of the tensor
cores and 80 % of the memory's (Dao, FlashAttention-2, 2023; Williams, Roofline, 2009). Chips of one
batch differ by some percent under a power cap (Sinha et al., "Not All GPUs Are Created Equal",
SC 2022), and their clocks wander over minutes with the temperature, neighbours of a host together.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""Seconds, or how many times slower: (iteration, rank), of all ranks or of those of one stage."""

MEMORY_SHARE_OF_CLOCK = 0.2
"""How much of a lower clock the memory-bound kernels feel, as an exponent: caches and load units
run with the clock, DRAM does not."""
_MOST_DEVIATIONS = 2.5  # chips beyond were sorted out at the factory


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What kernels reach on a sound GPU: floating-point operations and bytes a second."""

    name: str
    matrix_flops_s: float
    memory_bytes_s: float
    link_bytes_s: float  # to the other GPUs of its host, one direction


CHIPS = {
    "h100": Chip(
        name="NVIDIA H100 80GB HBM3",
        matrix_flops_s=590e12,
        memory_bytes_s=2.7e12,
        link_bytes_s=360e9,
    ),
    "a100": Chip(
        name="NVIDIA A100-SXM4-80GB",
        matrix_flops_s=200e12,
        memory_bytes_s=1.6e12,
        link_bytes_s=230e9,
    ),
    "l40s": Chip(
        name="NVIDIA L40S", matrix_flops_s=170e12, memory_bytes_s=0.7e12, link_bytes_s=22e9
    ),
}


@dataclass(frozen=True, kw_only=True)
class Site:
    """State what the machines of a job are like while nothing is wrong.

    `_ratio` are standard deviations of logarithms. `wander_s` is how fast a clock forgets (the
    time constant of heat sinks and inlet air). `launch_us` is host time a kernel.
    """

    chip: str = "h100"
    ranks_per_host: int = 8
    num_nics: int = 8
    nic_bytes_s: float = 45e9  # 400 Gbit/s a NIC, one direction
    chip_spread_ratio: float = 0.01
    wander_ratio: float = 0.004
    host_wander_ratio: float = 0.003
    wander_s: float = 90.0
    kernel_noise_ratio: float = 0.01
    hiccup_ms: float = 0.0  # mean length of rare interruptions of the launching thread
    launch_us: float = 7.0
    launch_noise_ratio: float = 0.12
    launch_spread_ratio: float = 0.03  # between ranks: cores differ, and how far away a GPU is
    link_noise_ratio: float = 0.05
    link_spread_ratio: float = 0.02  # between GPUs within a host, and between hosts
    clock_offset_ms: float = 8.0
    clock_drift_ppm: float = 15.0


def generator(seed: int, what: str) -> np.random.Generator:
    """Return random numbers for one purpose, the same whatever else is drawn."""
    return np.random.default_rng([seed, crc32(what.encode())])


def static_slowness(site: Site, num_ranks: int, seed: int) -> NDArray[np.float64]:
    """Return how many times longer products take on each chip than on a typical one, (rank,)."""
    deviations = generator(seed, "chips").standard_normal(num_ranks)
    kept = np.clip(deviations, -_MOST_DEVIATIONS, _MOST_DEVIATIONS)
    return np.exp(site.chip_spread_ratio * kept)


def lasting(ratio: float, count: int, seed: int, what: str) -> NDArray[np.float64]:
    """Return factors that differ from unit to unit for good, of their links or their cores."""
    return np.exp(ratio * generator(seed, what).standard_normal(count))


def wander(site: Site, num_ranks: int, times_s: NDArray[np.float64], seed: int) -> Array:
    """Return what heat adds to each chip's slowness at `times_s` (iteration,), (iteration, rank).

    Chip and host are Ornstein-Uhlenbeck processes; ranks of one host share that of the host.
    """
    num_hosts = -(-num_ranks // site.ranks_per_host)
    random = generator(seed, "wander")
    chips = _drifting(random, times_s, num_ranks, site.wander_s)
    hosts = _drifting(random, times_s, num_hosts, 2 * site.wander_s)
    shared = hosts[:, np.arange(num_ranks) // site.ranks_per_host]
    return np.exp(site.wander_ratio * chips + site.host_wander_ratio * shared)


def _drifting(
    random: np.random.Generator, times_s: NDArray[np.float64], count: int, forget_s: float
) -> Array:
    """Return `count` Ornstein-Uhlenbeck processes of unit variance, (time, process)."""
    steps = random.standard_normal((len(times_s), count))
    values = np.empty_like(steps)
    values[0] = steps[0]
    for place, gap_s in enumerate(np.diff(times_s), start=1):
        kept = np.exp(-gap_s / forget_s)
        values[place] = kept * values[place - 1] + np.sqrt(1 - kept * kept) * steps[place]
    return values
