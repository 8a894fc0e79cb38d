"""What is wrong with a rank of `benchmarks.trainers`, made from outside its trainer and tracer.

A slow CPU burns more of its own time by real matrix products, after every part of a layer, forward
and backward, and after the optimizer's step; a slow GPU has fewer multiprocessors. Everything else
is what happens to jobs: another process on the core, a thread that holds the interpreter's lock, a
late batch, a collector.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.hogs import (
    alongside,
    core_hogged,
    core_hogged_in_bursts,
    gpu_hogged,
    multiprocessors_kept,
)

LATE_S = 0.06
"""Of a batch whose storage is slow."""
LONGER = 1.25
"""Times the tokens of the others, in every iteration."""
BURST_S, PERIOD_S = 0.4, 2.0
"""A throttled device is slow so long, again after so long: by the clock, not by the iteration."""
NUM_OBJECTS = 500_000
"""That the collector of a rank with garbage goes through, tens of ms."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to one rank, and the causes by which a verdict may name it."""

    name: str
    causes: tuple[str, ...] = ()
    """None: nobody's hardware is at fault, and no node may be named."""
    factor: float = 1.0
    slows_optimizer: bool = True
    comes_in_bursts: bool = False
    num_kept: int = 0
    """Multiprocessors of a GPU that do nothing, of an H100's 132; a profile would show why."""
    devices: tuple[str, ...] = ("cpu",)
    mixes_lengths: bool = False
    """Each replica's batches differ in length, drawn anew for every one."""
    reaches_next: bool = False
    """The rank after the faulty one suffers as well: either may be named, or both."""
    only_traced: bool = False
    """It comes and goes by the clock: the few steps of a profile may miss it."""


HEALTHY = Fault(name="healthy", devices=("cpu", "gpu"))
SHARED = Fault(name="shared", causes=("host", "compute"), devices=("cpu", "gpu"))
LOADER = Fault(name="late batches", causes=("loader", "host"), devices=("cpu", "gpu"))
LOCK = Fault(name="held lock", causes=("host", "compute"))
LONG = Fault(name="longer data", devices=("cpu", "gpu"))
BUSY = Fault(name="busy machine")
GARBAGE = Fault(name="garbage", causes=("gc",))
HEAVY = Fault(name="heavy last stage", devices=("cpu", "gpu"))
FAULTS = {
    fault.name: fault
    for fault in (
        HEALTHY,
        Fault(name="slow x1.1", causes=("compute",), factor=1.1),
        Fault(name="slow x1.3", causes=("compute",), factor=1.3),
        Fault(name="layers x1.3", causes=("compute",), factor=1.3, slows_optimizer=False),
        Fault(name="throttled x1.6", causes=("compute",), factor=1.6, comes_in_bursts=True),
        Fault(name="13 SMs less", causes=("compute",), num_kept=13, devices=("gpu",)),
        Fault(name="33 SMs less", causes=("compute",), num_kept=33, devices=("gpu",)),
        Fault(
            name="66 SMs less at times",
            causes=("compute",),
            num_kept=66,
            comes_in_bursts=True,
            devices=("gpu",),
        ),
        SHARED,
        LOCK,
        LOADER,
        GARBAGE,
        LONG,
        BUSY,
        HEAVY,
    )
}


