"""MegaFBD on paper: forwards on helpers outside the pipeline, the plan that follows, and its time.

With full recomputation a stage runs each microbatch forward twice: once to feed the next stage and
once more, with its graph, before the backward. A helper takes over the first forward for a share of
the microbatches and hands each stage its input, so the stage runs forward only once, when the
backward is near. The last stage's first forward feeds no stage and is left out.

    a stage and microbatch:   alone    F R I W      with a helper    F I W

A step with helpers has an ordinary plan: each output still goes to the next stage, later than the
helper's copy of the output. So a step whose helper dies on the way still ends, only later.

    rank 1 of 2 and a helper   rank 0   F0 ·· B0 F1 ·· B1      helper   0F0 0F1
                               rank 1   ·· F0 B0 ·· F1 B1 (its inputs come from the helper)

Each rank and each helper does the work that can begin and that the backward needs first. Each
helper holds the weights of all stages but the last and runs whole microbatches. A job that does not
recompute would have to run forward twice because of the helper: it loses, as the predicted times
say.

A GPU equal to the pipeline's is better used as one more pipeline rank. A helper pays where its GPU
is spare, slower, of little memory or may be taken away.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megascan.errors import ConfigError
from training.pipeline.costs import StageCost
from training.pipeline.plan import Action, ActionKind, PipelineShape, Plan
from training.pipeline.simulator import order_of_completion

NAME = "fbd"
"""Name of the plans made here."""

_NUM_SHARES = 8
"""Shares of the microbatches that are tried, in steps of an eighth."""
MOST_AHEAD = 2
"""Microbatches whose activations a rank holds at most: one in backward, one recomputed ahead."""
_NANOSECOND = 1e-9


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """A step with helpers: its plan, who runs which microbatch forward, and the predicted time.

    `helper_of` holds, by microbatch, the number of the helper that runs it; None: the pipeline.
    """

    plan: Plan
    helper_of: tuple[int | None, ...]
    pipeline_s: float

    @property
    def share(self) -> float:
        """Return the part of the microbatches that run forward on helpers."""
        return sum(helper is not None for helper in self.helper_of) / len(self.helper_of)

    def microbatches_of(self, helper: int) -> tuple[int, ...]:
        """Return the microbatches that a helper runs forward, in order."""
        return tuple(m for m, number in enumerate(self.helper_of) if number == helper)


def best_share(
    stages: Sequence[StageCost],
    num_microbatches: int,
    *,
    speeds: Sequence[float],
    splits_backward: bool,
) -> Disaggregation:
    """Return the share of forwards that helpers should take, and the step that follows.

    `speeds` has one entry a helper: its speed over the speed of a pipeline rank. Share 0 is the job
    alone, with forwards repeated ahead of their gradients. Raises ConfigError without helpers, for
    a speed of 0 or less and for fewer than 2 stages.
    """
    if len(stages) < 2 or not speeds or min(speeds) <= 0:
        named = ", ".join(f"{speed:g}" for speed in speeds) or "none"
        raise ConfigError(
            f"helpers of speed {named} for {len(stages)} pipeline stages; "
            "expected at least 1 helper, speeds above 0 and 2 stages"
        )
    found = []
    for eighths in range(_NUM_SHARES + 1):
        step = _Step(
            stages=tuple(stages),
            helper_of=_dealt(num_microbatches, eighths / _NUM_SHARES, speeds),
            speeds=tuple(speeds),
            splits_backward=splits_backward,
        )
        made = step.played()
        if not eighths or _ends_without_helpers(made.plan):
            found.append(made)
    return min(found, key=lambda made: (made.pipeline_s, made.share))


def _dealt(num_microbatches: int, share: float, speeds: Sequence[float]) -> tuple[int | None, ...]:
    """Return the helper of each microbatch: the share is spread evenly over the step, and each
    microbatch goes to the helper that ends it first; None: the pipeline.
    """
    ends = [0.0] * len(speeds)
    helper_of: list[int | None] = []
    for microbatch in range(num_microbatches):
        if int((microbatch + 1) * share) == int(microbatch * share):
            helper_of.append(None)
            continue
        after = [end + 1 / speed for end, speed in zip(ends, speeds, strict=True)]
        helper = after.index(min(after))
        ends[helper] = after[helper]
        helper_of.append(helper)
    return tuple(helper_of)


def _ends_without_helpers(plan: Plan) -> bool:
    """Return whether a plan can be carried out with all inputs from the stage before."""
    try:
        order_of_completion(plan)
    except ConfigError:
        return False
    return True


class _Name(NamedTuple):
    """A piece of work. `what` is ``feed`` (forward for the next stage), ``graph`` (forward for the
    backward), ``input`` or ``weights`` (the gradients).
    """

    what: str
    stage: int
    microbatch: int


class _Work(NamedTuple):
    """A piece of work: who does it, how long it takes, and what comes before.

    Of the work that can begin, the smallest `priority` goes first.
    """

    doer: int
    seconds: float
    after: tuple[_Name, ...]
    priority: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step with helpers; doers 0 … P-1 are the pipeline ranks, later doers the helpers."""

    stages: tuple[StageCost, ...]
    helper_of: tuple[int | None, ...]
    speeds: tuple[float, ...]
    splits_backward: bool

    def played(self) -> Disaggregation:
        """Run the step on paper; everybody does the most urgent work that can begin."""
        seconds, orders = _play(dict(self._work()))
        shape = PipelineShape(num_ranks=len(self.stages), num_microbatches=len(self.helper_of))
        rows = tuple(
            tuple(self._action(name) for name in orders[rank]) for rank in range(shape.num_ranks)
        )
        plan = Plan(name=NAME, shape=shape, actions=rows)
        return Disaggregation(plan=plan, helper_of=self.helper_of, pipeline_s=seconds)

    def _action(self, name: _Name) -> Action:
        """Return a rank's work as an action of a plan.

        The only forward of a microbatch on a stage is F, also the forward with graph of a helped
        microbatch; a second forward is R.
        """
        match name.what:
            case "feed":
                kind = ActionKind.FORWARD
            case "graph":
                is_first = self._is_helped(name.microbatch) or self._is_last(name.stage)
                kind = ActionKind.FORWARD if is_first else ActionKind.RECOMPUTE
            case "input":
                kind = ActionKind.INPUT_GRADIENT if self.splits_backward else ActionKind.BACKWARD
            case _:
                kind = ActionKind.WEIGHT_GRADIENT
        return Action(kind, name.stage, name.microbatch)

    def _work(self) -> Iterator[tuple[_Name, _Work]]:
        """Yield all work of a step, each with its name."""
        for microbatch in range(len(self.helper_of)):
            for stage in range(len(self.stages)):
                if not self._is_last(stage):
                    yield _Name("feed", stage, microbatch), self._feed(stage, microbatch)
                yield _Name("graph", stage, microbatch), self._graph(stage, microbatch)
                yield _Name("input", stage, microbatch), self._backward(stage, microbatch)
                if self.splits_backward:
                    yield _Name("weights", stage, microbatch), self._weights(stage, microbatch)

    def _is_helped(self, microbatch: int) -> bool:
        return self.helper_of[microbatch] is not None

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.stages) - 1

    def _input(self, stage: int, microbatch: int) -> list[_Name]:
        return [_Name("feed", stage - 1, microbatch)] if stage else []

    def _feed(self, stage: int, microbatch: int) -> _Work:
        after = self._input(stage, microbatch)
        helper, seconds = self.helper_of[microbatch], self.stages[stage].forward_s
        if helper is not None:
            doer = len(self.stages) + helper
            return _Work(doer, seconds / self.speeds[helper], tuple(after), (microbatch, stage))
        return _Work(stage, seconds, tuple(after), (0.5, microbatch))

    def _graph(self, stage: int, microbatch: int) -> _Work:
        after = self._input(stage, microbatch)
        if not self._is_helped(microbatch) and not self._is_last(stage):
            after.append(_Name("feed", stage, microbatch))
        last = "weights" if self.splits_backward else "input"
        if microbatch:
            after.append(_Name("graph", stage, microbatch - 1))
        if microbatch >= MOST_AHEAD:
            after.append(_Name(last, stage, microbatch - MOST_AHEAD))
        return _Work(stage, self.stages[stage].forward_s, tuple(after), (1.0, microbatch))

    def _backward(self, stage: int, microbatch: int) -> _Work:
        after = [_Name("graph", stage, microbatch)]
        if not self._is_last(stage):
            after.append(_Name("input", stage + 1, microbatch))
        if microbatch:
            after.append(_Name("input", stage, microbatch - 1))
        cost = self.stages[stage]
        seconds = cost.input_gradient_s
        if not self.splits_backward:
            seconds += cost.weight_gradient_s
        return _Work(stage, seconds, tuple(after), (0.0, microbatch))

    def _weights(self, stage: int, microbatch: int) -> _Work:
        after = (_Name("input", stage, microbatch),)
        return _Work(stage, self.stages[stage].weight_gradient_s, after, (2.0, microbatch))


