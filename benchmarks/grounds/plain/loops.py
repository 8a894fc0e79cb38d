"""Training loops whose ranks all do the same: DDP, FSDP2, HSDP, DeepSpeed, tensor parallelism.

Where they wait for each other is where the tracer shows it:

    DDP          grad-sync: the stream waits for the last buckets, behind the backward pass
    FSDP2        in a pass, before a layer's span: for its parameters; at the end of backward: for
                 the last reduce_scatter, since FSDP's own callback comes before the tracer's
    ZeRO-3       within a layer's span: DeepSpeed's hooks are those of modules inside of it
    ZeRO-1, -2   behind the backward pass, where nothing is recorded, and in the all_gather after
                 the optimizer
    tensor       in the all_reduce of each half layer; replicas in all_reduces behind backward
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.grounds.plain.engine import Arguments, Engine, Mark
from benchmarks.grounds.plain.job import DEEPSPEED, SHARDED, Trainer
from benchmarks.grounds.plain.machine import Floats, GroupSet
from benchmarks.grounds.plain.passes import Hooks, Passes
from benchmarks.grounds.plain.update import Update
from megascan.schema import Kind, Phase
from megascan.vocabulary import GRAD_SYNC

_COPY_BYTES_PER_S = 1.2e12
"""Of gathered parameters to where they are used, and back."""
_BOTH_ENDS = (True, True)


def _backward_arguments(microbatch: int) -> Arguments:
    return {"microbatch": microbatch, "chunk": 0, "phase": Phase.BACKWARD.value}


@dataclass
class Replicas:
    """DDP and DeepSpeed's ZeRO-1 and ZeRO-2: whole models, gradients reduced in buckets."""

    engine: Engine
    passes: Passes
    update: Update
    _ends: Floats = field(default_factory=lambda: np.zeros(0))
    _filled_bytes: float = 0.0
    _is_last: bool = False

    def iterate(self) -> None:
        """Do all passes of an iteration."""
        job = self.engine.job
        for microbatch in range(job.microbatches):
            self.update.fetch()
            self._is_last = microbatch == job.microbatches - 1
            self.passes.forward(microbatch, Hooks(), has_ends=_BOTH_ENDS)
            self.passes.loss()
            self._backward(microbatch)

    def _backward(self, microbatch: int) -> None:
        engine, passes, is_ddp = self.engine, self.passes, self.engine.job.trainer not in DEEPSPEED
        self._ends, self._filled_bytes = np.zeros(engine.job.num_ranks), 0.0
        begin = passes.begin_backward(slice(None), has_head=True)
        hooks = Hooks(after_backward=partial(self._gradients_came, microbatch))
        self._filled_bytes += engine.job.model.ends_bytes / 2
        passes.layers_backward(microbatch, hooks, has_embedding=True)
        self._filled_bytes += engine.job.model.ends_bytes / 2
        self._reduce(microbatch)
        passes.end_backward(begin, microbatch)
        if not self._is_reducing:
            return
        waiting = engine.mark()
        engine.wait(self._ends)
        engine.waited(count=len(engine.job.model.layer_bytes) + 1)
        engine.compute(2e-5, kernels=2, memory_share=1.0, is_of_pass=False)
        if is_ddp:
            end = engine.device.copy()
            engine.span(Kind.OPTIMIZER, GRAD_SYNC, waiting, end, {})

    @property
    def _is_reducing(self) -> bool:
        """ZeRO-2 reduces in every backward, the others in the last one of an iteration."""
        return self._is_last or self.engine.job.trainer is Trainer.ZERO2

    def _gradients_came(self, microbatch: int, place: int) -> None:
        self._filled_bytes += float(self.engine.job.model.layer_bytes[place])
        if self._filled_bytes >= self.engine.job.habits.bucket_bytes:
            self._reduce(microbatch)

    def _reduce(self, microbatch: int) -> None:
        """Launch a bucket's reduction, as soon as the stream has got here."""
        engine, trainer = self.engine, self.engine.job.trainer
        if not self._is_reducing or not self._filled_bytes:
            return
        groups = engine.groups["deepspeed" if trainer in DEEPSPEED else "world"]
        op = "reduce_scatter" if trainer is Trainer.ZERO2 else "all_reduce"
        arguments = _backward_arguments(microbatch)
        ready = engine.mark()
        if trainer in DEEPSPEED and engine.job.habits.ends_are_bounds:
            arguments["end_is_bound"] = 1
        ends = engine.beside_stream(op, groups, self._filled_bytes, ready, arguments)
        self._ends = np.maximum(self._ends, ends)
        self._filled_bytes = 0.0


