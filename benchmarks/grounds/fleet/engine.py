"""Let a job run on its machines, event by event.

Every rank is a coroutine (`trainer.Rank`) that does what a trainer does. It runs on until it needs
the end of a communication that is not over yet, and is parked there. Only bytes between hosts need
an order in time: they are flows of the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import numpy as np

from benchmarks.grounds.fleet.hardware import Network
from benchmarks.grounds.fleet.jobs import US, Job


class Participant(Protocol):
    """One rank, as far as its meetings with others go."""

    @property
    def trainer(self) -> Trainer:
        """Return what it does, up to where it must wait."""
        ...


@dataclass(eq=False, slots=True)
class Meeting:
    """A communication: who has come, and when it is over (None as long as that is open)."""

    ranks: tuple[int, ...]
    op: str
    noise: float
    before: Meeting | None = None  # of the same communicator, which it cannot overtake
    missing: int = 1
    latest: float = 0.0
    size: float = 0.0
    demand: float = 1.0  # how many times longer its bytes take than on sound links
    end: float | None = None
    waiting: list[Participant] = field(default_factory=list)
    followers: list[Meeting] = field(default_factory=list)


Trainer = Generator[Meeting, None, None]
Key = tuple[object, ...]
_SMALL_BYTES = 1 << 16
_TIMES_MOVED = {"all_reduce": 2.0}


class Exchange:
    """All communications of a run: who waits for whom, and for how long."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        self._network = Network()
        self._meetings: dict[Key, Meeting] = {}
        self._newest: dict[object, Meeting] = {}
        self._ready: deque[Participant] = deque()
        spread = 0.02 if job.on_gpus else 0.25
        self._noise: list[float] = np.exp(
            np.random.default_rng((seed, 5)).normal(0, spread, 4096)
        ).tolist()

    def let(self, ranks: Iterable[Participant]) -> None:
        """Let ranks do what they do, to the end."""
        self._ready.extend(ranks)
        while True:
            while self._ready:
                rank = self._ready.popleft()
                meeting = next(rank.trainer, None)
                if meeting is None:
                    continue
                if meeting.end is None:
                    meeting.waiting.append(rank)
                else:
                    self._ready.append(rank)
            if not self._network.advance():
                return

    def join(
        self, key: Key, ranks: tuple[int, ...], op: str, *, size: float, arrival: float,
        demand: float,
    ) -> Meeting:  # fmt: skip
        """Let a rank come to a communication; the last one to come sets it off.

        A key begins with the communicator, whose communications follow each other.
        """
        meeting = self._meetings.get(key)
        if meeting is None:
            before = None if op == "message" else self._newest.get(key[0])
            meeting = Meeting(ranks, op, self._noise_of(key), before, len(ranks))
            self._meetings[key] = self._newest[key[0]] = meeting
        meeting.missing -= 1
        meeting.latest = max(meeting.latest, arrival)
        meeting.size = max(meeting.size, size)
        meeting.demand = max(meeting.demand, demand)
        if not meeting.missing:
            del self._meetings[key]
            before, meeting.before = meeting.before, None
            if before is None or before.end is not None:
                self._set_off(meeting, before.end or 0.0 if before else 0.0)
            else:
                before.followers.append(meeting)
        return meeting

    def broadcast(self, key: Key, *, arrival: float | None) -> Meeting:
        """Let a rank come to a broadcast; only its root, which has an arrival, matters."""
        meeting = self._meetings.setdefault(key, Meeting((), "broadcast", 1.0))
        if arrival is not None:
            self._over(meeting, arrival + (10 * US if self._job.on_gpus else 350 * US))
        return meeting

    def _noise_of(self, key: Key) -> float:
        """Return the same noise for the same communication, whatever ails the job."""
        return self._noise[crc32(repr(key).encode()) % len(self._noise)]

    def _set_off(self, meeting: Meeting, earliest: float) -> None:
        job, start = self._job, max(meeting.latest, earliest)
        remote = job.is_remote(meeting.ranks)
        latency = (25 if remote else 10) * US if job.on_gpus else 350 * US
        moved, noise = _bytes_moved(meeting), meeting.noise
        if not remote or moved < _SMALL_BYTES:
            own = moved / job.chip.nvlink_bytes_per_ns * meeting.demand
            self._over(meeting, start + (latency + own) * noise)
            return
        demands = self._demands(meeting, moved * noise)
        self._network.start(start, demands, lambda time: self._over(meeting, time + latency))

    def _demands(self, meeting: Meeting, moved: float) -> list[tuple[int, float]]:
        """Spread a transfer over the NICs of its members, and over the core where it crosses it.

        A NIC sends as fast as it receives at the same time. A ring does both, a message one at
        each end; a resource is a direction of a NIC, or of the core.
        """
        job = self._job
        alone = moved / job.chip.nic_bytes_per_ns * meeting.demand
        by_host: dict[int, list[int]] = {}
        for rank in meeting.ranks:
            by_host.setdefault(job.host_of(rank), []).append(rank)
        is_message = meeting.op == "message"  # of its ranks the first one sends
        demands = []
        for host, ranks in by_host.items():
            directions = (int(ranks[0] != meeting.ranks[0]),) if is_message else (0, 1)
            for direction in directions:
                if not job.rails:
                    demands.append((2 * (job.num_ranks + host) + direction, alone))
                elif meeting.op == "all_to_all":  # every member sends through its own
                    demands += [(2 * rank + direction, alone) for rank in ranks]
                else:
                    demands += [(2 * rank + direction, alone / len(ranks)) for rank in ranks]
        half = job.num_hosts / 2
        if job.oversubscription > 1 and min(by_host) < half <= max(by_host):
            width = half * (job.ranks_per_host if job.rails else 1) / job.oversubscription
            through = moved / job.chip.nic_bytes_per_ns / max(width, 1.0)
            up = job.host_of(meeting.ranks[0]) < half
            directions = (-1 if up else -2,) if is_message else (-1, -2)
            demands += [(direction, through) for direction in directions]
        return demands

    def _over(self, meeting: Meeting, end: float) -> None:
        meeting.end = end
        self._ready.extend(meeting.waiting)
        for follower in meeting.followers:
            self._set_off(follower, end)


def _bytes_moved(meeting: Meeting) -> float:
    """Return the bytes that pass each member's link in a ring."""
    count = len(meeting.ranks)
    if meeting.op == "message":
        return meeting.size
    if meeting.op == "all_gather":
        return (count - 1) * meeting.size
    return _TIMES_MOVED.get(meeting.op, 1.0) * meeting.size * (count - 1) / count
