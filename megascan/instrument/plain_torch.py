"""Record jobs of plain PyTorch through hooks: DDP, FSDP2, stages of torch's own pipelines.

Without megatron.core's schedules no function marks where a microbatch begins, so the model does:
every call of the model is the `forward` of the next microbatch, and every `torch.autograd.backward`
is a `backward`, whose microbatch is known when the gradient of a model's output passes. What
autograd does after the last gradient, where DDP and FSDP wait for their reductions, is `grad-sync`:

    backward:  call ──► gradients of the model ──► last one │ grad-sync: reductions ──► return

Hooks change neither the graph nor a bit of the gradients. One thing is put into a model: DDP
reduces gradients in C++, where nothing can be seen, unless it is given a hook that reduces them in
Python.

`torch.distributed.pipelining` names no stages, only ranks: a message to a later rank is called
forward, a message to an earlier rank backward. So both ends of a message have the same name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.distributed as dist

from megascan.config import LEAST_LAYERS_OF_PLAIN_MODELS
from megascan.instrument.collectives import (
    Groups,
    PendingWork,
    reduce_visibly,
    reduces_in_backward,
    reduces_now,
    replica_of,
)
from megascan.instrument.layers import kinds_of
from megascan.instrument.megatron import NOT_TAKEN, BackwardSpans
from megascan.instrument.place import Call, Function, Position, around, before
from megascan.schema import Kind, Phase
from megascan.tracer import Arguments, AsyncWork, IterationListener, Mark, RecordingTracer
from megascan.vocabulary import (
    BACKWARD,
    BATCH_GENERATOR,
    FORWARD,
    GRAD_SYNC,
    PLAIN_LAYER,
    RECV,
    SEND,
    backward_of,
    message_name,
    recompute_of,
)

if TYPE_CHECKING:
    from torch.distributed import P2POp
    from torch.utils.hooks import RemovableHandle


_LAYER_BACKWARD, _LAYER_REPEATED = backward_of(PLAIN_LAYER), recompute_of(PLAIN_LAYER)
_OpenLayer: TypeAlias = "tuple[Mark, Phase | None, torch.Tensor | None]"
"""When a layer was called, in which phase, and with which activation."""


class WatchedModels(IterationListener):
    """Hooks on the models of a rank, one model a chunk; hooks are removed when tracing ends."""

    def __init__(
        self,
        tracer: RecordingTracer,
        position: Position,
        backward_spans: BackwardSpans,
        models: Sequence[torch.nn.Module],
    ) -> None:
        self._tracer = tracer
        self._position = position
        self._backward_spans = backward_spans
        models = [replica_of(model) for model in models]
        self._num_forwards = [0] * len(models)
        self._reducing = [model for model in models if reduces_in_backward(model)]
        position.passes_known = True
        tracer.layers.least = LEAST_LAYERS_OF_PLAIN_MODELS
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        self._layer_handles: list[RemovableHandle] = []
        self._open_forwards: list[list[Mark]] = []
        self._open_layers: list[list[_OpenLayer]] = []
        self._compute_end: Mark = None
        self._backward_arguments: Arguments = {}
        for chunk, model in enumerate(models):
            self._watch_model(model, chunk)
            compiled = _inside_compiled(model)
            layers = list(enumerate(layers_of(model), start=1))
            tracer.note_kinds(kinds_of(layers))
            for number, layer in layers if tracer.full else ():
                if layer not in compiled:
                    self._watch_layer(layer, number)
            reduce_visibly(model)

    def iteration_begins(self) -> None:
        """Count microbatches from 0 again."""
        self._num_forwards = [0] * len(self._num_forwards)
        self._depth = 0
        for forwards in self._open_forwards:  # calls that ended with an exception
            forwards.clear()
        for layers in self._open_layers:
            layers.clear()

    def granularity_lowered(self) -> None:
        """Remove the hooks of layers."""
        while self._layer_handles:
            self._layer_handles.pop().remove()

    def tracing_ends(self) -> None:
        """Remove all hooks."""
        self.granularity_lowered()
        while self._handles:
            self._handles.pop().remove()

    # The model as a whole

    def _watch_model(self, model: torch.nn.Module, chunk: int) -> None:
        position, open_marks = self._position, list[Mark]()
        self._open_forwards.append(open_marks)

        def begin(positional: tuple[object, ...], named: dict[str, object]) -> None:
            if not torch.is_grad_enabled():  # an evaluation
                return
            if chunk == 0:
                self._tracer.note_tokens(num_tokens(positional, named))
            position.slot = (self._num_forwards[chunk], chunk)
            self._num_forwards[chunk] += 1
            position.phase = Phase.FORWARD
            open_marks[:] = [self._tracer.mark()]

        def end(output: object) -> None:
            if open_marks and position.slot is not None:
                arguments = position.arguments()
                now = self._tracer.mark()
                self._tracer.add(Kind.COMPUTE, FORWARD, open_marks.pop(), now, arguments)
                self._await_gradient(output, position.slot)
            position.phase = None

        self._handles += self._hook(model, begin, end)

    def _await_gradient(self, output: object, slot: tuple[int, int]) -> None:
        """Have the gradient of an output tell the microbatch of the backward under way."""
        tensor = _first_tensor(output)
        if tensor is not None and tensor.grad_fn is not None:
            self._position.outputs[id(tensor)] = slot
            tensor.register_hook(lambda _: self._guarded(lambda: self._gradient_came(slot)))  # type: ignore[no-untyped-call]

    def _gradient_came(self, slot: tuple[int, int]) -> None:
        from torch.autograd import Variable

        self._position.slot = slot
        self._backward_arguments["microbatch"], self._backward_arguments["chunk"] = slot
        if self._compute_end is None:
            callback = functools.partial(self._guarded, self._compute_ended)
            Variable._execution_engine.queue_callback(callback)

    def _compute_ended(self) -> None:
        """Note that autograd has computed the last gradient; only reductions are waited for now."""
        if self._depth == 1 and self._compute_end is None:
            self._backward_spans.end_all()
            self._compute_end = self._tracer.mark()

    def final_wait(self, original: Function) -> Function:
        """Wrap what FSDP2 does when autograd has ended: it waits for the last reduction, and its
        callback was queued before ours.
        """
        return before(self._tracer, original, lambda _: self._compute_ended())

    def backward(self, original: Function) -> Function:
        """Wrap `torch.autograd.backward`; a call inside another repeats a checkpointed forward."""
        tracer, position = self._tracer, self._position

        def enter(call: Call) -> bool:
            self._depth += 1
            if self._depth == 1:
                position.phase, self._compute_end = Phase.BACKWARD, None
                self._backward_arguments = {"phase": str(Phase.BACKWARD)}
                call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            self._depth -= 1
            if self._depth == 0:
                self._record_backward(call.memory)
            return result

        return around(tracer, original, enter, leave)

    def _record_backward(self, begin: Mark) -> None:
        end = self._tracer.mark()
        compute_end = end if self._compute_end is None else self._compute_end
        arguments = self._backward_arguments
        self._tracer.add(Kind.COMPUTE, BACKWARD, begin, compute_end, arguments)
        if any(map(reduces_now, self._reducing)) and compute_end is not end:
            self._tracer.add(Kind.OPTIMIZER, GRAD_SYNC, compute_end, end, {})
        self._position.phase = self._position.slot = None

    # Its layers

    def _watch_layer(self, layer: torch.nn.Module, number: int) -> None:
        position, opened = self._position, list[_OpenLayer]()
        self._open_layers.append(opened)

        def begin(inputs: tuple[object, ...], _: dict[str, object]) -> None:
            if position.is_elsewhere:
                return
            source = _first_tensor(inputs)
            is_taken = self._tracer.layers.takes(number, position.slot[1] if position.slot else 0)
            began = self._tracer.mark_at(source) if is_taken else NOT_TAKEN
            opened.append((began, position.phase, source))
            position.layer = number
            if position.phase is Phase.BACKWARD:
                position.phase = Phase.RECOMPUTE

        def end(output: object) -> None:
            if not opened or position.is_elsewhere:
                return
            began, phase, source = opened.pop()
            if began is not NOT_TAKEN:
                self._record_layer(began, source, _first_tensor(output))
            position.phase, position.layer = phase, None

        self._layer_handles += self._hook(layer, begin, end)

    def _record_layer(
        self, began: Mark, source: torch.Tensor | None, result: torch.Tensor | None
    ) -> None:
        """Record a layer's forward, and watch for its backward."""
        repeated = self._position.phase is Phase.RECOMPUTE
        arguments = self._position.arguments()
        name = _LAYER_REPEATED if repeated else PLAIN_LAYER
        now = self._tracer.mark_at(result, began)
        self._tracer.add(Kind.COMPUTE, name, began, now, arguments)
        if result is not None and result.grad_fn is not None and source is not result:
            self._backward_spans.watch(_LAYER_BACKWARD, arguments, source, result)

    def _hook(
        self,
        module: torch.nn.Module,
        begin: Callable[[tuple[object, ...], dict[str, object]], None],
        end: Callable[[object], None],
    ) -> list[RemovableHandle]:
        """Call `begin` with a module's arguments, `end` with its output, if it is being traced."""

        def enter(
            _: torch.nn.Module, positional: tuple[object, ...], named: dict[str, object]
        ) -> None:
            self._guarded(lambda: begin(positional, named))

        def leave(_: torch.nn.Module, __: tuple[object, ...], output: object) -> None:
            self._guarded(lambda: end(output))

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call `act` while spans are recorded; an error stops tracing, never training."""
        if not self._tracer.active:
            return
        try:
            act()
        except Exception as error:
            self._tracer.fail(error)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a model: the members of its outermost lists of modules, or without lists
    its children.

        GPT2LMHeadModel ─► transformer ─► h: ModuleList of 12 blocks     the 12 blocks
                        └► lm_head
        T5Model ─► encoder ─► block: ModuleList, decoder ─► block        the blocks of both

    Wrappers with a single child (DDP, a compiled or a half-precision model) are looked through.
    """
    inside = [model]
    while len(inside) == 1 and not _is_list(inside[0]):
        inside = list(inside[0].children())
    return [layer for part in inside for layer in _listed(part)] or inside


