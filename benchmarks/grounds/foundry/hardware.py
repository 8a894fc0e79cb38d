"""What the machines can do: chips, links inside a host, network cards between hosts.

Sources of the figures: NVIDIA's data sheets of A100, H100 and H200 (peak rates); MegatronLM's
published 40 to 50 % of peak for whole models, so products reach about 62 % of it by themselves;
FlashAttention-2/3 (about half of peak); STREAM-like kernels reach 80 to 85 % of HBM's rate; NCCL's
own benchmarks (bus rates of 80 % of a link's, some 20 us for a small collective inside a host).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of chip: rates that kernels reach, not those of the data sheet."""

    name: str
    product_flops: float  # bf16, per second
    attention_flops: float
    memory_bytes: float  # per second
    nvlink_bytes: float  # per second and direction, as NCCL gets it
    nic_bytes: float  # of the network card that goes with it
    max_clock_mhz: int
    power_w: float


A100 = Gpu(
    name="NVIDIA A100-SXM4-80GB",
    product_flops=312e12 * 0.68,
    attention_flops=312e12 * 0.55,
    memory_bytes=2.0e12 * 0.82,
    nvlink_bytes=230e9,
    nic_bytes=21e9,
    max_clock_mhz=1410,
    power_w=400.0,
)
H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    product_flops=989e12 * 0.62,
    attention_flops=989e12 * 0.48,
    memory_bytes=3.35e12 * 0.82,
    nvlink_bytes=360e9,
    nic_bytes=43e9,
    max_clock_mhz=1980,
    power_w=700.0,
)
H200 = Gpu(
    name="NVIDIA H200",
    product_flops=989e12 * 0.63,
    attention_flops=989e12 * 0.50,
    memory_bytes=4.8e12 * 0.82,
    nvlink_bytes=365e9,
    nic_bytes=43e9,
    max_clock_mhz=1980,
    power_w=700.0,
)
PCIE_BYTES = 22e9
"""What is left between two chips whose NVLink is down: copies through PCIe 4 or 5 and memory."""
INSIDE_LATENCY_S = 18e-6
OUTSIDE_LATENCY_S = 35e-6
MEMORY_SHARE_OF_CLOCK = 0.15
"""How much of a lower clock a kernel feels that is bound by memory: caches run with the clock."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Where a job runs: chips, hosts, cards, and how alike all of that is."""

    gpu: Gpu = H100
    ranks_per_host: int = 8
    num_nics: int = 8  # per host; ranks are dealt to them in order
    slow_alike_ratio: float = 1.0  # how many times slower all chips are, in a job with a low limit
    chip_spread_ratio: float = 0.01
    wander_ratio: float = 0.002  # of clocks, with temperature
    kernel_noise_ratio: float = 0.004
    launch_us: float = 6.0  # host time of one launch
    host_noise_ratio: float = 0.04
    clock_error_s: float = 0.01  # between hosts
    clock_step_s: float = 0.0  # of one host, once
    readings: bool = False  # whether clocks, power and temperature are read
    daemons_per_s: float = 0.1  # stalls of a launching thread by others
    congestion_share: float = 0.0  # of the time that others take half of the network

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.ranks_per_host

    def nic_of(self, rank: int) -> tuple[int, int]:
        """Return host and number of a rank's network card."""
        local = rank % self.ranks_per_host
        return self.host_of(rank), local * self.num_nics // self.ranks_per_host
