"""The machines of this ground: chips that differ and wander, what ails them, and their network.

What ails a unit is a `Trouble`: what it slows, how much, and when. The network is a fluid: every
flow puts its bytes on some resources (either direction of NICs, and of the core between two halves
of the hosts), a resource is shared evenly by the flows upon it, and a flow is as fast as its
narrowest share lets it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.fleet.jobs import MS, Job

Floats = NDArray[np.float64]
SECOND = 1e9
_GOLDEN = 0.6180339887


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One thing that slows some ranks: a fault of hardware, or the job's own nature.

    `period_ns` and `share`: bursts that cover this share of the time. `on_iterations` of every
    `of_iterations` have it. It takes `ramp_iterations` to reach its factor.
    """

    kind: str
    ranks: tuple[int, ...]
    factor: float = 1.0
    first_iteration: int = 1
    last_iteration: int = 0
    period_ns: float = 0.0
    share: float = 1.0
    on_iterations: int = 0
    of_iterations: int = 0
    ramp_iterations: int = 0
    turn: int = 0
    turns: int = 0  # by turns: in each iteration another one of so many has it

    def strength(self, iteration: int, time_ns: float) -> float:
        """Return how many times slower what it concerns is at a moment of an iteration."""
        if iteration < self.first_iteration or 0 < self.last_iteration < iteration:
            return 1.0
        since = iteration - self.first_iteration
        if self.of_iterations and since % self.of_iterations >= self.on_iterations:
            return 1.0
        if self.turns and crc32(b"%d" % (iteration * 977)) % self.turns != self.turn:
            return 1.0
        if self.period_ns:
            number, place = divmod(time_ns / self.period_ns, 1.0)
            begin = number * _GOLDEN % 1.0 * (1 - self.share)
            if not begin <= place < begin + self.share:
                return 1.0
        if self.ramp_iterations:
            return 1 + (self.factor - 1) * min(1.0, (since + 1) / self.ramp_iterations)
        return self.factor


ARITHMETIC = ("gpu_clock", "power_brake", "hot_host", "uniform", "moving")
MEMORY = ("hbm",)
BOTH = ("stolen_gpu",)
PCIE = ("pcie",)
LOCAL_LINK = ("nvlink",)
REMOTE_LINK = ("nic", "nic_flap", "uplink", "slow_network")
HOST = ("host_cpu", "host_memory")
LOADING = ("loader", "storage", "host_memory", "file_server")
DATA = ("long_sequences", "long_by_turns")
EXPERTS = ("hot_expert", "moving_expert")


class Machines:
    """Every draw of one job's hardware, the same with and without a trouble."""

    def __init__(self, job: Job, seed: int, troubles: tuple[Trouble, ...]) -> None:
        draws = np.random.default_rng(seed)
        ranks, hosts = job.num_ranks, job.num_hosts
        self._draws_of_rank = [np.random.default_rng((seed, rank)) for rank in range(ranks)]
        self.chips = np.exp(job.chip_spread * draws.uniform(-0.5, 0.5, ranks))
        seconds = 1200
        shared = _wander(draws, hosts, seconds, tau_s=150.0)
        own = _wander(draws, ranks, seconds, tau_s=60.0)
        of_host = [job.host_of(rank) for rank in range(ranks)]
        warming = 1 - 0.015 * np.exp(-np.arange(seconds) / 40.0)  # a cold chip clocks higher
        wander = 1 + job.clock_wander * (0.6 * shared[of_host] + 0.8 * own)
        self._clocks: list[list[float]] = (
            self.chips[:, None] * wander * (warming if job.on_gpus else 1)
        ).tolist()
        self.hosts_slowness = np.exp(draws.normal(0, 0.04, hosts))[of_host].tolist()
        self._troubles = [self._of_rank(troubles, rank) for rank in range(ranks)]

    @staticmethod
    def _of_rank(troubles: tuple[Trouble, ...], rank: int) -> dict[str, list[Trouble]]:
        found: dict[str, list[Trouble]] = defaultdict(list)
        for each in troubles:
            if rank in each.ranks:
                found[each.kind].append(each)
        return dict(found)

    def draws_of(self, rank: int) -> np.random.Generator:
        """Return a rank's own source of chance."""
        return self._draws_of_rank[rank]

    def ails(self, rank: int, kinds: Iterable[str]) -> tuple[Trouble, ...]:
        """Return a rank's troubles of some kinds."""
        mine = self._troubles[rank]
        return tuple(one for kind in kinds for one in mine.get(kind, ()))

    def clock(self, rank: int, time_ns: float) -> float:
        """Return how much slower than the ideal chip this one multiplies, left to itself."""
        seconds = self._clocks[rank]
        return seconds[min(int(time_ns / SECOND), len(seconds) - 1)]


