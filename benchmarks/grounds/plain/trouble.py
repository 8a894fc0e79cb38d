"""What goes wrong in a job: which of its times grow, whose, by how much and when.

A trouble multiplies, or adds to, one or two of the things that `Hits` names. The conditions of a
run are the chips and all its troubles; without any they are those of the same job in good health.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.plain.job import Job
from benchmarks.grounds.plain.machine import (
    Floats,
    GroupSet,
    Machine,
    Ranks,
    ring_bytes_per_s,
)

_CLOCK_IN_MEMORY = 0.35
"""How much of a lower clock is felt by work that is bound by memory: caches run by it, too."""


class Hits(StrEnum):
    """What a trouble makes longer."""

    CLOCK = "clock"
    """Products, all in all a pass; work that is bound by memory in part."""
    MEMORY = "memory"
    """Work that is bound by the GPU's memory: norms, the optimizer."""
    LAUNCHES = "launches"
    FETCHES = "fetches"
    """Batches come `extra_s` later."""
    COLLECTIONS = "collections"
    """The host stands still for `extra_s`, at `times` places of an iteration."""
    NVLINK = "nvlink"
    NIC = "nic"
    COPIES = "copies"
    """From the host to the device."""
    LENGTHS = "lengths"
    HEAD = "head"
    EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One cause at work."""

    planted: Planted
    hits: tuple[Hits, ...]
    ranks: tuple[int, ...]
    """Whom it hits; who may be named for it is said by `planted`."""
    extra_s: float = 0.0
    share_of_events: float = 1.0
    """Of fetches, launches or collections that it comes with."""
    period_s: float = 0.0
    """Of bursts, which cover `planted.share_of_time` of it; 0: none."""
    every: int = 1
    """On and off: so many iterations with it, then so many without; 1: always."""

    def holds(self, iteration: int) -> bool:
        """Tell whether it is there in an iteration."""
        planted = self.planted
        begun = iteration >= planted.first_iteration
        ended = bool(planted.last_iteration) and iteration > planted.last_iteration
        is_on = self.every == 1 or (iteration - planted.first_iteration) // self.every % 2 == 0
        return begun and not ended and is_on


class Conditions:
    """By how much everything of a job is longer, in the iteration that it is in."""

    def __init__(self, job: Job, chips: Floats, troubles: Sequence[Trouble] = ()) -> None:
        self._troubles = tuple(troubles)
        self._now = tuple(troubles)
        self._num_ranks = job.num_ranks
        self._masks = [np.isin(np.arange(job.num_ranks), one.ranks) for one in troubles]
        self.chips = chips
        self._steady: dict[Hits, Floats] = {}
        self._bursting: frozenset[Hits] = frozenset()
        self._slowness: dict[float, Floats] = {}
        """What is the same throughout an iteration: without bursts."""

    def begin_iteration(self, iteration: int) -> None:
        """Take up what holds now."""
        self._now = tuple(one for one in self._troubles if one.holds(iteration))
        self._bursting = frozenset(what for one in self._now if one.period_s for what in one.hits)
        self._steady, self._slowness = {}, {}

    def factor(self, what: Hits, moments: Floats) -> Floats:
        """Return by how much something is longer for each rank, at these moments (rank,)."""
        if what not in self._steady:
            self._steady[what] = self._product(what, bursts=False)
        steady = self._steady[what]
        if what not in self._bursting:
            return steady
        return steady * self._product(what, bursts=True, moments=moments)

    def _product(self, what: Hits, *, bursts: bool, moments: Floats | None = None) -> Floats:
        result = np.ones(self._num_ranks)
        for trouble, mask in zip(self._troubles, self._masks, strict=True):
            if trouble not in self._now or what not in trouble.hits:
                continue
            if bool(trouble.period_s) is not bursts:
                continue
            is_hit: NDArray[np.bool_] = mask
            if moments is not None:
                place = moments / trouble.period_s % 1.0
                is_hit = mask & (place < trouble.planted.share_of_time)
            result = np.where(is_hit, result * trouble.planted.factor, result)
        return result

    def slowness(self, moments: Floats, memory_share: float) -> Floats:
        """Return by how much a rank's kernels are longer that spend a share of their time on
        memory.
        """
        if memory_share in self._slowness:
            return self._slowness[memory_share]
        clock, memory = self.factor(Hits.CLOCK, moments), self.factor(Hits.MEMORY, moments)
        in_memory = memory * (1.0 + _CLOCK_IN_MEMORY * (clock - 1.0))
        found = self.chips * ((1.0 - memory_share) * clock + memory_share * in_memory)
        if not self._bursting & {Hits.CLOCK, Hits.MEMORY}:
            self._slowness[memory_share] = found
        return found

    def added_s(self, what: Hits, chance: Floats) -> Floats:
        """Return what is added for each rank; `chance` (rank,) is between 0 and 1."""
        result = np.zeros(self._num_ranks)
        for trouble, mask in zip(self._troubles, self._masks, strict=True):
            if trouble in self._now and what in trouble.hits:
                is_hit = mask & (chance < trouble.share_of_events)
                result += np.where(is_hit, trouble.extra_s * (0.7 + 0.6 * chance), 0.0)
        return result

    def link_factor(self, machine: Machine, groups: GroupSet, moments: Floats) -> Floats:
        """Return by how much each group's transfers are longer, (group,): the slowest link's.

        A slow NVLink between fast NICs is felt as far as it is slower than they are.
        """
        found = np.ones(len(groups.members))
        if groups.per_host > 1:
            nvlink = self.factor(Hits.NVLINK, moments)[groups.members].max(axis=1)
            reserve = machine.nvlink_bytes_per_s / ring_bytes_per_s(machine, groups)
            found = np.maximum(found, nvlink / reserve)
        if groups.crosses_hosts:
            found = np.maximum(found, self.factor(Hits.NIC, moments)[groups.members].max(axis=1))
        return found

    def message_factors(
        self, senders: Ranks, receivers: Ranks, is_near: NDArray[np.bool_]
    ) -> Floats:
        """Return by how much messages are longer."""
        blank = np.zeros(self._num_ranks)
        nvlink, nic = self.factor(Hits.NVLINK, blank), self.factor(Hits.NIC, blank)
        ends = np.where(
            is_near,
            np.maximum(nvlink[senders], nvlink[receivers]),
            np.maximum(nic[senders], nic[receivers]),
        )
        return np.asarray(ends, dtype=np.float64)
