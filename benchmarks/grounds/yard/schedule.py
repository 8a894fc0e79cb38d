"""Say in which order a stage works: passes and messages, as Megatron-Core's schedules have them.

Without interleaving an exchange blocks the rank until all its messages are there; with it, messages
are posted one pass ahead and waited for where they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.grounds.yard.jobs import Job


@dataclass(frozen=True)
class Message:
    """Name one message as a stage sees it; `microbatch` and `chunk` are this stage's own."""

    is_send: bool
    direction: str  # forward or backward
    microbatch: int
    chunk: int

    def peer_stage(self, stage: int, num_stages: int) -> int:
        """Return the stage at the other end."""
        ahead = self.is_send == (self.direction == "forward")
        return (stage + (1 if ahead else -1)) % num_stages

    def key(self, stage: int, num_stages: int) -> tuple[str, int, int]:
        """Return what both ends call it: direction, microbatch, and the receiver's place."""
        place = self.chunk * num_stages + stage
        if self.is_send:
            place += 1 if self.direction == "forward" else -1
        return self.direction, self.microbatch, place


@dataclass(frozen=True)
class Step:
    """State one thing a stage does: a pass, or messages that are exchanged, posted, awaited."""

    what: str  # forward, backward, exchange, post, wait
    microbatch: int = 0
    chunk: int = 0
    messages: tuple[Message, ...] = ()


@lru_cache(maxsize=256)
def steps_of(job: Job, stage: int) -> tuple[Step, ...]:
    """Return what a stage does in one iteration."""
    if job.vpp > 1:
        return tuple(_interleaved(job, stage))
    return tuple(_one_forward_one_backward(job, stage))


def _exchange(*messages: Message | None) -> Iterator[Step]:
    present = tuple(message for message in messages if message)
    if present:
        yield Step("exchange", messages=present)


def _one_forward_one_backward(job: Job, stage: int) -> Iterator[Step]:
    total, last = job.num_microbatches, job.pp - 1
    warm = min(last - stage, total)

    def message(is_send: bool, direction: str, microbatch: int) -> Message | None:
        ahead = is_send == (direction == "forward")
        at_end = stage == (last if ahead else 0)
        return None if at_end else Message(is_send, direction, microbatch, 0)

    for number in range(warm):
        yield from _exchange(message(False, "forward", number))
        yield Step("forward", number)
        yield from _exchange(message(True, "forward", number))
    if warm < total:
        yield from _exchange(message(False, "forward", warm))
    for number in range(total - warm):
        ahead = warm + number
        yield Step("forward", ahead)
        yield from _exchange(message(True, "forward", ahead), message(False, "backward", number))
        yield Step("backward", number)
        following = message(False, "forward", ahead + 1) if ahead + 1 < total else None
        yield from _exchange(message(True, "backward", number), following)
    for number in range(total - warm, total):
        yield from _exchange(message(False, "backward", number))
        yield Step("backward", number)
        yield from _exchange(message(True, "backward", number))


def _passes(job: Job, stage: int) -> list[Step]:
    """Return the passes of an interleaved stage in their order."""
    total, round_size = job.num_microbatches * job.vpp, job.pp * job.vpp
    warm = min((job.pp - stage - 1) * 2 + (job.vpp - 1) * job.pp, total)
    if job.num_microbatches == job.pp:
        warm = total

    def nth(number: int, what: str) -> Step:
        chunk = number % round_size // job.pp
        microbatch = number // round_size * job.pp + number % job.pp
        return Step(what, microbatch, chunk if what == "forward" else job.vpp - 1 - chunk)

    passes = [nth(number, "forward") for number in range(warm)]
    for number in range(total - warm):
        passes += [nth(warm + number, "forward"), nth(number, "backward")]
    return passes + [nth(number, "backward") for number in range(total - warm, total)]


def _interleaved(job: Job, stage: int) -> Iterator[Step]:
    last = job.pp * job.vpp - 1

    def message(each: Step, is_send: bool) -> Message | None:
        place = each.chunk * job.pp + stage
        ahead = is_send == (each.what == "forward")
        if place == (last if ahead else 0):
            return None
        return Message(is_send, each.what, each.microbatch, each.chunk)

    passes = _passes(job, stage)
    for number, each in enumerate(passes):
        received = message(each, False)
        if received and number == 0:
            yield Step("post", messages=(received,))
        if number + 1 < len(passes) and (following := message(passes[number + 1], False)):
            yield Step("post", messages=(following,))
        if received:
            yield Step("wait", messages=(received,))
        yield each
        if sent := message(each, True):
            yield Step("post", messages=(sent,))
