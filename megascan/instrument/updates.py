"""Record a model's update, `grad-sync` and `optimizer`, with any trainer.

Steps of torch's optimizers, and of all classes derived from them, are seen by torch's own hooks;
steps of megatron.core's optimizers, which hold torch's, by their places in the table. The function
that finishes the gradients is called by megatron.core's schedules, which find it in the model's
configuration, or by the trainer itself, which may have imported megatron.core's function by name.
Such calls may be nested; only the outermost is recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from megascan.instrument.place import Call, Function, around
from megascan.schema import Kind
from megascan.tracer import IterationListener, Mark, RecordingTracer
from megascan.vocabulary import GRAD_SYNC, OPTIMIZER

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


class Config(Protocol):
    """The part of megatron.core's ModelParallelConfig that is used here."""

    finalize_model_grads_func: Function | None


class Updates(IterationListener):
    """Records the outermost of nested updates; hooks are removed when tracing ends."""

    def __init__(self, tracer: RecordingTracer) -> None:
        self._tracer = tracer
        self._open: dict[str, list[Mark]] = {GRAD_SYNC: [], OPTIMIZER: []}
        self._handles: list[RemovableHandle] = []

    def watch_torch(self) -> None:
        """Watch the steps of all torch optimizers, including optimizers that exist already."""
        from torch.optim import optimizer

        self._handles += [
            optimizer.register_optimizer_step_pre_hook(self._step_begins),
            optimizer.register_optimizer_step_post_hook(self._step_ends),
        ]

    def iteration_begins(self) -> None:
        """Forget updates under way: the last update may have ended with an exception."""
        for marks in self._open.values():
            marks.clear()

    def tracing_ends(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def optimizer_step(self, original: Function) -> Function:
        """Record `optimizer`: the step of megatron.core's optimizers, also of chained ones."""
        return self._outermost(original, OPTIMIZER)

    def grad_sync(self, original: Function) -> Function:
        """Record `grad-sync`: waiting for, or doing, the reduction of all gradients.

        The span is part of the update rather than of a pass, therefore of kind optimizer; the
        collectives inside it are recorded, too.
        """
        return self._outermost(original, GRAD_SYNC)

    def trace_finalize(self, config: Config) -> None:
        """Trace the next call of the job's own function that finishes the gradients.

        The schedules take the function from the model's configuration, so this also reaches
        functions that the trainer defines. The configuration is restored when the function is
        called.
        """
        original = config.finalize_model_grads_func
        if original is None or hasattr(original, "megascan_original"):
            return
        traced = self.grad_sync(original)

        def once(*positional: object, **named: object) -> object:
            config.finalize_model_grads_func = original
            return traced(*positional, **named)

        once.megascan_original = original  # type: ignore[attr-defined]
        config.finalize_model_grads_func = once

    def _outermost(self, original: Function, name: str) -> Function:
        def enter(_: Call) -> bool:
            self._begin(name)
            return True

        def leave(_: Call, result: object) -> object:
            self._end(name)
            return result

        return around(self._tracer, original, enter, leave)

    def _begin(self, name: str) -> None:
        marks = self._open[name]
        marks.append(self._tracer.mark() if not marks else None)

    def _end(self, name: str) -> None:
        """Record the update, unless it is part of another update or began before the iteration."""
        marks = self._open[name]
        if not marks:
            return
        begin = marks.pop()
        if not marks:
            self._tracer.add(Kind.OPTIMIZER, name, begin, self._tracer.mark(), {})

    def _step_begins(
        self,
        optimizer: torch.optim.Optimizer,
        positional: tuple[object, ...],
        named: dict[str, object],
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Begin a step, after its closure if it has one: Lightning runs the passes in a closure."""
        del optimizer
        if not self._tracer.active:
            return None
        try:
            self._begin(OPTIMIZER)
        except Exception as error:
            self._tracer.fail(error)
            return None
        if callable(closure := named.get("closure")):
            return positional, {**named, "closure": self._before_step(closure)}
        own, *rest = positional
        if rest and callable(rest[0]):
            return (own, self._before_step(rest[0]), *rest[1:]), named
        return None

    def _before_step(self, closure: Function) -> Function:
        """Return the closure with an end that moves the step's begin to there."""

        def evaluated(*positional: object, **named: object) -> object:
            result = closure(*positional, **named)
            try:
                marks = self._open[OPTIMIZER]
                if len(marks) == 1 and self._tracer.active:
                    marks[0] = self._tracer.mark()
            except Exception as error:
                self._tracer.fail(error)
            return result

        return evaluated

    def _step_ends(
        self, optimizer: torch.optim.Optimizer, positional: object, named: object
    ) -> None:
        del optimizer, positional, named
        if not self._tracer.active:
            return
        try:
            self._end(OPTIMIZER)
        except Exception as error:
            self._tracer.fail(error)
