"""A step with guided choice, simulated: every rank chooses when it is free, knowing what it can.

A rank announces a message when the work for it begins, with the time that the costs expect. The
message itself comes when the disturbed costs say so. Headers take no time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from megascan.errors import ConfigError
from training.pipeline.costs import WorkTable, disturbed
from training.pipeline.guided import Patience, Progress, choose, patience_for
from training.pipeline.memory import ActivationMemory
from training.pipeline.plan import (
    Action,
    ActionKind,
    Message,
    Plan,
    message_made,
    message_needed,
)
from training.pipeline.simulator import predict

_SOON_S = 1e-12
"""What an overdue message is said to be away; above 0, which would mean that it is there."""
_NUM_DRAWS = 5


@dataclass(frozen=True, kw_only=True)
class GuidedRun:
    """What came of a step: its time, each rank's order as executed, and how often it deviated."""

    step_s: float
    order: tuple[tuple[Action, ...], ...]
    num_deviations: int
    peak: tuple[float, ...]


def run_guided(
    plan: Plan,
    table: WorkTable,
    *,
    expected: WorkTable,
    patience: Patience,
    memory: ActivationMemory | None = None,
    slack: float = 0.0,
) -> GuidedRun:
    """Return how a step runs with the costs of `table` where the ranks expect those of `expected`.

    Raises ConfigError for a plan that hangs.
    """
    run = _GuidedRun(plan, table, expected=expected, patience=patience, memory=memory, slack=slack)
    run.finish()
    return GuidedRun(
        step_s=max(run.free_s),
        order=tuple(map(tuple, run.order)),
        num_deviations=sum(progress.num_deviations for progress in run.progress),
        peak=tuple(run.peak),
    )


def guided_ratio(plan: Plan, table: WorkTable, spread_ratio: float) -> float:
    """Return the time of guided choice over that of the plan when all work is disturbed.

    `spread_ratio` is the standard deviation of each piece of work, relative to its time; the mean
    of a few draws is taken. Below 1 guided choice is faster.
    """
    forwards = table.work_s[ActionKind.FORWARD]
    forward_s = max(sum(by_microbatch) / len(by_microbatch) for by_microbatch in forwards)
    ratios = []
    for seed in range(_NUM_DRAWS):
        drawn = disturbed(table, spread_ratio, seed=seed)
        guided = run_guided(plan, drawn, expected=table, patience=patience_for(forward_s))
        ratios.append(guided.step_s / predict(plan, drawn).step_s)
    return sum(ratios) / len(ratios)


class _GuidedRun:
    def __init__(
        self,
        plan: Plan,
        table: WorkTable,
        *,
        expected: WorkTable,
        patience: Patience,
        memory: ActivationMemory | None,
        slack: float,
    ) -> None:
        ranks = range(plan.shape.num_ranks)
        self._plan = plan
        self._table = table
        self._expected = expected
        self._patience = patience
        self._repeated = {a[1:] for listed in plan.actions for a in listed if a.kind == "R"}
        self._arrives_s: dict[Message, float] = {}
        self._due_s: dict[Message, float] = {}
        self._link_free_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._wakes: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]
        self._idle_since_s = [0.0] * len(ranks)
        self.progress = [Progress(plan, rank, memory=memory, slack=slack) for rank in ranks]
        self.free_s = [0.0] * len(ranks)
        self.peak = [0.0] * len(ranks)
        self.order: list[list[Action]] = [[] for _ in ranks]

    def finish(self) -> None:
        """Wake ranks in the order of time until all is done."""
        while self._wakes:
            now_s, rank = heapq.heappop(self._wakes)
            if now_s >= self.free_s[rank]:
                self._wake(rank, now_s)
        for rank, progress in enumerate(self.progress):
            if progress.head is not None:
                raise ConfigError(
                    f"plan {self._plan.name} hangs: rank {rank} waits at {progress.head}"
                )

    def _wake(self, rank: int, now_s: float) -> None:
        choice = choose(
            self.progress[rank],
            lambda action: self._outlook(action, now_s),
            now_s - self._idle_since_s[rank],
            self._patience,
        )
        if choice.action is not None:
            self._begin(rank, choice.action, now_s)
        elif choice.wait_s is not None:
            # Rounding must not make a wake-up come before its time: it would wait once more.
            heapq.heappush(self._wakes, (now_s + choice.wait_s + _SOON_S, rank))

    def _outlook(self, action: Action, now_s: float) -> float | None:
        message = message_needed(self._plan.shape, action)
        if message is None:
            return 0.0
        arrives_s = self._arrives_s.get(message)
        if arrives_s is None:
            return None
        return 0.0 if arrives_s <= now_s else max(self._due_s[message] - now_s, _SOON_S)

    def _begin(self, rank: int, action: Action, now_s: float) -> None:
        progress = self.progress[rank]
        progress.take(action)
        self.peak[rank] = max(self.peak[rank], progress.held)
        self.order[rank].append(action)
        apart = action[1:] in self._repeated
        end_s = now_s + self._table.duration_s(action, recomputed_apart=apart)
        due_s = now_s + self._expected.duration_s(action, recomputed_apart=apart)
        self.free_s[rank] = self._idle_since_s[rank] = end_s
        heapq.heappush(self._wakes, (end_s, rank))
        message = message_made(self._plan.shape, action)
        if message:
            self._send(message, rank, now_s, end_s, due_s)

    def _send(
        self, message: Message, sender: int, now_s: float, end_s: float, due_s: float
    ) -> None:
        receiver = self._plan.shape.rank_of(message.stage)
        if receiver != sender:
            begin_s = max(end_s, self._link_free_s[sender, receiver])
            end_s = begin_s + self._table.message_duration_s(message)
            self._link_free_s[sender, receiver] = end_s
            due_s += self._expected.message_duration_s(message)
            heapq.heappush(self._wakes, (now_s, receiver))
        self._arrives_s[message] = end_s
        self._due_s[message] = due_s
        heapq.heappush(self._wakes, (end_s, receiver))
