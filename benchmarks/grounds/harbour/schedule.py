"""Say in which order a stage works, and which messages it has to exchange in between.

One forward, one backward (Narayanan et al. 2019) and its interleaved form (Narayanan et al. 2021),
as Megatron-Core runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.harbour.jobs import Job


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward or backward of one microbatch through one chunk of a stage."""

    forward: bool
    microbatch: int
    chunk: int  # on its rank


@dataclass(frozen=True, kw_only=True)
class Message:
    """What travels between two chunks of the model: activations, or the gradients of them.

    `boundary` is the model's chunk before which it lies: activations come to it, gradients leave.
    """

    forward: bool
    microbatch: int
    boundary: int


def passes(job: Job, stage: int) -> list[Pass]:
    """Return the passes of a stage in order: warming up, one forward one backward, cooling down."""
    count = job.num_microbatches * job.vpp
    if job.vpp == 1:
        ahead = min(job.pp - stage - 1, count)
    elif job.num_microbatches == job.pp:
        ahead = count
    else:
        ahead = min((job.pp - stage - 1) * 2 + (job.vpp - 1) * job.pp, count)
    forwards = [_pass(job, number, forward=True) for number in range(count)]
    backwards = [_pass(job, number, forward=False) for number in range(count)]
    order = forwards[:ahead]
    for one, other in zip(forwards[ahead:], backwards, strict=False):
        order += [one, other]
    return order + backwards[count - ahead :]


def _pass(job: Job, number: int, *, forward: bool) -> Pass:
    """Return the pass of a number: `pp` microbatches go through a chunk, then the next chunk."""
    if job.vpp == 1:
        return Pass(forward=forward, microbatch=number, chunk=0)
    turn, place = divmod(number, job.pp * job.vpp)
    chunk = place // job.pp
    return Pass(
        forward=forward,
        microbatch=turn * job.pp + place % job.pp,
        chunk=chunk if forward else job.vpp - 1 - chunk,
    )


def needed(job: Job, stage: int, one: Pass) -> Message | None:
    """Return the message without which a pass cannot begin, if there is one."""
    chunk = one.chunk * job.pp + stage
    if one.forward:
        return Message(forward=True, microbatch=one.microbatch, boundary=chunk) if chunk else None
    if chunk == job.pp * job.vpp - 1:
        return None
    return Message(forward=False, microbatch=one.microbatch, boundary=chunk + 1)


def made(job: Job, stage: int, one: Pass) -> Message | None:
    """Return the message that a pass sends, if there is one."""
    chunk = one.chunk * job.pp + stage
    if not one.forward:
        return Message(forward=False, microbatch=one.microbatch, boundary=chunk) if chunk else None
    if chunk == job.pp * job.vpp - 1:
        return None
    return Message(forward=True, microbatch=one.microbatch, boundary=chunk + 1)


def ends(job: Job, message: Message) -> tuple[int, int]:
    """Return the stages that send and receive a message."""
    before, after = (message.boundary - 1) % job.pp, message.boundary % job.pp
    return (before, after) if message.forward else (after, before)
