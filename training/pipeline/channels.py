"""Messages between pipeline stages: one process group a channel, one way, in the sender's order.

Two ranks of a pipeline that hand tensors to each other have up to four channels: outputs forward
and gradients backward, either way where several chunks make the pipeline a ring. Each channel is a
process group of its own, so that no message waits for one of another channel, and the receiver
knows the order of its messages because it knows its sender's list of actions.

Sends return at once. On the CPU receives are posted ahead, a few a channel, and waited for when
they are used. On GPUs a channel is an NCCL communicator of few thread blocks; a receive is posted
when it is used, from a stream of its own (so that it starts before the compute launched earlier has
ended), and waiting holds up the compute stream, not the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist

from training.pipeline.plan import (
    ActionKind,
    Message,
    PipelineShape,
    Plan,
    message_made,
    message_needed,
)

RECEIVES_AHEAD = 2
"""Receives posted on a channel at a time: one that is under way, one that is to follow."""

MAX_THREAD_BLOCKS = 4
"""Thread blocks of a channel's NCCL kernels: a receive that waits occupies so many."""


class Operation(StrEnum):
    """The two ends of a message."""

    SEND = "send"
    RECEIVE = "recv"


@dataclass(frozen=True, order=True, kw_only=True)
class Link:
    """One way between two pipeline ranks; outputs (`forward`) and gradients go separate ways."""

    sender: int
    receiver: int
    forward: bool


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One end of a message: what it is, with whom, and to which of this rank's work it belongs."""

    operation: Operation
    direction: str
    """``forward`` (an output) or ``backward`` (a gradient)."""
    peer: int
    """Global rank of the other end."""
    microbatch: int
    chunk: int
    """This rank's chunk that made or needs it."""


def start(transfer: Transfer, tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin one end of a message; every message of a plan goes through here."""
    call = dist.isend if transfer.operation is Operation.SEND else dist.irecv
    work = call(tensor, transfer.peer, group=group)
    assert work is not None, f"rank is no member of the channel to rank {transfer.peer}"
    return work


def link_of(shape: PipelineShape, message: Message) -> Link:
    """Return the link that a message takes; sender and receiver are one where it stays at home."""
    forward = message.kind is ActionKind.FORWARD
    source = message.stage - 1 if forward else message.stage + 1
    return Link(
        sender=shape.rank_of(source), receiver=shape.rank_of(message.stage), forward=forward
    )


def links_of(shape: PipelineShape) -> list[Link]:
    """Return all links of a pipeline, sorted; stages on the same rank need none."""
    found = set[Link]()
    for stage in range(shape.num_stages - 1):
        one, other = shape.rank_of(stage), shape.rank_of(stage + 1)
        if one != other:
            found.add(Link(sender=one, receiver=other, forward=True))
            found.add(Link(sender=other, receiver=one, forward=False))
    return sorted(found)


@dataclass(kw_only=True)
class Channel:
    """One link as this rank sees it: the group and the global rank at the other end."""

    link: Link
    group: dist.ProcessGroup
    peer: int
    headers: dist.ProcessGroup | None = None
    """A group on the CPU that says what comes next; only where the order is chosen at run time."""


class Channels:
    """The channels of this rank's pipeline; made once, by all ranks of the job together.

    `ranks` are the global ranks of this rank's pipeline, of which it is number `rank`; `device` is
    where its tensors lie. With `announces` each channel gets a second group, on the CPU, for
    headers.
    """

    def __init__(
        self, shape: PipelineShape, ranks: Sequence[int], device: str, *, announces: bool = False
    ) -> None:
        self.device = device
        self.own: list[Channel] = []
        for pipeline in all_groups(ranks):
            for link in links_of(shape):
                # Collective over the world, in one order: with `use_local_synchronization` ranks
                # that belong to different numbers of groups would wait for each other for ever.
                pair = [pipeline[link.sender], pipeline[link.receiver]]
                group = _new_group(pair, device)
                headers = dist.new_group(pair, backend="gloo") if announces else None
                rank = dist.get_rank()
                if rank in pair:
                    peer = pair[1] if rank == pair[0] else pair[0]
                    channel = Channel(link=link, group=group, peer=peer, headers=headers)
                    self.own.append(channel)
        self.rank = list(ranks).index(dist.get_rank())
        if device != "cpu":
            self._connect()

    def outgoing(self) -> Iterator[Channel]:
        """Return channels on which this rank sends."""
        return (channel for channel in self.own if channel.link.sender == self.rank)

    def incoming(self) -> Iterator[Channel]:
        """Return channels on which this rank receives."""
        return (channel for channel in self.own if channel.link.receiver == self.rank)

    def _connect(self) -> None:
        """Exchange one element on every channel, in one order.

        NCCL connects two ranks when they first talk; ranks that do so in different orders while
        training can wait for each other for ever.
        """
        for channel in self.own:
            element = torch.zeros(1, device=self.device)
            if channel.link.sender == self.rank:
                dist.send(element, channel.peer, group=channel.group)
            else:
                dist.recv(element, channel.peer, group=channel.group)
            torch.cuda.synchronize(self.device)


def all_groups(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return every rank's `ranks` (those of its pipeline, say), once each, in one order on all
    ranks.
    """
    everyone: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(ranks))
    return sorted({group for group in everyone if group is not None})


