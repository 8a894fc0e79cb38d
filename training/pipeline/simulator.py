"""How long a plan takes: every action's begin and end from the costs of work and messages.

A rank carries out its list in order. An action begins when the one before it on its rank has ended
and what it needs has come. Messages travel beside the work, on each ordered pair of ranks one
after the other. So the step is a longest path, and one pass over the actions finds it:

    P=2, F and B 1 s each, messages 0:       0    1    2    3    4
                                   rank 0    F0   F1   .    B0 . B1
                                   rank 1    .    F0   B0   F1  B1

`predict_megatron` is Megatron-Core's own execution instead: after its pass a rank exchanges with
its neighbours and waits until both sides are there, which is slower where work is uneven.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megascan.errors import ConfigError
from megascan.schema import Phase
from megascan.simulate.stage_order import Exchange, Pass, Step, Transfer, stage_steps
from training.pipeline.costs import ActivationMemory, WorkTable, peak_memory
from training.pipeline.plan import (
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    Message,
    PipelineShape,
    Placement,
    Plan,
    message_made,
    message_needed,
    message_of_transfer,
)
from training.pipeline.validity import order_of_completion


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One action with its begin and end, seconds from the begin of the step."""

    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step as it is expected.

    `busy_s` is work by pipeline rank; `peak` the most activations each holds, in the unit of the
    memory asked for. `timeline` holds each rank's work in the order of execution.
    """

    step_s: float
    busy_s: tuple[float, ...]
    peak: tuple[float, ...]
    timeline: tuple[tuple[Timed, ...], ...]

    @property
    def bubble_ratio(self) -> float:
        """Return the share of the step in which a rank waits, mean over ranks."""
        return 1.0 - sum(self.busy_s) / len(self.busy_s) / self.step_s


def predict(plan: Plan, table: WorkTable, memory: ActivationMemory | None = None) -> Prediction:
    """Return how a plan runs with asynchronous messages.

    Raises ConfigError for a plan that hangs.
    """
    run = _Run(plan, table)
    for action in order_of_completion(plan):
        run.carry_out(action)
    return Prediction(
        step_s=max(run.free_s),
        busy_s=tuple(run.busy_s),
        peak=peak_memory(plan, memory),
        timeline=tuple(tuple(row) for row in run.rows),
    )


class _Run:
    """Times of a plan's actions, carried out in an order that respects what each needs."""

    def __init__(self, plan: Plan, table: WorkTable) -> None:
        self._shape = plan.shape
        self._table = table
        self._explicit = plan.names_transfers
        self._repeated = {
            action[1:]
            for listed in plan.actions
            for action in listed
            if action.kind is ActionKind.RECOMPUTE
        }
        self._arrived_s: dict[Message, float] = {}
        self._link_free_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.free_s = [0.0] * plan.shape.num_ranks
        self.busy_s = [0.0] * plan.shape.num_ranks
        self.rows: list[list[Timed]] = [[] for _ in plan.actions]

    def carry_out(self, action: Action) -> None:
        """Advance the action's rank, and send what the action makes."""
        rank = self._shape.rank_of(action.stage)
        if action.kind in TRANSFERS:
            if action.kind in SENDS:
                self._send(message_of_transfer(action), rank, self.free_s[rank])
            return
        needed = message_needed(self._shape, action)
        begin_s = max(self.free_s[rank], self._arrived_s[needed] if needed else 0.0)
        apart = (action.stage, action.microbatch) in self._repeated
        duration_s = self._table.duration_s(action, recomputed_apart=apart)
        end_s = begin_s + duration_s
        self.free_s[rank] = end_s
        self.busy_s[rank] += duration_s
        self.rows[rank].append(Timed(action=action, begin_s=begin_s, end_s=end_s))
        made = message_made(self._shape, action)
        if made and (not self._explicit or self._shape.rank_of(made.stage) == rank):
            self._send(made, rank, end_s)

    def _send(self, message: Message, sender: int, at_s: float) -> None:
        receiver = self._shape.rank_of(message.stage)
        if receiver == sender:
            self._arrived_s[message] = at_s
            return
        begin_s = max(at_s, self._link_free_s[sender, receiver])
        end_s = begin_s + self._table.message_duration_s(message)
        self._link_free_s[sender, receiver] = end_s
        self._arrived_s[message] = end_s


