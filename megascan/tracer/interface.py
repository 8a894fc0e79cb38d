"""What a trainer sees of a tracer, and what instrumentation hears from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from megascan.schema import Kind


class Tracer:
    """The tracer of a run that is not traced: everything is allowed and nothing happens."""

    active: bool = False
    """Whether spans are being recorded right now; wrappers look here before anything else."""

    run_id: str | None = None
    """Id of the run, equal on all ranks; None when it is not traced."""

    def iteration(self, number: int) -> AbstractContextManager[None]:
        """Enclose training iteration `number` (from 1)."""
        del number
        return nullcontext()

    def span(
        self, name: str, kind: Kind | str, **arguments: int | str
    ) -> AbstractContextManager[None]:
        """Record what is enclosed, if the iteration is traced."""
        del name, kind, arguments
        return nullcontext()

    def close(self) -> None:
        """Finish the open window, write it, and take all instrumentation away."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class IterationListener:
    """Instrumentation that keeps state within an iteration."""

    def iteration_begins(self) -> None:
        """Start from nothing: numbering and memory are per iteration."""

    def granularity_lowered(self) -> None:
        """From now on only what `base` records is wanted."""

    def tracing_ends(self) -> None:
        """Leave no trace in the process."""