class Disturbance:
    """A fault at work on this rank, while `acting`."""

    def __init__(self, fault: Fault, *, is_here: bool, device: torch.device) -> None:
        self.fault, self.is_here = fault, is_here
        self._device = device
        self._garbage: list[list[object]] = []
        self._matrix = torch.randn(64, 64)
        self._product = torch.empty_like(self._matrix)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let everything go on that needs nothing of the trainer."""
        with ExitStack() as stack:
            if self.fault == SHARED and self.is_here:
                stack.enter_context(self._sharer())
            if self.fault.num_kept and self.is_here:
                stack.enter_context(
                    multiprocessors_kept(self.fault.num_kept, is_time=self._is_slow_now)
                )
            if self.fault == LOCK and self.is_here:
                stack.enter_context(_held_lock())
            if self.fault == BUSY:
                stack.enter_context(core_hogged_in_bursts())
            if self.fault == GARBAGE and self.is_here:
                self._garbage = [[number] for number in range(NUM_OBJECTS)]
            yield
        self._garbage = []

    def _sharer(self) -> AbstractContextManager[None]:
        return core_hogged(1) if self._device.type == "cpu" else gpu_hogged(self._device.index)

    def _is_slow_now(self) -> bool:
        return not self.fault.comes_in_bursts or time.monotonic() % PERIOD_S <= BURST_S

    def burden(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Slow every part of each layer down, the model's ends, and the optimizer."""
        if self.fault.factor == 1.0 or not self.is_here:
            return
        for module in _parts(model):
            self._burden_part(module)
        if self.fault.slows_optimizer:
            self._burden_step(optimizer)

    def _burden_part(self, module: torch.nn.Module) -> None:
        begin_ns = 0

        def before(_: torch.nn.Module, inputs: object) -> None:
            nonlocal begin_ns
            del inputs
            begin_ns = time.thread_time_ns()

        def after(_: torch.nn.Module, inputs: object, output: object) -> None:
            del inputs
            cost_ns = time.thread_time_ns() - begin_ns
            self._work(cost_ns)
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._work(2 * cost_ns))  # type: ignore[no-untyped-call]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _burden_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the work inside `step`, where a slower device would take longer."""
        begin_ns = 0

        def before(*_: object) -> None:
            nonlocal begin_ns
            begin_ns = time.thread_time_ns()

        def after(*_: object) -> None:
            self._work(time.thread_time_ns() - begin_ns)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _work(self, cost_ns: int) -> None:
        """Multiply matrices for the excess over so much CPU time."""
        if not self._is_slow_now():
            return
        end_ns = time.thread_time_ns() + int(cost_ns * (self.fault.factor - 1))
        while time.thread_time_ns() < end_ns:
            torch.mm(self._matrix, self._matrix, out=self._product)

    def load(self) -> None:
        """What happens while a batch is fetched."""
        if self.fault == LOADER and self.is_here:
            time.sleep(LATE_S)
        if self._garbage:
            gc.collect()

    def tokens(self, usual: int, dp_rank: int) -> int:
        """Of the sequences of a replica."""
        return int(usual * LONGER) if self.fault == LONG and dp_rank == 1 else usual


def time_core() -> float:
    """CPU time of the same matrix products everywhere, ms: how slow this core is by itself."""
    matrix = torch.randn(192, 192)
    samples = []
    for _ in range(10):
        begin_ns = time.thread_time_ns()
        for _ in range(20):
            torch.mm(matrix, matrix)
        samples.append((time.thread_time_ns() - begin_ns) / 1e6)
    return statistics.median(samples)


def waited_ms() -> float:
    """Time for which this process's threads could have run and had no core, ms; nan: not told.

    A host that is named for it was slow in truth, whatever the case has planted.
    """
    try:
        tasks = Path("/proc/self/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[1]) for task in tasks) / 1e6
    except (OSError, ValueError, IndexError):
        return math.nan


def _parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The children of every layer; elsewhere the modules that hold weights of their own."""
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    layers = [layer for one in lists[:1] for layer in one]
    inside = {module for layer in layers for module in layer.modules()}
    ends = [
        module
        for module in model.modules()
        if module not in inside and list(module.parameters(recurse=False))
    ]
    return [child for layer in layers for child in layer.children()] + ends


def _held_lock() -> AbstractContextManager[None]:
    """A thread of this process holds the interpreter's lock in C calls, a third of the time."""
    record = {str(number): number * 0.5 for number in range(30_000)}

    def log(ended: threading.Event) -> None:
        while not ended.is_set():
            begin = time.perf_counter()
            json.dumps(record)
            ended.wait(2 * (time.perf_counter() - begin))

    return alongside(log)
