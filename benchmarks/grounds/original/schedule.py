"""Run a job's traced steps: stages wait for messages, members of a collective leave together.

Each step begins at a barrier of the whole job, so steps do not touch each other: every time is an
array of the shape (dp, tp, step), and all steps, replicas and tensor ranks of a stage are simulated
at once. A stage is a generator; it stops where it waits for another stage, and goes on once all
that it waits for has been posted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.original.costs import Costs, gamma, link_slowness
from benchmarks.grounds.original.job import Floats, Job, Ranks, Tracer

Key = tuple[str, int, int]
Waits = Generator[list[Key], None, None]

BARRIER_US = 15.0
SKEW_US = 20.0  # between the ranks' own begins of a step, after the barrier
EXIT_US = 1.5  # members leave a collective so far apart, on average
TENSOR_REDUCE_US = 110.0  # at scale 1 and many members
GRADIENT_REDUCE_US = 2600.0  # within a host
GRADIENT_REDUCE_ACROSS_US = 6500.0
SEND_US = 90.0
SEND_ACROSS_US = 240.0
LOSS_REDUCE_US = 35.0
NORM_REDUCE_US = 30.0
EMBEDDING_REDUCE_US = 900.0
TOKENS_EXCHANGE_US = 140.0  # all-to-all of one expert layer
POST_US = 10.0  # the host's share of a send or receive
EVENT_US = 1.0  # the device stands still for an event
STEP_TAIL_US = 150.0
MESSAGE_BYTES = 33_554_432  # 4096 tokens, hidden size 4096, bf16

SCHEDULE_NAMES = frozenset(
    {"forward", "forward-warmup", "backward", "backward-cooldown", "allreduce"}
    | {"send-warmup", "recv-warmup", "recv-extra", "exchange-next", "exchange-prev"}
    | {"send-extra", "send-cooldown", "recv-cooldown"}
)
BASE_NAMES = SCHEDULE_NAMES | {"_reduce", "optimizer", "loss"}
NUMBERED_NAMES = frozenset({"transformer_layer", "_forward_attention", "_forward_mlp", "mlp"})


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Hold one B or E record of a stage, for all its ranks and steps."""

    name: str
    phase: str
    time_us: Floats
    attributes: dict[str, object] = field(default_factory=dict)  # in the file's order


class Meeting:
    """Collect the posts of all stages that take part in one message or reduction."""

    def __init__(self, num_members: int) -> None:
        """Wait for so many posts."""
        self.missing = num_members
        self.end_us: Floats | float = 0.0
        self.lasting_us: Floats | float = 0.0

    def post(self, now_us: Floats, lasting_us: Floats | None) -> None:
        """Note one arrival; one member brings what the transfer takes."""
        self.missing -= 1
        self.end_us = np.maximum(self.end_us, now_us)
        if lasting_us is not None:
            self.lasting_us = lasting_us


