"""Run the actions of all stages of a pipeline, each as soon as what it waits for is known.

Both ends of a message have to come before it travels (NCCL's sends and receives meet). Exchanges
between stages end for a rank when all of its messages are through; then, as Megatron-Core does, the
host waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.rack.engine import LAUNCHES_A_COLLECTIVE, Arguments, Lane, Mark, Row
from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.network import Network
from benchmarks.grounds.rack.passes import Pass, Stage
from benchmarks.grounds.rack.places import Map
from benchmarks.grounds.rack.schedule import Action, Arrives, End, Exchange, Message, Order, Post
from megascan.schema import Kind, Track


@dataclass(eq=False)
class _Under:
    """A message under way: when its ends were there, and when it is through."""

    ready: dict[str, Floats] = field(default_factory=dict)  # by "send" and "recv"
    done: Floats | None = None


@dataclass(eq=False)
class Pipeline:
    """The stages of a job, and the messages between them."""

    stages: list[Stage]
    network: Network
    where: Map
    message_bytes: int
    _messages: dict[Message, _Under] = field(default_factory=dict)
    _posted: list[tuple[Row, str, int, _Under]] = field(default_factory=list)
    _begun: dict[int, Mark] = field(default_factory=dict)

    def run(self) -> None:
        """Run one iteration's passes."""
        self._messages.clear()
        self._posted.clear()
        self._begun.clear()
        job = self.stages[0].job
        left = {stage.number: Order(job, stage.number).actions()[::-1] for stage in self.stages}
        while any(left.values()):
            moved = False
            for stage in self.stages:
                actions = left[stage.number]
                while actions and self._does(stage, actions[-1]):
                    actions.pop()
                    moved = True
            if not moved:
                raise RuntimeError("the schedule does not go on: stages wait for each other")
        self._note_posted()

    def _does(self, stage: Stage, action: Action) -> bool:
        """Run an action; tell whether it could be run."""
        if isinstance(action, Pass):
            stage.run(action)
            return True
        if isinstance(action, Exchange):
            return self._exchange(stage, action)
        if isinstance(action, Post):
            self._post(stage, action.end)
            return True
        return self._arrives(stage, action)

    def _under(self, message: Message) -> _Under:
        return self._messages.setdefault(message, _Under())

    def _other(self, stage: Stage, end: End) -> int:
        """Return the stage at the other end."""
        step = 1 if (end.op == "send") == (end.message.direction == "forward") else -1
        return (stage.number + step) % len(self.stages)

    def _come(self, stage: Stage, end: End, ready: Floats) -> _Under:
        """Let one end of a message be there; when both are, say when it is through."""
        under = self._under(end.message)
        under.ready[end.op] = ready
        if len(under.ready) == 2:
            other = self._other(stage, end)
            sender, receiver = (stage.number, other) if end.op == "send" else (other, stage.number)
            moment = min(stage.moment, stage.job.num_slices - 1)
            size = self.message_bytes * self._tokens(stage, end)
            seconds = self.network.message(sender, receiver, size, moment)
            under.done = np.maximum(under.ready["send"], under.ready["recv"]) + seconds
        return under

    def _tokens(self, stage: Stage, end: End) -> Floats:
        """Return the tokens of a message, times the nominal ones, (variant, place)."""
        tokens = stage.conditions.tokens
        return np.asarray(
            tokens[:, stage.places, stage.iteration, end.message.microbatch], dtype=np.float64
        )

    def _launch(self, lane: Lane, stage: Stage) -> Floats:
        """Launch a message; return when the device comes to it."""
        moment = min(stage.moment, stage.job.num_slices - 1)
        launch_s = stage.conditions.launch_s[:, stage.places, stage.iteration, moment]
        lane.host = lane.host + LAUNCHES_A_COLLECTIVE * launch_s
        return np.maximum(lane.dev, lane.host)

    def _exchange(self, stage: Stage, exchange: Exchange) -> bool:
        lane = stage.lane
        if stage.number not in self._begun:
            self._begun[stage.number] = lane.mark()
            ready = self._launch(lane, stage)
            for end in exchange.ends:
                self._come(stage, end, ready)
        through = [self._under(end.message).done for end in exchange.ends]
        known = [done for done in through if done is not None]
        if len(known) < len(through):
            return False
        lane.dev = np.maximum(lane.dev, np.maximum.reduce(known))
        begin = self._begun.pop(stage.number)
        marks = (begin, lane.mark())
        lane.sync()
        for end in sorted(exchange.ends, key=lambda end: _RECORDED.index(end.name)):
            row = lane.row(Kind.P2P, end.name, Track.COMMUNICATION, marks, {})
            self._describe(stage, end, row)
            lane.rows.append(row)
        return True

    def _describe(self, stage: Stage, end: End, row: Row) -> None:
        """Set what the span of a message carries."""
        other = self._other(stage, end)
        part = self.where.of_stage(other)
        arguments: Arguments = {
            "op": end.op,
            "direction": end.message.direction,
            "sequence": stage.lane.number(f"peer {other}", end.name),
            "size_bytes": self.message_bytes,
            "microbatch": end.message.microbatch,
            "chunk": end.chunk,
        }
        row.arguments = arguments
        if stage.varies:
            row.sizes = self._tokens(stage, end)[0]
        row.peers = np.array(self.where.ranks[part], dtype=np.int64)
        ids = self.where.across["pp"].ids
        row.groups = ids[self.where.of_stage(stage.number)]

    def _post(self, stage: Stage, end: End) -> None:
        begin = stage.lane.mark()
        under = self._come(stage, end, self._launch(stage.lane, stage))
        row = stage.lane.row(Kind.P2P, end.name, Track.OVERLAPPED, (begin, begin), {})
        self._describe(stage, end, row)
        stage.lane.rows.append(row)
        self._posted.append((row, end.name, stage.number, under))

    def _arrives(self, stage: Stage, action: Arrives) -> bool:
        done = self._under(action.end.message).done
        if done is None:
            return False
        stage.lane.dev = np.maximum(stage.lane.dev, done)
        return True

    def _note_posted(self) -> None:
        """Say when the spans of messages end that travelled beside the passes.

        Those of one name on one rank begin when the one before has ended, as the tracer cuts them.
        """
        before: dict[tuple[int, str], Floats] = {}
        posted = sorted(self._posted, key=lambda each: float(each[0].begin.min()))
        for row, name, stage, under in posted:
            assert under.done is not None
            row.end = np.maximum(under.done[0], row.begin)
            earlier = before.get((stage, name))
            if earlier is not None:
                cut = np.maximum(row.begin, earlier)
                row.begin = np.where(cut <= row.end, cut, row.begin)
            before[stage, name] = row.end if earlier is None else np.maximum(earlier, row.end)


_RECORDED = ("send_backward", "recv_forward", "send_forward", "recv_backward")
"""The order in which the ends of an exchange are noted."""
