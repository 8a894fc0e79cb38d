"""A rank that computes slowly: every operation takes ``factor`` times as long.

Classes of Megatron-Core are wrapped before any object is made and before a tracer wraps them, so
that traced spans contain the added time: the model, its layers, attention, MLP, embedding, output
layer, and the optimizer's step. In the backward pass the work between the outputs and the inputs of
these modules is slowed. Communication is not slowed.

An operation takes longer in one of two ways: `CpuSlowness` burns CPU time, `GpuSlowness` lets the
GPU spin. Both see operations as calls that may contain other operations, and the backward pass as a
walk from boundary to boundary (the tensors between modules).
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol, TypeVar

import torch

Function = Callable[..., object]
Wrapper = Callable[[Function], Function]


def wrap_attribute(owner: object, name: str, wrapper: Wrapper) -> None:
    """Replace ``owner.name`` by ``wrapper(owner.name)``, if `owner` has that name."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(wrapper(original)))


def wrap_everywhere(module: ModuleType, name: str, wrapper: Wrapper) -> None:
    """Replace ``module.name`` in `module` and in all of Megatron-Core that has imported it."""
    original = getattr(module, name, None)
    if original is None:
        return
    replacement = functools.wraps(original)(wrapper(original))
    setattr(module, name, replacement)
    for holder_name, holder in list(sys.modules.items()):
        if not holder_name.startswith("megatron.core"):
            continue
        for alias, value in list(vars(holder).items()):
            if value is original:
                setattr(holder, alias, replacement)


Result = TypeVar("Result")


class Slowness(Protocol):
    """Makes operations and backward passes take ``1 + excess`` times as long while it acts."""

    def begin_iteration(self, *, acts: bool) -> None:
        """Note whether the fault acts in the iteration that begins."""

    def run(self, key: Hashable, call: Callable[[], Result]) -> Result:
        """Run the operation `key`, which may contain other operations, slowly."""

    def run_backward(self, call: Callable[[], Result]) -> Result:
        """Run a backward pass slowly, from boundary to boundary."""

    def boundary(self, key: Hashable) -> None:
        """Note that the backward pass has come to the boundary `key`."""


def burn_cpu_time(duration_ns: float) -> None:
    """Compute on this thread until it has used `duration_ns` of CPU time."""
    end_ns = time.thread_time_ns() + duration_ns
    value = 1.0
    while time.thread_time_ns() < end_ns:
        for _ in range(50):
            value = value * 1.0000001 + 1e-9


class CpuSlowness:
    """Slow arithmetic on the CPU: each operation's own CPU time is burnt again, `excess` times.

    The CPU time of the calling thread measures what an operation computes; waits for other ranks
    use none, so they are not stretched. The extra time is CPU time too, spent at the end of the
    operation. What an outer operation does in addition to inner operations (norms, residuals) is
    stretched as well, but nothing is stretched twice.
    """

    def __init__(self, excess: float) -> None:
        self._excess = excess
        self._acts = False
        self._held_ns: list[int] = []  # for each operation under way, CPU time of inner operations
        self._boundary_ns: int | None = None  # thread time at the last boundary

    def begin_iteration(self, *, acts: bool) -> None:
        """Note whether the fault acts in the iteration that begins."""
        self._acts = acts
        self._held_ns.clear()
        self._boundary_ns = None

    def run(self, key: Hashable, call: Callable[[], Result]) -> Result:
        """Run an operation, then burn its own CPU time again."""
        del key
        if not self._acts:
            return call()
        self._held_ns.append(0)
        begin_ns = time.thread_time_ns()
        result = call()
        own_ns = time.thread_time_ns() - begin_ns - self._held_ns.pop()
        burn_cpu_time(self._excess * own_ns)
        total_ns = time.thread_time_ns() - begin_ns
        if self._held_ns:
            self._held_ns[-1] += total_ns
        elif self._boundary_ns is not None:  # recomputed in the backward pass, stretched already
            self._boundary_ns += total_ns
        return result

    def run_backward(self, call: Callable[[], Result]) -> Result:
        """Run a backward pass; each boundary stretches the work since the last boundary."""
        if not self._acts:
            return call()
        self._boundary_ns = time.thread_time_ns()
        result = call()
        self.boundary("end")
        self._boundary_ns = None
        return result

    def boundary(self, key: Hashable) -> None:
        """Burn the CPU time since the last boundary again."""
        del key
        if not self._acts or self._boundary_ns is None:
            return
        burn_cpu_time(self._excess * (time.thread_time_ns() - self._boundary_ns))
        self._boundary_ns = time.thread_time_ns()


