"""Lay groups of ranks out, within a stage and across stages, with what their ways are made of.

Ranks of a stage are numbered from 0 as Megatron does: tp fastest, then cp, then dp. A matrix of a
group axis has one row a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.job import Job

Members = NDArray[np.int64]
Figures = NDArray[np.float64]


def members_in_stage(job: Job, axis: str) -> Members:
    """Return the groups of an axis within one stage, as places in it, (group, member)."""
    grid = np.arange(job.ranks_of_stage).reshape(job.dp, job.cp, job.tp)
    flat, experts = grid.reshape(-1), job.ep if job.ep > 1 else job.tp
    groups = {
        "tp": grid.reshape(-1, job.tp),
        "cp": grid.transpose(0, 2, 1).reshape(-1, job.cp),
        "dp": grid.transpose(1, 2, 0).reshape(-1, job.dp),
        "dp_cp": grid.transpose(2, 0, 1).reshape(job.tp, -1),
        "tp_cp": grid.reshape(job.dp, -1),
        "tp_dp": grid.transpose(1, 0, 2).reshape(job.cp, -1),
        "tp_dp_cp": grid.reshape(1, -1),
        "tp_ep": flat.reshape(-1, experts),
        "expt_dp": flat.reshape(-1, experts).T.copy(),
        "ep": flat.reshape(-1, job.ep),
        "expt_tp": grid.reshape(-1, 1 if job.ep > 1 else job.tp),
    }
    return groups[{"dp_cp_ag": "dp_cp"}.get(axis, axis)]


def size_of(job: Job, axis: str) -> int:
    """Return how many members a group of an axis within a stage has; 1 where none is used."""
    if axis == "expt_dp" and not job.experts:
        return 1
    return int(members_in_stage(job, axis).shape[1])


def members_across(job: Job, axis: str) -> Members:
    """Return the groups of an axis that crosses stages, as global ranks, (group, member)."""
    grid = np.arange(job.num_ranks).reshape(job.pp, job.dp * job.cp, job.tp)
    if axis == "pp":
        return grid.transpose(1, 2, 0).reshape(-1, job.pp)
    if axis == "embd":
        ends = grid[[0, -1]] if job.pp > 1 else grid
        return ends.transpose(1, 2, 0).reshape(-1, len(ends))
    if axis == "mp":
        return grid.transpose(1, 0, 2).reshape(job.dp * job.cp, -1)
    return grid.reshape(1, -1)


@dataclass(frozen=True)
class Ways:
    """What a byte takes on the way of each member of a group, s: within its host, and through its
    network card; and what any message of the group takes at least.
    """

    members: Members  # as numbers in the figures that are given, (group, member)
    link_s: Figures
    nic_s: Figures
    least_s: Figures
    rows: Members  # the group of each number

    @property
    def size(self) -> int:
        """Return how many ranks a group has."""
        return int(self.members.shape[1])

    def gathered(self, values: Figures) -> Figures:
        """Return the largest value of each group for each of its members; (…, rank) in and out."""
        return np.asarray(np.maximum.reduce(values[..., self.members], axis=-1)[..., self.rows])


def ways_of(job: Job, members: Members, ranks: Members) -> Ways:
    """Return the ways of groups; `ranks` are the global ranks of the numbers in `members`.

    A ring through several hosts uses the cards of all members that it has on a host: each carries
    an equal share of what the host sends.
    """
    hosts = job.hosts[ranks][members]
    machine = job.hardware
    link, nic, least = (np.zeros(len(ranks)) for _ in range(3))
    rows = np.zeros(len(ranks), dtype=np.int64)
    for number, (row, places) in enumerate(zip(hosts, members, strict=True)):
        rows[places] = number
        own = (row[:, None] == row[None, :]).sum(axis=1)
        crosses = len(set(row.tolist())) > 1
        link[places] = np.where(own > 1, 1 / machine.link_bytes_per_s, 0.0)
        nic[places] = 1 / machine.nic_bytes_per_s / own if crosses else 0.0
        steps = np.log2(max(2, len(row)))
        least[places] = (14e-6 + 9e-6 * steps) if crosses else 7e-6 + 3e-6 * steps
    return Ways(members, link, nic, least, rows)


MOVED: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: float(n - 1),
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
"""How many times its payload a member sends, by operation and size of the group."""
