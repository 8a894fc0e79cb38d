"""Model the machines of a cluster: chips, links inside a node, NICs and who shares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What one kind of GPU reaches in practice: flop/s in products, byte/s to its memory."""

    name: str
    flops: float
    memory: float
    nvlink: float  # byte/s of a collective inside a node
    clock_mhz: int


H100 = Chip(
    name="NVIDIA H100 80GB HBM3", flops=5.6e14, memory=2.5e12, nvlink=2.6e11, clock_mhz=1755
)
A100 = Chip(
    name="NVIDIA A100-SXM4-80GB", flops=2.2e14, memory=1.5e12, nvlink=1.7e11, clock_mhz=1410
)
L40 = Chip(name="NVIDIA L40S", flops=1.6e14, memory=7.0e11, nvlink=1.8e10, clock_mhz=2520)
CHIPS = {"h100": H100, "a100": A100, "l40": L40}
PCIE = 1.9e10
INSIDE_ALPHA_NS, OUTSIDE_ALPHA_NS, HOP_NS = 9_000.0, 24_000.0, 1_300.0


@dataclass(frozen=True, kw_only=True)
class Links:
    """State by how many times links are slower than they should be; nothing said: 1."""

    of_gpu: Mapping[int, float] = field(default_factory=dict)  # NVLink or PCIe of a rank
    of_pair: Mapping[tuple[int, int], float] = field(default_factory=dict)  # between two ranks
    of_nic: Mapping[tuple[int, int], float] = field(default_factory=dict)  # (node, NIC)
    fabric: float = 1.0  # between all nodes


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Describe the nodes that a job runs on; ranks fill them in order."""

    chip: Chip
    num_ranks: int
    gpus_a_node: int = 8
    nics_a_node: int = 8
    nic: float = 4.2e10
    pcie_nodes: tuple[int, ...] = ()  # these have no NVLink

    @property
    def num_nodes(self) -> int:
        """Return how many nodes the job takes."""
        return -(-self.num_ranks // self.gpus_a_node)

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.gpus_a_node

    def host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return f"gpu-{self.node(rank) + 11:03d}"

    def ranks_on(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node."""
        return tuple(rank for rank in range(self.num_ranks) if self.node(rank) == node)

    def nic_of(self, rank: int) -> tuple[int, int]:
        """Return (node, number) of the NIC that a rank's traffic takes."""
        local = rank % self.gpus_a_node
        return self.node(rank), local * self.nics_a_node // self.gpus_a_node

    def users_of(self, nic: tuple[int, int]) -> tuple[int, ...]:
        """Return the ranks whose traffic takes a NIC."""
        return tuple(rank for rank in range(self.num_ranks) if self.nic_of(rank) == nic)

    def crosses(self, members: Iterable[int]) -> bool:
        """Tell whether a group has members on more than one node."""
        return len({self.node(rank) for rank in members}) > 1

    def bandwidth(
        self, members: tuple[int, ...], sharing: Mapping[tuple[int, int], int], links: Links
    ) -> float:
        """Return the byte/s of a ring through all members.

        `sharing` says how many rings take each NIC at the same time. A ring is as fast as its
        slowest edge; it has as many channels as NICs at its disposal on the poorest node.
        """
        inside = min(self._inside(rank) / links.of_gpu.get(rank, 1.0) for rank in members)
        for pair, factor in links.of_pair.items():
            inside /= factor if set(pair) <= set(members) else 1.0
        if not self.crosses(members):
            return inside
        nics: dict[int, set[tuple[int, int]]] = {}
        for rank in members:
            nics.setdefault(self.node(rank), set()).add(self.nic_of(rank))
        outside = min(
            len(own) * min(self._nic(nic, sharing, links) for nic in own) for own in nics.values()
        )
        return min(inside, outside)

    def _inside(self, rank: int) -> float:
        return PCIE if self.node(rank) in self.pcie_nodes else self.chip.nvlink

    def _nic(
        self, nic: tuple[int, int], sharing: Mapping[tuple[int, int], int], links: Links
    ) -> float:
        return self.nic / max(1, sharing.get(nic, 1)) / links.of_nic.get(nic, 1.0) / links.fabric

    def transfer_ns(
        self, op: str, size_bytes: float, members: tuple[int, ...], bandwidth: float
    ) -> float:
        """Return how long a transfer takes once all members have joined."""
        count = len(members)
        share = (count - 1) / count
        amount = {"all_reduce": 2 * share, "send": 1.0, "broadcast": 1.0}.get(op, share)
        alpha = OUTSIDE_ALPHA_NS if self.crosses(members) else INSIDE_ALPHA_NS
        return alpha + HOP_NS * count + amount * size_bytes / bandwidth * 1e9
