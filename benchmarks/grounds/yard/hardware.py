"""Say what a cluster is made of, and how fast each chip runs between its heat and its power cap.

A chip's power is what leaks (more when hot) plus what switching costs (activity times the clock to
the power of 2.6). Its clock is the highest one, in steps of 15 MHz, that keeps below the cap:

    clock = ((cap - leak) / (switching cost * activity)) ** (1 / 2.6)

so a chip that leaks more or is cooled worse is slower when everybody computes, and a chip that
waits for others is cooler and faster. Temperatures follow power within some twenty seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_CLOCK_STEP_MHZ = 15.0
_POWER_EXPONENT = 2.6
_SECONDS_TO_HEAT = 20.0
_WARM_C = 62.0  # a typical chip at its cap


@dataclass(frozen=True, kw_only=True)
class Chip:
    """State what a data sheet says of a GPU, and what NCCL reaches on it."""

    name: str
    num_processors: int
    flops: float  # dense bf16, at the typical clock
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float  # NCCL's bus bandwidth within a host
    cap_w: float
    clock_mhz: float  # the highest
    typical: float  # share of the highest clock that a chip at its cap holds


CHIPS = {
    "a100": Chip(
        name="NVIDIA A100-SXM4-80GB", num_processors=108, flops=280e12, memory_bytes_per_s=1.75e12,
        nvlink_bytes_per_s=225e9, cap_w=400.0, clock_mhz=1410.0, typical=0.97,
    ),
    "h100": Chip(
        name="NVIDIA H100 80GB HBM3", num_processors=132, flops=790e12, memory_bytes_per_s=2.9e12,
        nvlink_bytes_per_s=360e9, cap_w=700.0, clock_mhz=1980.0, typical=0.89,
    ),
    "h800": Chip(
        name="NVIDIA H800", num_processors=132, flops=790e12, memory_bytes_per_s=2.9e12,
        nvlink_bytes_per_s=165e9, cap_w=700.0, clock_mhz=1980.0, typical=0.9,
    ),
    "h200": Chip(
        name="NVIDIA H200", num_processors=132, flops=800e12, memory_bytes_per_s=4.2e12,
        nvlink_bytes_per_s=370e9, cap_w=700.0, clock_mhz=1980.0, typical=0.92,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Site:
    """State what all hosts of a cluster have: chips, NICs, processors, clocks, storage."""

    chip: str = "h100"
    ranks_per_host: int = 8
    num_nics: int = 8  # of a host; its GPUs share them evenly
    nic_bytes_per_s: float = 46e9
    latency_s: float = 9e-6  # of one hop between hosts
    launch_s: float = 4.5e-6  # of one kernel, by the host's thread
    chip_spread_ratio: float = 0.008
    congestion_ratio: float = 0.0  # how much the fabric's bandwidth wanders, for everybody
    clocks: str = "ntp"  # or ptp, wandering, stepping
    prefix: str = "gpu-node"

    @property
    def gpu(self) -> Chip:
        """Return the chip of all hosts."""
        return CHIPS[self.chip]

    def host_of(self, rank: int) -> int:
        """Return which host a rank runs on."""
        return rank // self.ranks_per_host

    def nic_of(self, rank: int) -> tuple[int, int]:
        """Return host and number of the NIC that a rank uses; equal numbers are one rail."""
        local = rank % self.ranks_per_host
        return self.host_of(rank), local * self.num_nics // self.ranks_per_host

    def host_name(self, host: int, seed: int) -> str:
        """Return the name of a host, as schedulers hand them out: neighbours, mostly."""
        first = seed * 37 % 900
        return f"{self.prefix}-{first // 16:03d}-{(first + host) % 64:02d}"


@dataclass(kw_only=True)
class Chips:
    """The chips of a job: how each differs from the typical one, and how hot it is now."""

    site: Site
    quality: NDArray[np.float64]  # (rank,): more leaks and switches worse
    cooling: NDArray[np.float64]  # (rank,): more is cooled worse
    inlet_c: NDArray[np.float64]  # (rank,)
    temperature_c: NDArray[np.float64] = field(init=False)
    power_w: NDArray[np.float64] = field(init=False)
    clock_ratio: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.temperature_c = self.inlet_c + 18.0
        self.power_w = np.full(len(self.quality), 0.3 * self.site.gpu.cap_w)
        self.clock_ratio = np.ones(len(self.quality))

    @classmethod
    def drawn(cls, site: Site, num_ranks: int, seed: int) -> Chips:
        """Draw the chips of a job; the same chips whatever their spread."""
        rng = np.random.default_rng([seed, 1])
        quality, cooling = rng.normal(size=(2, num_ranks)).clip(-2.2, 2.2)
        inlet = 27.0 + rng.normal(size=num_ranks // site.ranks_per_host + 1)
        spread = site.chip_spread_ratio
        return cls(
            site=site,
            quality=quality * spread,
            cooling=cooling * spread * 3,
            inlet_c=27.0
            + (inlet[np.arange(num_ranks) // site.ranks_per_host] - 27.0)
            * min(spread / 0.008, 3.0),
        )

    def _leak_w(self, temperature_c: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(
            0.18 * self.site.gpu.cap_w * np.exp((temperature_c - _WARM_C) / 60.0), np.float64
        )

    def warm_up(self) -> None:
        """Let chips be as hot as after hours of work."""
        self.power_w = np.full(len(self.quality), self.site.gpu.cap_w * 0.9)
        self.heat(1e3, np.ones(len(self.quality)))

    def settle(self, activity: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each chip's clock over that of a typical one, for this activity (0 to 1)."""
        chip = self.site.gpu
        switching = 0.82 * chip.cap_w / 0.99 / chip.typical**_POWER_EXPONENT
        leak = self._leak_w(self.temperature_c)
        own = switching * (1 + self.quality) ** _POWER_EXPONENT * np.maximum(activity, 0.05)
        clock = np.minimum(((chip.cap_w - leak) / own) ** (1 / _POWER_EXPONENT), 1.0)
        steps = np.floor(clock * chip.clock_mhz / _CLOCK_STEP_MHZ + 1e-9)
        clock = steps * _CLOCK_STEP_MHZ / chip.clock_mhz
        self.power_w = leak + own * clock**_POWER_EXPONENT
        # The first chips of a series reach their highest clock, and differ there a little, too.
        self.clock_ratio = clock / (1 + 0.4 * self.quality) / chip.typical
        return self.clock_ratio

    def heat(self, seconds: float, activity: NDArray[np.float64]) -> None:
        """Let temperatures follow the power of the last clocks for some time."""
        resistance = (_WARM_C - 27.0) / self.site.gpu.cap_w
        share = 1 - math.exp(-seconds / _SECONDS_TO_HEAT)
        power = self.power_w * np.maximum(activity, 0.25)
        target = self.inlet_c + resistance * (1 + self.cooling) * power
        self.temperature_c = self.temperature_c + (target - self.temperature_c) * share
