"""Record what Megatron-Core does: passes, modules, messages between stages, and the host's work.

The schedules call the passes: forward, backward, loss, data and gradient synchronisation.

Modules (layer, attention, MLP, MoE, embedding, output layer) have a forward to wrap, but no
function for their backward. A module's backward runs from the moment the gradient of its output is
complete to the moment the gradient of its input is complete; a plain hook on each of these two
tensors sees that. Hooks that return nothing change neither the graph nor a bit of the gradients.

    forward:   input ──► [module] ──► output
    backward:  input.grad (end) ◄── [module] ◄── output.grad (begin)

The output of one layer is the input of the next layer. There the backward of the later layer must
end before that of the earlier layer begins, so a tensor has one hook that does both in that order.
Modules whose input needs no gradient (the embedding) end with the whole backward.

A message between stages is one span; messages of one exchange have the same times. A message and
its counterpart carry the same running number, which counts the messages of an iteration by (sender,
receiver, direction). The microbatch and chunk of a received tensor are known when the schedule uses
it; both are those of the receiver.

Checkpoint saves and garbage collections are the host's work next to the passes.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from megascan.instrument.collectives import Groups, argument_reader, argument_writer
from megascan.instrument.layers import kinds_of, numbered_layers
from megascan.instrument.place import (
    Call,
    Function,
    Position,
    around,
    before,
    beside,
    first_of,
    in_span,
)
from megascan.instrument.updates import Config, Updates
from megascan.schema import Kind, Phase
from megascan.tracer import Arguments, AsyncWork, IterationListener, Mark, RecordingTracer
from megascan.vocabulary import (
    BACKWARD,
    BACKWARD_WEIGHTS,
    BATCH_GENERATOR,
    FORWARD,
    LOSS,
    MESSAGES,
    OUTPUT_LAYER,
    RECV,
    SAVE_CHECKPOINT,
    backward_of,
    collection_of,
    message_name,
    recompute_of,
)

if TYPE_CHECKING:
    import torch


_BACKWARD = str(Phase.BACKWARD)
_Entered: TypeAlias = "tuple[int | None, Phase | None, Mark, torch.Tensor | None]"
"""Layer and phase around a module call, the call's begin, and the activation it was given."""

NOT_TAKEN: Final = "not taken"
"""Stands in place of a begin for modules of layers that are not recorded in this iteration."""


_EXCHANGED = ("tensor_send_prev", "recv_prev", "tensor_send_next", "recv_next")
"""Arguments of an exchange that say what is exchanged, in the order of `MESSAGES`."""
_HANDLES = ("send_prev", "recv_prev", "send_next", "recv_next")
"""Keys of an overlapped exchange's handles, in the same order."""

_Backward: TypeAlias = tuple[str, Arguments]
"""The backward of one call of a module: its name, and the arguments of the call's forward."""
_Boundary: TypeAlias = tuple[list[_Backward], list[_Backward]]
"""Backwards that end when a tensor's gradient is complete, and backwards that begin then."""

_OURS: Final = -1
"""Key of our hook among a tensor's hooks; torch numbers its own hooks from 0."""


