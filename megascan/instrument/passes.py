"""Forward, backward, loss, data and gradient synchronisation: what the schedules call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, cast

from megascan.instrument.modules import BackwardSpans
from megascan.instrument.operations import argument_reader, argument_writer
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
        """`forward`: one microbatch through one chunk, loss included; not in an evaluation."""
        import torch

        microbatch_of = argument_reader(original, "current_microbatch")
        chunk_of = argument_reader(original, "vp_stage")
        input_of = argument_reader(original, "input_tensor")
        config_of = argument_reader(original, "config")
        data_of = argument_reader(original, "data_iterator")
        set_data = argument_writer(original, "data_iterator")
        position, tracer = self._position, self._tracer

        def enter(call: Call) -> bool:
            position.passes_known = True
            if not torch.is_grad_enabled():
                return False
            slot = (cast(int, microbatch_of(call) or 0), cast(int, chunk_of(call) or 0))
            position.slot, position.phase = slot, Phase.FORWARD
            position.learn(first_of(input_of(call)), slot)
            data = data_of(call)
            if _is_plain_iterator(data):
                set_data(call, TracedIterator(tracer, position, cast("Iterator[object]", data)))
            self._trace_finalize(cast(_Config, config_of(call)))
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
        function_of = argument_reader(original, "loss_func")
        set_function = argument_writer(original, "loss_func")

        def enter(call: Call) -> bool:
            function = cast("Function | None", function_of(call))
            if function is not None and not self._position.is_elsewhere:
                set_function(
                    call,
                    simple(self._tracer, function, "loss", Kind.COMPUTE, self._position.arguments),
                )
            return False

        return around(self._tracer, original, enter, lambda call, result: result)

    def backward_step(self, original: Function) -> Function:
        """`backward`: the gradients of one microbatch through one chunk."""
        output_of = argument_reader(original, "output_tensor")
        gradient_of = argument_reader(original, "output_tensor_grad")
        position, tracer = self._position, self._tracer

        def enter(call: Call) -> bool:
            output = first_of(output_of(call))
            position.slot = position.outputs.pop(id(output), None)
            position.phase = Phase.BACKWARD
            if position.slot is not None:
                position.learn(first_of(gradient_of(call)), position.slot)
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


def _is_plain_iterator(data: object) -> bool:
    return data is not None and hasattr(data, "__next__") and not isinstance(data, TracedIterator)


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
