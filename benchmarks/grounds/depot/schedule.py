"""Order what a stage does in one iteration: passes, and the messages between them.

As Megatron-Core does without overlapped messages: all that stands together in one call is one
exchange, which ends when its last message has arrived; see its `schedules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.grounds.depot.job import Job


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or backward pass of a microbatch through a chunk."""

    forward: bool
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a message: what this stage sends or receives, of which pass of its own."""

    sends: bool
    peer: int  # stage
    forward: bool
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of one call."""

    messages: tuple[Message, ...]


Turn = Pass | Exchange


def turns_of(job: Job, stage: int) -> Iterator[Turn]:
    """Yield what a stage does, in its order; empty exchanges are left out."""
    plan = _interleaved(job, stage) if job.vpp > 1 else _one_by_one(job, stage)
    for turn in plan:
        if isinstance(turn, Pass) or turn.messages:
            yield turn


class _Stage:
    """The messages of one stage."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.stage = job, stage

    def _is_first(self, chunk: int) -> bool:
        return self.stage == 0 and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self.stage == self.job.pp - 1 and chunk == self.job.vpp - 1

    def send(self, unit: Pass | None) -> Iterator[Message]:
        """Yield the message with what a pass made, if it goes anywhere."""
        if unit is None or (self._is_last if unit.forward else self._is_first)(unit.chunk):
            return
        peer = (self.stage + (1 if unit.forward else -1)) % self.job.pp
        yield Message(True, peer, unit.forward, unit.chunk, unit.microbatch)

    def receive(self, unit: Pass | None) -> Iterator[Message]:
        """Yield the message with what a pass needs, if it comes from anywhere."""
        if unit is None or (self._is_first if unit.forward else self._is_last)(unit.chunk):
            return
        peer = (self.stage + (-1 if unit.forward else 1)) % self.job.pp
        yield Message(False, peer, unit.forward, unit.chunk, unit.microbatch)

    def exchange(self, sends: tuple[Pass | None, ...], needs: tuple[Pass | None, ...]) -> Exchange:
        """Return the exchange after some passes and before others."""
        out = [message for unit in sends for message in self.send(unit)]
        return Exchange((*out, *(message for unit in needs for message in self.receive(unit))))


def _one_by_one(job: Job, stage: int) -> Iterator[Turn]:
    """Yield one forward, one backward in turns, after a warm-up that fills the pipeline."""
    ends, total = _Stage(job, stage), job.microbatches
    ahead = min(job.pp - stage - 1, total)
    forward = [Pass(True, 0, each) for each in range(total)]
    backward = [Pass(False, 0, each) for each in range(total)]
    for unit in forward[:ahead]:
        yield ends.exchange((), (unit,))
        yield unit
        yield ends.exchange((unit,), ())
    if ahead < total:
        yield ends.exchange((), (forward[ahead],))
    for number in range(total - ahead):
        unit, back = forward[number + ahead], backward[number]
        yield unit
        yield ends.exchange((unit,), (back,))
        yield back
        following = forward[number + ahead + 1] if number + ahead + 1 < total else None
        yield ends.exchange((back,), (following,))
    for back in backward[total - ahead :]:
        yield ends.exchange((), (back,))
        yield back
        yield ends.exchange((back,), ())


def _interleaved(job: Job, stage: int) -> Iterator[Turn]:
    """Yield the passes of several chunks in groups of as many microbatches as there are stages."""
    ends, total = _Stage(job, stage), job.microbatches * job.vpp
    ahead = min(total, (job.pp - stage - 1) * 2 + (job.vpp - 1) * job.pp)
    if job.microbatches == job.pp:
        ahead = total
    forward = [_unit(job, each, True) for each in range(total)]
    backward = [_unit(job, each, False) for each in range(total)]

    def at(units: list[Pass], number: int) -> Pass | None:
        return units[number] if number < total else None

    yield ends.exchange((), (forward[0],))
    for number in range(ahead):
        yield forward[number]
        first = backward[0] if number == ahead - 1 and ahead < total else None
        yield ends.exchange((forward[number],), (at(forward, number + 1), first))
    for number in range(total - ahead):
        unit, back = forward[number + ahead], backward[number]
        yield unit
        yield back
        needs = (at(forward, number + ahead + 1), at(backward, number + 1))
        yield ends.exchange((unit, back), needs)
    if ahead == total:
        yield ends.exchange((), (backward[0],))
    for number in range(total - ahead, total):
        yield backward[number]
        yield ends.exchange((backward[number],), (at(backward, number + 1),))


def _unit(job: Job, number: int, forward: bool) -> Pass:
    group, place = divmod(number, job.pp * job.vpp)
    chunk, within = divmod(place, job.pp)
    chunk = chunk if forward else job.vpp - 1 - chunk
    return Pass(forward, chunk, group * job.pp + within)
