"""Compute how long transfers take: rings inside a host, and NICs that a host's ranks share.

A ring of n members sends 2 (n - 1)/n of its bytes through its slowest link (Patarasuk and Yuan,
2009), after a latency for each hop. A message or ring that leaves a host gets the part of the
host's NICs that is left by the host's other messages or rings of the same moment, at most one NIC.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from benchmarks.grounds.archive.conditions import Conditions
from benchmarks.grounds.archive.costs import parameters_of
from benchmarks.grounds.archive.job import Job
from benchmarks.grounds.archive.noise import Array, gamma, generator, lognormal

RING_START_US, HOP_US = 11.0, 2.2  # of a collective inside a host
MESSAGE_START_US, NETWORK_HOP_US = 14.0, 9.0
HIDDEN_SHARE = 0.7  # of the gradients' reduction, where it runs beside the last backward pass
ACTIVATION_BYTES, GRADIENT_BYTES = 2.0, 4.0  # bf16, fp32


class Network:
    """Say how long each transfer of a job takes; asked in the same order, with the same noise."""

    def __init__(self, job: Job, conditions: Conditions) -> None:
        self.job = job
        self.conditions = conditions
        self.rng = generator(job.seed, "transfers")
        weather = lognormal(generator(job.seed, "network"), 0.05, (job.num_iterations,))
        self.slow: Array = job.site.congestion * weather * conditions.nic  # (rank, iteration)
        shape = job.shape
        ranks = np.arange(shape.num_ranks).reshape(shape.pp, shape.dp, shape.tp)
        self.ranks = ranks
        self.hosts = ranks // shape.gpus_per_host
        self.message_bytes = int(ACTIVATION_BYTES * job.model.tokens * job.model.hidden)

    def _noise(self, *size: int) -> Array:
        return gamma(self.rng, self.job.site.transfer_cv, size)

    def _share_gbps(self, num_flows: int) -> float:
        """Return what one of a host's flows gets of its NICs, in GB/s."""
        site = self.job.site
        return min(site.nic_gbps / site.nics_per_host, site.nic_gbps / max(num_flows, 1))

    def message_us(self, stage: int, length: Array) -> Array:
        """Return the time of a message between `stage` and the next one, (dp, tp, iteration).

        `length` is that of its microbatch, (dp, iteration).
        """
        here, there = self.hosts[stage], self.hosts[stage + 1]
        leaves = here != there
        flows = Counter(here[leaves].tolist()) + Counter(there[leaves].tolist())
        gbps = np.full(here.shape, self.job.site.chip.pair_gbps)
        for at in zip(*np.nonzero(leaves), strict=True):
            gbps[at] = self._share_gbps(max(flows[int(here[at])], flows[int(there[at])]))
        slow = np.maximum(self.slow[self.ranks[stage]], self.slow[self.ranks[stage + 1]])
        slow = np.where(leaves[..., None], slow, 1.0)
        start = np.where(leaves, NETWORK_HOP_US, 0)[..., None] + MESSAGE_START_US
        moved = self.message_bytes / (gbps * 1e3)
        noise = self._noise(*here.shape, self.job.num_iterations)
        lasts: Array = (start + moved[..., None] * slow * length[:, None, :]) * noise
        return lasts

    def tensor_us(self, stage: int, size_bytes: float, length: Array) -> Array:
        """Return the time of a tensor group's all-reduce, (dp, 1, iteration)."""
        num = self.job.shape.tp
        moved = 2 * (num - 1) / num * size_bytes / (self.job.site.chip.tp_gbps * 1e3)
        link = self.conditions.tp_link[stage]
        start = RING_START_US + HOP_US * num
        noise = self._noise(self.job.shape.dp, self.job.num_iterations)
        lasts: Array = (start + moved * length * link) * noise
        return lasts[:, None, :]

    def small_us(self, num_members: int, leaves_host: bool) -> Array:
        """Return the time of a reduction of a few numbers, (1, 1, iteration)."""
        hop = NETWORK_HOP_US if leaves_host else HOP_US
        lasts = RING_START_US + 2 * hop * np.log2(max(num_members, 1))
        noisy: Array = lasts * self._noise(1, 1, self.job.num_iterations)
        return noisy

    def gradients_us(self, stage: int) -> Array:
        """Return the time of the replicas' gradient reduction, (1, tp, iteration)."""
        shape, num = self.job.shape, self.job.shape.dp
        if num == 1:
            return np.zeros((1, shape.tp, self.job.num_iterations))
        hosts = self.hosts[stage]
        leaves = (hosts != hosts[:1]).any(axis=0)  # (tp,)
        rings = Counter(host for column in hosts.T for host in sorted(set(column.tolist())))
        gbps = self.job.site.chip.tp_gbps
        if leaves.any():
            gbps = min(gbps, *(self._share_gbps(count) for count in rings.values()))
        slow = self.slow[self.ranks[stage]].max(axis=0)  # (tp, iteration)
        slow = np.where(leaves[:, None], slow, 1.0)
        size = GRADIENT_BYTES * parameters_of(self.job, stage)
        moved = 2 * (num - 1) / num * size / (gbps * 1e3)
        hop = NETWORK_HOP_US if leaves.any() else HOP_US
        if self.job.habits.overlaps_gradients:
            moved *= 1 - HIDDEN_SHARE
        noise = self._noise(shape.tp, self.job.num_iterations)
        return ((RING_START_US + 2 * num * hop + moved * slow) * noise)[None]

    def embedding_us(self) -> Array:
        """Return the time in which first and last stage add the gradients of their embeddings."""
        model, shape = self.job.model, self.job.shape
        leaves = self.hosts[0] != self.hosts[-1]
        size = GRADIENT_BYTES * model.vocabulary * model.hidden / shape.tp
        gbps = np.where(leaves, self._share_gbps(leaves.size), self.job.site.chip.pair_gbps)
        slow = np.maximum(self.slow[self.ranks[0]], self.slow[self.ranks[-1]])
        moved = (size / (gbps * 1e3))[..., None] * np.where(leaves[..., None], slow, 1.0)
        noise = self._noise(*leaves.shape, self.job.num_iterations)
        lasts: Array = (MESSAGE_START_US + moved) * noise
        return lasts
