"""What a plan holds in activations: peak by pipeline rank, in bytes or in microbatches.

A forward stores its stage's activations. A whole backward frees them; the gradient of the input
frees all but what the weight gradients need, and these free the rest. Where a forward is repeated
(R), the first one keeps nothing but its input, and R stores the activations.

    rank 0 of 1F1B, P=2:    F0 +1 → 1    F1 +1 → 2    B0 -1 → 1    …    peak 2
    rank 1 of ZB-H1, P=2:   F0 +1 → 1    I0 -0.06 → 0.94   F1 → 1.94   …  peak 1.94
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from training.pipeline.plan import Action, ActionKind, PipelineShape, Plan

KEPT_FOR_WEIGHTS_RATIO = 0.94
"""Share of a stage's activations that weight gradients need: 32 of 34·s·b·h bytes a layer with
fused attention. Unfused attention keeps its probabilities too, of which weight gradients need
nothing (0.40 at s=512, h=1024, 16 heads); the larger share is the careful one."""


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """Activations by stage and microbatch, in any one unit.

    `by_stage` is that of a microbatch of size 1; `sizes` are the microbatches' sizes (none: all 1).
    """

    by_stage: tuple[float, ...]
    sizes: tuple[float, ...] = ()
    kept_for_weights_ratio: float = KEPT_FOR_WEIGHTS_RATIO
    kept_for_recompute_ratio: float = 0.0

    def held(self, stage: int, microbatch: int) -> float:
        """Return activations of one microbatch between forward and backward."""
        size = self.sizes[microbatch] if self.sizes else 1.0
        return self.by_stage[stage] * size

    def change(self, action: Action, *, recomputes: bool) -> float:
        """Return how much more is held after an action; `recomputes` says that this stage repeats
        it.
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
    """Return memory counted in microbatches: a rank's chunks together hold 1 for each."""
    return ActivationMemory(by_stage=(1.0 / shape.num_chunks,) * shape.num_stages)


def memory_over_time(plan: Plan, rank: int, memory: ActivationMemory) -> Iterator[float]:
    """Yield what a rank holds after each of its actions."""
    repeated = {(a.stage, a.microbatch) for a in plan.actions[rank] if a.kind == "R"}
    now = 0.0
    for action in plan.actions[rank]:
        now += memory.change(action, recomputes=(action.stage, action.microbatch) in repeated)
        yield now


def peak_memory(plan: Plan, memory: ActivationMemory | None = None) -> tuple[float, ...]:
    """Return the most that each pipeline rank holds, in the unit of `memory` (microbatches)."""
    memory = memory or even_memory(plan.shape)
    ranks = range(plan.shape.num_ranks)
    return tuple(max(memory_over_time(plan, rank, memory), default=0.0) for rank in ranks)
