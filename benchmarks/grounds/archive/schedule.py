"""Run a job's iterations: 1F1B with blocking messages, then gradients, then the optimizer.

Each stage is a program that stops where it needs another one. A meeting (a message, or a reduction
across stages) begins when the last of its stages has come and ends for all at once; so whoever is
late is waited for, by whom it really would be. A barrier stands before every iteration, so all
iterations are computed at the same time: the last axis of every array.

    stage 0    F1 send F2 send F3 exchange... B1
    stage 1    recv F1 exchange B1 exchange F2 ...
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.grounds.archive.conditions import Conditions, conditions_of
from benchmarks.grounds.archive.costs import (
    USUAL_VOCABULARY,
    Layer,
    Work,
    embedding_of,
    layer_of,
    optimizer_of,
    output_of,
)
from benchmarks.grounds.archive.job import Effect, Job, Kind, Tracer
from benchmarks.grounds.archive.network import Network
from benchmarks.grounds.archive.noise import Array, generator, lognormal
from benchmarks.grounds.archive.stage import Mark, Stage

Meeting = tuple[str, int, int]  # what, first stage, microbatch
Program = Generator[Sequence[Meeting], Array, None]

BEGIN_SKEW_US = 25.0  # ranks leave the barrier before an iteration so far apart
AFTER_OPTIMIZER_US = 900.0  # the host logs and goes on
OVERLAP_COST = 1.04  # of a backward pass, whose memory and SMs the reduction uses
LOSS_WORK = Work(0, 0, 14.0, 6)


@dataclass(frozen=True, eq=False)
class Run:
    """Hold what a simulation gave; times in µs."""

    marks: tuple[tuple[Mark, ...], ...]  # by stage
    begin_us: Array  # (pp, dp, tp, iteration)
    end_us: Array
    passes_us: Array  # (rank, iteration): of forward and backward passes, without waiting

    @property
    def iteration_us(self) -> Array:
        """Return how long the whole job took for each iteration."""
        longest: Array = self.end_us.max(axis=(0, 1, 2))
        return longest


class Programs:
    """Write down what each stage does, step by step."""

    def __init__(self, job: Job, conditions: Conditions, effects: Sequence[Effect]) -> None:
        self.job = job
        self.conditions = conditions
        self.kinds = frozenset(effect.kind for effect in effects)
        self.effects = effects
        self.layer = layer_of(job.site.chip, job.model, job.shape.tp)
        self.dropped = frozenset(one.kind for one in job.effects) - self.kinds
        is_usual = Kind.HEAVY_OUTPUT in self.dropped
        vocabulary = USUAL_VOCABULARY if is_usual else job.model.vocabulary
        self.place = job.site.chip, job.model, job.shape.tp
        self.output = output_of(*self.place, vocabulary)
        self.follows_schedule = job.shape.pp > 1 and job.habits.tracer is not Tracer.HEAD

    def layer_on(self, stage: int) -> Layer:
        """Return a layer's work on a stage.

        Layers that a stage would not have, but for what was planted, are taken off by making all of
        its layers lighter: so the operations, and their draws, stay the same.
        """
        layers, scale = self.job.shape.layers[stage], 1.0
        if Kind.UNEVEN_LAYERS in self.dropped and layers == max(self.job.shape.layers):
            scale = (layers - 1) / layers
        if Kind.HEAVY_OUTPUT in self.dropped and stage == self.job.shape.pp - 1:
            usual = output_of(*self.place, USUAL_VOCABULARY).alone_us / self.layer.whole().alone_us
            scale = (layers - min(usual, layers - 1)) / layers
        for effect in self.effects:
            on_stage = effect.ranks[0] in self.job.shape.stage_ranks(stage)
            if effect.kind is Kind.HEAVY_STAGE and on_stage:
                scale *= effect.factor
        one = self.layer
        return replace(one, attention=one.attention.times(scale), mlp=one.mlp.times(scale))

    def load(self, stage: Stage, microbatch: int) -> None:
        """Get the batch: tensor rank 0 reads it and hands it on; middle stages need none."""
        waits = np.zeros_like(stage.host)
        if stage.number in {0, self.job.shape.pp - 1}:
            loads = self.conditions.load_us[stage.number][..., microbatch]
            waits[:, 0] = loads[:, 0]
            stage.wait_of_host(waits)
            stage.among_tensor_ranks(8.0 * self.job.model.tokens, microbatch)
        stage.wait_of_host(self.conditions.pause_us[stage.number][..., microbatch])

    def layers_forward(self, stage: Stage, microbatch: int) -> None:
        """Run the stage's layers, with the scopes that the tracer has around their parts."""
        layer = self.layer_on(stage.number)
        first = sum(self.job.shape.layers[: stage.number])
        with stage.scope("decoder"):
            for number in range(1, self.job.shape.layers[stage.number] + 1):
                said = {"layer": first + number}
                with stage.scope("transformer_layer", **said):
                    with stage.scope("_forward_attention", **said):
                        stage.compute(layer.norm, microbatch)
                        with stage.scope("attention"):
                            stage.compute(layer.attention, microbatch)
                            stage.reduce(microbatch)
                    with stage.scope("_forward_mlp", **said):
                        with stage.scope("mlp", **said), stage.scope("MLP.forward"):
                            stage.barrier()
                            stage.compute(layer.mlp, microbatch)
                            stage.reduce(microbatch)
                        stage.compute(layer.norm, microbatch)

    def forward(self, stage: Stage, microbatch: int) -> None:
        """Run one microbatch forward, and its loss on the last stage."""
        job = self.job
        stage.in_pass = True
        self.load(stage, microbatch)
        if stage.number == 0:
            stage.compute(embedding_of(job.site.chip, job.model), microbatch)
            stage.reduce(microbatch)
        self.layers_forward(stage, microbatch)
        if stage.number == job.shape.pp - 1:
            stage.compute(self.output, microbatch)
            stage.among_tensor_ranks(4.0 * job.model.tokens, microbatch, times=3)
            if job.habits.tracer is Tracer.HEAD:
                self.loss(stage, microbatch)
            else:
                with stage.scope("loss"):
                    self.loss(stage, microbatch)
        stage.in_pass = False

    def loss(self, stage: Stage, microbatch: int) -> None:
        """Average the logged loss over the replicas, which wait for each other."""
        stage.compute(LOSS_WORK, microbatch)
        spans_hosts = self.job.shape.tp * self.job.shape.dp > self.job.shape.gpus_per_host
        stage.among_replicas(stage.network.small_us(self.job.shape.dp, spans_hosts))

    def backward(self, stage: Stage, microbatch: int) -> None:
        """Run one microbatch backward; its reductions are in no scope of their own."""
        job = self.job
        last = microbatch == job.model.num_microbatches - 1
        factor = OVERLAP_COST if last and job.habits.overlaps_gradients else 1.0
        stage.in_pass = True
        if stage.number == job.shape.pp - 1:
            stage.compute(self.output.backward(), microbatch)
        work = self.layer_on(stage.number).whole().backward().times(factor)
        for _ in range(job.shape.layers[stage.number]):
            stage.compute(work, microbatch)
            stage.among_tensor_ranks(stage.network.message_bytes, microbatch, times=2)
        if stage.number == 0:
            stage.compute(embedding_of(job.site.chip, job.model), microbatch)
        stage.in_pass = False

    def exchange(
        self, stage: Stage, scope: tuple[str, str, int | None], step: int, *meetings: Meeting
    ) -> Program:
        """Send, receive or both, `step` stages ahead; `scope` is name, `expect` and microbatch."""
        name, expect, microbatch = scope
        peer = stage.number + step
        there = 0 <= peer < self.job.shape.pp
        size = len(meetings) * stage.network.message_bytes
        said = {
            "microbatch": microbatch,
            "expect": expect,
            "data": size if there else None,
            "peer_stage": peer if there else None,
            "has_data": True,
            "has_group": bool(expect),
        }
        if self.follows_schedule:
            stage.mark("B", name, **said)
        if there:
            stage.arrive()
            stage.device = yield meetings
            stage.synchronise()
        else:
            stage.wait_of_host(2 * np.ones_like(stage.host))
        if self.follows_schedule:
            stage.mark("E", name, **said)

    def one_pass(self, stage: Stage, name: str, microbatch: int) -> None:
        """Run a pass in its scope."""
        run = self.backward if name.startswith("backward") else self.forward
        if not self.follows_schedule:
            run(stage, microbatch)
            return
        if name == "forward":
            stage.barrier()
        with stage.scope(name, microbatch=microbatch):
            run(stage, microbatch)

    def pipeline(self, stage: Stage) -> Program:
        """Run all microbatches in the order 1F1B of `forward_backward_pipelining_without_…`."""
        at, last = stage.number, self.job.shape.pp - 1
        total = self.job.model.num_microbatches
        warm = min(last - at, total)
        into, out = at - 1, at  # messages are numbered by the earlier of their two stages
        exchange = partial(self.exchange, stage)
        for k in range(warm):
            yield from exchange(("recv-warmup", "send-warmup", k), -1, ("F", into, k))
            self.one_pass(stage, "forward-warmup", k)
            yield from exchange(("send-warmup", "recv-warmup", k), 1, ("F", out, k))
        if total > warm:
            yield from exchange(("recv-extra", "send-warmup", warm), -1, ("F", into, warm))
        for k in range(total - warm):
            ahead, back, following = ("F", out, k + warm), ("B", into, k), ("F", into, k + warm + 1)
            self.one_pass(stage, "forward", k + warm)
            yield from exchange(("exchange-next", "exchange-prev", None), 1, ahead, ("B", out, k))
            self.one_pass(stage, "backward", k)
            if k == total - warm - 1:
                yield from exchange(("send-extra", "", total - 1), -1, back)
            else:
                scope = ("exchange-prev", "exchange-next", None)
                yield from exchange(scope, -1, back, following)
        for k in range(total - warm, total):
            yield from exchange(("recv-cooldown", "", k), 1, ("B", out, k))
            self.one_pass(stage, "backward-cooldown", k)
            yield from exchange(("send-cooldown", "", k), -1, ("B", into, k))

    def iteration(self, stage: Stage) -> Program:
        """Run a whole iteration on one stage."""
        job = self.job
        if job.shape.pp == 1:
            for microbatch in range(job.model.num_microbatches):
                self.one_pass(stage, "forward", microbatch)
                self.one_pass(stage, "backward", microbatch)
        else:
            yield from self.pipeline(stage)
        if self.follows_schedule:
            stage.mark("B", "allreduce")
        stage.among_replicas(stage.network.gradients_us(stage.number))
        if job.shape.pp > 1 and stage.number in {0, job.shape.pp - 1}:
            stage.arrive()
            stage.device = yield [("embedding", 0, 0)]
        stage.synchronise()
        if self.follows_schedule:
            stage.mark("E", "allreduce")
        stage.mark("B", "optimizer")
        stage.compute(LOSS_WORK)
        if job.shape.pp * job.shape.tp > 1:
            stage.arrive()
            stage.device = yield [("norm", 0, 0)]
        stage.synchronise()
        stage.compute(optimizer_of(job, stage.number))
        stage.mark("E", "optimizer")
        stage.wait_of_host(AFTER_OPTIMIZER_US * stage.launch_us / job.site.launch_us)
        stage.device = stage.now()


