"""The seam between the engine and everything that watches it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.generation.request import Answer
    from training.generation.scheduler import Scheduler, Step


class GenerationCallback:
    """Moments in the life of an engine; all are told on the thread that computes."""

    def step(self, step: Step) -> AbstractContextManager[None]:
        """Surround the computation of one step, from the model's input to the chosen tokens."""
        del step
        return nullcontext()

    def answered(self, scheduler: Scheduler, answers: Sequence[Answer]) -> None:
        """Follow a step: what it has brought, and what the batch holds now."""
        del scheduler, answers

    @property
    def has_work(self) -> bool:
        """Return whether `work` has something to do, alike on all ranks."""
        return False

    def receive(self, aside: str) -> None:
        """Take an aside: what a client of the callback's own has sent to all ranks."""
        del aside

    def work(self) -> None:
        """Do one step of the callback's own, between two steps of the engine, on all ranks."""