def predict_megatron(shape: PipelineShape, table: WorkTable) -> Prediction:
    """Return how Megatron-Core's own schedule runs: 1F1B, or interleaved with several chunks.

    Raises ConfigError for counts that Megatron-Core refuses.
    """
    if shape.placement is not Placement.LOOP:
        raise ConfigError("Megatron-Core places stages in a loop, got a V")
    run = _Blocking(shape, table)
    run.finish()
    plan = Plan(
        name="megatron",
        shape=shape,
        actions=tuple(tuple(timed.action for timed in row) for row in run.rows),
    )
    return Prediction(
        step_s=max(run.now_s),
        busy_s=tuple(run.busy_s),
        peak=peak_memory(plan),
        timeline=tuple(tuple(row) for row in run.rows),
    )


class _Blocking:
    """Ranks that compute and exchange in turn; an exchange ends when all its messages have."""

    def __init__(self, shape: PipelineShape, table: WorkTable) -> None:
        self._shape = shape
        self._table = table
        self._steps = stage_steps(shape.num_ranks, shape.num_chunks, shape.num_microbatches)
        self._position = [0] * shape.num_ranks
        self._posted_s: dict[tuple[int, str, Message], float] = {}
        self.now_s = [0.0] * shape.num_ranks
        self.busy_s = [0.0] * shape.num_ranks
        self.rows: list[list[Timed]] = [[] for _ in self._steps]

    def finish(self) -> None:
        """Run all ranks to their ends, each as far as its partners allow."""
        left = set(range(self._shape.num_ranks))
        while left:
            moved = [rank for rank in sorted(left) if self._advance(rank)]
            if not moved:
                raise ConfigError("Megatron-Core's schedule hangs for these sizes")
            left = {r for r in left if self._position[r] < len(self._steps[r])}

    def _advance(self, rank: int) -> bool:
        """Carry out steps of a rank until it must wait; return whether there were any."""
        before = self._position[rank], len(self._posted_s)
        while self._position[rank] < len(self._steps[rank]):
            if not self._step(rank, self._steps[rank][self._position[rank]]):
                break
            self._position[rank] += 1
        return before != (self._position[rank], len(self._posted_s))

    def _step(self, rank: int, step: Step) -> bool:
        if isinstance(step, Pass):
            self._compute(rank, step)
            return True
        return self._exchange(rank, step)

    def _compute(self, rank: int, step: Pass) -> None:
        forward = step.phase == Phase.FORWARD
        kind = ActionKind.FORWARD if forward else ActionKind.BACKWARD
        action = Action(kind, self._shape.stage_of(rank, step.chunk), step.microbatch)
        duration_s = self._table.duration_s(action)
        begin_s = self.now_s[rank]
        self.now_s[rank] = begin_s + duration_s
        self.busy_s[rank] += duration_s
        self.rows[rank].append(Timed(action=action, begin_s=begin_s, end_s=self.now_s[rank]))

    def _exchange(self, rank: int, step: Exchange) -> bool:
        end_s = self.now_s[rank]
        complete = True
        for transfer in step.transfers:
            message = self._message(rank, transfer)
            own_s = self._posted_s.setdefault((rank, transfer.op, message), self.now_s[rank])
            other_op = "recv" if transfer.op == "send" else "send"
            other_s = self._posted_s.get((transfer.peer_stage, other_op, message))
            if other_s is None:
                complete = False
            else:
                end_s = max(end_s, max(own_s, other_s) + self._table.message_duration_s(message))
        if complete:
            self.now_s[rank] = end_s
        return complete

    def _message(self, rank: int, transfer: Transfer) -> Message:
        stage = self._shape.stage_of(rank, transfer.chunk)
        forward = transfer.direction == Phase.FORWARD
        if transfer.op == "send":
            stage += 1 if forward else -1
        kind = ActionKind.FORWARD if forward else ActionKind.BACKWARD
        return Message(kind, stage, transfer.microbatch)
