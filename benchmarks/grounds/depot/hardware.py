"""Describe chips, hosts and what joins them, by the figures that well-tuned kernels reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU: what its matrix products and its memory reach in practice, not on paper."""

    name: str
    product_flops: float
    memory_bytes_per_s: float
    most_mhz: int
    busy_mhz: int
    """Where the power cap holds the clock under matrix products."""
    power_w: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host with its GPUs, the links between them and its network cards."""

    chip: Chip
    gpus: int = 8
    link_bytes_per_s: float = 330e9
    """Of one GPU within the host: NVLink, or PCIe where there is none."""
    nic_bytes_per_s: float = 46e9
    """Of the card that a GPU sends through; less where GPUs share cards."""
    launch_s: float = 6.5e-6
    """What the framework takes to launch one kernel."""
    has_nvlink: bool = True


H100 = Chip(
    name="NVIDIA H100 80GB HBM3", product_flops=590e12, memory_bytes_per_s=2.5e12,
    most_mhz=1980, busy_mhz=1635, power_w=700,
)  # fmt: skip
H800 = Chip(
    name="NVIDIA H800", product_flops=580e12, memory_bytes_per_s=2.5e12,
    most_mhz=1980, busy_mhz=1665, power_w=700,
)  # fmt: skip
A100 = Chip(
    name="NVIDIA A100-SXM4-80GB", product_flops=245e12, memory_bytes_per_s=1.55e12,
    most_mhz=1410, busy_mhz=1335, power_w=400,
)  # fmt: skip
H20 = Chip(
    name="NVIDIA H20", product_flops=132e12, memory_bytes_per_s=3.0e12,
    most_mhz=1980, busy_mhz=1890, power_w=500,
)  # fmt: skip
L40S = Chip(
    name="NVIDIA L40S", product_flops=195e12, memory_bytes_per_s=0.72e12,
    most_mhz=2520, busy_mhz=1995, power_w=350,
)  # fmt: skip

MACHINES = {
    "h100": Machine(chip=H100),
    "h800": Machine(chip=H800, link_bytes_per_s=160e9, nic_bytes_per_s=44e9),
    "a100": Machine(chip=A100, link_bytes_per_s=225e9, nic_bytes_per_s=22e9, launch_s=7.5e-6),
    "h20": Machine(chip=H20, nic_bytes_per_s=40e9),
    "shared cards": Machine(chip=H100, nic_bytes_per_s=22e9, launch_s=6e-6),
    "pcie": Machine(
        chip=L40S, link_bytes_per_s=20e9, nic_bytes_per_s=11e9, launch_s=7e-6, has_nvlink=False
    ),
    "quads": Machine(chip=A100, gpus=4, link_bytes_per_s=200e9, nic_bytes_per_s=21e9),
}
"""By what a catalogue calls them."""
