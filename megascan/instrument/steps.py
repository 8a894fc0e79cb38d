"""Optimizer steps and data loading of plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascan.instrument.place import Call, Function, around
from megascan.schema import Kind
from megascan.tracer import IterationListener, Mark, RecordingTracer

if TYPE_CHECKING:
    import torch


class Steps(IterationListener):
    """Records the steps of every torch optimizer and the batches of every data loader."""

    def __init__(self, tracer: RecordingTracer) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._tracer = tracer
        self._open: list[Mark] = []
        self._handles = (
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        )

    def iteration_begins(self) -> None:
        """No optimizer is stepping, also if the last one ended with an exception."""
        self._open.clear()

    def tracing_ends(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, optimizer: torch.optim.Optimizer, positional: object, named: object) -> None:
        del optimizer, positional, named
        if not self._tracer.active:
            return
        try:
            self._open.append(self._tracer.mark())
        except Exception as error:
            self._tracer.fail(error)

    def _end(self, optimizer: torch.optim.Optimizer, positional: object, named: object) -> None:
        """Record it, unless it is part of another optimizer's step."""
        del optimizer, positional, named
        if not self._tracer.active or not self._open:
            return
        try:
            begin = self._open.pop()
            if not self._open:
                self._tracer.add(Kind.OPTIMIZER, "optimizer", begin, self._tracer.mark(), {})
        except Exception as error:
            self._tracer.fail(error)

    def next_batch(self, original: Function) -> Function:
        """Wrap the `__next__` of torch's data loaders."""
        tracer = self._tracer

        def enter(call: Call) -> bool:
            call.memory = tracer.mark_host()
            return True

        def leave(call: Call, result: object) -> object:
            tracer.add(Kind.DATA, "batch-generator", call.memory, tracer.mark_host(), {})
            return result

        return around(tracer, original, enter, leave)
