"""A step's microbatches ordered by length: short ones outside, long ones in the middle.

While a pipeline fills and drains, all ranks but one wait for a single microbatch; when that is a
short one they wait less. The samples of a step stay the same, so its loss and its gradients are the
same sums, added up in another order.

    lengths   3 1 6 2 5 4   →   1 3 5 6 4 2

Source: Jiang et al. 2024 (order by length).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

Batch = TypeVar("Batch")

HILL = "hill"
"""The order's name, as --order-microbatches takes it."""


def hill_order(lengths: Sequence[float]) -> list[int]:
    """Return positions of microbatches, in the order in which to run them.

    Lengths 30, 10, 20: positions 1, 0, 2. Those of equal length stay in their order, and so do all
    of them where no two lengths differ.
    """
    if len(set(lengths)) < 2:
        return list(range(len(lengths)))
    rising = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [*rising[::2], *reversed(rising[1::2])]


class HillOrder(Generic[Batch]):
    """Puts the microbatches of each step in order, and says once what that does to the job."""

    def __init__(self, length_of: Callable[[Batch], int], say: Callable[[str], None]) -> None:
        self._length_of = length_of
        self._say = say
        self._has_said = False

    def steps(self, batches: Iterator[Batch], num_microbatches: int) -> Iterator[Batch]:
        """Yield all batches, each `num_microbatches` of them in their order."""
        while True:
            step = [batch for _, batch in zip(range(num_microbatches), batches, strict=False)]
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
