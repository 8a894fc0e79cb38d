"""What the host does beside the passes: optimizer steps, checkpoint saves, garbage collections."""

from __future__ import annotations

import functools
import gc
import threading

from megascan.instrument.place import Call, Function, around
from megascan.schema import Kind
from megascan.tracer import IterationListener, Mark, RecordingTracer


class Host(IterationListener):
    """Wraps optimizer steps and checkpoint saves."""

    def __init__(self, tracer: RecordingTracer) -> None:
        self._tracer = tracer
        self._depth = 0

    def iteration_begins(self) -> None:
        """No optimizer is stepping, also if the last one ended with an exception."""
        self._depth = 0

    def optimizer_step(self, original: Function) -> Function:
        """`optimizer`: only the outermost of optimizers that are chained."""
        tracer = self._tracer

        def enter(call: Call) -> bool:
            self._depth += 1
            call.memory = tracer.mark() if self._depth == 1 else None
            return True

        def leave(call: Call, result: object) -> object:
            self._depth -= 1
            if self._depth == 0:
                tracer.add(Kind.OPTIMIZER, "optimizer", call.memory, tracer.mark(), {})
            return result

        return around(tracer, original, enter, leave)

    def save_checkpoint(self, original: Function) -> Function:
        """`save-checkpoint`, in and between iterations; it is written with the next window."""
        tracer = self._tracer

        @functools.wraps(original)
        def traced(*positional: object, **named: object) -> object:
            if not tracer.waiting:
                return original(*positional, **named)
            begin = tracer.mark_host()
            result = original(*positional, **named)
            try:
                tracer.add(Kind.CHECKPOINT, "save-checkpoint", begin, tracer.mark_host(), {})
            except Exception as error:
                tracer.fail(error)
            return result

        return traced


class GarbageCollections(IterationListener):
    """Records the pauses of Python's garbage collector on the training thread."""

    def __init__(self, tracer: RecordingTracer) -> None:
        self._tracer = tracer
        self._thread = threading.get_ident()
        self._begin: Mark = None
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if not self._tracer.active or threading.get_ident() != self._thread:
            return
        try:
            if phase == "start":
                self._begin = self._tracer.mark_host()
            elif self._begin is not None:
                name = f"gc-generation-{info['generation']}"
                end = self._tracer.mark_host()
                self._tracer.add(Kind.GC, name, self._begin, end, {})
                self._begin = None
        except Exception as error:
            self._tracer.fail(error)

    def granularity_lowered(self) -> None:
        """Listen no longer."""
        self.tracing_ends()

    def tracing_ends(self) -> None:
        """Listen no longer."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
