"""Which microbatches a replica gets, and in which order, without a restart.

**Microbatches are moved** from a slow replica to others, between two steps (`Rebalancer`). A slow
rank holds up its replica, and the replica holds up all others. No order of work cures that; less
work does. The samples of a step stay the same, and each microbatch's loss is divided by the number
of microbatches of an even share, so the sum of gradients is the same up to the order of summation.

    2 replicas, 16 microbatches each, replica 1 takes 1.3 times as long:
    even   16 + 16   the step takes 16 · 1.3 = 20.8
    moved  18 + 14   the step takes max(18, 14 · 1.3) = 18.2

With `auto` every rank times its own work without waits. Every few steps the ranks exchange their
times and all come to the same shares; shares change only when two reviews in a row say that a
change saves enough.

**Microbatches are ordered** by length, short ones first and last, long ones in the middle
(`HillOrder`). While a pipeline fills and drains, all ranks but one wait for a single microbatch;
they wait less when it is short. The samples of a step stay the same, so loss and gradients are the
same sums, added up in another order.

    lengths   3 1 6 2 5 4   →   1 3 5 6 4 2

Source: Jiang et al. 2024 (order by length).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from megascan.errors import ConfigError

REVIEW_INTERVAL = 5
"""Steps between two reviews of the shares; a review costs one small all-gather."""

LEAST_GAIN_RATIO = 0.03
"""Share of the step that a change must save; on a quiet machine steps vary by 1 or 2 %."""

REVIEWS_TO_AGREE = 2
"""Number of reviews in a row that must ask for a change."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How many microbatches of a step each replica takes."""

    shares: tuple[int, ...]

    @property
    def even(self) -> int:
        """Return the microbatches of an even share, by which each loss is divided."""
        return sum(self.shares) // len(self.shares)

    @property
    def is_even(self) -> bool:
        """Return whether all replicas take equally many microbatches."""
        return len(set(self.shares)) == 1

    def positions(self, replica: int) -> list[int]:
        """Return the numbers within the step of a replica's microbatches, in the order of running.

        Number k·D + d is the k-th microbatch of replica d of D in an even share. Each replica keeps
        the first of its own microbatches; what replicas with less than an even share leave over
        goes to the replicas with more, in the order of replicas.

        Example, shares 3 and 1 of 2 replicas: replica 0 runs 0, 2, 3 and replica 1 runs 1.
        """
        num_replicas = len(self.shares)
        kept = [min(share, self.even) for share in self.shares]
        left = [
            k * num_replicas + d
            for k in range(self.even)
            for d in range(num_replicas)
            if k >= kept[d]
        ]
        first = sum(self.shares[d] - kept[d] for d in range(replica))
        extra = self.shares[replica] - kept[replica]
        own = [k * num_replicas + replica for k in range(kept[replica])]
        return own + left[first : first + extra]


def even_deal(num_replicas: int, num_microbatches: int) -> Deal:
    """Return shares of `num_microbatches` for each replica."""
    return Deal(shares=(num_microbatches,) * num_replicas)


def parse_deal(text: str, num_replicas: int, num_microbatches: int) -> Deal:
    """Return the shares that ``18,14`` names; ConfigError where they do not fit the job."""
    option = f"--dpp-microbatches {text}"
    try:
        shares = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} is neither auto nor numbers with commas between, as in 18,14"
        ) from None
    if len(shares) != num_replicas:
        raise ConfigError(
            f"{option} names {len(shares)} replicas, but the data-parallel size is {num_replicas}; "
            "give one number a replica"
        )
    if min(shares) < 1:
        raise ConfigError(f"{option} leaves a replica without work; give each 1 or more")
    if sum(shares) != num_replicas * num_microbatches:
        raise ConfigError(
            f"{option} makes {sum(shares)} microbatches, but a step has {num_replicas} x "
            f"{num_microbatches} = {num_replicas * num_microbatches}; change the shares"
        )
    return Deal(shares=shares)