class BackwardSpans(IterationListener):
    """Backward spans of modules, opened and closed by hooks on their tensors.

    Registering a hook costs more than all the rest of a span, so a tensor has one hook, to which
    further modules are added. Of several modules that return the same tensor, the outermost is
    added last, and its backward begins first.
    """

    def __init__(self, tracer: RecordingTracer, position: Position) -> None:
        from torch import Tensor

        self._plain_tensor = Tensor
        self._tracer = tracer
        self._position = position
        self._stack: list[tuple[_Backward, Mark]] = []
        self._boundaries: dict[int, tuple[weakref.ref[torch.Tensor], _Boundary]] = {}

    def iteration_begins(self) -> None:
        """Forget all open backwards."""
        self._stack.clear()
        self._boundaries.clear()

    def watch(
        self, name: str, arguments: Arguments, source: torch.Tensor | None, result: torch.Tensor
    ) -> None:
        """Record as `name` the backward of a module that made `result` from `source`."""
        backward = (name, arguments)
        if source is not None:
            self._boundary_at(source)[0].append(backward)
        self._boundary_at(result)[1].append(backward)

    def _boundary_at(self, tensor: torch.Tensor) -> _Boundary:
        known = self._boundaries.get(id(tensor))
        if known is not None and known[0]() is tensor:  # else another tensor had this identity
            return known[1]
        boundary: _Boundary = ([], [])
        self._boundaries[id(tensor)] = weakref.ref(tensor), boundary
        self._call_with_gradient(tensor, functools.partial(self._pass, boundary))
        return boundary

    def _call_with_gradient(
        self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]
    ) -> None:
        """Register a hook as `Tensor.register_hook` does, without the handle that removes it.

        Making the handle takes as long as all the rest. For leaves, for subclasses, and for tensors
        with other hooks, torch's own function is used.
        """
        plain = type(tensor) is self._plain_tensor and tensor._backward_hooks is None
        register = getattr(tensor.grad_fn, "_register_hook_dict", None) if plain else None
        if register is None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            return
        tensor._backward_hooks = OrderedDict(((_OURS, hook),))
        register(tensor)

    def _pass(self, boundary: _Boundary, gradient: torch.Tensor) -> None:
        """End and begin the backwards at this gradient's boundary, all at the same moment."""
        tracer, stack = self._tracer, self._stack
        if not tracer.active:
            return
        ends, begins = boundary
        mark: Mark = None
        try:
            for backward in ends:
                place = len(stack) - 1
                while place >= 0 and stack[place][0] is not backward:
                    place -= 1
                if place < 0:
                    continue
                begin = stack[place][1]
                if mark is None or mark is begin:
                    mark = tracer.mark_at(gradient, begin)
                self._close(place, mark)
            for backward in reversed(begins):
                if mark is None:
                    mark = tracer.mark_at(gradient)
                stack.append((backward, mark))
        except Exception as error:
            tracer.fail(error)

    def _close(self, place: int, end: Mark) -> None:
        """End the open backwards from a place of the stack on: one, and all that are inside it."""
        while len(self._stack) > place:
            (name, arguments), begin = self._stack.pop()
            arguments = {**arguments, "phase": _BACKWARD}
            self._tracer.add(Kind.COMPUTE, name, begin, end, arguments)

    def end_all(self) -> None:
        """End all backwards that are still open, as the whole backward is over."""
        if self._stack and self._tracer.active:
            self._close(0, self._tracer.mark_at(None, self._stack[0][1]))