@dataclass
class _Measured:
    """GPU times of one operation as pairs of events, and the operations that it contains."""

    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    held: list[Hashable] = field(default_factory=list)

    def shortest_ms(self) -> float:
        return min((begin.elapsed_time(end) for begin, end in self.events), default=0.0)


# The first iteration warms up, the second one is measured, the fault acts from the third on.
_MEASURED_ITERATION = 2


class GpuSlowness:
    """A slow GPU: after each operation a kernel spins on the stream, `excess` times as long.

    The time of each operation is measured once, with CUDA events in the second iteration of the run
    (the shortest over microbatches, so that waits inside count least). From the third iteration on
    spinning kernels are launched and nothing synchronizes. Communication inside an operation counts
    as part of it. A fault of the first two iterations begins with the third.
    """

    def __init__(self, excess: float) -> None:
        self._excess = excess
        self._acts = False
        self._measures = False
        self._iteration = 0
        self._measured: defaultdict[Hashable, _Measured] = defaultdict(_Measured)
        self._under_way: list[Hashable] = []
        self._last_boundary: torch.cuda.Event | None = None
        self._cycles: dict[Hashable, int] = {}
        self._cycles_per_ms = spin_cycles_per_ms()

    def begin_iteration(self, *, acts: bool) -> None:
        """Note whether the fault acts in the iteration that begins."""
        self._iteration += 1
        self._measures = self._iteration == _MEASURED_ITERATION
        if self._iteration == _MEASURED_ITERATION + 1:
            self._take_stock()
        self._acts = acts and self._iteration > _MEASURED_ITERATION

    def run(self, key: Hashable, call: Callable[[], Result]) -> Result:
        """Run an operation, then let the GPU spin."""
        result = self._measure(key, call) if self._measures else call()
        self._spin(key)
        if self._last_boundary is not None:  # recomputed in the backward pass, measured already
            self._last_boundary = _record_event()
        return result

    def run_backward(self, call: Callable[[], Result]) -> Result:
        """Run a backward pass; each boundary stretches the work since the last boundary."""
        if self._measures:
            self._last_boundary = _record_event()
        result = call()
        self.boundary("end")
        self._last_boundary = None
        return result

    def boundary(self, key: Hashable) -> None:
        """Measure the work since the last boundary, or let the GPU spin for it."""
        name = ("backward", key)
        if self._last_boundary is not None:
            here = _record_event()
            self._measured[name].events.append((self._last_boundary, here))
            self._last_boundary = here
        self._spin(name)

    def _measure(self, key: Hashable, call: Callable[[], Result]) -> Result:
        measured = self._measured[key]
        if self._under_way and not measured.events:
            self._measured[self._under_way[-1]].held.append(key)
        self._under_way.append(key)
        begin = _record_event()
        result = call()
        measured.events.append((begin, _record_event()))
        self._under_way.pop()
        return result

    def _spin(self, key: Hashable) -> None:
        cycles = self._cycles.get(key, 0) if self._acts else 0
        if cycles:
            spin(cycles)

    def _take_stock(self) -> None:
        """Turn measured times into spinning cycles, for each operation without inner operations."""
        torch.cuda.synchronize()
        totals_ms = {key: measured.shortest_ms() for key, measured in self._measured.items()}
        for key, measured in self._measured.items():
            own_ms = totals_ms[key] - sum(totals_ms[held] for held in measured.held)
            self._cycles[key] = int(max(0.0, own_ms) * self._excess * self._cycles_per_ms)
        self._measured.clear()


