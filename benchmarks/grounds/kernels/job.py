"""A job on paper: its layout and model, what its kernels cost, in which order a stage works.

Kernels follow a roofline: matrix products take FLOPs over the chip's sustained rate and scale with
the SM clock; norms, softmax, activations and the optimizer take bytes over HBM bandwidth and do
not. Orders of work are Megatron's 1F1B and interleaved schedules without overlapped messages
(Narayanan et al., SC'21).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megascan.topology import Layout

SUSTAINED_FLOPS = 5.6e14  # bf16 of an H100-class chip, large products
SUSTAINED_HBM = 2.5e12  # bytes a second
VOCABULARY = 50304


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Cost of a few kernels that are launched one after the other."""

    products_ns: float = 0.0  # scale with tokens and with the SM clock
    core_ns: float = (
        0.0  # attention's core: SM clock, and tokens times the length of their sequence
    )
    memory_ns: float = 0.0  # scale with tokens and with HBM
    launches: int = 1

    def times(self, factor: float) -> Kernels:
        """Return the cost of `factor` times the work, launched by as many kernels."""
        return Kernels(
            products_ns=self.products_ns * factor,
            core_ns=self.core_ns * factor,
            memory_ns=self.memory_ns * factor,
            launches=round(self.launches * max(1.0, 0.75 * factor)),
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe a training job: axes, model, machine it runs on and what is traced of it."""

    name: str
    tp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    gpus_per_host: int = 8
    layers: int = 2  # of one model chunk
    microbatches: int = 4
    hidden: int = 4096
    sequence: int = 4096
    vocabulary: int = VOCABULARY
    experts: bool = False
    recompute: bool = False
    distributed_optimizer: bool = True
    overlap_gradients: bool = False
    fsdp: bool = False
    shared_nic: bool = False  # one NIC a host and not one a GPU
    pinned: bool = True  # False: each batch is copied blockingly, so the host waits for the device
    launch_ns: float = 5500.0  # host time of one kernel launch, Python included
    interval: int = 5
    window: int = 2
    windows: int = 3
    counters: bool = True

    @property
    def layout(self) -> Layout:
        """Return the sizes of the parallel axes as rank files state them."""
        etp = self.tp if self.experts else 1
        return Layout(tp=self.tp, dp=self.dp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=etp)

    @property
    def num_ranks(self) -> int:
        """Return the world size."""
        return self.tp * self.dp * self.pp

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Return (stages, expert replicas, expert members, tensor members): ranks in C order."""
        return self.pp, self.dp // self.ep, self.ep, self.tp

    def layers_of(self, stage: int, chunk: int) -> range:
        """Return the numbers of a chunk's layers in the whole model, from 1."""
        first = (chunk * self.pp + stage) * self.layers + 1
        return range(first, first + self.layers)

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return the numbers of the traced iterations."""
        return tuple(
            1 + number * self.interval + step
            for number in range(self.windows)
            for step in range(self.window)
        )

    @property
    def hosts(self) -> tuple[int, ...]:
        """Return the number of each rank's host."""
        return tuple(rank // self.gpus_per_host for rank in range(self.num_ranks))

    @property
    def activation_bytes(self) -> int:
        """Return the size of what one rank hands to the next stage for a microbatch."""
        return self.sequence * self.hidden * 2 // self.tp

    @property
    def dense_parameters(self) -> int:
        """Return the number of parameters of one rank that all of its stage's replicas share."""
        feed_forward = 0 if self.experts else 8
        layers = self.layers * self.vpp * (4 + feed_forward) * self.hidden**2
        return (layers + self.vocabulary * self.hidden // self.pp) // self.tp

    @property
    def expert_parameters(self) -> int:
        """Return the number of parameters of one rank's experts."""
        return self.layers * self.vpp * 16 * self.hidden**2 // self.tp if self.experts else 0

    @cached_property
    def attention(self) -> Kernels:
        """Return norm, projections and attention's core, forward."""
        products = 2 * self.sequence * 4 * self.hidden**2 / self.tp
        core = 2 * self.sequence**2 * self.hidden / self.tp
        return Kernels(
            products_ns=products / SUSTAINED_FLOPS * 1e9,
            core_ns=core / (0.6 * SUSTAINED_FLOPS) * 1e9,
            memory_ns=self._passes_ns(12),
            launches=18,
        )

    @cached_property
    def mlp(self) -> Kernels:
        """Return norm, both products and the activation, forward; with experts two choices a
        token.
        """
        products = 2 * self.sequence * 8 * self.hidden**2 / self.tp
        return Kernels(
            products_ns=products / SUSTAINED_FLOPS * 1e9 * (2 if self.experts else 1),
            memory_ns=self._passes_ns(16),
            launches=22 if self.experts else 9,
        )

    @cached_property
    def embedding(self) -> Kernels:
        """Return the look-up of one microbatch's embeddings."""
        return Kernels(memory_ns=self._passes_ns(4), launches=4)

    @cached_property
    def output_layer(self) -> Kernels:
        """Return the product with the vocabulary and what the loss reads of it."""
        products = 2 * self.sequence * self.hidden * self.vocabulary / self.tp
        logits = self.sequence * self.vocabulary * 6 / self.tp
        return Kernels(
            products_ns=products / SUSTAINED_FLOPS * 1e9,
            memory_ns=logits / SUSTAINED_HBM * 1e9,
            launches=4,
        )

    @cached_property
    def optimizer(self) -> Kernels:
        """Return the update of this rank's share of the parameters: 20 bytes each."""
        own = self.dense_parameters + self.expert_parameters
        share = own / self.dp if self.distributed_optimizer or self.fsdp else own
        return Kernels(memory_ns=share * 20 / SUSTAINED_HBM * 1e9, launches=40)

    def _passes_ns(self, passes: int) -> float:
        return passes * self.sequence * self.hidden * 2 / SUSTAINED_HBM * 1e9


@dataclass(frozen=True, kw_only=True)
class Message:
    """One half of a message between stages, labelled as the rank that holds it labels it."""

    sends: bool
    direction: str  # forward or backward
    microbatch: int
    chunk: int
    peer: int  # stage at the other end


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward or backward of one microbatch through one model chunk."""

    direction: str
    microbatch: int
    chunk: int


Exchange = tuple[Message, ...]
"""Messages that are posted together and waited for together."""


def schedule(job: Job, stage: int) -> list[Pass | Exchange]:
    """Return what a stage does within an iteration, in order."""
    plain = [_Slot(job, stage).one_forward_one_backward, _Slot(job, stage).interleaved]
    return plain[job.vpp > 1]()


class _Slot:
    """Writes the order of one stage down."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job = job
        self.stage = stage
        self.done: list[Pass | Exchange] = []
        self.total = job.microbatches * job.vpp

    def one_forward_one_backward(self) -> list[Pass | Exchange]:
        """Warm up, alternate, cool down."""
        total = self.total
        ahead = min(self.job.pp - self.stage - 1, total)
        for number in range(ahead):
            self._exchange(self._receive("forward", number))
            self._work("forward", number)
            self._exchange(self._send("forward", number))
        if ahead < total:
            self._exchange(self._receive("forward", ahead))
        for number in range(total - ahead):
            self._work("forward", ahead + number)
            self._exchange(
                self._send("forward", ahead + number) + self._receive("backward", number)
            )
            self._work("backward", number)
            self._exchange(
                self._send("backward", number) + self._receive("forward", ahead + number + 1)
            )
        for number in range(total - ahead, total):
            self._exchange(self._receive("backward", number))
            self._work("backward", number)
            self._exchange(self._send("backward", number))
        return self.done

    def interleaved(self) -> list[Pass | Exchange]:
        """Warm up with all chunks, alternate, cool down; messages both ways go together."""
        pp, stage = self.job.pp, self.stage
        total = self.total
        ahead = min((pp - stage - 1) * 2 + (self.job.vpp - 1) * pp, total)
        received = {"forward": 0, "backward": 0}

        def receive(direction: str, wanted: int) -> Exchange:
            """Post receives until the pass number `wanted` has its input."""
            got: Exchange = ()
            while received[direction] <= min(wanted, total - 1):
                got += self._receive(direction, received[direction])
                received[direction] += 1
            return got

        self._exchange(receive("forward", 0))
        for number in range(ahead):
            self._work("forward", number)
            gradients = receive("backward", 0) if number == ahead - 1 < total - 1 else ()
            self._exchange(
                receive("forward", number + 1) + self._send("forward", number) + gradients
            )
        for number in range(total - ahead):
            self._work("forward", ahead + number)
            self._work("backward", number)
            self._exchange(
                self._send("backward", number)
                + receive("forward", ahead + number + 1)
                + self._send("forward", ahead + number)
                + receive("backward", number + 1)
            )
        for number in range(total - ahead, total):
            self._exchange(receive("backward", number))
            self._work("backward", number)
            self._exchange(self._send("backward", number) + receive("backward", number + 1))
        return self.done

    def _place(self, direction: str, number: int) -> tuple[int, int]:
        """Return (microbatch, chunk) of the stage's pass of that number."""
        pp, vpp = self.job.pp, self.job.vpp
        chunk = number % (pp * vpp) // pp
        if direction == "backward":
            chunk = vpp - 1 - chunk
        return number // (pp * vpp) * pp + number % pp if vpp > 1 else number, chunk

    def _work(self, direction: str, number: int) -> None:
        microbatch, chunk = self._place(direction, number)
        self.done.append(Pass(direction=direction, microbatch=microbatch, chunk=chunk))

    def _exchange(self, messages: Exchange) -> None:
        if messages:
            self.done.append(messages)

    def _receive(self, direction: str, number: int) -> Exchange:
        return self._message(direction, number, sends=False)

    def _send(self, direction: str, number: int) -> Exchange:
        return self._message(direction, number, sends=True)

    def _message(self, direction: str, number: int, *, sends: bool) -> Exchange:
        """Return the message, or nothing where the model begins or ends."""
        if number >= self.total:
            return ()
        microbatch, chunk = self._place(direction, number)
        step = 1 if (direction == "forward") == sends else -1
        depth = chunk * self.job.pp + self.stage + step
        if not 0 <= depth < self.job.pp * self.job.vpp:
            return ()
        return (
            Message(
                sends=sends,
                direction=direction,
                microbatch=microbatch,
                chunk=chunk,
                peer=depth % self.job.pp,
            ),
        )
