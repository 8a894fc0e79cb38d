"""Follow the ranks of one pipeline stage: their hosts, their devices, and what they write down.

Each rank has two times: its host's, which launches one operation after the other, and its device's,
which works them off. A device waits for its host where kernels are short; the host waits for the
device where Megatron synchronises (after messages, in barriers, in the optimizer). A scope's times
are those of events in the device's stream.

    host    launch A   launch B   launch C
    device             A.......   B............   C....      times of C: after B
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.archive.conditions import Conditions
from benchmarks.grounds.archive.costs import Work
from benchmarks.grounds.archive.job import Job
from benchmarks.grounds.archive.network import Network
from benchmarks.grounds.archive.noise import Array, gamma, generator

WAKE_US = 9.0  # until a host that waited for its device goes on
COLLECTIVE_LAUNCH_US = 2.0  # launches of one collective, in kernels
BARRIER_BYTES = 4.0
ATTENTION_CLOCK_SHARE = 0.85  # of unfused attention's products and softmax: the rest is memory
MEMORY_CLOCK_SHARE = 0.3  # address arithmetic and L2 run at the core's clock
MODULES = frozenset({"decoder", "transformer_layer", "_forward_attention", "_forward_mlp"}) | {
    "attention", "mlp", "MLP.forward"
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Mark:
    """State one record of all ranks of a stage, before it is written."""

    phase: str
    name: str
    time_us: Array  # (dp, tp, iteration)
    layer: int = 0
    microbatch: int | None = None
    expect: str = ""
    data: int | None = None
    peer_stage: int | None = None  # messages: whom they go to or come from
    has_data: bool = False
    has_group: bool = False


class Stage:
    """Hold the times of a stage's ranks and move them on, operation by operation."""

    def __init__(
        self, job: Job, conditions: Conditions, network: Network, number: int, begin_us: Array
    ) -> None:
        self.job, self.conditions, self.network, self.number = job, conditions, network, number
        self.device = begin_us.copy()
        self.host = begin_us.copy()
        self.passes_us = np.zeros_like(begin_us)  # own work, neither waiting nor communication
        self.marks: list[Mark] = []
        self.launch_us = conditions.launch_us[number]
        self.rng = generator(job.seed, f"operations {number}")
        self.in_pass = False

    def now(self) -> Array:
        """Return the time of an event that the host records now."""
        return np.maximum(self.device, self.host)

    def mark(self, phase: str, name: str, **said: object) -> None:
        """Write a record down, unless its name is muted."""
        if self.job.habits.has_layers or name not in MODULES:
            self.marks.append(Mark(phase, name, self.now(), **said))  # type: ignore[arg-type]

    @contextmanager
    def scope(self, name: str, **said: object) -> Iterator[None]:
        """Write a scope around what is done inside."""
        self.mark("B", name, **said)
        yield
        self.mark("E", name, **said)

    def length(self, microbatch: int | None) -> Array:
        """Return the microbatch's tokens by the usual ones, (dp, iteration); 1 outside of any."""
        of_all = self.conditions.length
        length: Array = (
            np.ones(of_all.shape[:2]) if microbatch is None else of_all[:, :, microbatch]
        )
        return length

    def compute(self, work: Work, microbatch: int | None = None) -> None:
        """Launch and run one operation's kernels."""
        if not work.num_launches:
            return
        conditions, at = self.conditions, self.number
        length = self.length(microbatch)[:, None, :]
        slot = -1 if microbatch is None else microbatch
        clock, memory = conditions.clock[at][..., slot], conditions.memory[at]
        attention = ATTENTION_CLOCK_SHARE * clock + (1 - ATTENTION_CLOCK_SHARE) * memory
        moving = memory * (1 - MEMORY_CLOCK_SHARE + MEMORY_CLOCK_SHARE * clock)
        lasts = work.product_us * length * clock + work.attention_us * length**2 * attention
        lasts += work.memory_us * length * moving
        lasts *= conditions.noise[at] * gamma(self.rng, self.job.site.operation_cv, lasts.shape)
        first = self.host + self.launch_us
        self.host = self.host + work.num_launches * self.launch_us
        last_kernel = lasts / work.num_launches
        end = np.maximum(np.maximum(self.device, first) + lasts, self.host + last_kernel)
        if self.in_pass:
            self.passes_us += end - self.device
        self.device = end

    def wait_of_host(self, lasts_us: Array) -> None:
        """Let hosts do something else, with nothing launched."""
        self.host = self.host + lasts_us

    def synchronise(self) -> None:
        """Let hosts wait for their devices."""
        self.host = self.now() + WAKE_US

    def arrive(self) -> Array:
        """Launch a collective; return when each rank is ready for it."""
        ready: Array = np.maximum(self.device, self.host + self.launch_us)
        self.host = self.host + COLLECTIVE_LAUNCH_US * self.launch_us
        return ready

    def among_tensor_ranks(
        self, size_bytes: float, microbatch: int | None = None, times: int = 1
    ) -> None:
        """Reduce over the tensor group: its slowest member decides."""
        if self.job.shape.tp == 1:
            return
        ready = self.arrive().max(axis=1, keepdims=True)
        lasts = self.network.tensor_us(self.number, size_bytes, self.length(microbatch))
        self.device = np.repeat(ready + times * lasts, self.job.shape.tp, axis=1)

    def reduce(self, microbatch: int) -> None:
        """Reduce activations in the forward pass, traced."""
        with self.scope("_reduce", expect="_reduce", has_group=self.job.shape.tp > 1):
            self.among_tensor_ranks(self.network.message_bytes, microbatch)

    def barrier(self) -> None:
        """Wait for the tensor group's ranks, as the tracer asks for; the host waits, too."""
        self.among_tensor_ranks(BARRIER_BYTES)
        self.synchronise()

    def among_replicas(self, lasts_us: Array) -> None:
        """Wait for the same rank of all replicas, then communicate."""
        if self.job.shape.dp > 1:
            ready = self.arrive().max(axis=0, keepdims=True)
            self.device = np.repeat(ready + lasts_us, self.job.shape.dp, axis=0)
