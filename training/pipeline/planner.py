"""The search for a fast plan within a limit of memory, for costs that are known.

Many policies are played and the fastest plan is kept; the plans that follow a rule compete too. In
a play each rank, when it is free, takes the best work that is there. A play is given up as soon as
the remaining work of some rank cannot end before the best plan so far; most plays are. The search
is short because it does not go through orders, but through the few numbers that make an order: how
many microbatches may be in flight, what comes first, how long a weight gradient waits for an input.

What is best follows from a `Policy` of few parameters. The rules that make such plans good:

- A weight gradient fills a gap. It is not begun when an input will come within the patience,
  because it would hold up work that other ranks wait for.
- Two limits hold forwards back: the sum of activations, and the number of microbatches in flight.
  Forwards that run too early take memory and help nobody.
- A rank that has no room for the next forward at once frees some by a weight gradient.

Times are exact for the costs given: messages travel while ranks work, one after the other on each
ordered pair of ranks, and a rank knows when a message under way will come.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import product

from megascan.errors import ConfigError
from training.pipeline.costs import ActivationMemory, WorkTable, peak_memory
from training.pipeline.generators import GENERATORS
from training.pipeline.plan import Action, ActionKind, PipelineShape, Placement, Plan
from training.pipeline.simulator import Prediction, predict

_ROUNDING = 1e-9
_NANOSECOND = 1e-9
"""An input that comes within this time is there: equal sums may differ in their last digits."""
_NEVER = float("inf")

ByMicrobatch = list[list[float]]
"""A number for each [stage][microbatch]."""


class Style(StrEnum):
    """What comes first when both a forward and a backward can begin."""

    BACKWARD_FIRST = "backward first"
    FORWARD_FIRST = "forward first"
    ALTERNATE = "alternate"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How ranks choose their work.

    `most_in_flight` is, by rank, how many forwards of its chunks may be without their backward.
    `deepest_first` prefers forwards of the last chunk and backwards of the first.
    """

    style: Style
    patience_s: float
    most_in_flight: tuple[int, ...]
    deepest_first: bool = True


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a plan is made for; `memory_limit` is in the unit of `memory`."""

    shape: PipelineShape
    table: WorkTable
    memory: ActivationMemory
    memory_limit: float
    splits_backward: bool = True

    @cached_property
    def durations_s(self) -> tuple[ByMicrobatch, ByMicrobatch, ByMicrobatch]:
        """Return the seconds of forwards, of what needs the gradient, and of weight gradients.

        Weight gradients are 0 where backward passes are whole.
        """
        backward = ActionKind.INPUT_GRADIENT if self.splits_backward else ActionKind.BACKWARD
        kinds = (ActionKind.FORWARD, backward, ActionKind.WEIGHT_GRADIENT)
        stages = range(self.shape.num_stages)
        microbatches = range(self.shape.num_microbatches)
        forward, gradient, weight = (
            [
                [self.table.duration_s(Action(kind, stage, j)) for j in microbatches]
                for stage in stages
            ]
            for kind in kinds
        )
        if not self.splits_backward:
            weight = [[0.0] * self.shape.num_microbatches for _ in stages]
        return forward, gradient, weight

    @cached_property
    def work_by_rank_s(self) -> list[float]:
        """Return the seconds of all work of each pipeline rank."""
        work_s = [0.0] * self.shape.num_ranks
        for by_stage in self.durations_s:
            for stage, durations in enumerate(by_stage):
                work_s[self.shape.rank_of(stage)] += sum(durations)
        return work_s

    @cached_property
    def held(self) -> ByMicrobatch:
        """Return activations by stage and microbatch."""
        microbatches = range(self.shape.num_microbatches)
        return [
            [self.memory.held(stage, j) for j in microbatches]
            for stage in range(self.shape.num_stages)
        ]


@dataclass(frozen=True, kw_only=True)
class Played:
    """A plan, by a policy or by a rule, and the time it takes."""

    plan: Plan
    step_s: float


def play(problem: Problem, policy: Policy, *, faster_than_s: float = _NEVER) -> Played | None:
    """Return the plan of a policy; None where the play hangs or takes `faster_than_s` or more."""
    game = _Game(problem, policy, faster_than_s)
    if not game.finish():
        return None
    plan = Plan(
        name="planned",
        shape=problem.shape,
        actions=tuple(tuple(Action(*entry) for entry in row) for row in game.rows),
    )
    return Played(plan=plan, step_s=game.end_s)


class _Game:
    """State of a step that is being played.

    Nested lists are [stage][microbatch]; a candidate stage of -1 means none.
    """

    def __init__(self, problem: Problem, policy: Policy, faster_than_s: float) -> None:
        shape, table = problem.shape, problem.table
        num_stages = shape.num_stages
        self._policy = policy
        self._faster_than_s = faster_than_s
        self._splits = problem.splits_backward
        self._count = shape.num_microbatches
        self._last_stage = num_stages - 1
        self._rank_of = [shape.rank_of(stage) for stage in range(num_stages)]
        self._stages_of = [shape.stages_of(rank) for rank in range(shape.num_ranks)]
        self._forward_s, self._input_s, self._weight_s = problem.durations_s
        self._forward_message_s = table.forward_message_s
        self._backward_message_s = table.backward_message_s
        self._held_by = problem.held
        self._kept_ratio = problem.memory.kept_for_weights_ratio if self._splits else 0.0
        self._limit = problem.memory_limit * (1 + _ROUNDING)
        self._held = [0.0] * shape.num_ranks
        self._next_forward = [0] * num_stages
        self._next_input = [0] * num_stages
        self._next_weight = [0] * num_stages
        self._forward_at = [[_NEVER] * self._count for _ in range(num_stages)]
        self._forward_at[0] = [0.0] * self._count
        self._gradient_at = [[_NEVER] * self._count for _ in range(num_stages)]
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._in_flight = [0] * shape.num_ranks
        self._free_s = [0.0] * shape.num_ranks
        self._last_was_forward = [False] * shape.num_ranks
        self._left_s = list(problem.work_by_rank_s)
        self._wakes = [(0.0, rank) for rank in range(shape.num_ranks)]
        self.rows: list[list[tuple[ActionKind, int, int]]] = [[] for _ in range(shape.num_ranks)]
        self.end_s = 0.0

    def finish(self) -> bool:
        """Wake ranks in the order of time; return False if the play hangs or takes too long."""
        wakes = self._wakes
        while wakes:
            now_s, rank = heapq.heappop(wakes)
            if now_s < self._free_s[rank]:
                continue
            kind, stage = self._pick(rank, now_s)
            if kind is None:
                continue
            if now_s + self._left_s[rank] >= self._faster_than_s:
                return False
            self._begin(kind, stage, rank, now_s)
        return all(done == self._count for done in self._last_of_each_stage())

    def _last_of_each_stage(self) -> Sequence[int]:
        return self._next_weight if self._splits else self._next_input

    def _pick(self, rank: int, now_s: float) -> tuple[ActionKind | None, int]:
        """Return kind and stage of the work that a free rank takes; kind None: it waits."""
        forward, blocked, soon_s = self._forward_candidate(rank, now_s)
        backward, gradient_soon_s = self._backward_candidate(rank, now_s)
        weight = self._weight_candidate(rank) if self._splits else -1
        last_was_forward = self._last_was_forward[rank]
        if weight >= 0 and blocked and forward < 0 and not last_was_forward:
            return ActionKind.WEIGHT_GRADIENT, weight
        style = self._policy.style
        alternates = style is Style.ALTERNATE and not last_was_forward
        forward_first = style is Style.FORWARD_FIRST or alternates
        if forward >= 0 and (forward_first or backward < 0):
            return ActionKind.FORWARD, forward
        if backward >= 0:
            return self._backward_kind, backward
        soon_s = min(soon_s, gradient_soon_s)
        if weight >= 0 and soon_s - now_s > self._policy.patience_s:
            return ActionKind.WEIGHT_GRADIENT, weight
        return None, -1

    @property
    def _backward_kind(self) -> ActionKind:
        return ActionKind.INPUT_GRADIENT if self._splits else ActionKind.BACKWARD

    def _forward_candidate(self, rank: int, now_s: float) -> tuple[int, bool, float]:
        """Return the stage of the forward to take, whether a forward has its input but no room, and
        when the next input comes.
        """
        best, blocked, soon_s = -1, False, _NEVER
        room = self._limit - self._held[rank]
        may_begin = self._in_flight[rank] < self._policy.most_in_flight[rank]
        for stage in self._stages_of[rank]:
            microbatch = self._next_forward[stage]
            if microbatch == self._count:
                continue
            at_s = self._forward_at[stage][microbatch]
            if at_s > now_s + _NANOSECOND:
                soon_s = min(soon_s, at_s)
            elif not may_begin or self._held_by[stage][microbatch] > room:
                blocked = True
            elif best < 0 or self._policy.deepest_first:
                best = stage
        return best, blocked, soon_s

    def _backward_candidate(self, rank: int, now_s: float) -> tuple[int, float]:
        """Return the stage of the backward to take, and when the next gradient comes."""
        best, soon_s = -1, _NEVER
        for stage in self._stages_of[rank]:
            microbatch = self._next_input[stage]
            if microbatch == self._next_forward[stage]:
                continue
            at_s = self._gradient_at[stage][microbatch]
            if at_s > now_s + _NANOSECOND:
                soon_s = min(soon_s, at_s)
            elif best < 0 or not self._policy.deepest_first:
                best = stage
        return best, soon_s

    def _weight_candidate(self, rank: int) -> int:
        """Return the last of the rank's stages that has a weight gradient to do."""
        for stage in reversed(self._stages_of[rank]):
            if self._next_weight[stage] < self._next_input[stage]:
                return stage
        return -1

    def _begin(self, kind: ActionKind, stage: int, rank: int, now_s: float) -> None:
        if kind is ActionKind.FORWARD:
            microbatch, end_s = self._begin_forward(stage, rank, now_s)
        elif kind is ActionKind.WEIGHT_GRADIENT:
            microbatch = self._next_weight[stage]
            self._next_weight[stage] = microbatch + 1
            self._held[rank] -= self._held_by[stage][microbatch] * self._kept_ratio
            end_s = now_s + self._weight_s[stage][microbatch]
        else:
            microbatch, end_s = self._begin_backward(stage, rank, now_s)
        self.rows[rank].append((kind, stage, microbatch))
        self._left_s[rank] -= end_s - now_s
        self._free_s[rank] = end_s
        self.end_s = max(self.end_s, end_s)
        heapq.heappush(self._wakes, (end_s, rank))

    def _begin_forward(self, stage: int, rank: int, now_s: float) -> tuple[int, float]:
        microbatch = self._next_forward[stage]
        self._next_forward[stage] = microbatch + 1
        self._held[rank] += self._held_by[stage][microbatch]
        self._in_flight[rank] += 1
        self._last_was_forward[rank] = True
        end_s = now_s + self._forward_s[stage][microbatch]
        if stage == self._last_stage:
            self._gradient_at[stage][microbatch] = end_s
        else:
            message_s = self._forward_message_s[stage][microbatch]
            at_s = self._send(rank, self._rank_of[stage + 1], message_s, end_s)
            self._forward_at[stage + 1][microbatch] = at_s
        return microbatch, end_s

    def _begin_backward(self, stage: int, rank: int, now_s: float) -> tuple[int, float]:
        microbatch = self._next_input[stage]
        self._next_input[stage] = microbatch + 1
        self._held[rank] -= self._held_by[stage][microbatch] * (1 - self._kept_ratio)
        self._in_flight[rank] -= 1
        self._last_was_forward[rank] = False
        end_s = now_s + self._input_s[stage][microbatch]
        if stage > 0:
            message_s = self._backward_message_s[stage - 1][microbatch]
            at_s = self._send(rank, self._rank_of[stage - 1], message_s, end_s)
            self._gradient_at[stage - 1][microbatch] = at_s
        return microbatch, end_s

    def _send(self, sender: int, receiver: int, message_s: float, now_s: float) -> float:
        """Return when a message comes, and wake its receiver then."""
        if sender == receiver:
            return now_s
        begin_s = max(now_s, self._link_free_s.get((sender, receiver), 0.0))
        at_s = begin_s + message_s
        self._link_free_s[sender, receiver] = at_s
        heapq.heappush(self._wakes, (at_s, receiver))
        return at_s


