"""Guided choice: follow the plan, and leave it where the next input is not there and not near.

A rank asks `choose` whenever it is free. The rule:

1. Take the plan's next action when its input is there.
2. If the input is announced and due within the patience, wait for it. If the input is not even
   announced, wait a shorter while.
3. Else take the earliest planned action that can begin now; a forward only if it and all forwards
   that the plan has before it fit into the plan's own peak of activations (plus the given slack).
4. Else wait until something comes.

If the plan cannot hang, guided choice cannot hang either. Proof: of all actions not done, take the
first in an order of completion of the plan. All actions that the plan has before it on its rank are
done, so it is the plan's next action on that rank; all that it needs is done; and the plan's next
action is always admitted. Within (kind, stage) microbatches stay in order, so the order of sums of
gradients does not change.

The functions here know neither clock nor transport: the executor and the simulator both use them.

`run_guided` simulates a step: every rank chooses when it is free, by what it knows. A rank
announces a message when the work for the message begins, with the arrival that the expected costs
give. The message itself comes when the disturbed costs say so. Headers take no time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megascan.errors import ConfigError
from training.pipeline.costs import ActivationMemory, WorkTable, disturbed, even_memory, peak_memory
from training.pipeline.plan import (
    GIVES_INPUT_GRADIENT,
    Action,
    ActionKind,
    Message,
    Plan,
    message_made,
    message_needed,
)
from training.pipeline.simulator import predict

Outlook = Callable[[Action], float | None]
"""Returns the seconds until the input of an action comes from another stage: 0 when it is there,
None when it is not announced. An overdue or unknown arrival is any small number above 0."""

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a rank waits for the plan's next input before it does something else, seconds."""

    announced_s: float
    unannounced_s: float


def patience_for(forward_s: float) -> Patience:
    """Return the patience that was best in simulations and on gloo: 0.3 and 0.15 of a forward."""
    return Patience(announced_s=0.3 * forward_s, unannounced_s=0.15 * forward_s)


@dataclass(frozen=True, kw_only=True)
class NextMove:
    """What to do now: an action, or waiting for `wait_s` at most (None: until something comes)."""

    action: Action | None
    wait_s: float | None = None


class PlanProgress:
    """What one pipeline rank has taken of its plan, what it holds, and what it may take next."""

    def __init__(
        self, plan: Plan, rank: int, *, memory: ActivationMemory | None = None, slack: float = 0.0
    ) -> None:
        memory = memory or even_memory(plan.shape)
        self._plan = plan
        self._listed = plan.work_of(rank)
        self._limit = peak_memory(plan, memory)[rank] + slack + _ROUNDING
        self._change = [
            memory.change(action, recomputes=plan.repeats(action)) for action in self._listed
        ]
        self._position = {action: number for number, action in enumerate(self._listed)}
        self._queues: dict[tuple[ActionKind, int], list[Action]] = {}
        for action in reversed(self._listed):
            self._queues.setdefault((action.kind, action.stage), []).append(action)
        self._taken: set[Action] = set()
        self._head = 0
        self.held = 0.0
        self.num_deviations = 0

    @property
    def head(self) -> Action | None:
        """Return the plan's next action; None when all are taken."""
        return self._listed[self._head] if self._head < len(self._listed) else None

    def take(self, action: Action) -> None:
        """Note that an action begins."""
        queue = self._queues[action.kind, action.stage]
        if queue[-1] != action:
            raise ValueError(f"{action} was taken before {queue[-1]}")
        queue.pop()
        if action != self.head:
            self.num_deviations += 1
        self.held += self._change[self._position[action]]
        self._taken.add(action)
        while self._head < len(self._listed) and self._listed[self._head] in self._taken:
            self._head += 1

    def startable(self, action: Action) -> bool:
        """Return whether this rank has done all of its own work that an action needs."""
        kind, stage, microbatch = action
        if kind is ActionKind.FORWARD:
            return True
        before = ActionKind.FORWARD
        if kind is ActionKind.WEIGHT_GRADIENT:
            before = ActionKind.INPUT_GRADIENT
        elif kind in GIVES_INPUT_GRADIENT and self._plan.repeats(action):
            before = ActionKind.RECOMPUTE
        return Action(before, stage, microbatch) in self._taken

    def alternatives(self) -> Iterator[Action]:
        """Yield actions that may be taken instead of the plan's next, earliest planned first.

        They are the next microbatch of each kind and stage, where `startable` holds and the
        activations fit. Whether the input is there is not checked.
        """
        heads = [queue[-1] for queue in self._queues.values() if queue]
        for action in sorted(heads, key=self._position.__getitem__):
            if action != self.head and self.startable(action) and self._fits(action):
                yield action

    def _fits(self, action: Action) -> bool:
        """Return whether an action leaves room for all that the plan has before it and not done."""
        position = self._position[action]
        if self._change[position] <= 0:
            return True
        before = sum(
            self._change[number]
            for number in range(self._head, position)
            if self._change[number] > 0 and self._listed[number] not in self._taken
        )
        return self.held + before + self._change[position] <= self._limit

    def needs_input(self, action: Action) -> bool:
        """Return whether an action needs a message from another stage."""
        return message_needed(self._plan.shape, action) is not None


def choose(
    progress: PlanProgress, outlook: Outlook, waited_s: float, patience: Patience
) -> NextMove:
    """Return what a free rank does next; `waited_s` is how long it has been free."""
    head = progress.head
    if head is None:
        return NextMove(action=None)
    due_s = _due_s(progress, outlook, head)
    if due_s == 0.0:
        return NextMove(action=head)
    wait_s = _time_left(due_s, waited_s, patience)
    if wait_s > 0.0:
        return NextMove(action=None, wait_s=wait_s)
    for action in progress.alternatives():
        if _due_s(progress, outlook, action) == 0.0:
            return NextMove(action=action)
    return NextMove(action=None)


def _time_left(due_s: float | None, waited_s: float, patience: Patience) -> float:
    """Return how much longer to wait for the plan's next input; 0 or less: do something else."""
    if due_s is None:
        return patience.unannounced_s - waited_s
    if due_s > patience.announced_s:
        return 0.0
    return patience.announced_s - waited_s


def _due_s(progress: PlanProgress, outlook: Outlook, action: Action) -> float | None:
    if not progress.startable(action):
        return None
    return outlook(action) if progress.needs_input(action) else 0.0


_SOON_S = 1e-12
"""Seconds until an overdue message, as `Outlook` gives them: 0 would mean that it is there."""
_NUM_DRAWS = 5


@dataclass(frozen=True, kw_only=True)
class GuidedRun:
    """A simulated step: its time, each rank's order as executed, the number of deviations from the
    plan, and the peak of activations by rank.
    """

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
    """Return how a step runs with the costs of `table` when ranks expect the costs `expected`.

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
    """Return the time with guided choice over the time of the plan when all work is disturbed.

    `spread_ratio` is the standard deviation of each piece of work, relative to its time. The result
    is the mean of a few draws; below 1 guided choice is faster.
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
        self._arrives_s: dict[Message, float] = {}
        self._due_s: dict[Message, float] = {}
        self._link_free_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._wakes: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]
        self._idle_since_s = [0.0] * len(ranks)
        self.progress = [PlanProgress(plan, rank, memory=memory, slack=slack) for rank in ranks]
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
            # Rounding must not make the rank wake before its wait is over: it would wait again.
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
        apart = self._plan.repeats(action)
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
