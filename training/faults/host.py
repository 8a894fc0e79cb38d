"""A host that is busy with something else: stalls of random length between operations.

The launching thread is put to sleep before layers (forward and backward) and before the optimizer
step. It sleeps as if other work had its core: over many stalls, ``factor - 1`` times the CPU time
that the thread itself has used since the last one, each time a random share of it. No CPU time is
used, and no operation takes longer: what grows are the gaps between operations, on a GPU the time
it waits for the next launch.
"""

from __future__ import annotations

import random
import threading
import time

import torch

from training.faults.wrap import Function, wrap_attribute


class BusyHost:
    """Puts this thread to sleep now and then."""

    def __init__(self, excess: float, seed: int) -> None:
        self._excess = excess
        self._random = random.Random(seed)  # of its own: training must draw as without the fault
        self._acts = False
        self._last_ns: dict[int, int] = {}  # by thread: a backward pass on a GPU has its own

    def begin_iteration(self, *, acts: bool) -> None:
        """Say whether the fault acts in the iteration that begins."""
        self._acts = acts
        self._last_ns.clear()

    def stall(self) -> None:
        """Sleep for the CPU time used since the last stall, times the excess, times chance."""
        if not self._acts:
            return
        thread = threading.get_ident()
        now_ns = time.thread_time_ns()
        used_ns = now_ns - self._last_ns.get(thread, now_ns)
        chance = self._random.expovariate(1.0)  # mean 1, often short, seldom long
        time.sleep(used_ns * 1e-9 * self._excess * chance)
        self._last_ns[thread] = time.thread_time_ns()


def install(host: BusyHost) -> None:
    """Stall this process where `host` says so, for good."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    wrap_attribute(TransformerLayer, "forward", lambda original: _stalled_layer(original, host))
    wrap_attribute(ChainedOptimizer, "step", lambda original: _stalled(original, host))
    wrap_attribute(schedules, "backward_step", lambda original: _stalled(original, host))


def _stalled(original: Function, host: BusyHost) -> Function:
    def stalled(*arguments: object, **options: object) -> object:
        host.stall()
        return original(*arguments, **options)

    return stalled


def _stalled_layer(original: Function, host: BusyHost) -> Function:
    def forward(*arguments: object, **options: object) -> object:
        host.stall()
        result = original(*arguments, **options)
        output = result[0] if isinstance(result, tuple) else result
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.register_hook(lambda _: host.stall())  # type: ignore[no-untyped-call]
        return result

    return forward
