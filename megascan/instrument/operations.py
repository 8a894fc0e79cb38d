"""The collectives of torch.distributed that are traced, and how their arguments are read."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

from megascan.instrument.place import Call, Function

_NOWHERE = sys.maxsize
"""Position of a parameter that a function does not have."""


@dataclass(frozen=True)
class Operation:
    """A function of torch.distributed: the name we give it and the argument that is its payload.

    `result` is the argument that is complete afterwards, where that is one tensor. `coalesces` says
    that inside a coalescing manager it is only noted down, and launched later.
    """

    function: str
    name: str
    payload: str | None
    result: str | None = None
    coalesces: bool = False


OPERATIONS = (
    Operation("all_reduce", "all_reduce", "tensor", "tensor", True),
    Operation("all_gather_into_tensor", "all_gather", "input_tensor", "output_tensor", True),
    Operation("all_gather_single", "all_gather", "input_tensor", "output_tensor", True),
    Operation("_all_gather_base", "all_gather", "input_tensor", "output_tensor", True),
    Operation("reduce_scatter_tensor", "reduce_scatter", "input", "output", True),
    Operation("reduce_scatter_single", "reduce_scatter", "input", "output", True),
    Operation("_reduce_scatter_base", "reduce_scatter", "input", "output", True),
    Operation("all_gather", "all_gather", "tensor"),
    Operation("reduce_scatter", "reduce_scatter", "input_list"),
    Operation("all_to_all_single", "all_to_all", "input", "output"),
    Operation("all_to_all", "all_to_all", "input_tensor_list"),
    Operation("broadcast", "broadcast", "tensor", "tensor"),
    Operation("reduce", "reduce", "tensor"),
    Operation("gather", "gather", "tensor"),
    Operation("scatter", "scatter", "tensor"),
    Operation("barrier", "barrier", None),
    Operation("all_gather_object", "all_gather_object", None),
    Operation("broadcast_object_list", "broadcast_object_list", None),
)


def argument_reader(function: Function, name: str | None) -> Callable[[Call], object]:
    """Reads one argument of a call, by name or position; None where it is not given.

    Binding a call to the whole signature takes ten times as long.
    """
    position = _position(function, name)

    def read(call: Call) -> object:
        if name in call.named:
            return call.named[name]
        return call.positional[position] if position < len(call.positional) else None

    return read


def argument_writer(function: Function, name: str) -> Callable[[Call, object], None]:
    """Replaces one argument of a call, wherever it was given."""
    position = _position(function, name)

    def write(call: Call, value: object) -> None:
        if position < len(call.positional):
            before, after = call.positional[:position], call.positional[position + 1 :]
            call.positional = (*before, value, *after)
        else:
            call.named[name] = value

    return write


def _position(function: Function, name: str | None) -> int:
    parameters = list(inspect.signature(function).parameters)
    return parameters.index(name) if name in parameters else _NOWHERE


def size_bytes_of(payload: object) -> int:
    """Bytes of a tensor or of a list of tensors."""
    if isinstance(payload, (list, tuple)):
        return sum(size_bytes_of(item) for item in payload)
    return int(getattr(payload, "nbytes", 0))