@dataclass(eq=False)
class Modules:
    """Wraps the forward of module classes."""

    tracer: RecordingTracer
    position: Position
    backward_spans: BackwardSpans
    _patched: list[weakref.ref[torch.nn.Module]] = field(default_factory=list)

    def recompute_of(self, name: str, original: Function) -> Function:
        """Record spans `name-recompute` of a function, only for calls inside a backward pass.

        This is for functions that selective recomputation repeats; they are not recorded in the
        first pass.
        """
        position, tracer, title = self.position, self.tracer, recompute_of(name)

        def enter(call: Call) -> bool:
            layer = getattr(call.positional[0], "layer_number", position.layer)
            if position.phase is not Phase.BACKWARD or not tracer.layers.takes(layer):
                return False
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            arguments = {**position.arguments(), "phase": str(Phase.RECOMPUTE)}
            layer = getattr(call.positional[0], "layer_number", None)
            if isinstance(layer, int):
                arguments["layer"] = layer
            tracer.add(Kind.COMPUTE, title, call.memory, tracer.mark(), arguments)
            return result

        return around(tracer, original, enter, leave)

    def forward_of(self, name: str, original: Function) -> Function:
        """Record spans `name`, `name-recompute` and `name-backward` of a module's method."""
        position, tracer = self.position, self.tracer
        repeated_name, backward_name = recompute_of(name), backward_of(name)
        in_backward, in_recompute = Phase.BACKWARD, Phase.RECOMPUTE
        watch_backward = self.backward_spans.watch
        activation_of = _activation_finder()

        def begin(positional: tuple[object, ...], named: dict[str, object]) -> _Entered | None:
            outer_layer, outer_phase = position.layer, position.phase
            if outer_phase is None and position.is_elsewhere:
                return None
            layer = vars(positional[0]).get("layer_number") if positional else None
            if isinstance(layer, int):
                position.layer = layer
            if outer_phase is in_backward:
                position.phase = in_recompute
            if not tracer.layers.takes(position.layer, position.slot[1] if position.slot else 0):
                return outer_layer, outer_phase, NOT_TAKEN, None
            source = activation_of(positional, named)
            return outer_layer, outer_phase, tracer.mark_at(source), source

        def end(memory: _Entered, result: object) -> None:
            outer_layer, outer_phase, begun, source = memory
            if begun is not NOT_TAKEN:
                arguments = position.arguments()
                title = repeated_name if position.phase is in_recompute else name
                output: torch.Tensor = result[0] if isinstance(result, tuple) else result  # type: ignore[assignment]
                tracer.add(Kind.COMPUTE, title, begun, tracer.mark_at(output, begun), arguments)
                # Outputs have no gradients in an evaluation, or in the first pass of a recomputed
                # part.
                if source is not output and getattr(output, "grad_fn", None) is not None:
                    watch_backward(backward_name, arguments, source, output)
            position.layer, position.phase = outer_layer, outer_phase

        return beside(tracer, original, begin, end)

    def output_layer_of(self, original: Function) -> Function:
        """Wrap a model's `forward` so that its own output layer is traced from then on.

        The output layer is an ordinary column-parallel linear, whose class is used everywhere, so
        the object itself is wrapped.
        """

        def wrap_output_layer(call: Call) -> None:
            layer = getattr(call.positional[0], "output_layer", None)
            if layer is not None and "forward" not in vars(layer):
                traced = self.forward_of(OUTPUT_LAYER, type(layer).forward)
                layer.forward = traced.__get__(layer)
                self._patched.append(weakref.ref(layer))

        return before(self.tracer, original, wrap_output_layer)

    def remove(self) -> None:
        """Restore the output layers' own forward."""
        for reference in self._patched:
            layer = reference()
            if layer is not None:
                vars(layer).pop("forward", None)
        self._patched.clear()


_Finder: TypeAlias = "Callable[[tuple[object, ...], dict[str, object]], torch.Tensor | None]"


def _activation_finder() -> _Finder:
    """Return a function that finds the first argument after `self` that needs a gradient.

    It returns None if that is a weight, as a hook would stay on the weight.
    """
    from torch import Tensor
    from torch.nn import Parameter

    def find(positional: tuple[object, ...], named: dict[str, object]) -> torch.Tensor | None:
        for value in (*positional[1:], *named.values()):
            if isinstance(value, Tensor) and value.requires_grad:
                is_weight = value.grad_fn is None and isinstance(value, Parameter)
                return None if is_weight else value
        return None

    return find


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
        tracer.add(Kind.DATA, BATCH_GENERATOR, begin, tracer.mark_host(), arguments)
        return item

    def __getattr__(self, name: str) -> object:
        return getattr(self._data, name)