def _play(works: dict[_Name, _Work]) -> tuple[float, dict[int, list[_Name]]]:
    """Return when all work is done, and each doer's order of work.

    A free doer does the most urgent work that can begin.
    """
    missing = {name: len(work.after) for name, work in works.items()}
    followers: defaultdict[_Name, list[_Name]] = defaultdict(list)
    for name, work in works.items():
        for before in work.after:
            followers[before].append(name)
    ready: defaultdict[int, list[tuple[tuple[float, ...], _Name]]] = defaultdict(list)
    for name, count in missing.items():
        if not count:
            heapq.heappush(ready[works[name].doer], (works[name].priority, name))
    orders: defaultdict[int, list[_Name]] = defaultdict(list)
    busy: set[int] = set()
    running: list[tuple[float, _Name]] = []
    now_s = 0.0
    while True:
        for doer, queue in ready.items():
            if queue and doer not in busy:
                _, name = heapq.heappop(queue)
                busy.add(doer)
                orders[doer].append(name)
                heapq.heappush(running, (now_s + works[name].seconds, name))
        if not running:
            return now_s, orders
        now_s = running[0][0]
        while running and running[0][0] <= now_s + _NANOSECOND:
            _, name = heapq.heappop(running)
            busy.discard(works[name].doer)
            for follower in followers[name]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(
                        ready[works[follower].doer], (works[follower].priority, follower)
                    )
