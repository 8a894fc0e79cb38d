"""Describe chips, hosts and links: what they do in a second, and which ranks share them.

Figures are those of vendors' sheets: dense bf16 rates of tensor cores, bandwidth of device memory,
NVLink in one direction, and one NIC a GPU (400 Gbit/s of H100 systems are 50 GB/s, 200 Gbit/s of
A100 systems 25 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

RESOURCES = ("flop", "memory", "host", "nvlink", "nic", "loader", "work", "experts", "storage")
"""What a trouble can make slower. `work` and `experts` are not hardware: the work that data or the
model give to a rank, in all of its passes or in its experts only."""


class Chip(NamedTuple):
    """State what one GPU and its links do; `launch_us` is the host's time for one kernel."""

    name: str
    peak_tflops: float
    memory_gbps: float
    nvlink_gbps: float
    nic_gbps: float
    clock_mhz: float
    power_w: float
    launch_us: float = 6.0


CHIPS = {
    "H100": Chip("NVIDIA H100 80GB HBM3", 989, 3350, 450, 50, 1980, 700),
    "H200": Chip("NVIDIA H200", 989, 4800, 450, 50, 1980, 700),
    "H800": Chip("NVIDIA H800", 989, 3350, 200, 50, 1980, 700),
    "A100": Chip("NVIDIA A100-SXM4-80GB", 312, 2039, 300, 25, 1410, 400, 7.5),
    # Grace's cores launch more slowly than x86 ones of the same year
    "GB200": Chip("NVIDIA GB200", 2450, 8000, 900, 50, 2062, 1200, 8.0),
    # no NVLink: PCIe 4.0 x16 through the host's bridge
    "L40S": Chip("NVIDIA L40S", 181, 864, 22, 12.5, 2520, 350),
    "V100": Chip("Tesla V100-SXM3-32GB", 125, 900, 150, 6.25, 1597, 350, 9.0),
}

GEMM_EFFICIENCY = 0.62
"""Share of the peak that large bf16 products reach; Llama 3's training ran at 38 to 43 % of the
peak over all, communication and small kernels included (Llama 3 report, table 4)."""
ATTENTION_EFFICIENCY = 0.45
"""FlashAttention-2 and 3 with causal masks, as a share of the peak."""
MEMORY_EFFICIENCY = 0.75
LINK_EFFICIENCY = 0.78
"""Share of a link's rate that NCCL's algorithms reach with large messages (nccl-tests)."""
RACK = 72
"""GPUs of a GB200 NVL72 rack, in trays of four: one NVLink domain."""
NVLINK_LATENCY_S = 12e-6
NIC_LATENCY_S = 28e-6


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """State where ranks are: `hosts` (rank,) is the number of each rank's host, `slots` (rank,)
    its place in there. `nics_per_gpu` below 1: several GPUs share a NIC.
    """

    chip: Chip
    hosts: Integers
    slots: Integers
    prefix: str
    nics_per_gpu: float = 1.0

    @property
    def domains(self) -> Integers:
        """Return which ranks NVLink joins, (rank,): a host's, or a rack's of 72 GB200."""
        if "GB200" in self.chip.name:
            return np.asarray(np.arange(len(self.hosts)) // RACK)
        return self.hosts

    def on_nic_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose traffic to other hosts leaves by a rank's NIC."""
        width = round(1 / self.nics_per_gpu)
        place = self.slots // width == self.slots[rank] // width
        return tuple(int(one) for one in np.flatnonzero((self.hosts == self.hosts[rank]) & place))

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return f"{self.prefix}{int(self.hosts[rank]):03d}"

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks on one host."""
        return tuple(int(rank) for rank in np.flatnonzero(self.hosts == host))

    @property
    def nic_bytes_per_s(self) -> float:
        """Return what a GPU's share of the NICs carries."""
        return self.chip.nic_gbps * 1e9 * LINK_EFFICIENCY * self.nics_per_gpu

    @property
    def nvlink_bytes_per_s(self) -> float:
        """Return what a GPU's NVLink carries in one direction."""
        return self.chip.nvlink_gbps * 1e9 * LINK_EFFICIENCY


def placed(
    num_ranks: int, gpus_per_host: int, rng: np.random.Generator, restarted: bool
) -> Cluster:
    """Return ranks on hosts, in order; after a restart hosts have new numbers and a spare is used.

    The chip is set by the caller (`dataclasses.replace`).
    """
    hosts = np.arange(num_ranks) // gpus_per_host
    num_hosts = int(hosts[-1]) + 1
    first = int(rng.integers(1, 400))
    numbers = np.arange(first, first + num_hosts)
    if restarted:  # a scheduler hands out hosts in any order, and a spare for the lost one
        numbers = rng.permutation(numbers)
        numbers[int(rng.integers(num_hosts))] = first + num_hosts + int(rng.integers(1, 30))
    prefix = str(rng.choice(["node-", "gpu", "hgx-", "dgx", "rack7-tray", "worker-"]))
    return Cluster(
        chip=CHIPS["H100"],
        hosts=numbers[hosts],
        slots=np.arange(num_ranks) % gpus_per_host,
        prefix=prefix,
    )
