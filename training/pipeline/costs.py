"""What the work of a step costs: seconds by stage, by microbatch, by message; and memory.

`Costs` is what is known of a job, from a trace or assumed. `WorkTable` holds these costs for every
single action, as the simulator and the planner take them; disturbances are put into a table.

    even stages of one second forward, split backward, two chunks a rank:
    even_costs(shape, forward_s=1.0)  →  F 0.5  I 0.525  W 0.475  for each of the stages

`ActivationMemory` says what a plan holds, and so its peak by pipeline rank, in bytes or in
microbatches. A forward stores its stage's activations. A whole backward frees them; the gradient of
the input frees all but what the weight gradients need, and weight gradients free the rest. Where a
forward is repeated (R), the first forward keeps only its input, and R stores the activations.

    rank 0 of 1F1B, P=2:    F0 +1 → 1    F1 +1 → 2    B0 -1 → 1    …    peak 2
    rank 1 of ZB-H1, P=2:   F0 +1 → 1    I0 -0.06 → 0.94   F1 → 1.94   …  peak 1.94
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megascan.errors import ConfigError
from training.pipeline.plan import Action, ActionKind, Message, PipelineShape, Plan

INPUT_GRADIENT_RATIO = 1.05
"""Time of the gradient of inputs over the time of a forward, where none was measured: matrix
products as in the forward, and the backward of attention, norms and activations."""
WEIGHT_GRADIENT_RATIO = 0.95
"""Time of the gradient of weights over the time of a forward, where none was measured: matrix
products alone."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Seconds that one microbatch takes on one stage.

    `recompute_s` is the part of the backward that repeats the forward (activation checkpointing):
    an action of its own in plans with R, otherwise part of B or I. `input_gradient_s` does not
    include it.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    recompute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of all work of one microbatch."""
        backward_s = self.input_gradient_s + self.weight_gradient_s + self.recompute_s
        return self.forward_s + backward_s

    def scaled(self, ratio: float) -> StageCost:
        """Return the cost of a stage that takes `ratio` times as long."""
        return StageCost(
            forward_s=self.forward_s * ratio,
            input_gradient_s=self.input_gradient_s * ratio,
            weight_gradient_s=self.weight_gradient_s * ratio,
            recompute_s=self.recompute_s * ratio,
        )

    def __add__(self, other: StageCost) -> StageCost:
        return StageCost(
            forward_s=self.forward_s + other.forward_s,
            input_gradient_s=self.input_gradient_s + other.input_gradient_s,
            weight_gradient_s=self.weight_gradient_s + other.weight_gradient_s,
            recompute_s=self.recompute_s + other.recompute_s,
        )


def assumed_cost(forward_s: float, *, recomputes: bool = False) -> StageCost:
    """Return the cost of a stage of which only the forward is known."""
    return StageCost(
        forward_s=forward_s,
        input_gradient_s=forward_s * INPUT_GRADIENT_RATIO,
        weight_gradient_s=forward_s * WEIGHT_GRADIENT_RATIO,
        recompute_s=forward_s if recomputes else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs by stage, (stage), and how microbatches differ, (microbatch); empty: all alike.

    `message_s[b]` is for the boundary between stages b and b + 1, both ways. A message takes
    `message_s` times the microbatch's size; work takes its cost times the microbatch's scale,
    because attention grows faster than length. `overhead_s` is lost on each action: to launch it
    and to look for the next.
    """

    stages: tuple[StageCost, ...]
    message_s: tuple[float, ...]
    microbatch_scales: tuple[float, ...] = ()
    microbatch_sizes: tuple[float, ...] = ()
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.message_s) != len(self.stages) - 1:
            raise ConfigError(
                f"costs name {len(self.message_s)} messages between {len(self.stages)} stages, "
                f"expected {len(self.stages) - 1}"
            )

    def table(self, shape: PipelineShape) -> WorkTable:
        """Return the seconds of every action of a pipeline; ConfigError when sizes do not fit."""
        if len(self.stages) != shape.num_stages:
            raise ConfigError(
                f"costs are for {len(self.stages)} stages, the pipeline has {shape.num_stages}"
            )
        scales = self._of_microbatches(self.microbatch_scales, shape.num_microbatches)
        sizes = self._of_microbatches(self.microbatch_sizes, shape.num_microbatches)
        work = {
            ActionKind.FORWARD: [stage.forward_s for stage in self.stages],
            ActionKind.RECOMPUTE: [stage.recompute_s for stage in self.stages],
            ActionKind.INPUT_GRADIENT: [stage.input_gradient_s for stage in self.stages],
            ActionKind.WEIGHT_GRADIENT: [stage.weight_gradient_s for stage in self.stages],
        }
        return WorkTable(
            work_s={
                kind: [[seconds * scale for scale in scales] for seconds in by_stage]
                for kind, by_stage in work.items()
            },
            forward_message_s=[[s * size for size in sizes] for s in self.message_s],
            backward_message_s=[[s * size for size in sizes] for s in self.message_s],
            overhead_s=self.overhead_s,
        )

    def slowed(self, shape: PipelineShape, rank: int, ratio: float) -> Costs:
        """Return the costs with one pipeline rank that takes `ratio` times as long."""
        stages = tuple(
            cost.scaled(ratio) if shape.rank_of(stage) == rank else cost
            for stage, cost in enumerate(self.stages)
        )
        return replace(self, stages=stages)

    @staticmethod
    def _of_microbatches(given: tuple[float, ...], count: int) -> tuple[float, ...]:
        if given and len(given) != count:
            raise ConfigError(f"costs are for {len(given)} microbatches, the step has {count}")
        return given or (1.0,) * count


