"""Links: which rate each group of ranks gets on switches within hosts and on NICs between them."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.cluster.hardware import Cluster, Floats, shared_finish
from benchmarks.grounds.cluster.jobs import Job

Ints = NDArray[np.int64]


def partition(job: Job, stage: int, axis: str) -> Ints:
    """Return the groups of an axis within a stage, shape (group, member), as global ranks."""
    ranks = stage * job.num_stage_ranks + np.arange(job.num_stage_ranks)
    grid = ranks.reshape(job.dp, job.tp)
    if axis == "tp":
        return grid
    if axis == "ep":
        return grid.reshape(job.dp // job.ep, job.ep, job.tp).swapaxes(1, 2).reshape(-1, job.ep)
    return grid.T  # dp, fsdp


def group_max(job: Job, axis: str, values: Floats) -> Floats:
    """Return for each rank of a stage the largest value of its group."""
    grid = values.reshape(job.dp, job.tp)
    if axis == "tp":
        most = grid.max(axis=1, keepdims=True)
    elif axis == "ep":
        experts = values.reshape(job.dp // job.ep, job.ep, job.tp)
        most = np.broadcast_to(experts.max(axis=1, keepdims=True), experts.shape).reshape(
            grid.shape
        )
    else:
        most = grid.max(axis=0, keepdims=True)
    return np.broadcast_to(most, grid.shape).reshape(-1)


def rates(cluster: Cluster, job: Job, stage: int, axis: str, iteration: int) -> Floats:
    """Return bytes per ns that a ring over each rank's group gets, shape (rank of the stage,).

    Within a host the slowest GPU's switch port counts. Between hosts a ring takes all NICs of its
    members, as fast as the slowest of them, and shares each with the other groups of the stage that
    use it.
    """
    groups = partition(job, stage, axis)
    nvlink, nic = cluster.nvlink(iteration), cluster.nic(iteration)
    crossing = cluster.host_of[groups].min(axis=1) != cluster.host_of[groups].max(axis=1)
    nic_name = cluster.host_of * cluster.machines.gpus_per_host + cluster.nic_of
    used = [np.unique(nic_name[members]) for members in groups[crossing]]
    users = np.bincount(np.concatenate(used), minlength=1) if used else np.zeros(1, dtype=np.int64)
    rate = np.empty(len(groups))
    for number, members in enumerate(groups):
        rate[number] = nvlink[members].min()
        if crossing[number]:
            hosts = cluster.host_of[members]
            num_nics = min(
                len(np.unique(cluster.nic_of[members[hosts == host]])) for host in np.unique(hosts)
            )
            each = (nic[members] / users[nic_name[members]]).min()
            rate[number] = min(rate[number], each * num_nics)
    by_rank = np.empty(job.num_stage_ranks)
    by_rank[groups - stage * job.num_stage_ranks] = rate[:, None]
    return by_rank


def delivered(
    cluster: Cluster,
    source: Ints,
    target: Ints,
    *,
    starts: Floats,
    size_bytes: float,
    iteration: int,
) -> Floats:
    """Return when messages of one size arrive that rank source[i] sends to target[i] at
    starts[i].
    """
    nvlink, nic = cluster.nvlink(iteration), cluster.nic(iteration)
    arrived = starts + size_bytes / np.minimum(nvlink[source], nvlink[target])
    crossing = np.flatnonzero(cluster.host_of[source] != cluster.host_of[target])
    if len(crossing):
        width = cluster.machines.gpus_per_host
        ends = [
            shared_finish(
                starts[crossing], size_bytes, nic[side[crossing]],
                (cluster.host_of * width + cluster.nic_of)[side[crossing]],
            )
            for side in (source, target)
        ]  # fmt: skip
        arrived[crossing] = np.maximum(ends[0], ends[1])
    return arrived
