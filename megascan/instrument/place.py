"""Places in other people's code, and where a rank is within its iteration.

A place is named, wrapped while a run is traced, and put back afterwards. `Position` holds
microbatch, chunk, layer, pass and the running numbers of operations.
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

from megascan.schema import Granularity, Phase
from megascan.tracer import Arguments, IterationListener, RecordingTracer

Function: TypeAlias = Callable[..., object]
Undo: TypeAlias = Callable[[], None]

_NOT_REBOUND = "torch"
"""The package whose modules keep their references: its functions call each other by them."""
_REBOUND = "torch.distributed.distributed_c10d"
"""The one module of it that others call functions by, DeepSpeed for one."""


@dataclass(slots=True)
class Call:
    """A call under way: the arguments to use, and what `leave` needs from `enter`."""

    positional: tuple[object, ...]
    named: dict[str, object]
    memory: object = None


Enter: TypeAlias = Callable[[Call], bool]
Leave: TypeAlias = Callable[[Call, object], object]


Memory = TypeVar("Memory")
"""What `beside` keeps from the begin of a call to its end."""


def around(tracer: RecordingTracer, original: Function, enter: Enter, leave: Leave) -> Function:
    """Wrap `original` with tracing that can neither fail nor be noticed.

    `enter` may change the call's arguments and returns whether the call is traced; `leave` returns
    the result to hand on. An error in either stops tracing, never the call. When `original` itself
    raises, nothing is recorded.
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


def beside(
    tracer: RecordingTracer,
    original: Function,
    begin: Callable[[tuple[object, ...], dict[str, object]], Memory | None],
    end: Callable[[Memory, object], None],
) -> Function:
    """Wrap `original` as `around` does, with tracing that only looks on; cheaper, for modules.

    `begin` gets the arguments and returns what `end` gets beside the result; None: not traced.
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


@dataclass(frozen=True, kw_only=True)
class Place:
    """A function or method, and what is put around it.

    `module` and `attribute` name it (``schedules``, ``P2PCommunicator._communicate``). Places that
    a version does not have are passed over. `wrap` gets the original and returns its replacement.
    """

    module: str
    attribute: str
    wrap: Callable[[Function], Function]
    granularity: Granularity = Granularity.BASE


@dataclass
class Installation:
    """Everything that was put in place, so that it can be taken away as a whole.

    What only `full` records is kept apart: it goes first when granularity is lowered.
    """

    undo: list[Undo] = field(default_factory=list)
    undo_full: list[Undo] = field(default_factory=list)

    def install(self, places: Sequence[Place]) -> list[Place]:
        """Wrap places wherever they are referred to; return those that are there."""
        found = [spot for spot in map(_find, places) if spot is not None]
        bindings = _bindings([spot.original for spot in found if spot.is_of_module])
        installed = []
        for place in places:
            spot = _find(place)  # anew: an earlier place may have wrapped the same function
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

    def remove_full(self) -> None:
        """Put back what only `full` records, last first."""
        while self.undo_full:
            self.undo_full.pop()()

    def remove(self) -> None:
        """Put everything back, last first."""
        self.remove_full()
        while self.undo:
            self.undo.pop()()


_OF_CACHES = ("cache_clear", "cache_info")
"""What `functools.lru_cache` offers beside the call; `functools.wraps` does not copy methods."""


def _hand_on_cache(original: Function, replacement: Function) -> None:
    """Let the replacement of a cached function be asked what the function is asked: Megatron-Core
    empties the caches of some `forward` methods by `self.forward.cache_clear()`.
    """
    for name in _OF_CACHES:
        if hasattr(original, name) and not hasattr(replacement, name):
            setattr(replacement, name, getattr(original, name))


def _replace(owner: object, name: str, original: Function, replacement: Function) -> Undo:
    setattr(owner, name, replacement)

    def put_back() -> None:
        if vars(owner).get(name) is replacement:  # else somebody wrapped or replaced it since
            setattr(owner, name, original)

    return put_back


@dataclass(frozen=True)
class _Spot:
    """Where a place's function is bound now: the module, or a class of it."""

    owner: object
    name: str
    original: Function

    @property
    def is_of_module(self) -> bool:
        return isinstance(self.owner, ModuleType)


