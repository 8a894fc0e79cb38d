"""How long transfers take: rings within hosts and across them, messages, all-to-alls.

A collective is done in rings (or trees, for little data), whose slowest edge sets the pace: it is
as slow as the slowest part of any member that it uses. Groups of all the tensor ranks of a host
talk at the same time, so NICs are shared by the ranks of a host; a group with several members on a
host has their shares together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.campus.faults import Fault
from benchmarks.grounds.campus.hardware import Site
from benchmarks.grounds.campus.job import MEGATRON, Axis, Job, axes_of

START_S, START_ACROSS_S = 9e-6, 24e-6  # of a collective within a host, and across hosts
HOP_S, HOP_ACROSS_S = 1.2e-6, 4e-6  # for each further member
_SHARES = {
    "all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0,
    "broadcast": 1.0,
}  # fmt: skip
"""How often a ring carries the whole payload."""


@dataclass(frozen=True)
class Route:
    """State how the groups of an axis are linked, for each rank of a stage."""

    crosses: NDArray[np.bool_]  # whether the group of a rank has members on other hosts
    bytes_s: NDArray[np.float64]
    start_s: NDArray[np.float64]

    def seconds(self, operation: str, num_bytes: float, size: int) -> NDArray[np.float64]:
        """Return what a collective takes whose whole payload has so many bytes."""
        carried = _SHARES[operation] * num_bytes * (size - 1) / size
        return np.asarray(self.start_s + carried / self.bytes_s)


def within_bytes_s(site: Site) -> float:
    """Return how fast a GPU talks to its mates of the same host."""
    return site.chip.nvlink_bytes_s or 0.6 * site.chip.pcie_bytes_s


def nic_share_bytes_s(site: Site) -> float:
    """Return a rank's share of what its host sends to others."""
    share = site.nic_bytes_s * site.num_nics / site.ranks_per_host
    return min(0.85 * share, site.chip.pcie_bytes_s)


def route_of(site: Site, stage: range, axis: Axis) -> Route:
    """Return how the groups of an axis of a stage are linked."""
    hosts = np.array([site.host_of(rank) for rank in stage])
    of_members = hosts[axis.members()]
    crosses = (of_members != of_members[:, :1]).any(axis=1)
    local = (of_members == hosts[:, None]).sum(axis=1)
    smallest = axis.latest(-local.astype(float)) * -1
    across = np.minimum(nic_share_bytes_s(site) * smallest, within_bytes_s(site))
    hops = axis.size - 1
    start = np.where(crosses, START_ACROSS_S + hops * HOP_ACROSS_S, START_S + hops * HOP_S)
    return Route(
        crosses=crosses,
        bytes_s=np.where(crosses, across, within_bytes_s(site)),
        start_s=np.minimum(start, 4 * np.where(crosses, START_ACROSS_S, START_S)),
    )


def message_s(site: Site, one: int, other: int, num_bytes: float) -> tuple[float, bool]:
    """Return what a message takes between two ranks, and whether it leaves the host."""
    if site.host_of(one) == site.host_of(other):
        return START_S + num_bytes / within_bytes_s(site), False
    return START_ACROSS_S + num_bytes / nic_share_bytes_s(site), True


def _talks(job: Job, *across: bool) -> dict[int, frozenset[tuple[int, ...]]]:
    """Return for each rank the groups and pairs in which it talks across hosts, or within one."""
    site, count = job.site, job.ranks_a_stage
    found: dict[int, set[tuple[int, ...]]] = {rank: set() for rank in range(job.num_ranks)}
    names = ("dp_cp", "tp", "cp", "ep", "expt_dp") if job.trainer == MEGATRON else ("dp",)
    table = axes_of(job.layout)
    for rank in range(job.num_ranks):
        stage, local = divmod(rank, count)
        groups = [table[name].members()[local] + stage * count for name in names]
        pairs = [np.array(sorted((rank, other)))
                 for other in (rank - count, rank + count)
                 if 0 <= other < job.num_ranks]  # fmt: skip
        for members in (*groups, *pairs):
            hosts = {site.host_of(int(one)) for one in members}
            if len(members) > 1 and (len(hosts) > 1) in across:
                found[rank].add(tuple(int(one) for one in members))
    return {rank: frozenset(groups) for rank, groups in found.items()}


def suspects(job: Job, fault: Fault) -> tuple[int, ...]:
    """Return whom one may name for a fault of links.

    The two ends of a pair cannot be told apart if both take part in the same transfers. Of more
    than two alike, one must not name any but the one at fault: a guess is none the better for that.
    """
    ranks = fault.ranks
    if fault.kind == "nvlink_pair":
        return ranks
    talks = _talks(job, *_ways(fault))
    if fault.host:
        hosts = {job.site.host_of(rank) for rank in ranks}
        units = [job.site.ranks_of(host, job.num_ranks)
                 for host in range(job.site.host_of(job.num_ranks - 1) + 1)]  # fmt: skip
        own = frozenset().union(*(talks[rank] for rank in ranks))
        alike = [unit for unit in units if frozenset().union(*(talks[r] for r in unit)) == own]
        others = [unit for unit in alike if job.site.host_of(unit[0]) not in hosts]
        return tuple(sorted({*ranks, *(others[0] if len(others) == 1 else ())}))
    (rank,) = ranks
    others_alike = [one for one, own in talks.items() if own == talks[rank] and one != rank]
    return tuple(sorted({rank, *(others_alike if len(others_alike) == 1 else ())}))


def is_used(job: Job, fault: Fault) -> bool:
    """Tell whether a fault of links concerns any transfer of a job."""
    talks = _talks(job, *_ways(fault))
    return any(talks[rank] for rank in fault.ranks)


def _ways(fault: Fault) -> tuple[bool, ...]:
    """Return whether a fault of links concerns what crosses hosts, what stays within, or both."""
    return tuple(quantity == "nic" for quantity in fault.quantities)