class Stage:
    """Run the program of one pipeline stage and record its spans."""

    def __init__(
        self, job: Job, stage: int, calm_us: float, meetings: dict[Key, Meeting], records: bool
    ) -> None:
        """Stand at the barrier before the step; keep marks only when `records` says so."""
        self.job, self.stage, self.meetings, self.records = job, stage, meetings, records
        self.costs = Costs(job, stage, calm_us)
        shape = self.costs.shape
        self.begin_us = SKEW_US * gamma(self.costs.rng, 0.6, shape) * self.costs.host_slowness
        self.now_us = self.begin_us.copy()
        self.passes_us = np.zeros_like(self.now_us)
        self.marks: list[Mark] = []
        self.is_first, self.is_last = stage == 0, stage == job.shape.pp - 1
        grid = job.shape.grid()
        self.tensor_links = self._slowness(self.costs.ranks[:, None, :])
        self.replica_links = self._slowness(self.costs.ranks.T[None])
        self.next_links = self._between(grid[min(stage + 1, job.shape.pp - 1)])
        self.ends_links = self._between(grid[-1])

    def _slowness(self, members: Ranks) -> Floats:
        return link_slowness(self.job, members, self.job.effects)

    def _between(self, others: Ranks) -> Floats:
        return self._slowness(np.stack([self.costs.ranks, others], axis=-1))

    @contextmanager
    def span(self, name: str, **attributes: object) -> Iterator[None]:
        """Record what happens inside as one span; the attributes go to its E record."""
        self._mark(name, "B", {})
        yield
        self._mark(name, "E", attributes)

    def _mark(self, name: str, phase: str, attributes: dict[str, object]) -> None:
        tracing = self.job.tracing
        kind = name.rsplit("_", 1)[0] if name[-1].isdigit() else name
        muted = tracing.base and kind not in BASE_NAMES
        muted |= tracing.tracer is Tracer.HEAD and kind in SCHEDULE_NAMES
        if muted:
            return
        if self.records:
            mark = Mark(name=name, phase=phase, time_us=self.now_us, attributes=attributes)
            self.marks.append(mark)
        self.now_us = self.now_us + EVENT_US

    def _layer_name(self, name: str, number: int) -> str:
        numbered = self.job.tracing.tracer is Tracer.JUNE and name in NUMBERED_NAMES
        return f"{name}_{number}" if numbered else name

    def compute(self, name: str, microbatch: int) -> None:
        """Let every rank run one module."""
        taken_us = self.costs.compute(name, self.now_us, microbatch)
        if microbatch >= 0:
            self.passes_us = self.passes_us + taken_us
        self.now_us = self.now_us + taken_us

    def _leave_together(self, axis: int, mean_us: float, slowness: Floats) -> None:
        """Let each group along one axis wait for its last member, transfer, and leave."""
        arrived = self.now_us.max(axis=axis, keepdims=True)
        leave = arrived + self.costs.transfer(mean_us, slowness)
        self.now_us = leave + EXIT_US * gamma(self.costs.transfer_rng, 0.5, self.costs.shape)

    def tensor_sync(self, mean_us: float, *, moves_data: bool = True) -> None:
        """Meet the tensor ranks; without data the links do not matter."""
        size = self.job.shape.tp
        if size > 1:
            slowness = self.tensor_links if moves_data else np.ones_like(self.tensor_links)
            self._leave_together(1, mean_us * 2 * (size - 1) / size, slowness)

    def replica_sync(self, mean_us: float, *, moves_data: bool = True) -> None:
        """Meet the same tensor rank of all replicas."""
        size = self.job.shape.dp
        if size > 1:
            slowness = self.replica_links if moves_data else np.ones_like(self.replica_links)
            self._leave_together(0, mean_us * 2 * (size - 1) / size, slowness)

    def reduce(self) -> None:
        """All-reduce a layer's output over the tensor ranks, as a recorded span."""
        group = "others of tp and dp" if self.job.shape.tp > 1 else None
        with self.span("_reduce", expect="_reduce", group=group):
            self.tensor_sync(TENSOR_REDUCE_US * self.job.gpu_scale)
            self.now_us = self.now_us + 2.0

    def _meet(self, keys: list[Key], num_members: int, lasting: list[Floats | None]) -> Waits:
        for key, lasting_us in zip(keys, lasting, strict=True):
            meeting = self.meetings.setdefault(key, Meeting(num_members))
            meeting.post(self.now_us, lasting_us)
        yield keys
        for key in keys:
            meeting = self.meetings[key]
            self.now_us = np.maximum(self.now_us, meeting.end_us + meeting.lasting_us)

    def _message(self, key: Key) -> Floats | None:
        """Return how long a message lasts, drawn by the earlier of its two stages only."""
        if key[1] != self.stage:
            return None
        stride = self.job.shape.tp * self.job.shape.dp
        hosts = self.costs.ranks // self.job.shape.gpus_per_host
        others = (self.costs.ranks + stride) // self.job.shape.gpus_per_host
        mean_us = np.where(hosts != others, SEND_ACROSS_US, SEND_US)[..., None]
        drawn = self.costs.transfer(self.job.gpu_scale, self.next_links)
        return np.asarray(mean_us * drawn, dtype=np.float64)

    def exchange(self, name: str, keys: list[Key], *, paired: bool, **attributes: object) -> Waits:
        """Send and receive the messages of `keys`; those past the pipeline's ends do not exist."""
        keys = [key for key in keys if 0 <= key[1] < self.job.shape.pp - 1]
        peer = "next" if keys and keys[0][1] == self.stage else "previous"
        size = int(MESSAGE_BYTES * self.job.gpu_scale) * len(keys) if keys else None
        filled: dict[str, object] = {"data": size}
        if paired:
            filled["group"] = peer if keys else None
        with self.span(name, **attributes, **filled):
            self.now_us = self.now_us + POST_US * self.job.launch_scale * self.costs.host_slowness
            yield from self._meet(keys, 2, [self._message(key) for key in keys])

    def forward(self, microbatch: int) -> None:
        """Run the forward pass of one microbatch."""
        if self.is_first or self.is_last:
            self.now_us = self.now_us + self.costs.data_stall()
        if self.is_first:
            self.compute("embedding", microbatch)
            self.reduce()
        with self.span("decoder"):
            for layer in range(self.job.layers):
                self._layer(self.stage * self.job.layers + layer + 1, microbatch)
        if self.is_last:
            self.compute("head", microbatch)
            self.tensor_sync(LOSS_REDUCE_US, moves_data=False)
            with self.span("loss"):
                self.compute("loss", microbatch)
                self.replica_sync(LOSS_REDUCE_US, moves_data=False)

    def _layer(self, number: int, microbatch: int) -> None:
        with self.span(self._layer_name("transformer_layer", number)):
            with self.span(self._layer_name("_forward_attention", number)):
                self.compute("norm", microbatch)
                with self.span("attention"):
                    self.compute("attention", microbatch)
                    self.reduce()
                self.compute("residual", microbatch)
            with self.span(self._layer_name("_forward_mlp", number)):
                self.compute("norm", microbatch)
                with self.span(self._layer_name("mlp", number)):
                    self._mlp(microbatch)
                self.compute("residual", microbatch)

    def _mlp(self, microbatch: int) -> None:
        if self.job.experts:
            self.compute("router", microbatch)
            self.replica_sync(TOKENS_EXCHANGE_US)
        with self.span("MLP.forward"):
            self.tensor_sync(BARRIER_US, moves_data=False)
            self.compute("mlp", microbatch)
            self.reduce()
        if self.job.experts:
            self.replica_sync(TOKENS_EXCHANGE_US)

    def backward(self, microbatch: int) -> None:
        """Run the backward pass; its tensor all-reduces leave no record."""
        reduce_us = TENSOR_REDUCE_US * self.job.gpu_scale
        if self.is_last:
            self.compute("head_backward", microbatch)
        for _ in range(self.job.layers):
            if self.job.experts:
                self.replica_sync(TOKENS_EXCHANGE_US)
            self.compute("mlp_backward", microbatch)
            self.tensor_sync(reduce_us)
            if self.job.experts:
                self.replica_sync(TOKENS_EXCHANGE_US)
            self.compute("attention_backward", microbatch)
            self.tensor_sync(reduce_us)
        if self.is_first:
            self.compute("embedding_backward", microbatch)

    def run(self) -> Waits:
        """Run one step, from the barrier to its end."""
        if self.job.shape.pp > 1:
            yield from self._one_forward_one_backward()
            with self.span("allreduce"):
                yield from self._finalize_gradients()
        else:
            for microbatch in range(self.job.num_microbatches):
                self.forward(microbatch)
                self.backward(microbatch)
            yield from self._finalize_gradients()
        with self.span("optimizer"):
            self.compute("gradient_norm", -1)
            self.tensor_sync(NORM_REDUCE_US, moves_data=False)
            yield from self._meet([("norm", 0, 0)], self.job.shape.pp, [None])
            self.now_us = self.now_us + NORM_REDUCE_US
            self.compute("optimizer", -1)
        self.now_us = self.now_us + STEP_TAIL_US * self.job.launch_scale * self.costs.host_slowness

    def _one_forward_one_backward(self) -> Waits:
        before, num = self.stage - 1, self.job.num_microbatches
        warmup = min(self.job.shape.pp - self.stage - 1, num)
        steady = num - warmup
        for i in range(warmup):
            number = {"micro_batch_index": i}
            keys: list[Key] = [("forward", before, i)]
            yield from self.exchange(
                "recv-warmup", keys, paired=True, **number, expect="send-warmup"
            )
            with self.span("forward-warmup", **number):
                self.forward(i)
            keys = [("forward", self.stage, i)]
            yield from self.exchange(
                "send-warmup", keys, paired=True, **number, expect="recv-warmup"
            )
        if steady:
            number = {"micro_batch_index": warmup}
            keys = [("forward", before, warmup)]
            yield from self.exchange(
                "recv-extra", keys, paired=True, **number, expect="send-warmup"
            )
        yield from self._steady(warmup, steady)
        for i in range(steady, num):
            number = {"micro_batch_index": i}
            keys = [("backward", self.stage, i)]
            yield from self.exchange("recv-cooldown", keys, paired=False, **number)
            with self.span("backward-cooldown", **number):
                self.backward(i)
            keys = [("backward", before, i)]
            yield from self.exchange("send-cooldown", keys, paired=False, **number)

    def _steady(self, warmup: int, steady: int) -> Waits:
        """Run forward and backward by turns; each exchange sends one way and receives the other."""
        before = self.stage - 1
        for i in range(steady):
            self.tensor_sync(BARRIER_US, moves_data=False)
            with self.span("forward", micro_batch_index=i + warmup):
                self.forward(i + warmup)
            keys: list[Key] = [("forward", self.stage, i + warmup), ("backward", self.stage, i)]
            yield from self.exchange("exchange-next", keys, paired=True, expect="exchange-prev")
            with self.span("backward", micro_batch_index=i):
                self.backward(i)
            if i == steady - 1:
                number = {"micro_batch_index": self.job.num_microbatches - 1}
                keys = [("backward", before, i)]
                yield from self.exchange("send-extra", keys, paired=False, **number)
            else:
                keys = [("backward", before, i), ("forward", before, i + warmup + 1)]
                yield from self.exchange("exchange-prev", keys, paired=True, expect="exchange-next")

    def _finalize_gradients(self) -> Waits:
        """Reduce gradients over the replicas, and those of tied embeddings between both ends."""
        hosts = self.costs.hosts
        across = bool((hosts != hosts[:1]).any())
        mean_us = GRADIENT_REDUCE_ACROSS_US if across else GRADIENT_REDUCE_US
        self.replica_sync(mean_us * self.job.gpu_scale)
        if self.job.tied_embeddings and self.is_first != self.is_last:
            lasting = None
            if self.is_first:
                lasting = self.costs.transfer(
                    EMBEDDING_REDUCE_US * self.job.gpu_scale, self.ends_links
                )
            yield from self._meet([("embedding", 0, 0)], 2, [lasting])