def _listed(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the members of the outermost lists in a module, in the order of the module."""
    if _is_list(module):
        yield from module.children()
        return
    for part in module.children():
        yield from _listed(part)


def _is_list(module: torch.nn.Module) -> bool:
    """Return whether a module is a list of modules, or a dict of modules of one class."""
    if isinstance(module, torch.nn.ModuleDict):
        return len(module) > 1 and len({type(part) for part in module.values()}) == 1
    return isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)


_SAYS_NOTHING = ("label", "target", "position")
"""Parts of names of arguments that tell nothing more: they have a number for every token."""


def num_tokens(positional: Sequence[object], named: Mapping[str, object]) -> int:
    """Return how many tokens a call of a model gets; 0 if other arguments may influence how long it
    takes: a mask, ends of documents, tensors inside other values.

        (batch, sequence)              whole numbers: batch · sequence
        (batch, sequence, hidden)      batch · sequence
    """
    unnamed = [one for one in positional if not isinstance(one, dict)]
    for batch in positional:  # as a whole, as Lightning hands it on
        named = {**named, **batch} if isinstance(batch, dict) else named
    others = [
        value
        for name, value in named.items()
        if not any(word in str(name) for word in _SAYS_NOTHING)
    ]
    given = [one for one in (*unnamed, *others) if not _is_plain(one)]
    tokens = given[0] if len(given) == 1 else None
    if not isinstance(tokens, torch.Tensor) or tokens.is_nested:
        return 0
    if tokens.is_floating_point() and tokens.ndim > 1:
        return tokens.numel() // max(tokens.shape[-1], 1)
    return tokens.numel()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _inside_compiled(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules that `torch.compile` compiles, whose graphs our hooks would break."""
    return {
        inner
        for module in model.modules()
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for inner in module.modules()
    }


def _first_tensor(value: object) -> torch.Tensor | None:
    """Return the first tensor in a value, also in tuples, lists and dicts, that needs a gradient
    and is no weight.
    """
    if isinstance(value, torch.Tensor):
        is_weight = isinstance(value, torch.nn.Parameter)
        return value if value.requires_grad and not is_weight else None
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | tuple | list):
        return None
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)  # type: ignore[attr-defined]


