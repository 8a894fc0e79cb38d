"""Recomputation as actions of the plan: forwards repeated while a rank waits for a gradient.

With Megatron-Core's recomputation the forward is repeated inside the backward pass, when the
gradient has come. As an action of its own it needs no gradient and fills the wait for it:

    1F1B, stage 1 of 4   F0 F1 F2 · · · B0 F3 · B1 …     a backward repeats its forward: 3 times F
    ahead                F0 F1 F2 R0 · B0 F3 R1 B1 …     the same work, the wait is shorter

A forward then keeps its input and its random states alone, and one microbatch at a time holds its
activations. The last stage runs each forward right before its backward and repeats none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from training.pipeline.plan import GIVES_INPUT_GRADIENT, Action, ActionKind, Plan


def recompute_ahead(plan: Plan) -> Plan:
    """Return the plan with each forward but the last stage's repeated before its backward."""
    rows = tuple(tuple(_repeating(plan, listed)) for listed in plan.actions)
    return replace(plan, actions=rows)


def _repeating(plan: Plan, listed: tuple[Action, ...]) -> Iterator[Action]:
    for action in listed:
        if action.kind in GIVES_INPUT_GRADIENT and action.stage < plan.shape.num_stages - 1:
            yield Action(ActionKind.RECOMPUTE, action.stage, action.microbatch)
        yield action