def _new_group(pair: list[int], device: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup
    if device == "cpu":
        group = dist.new_group(pair, backend="gloo")
        return group
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_THREAD_BLOCKS
    group = dist.new_group(pair, backend="nccl", pg_options=options)
    return group


class Outbox:
    """Sends on one channel; tensors are kept until they have left."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._under_way: dict[Message, tuple[dist.Work, torch.Tensor]] = {}

    def send(self, message: Message, chunk: int, tensor: torch.Tensor) -> None:
        """Begin to send; `chunk` is this rank's that made the tensor."""
        for oldest, (work, _) in [*self._under_way.items()]:
            if not work.is_completed():
                break
            self._under_way.pop(oldest, None)
        tensor = tensor.detach().contiguous()
        transfer = transfer_of(Operation.SEND, self.channel, message, chunk)
        self._under_way[message] = start(transfer, tensor, self.channel.group), tensor

    def settle(self, message: Message) -> None:
        """Let go of a message that has come, as another one shows; gloo alone does not say so."""
        sent = self._under_way.pop(message, None)
        if sent is not None:
            sent[0].wait()

    def drain(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._under_way.values():
            work.wait()
        self._under_way.clear()


class Inbox:
    """Receives on one channel, in the order that `expect` was told."""

    def __init__(
        self, channel: Channel, shape: Sequence[int], dtype: torch.dtype, device: str
    ) -> None:
        self.channel = channel
        self._shape = tuple(shape)
        self._dtype = dtype
        self._device = device
        self._stream = None if device == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._expected: deque[tuple[Message, int]] = deque()
        self._posted: deque[tuple[Message, dist.Work, torch.Tensor]] = deque()
        self._ahead = RECEIVES_AHEAD
        self._arrived: dict[Message, torch.Tensor] = {}

    def expect(self, messages: Iterable[tuple[Message, int]], *, post: bool = True) -> None:
        """Say what comes, each message with this rank's chunk that needs it.

        With `post` receives are posted ahead by themselves (on the CPU), otherwise when `post` is
        called or the message is taken.
        """
        self._expected.extend(messages)
        # On a GPU a posted receive is a kernel that spins: loading another kernel for the first
        # time waits for it, and with it the work that the sender is waiting for.
        self._ahead = RECEIVES_AHEAD if post and self._stream is None else 0
        self._post_up_to(self._ahead)

    def post(self, message: Message) -> None:
        """Post receives until that of `message` is posted."""
        while self._expected and message not in self._known():
            self._post_next()

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message and hand it over; those before it are kept until they are asked for.

        On a GPU it is the current stream that waits.
        """
        while message not in self._arrived:
            if not self._posted:
                self._post_next()
            found, work, tensor = self._posted.popleft()
            work.wait()
            if self._stream is not None:
                tensor.record_stream(torch.cuda.current_stream())
            self._arrived[found] = tensor
            self._post_up_to(self._ahead)
        return self._arrived.pop(message)

    def _known(self) -> set[Message]:
        return {message for message, _, _ in self._posted} | set(self._arrived)

    def _post_up_to(self, number: int) -> None:
        while self._expected and len(self._posted) < number:
            self._post_next()

    def _post_next(self) -> None:
        message, chunk = self._expected.popleft()
        transfer = transfer_of(Operation.RECEIVE, self.channel, message, chunk)
        with self._own_stream():
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            work = start(transfer, tensor, self.channel.group)
        self._posted.append((message, work, tensor))

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def transfer_of(operation: Operation, channel: Channel, message: Message, chunk: int) -> Transfer:
    """Return one end of a message of a channel."""
    return Transfer(
        operation=operation,
        direction="forward" if message.kind is ActionKind.FORWARD else "backward",
        peer=channel.peer,
        microbatch=message.microbatch,
        chunk=chunk,
    )


def proved_by(plan: Plan, rank: int) -> dict[Message, list[Message]]:
    """Return what a rank has sent that must have come, by the message to it that proves so.

    Every rank works its list off in order, so who sends something has had what its work up to there
    needed. Rank 1 of 1F1B with P=3 does F0 F1 B0 F2 B1 …: gradient 0 proves to rank 0 that outputs
    0 and 1 came, output 2 proves to rank 2 that gradient 0 did. Each message stands once, with the
    first proof.
    """
    shape = plan.shape
    found: dict[Message, list[Message]] = {}
    for other in range(shape.num_ranks):
        had: list[Message] = []
        for action in plan.work_of(other) if other != rank else ():
            needed, made = message_needed(shape, action), message_made(shape, action)
            if needed is not None and link_of(shape, needed).sender == rank:
                had.append(needed)
            if made is not None and shape.rank_of(made.stage) == rank:
                found[made], had = had, []
    return found


class Mail:
    """All messages of this rank in one step whose order is known beforehand.

    `shape` and `dtype` are those of every message. What a stage hands to another one of the same
    rank (the turn of a V) stays here.
    """

    def __init__(self, channels: Channels, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._outboxes = {channel.link: Outbox(channel) for channel in channels.outgoing()}
        self._inboxes = {
            channel.link: Inbox(channel, shape, dtype, channels.device)
            for channel in channels.incoming()
        }
        self._at_home: dict[Message, torch.Tensor] = {}
        self._rank = channels.rank
        self._proved: dict[Message, list[Message]] = {}

    def expect(self, plan: Plan) -> None:
        """Learn a step's messages; where the plan names its receives, they wait for `post`."""
        place = self._place = plan.shape
        self._proved = proved_by(plan, self._rank)
        for link, inbox in self._inboxes.items():
            messages = plan.messages(link.sender, link.receiver, forward=link.forward)
            known = [(message, place.chunk_of(message.stage)) for message in messages]
            inbox.expect(known, post=not plan.names_transfers)

    def send(self, link: Link, message: Message, chunk: int, tensor: torch.Tensor) -> None:
        """Begin to send what this rank's `chunk` made."""
        if link.sender == link.receiver:
            self._at_home[message] = tensor.detach()
        else:
            self._outboxes[link].send(message, chunk, tensor)

    def post(self, link: Link, message: Message) -> None:
        """Post the receive of a message."""
        self._inboxes[link].post(message)

    def take(self, link: Link, message: Message) -> torch.Tensor:
        """Wait for a message and hand it over."""
        if link.sender == link.receiver:
            return self._at_home.pop(message)
        tensor = self._inboxes[link].take(message)
        for sent in self._proved.pop(message, ()):
            self._outboxes[link_of(self._place, sent)].settle(sent)
        return tensor

    def drain(self) -> None:
        """Wait until everything has left."""
        for outbox in self._outboxes.values():
            outbox.drain()
