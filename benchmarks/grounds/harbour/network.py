"""Say how long a transfer takes when everybody is there: rings, trees, and the slowest link.

A ring of k ranks moves S bytes in k - 1 steps a direction, each at the speed of its slowest link
(Thakur, Rabenseifner and Gropp 2005); for few bytes a tree with 2 log2 k steps is quicker, and the
quicker one is taken, as NCCL does. Between hosts a group has the NICs of its own ranks: ranks share
the NICs of a host evenly. A finding about a link is fair if it names any unit whose slowness would
slow the same transfers (`suspects`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from benchmarks.grounds.harbour.hardware import Array
from benchmarks.grounds.harbour.jobs import Job
from benchmarks.grounds.harbour.trouble import Conditions

_LATENCY_WITHIN_S = 4e-6  # a step over NVLink, kernel included
_LATENCY_BETWEEN_S = 13e-6  # a step over NIC and switch
_LEAST_S = 9e-6  # a kernel of NCCL that moves nothing


def blocks(job: Job, axis: str) -> tuple[tuple[int, ...], int]:
    """Return the shape of a stage's ranks in which one direction is the axis, and that direction.

    Ranks of a stage are laid out dp × cp × tp; expert-parallel groups are neighbours.
    """
    size = job.stage_size
    if axis == "ep":
        return (size // job.ep, job.ep), 1
    if axis == "expt_dp":
        return (size // job.ep, job.ep), 0
    if axis == "dp_cp":
        return (job.dp * job.cp, job.tp), 0
    if axis == "cp":
        return (job.dp, job.cp, job.tp), 1
    return (size // job.tp, job.tp), 1


def members(job: Job, axis: str, stage: int) -> list[tuple[int, ...]]:
    """Return the groups of an axis in a stage, global ranks."""
    shape, direction = blocks(job, axis)
    ranks = np.arange(job.stage_size).reshape(shape) + stage * job.stage_size
    rows = np.moveaxis(ranks, direction, -1).reshape(-1, shape[direction])
    return [tuple(row) for row in rows.tolist()]


def worst(job: Job, axis: str, values: Array) -> Array:
    """Return for each rank of a stage the largest value in its group, (iteration, rank)."""
    shape, direction = blocks(job, axis)
    folded = values.reshape(len(values), *shape)
    most = folded.max(axis=direction + 1, keepdims=True)
    return np.broadcast_to(most, folded.shape).reshape(values.shape)


def group_size(job: Job, axis: str) -> int:
    """Return the number of members of a group of an axis."""
    shape, direction = blocks(job, axis)
    return shape[direction]


class Network:
    """Tell how long collectives and messages take, in each iteration and on each rank."""

    def __init__(self, job: Job, felt: Conditions) -> None:
        self._job = job
        self._felt = felt
        self._known: dict[tuple[str, int], tuple[Array, float]] = {}

    def collective_s(self, op: str, axis: str, stage: int, size_bytes: float) -> Array:
        """Return how long an operation takes; `size_bytes` is all that a member ends up with (or
        begins with), (iteration, rank of the stage).
        """
        per_byte, latency = self._line(axis, stage)
        count = group_size(self._job, axis)
        share = (count - 1) / count
        if op == "broadcast":
            return _LEAST_S + latency * math.log2(count) + size_bytes * per_byte
        turns = 2 if op == "all_reduce" else 1
        ring = turns * ((count - 1) * latency + share * size_bytes * per_byte)
        tree = turns * (math.log2(count) * latency + size_bytes * per_byte)
        return _LEAST_S + np.minimum(ring, tree)

    def message_s(self, sender: int, size_bytes: float, receiver: int) -> Array:
        """Return how long a message between two stages takes, (iteration, rank of a stage)."""
        size = self._job.stage_size
        ends = [slice(stage * size, (stage + 1) * size) for stage in (sender, receiver)]
        per_byte = np.empty((len(self._felt.nic), size))
        for place in range(size):
            one, other = sender * size + place, receiver * size + place
            within = self._job.host_of(one) == self._job.host_of(other)
            felt = self._felt.link if within else self._felt.nic
            slow = np.maximum(felt[:, ends[0].start + place], felt[:, ends[1].start + place])
            per_byte[:, place] = slow / self._speed(within) * self._between_pair((one, other))
        return _LEAST_S + _LATENCY_BETWEEN_S + size_bytes * per_byte

    def whole_s(self, count: int) -> float:
        """Return how long a few bytes take to be reduced over `count` ranks."""
        return _LEAST_S + 2 * _LATENCY_BETWEEN_S * math.log2(max(2, count))

    def _speed(self, within: bool) -> float:
        site = self._job.site
        shared = site.nic_bytes_s * site.num_nics / site.ranks_per_host
        return self._job.chip.link_bytes_s if within else shared

    def _line(self, axis: str, stage: int) -> tuple[Array, float]:
        """Return seconds a byte of each rank's group, and the latency of a step."""
        if (axis, stage) not in self._known:
            self._known[axis, stage] = self._measured(axis, stage)
        return self._known[axis, stage]

    def _measured(self, axis: str, stage: int) -> tuple[Array, float]:
        job, first = self._job, stage * self._job.stage_size
        per_byte = np.empty((len(self._felt.nic), job.stage_size))
        latency = _LATENCY_WITHIN_S
        for ranks in members(job, axis, stage):
            hosts = {job.host_of(rank) for rank in ranks}
            slow = self._felt.link[:, list(ranks)].max(axis=1) / self._speed(True)
            if len(hosts) > 1:
                latency = _LATENCY_BETWEEN_S
                own = max(1, len(ranks) // len(hosts))  # its ranks on a host, with a NIC each
                nic = self._felt.nic[:, list(ranks)].max(axis=1)
                slow = np.maximum(slow, nic / (self._speed(False) * own))
            per_byte[:, np.array(ranks) - first] = (slow * self._between_pair(ranks))[:, None]
        return per_byte, latency

    def _between_pair(self, ranks: Iterable[int]) -> Array:
        """Return how many times slower transfers are that need the link of a slow pair."""
        slow = np.ones(len(self._felt.nic))
        for pair, factor in self._felt.pairs:
            if set(pair) <= set(ranks):
                slow = slow * factor
        return slow


def _lines(job: Job) -> list[tuple[int, ...]]:
    """Return every group that exchanges more than a few bytes: collectives and neighbours."""
    axes = [axis for axis in ("tp", "cp", "ep", "dp_cp") if group_size(job, axis) > 1]
    found = [
        group for stage in range(job.pp) for axis in axes for group in members(job, axis, stage)
    ]
    size = job.stage_size
    neighbours = [(p, (p + 1) % job.pp) for p in range(job.pp if job.vpp > 1 else job.pp - 1)]
    found += [(a * size + one, b * size + one) for a, b in neighbours for one in range(size)]
    return found


def suspects(job: Job, kind: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return all ranks that one may name for a slow link: of every unit that slows the same lines.

    Units are hosts (`nic`), rails (`rail`), ranks (`nvlink`) or the pair itself.
    """
    if kind == "pair":
        return ranks
    lines = _lines(job)
    within = kind == "nvlink"

    def slowed(unit: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
        return frozenset(
            line
            for line in lines
            if set(line) & set(unit) and (len({job.host_of(one) for one in line}) == 1) == within
        )

    per_host = job.site.ranks_per_host
    if kind == "nic":
        units = [job.ranks_of_host(host) for host in range(-(-job.num_ranks // per_host))]
    elif kind == "rail":
        units = [tuple(range(place, job.num_ranks, per_host)) for place in range(per_host)]
    else:
        units = [(rank,) for rank in range(job.num_ranks)]
    target = slowed(ranks)
    return tuple(sorted({rank for unit in units if slowed(unit) == target for rank in unit}))