class Meetings:
    """Let stages meet: know who has come, and when a meeting is over."""

    def __init__(self, job: Job, network: Network, conditions: Conditions) -> None:
        self.job, self.network, self.conditions = job, network, conditions
        self.came: dict[Meeting, dict[int, Array]] = {}
        self.over: dict[Meeting, Array] = {}

    def come(self, stage: Stage, meetings: Sequence[Meeting]) -> None:
        """Note that a stage is ready for its meetings, and settle those that are complete."""
        for one in meetings:
            self.came.setdefault(one, {})[stage.number] = stage.now()
            what, first, microbatch = one
            num = self.job.shape.pp if what == "norm" else 2
            if len(self.came[one]) < num:
                continue
            begin = np.maximum.reduce(list(self.came[one].values()))
            if what == "embedding":
                self.over[one] = begin + self.network.embedding_us()
            elif what == "norm":
                ready = np.broadcast_to(begin.max(axis=1, keepdims=True), begin.shape)
                members = num * self.job.shape.tp
                self.over[one] = ready + self.network.small_us(members, self.job.shape.pp > 1)
            else:
                length = self.conditions.length[:, :, microbatch]
                self.over[one] = begin + self.network.message_us(first, length)

    def end(self, meetings: Sequence[Meeting]) -> Array | None:
        """Return when all of these are over, None as long as somebody is missing."""
        if any(one not in self.over for one in meetings):
            return None
        last: Array = np.maximum.reduce([self.over[one] for one in meetings])
        return last


