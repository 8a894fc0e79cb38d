"""Forward and backward passes of one microbatch: layers, what they communicate, what interrupts.

A layer of a tensor-parallel model sums its halves over `tp`, forward and backward; one with experts
exchanges tokens before and after them. Both happen within its span, on the stream itself:

    layer | attention | all_reduce | mlp | all_reduce |
    layer | attention | all_to_all | experts | all_to_all |

Whoever needs parameters first, or reduces gradients afterwards, says so by `before` and `after`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.plain.engine import EVERYBODY, Arguments, At, Engine, Mark
from benchmarks.grounds.plain.job import TENSOR_PARALLEL
from benchmarks.grounds.plain.machine import Floats
from benchmarks.grounds.plain.trouble import Hits
from megascan.config import LEAST_LAYERS_OF_PLAIN_MODELS, TraceConfig
from megascan.schema import Kind, Phase
from megascan.vocabulary import (
    BACKWARD,
    FORWARD,
    PLAIN_LAYER,
    backward_of,
    collection_of,
    recompute_of,
)

_ATTENTION_SHARE = 0.4
"""Of a layer's time; the rest is its MLP."""
_BACKWARD_RATIO = 2.0
_LOAD_RATIO = 0.12
"""Standard deviation of how many tokens the experts of a rank get."""

Hook: TypeAlias = Callable[[int], None]
"""Called with a layer's place, from 0."""


def _nothing(place: int) -> None:
    del place


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a trainer does around each layer."""

    before_forward: Hook = _nothing
    inside_forward: Hook = _nothing
    """Behind the begin of its span: DeepSpeed's hooks are those of modules inside of it."""
    before_backward: Hook = _nothing
    inside_backward: Hook = _nothing
    after_backward: Hook = _nothing


