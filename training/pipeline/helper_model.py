"""What a helper brings: ranks outside the pipeline that run forwards and hold weights alone.

With full recomputation a stage runs each microbatch forward twice: once to feed the next stage and
once more, with its graph, before the backward. A helper takes the first of them over for a share of
the microbatches and hands each stage its input, so the stage runs forward only once. The last
stage's first forward feeds nobody and is left out.

    a stage and microbatch:   alone    F R I W      with a helper    R I W

Ranks and helpers each do, of what can begin, what the backward needs first. A job that does not
recompute would have to run forward twice because of the helper: it loses, and the figures say so.

Among equal GPUs a helper is better used as a pipeline rank. It pays where it is spare, slower, of
little memory or may be taken away.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megascan.errors import ConfigError
from training.pipeline.costs import StageCost

_NUM_SHARES = 8
"""Shares of the microbatches that are tried: eighths."""
MOST_AHEAD = 2
"""Microbatches whose activations a rank holds: one in its backward, one recomputed ahead."""
_NANOSECOND = 1e-9


@dataclass(frozen=True, kw_only=True)
class HelperOutcome:
    """Predicted pipeline with helpers; `share` of the microbatches run forward on them."""

    pipeline_s: float
    share: float


class _Work(NamedTuple):
    """One thing to do: who does it, how long, after what; the smallest priority goes first."""

    doer: int
    seconds: float
    after: tuple[Hashable, ...]
    priority: tuple[float, ...]


def best_share(
    stages: Sequence[StageCost],
    num_microbatches: int,
    *,
    num_helpers: int,
    speed_ratio: float,
    splits_backward: bool,
) -> HelperOutcome:
    """Return the share of forwards that helpers should take, and the step that follows.

    `speed_ratio` is a helper's speed over that of a pipeline rank. Share 0 is the job alone, with
    forwards repeated ahead of their gradients. Raises ConfigError for no stage to help.
    """
    if len(stages) < 2 or num_helpers < 1 or speed_ratio <= 0:
        raise ConfigError(
            f"{num_helpers} helper(s) of speed {speed_ratio:g} for {len(stages)} pipeline stages; "
            "expected at least 1 helper, a speed above 0 and 2 stages"
        )
    outcomes = []
    for eighths in range(_NUM_SHARES + 1):
        job = _Disaggregated(
            stages=tuple(stages),
            num_microbatches=num_microbatches,
            num_helpers=num_helpers,
            speed_ratio=speed_ratio,
            splits_backward=splits_backward,
            share=eighths / _NUM_SHARES,
        )
        seconds = _finish(dict(job.work()))
        outcomes.append(HelperOutcome(pipeline_s=seconds, share=job.share))
    return min(outcomes, key=lambda outcome: (outcome.pipeline_s, outcome.share))


@dataclass(frozen=True, kw_only=True)
class _Disaggregated:
    """A step with helpers; stages run on doers 0 … P-1, helpers are those after them."""

    stages: tuple[StageCost, ...]
    num_microbatches: int
    num_helpers: int
    speed_ratio: float
    splits_backward: bool
    share: float

    def work(self) -> Iterator[tuple[Hashable, _Work]]:
        """Yield all work of a step by its name."""
        for microbatch in range(self.num_microbatches):
            for stage in range(len(self.stages)):
                if stage + 1 < len(self.stages):
                    yield ("F", stage, microbatch), self._first_forward(stage, microbatch)
                yield ("R", stage, microbatch), self._forward_with_graph(stage, microbatch)
                yield ("I", stage, microbatch), self._backward(stage, microbatch)
                if self.splits_backward:
                    yield ("W", stage, microbatch), self._weights(stage, microbatch)

    def _is_helped(self, microbatch: int) -> bool:
        """Whether helpers run this microbatch forward: as evenly spread as the share allows."""
        return int((microbatch + 1) * self.share) > int(microbatch * self.share)

    def _input(self, stage: int, microbatch: int) -> list[Hashable]:
        return [("F", stage - 1, microbatch)] if stage else []

    def _first_forward(self, stage: int, microbatch: int) -> _Work:
        helped = self._is_helped(microbatch)
        last_helped = len(self.stages) - 1
        helper = len(self.stages) + stage * self.num_helpers // last_helped
        seconds = self.stages[stage].forward_s
        return _Work(
            doer=helper if helped else stage,
            seconds=seconds / self.speed_ratio if helped else seconds,
            after=tuple(self._input(stage, microbatch)),
            priority=(0.0 if helped else 0.5, microbatch, stage),
        )

    def _forward_with_graph(self, stage: int, microbatch: int) -> _Work:
        after = self._input(stage, microbatch)
        if microbatch >= MOST_AHEAD:
            after.append(("I", stage, microbatch - MOST_AHEAD))
        return _Work(stage, self.stages[stage].forward_s, tuple(after), (1.0, microbatch))

    def _backward(self, stage: int, microbatch: int) -> _Work:
        after: list[Hashable] = [("R", stage, microbatch)]
        if stage + 1 < len(self.stages):
            after.append(("I", stage + 1, microbatch))
        if microbatch:
            after.append(("I", stage, microbatch - 1))
        cost = self.stages[stage]
        seconds = cost.input_gradient_s
        if not self.splits_backward:
            seconds += cost.weight_gradient_s
        return _Work(stage, seconds, tuple(after), (0.0, microbatch))

    def _weights(self, stage: int, microbatch: int) -> _Work:
        seconds = self.stages[stage].weight_gradient_s
        return _Work(stage, seconds, (("I", stage, microbatch),), (2.0, microbatch))


def _finish(works: dict[Hashable, _Work]) -> float:
    """When all work is done, each doer taking what is most urgent of what can begin."""
    missing = {name: len(work.after) for name, work in works.items()}
    followers: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    for name, work in works.items():
        for before in work.after:
            followers[before].append(name)
    ready: defaultdict[int, list[tuple[tuple[float, ...], Hashable]]] = defaultdict(list)
    for name, count in missing.items():
        if not count:
            heapq.heappush(ready[works[name].doer], (works[name].priority, name))
    busy: set[int] = set()
    running: list[tuple[float, Hashable]] = []
    now_s = 0.0
    while True:
        for doer, queue in ready.items():
            if queue and doer not in busy:
                _, name = heapq.heappop(queue)
                busy.add(doer)
                heapq.heappush(running, (now_s + works[name].seconds, name))
        if not running:
            return now_s
        now_s = running[0][0]
        while running and running[0][0] <= now_s + _NANOSECOND:
            _, name = heapq.heappop(running)
            busy.discard(works[name].doer)
            for follower in followers[name]:
                missing[follower] -= 1
                if not missing[follower]:
                    doer = works[follower].doer
                    heapq.heappush(ready[doer], (works[follower].priority, follower))