def best_deal(microbatch_s: Sequence[float], total: int, fill: float) -> Deal:
    """Return the shares of `total` microbatches for which the slowest replica ends earliest.

    `microbatch_s` holds, by replica, the seconds of one microbatch on the slowest rank. A step of n
    microbatches takes n + `fill` times as long; `fill` stands for filling and draining the
    pipeline.

    Example, seconds 1.0 and 1.3, total 32, fill 0: shares 18 and 14.
    """
    shares = [1] * len(microbatch_s)
    for _ in range(total - len(shares)):
        ends = [(share + 1 + fill) * one for share, one in zip(shares, microbatch_s, strict=True)]
        shares[ends.index(min(ends))] += 1
    return Deal(shares=tuple(shares))


def step_time(deal: Deal, microbatch_s: Sequence[float], fill: float) -> float:
    """Return the seconds of a step with these shares, by the model of `best_deal`."""
    return max((n + fill) * one for n, one in zip(deal.shares, microbatch_s, strict=True))


Exchange = Callable[[float], list[float]]
"""Gives this rank's number to all ranks; returns, by replica, the largest number of its ranks."""


class Rebalancer:
    """Decides after each step whether microbatches move; all ranks decide the same.

    All ranks call `exchange` at the same steps.
    """

    def __init__(self, deal: Deal, exchange: Exchange, *, fill: float) -> None:
        self.deal = deal
        self._exchange = exchange
        self._fill = fill
        self._times_s: list[float] = []
        self._wanted = 0

    def after_step(self, busy_s: float, own_microbatches: int) -> Deal | None:
        """Take in how long this rank worked in a step; return the new shares if they change."""
        self._times_s.append(busy_s / own_microbatches)
        if len(self._times_s) < REVIEW_INTERVAL:
            return None
        microbatch_s = self._exchange(statistics.median(self._times_s))
        self._times_s.clear()
        return self._review(microbatch_s)

    def _review(self, microbatch_s: Sequence[float]) -> Deal | None:
        deal = best_deal(microbatch_s, sum(self.deal.shares), self._fill)
        now_s = step_time(self.deal, microbatch_s, self._fill)
        then_s = step_time(deal, microbatch_s, self._fill)
        worth_it = then_s < now_s * (1 - LEAST_GAIN_RATIO)
        self._wanted = self._wanted + 1 if worth_it else 0
        if self._wanted < REVIEWS_TO_AGREE:
            return None
        self._wanted = 0
        self.deal = deal
        return deal


Batch = TypeVar("Batch")

HILL = "hill"
"""Name of the order of `HillOrder` for --order-microbatches."""


def hill_order(lengths: Sequence[float]) -> list[int]:
    """Return the positions of microbatches in the order in which to run them.

    Example, lengths 30, 10, 20: positions 1, 0, 2. Where all lengths are equal, the order stays.
    Equal ones among others are sorted by position, so ranks that see the same lengths agree.
    """
    if len(set(lengths)) < 2:
        return list(range(len(lengths)))
    rising = sorted(range(len(lengths)), key=lengths.__getitem__)
    first, last = rising[::2], rising[1::2]
    return [*first, *reversed(last)]


class HillOrder(Generic[Batch]):
    """Puts the microbatches of each step in hill order, and says once what that does to the job."""

    def __init__(self, length_of: Callable[[Batch], int], say: Callable[[str], None]) -> None:
        self._length_of = length_of
        self._say = say
        self._has_said = False

    def steps(self, batches: Iterator[Batch], num_microbatches: int) -> Iterator[Batch]:
        """Yield all batches; every `num_microbatches` of them are a step and put in hill order."""
        while True:
            step = list(islice(batches, num_microbatches))
            if len(step) < num_microbatches:
                return
            lengths = [self._length_of(batch) for batch in step]
            self._describe(lengths)
            for position in hill_order(lengths):
                yield step[position]

    def _describe(self, lengths: Sequence[int]) -> None:
        if self._has_said:
            return
        self._has_said = True
        if len(set(lengths)) < 2:
            self._say(
                f"--order-microbatches {HILL} does nothing as long as all microbatches of a step "
                f"have one length; those of the first have {lengths[0]} tokens each"
            )
            return
        self._say(
            f"--order-microbatches {HILL}: microbatches of {min(lengths)} to {max(lengths)} tokens "
            "run short, long, short; a step's samples are the same, sums over them are added up in "
            "another order, so losses differ from those without it by rounding, with dropout also "
            "by the masks that samples draw"
        )
