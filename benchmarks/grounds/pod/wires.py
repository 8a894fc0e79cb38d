"""Time what travels: collectives of a stage's groups, and messages between stages.

A group within one NVLink domain uses NVLink. Any other group is held up by its NICs: rings run
through as many of them at once as the group has members in a domain, and go as fast as the slowest.

    all-reduce of N bytes, 16 members, 8 in each domain:   2 x 15/16 x N / (8 x a NIC's speed)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.grounds.pod.faults import Law
from benchmarks.grounds.pod.job import Floats, Ints, Job
from benchmarks.grounds.pod.machine import Machine
from benchmarks.grounds.pod.schedule import Message

NVLINK_LATENCY_S = 9e-6
NIC_LATENCY_S = 24e-6


class Groups:
    """The process groups of one axis among the ranks of one stage.

    Places are split as (outer, member, inner), so that what a group's last member does is a maximum
    over the middle axis.
    """

    def __init__(self, job: Job, stage: int, axis: str, split: tuple[int, int, int]) -> None:
        self.axis, self._split, self._stage = axis, split, stage
        self.size = split[1]
        ranks = job.ranks[stage]
        domains = self._members(ranks[None, :] // job.cluster.domain)[0]
        inside = domains.min(axis=1, keepdims=True) == domains.max(axis=1, keepdims=True)
        first = (domains == domains[:, :1, :]).sum(axis=1, keepdims=True)
        self.inside = self._spread(inside[None])[0]
        self._per_domain = self._spread(first[None])[0]
        cluster = job.cluster
        self._nvlink, self._nic = cluster.nvlink_gbps * 1e9, cluster.nic_gbps * 1e9
        self._uses_nics = not bool(self.inside.all())
        self._uses_nvlink = bool(self.inside.any())

    def _members(self, values: Floats | Ints) -> Floats:
        return np.asarray(values.reshape(values.shape[0], *self._split))

    def _spread(self, values: Floats) -> Floats:
        outer, members, inner = self._split
        wide = np.broadcast_to(values, (values.shape[0], outer, members, inner))
        return wide.reshape(values.shape[0], -1)

    def most(self, values: Floats) -> Floats:
        """Return the largest value of each group at each of its members, (variant, place)."""
        return self._spread(self._members(values).max(axis=2, keepdims=True))

    def mean(self, values: Floats) -> Floats:
        """Return the mean of each group at each of its members, (variant, place)."""
        return self._spread(self._members(values).mean(axis=2, keepdims=True))

    def from_root(self, values: Floats) -> Floats:
        """Return the first member's value at each member, (variant, place)."""
        return self._spread(self._members(values)[:, :, :1, :])

    def seconds(self, op: str, num_bytes: float) -> Floats:
        """Return how long a transfer of `num_bytes` in all takes without disorder, (place,)."""
        count, near = self.size, self._per_domain
        part = (count - 1) / count * (2.0 if op == "all_reduce" else 1.0)
        through = np.minimum(near * self._nic, self._nvlink)
        outside = num_bytes * part / through
        if op == "all_to_all":
            outside = num_bytes * (1 - near / count) / self._nic
        steps = 1 + np.log2(count)
        return np.asarray(
            np.where(
                self.inside,
                num_bytes * part / self._nvlink + steps * NVLINK_LATENCY_S,
                outside + steps * NIC_LATENCY_S,
            )
        )

    def slowness(self, machine: Machine, time_s: Floats) -> Floats:
        """Return how many times longer a transfer takes at a moment, (variant, place)."""
        slow: Floats = np.ones(1)
        if self._uses_nvlink:
            slow = machine.factor(Law.NVLINK, self._stage, time_s)
        if self._uses_nics:
            far = machine.factor(Law.NIC, self._stage, time_s) * machine.congestion
            slow = np.where(self.inside, slow, far)
        return self.most(slow)