def strength(troubles: tuple[Trouble, ...], iteration: int, time_ns: float) -> float:
    """Return how many times slower some troubles together make it."""
    total = 1.0
    for one in troubles:
        total *= one.strength(iteration, time_ns)
    return total


def _wander(draws: np.random.Generator, count: int, length: int, *, tau_s: float) -> Floats:
    """Return Ornstein-Uhlenbeck paths of unit spread, one value a second."""
    kept = float(np.exp(-1 / tau_s))
    steps = draws.normal(0, np.sqrt(1 - kept**2), (length, count))
    path = np.empty((length, count))
    value = draws.normal(0, 1, count)
    for second in range(length):
        value = kept * value + steps[second]
        path[second] = value
    return path.T


@dataclass(eq=False, kw_only=True)
class Flow:
    """Bytes under way: what they demand of each resource, and how much of them is left (1 to 0)."""

    demands: list[tuple[int, float]]  # (resource, ns that it would take alone)
    done: Callable[[float], None]
    left: float = 1.0
    rate: float = 0.0
    updated: float = 0.0
    version: int = field(default=0)


class Network:
    """The fabric between hosts, and the order of its events."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Flow, int]] = []
        self._flows: dict[int, dict[Flow, None]] = defaultdict(dict)
        self._number = 0

    def start(
        self, time_ns: float, demands: list[tuple[int, float]], done: Callable[[float], None]
    ) -> None:
        """Let a flow begin at a time that is not past yet; `done` gets the time of its end."""
        self._push(time_ns, Flow(demands=demands, done=done, updated=-1.0), 0)

    def _push(self, time_ns: float, flow: Flow, version: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_ns, self._number, flow, version))

    def advance(self) -> bool:
        """Let the next thing happen; False when there is nothing left."""
        while self._events:
            time_ns, _, flow, version = heapq.heappop(self._events)
            if version != flow.version:
                continue
            if flow.updated < 0:
                self._begin(flow, time_ns)
            else:
                self._end(flow, time_ns)
            return True
        return False

    def _begin(self, flow: Flow, time_ns: float) -> None:
        flow.updated = time_ns
        for resource, _ in flow.demands:
            self._flows[resource][flow] = None
        self._share_anew(flow, time_ns)

    def _end(self, flow: Flow, time_ns: float) -> None:
        for resource, _ in flow.demands:
            del self._flows[resource][flow]
        self._share_anew(flow, time_ns)
        flow.done(time_ns)

    def _share_anew(self, cause: Flow, time_ns: float) -> None:
        """Give all flows that share a resource with this one the rate that they have from now."""
        touched = {each: None for resource, _ in cause.demands for each in self._flows[resource]}
        for flow in touched:
            flow.left -= (time_ns - flow.updated) * flow.rate
            flow.updated = time_ns
            flow.rate = 1 / max(
                alone * len(self._flows[resource]) for resource, alone in flow.demands
            )
            flow.version += 1
            self._push(time_ns + max(flow.left, 0.0) / flow.rate, flow, flow.version)


_SLEW = 500e-6  # how fast NTP moves a clock that stands wrong


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """What a host's clock shows: an offset, a drift, and perhaps a correction by NTP.

    A tracer reads the monotonic clock, which NTP never sets, but lets run faster or slower.
    """

    offset_ns: float
    drift_ppm: float
    corrected_at_ns: float = 0.0
    correction_ns: float = 0.0

    def shown(self, time_ns: float) -> float:
        """Return what the clock shows at a true time."""
        slewed = min(max(time_ns - self.corrected_at_ns, 0.0) * _SLEW, abs(self.correction_ns))
        sign = 1 if self.correction_ns > 0 else -1
        return time_ns * (1 + self.drift_ppm * 1e-6) + self.offset_ns + sign * slewed


def host_clocks(job: Job, seed: int) -> list[HostClock]:
    """Return the clocks of a job's hosts; NTP corrects one in five while it is watched."""
    draws = np.random.default_rng((seed, 77))
    return [
        HostClock(
            offset_ns=float(draws.normal(0, 4 * MS)),
            drift_ppm=float(draws.normal(0, 8)),
            corrected_at_ns=float(draws.uniform(2, 20)) * SECOND,
            correction_ns=float(draws.normal(0, 0.5 * MS)) if draws.random() < 0.2 else 0.0,
        )
        for _ in range(job.num_hosts)
    ]
