"""Let Megatron-Core run on a machine without CUDA.

Megatron-Core says "cuda" in some hundred places: as a device when it makes tensors, in
``torch.cuda.current_device()``, in its random states, in the type names that its optimizers test.
`install` makes all of them mean the CPU. It is only for processes without any CUDA; where there is
a GPU it must not be called. Gloo then carries the communication.

Other libraries run in the same process, so code that does not say "cuda" works as before: devices
chosen by ``with torch.device(…)``, ``torch.jit.script``, names of types outside of Megatron-Core.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch.jit import _builtins
from torch.utils import _device

from training.distributed import allow_without_transformer_engine

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "randint", "randn", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip

_MODEL_PARALLEL_STATE = "model-parallel-rng"


class _Stream:
    """The CPU's only stream: what is launched has already happened."""

    def __init__(self, *arguments: object, **options: object) -> None:
        del arguments, options

    def wait_stream(self, stream: object) -> None:
        """Do nothing: everything before is done."""

    def wait_event(self, event: object) -> None:
        """Do nothing: everything before is done."""

    def synchronize(self) -> None:
        """Do nothing: everything before is done."""

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        """Return an event that has happened now."""
        event = event or _Event()
        event.record()
        return event


class _Event:
    """An event of the CPU, which happens as soon as it is recorded."""

    def __init__(self, *arguments: object, **options: object) -> None:
        del arguments, options
        self._recorded_ns: int | None = None

    def record(self, stream: object = None) -> None:
        """Note the time: everything before is done."""
        self._recorded_ns = time.perf_counter_ns()

    def elapsed_time(self, end_event: _Event) -> float:
        """Return the milliseconds from this event to a later one; both must be recorded."""
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6

    def wait(self, stream: object = None) -> None:
        """Do nothing: everything before is done."""

    def synchronize(self) -> None:
        """Do nothing: everything before is done."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True


@functools.cache
def install() -> None:
    """Replace CUDA by the CPU in this process for good; call this before importing megatron.core.

    Called again, as by a process that joins several jobs, it does nothing: each replacement would
    wrap the one before, and every tensor be made through all of them.

    ``torch.compile`` is replaced too: Megatron-Core compiles some functions when it is imported,
    which on the CPU would need a compiler and cost more than it saves.
    """
    _set(torch, compile=_leave_uncompiled)
    _redirect_devices()
    _replace_cuda_calls()
    _name_types_as_on_cuda()
    _keep_random_states_on_cpu()
    _allow_moe_without_cuda()


def _to_cpu(device: object) -> object:
    """Return the CPU for a CUDA device, and everything else unchanged."""
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _with_cpu_device(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    @functools.wraps(call)
    def redirected(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if "device" in options:
            options["device"] = _to_cpu(options["device"])
        return call(*arguments, **options)

    return redirected


def _redirect_devices() -> None:
    _remember_originals()
    for name in _FACTORIES:
        redirected = _with_cpu_device(getattr(torch, name))
        redirected.__module__, redirected.__qualname__ = "torch", name  # to be pickled by name
        _builtins._register_builtin(redirected, f"aten::{name}")
        setattr(torch, name, redirected)
    move: Callable[..., torch.Tensor] = _with_cpu_device(torch.Tensor.to)

    def to(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        return move(tensor, *map(_to_cpu, arguments), **options)

    def stay(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        del arguments, options
        return tensor

    _set(torch.Tensor, to=to, cuda=stay)


def _remember_originals() -> None:
    """Make torch build its tables of factories before these are replaced.

    torch finds factories by identity and builds the tables when it first needs them. Built later,
    ``with torch.device("meta")`` would have no effect (and transformers would load wrong rotary
    tables), and ``torch.jit.script`` would not know ``torch.zeros``.
    """
    _device._device_constructors()
    _builtins._get_builtin_table()  # type: ignore[no-untyped-call]


def _replace_cuda_calls() -> None:
    cpu, stream = torch.device("cpu"), _Stream()
    _set(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        current_device=lambda: cpu,
        set_device=_nothing(),
        synchronize=_nothing(),
        empty_cache=_nothing(),
        set_stream=_nothing(),
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        manual_seed=lambda seed: torch.manual_seed(seed),  # noqa: PLW0108 - one of its own, too
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )


def _nothing() -> Callable[..., None]:
    """Return a new function without effect; torch tells functions apart by identity."""

    def nothing(*arguments: object, **options: object) -> None:
        del arguments, options

    return nothing


def _leave_uncompiled(
    function: Callable[Parameters, Result] | None = None, **options: object
) -> object:
    del options
    return function if function is not None else lambda decorated: decorated


def _name_types_as_on_cuda() -> None:
    """Make `Tensor.type` name CUDA types to Megatron-Core, whose optimizers group by type name.

    Other callers get the real names.
    """
    original = torch.Tensor.type

    def type_(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        answer = original(tensor, *arguments, **options)  # type: ignore[call-overload]
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and asking.startswith("megatron.core."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    _set(torch.Tensor, type=type_)


def _keep_random_states_on_cpu() -> None:
    from megatron.core.tensor_parallel import random

    class CpuRngStatesTracker(random.CudaRNGStatesTracker):  # type: ignore[misc]
        """Megatron-Core's tracker of random states, over the generator of the CPU."""

        @contextlib.contextmanager
        def fork(self, name: str = _MODEL_PARALLEL_STATE) -> Iterator[None]:
            """Draw from the state `name` inside the context, afterwards from the state before."""
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    _set(
        random,
        CudaRNGStatesTracker=CpuRngStatesTracker,
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )


def _allow_moe_without_cuda() -> None:
    """Mend two places that models with experts run through.

    One is the router without Transformer Engine; the other is the all-to-all dispatcher, which
    turns split sizes into numbers only when they lie on a GPU.
    """
    from megatron.core.transformer.moe import token_dispatcher

    allow_without_transformer_engine()

    def keep(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        del record_stream
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    _set(token_dispatcher, maybe_move_tensor_to_cpu=keep)


def _set(target: type | ModuleType, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(target, name, value)