@dataclass(frozen=True, kw_only=True)
class WorkTable:
    """Seconds of every piece of work, kind → [stage][microbatch], and of every message.

    `forward_message_s[b][j]` is for the output of stage b, `backward_message_s[b][j]` for the
    gradient that comes back to stage b. The lists may be changed to put in disturbances.
    """

    work_s: dict[ActionKind, list[list[float]]]
    forward_message_s: list[list[float]]
    backward_message_s: list[list[float]]
    overhead_s: float = 0.0

    def duration_s(self, action: Action, *, recomputed_apart: bool = False) -> float:
        """Return how long an action occupies its rank.

        `recomputed_apart` says that the plan repeats this forward as an action of its own.
        """
        kind, stage, microbatch = action
        if kind is ActionKind.BACKWARD:
            seconds = (
                self.work_s[ActionKind.INPUT_GRADIENT][stage][microbatch]
                + self.work_s[ActionKind.WEIGHT_GRADIENT][stage][microbatch]
            )
        else:
            seconds = self.work_s[kind][stage][microbatch]
        carries = kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        if carries and not recomputed_apart:
            seconds += self.work_s[ActionKind.RECOMPUTE][stage][microbatch]
        return seconds + self.overhead_s

    def message_duration_s(self, message: Message) -> float:
        """Return how long a message is under way between two ranks."""
        if message.kind is ActionKind.FORWARD:
            return self.forward_message_s[message.stage - 1][message.microbatch]
        return self.backward_message_s[message.stage][message.microbatch]

    def busiest_rank_s(self, shape: PipelineShape) -> float:
        """Return the seconds of work of the rank that has most: no plan is faster."""
        by_rank = [0.0] * shape.num_ranks
        for by_stage in self.work_s.values():
            for stage, by_microbatch in enumerate(by_stage):
                by_rank[shape.rank_of(stage)] += sum(by_microbatch)
        return max(by_rank)


def even_costs(
    shape: PipelineShape,
    *,
    forward_s: float = 1.0,
    message_s: float = 0.02,
    recomputes: bool = False,
) -> Costs:
    """Return the costs of equal stages; the forwards of a rank's chunks take `forward_s` in all."""
    cost = assumed_cost(forward_s / shape.num_chunks, recomputes=recomputes)
    return Costs(stages=(cost,) * shape.num_stages, message_s=(message_s,) * (shape.num_stages - 1))


_LEAST_RATIO = 0.3
"""A disturbed piece of work takes at least this part of its undisturbed time."""


def disturbed(table: WorkTable, spread_ratio: float, *, seed: int) -> WorkTable:
    """Return a table in which every piece of work takes a random time around the time in `table`.

    `spread_ratio` is the standard deviation, relative to that time.
    """
    draw = random.Random(seed)
    work_s = {
        kind: [
            [s * max(_LEAST_RATIO, draw.gauss(1.0, spread_ratio)) for s in by_microbatch]
            for by_microbatch in by_stage
        ]
        for kind, by_stage in table.work_s.items()
    }
    return replace(table, work_s=work_s)


KEPT_FOR_WEIGHTS_RATIO = 0.94
"""Share of a stage's activations that weight gradients need: 32 of 34·s·b·h bytes a layer with
fused attention. Unfused attention keeps its probabilities too, which weight gradients do not need
(0.40 at s=512, h=1024, 16 heads); the larger share is on the safe side."""


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """Activations by stage and microbatch, in any unit.

    `by_stage` holds those of a microbatch of size 1; `sizes` are the microbatches' sizes (empty:
    all 1).
    """

    by_stage: tuple[float, ...]
    sizes: tuple[float, ...] = ()
    kept_for_weights_ratio: float = KEPT_FOR_WEIGHTS_RATIO
    kept_for_recompute_ratio: float = 0.0

    def held(self, stage: int, microbatch: int) -> float:
        """Return the activations of one microbatch between its forward and its backward."""
        size = self.sizes[microbatch] if self.sizes else 1.0
        return self.by_stage[stage] * size

    def change(self, action: Action, *, recomputes: bool) -> float:
        """Return how much more is held after an action than before.

        `recomputes` says that the plan repeats the forward of this stage and microbatch (R).
        """
        held = self.held(action.stage, action.microbatch)
        if action.kind is ActionKind.FORWARD:
            return held * (self.kept_for_recompute_ratio if recomputes else 1.0)
        if action.kind is ActionKind.RECOMPUTE:
            return held * (1.0 - self.kept_for_recompute_ratio)
        if action.kind is ActionKind.BACKWARD:
            return -held
        if action.kind is ActionKind.INPUT_GRADIENT:
            return -held * (1.0 - self.kept_for_weights_ratio)
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            return -held * self.kept_for_weights_ratio
        return 0.0


def even_memory(shape: PipelineShape) -> ActivationMemory:
    """Return memory counted in microbatches: a rank's chunks together hold 1 per microbatch."""
    return ActivationMemory(by_stage=(1.0 / shape.num_chunks,) * shape.num_stages)


def memory_over_time(plan: Plan, rank: int, memory: ActivationMemory) -> Iterator[float]:
    """Yield what a rank holds after each of its actions."""
    now = 0.0
    for action in plan.actions[rank]:
        now += memory.change(action, recomputes=plan.repeats(action))
        yield now


def peak_memory(plan: Plan, memory: ActivationMemory | None = None) -> tuple[float, ...]:
    """Return the most that each pipeline rank holds, in the unit of `memory`.

    Without `memory` the unit is microbatches.
    """
    memory = memory or even_memory(plan.shape)
    ranks = range(plan.shape.num_ranks)
    return tuple(max(memory_over_time(plan, rank, memory), default=0.0) for rank in ranks)
