"""A plan on paper: whether it can be carried out, in what order, and how long it takes.

`check` refuses with one sentence a plan that would compute the wrong thing or hang. Another order
of accumulation is allowed: `numerics_note` says what a plan gives up by it.

`predict` gives every action's begin and end from the costs of work and messages. A rank carries out
its list in order. An action begins when the action before it on its rank has ended and what it
needs has come. Messages travel while ranks work, on each ordered pair of ranks one after the other.
So the step is a longest path, and one pass over the actions finds it:

    P=2, F and B 1 s each, messages 0:       0    1    2    3    4
                                   rank 0    F0   F1   .    B0 . B1
                                   rank 1    .    F0   B0   F1  B1

`predict_megatron` predicts Megatron-Core's own execution instead: after each pass a rank exchanges
with its neighbours and waits until both sides are there, which is slower where work is uneven.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megascan.errors import ConfigError
from megascan.schema import Phase
from megascan.simulate.stage_order import Exchange, Pass, Step, Transfer, stage_steps
from training.pipeline.costs import ActivationMemory, WorkTable, peak_memory
from training.pipeline.plan import (
    GIVES_INPUT_GRADIENT,
    RECEIVES,
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

_ROUNDING = 1e-9


def check(
    plan: Plan, *, memory: ActivationMemory | None = None, memory_limit: float | None = None
) -> None:
    """Refuse a plan that cannot be carried out, or not within `memory_limit` (unit of `memory`).

    Raises ConfigError.
    """
    _check_ranks(plan)
    _check_complete(plan)
    if plan.names_transfers:
        _check_transfers(plan)
    order_of_completion(plan)
    if memory_limit is not None:
        check_memory(plan, memory, memory_limit)


def check_memory(plan: Plan, memory: ActivationMemory | None, memory_limit: float) -> None:
    """Raise ConfigError for a plan whose peak on some rank is above a limit."""
    peaks = peak_memory(plan, memory)
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    if peaks[worst] > memory_limit * (1 + _ROUNDING):
        raise ConfigError(
            f"plan {plan.name}: rank {worst} holds activations of {peaks[worst]:.4g} at most, the "
            f"limit is {memory_limit:.4g}; raise the limit or take a plan with fewer microbatches "
            "in flight"
        )


def order_of_completion(plan: Plan) -> list[Action]:
    """Return all actions in an order in which they can be carried out, one after another.

    Raises ConfigError where ranks wait for each other; it names each rank's next action and what
    this action waits for.
    """
    heads = [0] * plan.shape.num_ranks
    done: set[Action] = set()
    order: list[Action] = []
    needs = _Needs(plan)
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    ready = list(range(plan.shape.num_ranks))
    while ready:
        rank = ready.pop()
        while heads[rank] < len(plan.actions[rank]):
            action = plan.actions[rank][heads[rank]]
            missing = needs.first_missing(action, done)
            if missing is not None:
                waiting[missing].append(rank)
                break
            done.add(action)
            order.append(action)
            heads[rank] += 1
            ready += waiting.pop(action, ())
    if len(order) < sum(map(len, plan.actions)):
        raise ConfigError(f"plan {plan.name} hangs: {_stuck(plan, heads, needs, done)}")
    return order


def numerics_note(plan: Plan) -> str | None:
    """Return what a plan does to the order of sums; None where results are identical bit by bit.

    They are where each stage takes microbatches in order, forward and backward.
    """
    for rank in range(plan.shape.num_ranks):
        last: dict[tuple[str, int], Action] = {}
        for action in plan.work_of(rank):
            kind = _accumulates_as(action.kind)
            before = last.get((kind, action.stage))
            if before is not None and before.microbatch > action.microbatch:
                return (
                    f"plan {plan.name}: rank {rank} runs {before} before {action}, so sums are "
                    "formed in another order than Megatron-Core's and differ within rounding"
                )
            last[kind, action.stage] = action
    return None


def forward_order(plan: Plan, rank: int) -> tuple[Action, ...]:
    """Return a rank's forwards: the order in which its random numbers are drawn.

    Two plans with the same order draw the same dropout masks; with one chunk all plans that take
    microbatches in order do.
    """
    return tuple(a for a in plan.actions[rank] if a.kind is ActionKind.FORWARD)


def _accumulates_as(kind: ActionKind) -> str:
    """Return the kind of work with which an action shares an order of sums.

    A whole backward counts as W, because it sums weight gradients too.
    """
    return "W" if kind is ActionKind.BACKWARD else kind.value


def _check_ranks(plan: Plan) -> None:
    shape = plan.shape
    if len(plan.actions) != shape.num_ranks:
        raise ConfigError(
            f"plan {plan.name} has lists for {len(plan.actions)} pipeline ranks, "
            f"expected {shape.num_ranks}"
        )
    for rank, listed in enumerate(plan.actions):
        for action in listed:
            if not 0 <= action.stage < shape.num_stages:
                raise ConfigError(
                    f"plan {plan.name}: {action} on rank {rank} names stage {action.stage} of a "
                    f"pipeline of {shape.num_stages}"
                )
            if not 0 <= action.microbatch < shape.num_microbatches:
                raise ConfigError(
                    f"plan {plan.name}: {action} on rank {rank} names microbatch "
                    f"{action.microbatch} of {shape.num_microbatches}"
                )
            if shape.rank_of(action.stage) != rank:
                raise ConfigError(
                    f"plan {plan.name}: {action} stands on rank {rank}, but stage {action.stage} "
                    f"lies on rank {shape.rank_of(action.stage)}"
                )


def _check_complete(plan: Plan) -> None:
    """Check that each stage runs each microbatch once forward and once backward, B or I and W."""
    counts = Counter(action for listed in plan.actions for action in listed)
    twice = next((action for action, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"plan {plan.name} has {twice} {counts[twice]} times, expected once")
    for stage in range(plan.shape.num_stages):
        for microbatch in range(plan.shape.num_microbatches):
            kinds = {kind for kind in ActionKind if Action(kind, stage, microbatch) in counts}
            problem = _incomplete(kinds - TRANSFERS - {ActionKind.RECOMPUTE})
            if problem:
                raise ConfigError(
                    f"plan {plan.name}: microbatch {microbatch} on stage {stage} {problem}"
                )


def _incomplete(kinds: set[ActionKind]) -> str:
    """Return what is wrong with the work of one microbatch on one stage; empty when nothing is."""
    if ActionKind.FORWARD not in kinds:
        return "has no forward F"
    backward = kinds - {ActionKind.FORWARD}
    split = {ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT}
    if backward in ({ActionKind.BACKWARD}, split):
        return ""
    named = " and ".join(sorted(kind.value for kind in backward)) or "nothing"
    return f"has {named} for its backward, expected B, or I and W"


def _check_transfers(plan: Plan) -> None:
    """Check that every message between ranks is sent and received, in the same order on both
    ends.
    """
    for rank, listed in enumerate(plan.actions):
        for action in listed:
            if action.kind in TRANSFERS:
                _check_transfer(plan, rank, action)
    for sender in range(plan.shape.num_ranks):
        for receiver in range(plan.shape.num_ranks):
            for forward in (True, False):
                _check_channel(plan, sender, receiver, forward=forward)


def _check_transfer(plan: Plan, rank: int, action: Action) -> None:
    message = message_of_transfer(action)
    shape = plan.shape
    source = message.stage - 1 if message.kind is ActionKind.FORWARD else message.stage + 1
    if not (0 <= source < shape.num_stages and 0 <= message.stage < shape.num_stages):
        raise ConfigError(f"plan {plan.name}: {action} on rank {rank} has no stage to talk to")
    if shape.rank_of(source) == shape.rank_of(message.stage):
        raise ConfigError(
            f"plan {plan.name}: {action} on rank {rank} goes to the same rank; leave it out"
        )


def _check_channel(plan: Plan, sender: int, receiver: int, *, forward: bool) -> None:
    expected = set(plan.messages(sender, receiver, forward=forward))
    sent = list(_carried(plan, sender, SENDS, expected))
    received = list(_carried(plan, receiver, RECEIVES, expected))
    for words, listed, rank in (("sent", sent, sender), ("received", received, receiver)):
        missing = min(expected - set(listed), default=None)
        if missing is not None:
            raise ConfigError(
                f"plan {plan.name}: what {missing.stage}{missing.kind.value}{missing.microbatch} "
                f"needs is never {words} on rank {rank}; name all sends and receives or none"
            )
    for position, (one, other) in enumerate(zip(sent, received, strict=True), 1):
        if one != other:
            raise ConfigError(
                f"plan {plan.name}: message {position} from rank {sender} to rank {receiver} is "
                f"sent for {Action(*one)} and received for {Action(*other)}; "
                "receive in the order of sends"
            )


def _carried(
    plan: Plan, rank: int, kinds: frozenset[ActionKind], expected: set[Message]
) -> Iterator[Message]:
    for action in plan.actions[rank]:
        if action.kind in kinds and (message := message_of_transfer(action)) in expected:
            yield message


class _Needs:
    """What must be done before an action, on any rank."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        actions = [action for listed in plan.actions for action in listed]
        self._makers = {
            message: action for action in actions if (message := message_made(plan.shape, action))
        }
        self._senders = {message_of_transfer(a): a for a in actions if a.kind in SENDS}
        self._receivers = {message_of_transfer(a): a for a in actions if a.kind in RECEIVES}

    def first_missing(self, action: Action, done: set[Action]) -> Action | None:
        """Return an action that must come before `action` and is not in `done`; None: all are."""
        return next((need for need in self._of(action) if need not in done), None)

    def _of(self, action: Action) -> Iterator[Action]:
        kind, stage, microbatch = action
        if kind in SENDS:
            yield self._makers[message_of_transfer(action)]
            return
        if kind is ActionKind.RECOMPUTE:
            yield Action(ActionKind.FORWARD, stage, microbatch)
        elif kind is ActionKind.WEIGHT_GRADIENT:
            yield Action(ActionKind.INPUT_GRADIENT, stage, microbatch)
        elif kind in GIVES_INPUT_GRADIENT:
            is_repeated = self._plan.repeats(action)
            before = ActionKind.RECOMPUTE if is_repeated else ActionKind.FORWARD
            yield Action(before, stage, microbatch)
        message = message_needed(self._plan.shape, action)
        if message is not None:
            yield self._makers[message]
            if self._plan.names_transfers and message in self._receivers:
                yield self._receivers[message]
                yield self._senders[message]


