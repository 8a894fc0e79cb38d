"""Wrap places in other people's code, and know where a rank is within its iteration.

A place is a function that is wrapped while a run is traced, and put back afterwards. `Position`
holds microbatch, chunk, layer, pass and the running numbers of operations.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import TypeAlias, TypeVar

from megascan.schema import Granularity, Kind, Phase
from megascan.tracer import Arguments, IterationListener, RecordingTracer
from megascan.vocabulary import message_name

Function: TypeAlias = Callable[..., object]
Undo: TypeAlias = Callable[[], None]

_NOT_REBOUND = "torch"
"""Package whose modules keep their references, by which its functions call each other."""
_REBOUND = "torch.distributed.distributed_c10d"
"""The one module of _NOT_REBOUND whose references are replaced: DeepSpeed calls functions by it."""
_WITHOUT_TORCH = frozenset({"mpmath", "numpy", "pandas", "sympy"})
"""Packages that import nothing of torch or of what is built on it, and so refer to no function that
is replaced. They hold half of the names that there are in a trainer."""


@dataclass(slots=True)
class Call:
    """A call under way: the arguments to use, and what `leave` needs from `enter`."""

    positional: tuple[object, ...]
    named: dict[str, object]
    memory: object = None


Enter: TypeAlias = Callable[[Call], bool]
Leave: TypeAlias = Callable[[Call, object], object]


Memory = TypeVar("Memory")
"""Type of what `beside` keeps from the begin of a call to its end."""


def around(tracer: RecordingTracer, original: Function, enter: Enter, leave: Leave) -> Function:
    """Wrap `original` with tracing that never makes the call fail.

    `enter` may change the call's arguments and returns whether the call is traced; `leave` returns
    the result to hand on. An error in `enter` or `leave` stops tracing, not the call. If `original`
    itself raises, nothing is recorded.
    """

    @functools.wraps(original)
    def traced(*positional: object, **named: object) -> object:
        if not tracer.active:
            return original(*positional, **named)
        call = Call(positional, named)
        try:
            wanted = enter(call)
        except Exception as error:
            tracer.fail(error)
            return original(*positional, **named)
        result = original(*call.positional, **call.named)
        if not wanted:
            return result
        try:
            return leave(call, result)
        except Exception as error:
            tracer.fail(error)
            return result

    return traced


def before(tracer: RecordingTracer, original: Function, act: Callable[[Call], object]) -> Function:
    """Wrap `original` as `around` does, but only call `act` before it; nothing is recorded."""

    def enter(call: Call) -> bool:
        act(call)
        return False

    return around(tracer, original, enter, lambda call, result: result)


def beside(
    tracer: RecordingTracer,
    original: Function,
    begin: Callable[[tuple[object, ...], dict[str, object]], Memory | None],
    end: Callable[[Memory, object], None],
) -> Function:
    """Wrap `original` as `around` does, but without changing arguments or result; this is cheaper.

    `begin` gets the arguments and returns a memory for `end`, or None if the call is not traced;
    `end` gets the memory and the result.
    """

    @functools.wraps(original)
    def traced(*positional: object, **named: object) -> object:
        if not tracer.active:
            return original(*positional, **named)
        try:
            memory = begin(positional, named)
        except Exception as error:
            tracer.fail(error)
            memory = None
        result = original(*positional, **named)
        if memory is not None:
            try:
                end(memory, result)
            except Exception as error:
                tracer.fail(error)
        return result

    return traced


def in_span(
    tracer: RecordingTracer,
    original: Function,
    name: str,
    kind: Kind,
    arguments: Callable[[], Arguments] = dict,
) -> Function:
    """Wrap a function so that each call is one span."""

    def enter(call: Call) -> bool:
        call.memory = tracer.mark()
        return True

    def leave(call: Call, result: object) -> object:
        tracer.add(kind, name, call.memory, tracer.mark(), arguments())
        return result

    return around(tracer, original, enter, leave)


@dataclass(frozen=True)
class Place:
    """A function or method, and the wrapper that is put around it.

    `module` and `attribute` name the function (``schedules``, ``P2PCommunicator._communicate``).
    Places that the installed version does not have are skipped. `wrap` gets the original and
    returns its replacement.
    """

    module: str
    attribute: str
    wrap: Callable[[Function], Function]
    granularity: Granularity = Granularity.BASE


@dataclass
class Installation(IterationListener):
    """All replacements that were made, to be undone together when tracing ends.

    Those that only granularity `full` needs are undone when the granularity is lowered.
    """

    undo: list[Undo] = field(default_factory=list)
    undo_full: list[Undo] = field(default_factory=list)

    def install(self, places: Sequence[Place]) -> list[Place]:
        """Wrap places wherever code refers to them; return the places that exist."""
        found = [spot for spot in map(_find, places) if spot is not None]
        bindings = _bindings([spot.original for spot in found if spot.is_of_module])
        installed = []
        for place in places:
            spot = _find(place)  # again: an earlier place may have wrapped this function
            if spot is None:
                continue
            replacement = place.wrap(spot.original)
            _hand_on_cache(spot.original, replacement)
            holders: list[tuple[object, str]] = [(spot.owner, spot.name)]
            if spot.is_of_module:
                holders += bindings.get(id(spot.original), [])
                bindings[id(replacement)] = holders
            undo = self.undo_full if place.granularity is Granularity.FULL else self.undo
            undo += [
                _replace(holder, alias, spot.original, replacement) for holder, alias in holders
            ]
            installed.append(place)
        return installed

    def granularity_lowered(self) -> None:
        """Undo the replacements that only granularity `full` needs, the last first."""
        while self.undo_full:
            self.undo_full.pop()()

    def tracing_ends(self) -> None:
        """Undo all replacements, the last first."""
        self.granularity_lowered()
        while self.undo:
            self.undo.pop()()


_OF_CACHES = ("cache_clear", "cache_info")
"""Methods that `functools.lru_cache` adds to a function, which `functools.wraps` does not copy."""


def _hand_on_cache(original: Function, replacement: Function) -> None:
    """Give the replacement of a cached function the methods of the cache: Megatron-Core empties the
    caches of some `forward` methods by `self.forward.cache_clear()`.
    """
    for name in _OF_CACHES:
        if hasattr(original, name) and not hasattr(replacement, name):
            setattr(replacement, name, getattr(original, name))


def _replace(owner: object, name: str, original: Function, replacement: Function) -> Undo:
    setattr(owner, name, replacement)

    def put_back() -> None:
        if vars(owner).get(name) is replacement:  # else other code has replaced it since
            setattr(owner, name, original)

    return put_back


@dataclass(frozen=True)
class _Spot:
    """Where a place's function is bound now: its module, or a class in that module."""

    owner: object
    name: str
    original: Function

    @property
    def is_of_module(self) -> bool:
        return isinstance(self.owner, ModuleType)