@dataclass(eq=False)
class Passes:
    """Wraps the steps that megatron.core's schedules are made of.

    A pass begins behind an exchange with another stage, in which the schedule has waited for the
    device (`PointToPoint`). So only what the pass itself needs is done before it; what can wait is
    done after it, when the device has all of its kernels queued.
    """

    tracer: RecordingTracer
    position: Position
    backward_spans: BackwardSpans
    updates: Updates

    def forward_step(self, original: Function) -> Function:
        """Record `forward`: one microbatch through one chunk, with its loss; not in evaluations."""
        import torch

        microbatch_of = argument_reader(original, "current_microbatch")
        chunk_of = argument_reader(original, "vp_stage")
        input_of = argument_reader(original, "input_tensor")
        config_of = argument_reader(original, "config")
        data_of = argument_reader(original, "data_iterator")
        set_data = argument_writer(original, "data_iterator")
        position, tracer = self.position, self.tracer

        def enter(call: Call) -> bool:
            position.passes_known = True
            if not torch.is_grad_enabled():
                return False
            slot = (cast(int, microbatch_of(call) or 0), cast(int, chunk_of(call) or 0))
            position.slot, position.phase = slot, Phase.FORWARD
            data = data_of(call)
            if _is_plain_iterator(data):
                set_data(call, TracedIterator(tracer, position, cast("Iterator[object]", data)))
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            arguments = position.arguments()
            tracer.add(Kind.COMPUTE, FORWARD, call.memory, tracer.mark(), arguments)
            output = first_of(cast("tuple[object, object]", result)[0])
            if position.slot is not None:
                position.learn(first_of(input_of(call)), position.slot)
                position.outputs[id(output)] = position.slot
            position.slot = position.phase = None
            self.updates.trace_finalize(cast(Config, config_of(call)))
            return result

        return around(tracer, original, enter, leave)

    def model_forward(self, original: Function) -> Function:
        """Note how many tokens a rank's first chunk gets: the length of a pass depends on them."""
        import torch

        tokens_of = argument_reader(original, "input_ids")
        packed_of = argument_reader(original, "packed_seq_params")
        position, tracer = self.position, self.tracer
        known: set[int] = set()  # chunks whose layers have been noted

        def enter(_: Call) -> bool:
            return True

        def note(call: Call, result: object) -> object:
            model = call.positional[0]
            if id(model) not in known:
                known.add(id(model))
                tracer.note_kinds(kinds_of(numbered_layers(model)))
            is_first = position.slot is None or position.slot[1] == 0
            if is_first and torch.is_grad_enabled():
                # a packed sequence's attention depends on where its documents end
                is_packed = packed_of(call) is not None
                tracer.note_tokens(0 if is_packed else num_tokens(model, tokens_of(call)))
            return result

        return around(tracer, original, enter, note)

    def calculate_loss(self, original: Function) -> Function:
        """Record `loss`: the trainer's loss function, on the stage that has one."""
        function_of = argument_reader(original, "loss_func")
        set_function = argument_writer(original, "loss_func")

        position, tracer = self.position, self.tracer

        def wrap_loss(call: Call) -> None:
            function = cast("Function | None", function_of(call))
            if function is not None and not position.is_elsewhere:
                traced = in_span(tracer, function, LOSS, Kind.COMPUTE, position.arguments)
                set_function(call, traced)

        return before(tracer, original, wrap_loss)

    def backward_step(self, original: Function) -> Function:
        """Record `backward`: the gradients of one microbatch through one chunk."""
        output_of = argument_reader(original, "output_tensor")
        gradient_of = argument_reader(original, "output_tensor_grad")
        position, tracer = self.position, self.tracer

        def enter(call: Call) -> bool:
            output = first_of(output_of(call))
            position.slot = position.outputs.pop(id(output), None)
            position.phase = Phase.BACKWARD
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            self.backward_spans.end_all()
            tracer.add(Kind.COMPUTE, BACKWARD, call.memory, tracer.mark(), position.arguments())
            gradient = first_of(result)
            if position.slot is not None:
                position.learn(first_of(gradient_of(call)), position.slot)
                if gradient is not None:
                    position.gradients[id(gradient)] = position.slot
            position.slot = position.phase = None
            return result

        return around(tracer, original, enter, leave)

    def weight_gradients(self, original: Function) -> Function:
        """Record `backward-weights`: the second half of a backward pass that a plan splits."""
        microbatch_of = argument_reader(original, "microbatch")
        chunk_of = argument_reader(original, "chunk")
        position, tracer = self.position, self.tracer

        def enter(call: Call) -> bool:
            position.slot = (cast(int, microbatch_of(call)), cast(int, chunk_of(call)))
            position.phase = Phase.BACKWARD
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            arguments = position.arguments()
            tracer.add(Kind.COMPUTE, BACKWARD_WEIGHTS, call.memory, tracer.mark(), arguments)
            position.slot = position.phase = None
            return result

        return around(tracer, original, enter, leave)