@dataclass(frozen=True, kw_only=True)
class Run:
    """Hold one simulation: each stage's marks, and all ranks' begins and ends after the barrier."""

    marks: list[list[Mark]]
    begin_us: Floats  # (pp, dp, tp, step)
    end_us: Floats
    passes_us: Floats  # (pp, dp, tp, step): of each rank's passes, without waiting for others

    @property
    def steps_us(self) -> Floats:
        """Return each traced step, until its last rank has finished, (step,)."""
        return np.asarray(self.end_us.max(axis=(0, 1, 2)))

    @property
    def step_us(self) -> float:
        """Return the mean of these steps."""
        return float(self.steps_us.mean())


def simulate(job: Job, calm_us: float, *, records: bool = False) -> Run:
    """Run all stages until each has ended its step."""
    meetings: dict[Key, Meeting] = {}
    stages = [Stage(job, s, calm_us, meetings, records) for s in range(job.shape.pp)]
    running = [(stage.run(), list[Key]()) for stage in stages]
    while running:
        waiting = []
        for program, keys in running:
            wanted: list[Key] | None = keys
            while wanted is not None and all(meetings[key].missing == 0 for key in wanted):
                wanted = next(program, None)
            if wanted is not None:
                waiting.append((program, wanted))
        running = waiting
    return Run(
        marks=[stage.marks for stage in stages],
        begin_us=np.stack([stage.begin_us for stage in stages]),
        end_us=np.stack([stage.now_us for stage in stages]),
        passes_us=np.stack([stage.passes_us for stage in stages]),
    )
