"""Draw the machines of a job: what their chips, buses, cards and threads can do, and how unevenly.

Every figure comes from a continuous distribution. Ranges cover what is sold and what is published:
products at 0.2 to 0.75 PFLOP/s (A100 to B200 at the share of their peak that trainers reach),
memory at 1.5 to 6 TB/s, NVLink at 150 to 700 GB/s and cards at 12 to 50 GB/s a direction, a launch
at 2.5 to 9 µs (measured on eager PyTorch). Chips of one delivery differ by a lottery of silicon, by
bins, and by their place in the chassis, where the air is warmer behind other cards: by 0.3 to 4 %
from the best to the worst (Sinha et al., SC22, measured 7 to 9 % on clusters with worse cooling).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rng = np.random.Generator


def log_uniform(rng: Rng, low: float, high: float) -> float:
    """Return a number of which the logarithm is even between those of `low` and `high`."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def happens(rng: Rng, probability: float) -> bool:
    """Tell whether something of this probability happens."""
    return bool(rng.random() < probability)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """State what each host of a job has; rates are those that software reaches, in bytes/s.

    `chip_spread_ratio` is how far the slowest of many chips lies from the fastest. `slot_share` of
    it is heat by place in the chassis and `host_share` is that of whole hosts (inlet air), the rest
    is the chip's own. `wander_ratio` is how far a chip strays in the course of minutes.
    """

    gpus_per_host: int
    cards_per_host: int
    product_flops: float
    attention_flops: float
    memory_bytes: float
    nvlink_bytes: float
    card_bytes: float
    exchange_s: float  # fixed time of a collective within a host
    exchange_far_s: float  # and of one between hosts
    launch_s: float
    queue: int  # kernels that a thread may be ahead
    chip_spread_ratio: float
    slot_share: float
    host_share: float
    num_bins: int  # 0: chips are not binned
    wander_ratio: float
    kernel_noise_ratio: float
    host_noise_ratio: float
    transfer_noise_ratio: float
    interference_ratio: float  # how much longer kernels take beside a running collective
    offset_s: float  # clocks of hosts differ by about as much
    drift_ppm: float
    tie_s: float  # how well a device's clock is tied to its host's
    has_counters: bool
    name: str = "NVIDIA H100 80GB HBM3"

    def host_of(self, rank: int) -> int:
        """Return the number of the host a rank runs on."""
        return rank // self.gpus_per_host

    def card_of(self, rank: int) -> int:
        """Return which card of its host a rank sends by."""
        return rank % self.gpus_per_host * self.cards_per_host // self.gpus_per_host

    @property
    def card_bytes_of_rank(self) -> float:
        """Return what a rank has of a card while all ranks of its host send."""
        return self.card_bytes * self.cards_per_host / self.gpus_per_host


def drawn_machines(rng: Rng) -> Machines:
    """Draw machines; quiet ones are as likely as noisy ones."""
    gpus = 8 if happens(rng, 0.65) else 4
    flops = log_uniform(rng, 0.2e15, 0.75e15)
    noise = log_uniform(rng, 0.002, 0.03)
    return Machines(
        gpus_per_host=gpus,
        cards_per_host=int(rng.choice([gpus, gpus, gpus // 2, 1 if gpus == 4 else 2])),
        product_flops=flops,
        attention_flops=flops * rng.uniform(0.4, 0.85),
        memory_bytes=flops * rng.uniform(4.5e-3, 8.5e-3),
        nvlink_bytes=log_uniform(rng, 150e9, 700e9),
        card_bytes=log_uniform(rng, 12e9, 50e9),
        exchange_s=rng.uniform(6e-6, 20e-6),
        exchange_far_s=rng.uniform(20e-6, 60e-6),
        launch_s=log_uniform(rng, 2.5e-6, 9e-6),
        queue=int(rng.uniform(600, 1100)),
        chip_spread_ratio=log_uniform(rng, 0.003, 0.04),
        slot_share=rng.uniform(0.0, 0.5),
        host_share=rng.uniform(0.0, 0.25),
        num_bins=int(rng.integers(2, 5)) if happens(rng, 0.3) else 0,
        wander_ratio=log_uniform(rng, 0.0003, 0.005),
        kernel_noise_ratio=noise,
        host_noise_ratio=log_uniform(rng, 0.03, 0.3),
        transfer_noise_ratio=log_uniform(rng, 0.005, 0.08),
        interference_ratio=rng.uniform(0.0, 0.12),
        offset_s=log_uniform(rng, 1e-5, 0.05),
        drift_ppm=log_uniform(rng, 0.05, 12.0),
        tie_s=log_uniform(rng, 2e-6, 4e-5),
        has_counters=happens(rng, 0.5),
    )


def chip_slowness(machines: Machines, num_ranks: int, rng: Rng) -> Floats:
    """Return how many times longer products take on each rank's chip than on an average one."""
    slots = np.arange(num_ranks) % machines.gpus_per_host
    hosts = np.arange(num_ranks) // machines.gpus_per_host
    lottery = np.clip(rng.normal(size=num_ranks), -2.2, 2.2)
    if machines.num_bins:
        lottery = np.round(lottery * machines.num_bins / 4) * 4 / machines.num_bins
    heat = rng.permutation(np.linspace(-1.7, 1.7, machines.gpus_per_host))[slots]
    inlet = np.clip(rng.normal(size=hosts.max() + 1), -1.7, 1.7)[hosts]
    own = 1 - machines.slot_share - machines.host_share
    mixed = (
        np.sqrt(own) * lottery
        + np.sqrt(machines.slot_share) * heat
        + np.sqrt(machines.host_share) * inlet
    )
    slower: Floats = 1 + machines.chip_spread_ratio * np.clip(mixed / 4, -0.5, 0.5)
    return slower
