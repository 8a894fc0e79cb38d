"""Say in which order a stage runs its passes and sends its messages.

One chunk a stage: 1F1B of PipeDream-flush as Megatron-Core runs it, whose exchanges block. Several
chunks: the interleaved schedule (arXiv 2104.04473) with messages beside the passes. A message is
named by its direction, the virtual stage that sends it and its microbatch.

    stage 0 of 2, 3 microbatches    F0 >f0  F1 >f1<b0  B0  F2 >f2<b1  B1  <b2 B2
    stage 1                     <f0 F0 B0 >b0<f1  F1 B1  >b1<f2  F2 B2 >b2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.passes import Pass


@dataclass(frozen=True)
class Message:
    """Activations or gradients from one virtual stage to the next."""

    direction: str  # "forward", "backward"
    sender: int  # virtual stage: chunk * stages + stage
    microbatch: int


@dataclass(frozen=True)
class End:
    """One end of a message on a stage; the chunk is that stage's own."""

    op: str  # "send", "recv"
    message: Message
    chunk: int

    @property
    def name(self) -> str:
        """Return the name of its span."""
        return f"{self.op}_{self.message.direction}"


@dataclass(frozen=True)
class Exchange:
    """Messages that the stage hands over together, and waits for."""

    ends: tuple[End, ...]


@dataclass(frozen=True)
class Post:
    """An end of a message that travels beside the passes."""

    end: End


@dataclass(frozen=True)
class Arrives:
    """The stream waits for a message that was posted."""

    end: End


Action: TypeAlias = Pass | Exchange | Post | Arrives


class Order:
    """Makes the actions of a stage."""

    def __init__(self, job: Job, stage: int) -> None:
        self.stages, self.stage, self.chunks = job.num_stages, stage, job.num_chunks
        self.batches = job.habits.num_microbatches
        self.num_virtual = self.stages * self.chunks

    def actions(self) -> list[Action]:
        """Return all actions of an iteration."""
        if self.stages == 1:
            return self._alone()
        return self._blocking() if self.chunks == 1 else self._interleaved()

    def _alone(self) -> list[Action]:
        return [
            self._pass(number, 0, is_forward)
            for number in range(self.batches)
            for is_forward in (True, False)
        ]

    def _pass(self, microbatch: int, chunk: int, is_forward: bool) -> Pass:
        return Pass(
            microbatch=microbatch,
            chunk=chunk,
            is_forward=is_forward,
            is_first=microbatch == 0,
            is_last=microbatch == self.batches - 1,
        )

    def _virtual(self, chunk: int) -> int:
        return chunk * self.stages + self.stage

    def _receives(self, chunk: int, microbatch: int, *, is_forward: bool) -> End | None:
        """Return where a pass' input comes from; None at the model's ends."""
        sender = self._virtual(chunk) + (-1 if is_forward else 1)
        if not 0 <= sender < self.num_virtual:
            return None
        direction = "forward" if is_forward else "backward"
        return End("recv", Message(direction, sender, microbatch), chunk)

    def _sends(self, chunk: int, microbatch: int, *, is_forward: bool) -> End | None:
        virtual = self._virtual(chunk)
        if virtual == (self.num_virtual - 1 if is_forward else 0):
            return None
        direction = "forward" if is_forward else "backward"
        return End("send", Message(direction, virtual, microbatch), chunk)

    def _blocking(self) -> list[Action]:
        """Return 1F1B: exchanges between the passes, both directions at once where both are due."""
        total, found = self.batches, list[Action]()
        warm = min(self.stages - self.stage - 1, total)

        def exchange(*ends: End | None) -> None:
            present = tuple(end for end in ends if end is not None)
            if present:
                found.append(Exchange(present))

        def forward(number: int) -> None:
            found.append(self._pass(number, 0, True))

        for number in range(warm):
            exchange(self._receives(0, number, is_forward=True))
            forward(number)
            exchange(self._sends(0, number, is_forward=True))
        if warm < total:
            exchange(self._receives(0, warm, is_forward=True))
        for number in range(total - warm):
            forward(number + warm)
            exchange(
                self._sends(0, number + warm, is_forward=True),
                self._receives(0, number, is_forward=False),
            )
            found.append(self._pass(number, 0, False))
            sent = self._sends(0, number, is_forward=False)
            is_last = number + warm + 1 == total
            received = None if is_last else self._receives(0, number + warm + 1, is_forward=True)
            exchange(sent, received)
        for number in range(total - warm, total):
            exchange(self._receives(0, number, is_forward=False))
            found.append(self._pass(number, 0, False))
            exchange(self._sends(0, number, is_forward=False))
        return found

    def _slot(self, place: int, is_forward: bool) -> tuple[int, int]:
        """Return microbatch and chunk of the pass at a place of the interleaved order."""
        turn, within = divmod(place, self.stages * self.chunks)
        chunk, number = divmod(within, self.stages)
        return turn * self.stages + number, chunk if is_forward else self.chunks - 1 - chunk

    def _interleaved(self) -> list[Action]:
        total, found = self.batches * self.chunks, list[Action]()
        warm = min((self.stages - self.stage - 1) * 2 + (self.chunks - 1) * self.stages, total)

        def posts(place: int, is_forward: bool) -> None:
            if place < total:
                microbatch, chunk = self._slot(place, is_forward)
                end = self._receives(chunk, microbatch, is_forward=is_forward)
                if end is not None:
                    found.append(Post(end))

        def runs(place: int, is_forward: bool) -> None:
            microbatch, chunk = self._slot(place, is_forward)
            end = self._receives(chunk, microbatch, is_forward=is_forward)
            if end is not None:
                found.append(Arrives(end))
            found.append(self._pass(microbatch, chunk, is_forward))
            sent = self._sends(chunk, microbatch, is_forward=is_forward)
            if sent is not None:
                found.append(Post(sent))
            posts(place + 1, is_forward)

        posts(0, True)
        for place in range(warm):
            runs(place, True)
        posts(0, False)
        for place in range(total - warm):
            runs(place + warm, True)
            runs(place, False)
        for place in range(total - warm, total):
            runs(place, False)
        return found
