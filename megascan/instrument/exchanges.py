"""Messages of torch's own pipelines: batches of sends and receives.

`torch.distributed.pipelining` says nothing of stages, only of ranks: a message to a later rank is
called forward, one to an earlier rank backward. Both ends of a message name it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from megascan.instrument.collectives import PendingWork
from megascan.instrument.groups import Groups
from megascan.instrument.place import Call, Function, around
from megascan.instrument.position import Position
from megascan.schema import Kind
from megascan.tracer import Arguments, AsyncWork, Mark, RecordingTracer

if TYPE_CHECKING:
    from torch.distributed import P2POp


class Exchanges:
    """Wraps functions that take a list of `P2POp` and return their works."""

    def __init__(self, tracer: RecordingTracer, position: Position, groups: Groups) -> None:
        self._tracer = tracer
        self._position = position
        self._groups = groups
        self._depth = 0

    def batch(self, original: Function) -> Function:
        """Spans of all messages of a batch; a batch that another one calls is the same batch."""
        tracer = self._tracer

        def enter(call: Call) -> bool:
            self._depth += 1
            call.memory = tracer.mark()
            return True

        def leave(call: Call, result: object) -> object:
            self._depth -= 1
            if self._depth or not isinstance(result, list) or not result:
                return result
            batch = cast("Sequence[P2POp]", next(iter((*call.positional, *call.named.values()))))
            return self._follow(batch, result, call.memory)

        return around(tracer, original, enter, leave)

    def _follow(
        self, batch: Sequence[P2POp], works: list[AsyncWork], begin: Mark
    ) -> list[PendingWork]:
        """Each message until its work is done; a coalesced batch has one work for all."""
        followed = list[PendingWork]()
        for number, message in enumerate(batch):
            work = works[min(number, len(works) - 1)]
            arguments = self._describe(message)
            name = f"{arguments['op']}_{arguments['direction']}"
            span, watched = self._tracer.add_pending(
                work,
                Kind.P2P,
                name,
                begin,
                arguments=arguments,
                lane=name,
                backend=self._groups.backend(str(arguments["group"])),
            )
            followed.append(PendingWork(work, self._tracer, span, watched, message.tensor))
        return followed[-len(works) :]

    def _describe(self, message: P2POp) -> Arguments:
        import torch.distributed as dist

        operation = "send" if message.op is dist.isend else "recv"
        is_later = message.peer > dist.get_rank()
        direction = "forward" if is_later == (operation == "send") else "backward"
        arguments: Arguments = {
            "op": operation,
            "direction": direction,
            "peer": message.peer,
            "group": self._groups.name(message.group),
            "sequence": self._position.number(f"peer {message.peer}", f"{operation}_{direction}"),
            "size_bytes": message.tensor.nbytes,
        }
        slot = self._position.outputs.get(id(message.tensor))
        if operation == "send" and slot is not None:
            arguments["microbatch"], arguments["chunk"] = slot
        return arguments