def _find(place: Place) -> _Spot | None:
    """Return where a place's function is bound; None if it is not installed or not in use."""
    library = ".".join(place.module.split(".")[:2])  # megatron.core, torch.distributed
    if library not in sys.modules:
        return None
    try:
        module = importlib.import_module(place.module)
    except ImportError:
        return None
    owner_name, _, name = place.attribute.rpartition(".")
    owner = getattr(module, owner_name, None) if owner_name else module
    original = vars(owner).get(name) if owner is not None else None
    return None if original is None else _Spot(owner, name, original)


def _bindings(originals: Sequence[Function]) -> dict[int, list[tuple[object, str]]]:
    """Return by identity of each function where it is bound: `from x import f`, `alias = x.f`,
    `self.f = x.f`.

    Thousands of modules hold some 100,000 names, so they are searched once for all functions, and
    those that cannot refer to any are left out.
    """
    found: dict[int, list[tuple[object, str]]] = {id(original): [] for original in originals}
    for holder in (*_modules(), *_keepers(originals)):
        attributes = dict(vars(holder))
        if found.keys().isdisjoint(map(id, attributes.values())):
            continue
        for name, value in attributes.items():
            if id(value) in found:
                found[id(value)].append((holder, name))
    return found


def _modules() -> Iterator[object]:
    """Yield the modules whose references to functions are replaced."""
    for name, module in list(sys.modules.items()):
        is_searched = _is_others(name) and name.partition(".")[0] not in _WITHOUT_TORCH
        if isinstance(module, ModuleType) and (name == _REBOUND or is_searched):
            yield module