@dataclass
class Shards:
    """FSDP2, alone, replicated (HSDP) or with tensor parallelism; DeepSpeed's ZeRO-3."""

    engine: Engine
    passes: Passes
    update: Update
    _gathered: dict[int, Floats] = field(default_factory=dict)
    """When the parameters of a layer are there."""
    _reduced: Floats = field(default_factory=lambda: np.zeros(0))
    _arguments: Arguments = field(default_factory=dict)

    @property
    def _groups(self) -> GroupSet:
        names = {Trainer.HSDP: "dp_shard", Trainer.FSDP_TP: "fsdp", Trainer.ZERO3: "deepspeed"}
        return self.engine.groups[names.get(self.engine.job.trainer, "world")]

    @property
    def _is_deepspeed(self) -> bool:
        return self.engine.job.trainer is Trainer.ZERO3

    def iterate(self) -> None:
        """Do all passes of an iteration."""
        engine, model = self.engine, self.engine.job.model
        for microbatch in range(engine.job.microbatches):
            self.update.fetch()
            self._gathered.clear()
            self._reduced = np.zeros(engine.job.num_ranks)
            self._arguments = {}
            if not self._is_deepspeed:  # the root's parameters: its hooks come before the tracer's
                self._wait(self._gather(model.ends_bytes, engine.mark()), model.ends_bytes)
            self._arguments = {"microbatch": microbatch, "chunk": 0, "phase": Phase.FORWARD.value}
            self.passes.forward(microbatch, self._hooks(), has_ends=_BOTH_ENDS)
            self.passes.loss()
            self._arguments = _backward_arguments(microbatch)
            self._backward(microbatch)

    def _hooks(self) -> Hooks:
        if self._is_deepspeed:
            return Hooks(
                inside_forward=self._need_forward,
                inside_backward=self._need_backward,
                after_backward=self._reduce_layer,
            )
        return Hooks(
            before_forward=self._need_forward,
            before_backward=self._need_backward,
            after_backward=self._reduce_layer,
        )

    def _backward(self, microbatch: int) -> None:
        engine, model = self.engine, self.engine.job.model
        if not engine.job.habits.keeps_gathered:
            self._gathered.clear()
        begin = self.passes.begin_backward(slice(None), has_head=True)
        self.passes.layers_backward(microbatch, self._hooks(), has_embedding=True)
        self._reduce(model.ends_bytes)
        if self._is_deepspeed:
            self.passes.end_backward(begin, microbatch)
            engine.wait(self._reduced)
            return
        engine.wait(self._reduced)  # FSDP's callback, before the tracer's
        self.passes.end_backward(begin, microbatch)
        waiting = engine.mark()
        engine.compute(4e-6, kernels=1, memory_share=1.0, is_of_pass=False)
        engine.span(Kind.OPTIMIZER, GRAD_SYNC, waiting, engine.device.copy(), {})

    def _gather(self, full_bytes: float, ready: Mark) -> Floats:
        size_bytes = full_bytes / self._groups.size
        arguments = dict(self._arguments)
        if self._is_deepspeed and self.engine.job.habits.ends_are_bounds:
            arguments["end_is_bound"] = 1
        return self.engine.beside_stream("all_gather", self._groups, size_bytes, ready, arguments)

    def _gather_layer(self, place: int) -> None:
        if place in self._gathered or not 0 <= place < self.engine.job.model.num_layers:
            return
        full_bytes = float(self.engine.job.model.layer_bytes[place])
        self._gathered[place] = self._gather(full_bytes, self.engine.mark())

    def _wait(self, ends: Floats, full_bytes: float) -> None:
        """Let the stream wait for parameters and copy them to their places."""
        self.engine.wait(ends)
        self.engine.waited(count=1)
        copied_s = full_bytes / _COPY_BYTES_PER_S
        self.engine.compute(copied_s, kernels=2, memory_share=1.0, is_of_pass=False)

    def _need_forward(self, place: int) -> None:
        """Wait for a layer's parameters; the next layer's come while it computes."""
        self._need(place, place + 1)

    def _need_backward(self, place: int) -> None:
        self._need(place, place - 1)

    def _need(self, place: int, following: int) -> None:
        if place not in self._gathered:
            self._gather_layer(place)
        elif self._gathered[place].size == 0:  # kept since the forward pass, or just repeated
            return
        ends = self._gathered[place]
        self._wait(ends, float(self.engine.job.model.layer_bytes[place]))
        self._gathered[place] = np.zeros(0)
        # Memory of the layer before is free from here on: the next gather may begin.
        self._gather_layer(following)

    def _reduce_layer(self, place: int) -> None:
        self._reduce(float(self.engine.job.model.layer_bytes[place]))
        if not self.engine.job.habits.keeps_gathered:
            self._gathered.pop(place, None)

    def _reduce(self, size_bytes: float) -> None:
        engine = self.engine
        copied_s = size_bytes / _COPY_BYTES_PER_S
        engine.compute(copied_s, kernels=2, memory_share=1.0, is_of_pass=False)
        arguments = dict(self._arguments)
        ends = engine.beside_stream(
            "reduce_scatter", self._groups, size_bytes, engine.mark(), arguments
        )
        if engine.job.trainer is Trainer.HSDP:
            replicas = engine.groups["dp_replicate"]
            share_bytes = size_bytes / self._groups.size
            reduced = Mark(ends, engine.host.copy())
            ends = engine.beside_stream(
                "all_reduce", replicas, share_bytes, reduced, dict(self._arguments)
            )
        self._reduced = np.maximum(self._reduced, ends)