class Batches(IterationListener):
    """Records the batches that any data loader fetches in an iteration."""

    def __init__(self, tracer: RecordingTracer) -> None:
        self._tracer = tracer
        self._num_iterations = self._num_seen = self._num_unseen = 0

    def iteration_begins(self) -> None:
        """Count traced iterations."""
        self._num_iterations += 1

    def tracing_ends(self) -> None:
        """Warn if all batches were fetched between the iterations."""
        if self._num_seen or self._num_unseen < max(self._num_iterations, 1):
            return
        self._tracer.warn(
            "no batches",
            f"{self._num_unseen} batches were fetched from data loaders, none of them within "
            "tracer.iteration: a slow loader cannot be named; begin an iteration before its batch "
            "is fetched, see docs/other-trainers.md",
        )

    def next_batch(self, original: Function) -> Function:
        """Wrap the `__next__` of torch's data loaders."""
        tracer = self._tracer

        def enter(call: Call) -> bool:
            call.memory = tracer.mark_host()
            self._num_seen += 1
            return True

        def leave(call: Call, result: object) -> object:
            tracer.add(Kind.DATA, BATCH_GENERATOR, call.memory, tracer.mark_host(), {})
            return result

        recorded = around(tracer, original, enter, leave)

        @functools.wraps(original)
        def fetch(*positional: object, **named: object) -> object:
            self._num_unseen += not tracer.active
            return recorded(*positional, **named)

        return fetch


