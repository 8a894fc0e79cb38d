"""The search for a fast plan within a limit of memory, for costs that are known.

Many policies are played (`list_schedule`) and the fastest plan is kept; the plans that follow a
rule compete too. A play ends as soon as some rank's remaining work cannot end before the best so
far, which is most of them. The search is short because it does not look at orders, but at the few
numbers that make them: how many microbatches may be in flight, what comes first, how long a
weight gradient waits for an input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from megascan.errors import ConfigError
from training.pipeline.generators import GENERATORS
from training.pipeline.list_schedule import Policy, Problem, Style, play
from training.pipeline.memory import peak_memory
from training.pipeline.plan import ActionKind, Placement, Plan
from training.pipeline.simulator import Prediction, predict

_ROUNDING = 1e-9
_PATIENCE_RATIOS = (0.15, 0.0, 0.3)
"""Patience in forwards of a stage; the first is best most often."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan of a search, its prediction, and how many were tried."""

    plan: Plan
    prediction: Prediction
    num_tried: int


def search(problem: Problem) -> Found:
    """Return the fastest plan found within the problem's memory limit.

    Raises ConfigError where none fits.
    """
    best, tried = _best_by_rule(problem)
    for policy in _policies(problem):
        tried += 1
        limit_s = best[1] if best else float("inf")
        played = play(problem, policy, faster_than_s=limit_s - _ROUNDING)
        if played:
            best = played.plan, played.step_s
    if best is None:
        raise ConfigError(_none_fits(problem))
    plan = best[0]
    prediction = predict(plan, problem.table, problem.memory)
    return Found(plan=plan, prediction=prediction, num_tried=tried)


def _best_by_rule(problem: Problem) -> tuple[tuple[Plan, float] | None, int]:
    """The fastest of the plans that follow a rule and fit, with its time; and their number."""
    best: tuple[Plan, float] | None = None
    tried = 0
    for plan in rule_plans(problem):
        tried += 1
        if max(peak_memory(plan, problem.memory)) > problem.memory_limit * (1 + _ROUNDING):
            continue
        step_s = predict(plan, problem.table).step_s
        if best is None or step_s < best[1] - _ROUNDING:
            best = plan, step_s
    return best, tried


def rule_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the plans of the generators that this pipeline can run, split only where asked for."""
    if problem.shape.placement is not Placement.LOOP:
        return
    for generate in GENERATORS.values():
        try:
            plan = generate(problem.shape)
        except ConfigError:
            continue
        if problem.splits_backward or not plan.splits_backward:
            yield plan


def _policies(problem: Problem) -> Iterator[Policy]:
    """Yield what is worth trying, the most promising first."""
    shape = problem.shape
    forwards = problem.table.work_s[ActionKind.FORWARD]
    forward_s = max(sum(by_microbatch) / len(by_microbatch) for by_microbatch in forwards)
    patience = _PATIENCE_RATIOS if problem.splits_backward else (0.0,)
    depths = (True, False) if shape.num_chunks > 1 else (True,)
    for ratio, extra, style, deepest in product(patience, _extras(problem), Style, depths):
        yield Policy(
            style=style,
            patience_s=ratio * forward_s,
            most_in_flight=_in_flight(problem, extra),
            deepest_first=deepest,
        )


def _extras(problem: Problem) -> tuple[int, ...]:
    """By how much to leave the microbatches in flight of (interleaved) 1F1B."""
    ranks, chunks = problem.shape.num_ranks, problem.shape.num_chunks
    base = (0, 1, 2, ranks // 2, ranks, 2 * ranks)
    if chunks == 1:
        return tuple(dict.fromkeys(base))
    scaled = [extra * chunks // 2 for extra in base]
    return tuple(dict.fromkeys([*scaled, *(-extra for extra in scaled)]))


def _in_flight(problem: Problem, extra: int) -> tuple[int, ...]:
    """Forwards of chunks without their backward by rank, as in (interleaved) 1F1B and `extra`."""
    shape = problem.shape
    ranks, chunks = shape.num_ranks, shape.num_chunks
    most = shape.num_microbatches * chunks
    if chunks == 1:
        return tuple(max(1, min(ranks - rank + extra, most)) for rank in range(ranks))
    return tuple(
        max(1, min((ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1 + extra, most))
        for rank in range(ranks)
    )


def _none_fits(problem: Problem) -> str:
    """Why no plan was found, with the least limit for which there is one."""
    shape = problem.shape
    need = least_memory_found(problem)
    return (
        f"no plan for {shape.num_ranks} pipeline ranks with {shape.num_chunks} chunk(s) and "
        f"{shape.num_microbatches} microbatches fits activations of {problem.memory_limit:.4g}; "
        f"one was found for {need:.4g}"
    )


def least_memory_found(problem: Problem) -> float:
    """Return the least peak of the policies when no limit holds them."""
    free = replace(problem, memory_limit=float("inf"))
    played = (play(free, policy) for policy in _policies(free) if policy.patience_s == 0.0)
    peaks = [max(peak_memory(found.plan, problem.memory)) for found in played if found]
    return min(peaks)