_PATIENCE_RATIOS = (0.15, 0.0, 0.3)
"""Patience as parts of a stage's forward; the first is best most often."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan of a search, its prediction, and how many rules and policies were tried."""

    plan: Plan
    prediction: Prediction
    num_tried: int


def search(problem: Problem) -> Found:
    """Return the fastest plan found within the problem's memory limit.

    Raises ConfigError where no plan fits.
    """
    best, tried = _best_by_rule(problem)
    for policy in _policies(problem):
        tried += 1
        limit_s = _NEVER if best is None else best.step_s
        best = play(problem, policy, faster_than_s=limit_s - _ROUNDING) or best
    if best is None:
        raise ConfigError(_none_fits(problem))
    prediction = predict(best.plan, problem.table, problem.memory)
    return Found(plan=best.plan, prediction=prediction, num_tried=tried)


def _best_by_rule(problem: Problem) -> tuple[Played | None, int]:
    """Return the fastest plan by rule that fits, with its time, and the number of plans tried."""
    best: Played | None = None
    tried = 0
    for plan in rule_plans(problem):
        tried += 1
        if max(peak_memory(plan, problem.memory)) > problem.memory_limit * (1 + _ROUNDING):
            continue
        step_s = predict(plan, problem.table).step_s
        if best is None or step_s < best.step_s - _ROUNDING:
            best = Played(plan=plan, step_s=step_s)
    return best, tried