def simulate(job: Job, effects: Sequence[Effect], *, equal_chips: bool = False) -> Run:
    """Simulate all iterations of a job under these effects."""
    shape, num = job.shape, job.num_iterations
    conditions = conditions_of(job, effects, equal_chips=equal_chips)
    network = Network(job, conditions)
    programs = Programs(job, conditions, effects)
    size = (shape.pp, shape.dp, shape.tp, num)
    begin_us = BEGIN_SKEW_US * lognormal(generator(job.seed, "begins"), 0.6, size)
    stages = [Stage(job, conditions, network, at, begin_us[at]) for at in range(shape.pp)]
    _run(stages, programs, Meetings(job, network, conditions))
    passes = np.stack([stage.passes_us for stage in stages]).reshape(shape.num_ranks, num)
    return Run(
        marks=tuple(tuple(stage.marks) for stage in stages),
        begin_us=begin_us,
        end_us=np.stack([stage.device for stage in stages]),
        passes_us=passes,
    )


def _run(stages: Sequence[Stage], programs: Programs, meetings: Meetings) -> None:
    """Run each stage's program to its next meeting, again and again, until all have ended."""
    running = [programs.iteration(stage) for stage in stages]
    waits: dict[int, Sequence[Meeting]] = {}

    def go_on(stage: Stage, end: Array | None) -> None:
        program = running[stage.number]
        try:
            waits[stage.number] = next(program) if end is None else program.send(end)
        except StopIteration:
            waits.pop(stage.number, None)
            return
        meetings.come(stage, waits[stage.number])

    for stage in stages:
        go_on(stage, None)
    while waits:
        for number in sorted(waits):
            end = meetings.end(waits[number])
            if end is not None:
                go_on(stages[number], end)
