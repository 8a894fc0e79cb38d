"""Hold what every rank does in an iteration, as one list of operations, and the order to time it.

An operation belongs to a rank and is issued by its host thread. A kernel runs on the rank's compute
stream; a join takes part in a communication on a stream of its own; a wait makes the compute stream
wait for a communication; a sync makes the host wait for the compute stream; a mark takes the time
of the compute stream. A communication is done when all have joined and its data is through.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import IntEnum


class Code(IntEnum):
    """What kind of operation it is."""

    KERNEL = 0
    HOST = 1
    MARK = 2
    SYNC = 3
    JOIN = 4
    WAIT = 5
    DONE = 6  # in the order only: all have joined a communication


class Bound(IntEnum):
    """What a kernel's duration depends on."""

    PRODUCT = 0  # the clock
    ATTENTION = 1  # the clock; grows with the square of a sequence
    MEMORY = 2
    STATE = 3  # memory, but no tokens: the optimizer's
    NONE = 4


@dataclass(slots=True)
class Operation:
    """One operation of one rank; `microbatch`, `chunk` and `layer` are -1 where they say nothing.

    `cost_ns` is the device's time of a kernel, `host_ns` what issuing it takes the host thread.
    """

    code: Code
    rank: int
    name: str
    host_ns: float = 0.0
    cost_ns: float = 0.0
    bound: Bound = Bound.NONE
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1
    phase: str = ""
    communication: int = -1  # of a join, or of the communication that is waited for
    stream: str = ""
    synchronous: bool = False
    expert: bool = False


@dataclass(slots=True)
class Communication:
    """One transfer among the members of a group, or one batch of messages between two ranks."""

    group: str
    op: str
    size_bytes: int
    members: tuple[int, ...]
    sequence: int = 0
    root: int = -1
    joins: dict[int, int] = field(default_factory=dict)  # rank: operation


@dataclass(slots=True)
class Message:
    """What a rank sends or receives in a batch."""

    operation: int
    op: str
    direction: str
    peer: int
    size_bytes: int
    microbatch: int
    chunk: int


@dataclass(slots=True)
class SpanPlan:
    """A span between two marks, or the duration of one host operation (`begin` == `end`)."""

    rank: int
    name: str
    kind: str
    begin: int
    end: int
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1
    phase: str = ""
    full_only: bool = False


@dataclass
class Program:
    """Collect the operations of all ranks in one iteration."""

    operations: list[Operation] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    spans: list[SpanPlan] = field(default_factory=list)
    _by_key: dict[object, int] = field(default_factory=dict)

    def add(self, operation: Operation) -> int:
        """Append an operation and return its number."""
        self.operations.append(operation)
        return len(self.operations) - 1

    def communication(self, key: object, made: Communication) -> int:
        """Return the number of a communication that several ranks know by the same key."""
        number = self._by_key.setdefault(key, len(self.communications))
        if number == len(self.communications):
            self.communications.append(made)
        return number

    def ordered(self) -> list[tuple[int, int, int, int]]:
        """Return (code, operation, rank, other) in an order in which all can be timed.

        `other` is the communication of DONE, and of a wait the join of its own rank. Raises
        RuntimeError when the ranks wait for each other in a circle.
        """
        return _Order(self).run()


class _Order:
    """Runs all ranks against each other, each as far as it can get."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._queues: dict[int, deque[int]] = defaultdict(deque)
        for number, operation in enumerate(program.operations):
            self._queues[operation.rank].append(number)
        self._done = [False] * len(program.communications)
        self._before: dict[int, int] = {}  # join: the join before it on its stream
        self._last: dict[tuple[int, str], int] = {}
        self._joined: dict[int, list[int]] = defaultdict(list)
        self._waiting: dict[int, list[int]] = defaultdict(list)  # communication: blocked ranks
        self._behind: dict[int, list[int]] = defaultdict(list)
        self.order: list[tuple[int, int, int, int]] = []

    def run(self) -> list[tuple[int, int, int, int]]:
        ready = deque(self._queues)
        while ready:
            rank = ready.popleft()
            ready.extend(self._advance(rank))
        left = {rank: queue for rank, queue in self._queues.items() if queue}
        if left or not all(self._done):
            raise RuntimeError(f"ranks wait for each other: {sorted(left)}")
        return self.order

    def before(self, join: int) -> int:
        return self._before.get(join, -1)

    def _advance(self, rank: int) -> list[int]:
        queue, woken = self._queues[rank], list[int]()
        while queue:
            number = queue[0]
            one = self._program.operations[number]
            if one.code is Code.WAIT and not self._done[one.communication]:
                self._waiting[one.communication].append(rank)
                return woken
            queue.popleft()
            other = one.communication
            if one.code is Code.WAIT:
                other = self._program.communications[one.communication].joins[rank]
            self.order.append((int(one.code), number, rank, other))
            if one.code is Code.JOIN:
                self._join(number, one)
                woken += self._finish(one.communication)
                if one.synchronous and not self._done[one.communication]:
                    self._waiting[one.communication].append(rank)
                    return woken
        return woken

    def _join(self, number: int, one: Operation) -> None:
        key = one.rank, one.stream
        if key in self._last:
            self._before[number] = self._last[key]
        self._last[key] = number
        self._program.communications[one.communication].joins[one.rank] = number
        self._joined[one.communication].append(number)

    def _finish(self, communication: int) -> list[int]:
        """Mark a communication done if it is, and those that stood behind it; return the woken."""
        plan, woken, left = self._program, list[int](), [communication]
        while left:
            number = left.pop()
            joins = self._joined[number]
            if self._done[number] or len(joins) < len(plan.communications[number].members):
                continue
            blocking = [
                plan.operations[self._before[join]].communication
                for join in joins
                if join in self._before
                and not self._done[plan.operations[self._before[join]].communication]
            ]
            if blocking:
                self._behind[blocking[0]].append(number)
                continue
            self._done[number] = True
            self.order.append((int(Code.DONE), -1, -1, number))
            woken += self._waiting.pop(number, [])
            left += self._behind.pop(number, [])
        return woken


def joins_before(program: Program) -> dict[int, int]:
    """Return, for each join, the join before it on the same stream of its rank."""
    last: dict[tuple[int, str], int] = {}
    before: dict[int, int] = {}
    for number, one in enumerate(program.operations):
        if one.code is Code.JOIN:
            key = one.rank, one.stream
            if key in last:
                before[number] = last[key]
            last[key] = number
    return before
