"""Order the passes of a pipeline's stages: 1F1B, and interleaved with several chunks a stage.

Narayanan et al. 2021 (Efficient Large-Scale Language Model Training on GPU Clusters), as Megatron
Core runs them: plain 1F1B exchanges messages in batches for which both sides wait; interleaved
stages send and receive beside their computations.
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Message:
    """One tensor between two stages. `key` is the same at both ends."""

    sender: int
    receiver: int
    direction: str
    microbatch: int
    chunk: int  # the receiver's

    def is_sent_by(self, stage: int) -> bool:
        """Tell whether a stage is the sending end."""
        return self.sender == stage


@dataclass(frozen=True)
class Pass:
    """Forward or backward of one microbatch through one chunk, with the messages around it.

    `before` and `after` are exchanges for which the stage waits; `receives` and `sends` run beside.
    """

    direction: str
    microbatch: int
    chunk: int
    before: tuple[Message, ...] = ()
    after: tuple[Message, ...] = ()
    receives: Message | None = None
    sends: Message | None = None


def passes_of(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
    """Return the passes of one iteration on a stage, in their order."""
    if num_chunks > 1:
        return _interleaved(stage, num_stages, num_microbatches, num_chunks)
    return _one_forward_one_backward(stage, num_stages, num_microbatches)


def _message(stage: int, num_stages: int, direction: str, microbatch: int) -> Message | None:
    """Return what a stage gets for a pass of plain 1F1B; nobody sends to the ends."""
    sender = stage - 1 if direction == FORWARD else stage + 1
    if not 0 <= sender < num_stages or not 0 <= stage < num_stages:
        return None
    return Message(sender, stage, direction, microbatch, 0)


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """Pair what is sent with what is received next, as `send_forward_recv_backward` does."""

    def gets(direction: str, microbatch: int) -> Message | None:
        return _message(stage, num_stages, direction, microbatch)

    def gives(direction: str, microbatch: int) -> Message | None:
        neighbour = stage + 1 if direction == FORWARD else stage - 1
        return _message(neighbour, num_stages, direction, microbatch)

    warm_up = min(num_microbatches, num_stages - stage - 1)
    order = [(FORWARD, one) for one in range(warm_up)]
    for one in range(num_microbatches - warm_up):
        order += [(FORWARD, warm_up + one), (BACKWARD, one)]
    order += [(BACKWARD, one) for one in range(num_microbatches - warm_up, num_microbatches)]
    passes = []
    is_paired = False  # what the next pass gets came with the exchange before
    for place, (direction, microbatch) in enumerate(order):
        before = () if is_paired else (gets(direction, microbatch),)
        following = order[place + 1] if place + 1 < len(order) else None
        is_paired = following is not None and following[0] != direction and place >= warm_up
        after: tuple[Message | None, ...] = (gives(direction, microbatch),)
        if is_paired and following is not None:
            after = (*after, gets(*following))
        passes.append(
            Pass(
                direction,
                microbatch,
                0,
                before=tuple(one for one in before if one is not None),
                after=tuple(one for one in after if one is not None),
            )
        )
    return passes


def _interleaved(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
    total = num_microbatches * num_chunks
    warm_up = min(total, (num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages)
    order = [(FORWARD, one) for one in range(warm_up)]
    for one in range(total - warm_up):
        order += [(FORWARD, warm_up + one), (BACKWARD, one)]
    order += [(BACKWARD, one) for one in range(total - warm_up, total)]
    passes = []
    for direction, number in order:
        chunk = number % (num_stages * num_chunks) // num_stages
        chunk = chunk if direction == FORWARD else num_chunks - 1 - chunk
        microbatch = number // (num_stages * num_chunks) * num_stages + number % num_stages
        passes.append(
            Pass(
                direction,
                microbatch,
                chunk,
                receives=_into(stage, num_stages, num_chunks, (direction, microbatch, chunk)),
                sends=_out_of(stage, num_stages, num_chunks, (direction, microbatch, chunk)),
            )
        )
    return passes


def _into(
    stage: int, num_stages: int, num_chunks: int, which: tuple[str, int, int]
) -> Message | None:
    """Return what a pass of an interleaved stage gets: from the ring's neighbour."""
    direction, microbatch, chunk = which
    step = -1 if direction == FORWARD else 1
    sender = stage + step
    from_chunk = chunk if 0 <= sender < num_stages else chunk + step
    if not 0 <= from_chunk < num_chunks:
        return None
    return Message(sender % num_stages, stage, direction, microbatch, chunk)


def _out_of(
    stage: int, num_stages: int, num_chunks: int, which: tuple[str, int, int]
) -> Message | None:
    """Return what a pass of an interleaved stage hands on."""
    direction, microbatch, chunk = which
    step = 1 if direction == FORWARD else -1
    receiver = stage + step
    to_chunk = chunk if 0 <= receiver < num_stages else chunk + step
    if not 0 <= to_chunk < num_chunks:
        return None
    return Message(stage, receiver % num_stages, direction, microbatch, to_chunk)