def num_tokens(model: object, tokens: object) -> int:
    """Return how many tokens a chunk of a model gets: by the shape of `tokens` (batch, sequence),
    or in a later stage of its input (sequence, batch, hidden); 0 if that is absent.
    """
    if not getattr(model, "pre_process", True):
        tokens = getattr(getattr(model, "decoder", None), "input_tensor", None)
    shape: tuple[int, ...] = getattr(tokens, "shape", ())
    return int(shape[0] * shape[1]) if len(shape) > 1 else 0


def _is_plain_iterator(data: object) -> bool:
    return data is not None and hasattr(data, "__next__") and not isinstance(data, TracedIterator)


class _Transfer(Protocol):
    """What a plan of the trainer says about one end of a message."""

    operation: str
    direction: str
    peer: int
    microbatch: int
    chunk: int


@dataclass(slots=True)
class _Message:
    """One message of an exchange; `handle` is its key among an overlapped exchange's handles.

    `tensor` is what is sent, or what has been received.
    """

    name: str
    handle: str
    arguments: Arguments
    tensor: torch.Tensor | None


@dataclass(eq=False)
class PointToPoint:
    """Wraps `P2PCommunicator._communicate`, through which all exchanges of the schedules go."""

    tracer: RecordingTracer
    position: Position
    groups: Groups

    def communicate(self, original: Function) -> Function:
        """Record send_forward, recv_forward, send_backward and recv_backward.

        The schedules wait for the device in each exchange, so after it the device has nothing to do
        until training launches something. All that is known before the exchange is therefore
        written down before, while the device still computes.
        """
        readers = [argument_reader(original, name) for name in _EXCHANGED]
        tracer = self.tracer

        def enter(call: Call) -> bool:
            messages = list(self._messages(call.positional[0], [read(call) for read in readers]))
            call.memory = messages, tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            messages, begin = cast("tuple[list[_Message], Mark]", call.memory)
            from_previous, from_next, handles = cast("tuple[object, object, object]", result)
            end = tracer.mark() if messages and not handles else None
            for message in messages:
                if message.tensor is None:
                    received = from_previous if message.handle == "recv_prev" else from_next
                    self._complete(message, cast("torch.Tensor", received))
                if end is not None:
                    tracer.add(Kind.P2P, message.name, begin, end, message.arguments)
            if isinstance(handles, dict) and handles:
                self._follow(messages, begin, handles)
            return result

        return around(tracer, original, enter, leave)

    def transfer(self, original: Function) -> Function:
        """Record spans as `communicate` does for messages that a plan sends one by one.

        Such plans are in `training.pipeline`. Each channel has a process group of its own, but
        spans name the group of the pipeline, as all messages do.
        """
        from megatron.core import parallel_state

        transfer_of = argument_reader(original, "transfer")
        tensor_of = argument_reader(original, "tensor")
        tracer = self.tracer

        def enter(call: Call) -> bool:
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            transfer = cast(_Transfer, transfer_of(call))
            tensor = cast("torch.Tensor", tensor_of(call))
            name = message_name(transfer.operation, transfer.direction)
            group = self.groups.name(parallel_state.get_pipeline_model_parallel_group())
            arguments = self.position.message(
                str(transfer.operation),
                transfer.direction,
                peer=transfer.peer,
                group=group,
                size_bytes=tensor.nbytes,
            )
            arguments["microbatch"], arguments["chunk"] = transfer.microbatch, transfer.chunk
            work, lane = cast(AsyncWork, result), f"{name} {transfer.peer}"
            return self.groups.follow(
                tracer, work, name, call.memory, arguments, lane=lane, keep=tensor
            )

        return around(tracer, original, enter, leave)

    def _messages(self, communicator: object, exchanged: Sequence[object]) -> Iterator[_Message]:
        """Yield the messages of an exchange that begins; what is received has no tensor yet."""
        previous = communicator.prev_rank  # type: ignore[attr-defined]
        following = communicator.next_rank  # type: ignore[attr-defined]
        group = self.groups.name(communicator.pp_group)  # type: ignore[attr-defined]
        peers = (previous, previous, following, following)
        for name, handle, peer, what in zip(MESSAGES, _HANDLES, peers, exchanged, strict=True):
            if what is None or what is False:
                continue
            operation, _, direction = name.partition("_")
            arguments = self.position.message(
                operation, direction, peer=peer, group=group, size_bytes=0
            )
            message = _Message(name, handle, arguments, None)
            if operation != RECV:
                self._complete(message, cast("torch.Tensor", what))
            yield message

    def _complete(self, message: _Message, tensor: torch.Tensor) -> None:
        """Give a message its tensor; microbatch and chunk of a received tensor are set later."""
        message.tensor, arguments = tensor, message.arguments
        arguments["size_bytes"] = tensor.nbytes
        identity, position = id(tensor), self.position
        if arguments["op"] == RECV:
            position.received[identity] = arguments
            return
        made = position.outputs if arguments["direction"] == FORWARD else position.gradients
        if identity in made:
            arguments["microbatch"], arguments["chunk"] = made[identity]

    def _follow(self, messages: list[_Message], begin: Mark, handles: dict[str, AsyncWork]) -> None:
        """Record an overlapped exchange: each message until the message's own work is done."""
        for message in messages:
            work = handles.get(message.handle)
            if work is not None:
                name, arguments = message.name, message.arguments
                handles[message.handle] = self.groups.follow(
                    self.tracer, work, name, begin, arguments, lane=name, keep=message.tensor
                )