def spin(cycles: int) -> None:
    """Let the GPU spin for a number of cycles on the current stream."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def spin_cycles_per_ms() -> float:
    """Return the cycles per millisecond that the spinning kernel counts on this GPU, measured."""
    cycles = 20_000_000
    spin(cycles)  # the first launch loads the kernel
    begin = _record_event()
    spin(cycles)
    end = _record_event()
    end.synchronize()
    duration_ms: float = begin.elapsed_time(end)
    return cycles / duration_ms


def install(slowness: Slowness) -> None:
    """Slow all computation of this process by `slowness`, for good."""
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    output_layers: set[int] = set()
    for module in (TransformerLayer, Attention, MLP, MoELayer, LanguageModelEmbedding):
        wrap_attribute(module, "forward", lambda original: _slow_forward(original, slowness))
    wrap_attribute(
        GPTModel, "forward", lambda original: _slow_model(original, slowness, output_layers)
    )
    wrap_attribute(
        ColumnParallelLinear,
        "forward",
        lambda original: _slow_output_layer(original, slowness, output_layers),
    )
    wrap_attribute(ChainedOptimizer, "step", lambda original: _slow_step(original, slowness))
    wrap_attribute(schedules, "backward_step", lambda original: _slow_backward(original, slowness))


def _slow_forward(original: Function, slowness: Slowness) -> Function:
    def forward(module: torch.nn.Module, *arguments: object, **options: object) -> object:
        key = id(module)
        _mark_boundary(slowness, (key, "in"), (*arguments, *options.values()))
        result = slowness.run(key, lambda: original(module, *arguments, **options))
        _mark_boundary(slowness, (key, "out"), (result,))
        return result

    return forward


def _slow_model(original: Function, slowness: Slowness, output_layers: set[int]) -> Function:
    """Slow what a model does outside its modules (mainly the loss); note its output layer."""
    slow = _slow_forward(original, slowness)

    def forward(model: torch.nn.Module, *arguments: object, **options: object) -> object:
        output_layers.add(id(getattr(model, "output_layer", None)))
        return slow(model, *arguments, **options)

    return forward


def _slow_output_layer(original: Function, slowness: Slowness, output_layers: set[int]) -> Function:
    """Slow only output layers: all other linear layers are part of a module that is slowed."""
    slow = _slow_forward(original, slowness)

    def forward(layer: torch.nn.Module, *arguments: object, **options: object) -> object:
        chosen = slow if id(layer) in output_layers else original
        return chosen(layer, *arguments, **options)

    return forward


def _mark_boundary(slowness: Slowness, key: tuple[int, str], values: tuple[object, ...]) -> None:
    """Hook the first activation that gets a gradient; the gradient's arrival is the boundary."""
    tensor = next(_activations(values), None)
    if tensor is None:
        return

    def passed(gradient: torch.Tensor) -> None:
        del gradient
        slowness.boundary(key)

    tensor.register_hook(passed)  # type: ignore[no-untyped-call]


def _activations(values: tuple[object, ...]) -> Iterator[torch.Tensor]:
    """Yield tensors that get a gradient and live for one microbatch.

    Parameters are left out, because a hook on a parameter would stay. Modules return their bias, a
    parameter, next to the output; under ``no_grad``, in the first pass of recomputed layers, only
    the bias requires a gradient. The input that a stage receives is a leaf but no parameter, and
    new in each microbatch.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not isinstance(value, torch.nn.Parameter):
                yield value
        elif isinstance(value, tuple | list):
            yield from _activations(tuple(value))


def _slow_step(original: Function, slowness: Slowness) -> Function:
    def step(*arguments: object, **options: object) -> object:
        return slowness.run("optimizer", lambda: original(*arguments, **options))

    return step


def _slow_backward(original: Function, slowness: Slowness) -> Function:
    def backward_step(*arguments: object, **options: object) -> object:
        return slowness.run_backward(lambda: original(*arguments, **options))

    return backward_step
