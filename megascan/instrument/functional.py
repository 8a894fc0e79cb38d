"""Record torch's functional collectives, by which DTensor communicates (as in torchtitan).

    funcol.all_reduce(x) ──► a tensor that is not there yet ──► wait_tensor ──► y = x + it
    └── begin                                                            end ──┘

The first use of the result waits for it through `wait_tensor`: the span lasts from the call until
then. If that is in another layer or pass, the span stands on the overlapped track, and its end is
only a bound: how long the rank waited is unknown. Code that is being compiled is not traced: a
wrapper around a function would break its graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING

import torch

from megascan.instrument.collectives import ALL_TO_ALL, Collectives, argument_reader, size_bytes_of
from megascan.instrument.place import Call, Function, Place, Position
from megascan.tracer import Arguments, IterationListener, Mark, RecordingTracer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MODULE = "torch.distributed._functional_collectives"
FUNCTIONS = {
    "all_reduce": "all_reduce",
    "all_gather_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": ALL_TO_ALL,
}
"""Our operations by the functions' names in torch, old and new."""


@dataclass(slots=True, eq=False)
class _Begun:
    """A collective that has been launched."""

    operation: str
    begin: Mark
    arguments: Arguments
    place: tuple[object, ...]
    waited: Mark = None
    """When the collective's own call waited for it; None if it did not."""


@dataclass(eq=False)
class FunctionalCollectives(IterationListener):
    """Wraps the functions of `FUNCTIONS` and `wait_tensor`."""

    tracer: RecordingTracer
    position: Position
    collectives: Collectives
    _under_way: list[_Begun] = field(default_factory=list)
    _pending: dict[int, _Begun] = field(default_factory=dict)
    """Launched collectives by the storage of their results."""

    def iteration_begins(self) -> None:
        """Forget collectives that were not waited for, and calls that ended with an exception."""
        self._under_way.clear()
        self._pending.clear()

    def places(self) -> list[Place]:
        """Return the places to wrap."""
        launches = FUNCTIONS.items()
        return [
            *(Place(MODULE, name, partial(self._wrap, operation)) for name, operation in launches),
            Place(MODULE, "wait_tensor", self._wrap_wait),
        ]

    def _wrap(self, operation: str, original: Function) -> Function:
        group_of = argument_reader(original, "group")
        tracer = self.tracer

        @wraps(original)
        def traced(*positional: object, **named: object) -> object:
            if _is_compiling() or not tracer.active or self._under_way:  # inside another
                return original(*positional, **named)
            begun = None
            try:
                group = process_group(group_of(Call(positional, named)))
                begun = self._begin(operation, group, positional[0] if positional else None)
            except Exception as error:
                tracer.fail(error)
            if begun is None:
                return original(*positional, **named)
            self._under_way.append(begun)
            try:
                result = original(*positional, **named)
            finally:
                self._under_way.clear()
            try:
                self._launched(begun, result)
            except Exception as error:
                tracer.fail(error)
            return result

        return traced

    def _begin(self, operation: str, group: ProcessGroup | None, payload: object) -> _Begun | None:
        self.collectives.note_exchange(operation)
        if group is None:
            return None
        arguments = self.collectives.described(operation, group, size_bytes_of(payload))
        if arguments is None:
            return None
        begin = self.tracer.mark_before(payload)
        return _Begun(operation, begin, arguments, self._place())

    def _place(self) -> tuple[object, ...]:
        position = self.position
        return position.phase, position.slot, position.layer

    def _launched(self, begun: _Begun, result: object) -> None:
        elem = getattr(result, "elem", None)
        if begun.waited is not None:
            self._add(begun, begun.waited)
        elif elem is None:  # complete when it returns
            self._add(begun, self.tracer.mark_after(result))
        else:
            self._pending[_storage(elem)] = begun

    def _wrap_wait(self, original: Function) -> Function:
        tracer = self.tracer

        @wraps(original)
        def traced(tensor: torch.Tensor) -> object:
            result = original(tensor)
            if _is_compiling() or not tracer.active:
                return result
            try:
                self._waited(tensor, result)
            except Exception as error:
                tracer.fail(error)
            return result

        return traced

    def _waited(self, tensor: torch.Tensor, result: object) -> None:
        if self._under_way:
            self._under_way[-1].waited = self.tracer.mark_after(result)
            return
        begun = self._pending.pop(_storage(tensor), None) if self._pending else None
        if begun is not None:
            self._add(begun, self.tracer.mark_after(result))

    def _add(self, begun: _Begun, end: Mark) -> None:
        arguments = begun.arguments
        is_beside = begun.place != self._place()
        if is_beside:
            arguments["end_is_bound"] = 1
        lane = str(arguments["group"])
        self.tracer.add_collective(
            begun.operation, begun.begin, end, arguments, lane, is_beside=is_beside
        )


def _is_compiling() -> bool:
    return torch.compiler.is_compiling()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def process_group(given: object) -> ProcessGroup | None:
    """Return the group that a functional collective was given: as a group, by name, or as a mesh or
    a mesh dimension. Return None for lists of ranks, which have no named group.
    """
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, ProcessGroup):
        return given
    if isinstance(given, DeviceMesh):
        return given.get_group()
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        return given[0].get_group(given[1])
    if isinstance(given, str):
        from torch._C import _distributed_c10d

        resolve: Callable[[str], ProcessGroup] = vars(_distributed_c10d)["_resolve_process_group"]
        return resolve(given)
    return None
