"""Modules of the model: layer, attention, MLP, embedding, output layer; forward and backward.

A module's backward has no function of its own to wrap. It runs from the moment the gradient of its
output is complete to the moment the gradient of its input is, and a plain hook on each of these two
tensors sees that. Hooks that return nothing change neither the graph nor a single bit of the
gradients.

    forward:   input ──► [module] ──► output
    backward:  input.grad (end) ◄── [module] ◄── output.grad (begin)

The output of one layer is the input of the next: there the end of the later layer has to come
before the begin of the earlier one, so the hooks of such a tensor are registered in that order.
Modules whose input needs no gradient (the embedding) end with the whole backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from megascan.instrument.place import Call, Function, around
from megascan.instrument.position import Position
from megascan.schema import Kind, Phase
from megascan.tracer import Arguments, IterationListener, Mark, RecordingTracer

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

Hook: TypeAlias = "Callable[[torch.Tensor], None]"


@dataclass(eq=False, slots=True)
class _Open:
    name: str
    arguments: Arguments
    begin: Mark


@dataclass(slots=True)
class _BeginHook:
    tensor: weakref.ref[torch.Tensor]
    handle: RemovableHandle
    hook: Hook


class BackwardSpans(IterationListener):
    """Backward spans of modules, opened and closed by hooks on their tensors."""

    def __init__(self, tracer: RecordingTracer, position: Position) -> None:
        self._tracer = tracer
        self._position = position
        self._stack: list[_Open] = []
        self._begin_hooks: dict[int, _BeginHook] = {}

    def iteration_begins(self) -> None:
        """Nothing is open."""
        self._stack.clear()
        self._begin_hooks.clear()

    def watch(
        self, name: str, arguments: Arguments, source: torch.Tensor | None, result: torch.Tensor
    ) -> None:
        """Record the backward of a module that made `result` from `source`."""
        arguments = {**arguments, "phase": str(Phase.BACKWARD)}
        opened: list[_Open] = []

        def begin(_: torch.Tensor) -> None:
            if self._tracer.active:
                opened.append(_Open(f"{name}-backward", dict(arguments), self._tracer.mark()))
                self._stack.append(opened[-1])

        def end(_: torch.Tensor) -> None:
            while opened:
                self._end(opened.pop())

        if source is not None:
            self._register_end(source, end)
        handle = _register(result, begin)
        self._begin_hooks[id(result)] = _BeginHook(weakref.ref(result), handle, begin)

    def _register_end(self, source: torch.Tensor, end: Hook) -> None:
        """Register an end hook, before the begin hook that the tensor may have already."""
        earlier = self._begin_hooks.get(id(source))
        if earlier is None or earlier.tensor() is not source:
            _register(source, end)
            return
        earlier.handle.remove()
        _register(source, end)
        earlier.handle = _register(source, earlier.hook)

    def _end(self, span: _Open) -> None:
        """End a span and whatever is still open inside it."""
        if span not in self._stack or not self._tracer.active:
            return
        now = self._tracer.mark()
        while self._stack:
            inner = self._stack.pop()
            self._tracer.add(Kind.COMPUTE, inner.name, inner.begin, now, inner.arguments)
            if inner is span:
                return

    def end_all(self) -> None:
        """The whole backward is over: end what is still open."""
        if self._stack:
            self._end(self._stack[0])


class Modules:
    """Wraps the forward of module classes."""

    def __init__(
        self, tracer: RecordingTracer, position: Position, backward_spans: BackwardSpans
    ) -> None:
        self._tracer = tracer
        self._position = position
        self._backward_spans = backward_spans
        self._patched: list[weakref.ref[torch.nn.Module]] = []

    def forward_of(self, name: str) -> Callable[[Function], Function]:
        """Spans `name`, `name-recompute` and `name-backward` around a class's `forward`."""
        return lambda original: self._wrap(name, original)

    def recompute_of(self, name: str) -> Callable[[Function], Function]:
        """Spans `name-recompute` around a function whose calls are recorded in the backward only.

        For what selective recomputation repeats and nobody needs to see in the first pass.
        """
        position, tracer = self._position, self._tracer

        def enter(call: Call) -> bool:
            if position.phase is not Phase.BACKWARD:
                return False
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            arguments = {**position.arguments(), "phase": str(Phase.RECOMPUTE)}
            layer = getattr(call.positional[0], "layer_number", None)
            if isinstance(layer, int):
                arguments["layer"] = layer
            tracer.add(Kind.COMPUTE, f"{name}-recompute", call.memory, tracer.mark(), arguments)
            return result

        return lambda original: around(tracer, original, enter, leave)

    def _wrap(self, name: str, original: Function) -> Function:
        position, tracer = self._position, self._tracer

        def enter(call: Call) -> bool:
            outer = (position.layer, position.phase)
            layer = getattr(call.positional[0], "layer_number", None) if call.positional else None
            if isinstance(layer, int):
                position.layer = layer
            if position.phase is Phase.BACKWARD:
                position.phase = Phase.RECOMPUTE
            call.memory = (outer, tracer.mark())
            return True

        def leave(call: Call, result: object) -> object:
            (layer, phase), begin = cast(
                "tuple[tuple[int | None, Phase | None], Mark]", call.memory
            )
            arguments = position.arguments()
            repeated = position.phase is Phase.RECOMPUTE
            title = f"{name}-recompute" if repeated else name
            tracer.add(Kind.COMPUTE, title, begin, tracer.mark(), arguments)
            self._watch_backward(name, arguments, call, result)
            position.layer, position.phase = layer, phase
            return result

        return around(tracer, original, enter, leave)

    def _watch_backward(self, name: str, arguments: Arguments, call: Call, result: object) -> None:
        output = result[0] if isinstance(result, tuple) else result
        if getattr(output, "grad_fn", None) is None:
            return  # no gradients here: evaluation, or the first pass of a recomputed part
        source = _first_activation((*call.positional[1:], *call.named.values()))
        if source is not output:
            self._backward_spans.watch(name, arguments, source, cast("torch.Tensor", output))

    def output_layer_of(self, original: Function) -> Function:
        """Wrap a model's `forward` so that its own output layer is traced from then on.

        The output layer is an ordinary column-parallel linear, of a class that is used everywhere;
        only the object can be told apart.
        """
        tracer = self._tracer

        def enter(call: Call) -> bool:
            layer = getattr(call.positional[0], "output_layer", None)
            if layer is not None and "forward" not in vars(layer):
                traced = self._wrap("output_layer", type(layer).forward)
                layer.forward = traced.__get__(layer)
                self._patched.append(weakref.ref(layer))
            return False

        return around(tracer, original, enter, lambda call, result: result)

    def remove(self) -> None:
        """Give the output layers their own forward back."""
        for reference in self._patched:
            layer = reference()
            if layer is not None:
                vars(layer).pop("forward", None)
        self._patched.clear()


def _register(tensor: torch.Tensor, hook: Hook) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _first_activation(values: tuple[object, ...]) -> torch.Tensor | None:
    """The first argument with a gradient; not a weight, on which a hook would stay for ever."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return None if isinstance(value, torch.nn.Parameter) else value
    return None
