"""Let ranks run until they wait for others, and go on once those have come.

Each rank is a generator that yields the meeting it waits for. A meeting is complete when its last
member has arrived; then it begins, after what its communicator has under way, and ends for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks.grounds.yard.network import Network, Ranks

_NOISE_OF_TRANSFERS = 0.02

Running: TypeAlias = Iterator["Meeting"]


@dataclass(eq=False)
class Meeting:
    """A collective or message under way: who has arrived so far, and when it ends (0: not yet)."""

    members: Ranks
    is_rooted: bool
    arrivals: dict[int, float] = field(default_factory=dict)
    noise: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    waiting: list[Running] = field(default_factory=list)

    def end_for(self, rank: int) -> float:
        """Return when a member may go on: of a broadcast, once it and the root have come."""
        if not self.is_rooted:
            return self.end
        begin = max(self.arrivals[rank], self.arrivals[self.members[0]])
        return begin + self.end - self.begin


class Exchange:
    """Where ranks meet during one iteration."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._open: dict[tuple[object, ...], Meeting] = {}
        self._free_from: dict[tuple[object, ...], float] = {}
        self._ready: deque[Running] = deque()

    def join(
        self,
        name: tuple[object, ...],
        number: int,
        rank: int,
        members: Ranks,
        *,
        op: str,
        size_bytes: float,
        arrival: float,
        noise: float,
    ) -> Meeting:
        """Arrive at a communicator's operation of this number; the last to arrive completes it."""
        key = (*name, number)
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = Meeting(members, op == "broadcast")
        meeting.arrivals[rank] = arrival
        if rank == members[0]:
            meeting.noise = noise
        if len(meeting.arrivals) == len(members):
            del self._open[key]
            seconds = (
                self.network.message_s(members[0], members[1], size_bytes)
                if op == "message"
                else self.network.seconds(op, members, size_bytes)
            )
            last = max(meeting.arrivals.values())
            meeting.begin = max(last, self._free_from.get(name, 0.0))
            slower = 1 + _NOISE_OF_TRANSFERS * abs(meeting.noise)
            meeting.end = self._free_from[name] = meeting.begin + seconds * slower
            self._ready.extend(meeting.waiting)
        return meeting

    def run(self, ranks: Sequence[Running]) -> None:
        """Let all ranks finish; RuntimeError where some wait for each other for ever."""
        self._ready.extend(ranks)
        while self._ready:
            running = self._ready.popleft()
            meeting = next(running, None)
            if meeting is None:
                continue
            if meeting.end:
                self._ready.append(running)
            else:
                meeting.waiting.append(running)
        if self._open:
            raise RuntimeError(f"ranks wait for each other at {list(self._open)[:3]}")