@dataclass
class TensorReplicas:
    """Tensor-parallel models whose gradients a loop averages, one all-reduce for several layers."""

    engine: Engine
    passes: Passes
    update: Update

    def iterate(self) -> None:
        """Do all passes of an iteration."""
        engine, passes, model = self.engine, self.passes, self.engine.job.model
        for microbatch in range(engine.job.microbatches):
            self.update.fetch()
            engine.blocking("broadcast", engine.groups["tp"], 8.0 * engine.job.habits.tokens, {})
            passes.forward(microbatch, Hooks(), has_ends=_BOTH_ENDS)
            passes.loss()
            begin = passes.begin_backward(slice(None), has_head=True)
            passes.layers_backward(microbatch, Hooks(), has_embedding=True)
            passes.end_backward(begin, microbatch)
        for layer_bytes in (*model.layer_bytes, model.ends_bytes):
            engine.blocking("all_reduce", engine.groups["dp"], float(layer_bytes), {})


def loop_of(engine: Engine, passes: Passes, update: Update) -> Replicas | Shards | TensorReplicas:
    """Return the loop of a job that is no pipeline."""
    trainer = engine.job.trainer
    if trainer is Trainer.TENSOR:
        return TensorReplicas(engine, passes, update)
    if trainer in SHARDED or trainer is Trainer.ZERO3:
        return Shards(engine, passes, update)
    return Replicas(engine, passes, update)
