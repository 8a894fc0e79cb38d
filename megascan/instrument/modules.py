"""Modules of the model: layer, attention, MLP, embedding, output layer; forward and backward.

A module's backward has no function of its own to wrap. It runs from the moment the gradient of its
output is complete to the moment the gradient of its input is, and a plain hook on each of these two
tensors sees that. Hooks that return nothing change neither the graph nor a single bit of the
gradients.

    forward:   input ──► [module] ──► output
    backward:  input.grad (end) ◄── [module] ◄── output.grad (begin)

The output of one layer is the input of the next: there the end of the later layer has to come
before the begin of the earlier one, so a tensor has one hook that does both in that order.
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

_BACKWARD = str(Phase.BACKWARD)
_Entered: TypeAlias = "tuple[tuple[int | None, Phase | None], Mark, torch.Tensor | None]"
"""Position outside of a module, its begin, and the activation that it was given."""


@dataclass(eq=False, slots=True)
class _Open:
    name: str
    arguments: Arguments
    begin: Mark


@dataclass(eq=False, slots=True)
class _Backward:
    """The backward of one call of a module; `opened` while it is under way."""

    name: str
    arguments: Arguments
    opened: _Open | None = None


class _GradientHook:
    """The one hook of a tensor: with its gradient some backwards end, and then others begin.

    Registering a hook costs more than all the rest of a span, so there is one, and it learns of
    further modules. Of several that made the same tensor, the outermost came last and begins first.
    """

    __slots__ = ("_begins", "_ends", "_spans", "tensor")

    def __init__(self, spans: BackwardSpans, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self._spans = spans
        self._ends: list[_Backward] = []
        self._begins: list[_Backward] = []
        tensor.register_hook(self)  # type: ignore[no-untyped-call]

    def ends(self, backward: _Backward) -> None:
        """The tensor is the module's input."""
        self._ends.append(backward)

    def begins(self, backward: _Backward) -> None:
        """The tensor is the module's output."""
        self._begins.append(backward)

    def __call__(self, gradient: torch.Tensor) -> None:
        try:
            for backward in self._ends:
                self._spans.end(backward, gradient)
            for backward in reversed(self._begins):
                self._spans.begin(backward, gradient)
        except Exception as error:
            self._spans.fail(error)


class BackwardSpans(IterationListener):
    """Backward spans of modules, opened and closed by hooks on their tensors."""

    def __init__(self, tracer: RecordingTracer, position: Position) -> None:
        self._tracer = tracer
        self._position = position
        self._stack: list[_Open] = []
        self._hooks: dict[int, _GradientHook] = {}

    def iteration_begins(self) -> None:
        """Nothing is open."""
        self._stack.clear()
        self._hooks.clear()

    def watch(
        self, name: str, arguments: Arguments, source: torch.Tensor | None, result: torch.Tensor
    ) -> None:
        """Record the backward of a module that made `result` from `source`."""
        backward = _Backward(f"{name}-backward", {**arguments, "phase": _BACKWARD})
        if source is not None:
            self._hook_of(source).ends(backward)
        self._hook_of(result).begins(backward)

    def _hook_of(self, tensor: torch.Tensor) -> _GradientHook:
        hook = self._hooks.get(id(tensor))
        if hook is None or hook.tensor() is not tensor:  # another tensor had this identity
            hook = self._hooks[id(tensor)] = _GradientHook(self, tensor)
        return hook

    def begin(self, backward: _Backward, gradient: torch.Tensor) -> None:
        """The gradient of a module's output is complete."""
        if self._tracer.active:
            mark = self._tracer.mark_at(gradient)
            backward.opened = _Open(backward.name, dict(backward.arguments), mark)
            self._stack.append(backward.opened)

    def end(self, backward: _Backward, gradient: torch.Tensor) -> None:
        """The gradient of a module's input is complete."""
        opened, backward.opened = backward.opened, None
        if opened is not None:
            self._end(opened, gradient)

    def _end(self, span: _Open, gradient: torch.Tensor | None) -> None:
        """End a span and whatever is still open inside it."""
        if span not in self._stack or not self._tracer.active:
            return
        now = self._tracer.mark_at(gradient, span.begin)
        while self._stack:
            inner = self._stack.pop()
            self._tracer.add(Kind.COMPUTE, inner.name, inner.begin, now, inner.arguments)
            if inner is span:
                return

    def fail(self, error: Exception) -> None:
        """Stop tracing."""
        self._tracer.fail(error)

    def end_all(self) -> None:
        """The whole backward is over: end what is still open."""
        if self._stack:
            self._end(self._stack[0], None)


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
            if position.is_elsewhere:
                return False
            outer = (position.layer, position.phase)
            layer = getattr(call.positional[0], "layer_number", None) if call.positional else None
            if isinstance(layer, int):
                position.layer = layer
            if position.phase is Phase.BACKWARD:
                position.phase = Phase.RECOMPUTE
            source = _first_activation((*call.positional[1:], *call.named.values()))
            call.memory = (outer, tracer.mark_at(source), source)
            return True

        def leave(call: Call, result: object) -> object:
            (layer, phase), begin, source = cast("_Entered", call.memory)
            arguments = position.arguments()
            repeated = position.phase is Phase.RECOMPUTE
            title = f"{name}-recompute" if repeated else name
            output = result[0] if isinstance(result, tuple) else result
            tracer.add(Kind.COMPUTE, title, begin, tracer.mark_at(output, begin), arguments)
            self._watch_backward(name, arguments, source, output)
            position.layer, position.phase = layer, phase
            return result

        return around(tracer, original, enter, leave)

    def _watch_backward(
        self, name: str, arguments: Arguments, source: torch.Tensor | None, output: object
    ) -> None:
        if getattr(output, "grad_fn", None) is None:
            return  # no gradients here: evaluation, or the first pass of a recomputed part
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


def _first_activation(values: tuple[object, ...]) -> torch.Tensor | None:
    """The first argument with a gradient; not a weight, on which a hook would stay for ever."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            is_weight = value.grad_fn is None and isinstance(value, torch.nn.Parameter)
            return None if is_weight else value
    return None
