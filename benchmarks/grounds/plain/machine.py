"""The cluster that a job runs on: chips, links, clocks, and what a collective takes on them.

A collective is a ring: what each member hands to the next one, by the slowest link on the way.

    all_reduce       2 (n - 1) / n  of the payload
    reduce_scatter     (n - 1) / n  of the payload (a member's whole input)
    all_gather         (n - 1)      times the payload (a member's shard)
    all_to_all         (n - 1) / n  of the largest payload

Inside a host the links are NVLinks (or PCIe, where a machine has none), between hosts NICs: one for
every GPU (rails) or one for all of a host. A group with m members on each host drives m NICs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ranks: TypeAlias = NDArray[np.int64]

_CHIPS = (
    ("NVIDIA H100 80GB HBM3", 1980.0),
    ("NVIDIA H200", 1980.0),
    ("NVIDIA A100-SXM4-80GB", 1410.0),
)
_MOST_DEVIATIONS = 2.0
_OF_SPREAD = 0.25
"""Standard deviation of chips, as a share of the range that they keep to."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts and what joins their GPUs."""

    num_ranks: int
    gpus_per_host: int
    chip: str
    clock_mhz: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float
    has_rails: bool
    """A NIC for every GPU; otherwise one for all of a host."""
    pcie_bytes_per_s: float
    latency_s: float
    """Of a collective's kernel inside a host."""
    hop_s: float
    """More for every further host."""
    host_names: tuple[str, ...]
    offsets_s: tuple[float, ...]
    """By how much each host's clock is ahead of the true time."""
    drifts_ppm: tuple[float, ...]
    """By how much faster each host's clock runs."""
    tie_width_s: float

    @property
    def host_of(self) -> Ranks:
        """Return the host's number of each rank."""
        return np.arange(self.num_ranks) // self.gpus_per_host

    @property
    def num_hosts(self) -> int:
        """Return how many hosts there are."""
        return -(-self.num_ranks // self.gpus_per_host)

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return tuple(int(rank) for rank in np.flatnonzero(self.host_of == host))

    def rail(self, local: int) -> tuple[int, ...]:
        """Return the ranks whose NIC is on the same switch: of one place on all hosts."""
        return tuple(range(local, self.num_ranks, self.gpus_per_host))


def draw_machine(draws: np.random.Generator, num_ranks: int, gpus_per_host: int) -> Machine:
    """Draw a cluster of so many GPUs."""
    chip, clock_mhz = _CHIPS[int(draws.integers(len(_CHIPS)))]
    num_hosts = -(-num_ranks // gpus_per_host)
    has_nvlink = gpus_per_host > 2 or draws.random() < 0.7
    first = int(draws.integers(1, 400))
    offset_s = 10 ** draws.uniform(-4.3, -2.3)
    return Machine(
        num_ranks=num_ranks,
        gpus_per_host=gpus_per_host,
        chip=chip,
        clock_mhz=clock_mhz,
        nvlink_bytes_per_s=draws.uniform(150e9, 380e9) if has_nvlink else draws.uniform(18e9, 26e9),
        nic_bytes_per_s=float(draws.choice([12.5e9, 25e9, 50e9])) * draws.uniform(0.75, 0.92),
        has_rails=bool(gpus_per_host >= 4 and draws.random() < 0.7),
        pcie_bytes_per_s=draws.uniform(20e9, 50e9),
        latency_s=draws.uniform(12e-6, 30e-6),
        hop_s=draws.uniform(8e-6, 20e-6),
        host_names=tuple(f"gpu{first + number:03d}" for number in range(num_hosts)),
        offsets_s=tuple(offset_s * draws.standard_normal(num_hosts)),
        drifts_ppm=tuple(draws.uniform(-15.0, 15.0, num_hosts)),
        tie_width_s=draws.uniform(8e-6, 40e-6),
    )


def chip_slowness(draws: np.random.Generator, num_ranks: int, spread_ratio: float) -> Floats:
    """Return by how much longer each chip takes than a typical one: at most half of the spread."""
    deviations = draws.standard_normal(num_ranks).clip(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)
    return np.asarray(1.0 + _OF_SPREAD * spread_ratio * deviations, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class GroupSet:
    """The process groups of one kind, which together hold every rank once: `(group, member)`."""

    axis: str
    members: Ranks
    ids: tuple[str, ...]
    """By rank."""
    per_host: int
    """Members of a group on one host."""
    num_hosts: int
    """Hosts of a group."""

    @property
    def size(self) -> int:
        """Return how many members a group has."""
        return int(self.members.shape[1])

    @property
    def crosses_hosts(self) -> bool:
        """Tell whether its members are on several hosts."""
        return self.num_hosts > 1

    def latest(self, times: Floats) -> Floats:
        """Return for each rank the largest value of its group."""
        result = np.empty_like(times)
        result[self.members] = times[self.members].max(axis=1)[:, None]
        return result

    def members_of(self, rank: int) -> tuple[int, ...]:
        """Return the members of a rank's group."""
        row = self.members[(self.members == rank).any(axis=1)][0]
        return tuple(int(member) for member in row)


def group_set(
    axis: str, members: Ranks, machine: Machine, *, is_numbered: bool = False
) -> GroupSet:
    """Name groups as the tracer does, by axis and smallest member; torch numbers those that a
    trainer makes itself.
    """
    ids = [""] * machine.num_ranks
    for number, row in enumerate(members):
        name = f"{axis}-{number + 1}" if is_numbered else axis
        for rank in row:
            ids[int(rank)] = f"{name}@{int(row.min())}"
    hosts = machine.host_of[members[0]]
    num_hosts = len(np.unique(hosts))
    return GroupSet(
        axis=axis,
        members=members,
        ids=tuple(ids),
        per_host=max(1, members.shape[1] // num_hosts),
        num_hosts=num_hosts,
    )


def share_on_wire(op: str, size: int) -> float:
    """Return how many times its payload a member hands on."""
    if op == "all_reduce":
        return 2 * (size - 1) / size
    return float(size - 1) if op == "all_gather" else (size - 1) / size


def ring_bytes_per_s(machine: Machine, groups: GroupSet) -> float:
    """Return the bandwidth of a group's ring."""
    if not groups.crosses_hosts:
        return machine.nvlink_bytes_per_s
    num_nics = groups.per_host if machine.has_rails else 1
    # Groups that share a NIC, one for each place on the host, share its bandwidth as well.
    sharing = 1 if machine.has_rails else max(1, machine.gpus_per_host // groups.per_host)
    return min(machine.nvlink_bytes_per_s, machine.nic_bytes_per_s * num_nics / sharing)


def transfer_s(machine: Machine, groups: GroupSet, op: str, size_bytes: float) -> float:
    """Return what a collective takes once all members are there."""
    latency_s = machine.latency_s + 1.5e-6 * groups.size + machine.hop_s * (groups.num_hosts - 1)
    wire_bytes = size_bytes * share_on_wire(op, groups.size)
    return latency_s + wire_bytes / ring_bytes_per_s(machine, groups)
