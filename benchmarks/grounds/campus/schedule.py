"""In which order a stage does its passes, and which messages it exchanges around them.

Without interleaving, Megatron-Core's 1F1B: a stage that is d before the last runs d forwards ahead,
then one backward after each forward. Its exchanges hold the stream up: what is sent forward and
what is awaited backward are one exchange. With interleaving every stage has several chunks, runs
further ahead, and its messages travel beside its passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Pass:
    """One pass of a chunk of a stage."""

    phase: str
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Message:
    """One end of a message: `key` is the same at both ends."""

    operation: str  # send or recv
    direction: str
    peer: int  # stage
    microbatch: int
    chunk: int  # of this end
    key: tuple[str, int, int]  # direction, microbatch, place of the chunk that sends


def plain_order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Pass]:
    """Yield the passes of 1F1B."""
    ahead = min(num_stages - stage - 1, num_microbatches)
    for number in range(ahead):
        yield Pass(FORWARD, number, 0)
    for number in range(num_microbatches - ahead):
        yield Pass(FORWARD, number + ahead, 0)
        yield Pass(BACKWARD, number, 0)
    for number in range(num_microbatches - ahead, num_microbatches):
        yield Pass(BACKWARD, number, 0)


def interleaved_order(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> Iterator[Pass]:
    """Yield the passes of Megatron-Core's interleaved schedule; microbatches fill all stages."""
    total = num_microbatches * num_chunks
    ahead = min(total, (num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages)

    def at(phase: str, number: int) -> Pass:
        round_, place = divmod(number, num_stages * num_chunks)
        chunk, within = divmod(place, num_stages)
        if phase == BACKWARD:
            chunk = num_chunks - 1 - chunk
        return Pass(phase, round_ * num_stages + within, chunk)

    for number in range(ahead):
        yield at(FORWARD, number)
    for number in range(total - ahead):
        yield at(FORWARD, number + ahead)
        yield at(BACKWARD, number)
    for number in range(total - ahead, total):
        yield at(BACKWARD, number)


def order(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
    """Return the passes of a stage in an iteration."""
    if num_chunks == 1:
        return list(plain_order(stage, num_stages, num_microbatches))
    return list(interleaved_order(stage, num_stages, num_microbatches, num_chunks))


def received(one: Pass, stage: int, num_stages: int, num_chunks: int) -> Message | None:
    """Return the message that a pass needs, None at the ends of the model."""
    place = one.chunk * num_stages + stage
    if one.phase == FORWARD:
        if place == 0:
            return None
        source, sender = place - 1, (stage - 1) % num_stages
    else:
        if place == num_stages * num_chunks - 1:
            return None
        source, sender = place + 1, (stage + 1) % num_stages
    key = (one.phase, one.microbatch, source)
    return Message("recv", one.phase, sender, one.microbatch, one.chunk, key)


def sent(one: Pass, stage: int, num_stages: int, num_chunks: int) -> Message | None:
    """Return the message that a pass makes, None at the ends of the model."""
    place = one.chunk * num_stages + stage
    key = (one.phase, one.microbatch, place)
    if one.phase == FORWARD:
        if place == num_stages * num_chunks - 1:
            return None
        return Message("send", one.phase, (stage + 1) % num_stages, one.microbatch, one.chunk, key)
    if place == 0:
        return None
    return Message("send", one.phase, (stage - 1) % num_stages, one.microbatch, one.chunk, key)


def exchanges(
    passes: list[Pass], stage: int, num_stages: int
) -> Iterator[tuple[list[Message], Pass | None]]:
    """Yield of 1F1B the messages of each exchange, and the pass that follows it.

    In the steady phase what a pass sends and what the next one needs are one exchange, where both
    are with the same neighbour.
    """
    leaving: Message | None = None
    for one in [*passes, None]:
        needed = received(one, stage, num_stages, 1) if one else None
        if leaving and needed and leaving.peer == needed.peer:
            yield [leaving, needed], one
        else:
            if leaving:
                yield [leaving], None
            yield ([needed] if needed else []), one
        leaving = sent(one, stage, num_stages, 1) if one else None
