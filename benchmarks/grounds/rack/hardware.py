"""State what chips, links and hosts can do, and where the ranks of a job stand.

Rates are those of the makers' data sheets (NVIDIA A100, H100 and H200 SXM; ConnectX-6 and -7); what
share of them a job gets is a matter of `roofline` and `network`. Llama 3's report (arXiv
2407.21783, section 3.3) has the same hosts: 8 GPUs joined by NVLink, one NIC of 400 Gb/s a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of GPU; links in bytes a second and one direction."""

    name: str
    flops: float
    hbm_bytes_s: float
    nvlink_bytes_s: float
    pcie_bytes_s: float
    num_sms: int
    clock_mhz: float


CHIPS = (
    Chip(
        name="NVIDIA A100-SXM4-80GB",
        flops=312e12,
        hbm_bytes_s=2.04e12,
        nvlink_bytes_s=300e9,
        pcie_bytes_s=25e9,
        num_sms=108,
        clock_mhz=1410.0,
    ),
    Chip(
        name="NVIDIA H100 80GB HBM3",
        flops=989e12,
        hbm_bytes_s=3.35e12,
        nvlink_bytes_s=450e9,
        pcie_bytes_s=50e9,
        num_sms=132,
        clock_mhz=1980.0,
    ),
    Chip(
        name="NVIDIA H200",
        flops=989e12,
        hbm_bytes_s=4.8e12,
        nvlink_bytes_s=450e9,
        pcie_bytes_s=50e9,
        num_sms=132,
        clock_mhz=1980.0,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Rack:
    """The hosts of a job: ranks fill them in order, `gpus_per_host` each.

    `nics_per_host` NICs of `nic_bytes_s` are shared by the GPUs of a host; as many as there are
    GPUs: every GPU has its own, on the rail of its number.
    """

    chip: Chip
    gpus_per_host: int
    num_ranks: int
    nics_per_host: int
    nic_bytes_s: float
    host_names: tuple[str, ...]

    @property
    def num_hosts(self) -> int:
        """Return how many hosts there are."""
        return -(-self.num_ranks // self.gpus_per_host)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.gpus_per_host

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        first = host * self.gpus_per_host
        return tuple(range(first, min(first + self.gpus_per_host, self.num_ranks)))

    @property
    def has_rails(self) -> bool:
        """Tell whether every GPU has a NIC of its own."""
        return self.nics_per_host == self.gpus_per_host

    @property
    def nic_share_bytes_s(self) -> float:
        """Return what one GPU gets of its host's NICs when all of them send."""
        return self.nics_per_host * self.nic_bytes_s / self.gpus_per_host


_NICS = ((25e9, 0.3), (50e9, 0.7))
"""200 and 400 Gb/s, and how often."""


def draw_rack(draws: np.random.Generator, num_ranks: int, gpus_per_host: int) -> Rack:
    """Draw the hosts that a job of so many ranks gets."""
    chip = CHIPS[int(draws.choice(len(CHIPS), p=(0.25, 0.5, 0.25)))]
    rates, weights = zip(*_NICS, strict=True)
    nics = gpus_per_host if draws.random() < 0.7 else max(1, gpus_per_host // 2)
    row, first = int(draws.integers(1, 40)), int(draws.integers(1, 60))
    num_hosts = -(-num_ranks // gpus_per_host)
    return Rack(
        chip=chip,
        gpus_per_host=gpus_per_host,
        num_ranks=num_ranks,
        nics_per_host=nics,
        nic_bytes_s=float(draws.choice(rates, p=weights)),
        host_names=tuple(f"r{row:02d}-n{first + number:03d}" for number in range(num_hosts)),
    )