@dataclass(eq=False)
class Exchanges:
    """Wraps functions that take a list of `P2POp` and return their works."""

    tracer: RecordingTracer
    position: Position
    groups: Groups
    _depth: int = 0

    def batch(self, original: Function) -> Function:
        """Record all messages of a batch; a batch that another batch calls is part of it."""
        tracer = self.tracer

        def enter(call: Call) -> bool:
            if self._depth > 1:
                return False
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            if not isinstance(result, list) or not result:
                return result
            batch = cast("Sequence[P2POp]", next(iter((*call.positional, *call.named.values()))))
            return self._follow(batch, result, call.memory)

        recorded = around(tracer, original, enter, leave)

        @functools.wraps(original)
        def exchange(*positional: object, **named: object) -> object:
            self._depth += 1
            try:
                return recorded(*positional, **named)
            finally:  # also if it raises: the trainer may go on
                self._depth -= 1

        return exchange

    def _follow(
        self, batch: Sequence[P2POp], works: list[AsyncWork], begin: Mark
    ) -> list[PendingWork]:
        """Record each message until its work is done; a coalesced batch has a single work."""
        followed = list[PendingWork]()
        for number, message in enumerate(batch):
            work = works[min(number, len(works) - 1)]
            arguments = self._describe(message)
            name = message_name(str(arguments["op"]), str(arguments["direction"]))
            pending = self.groups.follow(
                self.tracer, work, name, begin, arguments, lane=name, keep=message.tensor
            )
            followed.append(pending)
        return followed[-len(works) :]

    def _describe(self, message: P2POp) -> Arguments:
        operation = SEND if message.op is dist.isend else RECV
        is_later = message.peer > dist.get_rank()
        direction = FORWARD if is_later == (operation == SEND) else BACKWARD
        arguments = self.position.message(
            operation,
            direction,
            peer=message.peer,
            group=self.groups.name(message.group),
            size_bytes=message.tensor.nbytes,
        )
        slot = self.position.outputs.get(id(message.tensor))
        if operation == SEND and slot is not None:
            arguments["microbatch"], arguments["chunk"] = slot
        return arguments