def rule_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the plans by rule that this pipeline can run; split backwards only where allowed."""
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
    """Yield the policies that are worth trying, the most promising first."""
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
    """Return by how many more microbatches than in (interleaved) 1F1B to have in flight, to try."""
    ranks, chunks = problem.shape.num_ranks, problem.shape.num_chunks
    base = (0, 1, 2, ranks // 2, ranks, 2 * ranks)
    if chunks == 1:
        return tuple(dict.fromkeys(base))
    scaled = [extra * chunks // 2 for extra in base]
    return tuple(dict.fromkeys([*scaled, *(-extra for extra in scaled)]))


def _in_flight(problem: Problem, extra: int) -> tuple[int, ...]:
    """Return, by rank, how many forwards may be without their backward: as in (interleaved) 1F1B,
    plus `extra`.
    """
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
    """Return a sentence that no plan fits, with about the least limit for which one was found."""
    shape = problem.shape
    need = least_memory_found(problem)
    return (
        f"no plan for {shape.num_ranks} pipeline ranks with {shape.num_chunks} chunk(s) and "
        f"{shape.num_microbatches} microbatches fits activations of {problem.memory_limit:.4g}; "
        f"one was found for {need:.4g}"
    )


def least_memory_found(problem: Problem) -> float:
    """Return the peak of a plan found for about the least limit above the problem's limit.

    The limit is bisected until its bounds differ by half a chunk's activations at most.
    """
    low, high = problem.memory_limit, _peak_within(problem, float("inf"))
    assert high is not None
    while high - low > 0.5 / problem.shape.num_chunks:
        middle = (low + high) / 2
        peak = _peak_within(problem, middle)
        if peak is None:
            low = middle
        else:
            high = peak
    return high


def _peak_within(problem: Problem, limit: float) -> float | None:
    """Return the peak of the first plan within a limit that a policy of patience 0 gives.

    Return None where there is none.
    """
    limited = replace(problem, memory_limit=limit)
    for policy in _policies(limited):
        if policy.patience_s > 0.0:
            continue
        played = play(limited, policy)
        if played is not None:
            return max(peak_memory(played.plan, problem.memory))
    return None
