"""The ranks of a stage, which do the same things: how far each host and each device has come.

A host launches kernels, one after the other; a device does each when it was launched and the ones
before are done. So a device that is ahead of its host waits for launches, which is called
host-bound, and a host that is ahead has its launches queued up. All times are of (variant,
iteration, rank) from the moment at which the iteration before was over for everybody.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.grounds.campus.hardware import Floats
from benchmarks.grounds.campus.model import Cost
from benchmarks.grounds.campus.world import World
from megascan.schema import Track

POOL = 48  # how many draws of noise are made at once
CLOCK_ON_MEMORY = 0.15  # how much of a lower clock is felt by what is bound by memory
COLLECTIVE_LAUNCHES = 3  # kernels' worth of a host's time for one collective
LEAVING_S = 1.5e-6  # by which members leave a collective at different times


@dataclass(frozen=True)
class Mark:
    """When a device passed a place of its program, and when its host launched that."""

    at: Floats
    launched: Floats


@dataclass(kw_only=True)
class Span:
    """One span of all ranks of a stage in all iterations, of the first variant."""

    kind: str
    name: str
    track: int
    start: Floats  # (iteration, rank)
    end: Floats
    launched: Floats | None
    args: dict[str, Any]
    axis: str = ""
    peer: int = -1  # stage

    def shifted(self, by: Floats) -> Span:
        """Return it later by (iteration,) seconds."""
        moved = None if self.launched is None else self.launched + by[:, None]
        return Span(
            kind=self.kind, name=self.name, track=self.track, start=self.start + by[:, None],
            end=self.end + by[:, None], launched=moved, args=self.args, axis=self.axis,
            peer=self.peer,
        )  # fmt: skip


@dataclass(kw_only=True)
class Rare:
    """A span that some ranks have in some iterations."""

    kind: str
    name: str
    place: int  # of the iteration
    rank: int
    start: float
    end: float


@dataclass(kw_only=True)
class Crew:
    """State of the ranks of one stage."""

    world: World
    stage: int
    start: Floats
    salt: int = 0
    spans: list[Span] = field(default_factory=list)
    rare: list[Rare] = field(default_factory=list)
    lanes: dict[str, Floats] = field(default_factory=dict)
    sequences: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ranks = self.world.ranks(self.stage)
        self.size = len(self.ranks)
        self.host, self.device = self.start.copy(), self.start.copy()
        self.own = np.zeros_like(self.start)
        self._rng = self.world.rng(41 + self.salt, self.stage)
        self._pool: Floats = np.empty((0, 0, 0))
        self._next = POOL
        self.where: dict[str, Any] = {}
        self.linear: Floats | float = 1.0
        self.square: Floats | float = 1.0
        self.replicas = self.world.replica_of()
        self.contention = 1.0
        self.begin_pass(0)

    # Chance and troubles

    def noise(self) -> Floats:
        """Return (3, iteration, rank): noise of a kernel's time, of a launch, of a transfer."""
        if self._next >= POOL:
            site = self.world.job.site
            shape = POOL, 3, self.world.shape[1], self.size
            deviates = self._rng.standard_normal(shape)
            scale = np.array([site.noise, site.host_jitter, site.link_noise])
            self._pool = np.exp(np.clip(deviates, -4, 4) * scale[:, None, None])
            tails = self._rng.random((POOL, *shape[2:])) < site.tail_share
            self._pool[:, 0] += tails * self._rng.exponential(0.6, tails.shape)
            self._next = 0
        self._next += 1
        return np.asarray(self._pool[self._next - 1])

    def begin_pass(self, number: int) -> None:
        """Take over what holds during a pass: clocks, memory, hosts, links."""
        world, ranks = self.world, self.ranks
        factor = world.effects.factor
        own = slice(ranks.start, ranks.stop)
        chips = world.chips[:, None, own] * world.drift[:, own]
        self.clock = chips * factor("clock", number, ranks)
        self.memory = (1 + CLOCK_ON_MEMORY * (self.clock - 1)) * factor("memory", number, ranks)
        self.launching = world.launchers[own] * factor("launch", number, ranks)
        if world.noisy is not None:
            hosts = [world.job.site.host_of(rank) for rank in ranks]
            busy = world.noisy[hosts, :, min(number, world.num_passes)].T
            self.launching = self.launching * busy
        self.nic = factor("nic", number, ranks) * np.ones(self.start.shape)
        self.nvlink = factor("nvlink", number, ranks) * np.ones(self.start.shape)

    def pause(self, seconds: Floats, name: str = "") -> None:
        """Have hosts pause for (variant, iteration, rank) seconds; collections are recorded."""
        pauses = np.broadcast_to(seconds, self.host.shape)
        begun = self.host
        self.host = self.host + pauses
        if name and self.world.keeps and self.world.job.tracing.is_full:
            for place, local in np.argwhere(pauses[0] > 0):
                self.rare.append(
                    Rare(
                        kind="gc", name=name, place=int(place), rank=self.ranks[int(local)],
                        start=float(begun[0, place, local]),
                        end=float(self.host[0, place, local]),
                    )
                )  # fmt: skip

    # What devices do

    def mark(self) -> Mark:
        """Return where the devices are: idle ones pass a mark when it is launched."""
        return Mark(np.maximum(self.device, self.host), self.host)

    def compute(
        self, cost: Cost, times: float = 1.0, load: Floats | float = 1.0, counts: bool = True
    ) -> None:
        """Have the devices do a part so many times; `load` multiplies what grows with tokens."""
        noise = self.noise()
        launches = (cost.kernels * max(1.0, times) * self.world.job.site.launch_s) * (
            self.launching * noise[1]
        )
        linear = self.linear * load
        work = (cost.matrix_s * linear + cost.square_s * self.square) * self.clock
        work = (work + cost.memory_s * linear * self.memory) * (
            noise[0] * (times * self.contention)
        )
        begun = self.host + launches / max(1, cost.kernels)
        self.host = self.host + launches
        self.device = np.maximum(np.maximum(self.device, begun) + work, self.host)
        if counts:
            self.own += np.maximum(work, launches)

    def waits_for_device(self) -> None:
        """Have the hosts wait until their devices are done."""
        self.host = np.maximum(self.host, self.device)

    # What they tell each other

    def pace(self, axis: str) -> Floats:
        """Return how many times longer than usual collectives over an axis take."""
        route, lines = self.world.route(self.stage, axis), self.world.axes[axis]
        across = lines.latest(self.nic) * self.world.busy[:, None]
        return np.where(route.crosses, across, lines.latest(self.nvlink))

    def collective(
        self, axis: str, operation: str, num_bytes: float, *, lane: str = "", load: float = 1.0
    ) -> Floats:
        """Do a collective with this payload in all; return its end.

        One with a `lane` is beside what the devices compute, behind the lane's earlier ones.
        """
        lines = self.world.axes[axis]
        if lines.size == 1:
            return self.device
        noise = self.noise()
        launch = COLLECTIVE_LAUNCHES * self.world.job.site.launch_s * self.launching * noise[1]
        self.host = self.host + launch
        begun = np.maximum(self.device, self.host)
        if lane:
            begun = np.maximum(begun, self.lanes.get(lane, begun))
        seconds = self.world.route(self.stage, axis).seconds(operation, num_bytes, lines.size)
        transfer = seconds * load * self.pace(axis) * lines.shared(noise[2])
        end = lines.latest(begun) + transfer + LEAVING_S * np.abs(noise[1] - 1)
        payload = num_bytes / lines.size if operation == "all_gather" else num_bytes
        self.keep_collective(axis, operation, begun, end, num_bytes=payload, lane=lane)
        if lane:
            self.lanes[lane] = end
        else:
            self.device = end
        return np.asarray(end)

    def keep_collective(
        self, axis: str, operation: str, begun: Floats, end: Floats, *, num_bytes: float,
        lane: str = "",
    ) -> None:  # fmt: skip
        """Count a collective, and record it where its axis is seen; `num_bytes` are a rank's."""
        number = self.sequences[axis, operation]
        self.sequences[axis, operation] += 1
        if not self.world.job.records(axis):
            return
        args = {**self.where, "op": operation, "sequence": number}
        args["size_bytes"] = max(1, round(num_bytes))
        if lane or args.get("phase") == "backward":
            args.pop("layer", None)
        track = Track.OVERLAPPED if lane else Track.COMMUNICATION
        mark = Mark(begun, self.host)
        self.keep("collective", operation, mark, end, args=args, track=track, axis=axis)

    def keep(
        self, kind: str, name: str, begin: Mark, end: Floats, *, args: dict[str, Any], track: int,
        axis: str = "", peer: int = -1, launches: bool = True,
    ) -> None:  # fmt: skip
        """Record a span of the first variant."""
        if not self.world.keeps:
            return
        launched = begin.launched[0] if launches and self.world.job.tracing.is_full else None
        self.spans.append(
            Span(
                kind=kind, name=name, track=int(track), start=begin.at[0], end=end[0],
                launched=launched, args=args, axis=axis, peer=peer,
            )
        )  # fmt: skip

    def keep_compute(
        self, name: str, begin: Mark, *, kind: str = "compute", module: bool = True,
        args: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Record a span of compute that ends now; modules are recorded at granularity full."""
        if module and not self.world.job.tracing.is_full:
            return
        given = dict(self.where) if args is None else args
        self.keep(kind, name, begin, self.mark().at, args=given, track=Track.COMPUTE)