def _is_others(module_name: str) -> bool:
    return module_name.partition(".")[0] != _NOT_REBOUND


def _keepers(originals: Sequence[Function]) -> list[object]:
    """Return the objects that keep any of the functions as an attribute of their own.

    The garbage collector knows these objects, or only the dicts of their attributes.
    """
    holders = gc.get_referrers(*originals) if originals else []
    dicts = [one for one in holders if isinstance(one, dict)]
    owners = gc.get_referrers(*dicts) if dicts else []
    return [one for one in (*holders, *owners) if _lets_attributes_be_set(one)]


def _lets_attributes_be_set(holder: object) -> bool:
    """Return whether an object is an ordinary object outside of torch: no module, class or
    function.
    """
    kind = type(holder)
    if kind.__setattr__ is not object.__setattr__ or not _is_others(kind.__module__):
        return False
    try:
        has_own = isinstance(vars(holder), dict)
    except Exception:  # a proxy that is not bound to an object
        return False
    return has_own and not isinstance(holder, ModuleType | FunctionType)


Slot: TypeAlias = tuple[int, int]
"""(microbatch, chunk)."""

_TEXTS = {phase: str(phase) for phase in Phase}


@dataclass
class Position(IterationListener):
    """Where a rank is within an iteration; reset at each iteration.

    `outputs` has, by identity of a tensor that a forward returned, the microbatch and chunk, for
    the tensor's backward. `received` has, by identity of a received tensor, the arguments of its
    message, which get microbatch and chunk when the tensor is used. Identities are safe: the
    schedule keeps these tensors until then. `passes_known` says that it is known where forward and
    backward begin and end.
    """

    slot: Slot | None = None
    phase: Phase | None = None
    layer: int | None = None
    passes_known: bool = False
    outputs: dict[int, Slot] = field(default_factory=dict)
    gradients: dict[int, Slot] = field(default_factory=dict)
    received: dict[int, Arguments] = field(default_factory=dict)
    _numbers: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def iteration_begins(self) -> None:
        """Forget the last iteration; numbers start at 0 again, so that a lost event has no effect
        on later iterations.
        """
        self.slot = self.phase = self.layer = None
        for memory in (self.outputs, self.gradients, self.received, self._numbers):
            memory.clear()

    def number(self, group: str, operation: str) -> int:
        """Return the running number of an operation within (iteration, group)."""
        key = (group, operation)
        number = self._numbers[key]
        self._numbers[key] = number + 1
        return number

    def message(
        self, operation: str, direction: str, *, peer: int, group: str, size_bytes: int
    ) -> Arguments:
        """Return the arguments of a message, which gets the next running number of its channel."""
        return {
            "op": operation,
            "direction": direction,
            "peer": peer,
            "group": group,
            "sequence": self.number(f"peer {peer}", message_name(operation, direction)),
            "size_bytes": size_bytes,
        }

    def arguments(self) -> Arguments:
        """Return microbatch, chunk, layer and phase as far as they apply here."""
        arguments: Arguments = {}
        if self.slot is not None:
            arguments["microbatch"], arguments["chunk"] = self.slot
        if self.layer is not None:
            arguments["layer"] = self.layer
        if self.phase is not None:
            arguments["phase"] = _TEXTS[self.phase]
        return arguments

    @property
    def is_elsewhere(self) -> bool:
        """Return whether an evaluation runs now, which needs no gradients and is in no pass."""
        if not self.passes_known or self.phase is not None:
            return False
        import torch

        return not torch.is_grad_enabled()

    def learn(self, tensor: object, slot: Slot) -> None:
        """Give a received tensor's message its microbatch and chunk when the tensor is used."""
        arguments = self.received.pop(id(tensor), None)
        if arguments is not None:
            arguments["microbatch"], arguments["chunk"] = slot


def first_of(value: object) -> object:
    """Return the tensor from a value of a schedule: a tensor, or a list with a tensor."""
    return value[0] if isinstance(value, list) and value else value
