"""Follow one stage's ranks through an iteration: host threads, device streams, waits, spans.

All ranks of a stage run the same program, so an operation is a step on arrays (iteration, rank);
traced iterations stand side by side, as each begins after a reduction over the whole job.

    host thread   launches kernels one by one; it runs ahead of the device until its queue is full
    device        begins an operation when it is launched and the one before has ended, and cannot
                  end it before its last kernel is launched
    collective    begins on each rank by itself, and ends on all when the last has come and the
                  bytes have moved

Times are seconds after the reduction that ended the iteration before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.harbour.hardware import Array, generator
from benchmarks.grounds.harbour.jobs import Job, Work
from benchmarks.grounds.harbour.network import Network, group_size, worst
from benchmarks.grounds.harbour.trouble import Conditions
from megascan.schema import Kind, Track

_QUEUE_KERNELS = 1000  # launches that a CUDA stream takes before the launching thread has to wait
_HICCUP_CHANCE = 0.004  # of an operation's launches to be interrupted at a site that has hiccups
_CROWDED = 1.04  # compute beside a reduction, which takes some of the device's processors
_LEAVING_S = 1.5e-6  # how differently members leave a collective
_WARM_UP = {1: 4.0, 2: 1.3}  # how much longer launches take in a run's first iterations
_SLOW_START = {1: 1.15, 2: 1.02}  # and products, whose kernels are still being chosen


Facts: TypeAlias = Mapping[str, int | str]
"""Arguments of spans that are the same on all ranks of a stage and in all iterations."""
Mark: TypeAlias = tuple[Array, Array]
"""When an event is reached by the device, and when the host has launched it."""


@dataclass(frozen=True)
class Recorded:
    """Hold one operation's spans, of all ranks of a stage in all iterations, in seconds.

    NaN is where there is no span. `axis` and `peer` (a distance in ranks) say with whom it talks.
    """

    kind: Kind
    name: str
    track: Track
    start: Array
    end: Array
    facts: Facts
    launch: Array | None = None
    axis: str = ""
    peer: int = 0


@dataclass(kw_only=True)
class Ranks:
    """Keep the clocks of a stage's ranks, and what was recorded of them."""

    job: Job
    stage: int
    felt: Conditions
    network: Network
    seed: int
    recording: bool = False
    spans: list[Recorded] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = (len(self.job.iterations), self.job.stage_size)
        self.host, self.device, self.talking = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.began = np.zeros(shape)  # of the iteration
        self.own = np.zeros(shape)  # what passes took, less waiting and communication
        self._random = generator(self.seed, f"stage {self.stage}")
        self._queue: deque[tuple[int, Array]] = deque()
        self._num_queued = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        numbers = self.job.iterations
        warming, starting = (
            np.array([[slow.get(number, 1.0)] for number in numbers])
            for slow in (_WARM_UP, _SLOW_START)
        )
        site = self.job.site
        self._launch_s = site.launch_us * 1e-6 * self.felt.launching[:, self.mine] * warming
        self._products = self.felt.products[:, self.mine] * starting
        self._memory = self.felt.memory[:, self.mine]
        self.disturbance = np.zeros(shape)  # how much slower launches are in this microbatch

    @property
    def mine(self) -> slice:
        """Return where the ranks of this stage stand among all ranks."""
        first = self.stage * self.job.stage_size
        return slice(first, first + self.job.stage_size)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (iterations, ranks of the stage)."""
        return self.device.shape[0], self.device.shape[1]

    def normal(self) -> Array:
        """Draw one number for each rank and iteration."""
        return self._random.standard_normal(self.shape)

    def uniform(self) -> Array:
        """Draw one number between 0 and 1 for each rank and iteration."""
        return self._random.random(self.shape)

    def mark(self) -> Mark:
        """Return when an event is reached that the host records now, and when it was launched."""
        return np.maximum(self.device, self.host), self.host

    def _launch(self, kernels: int) -> Mark:
        """Launch kernels; return when the first and the last are launched."""
        site = self.job.site
        noise = np.exp(site.launch_noise_ratio * self.normal())
        took = kernels * self._launch_s * noise * (1 + self.disturbance)
        if site.hiccup_ms:
            lost = site.hiccup_ms / 1000 * self._random.exponential(size=self.shape)
            took = took + np.where(self.uniform() < _HICCUP_CHANCE, lost, 0.0)
        first = self.host + took / kernels
        self.host = self.host + took
        return first, self.host

    def _wait_for_room(self, kernels: int) -> None:
        """Hold the host up while the device's queue is full."""
        self._queue.append((kernels, self.device))
        self._num_queued += kernels
        while self._num_queued > _QUEUE_KERNELS:
            count, ended = self._queue.popleft()
            self._num_queued -= count
            self.host = np.maximum(self.host, ended)

    def compute(self, work: Work, size: Array | float = 1.0) -> None:
        """Run kernels; `size` is how many times the usual tokens they have, (iteration, rank)."""
        first, last = self._launch(work.kernels)
        start = np.maximum(self.device, first)
        products = work.matrix_s * self._products * size
        if work.grows:
            products = products * (1 + work.grows * (np.asarray(size) - 1))
        for burst in self.felt.bursts:
            products = products * burst.at(start, self.mine.start)
        noise = np.exp(self.job.site.kernel_noise_ratio * self.normal())
        took = (products + work.memory_s * self._memory * size) * noise
        took = np.where(start < self.talking, took * _CROWDED, took)
        self.device = np.maximum(start + took, last + took / work.kernels)
        self.own += self.device - start
        self._wait_for_room(work.kernels)

    def think(self, took: Array | float) -> None:
        """Let the host run Python, which takes as much longer as its launches do."""
        self.host = self.host + took * self.felt.launching[:, self.mine]

    def pause(self, took: Array) -> None:
        """Let the host stand still."""
        self.host = self.host + took

    def collective(self, op: str, axis: str, size_bytes: int, facts: Facts) -> None:
        """Run a collective on the stream that computes; groups of one member do nothing."""
        if group_size(self.job, axis) > 1:
            self.device = self._run(op, axis, size_bytes, facts)

    def beside(
        self, op: str, axis: str, size_bytes: int, facts: Facts, *, queued: bool = False
    ) -> Array:
        """Start a collective next to compute; return when it will have ended on each rank.

        Those that are `queued` come one after the other.
        """
        if group_size(self.job, axis) == 1:
            return self.device
        end = self._run(op, axis, size_bytes, facts, after=self.talking if queued else self.device,
                        track=Track.OVERLAPPED)  # fmt: skip
        if queued:
            self.talking = end
        return end

    def _run(
        self, op: str, axis: str, size_bytes: int, facts: Facts, *,
        after: Array | None = None, track: Track = Track.COMMUNICATION,
    ) -> Array:  # fmt: skip
        """Run and record a collective, not before `after`; return when it ends on each rank."""
        launch, _ = self._launch(2)
        start = np.maximum(self.device, launch)
        if after is not None:
            start = np.maximum(start, after)
        count = group_size(self.job, axis)
        moved = size_bytes * count if op == "all_gather" else size_bytes
        noise = worst(self.job, axis, np.abs(self.normal()))  # the same on all members
        took = self.network.collective_s(op, axis, self.stage, moved)
        took = took * np.exp(self.job.site.link_noise_ratio * (noise - 1))
        end = worst(self.job, axis, start) + took + _LEAVING_S * self.uniform()
        number = self.counts[op, axis]
        self.counts[op, axis] += 1
        known = {**facts, "op": op, "sequence": number, "size_bytes": size_bytes}
        self.note(Recorded(Kind.COLLECTIVE, op, track, start, end, known, launch, axis))
        return end

    def wait(self, until: Array) -> None:
        """Let the device stand still until something else has ended."""
        self.device = np.maximum(self.device, until)

    def catch_up(self) -> None:
        """Let the host wait for the device."""
        self.host = np.maximum(self.host, self.device)

    def note(self, span: Recorded) -> None:
        """Keep a span, if anybody wants it."""
        if self.recording:
            self.spans.append(span)

    def note_since(self, begin: Mark, name: str, facts: Facts, kind: Kind = Kind.COMPUTE) -> None:
        """Record the device's time from a mark until now."""
        self.note(Recorded(kind, name, Track.COMPUTE, begin[0], self.device, facts, begin[1]))