class Mail:
    """Match the two ends of messages, and the stages that meet in one collective.

    A stage posts when it arrives and goes on when all others have; ends are then known to all.
    """

    def __init__(self, job: Job, machine: Machine) -> None:
        self._job, self._machine = job, machine
        self._rng = np.random.default_rng([job.seed, 23])
        self._posts: dict[tuple[Message, bool], Floats] = {}
        self._ends: dict[Message, Floats] = {}
        self._meetings: dict[str, dict[int, Floats]] = {}

    def begin(self) -> None:
        """Forget an iteration that is over."""
        self._posts.clear()
        self._ends.clear()
        self._meetings.clear()

    def post(self, message: Message, time_s: Floats, *, sends: bool) -> None:
        """Note that an end of a message has arrived."""
        self._posts[message, sends] = time_s

    def is_known(self, message: Message) -> bool:
        """Tell whether both ends have arrived."""
        return (message, True) in self._posts and (message, False) in self._posts

    def end_of(self, message: Message, num_bytes: int) -> Floats:
        """Return when a message has been received, (variant, place)."""
        if message not in self._ends:
            start = np.maximum(self._posts[message, True], self._posts[message, False])
            self._ends[message] = start + self._seconds(message, num_bytes, start)
        return self._ends[message]

    def _seconds(self, message: Message, num_bytes: int, start: Floats) -> Floats:
        job, machine = self._job, self._machine
        ends = (message.sender, message.receiver)
        first, second = (job.ranks[stage] // job.cluster.domain for stage in ends)
        near = first == second
        slow = [
            np.maximum(*(machine.factor(law, stage, start) for stage in ends))
            for law in (Law.NVLINK, Law.NIC)
        ]
        noise = np.exp(job.disorder.network_sigma * self._rng.standard_normal(job.stage_size))
        nvlink, nic = job.cluster.nvlink_gbps * 1e9, job.cluster.nic_gbps * 1e9
        inside = (num_bytes / nvlink + NVLINK_LATENCY_S) * slow[0]
        outside = (num_bytes / nic + NIC_LATENCY_S) * slow[1] * machine.congestion
        return np.asarray(np.where(near, inside, outside) * noise)

    def arrive(self, name: str, stage: int, time_s: Floats) -> None:
        """Note that a stage has come to a collective of several stages."""
        self._meetings.setdefault(name, {})[stage] = time_s

    def arrived(self, name: str, stages: Sequence[int]) -> bool:
        """Tell whether all stages have come."""
        return all(stage in self._meetings.get(name, {}) for stage in stages)

    def last_of(self, name: str, over: str) -> Floats:
        """Return when the last member came, (variant, place): of all ranks, or of a place."""
        times = np.stack(list(self._meetings[name].values()))
        last = times.max(axis=0)
        if over == "world":
            last = np.broadcast_to(last.max(axis=1, keepdims=True), last.shape)
        elif over == "mp":
            tp = self._job.layout.tp
            wide = last.reshape(last.shape[0], -1, tp).max(axis=2, keepdims=True)
            last = np.broadcast_to(wide, (*wide.shape[:2], tp)).reshape(last.shape)
        return np.asarray(last)

    def slowest(self, time_s: Floats, num_bytes: int, stages: Sequence[int]) -> Floats:
        """Return a transfer's time between the same places of stages, as fast as the slowest."""
        machine, cluster = self._machine, self._job.cluster
        domains = self._job.ranks[list(stages)] // cluster.domain
        near = domains.min(axis=0) == domains.max(axis=0)
        nvlink, nic = (
            np.stack([machine.factor(law, each, time_s) for each in stages]).max(axis=0)
            for law in (Law.NVLINK, Law.NIC)
        )
        inside = (2 * num_bytes / (cluster.nvlink_gbps * 1e9) + 3 * NVLINK_LATENCY_S) * nvlink
        outside = (2 * num_bytes / (cluster.nic_gbps * 1e9) + 3 * NIC_LATENCY_S) * nic
        return np.asarray(np.where(near, inside, outside * machine.congestion))
