"""State troubles of a job, when they hold, and what they make of every rank's rates.

A trouble makes resources of some ranks slower by a factor, stops their host for a while
(`pause_s`), or freezes their device (`freeze_s`). It holds in a range of iterations; below a share
of 1 it comes in bursts: on and off for some passes at a time, the same in every variant of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.ground import Planted
from benchmarks.grounds.incidents.hardware import RESOURCES, Floats


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """State one cause. `effect` are factors by resource; `clock_ratio` is what a driver reads as
    the clock of its ranks, relative to a sound one. `burst_passes` is how many passes a burst lasts
    on average, where `share` is below 1. `together`: all ranks pause or burst at once.
    """

    kind: str
    cause: str
    owner: str
    ranks: tuple[int, ...]
    effect: Mapping[str, float] = field(default_factory=dict)
    host: str = ""
    factor: float = 1.0
    first: int = 1
    last: int = 0
    share: float = 1.0
    burst_passes: float = 4.0
    pause_s: float = 0.0
    freeze_s: float = 0.0
    clock_ratio: float = 1.0
    seed: int = 0

    @property
    def planted(self) -> Planted:
        """Return it as a ground declares it, not priced yet."""
        return Planted(
            kind=self.kind,
            cause=self.cause,
            owner=self.owner,
            ranks=self.ranks,
            host=self.host,
            factor=self.factor,
            first_iteration=self.first,
            last_iteration=self.last,
            share_of_time=self.share,
        )

    def activity(self, iterations: Sequence[int], num_passes: int) -> NDArray[np.bool_]:
        """Return in which passes it holds, (iteration, pass)."""
        numbers = np.array(iterations)
        holds = (numbers >= self.first) & ((numbers <= self.last) | (self.last == 0))
        active = np.repeat(holds[:, None], num_passes, axis=1)
        if self.share >= 1:
            return active
        rng = np.random.default_rng(self.seed)
        stop = min(1.0, 1 / max(self.burst_passes, 1.0))
        start = min(1.0, stop * self.share / (1 - self.share))
        draws = rng.random(active.size)
        on, states = bool(rng.random() < self.share), np.zeros(active.size, dtype=np.bool_)
        for place, draw in enumerate(draws.tolist()):
            on = draw >= stop if on else draw < start
            states[place] = on
        return active & states.reshape(active.shape)


class Conditions:
    """Every rank's rates in every pass, for several variants of a job at once.

    `variants` are the troubles that each variant has; `chips` (variant, rank) are how many times
    longer products take on each chip. Rates are (variant, rank) arrays of factors by resource.
    """

    def __init__(
        self,
        troubles: Sequence[Trouble],
        variants: Sequence[frozenset[int]],
        chips: Floats,
        iterations: Sequence[int],
        num_passes: int,
    ) -> None:
        self.troubles = troubles
        self._variants = variants
        self._chips = chips
        self._active = [one.activity(iterations, num_passes) for one in troubles]
        self._known: dict[tuple[bool, ...], dict[str, Floats]] = {}

    def _states(self, place: int, number: int) -> tuple[bool, ...]:
        return tuple(bool(active[place, number]) for active in self._active)

    def rates(self, place: int, number: int) -> dict[str, Floats]:
        """Return the rates in the pass of this number of the iteration at this place."""
        states = self._states(place, number)
        if states not in self._known:
            self._known[states] = self._computed(states)
        return self._known[states]

    def _computed(self, states: tuple[bool, ...]) -> dict[str, Floats]:
        rates = {name: np.ones_like(self._chips) for name in RESOURCES}
        rates["flop"] = self._chips.copy()
        for number, (trouble, on) in enumerate(zip(self.troubles, states, strict=True)):
            for variant, has in enumerate(self._variants):
                if on and number in has:
                    for name, factor in trouble.effect.items():
                        rates[name][variant, list(trouble.ranks)] *= factor
        return rates

    def stops(self, place: int, number: int) -> list[tuple[Trouble, Floats]]:
        """Return troubles that stop something at the begin of a pass, and whom, (variant, rank)."""
        found = []
        states = self._states(place, number)
        for index, (trouble, on) in enumerate(zip(self.troubles, states, strict=True)):
            if on and (trouble.pause_s or trouble.freeze_s):
                whom = np.zeros_like(self._chips)
                for variant, has in enumerate(self._variants):
                    if index in has:
                        whom[variant, list(trouble.ranks)] = 1.0
                found.append((trouble, whom))
        return found

    def clock_ratio(self, rank: int, place: int) -> float:
        """Return the clock of a rank in an iteration as its driver would read it, 1: sound."""
        ratio = 1.0 / float(self._chips[0, rank])
        for trouble, active in zip(self.troubles, self._active, strict=True):
            if rank in trouble.ranks and trouble.clock_ratio < 1:
                share = float(active[place].mean())
                ratio *= share * trouble.clock_ratio + 1 - share
        return ratio