def _find(place: Place) -> _Spot | None:
    """Return a place's function; None when this installation or this trainer lacks it."""
    if not _is_in_use(place.module):
        return None
    try:
        module = importlib.import_module(place.module)
    except ImportError:
        return None
    owner_name, _, name = place.attribute.rpartition(".")
    owner = getattr(module, owner_name, None) if owner_name else module
    original = vars(owner).get(name) if owner is not None else None
    return None if original is None else _Spot(owner, name, original)


def _is_in_use(module: str) -> bool:
    """Tell whether the trainer has imported the library (megatron.core, torch.distributed)."""
    return ".".join(module.split(".")[:2]) in sys.modules


def _bindings(originals: Sequence[Function]) -> dict[int, list[tuple[object, str]]]:
    """Return by identity where module-level functions are bound: `from x import f`, `alias = x.f`,
    `self.f = x.f`.

    Thousands of modules hold some 100,000 names, so they are looked through once for all functions.
    """
    found: dict[int, list[tuple[object, str]]] = {id(original): [] for original in originals}
    for holder in (*_modules(), *_keepers(originals)):
        for name, value in list(vars(holder).items()):
            if id(value) in found:
                found[id(value)].append((holder, name))
    return found


def _modules() -> Iterator[object]:
    """Yield the modules whose references are rebound."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == _REBOUND or _is_others(name)):
            yield module


def _is_others(module_name: str) -> bool:
    return module_name.partition(".")[0] != _NOT_REBOUND


def _keepers(originals: Sequence[Function]) -> list[object]:
    """Return the objects that keep one of the functions as an attribute of their own.

    The collector knows them; where an object's attributes are a dict, it knows that only.
    """
    holders = gc.get_referrers(*originals) if originals else []
    dicts = [one for one in holders if isinstance(one, dict)]
    owners = gc.get_referrers(*dicts) if dicts else []
    return [one for one in (*holders, *owners) if _lets_attributes_be_set(one)]


def _lets_attributes_be_set(holder: object) -> bool:
    """Tell whether it is an ordinary object of others: no module, no class, no function."""
    kind = type(holder)
    if kind.__setattr__ is not object.__setattr__ or not _is_others(kind.__module__):
        return False
    try:
        has_own = isinstance(vars(holder), dict)
    except Exception:  # whatever stands for an object and is not bound to one
        return False
    return has_own and not isinstance(holder, ModuleType | FunctionType)


Slot: TypeAlias = tuple[int, int]
"""(microbatch, chunk)."""

_TEXTS = {phase: str(phase) for phase in Phase}


@dataclass
class Position(IterationListener):
    """State of one iteration; everything starts anew with the next.

    `outputs` remembers by identity which tensor a forward returned, so that its backward knows its
    microbatch and chunk; `received` which arguments wait for the tensor's use to learn theirs.
    Identities are safe: the schedule keeps these tensors until then. `passes_known` says that
    somebody tells where forward and backward begin and end.
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
        """Forget the last iteration; numbers start at 0, so that a lost event shifts nothing."""
        self.slot = self.phase = self.layer = None
        for memory in (self.outputs, self.gradients, self.received, self._numbers):
            memory.clear()

    def number(self, group: str, operation: str) -> int:
        """Return the running number of an operation within (iteration, group)."""
        key = (group, operation)
        number = self._numbers[key]
        self._numbers[key] = number + 1
        return number

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
        """Tell whether an evaluation runs now: it needs no gradients, belongs to no pass."""
        if not self.passes_known or self.phase is not None:
            return False
        import torch

        return not torch.is_grad_enabled()

    def learn(self, tensor: object, slot: Slot) -> None:
        """Give a received tensor's message its microbatch and chunk, now that it is used."""
        arguments = self.received.pop(id(tensor), None)
        if arguments is not None:
            arguments["microbatch"], arguments["chunk"] = slot


def first_of(value: object) -> object:
    """Return the tensor of a schedule's slot, which is a tensor or a list that holds one."""
    return value[0] if isinstance(value, list) and value else value
