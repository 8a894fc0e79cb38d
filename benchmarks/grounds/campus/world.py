"""What all stages of a job share while it is simulated: chance, troubles, links, mail.

Chance is drawn alike for all variants of a job, whatever its faults do: a variant is the same run
on other chips, or with other faults. Every stage draws from a stream of its own, so that the order
in which stages are advanced is of no importance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from benchmarks.grounds.campus.faults import Effects, Fault, bursts
from benchmarks.grounds.campus.hardware import Floats, drawn_drift, drawn_launchers
from benchmarks.grounds.campus.job import PACKED, PADDED, Job, axes_of
from benchmarks.grounds.campus.links import Route, route_of

NOISY_BURST = 5.0
TYPICAL_DOCUMENT = 0.12  # of a row; documents are lognormal


@dataclass
class Mail:
    """What is known of one message: when each end was ready, and how long it travels."""

    sent: Floats | None = None
    posted: Floats | None = None
    transfer: Floats | None = None
    number: int = 0

    @property
    def is_complete(self) -> bool:
        """Tell whether both ends have come."""
        return self.sent is not None and self.posted is not None

    def arrival(self) -> Floats:
        """Return when it has arrived; both ends must have come."""
        assert self.sent is not None and self.posted is not None and self.transfer is not None
        return np.asarray(np.maximum(self.sent, self.posted) + self.transfer)


@dataclass(kw_only=True)
class World:
    """A job's traced iterations with as many microbatches, in several variants at once."""

    job: Job
    seed: int
    numbers: tuple[int, ...]  # of these iterations
    num_microbatches: int
    chips: Floats  # (variant, rank)
    faults: tuple[Fault, ...]
    variants: tuple[frozenset[int], ...]
    keeps: bool = True
    mail: dict[tuple[str, int, int], Mail] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = axes_of(self.job.layout)
        self.num_passes = 2 * self.num_microbatches * self.job.layout.vpp
        self.effects = Effects(self.faults, self.variants, self.numbers, self.num_passes, self.seed)
        every = self.job.tracing.iterations
        own = [every.index(number) for number in self.numbers]
        self.drift = drawn_drift(self.job.site, self.job.num_ranks, every, self.seed)[own]
        self.launchers = drawn_launchers(self.job.site, self.job.num_ranks, self.seed)
        self._routes: dict[tuple[int, str], Route] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of variants and of iterations."""
        return len(self.variants), len(self.numbers)

    def ranks(self, stage: int) -> range:
        """Return the ranks of a stage."""
        count = self.job.ranks_a_stage
        return range(stage * count, (stage + 1) * count)

    def route(self, stage: int, axis: str) -> Route:
        """Return how the groups of an axis of a stage are linked."""
        if (stage, axis) not in self._routes:
            route = route_of(self.job.site, self.ranks(stage), self.axes[axis])
            self._routes[stage, axis] = route
        return self._routes[stage, axis]

    def rng(self, purpose: int, *more: int) -> np.random.Generator:
        """Return a stream of chance; iterations with other numbers have another one."""
        return np.random.default_rng([self.seed, purpose, self.numbers[0], *more])

    @cached_property
    def busy(self) -> Floats:
        """Return (iteration,): how many times longer what leaves a host takes."""
        amount = self.job.site.busy_network
        if not amount:
            return np.ones(len(self.numbers))
        return 1 + amount * self.rng(31).gamma(1.5, 1 / 1.5, len(self.numbers))

    @cached_property
    def lengths(self) -> tuple[Floats, Floats]:
        """Return how much longer and how much squarer than usual the data are.

        (microbatch, iteration, replica): what grows with the tokens, what grows with their square.
        Context-parallel ranks share the documents of their replica evenly.
        """
        habits, replicas = self.job.habits, self.job.layout.dp
        shape = self.num_microbatches, len(self.numbers), replicas
        rng, spread = self.rng(32), habits.length_spread
        if habits.lengths == PADDED:
            longest = np.exp(spread * rng.standard_normal((*shape, 2))).max(axis=-1)
            linear = np.clip(longest, 0.3, 2.5)
            return linear, linear**2
        if habits.lengths == PACKED:
            documents = np.exp(spread * 2 * rng.standard_normal((*shape, 12))) * TYPICAL_DOCUMENT
            ends = np.minimum(np.cumsum(documents, axis=-1), 1.0)
            pieces = np.diff(ends, axis=-1, prepend=0.0)
            square = (pieces**2).sum(axis=-1) + (1 - ends[..., -1]) ** 2
            return np.ones(shape), square
        return np.ones(shape), np.ones(shape)

    @cached_property
    def noisy(self) -> Floats | None:
        """Return (host, iteration, pass): how many times longer launches take on busy cores."""
        share = self.job.habits.noisy_hosts
        if not share:
            return None
        num_hosts = self.job.site.host_of(self.job.num_ranks - 1) + 1
        shape = len(self.numbers), self.num_passes + 1
        rng = self.rng(33)
        return np.stack(
            [
                1 + bursts(rng, shape, share, NOISY_BURST) * rng.uniform(0.3, 1.5)
                for _ in range(num_hosts)
            ]
        )

    @cached_property
    def storage(self) -> Floats:
        """Return (iteration,): how many times longer the storage takes that all ranks share."""
        share = self.job.habits.loading.storage_stalls
        rng = self.rng(34)
        slow = rng.random(len(self.numbers)) < share
        return np.where(slow, rng.uniform(3.0, 12.0, len(self.numbers)), 1.0)

    def replica_of(self) -> list[int]:
        """Return the data-parallel replica of each rank of a stage."""
        layout = self.job.layout
        return [local // (layout.tp * layout.cp) for local in range(self.job.ranks_a_stage)]
