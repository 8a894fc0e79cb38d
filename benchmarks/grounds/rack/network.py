"""Say how long communication takes once all have come: latency, bytes, and the narrowest link.

Costs are those of NCCL's rings and of Thakur, Rabenseifner and Gropp (IJHPCA 2005): all-reduce
moves 2 (k-1)/k of its bytes over every member's link, reduce-scatter, all-gather and all-to-all
half of that. A group within a host goes over NVLink. One that spans hosts has rings through the
NICs of its members there; each carries an equal part, so that the slowest NIC is everybody's speed,
and a GPU reaches its NIC over PCIe. All ranks of a stage communicate at once, so a member has its
share of the host's NICs only.
"""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.rack.conditions import Conditions
from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.noise import tails, wander
from benchmarks.grounds.rack.places import Groups, Map

_NVLINK_EFFICIENCY = 0.75
_NIC_EFFICIENCY = 0.85
_LATENCY_S = {False: 9e-6, True: 22e-6}
"""Of a step within a host, and between hosts; a ring pipelines most of its steps."""
_SHARE = {
    "all_reduce": 2.0,
    "reduce_scatter": 1.0,
    "all_gather": 1.0,
    "all_to_all": 1.0,
    "broadcast": 1.0,
}
_FIRST_USE_S = 0.03
"""A communicator connects when it is first used."""
_NUM_DRAWN = 4096


class Network:
    """The links of a job under its conditions, iteration by iteration."""

    def __init__(self, job: Job, where: Map, conditions: Conditions) -> None:
        self.job = job
        self.where = where
        self.conditions = conditions
        draws = np.random.default_rng([job.seed, 3])
        shape = (len(job.tracing.iterations), job.num_ranks)
        self._wander = np.exp(np.abs(wander(draws, shape, job.weather.network_wander, 0.6)))
        self._tails = tails(draws, (_NUM_DRAWN,), job.weather.network_tail)
        self._tails = np.maximum(self._tails, 0.985)  # messages are late, hardly ever early
        self._jitter_s = draws.exponential(1.5e-6, (_NUM_DRAWN, 2 * job.num_ranks))
        self._used: set[tuple[str, int]] = set()
        self._known: dict[tuple[str, int, int], Floats] = {}
        self._count = 0
        self.iteration = 0

    def begin(self, iteration: int) -> None:
        """Go to a traced iteration, counted from 0."""
        self.iteration = iteration
        self._known.clear()

    def jitter(self, num_places: int) -> Floats:
        """Return how much later than the first each member leaves a collective."""
        self._count += 1
        found: Floats = self._jitter_s[self._count % _NUM_DRAWN, :num_places]
        return found

    def _tail(self, num: int) -> Floats:
        self._count += 1
        places = (self._count * 61 + 17 * np.arange(num)) % _NUM_DRAWN
        return self._tails[places]

    def collective(
        self,
        groups: Groups,
        op: str,
        size_bytes: float,
        at: tuple[int, int],
        *,
        scale: Floats | None = None,
    ) -> Floats:
        """Return seconds from the last member's begin on, (variant, group).

        `at` is the stage, -1 where groups span stages, and the slice. The size is what a member
        hands in: of an all-gather, its part; `scale` times that, (variant, group).
        """
        stage, moment = at
        whole = size_bytes * groups.size if op == "all_gather" else size_bytes
        k = groups.size
        moved = _SHARE[op] * (k - 1) / k * whole * (1.0 if scale is None else scale)
        latency = np.where(groups.spans_hosts, _LATENCY_S[True], _LATENCY_S[False])
        latency = latency * (1.0 + 0.25 * np.log2(k))
        seconds = latency + moved * self._pace(groups, stage, moment) * self._tail(len(latency))
        if self.job.tracing.iterations[self.iteration] == 1:
            if (groups.axis, stage) not in self._used:
                seconds = seconds + _FIRST_USE_S * self._tail(len(latency))
            self._used.add((groups.axis, stage))
        return np.asarray(seconds, dtype=np.float64)

    def _pace(self, groups: Groups, stage: int, moment: int) -> Floats:
        """Return seconds a byte of each group, (variant, group)."""
        key = (groups.axis, stage, moment)
        if key not in self._known:
            part = self.where.of_stage(stage) if stage >= 0 else slice(None)
            at = (slice(None), part, self.iteration, moment)
            by_nvlink = self._nvlink_s(at)[:, groups.index].max(axis=-1)
            by_nic = self._nic_s(at, part)[:, groups.index].max(axis=-1) / groups.members_a_host
            slower = np.maximum(by_nic, np.where(groups.members_a_host > 1, by_nvlink, 0.0))
            self._known[key] = np.where(groups.spans_hosts, slower, by_nvlink)
        return self._known[key]

    def _nvlink_s(self, at: tuple[slice, slice, int, int]) -> Floats:
        rate = _NVLINK_EFFICIENCY * self.job.rack.chip.nvlink_bytes_s
        return np.asarray(self.conditions.nvlink[at] / rate, dtype=np.float64)

    def _nic_s(self, at: tuple[slice, slice, int, int], part: slice) -> Floats:
        """Return seconds a byte from each place out of its host."""
        rack, busy = self.job.rack, self._wander[self.iteration, part]
        nic = self.conditions.nic[at] * busy / (_NIC_EFFICIENCY * rack.nic_share_bytes_s)
        pcie = self.conditions.pcie[at] / (_NIC_EFFICIENCY * rack.chip.pcie_bytes_s)
        return np.asarray(np.maximum(nic, pcie), dtype=np.float64)

    def message(
        self, sender: int, receiver: int, size_bytes: float | Floats, moment: int
    ) -> Floats:
        """Return seconds of a message from each place of a stage to that of another."""
        ends = [self.where.of_stage(stage) for stage in (sender, receiver)]
        key = ("message", sender * self.job.num_stages + receiver, moment)
        if key not in self._known:
            all_at = [(slice(None), part, self.iteration, moment) for part in ends]
            by_nvlink = np.maximum(*(self._nvlink_s(at) for at in all_at))
            by_nic = np.maximum(
                *(self._nic_s(at, part) for at, part in zip(all_at, ends, strict=True))
            )
            hosts = self.where.hosts
            self._known[key] = np.where(hosts[ends[0]] != hosts[ends[1]], by_nic, by_nvlink)
        tail = self._tail(self.job.ranks_a_stage)
        latency = _LATENCY_S[True] + size_bytes * self._known[key] * tail
        return np.asarray(latency, dtype=np.float64)

    def copy(self, size_bytes: float, places: slice, moment: int) -> Floats:
        """Return seconds of a copy between device and host."""
        slow = self.conditions.pcie[:, places, self.iteration, moment]
        rate = _NIC_EFFICIENCY * self.job.rack.chip.pcie_bytes_s
        return np.asarray(size_bytes * slow / rate, dtype=np.float64)