def _stuck(plan: Plan, heads: list[int], needs: _Needs, done: set[Action]) -> str:
    """Return each rank's next action and what it waits for."""
    parts = []
    for rank, listed in enumerate(plan.actions):
        if heads[rank] < len(listed):
            action = listed[heads[rank]]
            parts.append(f"rank {rank} at {action} waits for {needs.first_missing(action, done)}")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One action with its begin and end in seconds from the begin of the step."""

    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step.

    `busy_s` is the work of each pipeline rank; `peak` is the most activations each rank holds, in
    the unit of the memory given to `predict`. `timeline` holds each rank's work in the order of
    execution.
    """

    step_s: float
    busy_s: tuple[float, ...]
    peak: tuple[float, ...]
    timeline: tuple[tuple[Timed, ...], ...]

    @property
    def bubble_ratio(self) -> float:
        """Return the share of the step that ranks wait, as the mean over ranks."""
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
    """Times of a plan's actions, carried out in an order in which each finds what it needs."""

    def __init__(self, plan: Plan, table: WorkTable) -> None:
        self._plan = plan
        self._shape = plan.shape
        self._table = table
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
        duration_s = self._table.duration_s(action, recomputed_apart=self._plan.repeats(action))
        end_s = begin_s + duration_s
        self.free_s[rank] = end_s
        self.busy_s[rank] += duration_s
        self.rows[rank].append(Timed(action=action, begin_s=begin_s, end_s=end_s))
        made = message_made(self._shape, action)
        if made and (not self._plan.names_transfers or self._shape.rank_of(made.stage) == rank):
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
        """Run all ranks to the end, each in turn as far as its neighbours allow."""
        left = set(range(self._shape.num_ranks))
        while left:
            moved = [rank for rank in sorted(left) if self._advance(rank)]
            if not moved:
                raise ConfigError("Megatron-Core's schedule hangs for these sizes")
            left = {r for r in left if self._position[r] < len(self._steps[r])}

    def _advance(self, rank: int) -> bool:
        """Carry out steps of a rank until it must wait; return whether anything was done."""
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
