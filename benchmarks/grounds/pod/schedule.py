"""Order the passes of a pipeline stage as Megatron-Core's schedules do.

    1F1B, 4 stages, stage 1        F0 F1 | F2 B0 F3 B1 … | B2 B3
    interleaved, chunks 0 and 1    F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 … then one forward, one backward

A chunk's messages go to the next stage; those of the last stage go to the first one's next chunk.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One microbatch through one chunk."""

    forward: bool
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Message:
    """What one pass hands to the next: activations, or their gradients.

    `microbatch` and `chunk` are the sender's own; `receiving_chunk` is the other end's.
    """

    sender: int
    receiver: int
    forward: bool
    microbatch: int
    chunk: int
    receiving_chunk: int


def passes_of(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> list[Pass]:
    """Return the passes of a stage in the order in which they run."""
    total = num_microbatches * num_chunks
    if num_chunks == 1:
        num_ahead = min(num_stages - stage - 1, total)
    else:
        num_ahead = min((num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages, total)
    forward = [_numbered(k, num_stages, num_chunks, True) for k in range(total)]
    backward = [_numbered(k, num_stages, num_chunks, False) for k in range(total)]
    order = forward[:num_ahead]
    for step in range(total - num_ahead):
        order += [forward[num_ahead + step], backward[step]]
    return order + backward[total - num_ahead :]


def _numbered(step: int, num_stages: int, num_chunks: int, forward: bool) -> Pass:
    """Return the pass of a virtual step: groups of as many microbatches as there are stages."""
    if num_chunks == 1:
        return Pass(forward, step, 0)
    cycle, place = divmod(step, num_stages * num_chunks)
    chunk, within = divmod(place, num_stages)
    return Pass(forward, cycle * num_stages + within, chunk if forward else num_chunks - 1 - chunk)


def received(one: Pass, stage: int, num_stages: int, num_chunks: int) -> Message | None:
    """Return the message that a pass needs before it can begin."""
    step = -1 if one.forward else 1
    place = one.chunk * num_stages + stage + step
    if not 0 <= place < num_stages * num_chunks:
        return None
    chunk, sender = divmod(place, num_stages)
    return Message(sender, stage, one.forward, one.microbatch, chunk, one.chunk)


def sent(one: Pass, stage: int, num_stages: int, num_chunks: int) -> Message | None:
    """Return the message that a pass hands on."""
    step = 1 if one.forward else -1
    place = one.chunk * num_stages + stage + step
    if not 0 <= place < num_stages * num_chunks:
        return None
    chunk, receiver = divmod(place, num_stages)
    return Message(stage, receiver, one.forward, one.microbatch, one.chunk, chunk)