class Passes:
    """Passes of a job's ranks, or of a stage's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.job = engine.job
        self.model = engine.job.model
        self._first_of_replica = np.array(
            [int(np.argmax(engine.job.replica_of == one)) for one in engine.job.replica_of]
        )
        self.tokens = np.full(self.job.num_ranks, self.job.habits.tokens)
        self._layers: frozenset[int] | None = None
        self._phases = np.arange(self.job.num_ranks) * 3
        self._loads: dict[int, Floats] = {}
        """Of each layer's experts, by its place: how many tokens they got."""

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Return which layers are recorded, None for all."""
        return None if self._layers is None else tuple(sorted(self._layers))

    def begin_iteration(self) -> None:
        """Choose the layers that are recorded."""
        tracing, numbers = self.job.tracing, range(1, self.model.num_layers + 1)
        self._layers = None
        if tracing.layer_stride > 1 and self.engine.iteration > 1:
            config = TraceConfig(
                interval=tracing.interval,
                window=tracing.window,
                layer_stride=tracing.layer_stride,
            )
            iteration = self.engine.iteration
            self._layers = config.sampled_layers(
                iteration, {0: numbers}, LEAST_LAYERS_OF_PLAIN_MODELS
            )

    def draw_lengths(self) -> None:
        """Draw the data of the next microbatch, the same for ranks of one replica."""
        ratio = self.job.habits.length_ratio
        normal = self.engine.draws.normal()[self._first_of_replica]
        factor = self.engine.conditions.factor(Hits.LENGTHS, self.engine.device)
        lengths = np.exp(ratio * normal - ratio**2 / 2).clip(0.4, 2.2) * factor
        self.engine.lengths = 0.8 * lengths + 0.2 * lengths**2
        self.tokens = np.round(self.job.habits.tokens * lengths).astype(np.int64)

    # Passes

    def forward(
        self, microbatch: int, hooks: Hooks, *, at: At = EVERYBODY, has_ends: tuple[bool, bool]
    ) -> None:
        """Do a forward pass; `has_ends` tells whether embedding and head are part of it."""
        engine, model = self.engine, self.model
        arguments: Arguments = {"microbatch": microbatch, "chunk": 0, "phase": Phase.FORWARD.value}
        begin = engine.mark(at)
        engine.stall(at)
        if has_ends[0]:
            engine.compute(
                model.embedding_s, kernels=3, at=at, memory_share=0.8, weights=engine.lengths
            )
        middle = (engine.iteration + microbatch) % model.num_layers
        for place in range(model.num_layers):
            hooks.before_forward(place)
            if place == middle:
                self._collect(at)
            self._layer(place, arguments, Phase.FORWARD, hooks.inside_forward, at)
        if has_ends[1]:
            self.head(1.0, at)
        engine.span(Kind.COMPUTE, FORWARD, begin, engine.device[at].copy(), arguments, at=at)

    def begin_backward(self, at: At, *, has_head: bool) -> Mark:
        """Begin a backward pass: that of loss and head."""
        begin = self.engine.mark(at)
        self.engine.stall(at)
        if has_head:
            self.head(_BACKWARD_RATIO, at)
        return begin

    def layers_backward(
        self, microbatch: int, hooks: Hooks, *, at: At = EVERYBODY, has_embedding: bool
    ) -> None:
        """Do the backward of all layers and of the embedding."""
        arguments: Arguments = {"microbatch": microbatch, "chunk": 0, "phase": Phase.BACKWARD.value}
        for place in reversed(range(self.model.num_layers)):
            hooks.before_backward(place)
            if self.model.recomputes:
                repeated: Arguments = {**arguments, "phase": Phase.RECOMPUTE.value}
                self._layer(place, repeated, Phase.RECOMPUTE, hooks.inside_backward, at)
            self._layer(place, arguments, Phase.BACKWARD, hooks.inside_backward, at)
            hooks.after_backward(place)
        if has_embedding:
            self.engine.compute(
                2 * self.model.embedding_s,
                kernels=3,
                at=at,
                memory_share=0.8,
                weights=self.engine.lengths,
            )

    def end_backward(self, begin: Mark, microbatch: int, at: At = EVERYBODY) -> None:
        """Record a backward pass."""
        arguments: Arguments = {"phase": Phase.BACKWARD.value, "microbatch": microbatch, "chunk": 0}
        end = self.engine.device[at].copy()
        self.engine.span(Kind.COMPUTE, BACKWARD, begin, end, arguments, at=at)

    def head(self, ratio: float, at: At) -> None:
        """Compute the head, forward or backward; a trouble may make it heavy."""
        weights = self.engine.lengths * self.engine.conditions.factor(Hits.HEAD, self.engine.device)
        self.engine.compute(ratio * self.model.head_s, kernels=6, at=at, weights=weights)

    def loss(self, at: At = EVERYBODY) -> None:
        """Compute the loss, between the passes: nobody records it."""
        self.engine.compute(
            0.06 * self.model.head_s + 2e-5, kernels=5, at=at, memory_share=0.9, is_of_pass=False
        )

    # A layer

    def _layer(self, place: int, arguments: Arguments, phase: Phase, inside: Hook, at: At) -> None:
        engine, is_backward = self.engine, phase is Phase.BACKWARD
        own: Arguments = {**arguments, "layer": place + 1}
        begin = engine.mark(at)
        inside(place)
        typical_s = float(self.model.forward_s[place]) * (_BACKWARD_RATIO if is_backward else 1.0)
        kernels = int(self.model.num_kernels * (1.6 if is_backward else 1.0))
        if self.job.trainer in TENSOR_PARALLEL:
            # Backward knows no layer: autograd calls what is in it.
            self._split_layer(typical_s, kernels, arguments if is_backward else own, at)
        elif self.model.has_experts[place]:
            if phase is Phase.FORWARD:
                self._route(place)
            self._expert_layer(
                place, typical_s, kernels, arguments if is_backward else own, phase=phase
            )
        else:
            engine.compute(typical_s, kernels=kernels, at=at, weights=engine.lengths)
        if self._is_recorded(place + 1):
            name = {
                Phase.FORWARD: PLAIN_LAYER,
                Phase.BACKWARD: backward_of(PLAIN_LAYER),
                Phase.RECOMPUTE: recompute_of(PLAIN_LAYER),
            }[phase]
            engine.span(Kind.COMPUTE, name, begin, engine.device[at].copy(), own, at=at)

    def _is_recorded(self, number: int) -> bool:
        if self.job.tracing.granularity != "full" or self.job.habits.is_compiled:
            return False
        return self._layers is None or number in self._layers

    def _split_layer(self, typical_s: float, kernels: int, arguments: Arguments, at: At) -> None:
        engine, groups = self.engine, self.engine.groups["tp"]
        size_bytes = self.model.activation_bytes
        for share in (_ATTENTION_SHARE, 1.0 - _ATTENTION_SHARE):
            engine.compute(share * typical_s, kernels=kernels // 2, at=at, weights=engine.lengths)
            engine.blocking("all_reduce", groups, size_bytes, arguments, at=at)

    def _route(self, place: int) -> None:
        """Draw how many tokens the experts of each rank get, one on the average of a group."""
        engine, members = self.engine, self.engine.groups["experts"].members
        load = np.exp(_LOAD_RATIO * engine.draws.normal())
        load = load * engine.conditions.factor(Hits.EXPERTS, engine.device)
        shares = np.empty_like(load)
        shares[members] = load[members] / load[members].mean(axis=1)[:, None]
        self._loads[place] = shares

    def _expert_layer(
        self, place: int, typical_s: float, kernels: int, arguments: Arguments, *, phase: Phase
    ) -> None:
        """Compute attention, then experts on what the others send; backward in reverse order."""
        engine, groups, load = self.engine, self.engine.groups["experts"], self._loads[place]
        sent = self.model.activation_bytes * engine.lengths
        received = self.model.activation_bytes * load
        parts = [
            (_ATTENTION_SHARE, engine.lengths, sent),
            (1.0 - _ATTENTION_SHARE, load, received),
        ]
        is_backward = phase is Phase.BACKWARD
        if is_backward:  # what was combined is given back first
            engine.blocking(
                "all_to_all", groups, 0.0, arguments, sizes=np.maximum(sent, received), shown=sent
            )
            parts.reverse()
        for number, (share, weights, handed) in enumerate(parts):
            engine.compute(share * typical_s, kernels=kernels // 2, weights=weights)
            if number == 0 or not is_backward:
                engine.blocking(
                    "all_to_all", groups, 0.0, arguments,
                    sizes=np.maximum(sent, received), shown=handed,
                )  # fmt: skip

    # Collectors

    def _collect(self, at: At) -> None:
        """Let Python's collector stop hosts: small collections, large ones, those of a trouble."""
        engine, habits = self.engine, self.job.habits
        chance = engine.draws.even()
        small = np.where(chance < 0.12, 1.5e-4 * (0.5 + engine.draws.even()), 0.0)
        large = engine.conditions.added_s(Hits.COLLECTIONS, engine.draws.even())
        if habits.collects_every:
            phases = 0 if habits.collects_together else self._phases
            is_due = (engine.iteration + phases) % habits.collects_every == 0
            large = large + np.where(is_due, habits.collection_s * (0.8 + 0.4 * chance), 0.0)
        self._pause(0, small, at)
        self._pause(2, large, at)

    def _pause(self, generation: int, pause_s: Floats, at: At) -> None:
        engine, own = self.engine, pause_s[at]
        if not own.any():
            return
        begin = engine.mark_host(at)
        engine.host[at] += own
        if self.job.tracing.granularity == "full":
            present = tuple(bool(one) for one in own > 0)
            name = collection_of(generation)
            engine.span(Kind.GC, name, begin, engine.host[at].copy(), {}, at=at, present=present)
