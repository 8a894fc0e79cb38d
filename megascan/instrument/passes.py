"""Forward, backward, loss, data and gradient synchronisation: what the schedules call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Protocol, cast

from megascan.instrument.modules import BackwardSpans
from megascan.instrument.place import Call, Function, around
from megascan.instrument.position import Position, first_of
from megascan.schema import Kind, Phase
from megascan.tracer import Arguments, RecordingTracer


class _Config(Protocol):
    finalize_model_grads_func: Function | None


class TracedIterator:
    """A data iterator whose every item is a `batch-generator` span; otherwise like the original."""

    def __init__(self, tracer: RecordingTracer, position: Position, data: Iterator[object]) -> None:
        self._tracer = tracer
        self._position = position
        self._data = data

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        tracer = self._tracer
        if not tracer.active:
            return next(self._data)
        begin = tracer.mark_host()
        item = next(self._data)
        arguments = self._position.arguments()
        arguments.pop("phase", None)
        tracer.add(Kind.DATA, "batch-generator", begin, tracer.mark_host(), arguments)
        return item

    def __getattr__(self, name: str) -> object:
        return getattr(self._data, name)


class Passes:
    """Wraps the steps that megatron.core's schedules are made of."""

    def __init__(
        self, tracer: RecordingTracer, position: Position, backward_spans: BackwardSpans
    ) -> None:
        self._tracer = tracer
        self._position = position
        self._backward_spans = backward_spans

    def forward_step(self, original: Function) -> Function:
        """`forward`: one microbatch through one chunk, loss included."""
        signature = inspect.signature(original)
        position, tracer = self._position, self._tracer

        def enter(call: Call) -> bool:
            bound = signature.bind(*call.positional, **call.named)
            values = bound.arguments
            slot = (values.get("current_microbatch") or 0, values.get("vp_stage") or 0)
            position.slot, position.phase = slot, Phase.FORWARD
            position.learn(first_of(values["input_tensor"]), slot)
            values["data_iterator"] = self._trace_data(values["data_iterator"])
            self._trace_finalize(values["config"])
            call.positional, call.named = bound.args, bound.kwargs
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            arguments = position.arguments()
            tracer.add(Kind.COMPUTE, "forward", call.memory, tracer.mark(), arguments)
            output = first_of(cast("tuple[object, object]", result)[0])
            if position.slot is not None:
                position.outputs[id(output)] = position.slot
            position.slot = position.phase = None
            return result

        return around(tracer, original, enter, leave)

    def _trace_data(self, data: object) -> object:
        if data is None or isinstance(data, TracedIterator) or not hasattr(data, "__next__"):
            return data
        return TracedIterator(self._tracer, self._position, cast("Iterator[object]", data))

    def _trace_finalize(self, config: _Config) -> None:
        """Trace the job's own function that finishes the gradients, until it has been called once.

        The schedules take it from the model's configuration, so this also reaches functions that
        the trainer wrote itself. The configuration is as before as soon as it is called.
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

    def grad_sync(self, original: Function) -> Function:
        """`grad-sync`: waiting for, or doing, the reduction of all gradients.

        A part of the update rather than of a pass, therefore of kind optimizer; the collectives it
        holds are recorded beside it.
        """
        return simple(self._tracer, original, "grad-sync", Kind.OPTIMIZER)

    def calculate_loss(self, original: Function) -> Function:
        """`loss`: the trainer's loss function, on the stage that has one."""
        signature = inspect.signature(original)

        def enter(call: Call) -> bool:
            bound = signature.bind(*call.positional, **call.named)
            function = bound.arguments["loss_func"]
            if function is not None:
                bound.arguments["loss_func"] = simple(
                    self._tracer, function, "loss", Kind.COMPUTE, self._position.arguments
                )
            call.positional, call.named = bound.args, bound.kwargs
            return False

        return around(self._tracer, original, enter, lambda call, result: result)

    def backward_step(self, original: Function) -> Function:
        """`backward`: the gradients of one microbatch through one chunk."""
        signature = inspect.signature(original)
        position, tracer = self._position, self._tracer

        def enter(call: Call) -> bool:
            values = signature.bind(*call.positional, **call.named).arguments
            output = first_of(values["output_tensor"])
            position.slot = position.outputs.pop(id(output), None)
            position.phase = Phase.BACKWARD
            if position.slot is not None:
                position.learn(first_of(values["output_tensor_grad"]), position.slot)
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            self._backward_spans.end_all()
            tracer.add(Kind.COMPUTE, "backward", call.memory, tracer.mark(), position.arguments())
            gradient = first_of(result)
            if gradient is not None and position.slot is not None:
                position.gradients[id(gradient)] = position.slot
            position.slot = position.phase = None
            return result

        return around(tracer, original, enter, leave)


def simple(
    tracer: RecordingTracer,
    original: Function,
    name: str,
    kind: Kind,
    arguments: Callable[[], Arguments] = dict,
) -> Function:
    """One span around each call."""

    def enter(call: Call) -> bool:
        call.memory = tracer.mark()
        return True

    def leave(call: Call, result: object) -> object:
        tracer.add(kind, name, call.memory, tracer.mark(), arguments())
        return result

    return around(tracer, original, enter, leave)
