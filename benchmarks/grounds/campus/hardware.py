"""What the machines of a campus are: chips, hosts, their links and clocks, and how they differ.

Chips of one make differ by what their silicon draws at a voltage: a fraction of a percent where the
power cap is far, some percent where it binds. Within a job a clock wanders as the chip warms.
Memory runs at one rate on all chips and hardly differs. A host's processors launch kernels, one
after the other; the socket that is far from a GPU takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
"""Mostly (variant, iteration, rank of a stage); seconds unless said otherwise."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """State what one make of GPU can do, at the rates that large kernels reach."""

    name: str
    num_processors: int
    matrix_flops: float  # of bf16 products, sustained by all processors
    memory_bytes_s: float
    nvlink_bytes_s: float  # to its mates of one host and back, 0: through PCIe only
    pcie_bytes_s: float
    clock_mhz: int
    power_w: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="NVIDIA H100 80GB HBM3", num_processors=132, matrix_flops=6.2e14,
            memory_bytes_s=2.7e12, nvlink_bytes_s=3.4e11, pcie_bytes_s=4.8e10, clock_mhz=1980,
            power_w=700,
        ),
        Chip(
            name="NVIDIA A100-SXM4-80GB", num_processors=108, matrix_flops=2.4e14,
            memory_bytes_s=1.6e12, nvlink_bytes_s=2.3e11, pcie_bytes_s=2.2e10, clock_mhz=1410,
            power_w=400,
        ),
        Chip(
            name="NVIDIA L40S", num_processors=142, matrix_flops=1.9e14,
            memory_bytes_s=7.2e11, nvlink_bytes_s=0.0, pcie_bytes_s=2.0e10, clock_mhz=2520,
            power_w=350,
        ),
        Chip(
            name="NVIDIA RTX A6000", num_processors=84, matrix_flops=1.1e14,
            memory_bytes_s=6.4e11, nvlink_bytes_s=4.4e10, pcie_bytes_s=1.9e10, clock_mhz=1800,
            power_w=300,
        ),
    )
}  # fmt: skip
"""By name. Rates are what is reached, not what data sheets promise."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """State where a job runs, and how much its parts differ and wander without any fault."""

    chip: Chip
    ranks_per_host: int
    nic_bytes_s: float  # of one NIC
    num_nics: int  # of a host; one a GPU makes rails
    chip_spread: float = 0.006  # standard deviation of how long a product takes
    thermal_drift: float = 0.002
    noise: float = 0.006  # of each kernel's time
    tail_share: float = 0.001  # of kernels that take much longer
    launch_s: float = 5e-6  # of one kernel, by the host
    host_jitter: float = 0.08
    host_spread: float = 0.05  # between ranks: sockets, what else runs there
    link_noise: float = 0.05
    busy_network: float = 0.0  # how much longer transfers between hosts take on average
    clock_offset_s: float = 0.002
    clock_drift_ppm: float = 8.0
    tie_width_s: float = 20e-6
    clock_steps: bool = False

    @property
    def has_rails(self) -> bool:
        """Tell whether every GPU has a NIC of its own."""
        return self.num_nics >= self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Return the number of the host of a rank."""
        return rank // self.ranks_per_host

    def ranks_of(self, host: int, num_ranks: int) -> tuple[int, ...]:
        """Return the ranks of a job on one of its hosts."""
        first = host * self.ranks_per_host
        return tuple(range(first, min(first + self.ranks_per_host, num_ranks)))


def even_chips(num_ranks: int) -> Floats:
    """Return chips that do not differ."""
    return np.ones(num_ranks)


def drawn_chips(site: Site, num_ranks: int, seed: int, spread: float | None = None) -> Floats:
    """Return how long each chip takes for a product, 1 being typical.

    Silicon is sorted before it is sold: little lies beyond two deviations.
    """
    rng = np.random.default_rng([seed, 11])
    deviates = np.clip(rng.standard_normal(num_ranks), -2.2, 2.2)
    return np.exp(deviates * (site.chip_spread if spread is None else spread))


def drawn_drift(site: Site, num_ranks: int, numbers: tuple[int, ...], seed: int) -> Floats:
    """Return (iteration, rank): how clocks wander while a job runs, around 1.

    A first-order process in the number of the iteration, which keeps its size, however far traced
    iterations are apart.
    """
    rng = np.random.default_rng([seed, 12])
    steps = np.diff(np.array(numbers, dtype=float), prepend=numbers[0])
    kept = np.exp(-steps / 40.0)
    deviates = rng.standard_normal((len(numbers), num_ranks))
    values = np.empty_like(deviates)
    values[0] = deviates[0]
    for place in range(1, len(numbers)):
        fresh = np.sqrt(1 - kept[place] ** 2)
        values[place] = kept[place] * values[place - 1] + fresh * deviates[place]
    return np.exp(site.thermal_drift * np.clip(values, -3, 3))


def drawn_launchers(site: Site, num_ranks: int, seed: int) -> Floats:
    """Return how long each rank's host thread takes for a launch, 1 being typical.

    Every second half of a host's GPUs hangs off the other socket.
    """
    rng = np.random.default_rng([seed, 13])
    by_host = rng.standard_normal(num_ranks // site.ranks_per_host + 1)
    hosts = np.arange(num_ranks) // site.ranks_per_host
    far = (np.arange(num_ranks) % site.ranks_per_host) * 2 >= site.ranks_per_host
    own = rng.standard_normal(num_ranks) * 0.4 + by_host[hosts] * 0.6
    return np.exp(site.host_spread * (np.clip(own, -2.5, 2.5) + 0.5 * far))


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """State what clocks say: of each rank and traced iteration, seconds to add to true time."""

    offset_s: Floats  # (rank, iteration)
    rate: Floats  # (rank,): seconds that pass for one true second, less 1


def drawn_clocks(site: Site, num_ranks: int, windows: tuple[int, ...], seed: int) -> Clocks:
    """Draw clocks; `windows` are the numbers of the windows of the traced iterations.

    Every window ties a device anew to its host's clock; where NTP steps a host's clock, it does so
    between two windows.
    """
    rng = np.random.default_rng([seed, 14])
    hosts = np.arange(num_ranks) // site.ranks_per_host
    num_hosts = int(hosts[-1]) + 1
    offset = rng.standard_normal(num_hosts) * site.clock_offset_s
    rate = rng.standard_normal(num_hosts) * site.clock_drift_ppm * 1e-6
    num_windows = max(windows) + 1
    ties = (rng.random((num_ranks, num_windows)) - 0.5) * site.tie_width_s * 0.8
    steps = np.zeros((num_hosts, num_windows))
    if site.clock_steps and num_windows > 1:
        host, window = rng.integers(num_hosts), rng.integers(1, num_windows)
        steps[host, window:] = rng.choice([-1.0, 1.0]) * rng.uniform(0.002, 0.02)
    by_window = offset[hosts, None] + steps[hosts] + ties
    return Clocks(offset_s=by_window[:, list(windows)], rate=rate[hosts])
