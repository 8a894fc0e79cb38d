"""Messages between pipeline stages: one span a message, the same times for those of one exchange.

A message and its counterpart carry the same running number: it counts the messages of an iteration
by (sender, receiver, direction). A received tensor is told its microbatch and chunk when the
schedule uses it; both are the receiver's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from megascan.instrument.collectives import PendingWork
from megascan.instrument.groups import Groups
from megascan.instrument.operations import argument_reader
from megascan.instrument.place import Call, Function, around
from megascan.instrument.position import Position
from megascan.schema import Kind
from megascan.tracer import Arguments, AsyncWork, Mark, RecordingTracer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Message:
    """One tensor of an exchange; `handle` is its key among the handles of an overlapped one."""

    name: str
    handle: str
    peer: int
    tensor: torch.Tensor

    @property
    def operation(self) -> str:
        return self.name.partition("_")[0]

    @property
    def direction(self) -> str:
        return self.name.partition("_")[2]


class PointToPoint:
    """Wraps `P2PCommunicator._communicate`, which all exchanges of the schedules go through."""

    def __init__(self, tracer: RecordingTracer, position: Position, groups: Groups) -> None:
        self._tracer = tracer
        self._position = position
        self._groups = groups

    def communicate(self, original: Function) -> Function:
        """Spans send_forward, recv_forward, send_backward, recv_backward."""
        previous_of = argument_reader(original, "tensor_send_prev")
        next_of = argument_reader(original, "tensor_send_next")
        tracer = self._tracer

        def enter(call: Call) -> bool:
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            communicator, begin = call.positional[0], call.memory
            received = cast("tuple[object, object, object]", result)
            sent = (previous_of(call), next_of(call))
            messages = list(_messages(communicator, sent, received))
            handles = received[2]
            if isinstance(handles, dict) and handles:
                self._follow(messages, communicator, begin, handles)
            elif messages and not handles:
                self._record(messages, communicator, begin)
            return result

        return around(tracer, original, enter, leave)

    def _record(self, messages: list[_Message], communicator: object, begin: Mark) -> None:
        end = self._tracer.mark()
        for message in messages:
            arguments = self._describe(message, communicator)
            self._tracer.add(Kind.P2P, message.name, begin, end, arguments)

    def _follow(
        self,
        messages: list[_Message],
        communicator: object,
        begin: Mark,
        handles: dict[str, AsyncWork],
    ) -> None:
        """Record an overlapped exchange: each message until its own work is done."""
        for message in messages:
            work = handles.get(message.handle)
            if work is None:
                continue
            arguments = self._describe(message, communicator)
            span, watched = self._tracer.add_pending(
                work,
                Kind.P2P,
                message.name,
                begin,
                arguments=arguments,
                lane=message.name,
                backend=self._groups.backend(str(arguments["group"])),
            )
            handles[message.handle] = PendingWork(work, self._tracer, span, watched, message.tensor)

    def _describe(self, message: _Message, communicator: object) -> Arguments:
        arguments: Arguments = {
            "op": message.operation,
            "direction": message.direction,
            "peer": message.peer,
            "group": self._groups.name(communicator.pp_group),  # type: ignore[attr-defined]
            "sequence": self._position.number(f"peer {message.peer}", message.name),
            "size_bytes": message.tensor.nbytes,
        }
        self._place(message, arguments)
        return arguments

    def _place(self, message: _Message, arguments: Arguments) -> None:
        """Microbatch and chunk: of a sent tensor known, of a received one learned later."""
        identity = id(message.tensor)
        if message.operation == "recv":
            self._position.received[identity] = arguments
            return
        made = (
            self._position.outputs if message.direction == "forward" else self._position.gradients
        )
        slot = made.get(identity)
        if slot is not None:
            arguments["microbatch"], arguments["chunk"] = slot


def _messages(
    communicator: object,
    sent: tuple[object, object],
    received: tuple[object, object, object],
) -> Iterator[_Message]:
    previous = communicator.prev_rank  # type: ignore[attr-defined]
    following = communicator.next_rank  # type: ignore[attr-defined]
    candidates = (
        ("send_backward", "send_prev", previous, sent[0]),
        ("recv_forward", "recv_prev", previous, received[0]),
        ("send_forward", "send_next", following, sent[1]),
        ("recv_backward", "recv_next", following, received[1]),
    )
    for name, handle, peer, tensor in candidates:
        if tensor is not None:
            yield _Message(name, handle, peer, cast("torch.Tensor", tensor))