class CheckpointSaves:
    """Wraps functions that save checkpoints, on the training thread; a save that another save calls
    is part of it.
    """

    def __init__(self, tracer: RecordingTracer) -> None:
        self._tracer = tracer
        self._thread = threading.get_ident()
        self._is_saving = False

    def save_checkpoint(self, original: Function) -> Function:
        """Record `save-checkpoint`, also between iterations.

        Between windows the span goes to the next window, under the number of the iteration before
        it, traced or not.
        """
        tracer = self._tracer

        @functools.wraps(original)
        def traced(*positional: object, **named: object) -> object:
            is_part = self._is_saving or threading.get_ident() != self._thread
            if is_part or not tracer.waiting:
                return original(*positional, **named)
            begin = tracer.mark_host()
            self._is_saving = True
            try:
                result = original(*positional, **named)
            finally:
                self._is_saving = False
            try:
                tracer.add(Kind.CHECKPOINT, SAVE_CHECKPOINT, begin, tracer.mark_host(), {})
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
                name = collection_of(info["generation"])
                end = self._tracer.mark_host()
                self._tracer.add(Kind.GC, name, self._begin, end, {})
                self._begin = None
        except Exception as error:
            self._tracer.fail(error)

    def granularity_lowered(self) -> None:
        """Stop listening to the collector."""
        self.tracing_ends()

    def tracing_ends(self) -> None:
        """Stop listening to the collector."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
