"""Messages between pipeline stages: one process group a channel, one way, in the sender's order.

Two ranks of a pipeline that hand tensors to each other have up to four channels: outputs forward
and gradients backward, either way where several chunks make the pipeline a ring. Each channel is a
process group of its own, so that no message waits for one of another channel, and the receiver
knows the order of its messages because it knows its sender's list of actions. What the hosts say
to each other beside it goes over a group of the whole pipeline on the CPU, by a tag a channel.

Sends return at once. On the CPU receives are posted ahead, a few a channel, and waited for when
they are used. Between GPUs of one host copy engines carry messages (`copies.py`). Between hosts a
channel is an NCCL communicator of few thread blocks; a receive is a kernel that occupies them until
the message has come, so it is launched behind the compute that comes before it. Waiting holds up
the compute stream of a GPU, not the host.
"""

from __future__ import annotations

import platform
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from training.pipeline import copies
from training.pipeline.copies import CopyError, CopyWay, Line
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


class MessageEnd(StrEnum):
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

    operation: MessageEnd
    direction: str
    """``forward`` (an output) or ``backward`` (a gradient)."""
    peer: int
    """Global rank of the other end."""
    microbatch: int
    chunk: int
    """This rank's chunk that made or needs it."""


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait for its end: the host on the CPU, the current stream on a GPU."""

    def is_completed(self) -> bool:
        """Tell whether it has ended."""


class Way(Protocol):
    """How messages go from one rank to another, in the order in which they are sent."""

    receives_ahead: int
    """How many receives are begun before they are used."""
    waits_for_sender: bool
    """Whether to begin a receive waits for its sender, so that it must not begin early."""

    def receiving(self) -> AbstractContextManager[object]:
        """Return the stream on which receives begin and their memory is taken."""

    def reserve(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Have room for so many messages under way; both ends call it alike, between steps."""

    def send(self, tensor: torch.Tensor) -> Handle:
        """Begin to send what the current stream makes."""

    def receive(self, tensor: torch.Tensor) -> Handle:
        """Begin to receive on the current stream."""

    def end_step(self) -> None:
        """Note that all messages of a step were received; both ends call it, the receiver first."""

    def close(self) -> None:
        """Let go of what the other end has opened; nothing is sent any more."""


class GroupWay:
    """Messages of a process group of two."""

    waits_for_sender = False

    def __init__(self, group: dist.ProcessGroup, peer: int, device: str) -> None:
        self._group = group
        self._peer = peer
        # On a GPU a posted receive is a kernel that spins: loading another kernel for the first
        # time waits for it, and with it the work that the sender is waiting for.
        self.receives_ahead = RECEIVES_AHEAD if device == "cpu" else 0

    def receiving(self) -> AbstractContextManager[object]:
        """Return no context: receives begin behind what the current stream has been given."""
        return nullcontext()

    def reserve(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Do nothing: a message waits at its sender until it is received."""

    def send(self, tensor: torch.Tensor) -> Handle:
        """Begin to send."""
        return self._begun(dist.isend(tensor, self._peer, group=self._group))

    def receive(self, tensor: torch.Tensor) -> Handle:
        """Begin to receive."""
        return self._begun(dist.irecv(tensor, self._peer, group=self._group))

    def end_step(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the process group ends with the job."""

    def _begun(self, work: dist.Work | None) -> dist.Work:
        assert work is not None, f"rank is no member of the channel to rank {self._peer}"
        return work


def start(transfer: Transfer, tensor: torch.Tensor, way: Way) -> Handle:
    """Begin one end of a message; every message of a plan goes through here."""
    return way.send(tensor) if transfer.operation is MessageEnd.SEND else way.receive(tensor)


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
    """One link as this rank sees it: the way, and the global rank at the other end."""

    link: Link
    way: Way
    peer: int
    headers: Line | None = None
    """Says what comes next; only where the order is chosen at run time."""


class Channels:
    """The channels of this rank's pipeline; made once, by all ranks of the job together.

    `ranks` are the global ranks of this rank's pipeline, of which it is number `rank`; `device` is
    where its tensors lie. With `announces` each channel gets a line for headers. Who waits for a
    message longer than `timeout` ends the job.
    """

    def __init__(
        self,
        shape: PipelineShape,
        ranks: Sequence[int],
        device: str,
        *,
        timeout: timedelta,
        announces: bool = False,
    ) -> None:
        self.device = device
        self.timeout = timeout
        self.own: list[Channel] = []
        self.rank = list(ranks).index(dist.get_rank())
        self._open_device = copies.device_for(device)
        host_of = _hosts()
        tokens = None if self._open_device is None else cpu_group_of(ranks, timeout)
        headers = cpu_group_of(ranks, timeout) if announces else None
        for pipeline in all_groups(ranks):
            for tag, link in enumerate(links_of(shape)):
                # Collective over the world, in one order: with `use_local_synchronization` ranks
                # that belong to different numbers of groups would wait for each other for ever.
                pair = [pipeline[link.sender], pipeline[link.receiver]]
                group = _new_group(pair, device, timeout)
                if dist.get_rank() not in pair:
                    continue
                peer = pair[1] if dist.get_rank() == pair[0] else pair[0]
                line = None
                if tokens is not None and host_of[pair[0]] == host_of[pair[1]]:
                    line = Line(tokens, peer, tag)
                self.own.append(
                    Channel(
                        link=link,
                        way=self._way(link, group, line, peer),
                        peer=peer,
                        headers=None if headers is None else Line(headers, peer, tag),
                    )
                )

    def outgoing(self) -> Iterator[Channel]:
        """Return channels on which this rank sends."""
        return (channel for channel in self.own if channel.link.sender == self.rank)

    def incoming(self) -> Iterator[Channel]:
        """Return channels on which this rank receives."""
        return (channel for channel in self.own if channel.link.receiver == self.rank)

    def close(self) -> None:
        """Let go of the other ranks' memory; the job has ended."""
        for channel in self.own:
            channel.way.close()

    def _way(self, link: Link, group: dist.ProcessGroup, line: Line | None, peer: int) -> Way:
        """Return how messages go; both ends choose alike."""
        sends = link.sender == self.rank
        if line is not None and self._open_device is not None:
            way = CopyWay(line, self._open_device(), sends=sends)
            try:
                way.reserve(1, (1,), torch.float32)
            except CopyError as error:
                if sends:
                    print(
                        f"pipeline messages from rank {dist.get_rank()} to rank {peer} are sent by "
                        f"NCCL, which slows compute beside them: {error}",
                        file=sys.stderr,
                        flush=True,
                    )
            else:
                return way
        if self.device != "cpu":
            self._connect(group, peer, sends=sends)
        return GroupWay(group, peer, self.device)

    def _connect(self, group: dist.ProcessGroup, peer: int, *, sends: bool) -> None:
        """Exchange one element.

        NCCL connects two ranks when they first talk; ranks that do so in different orders while
        training can wait for each other for ever. Here it is one order.
        """
        element = torch.zeros(1, device=self.device)
        if sends:
            dist.send(element, peer, group=group)
        else:
            dist.recv(element, peer, group=group)
        torch.cuda.synchronize(self.device)


def _hosts() -> list[object]:
    """Return what tells the hosts of all ranks apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    own = (platform.node(), boot.read_text(encoding="ascii") if boot.exists() else "")
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def all_groups(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return every rank's `ranks` (those of its pipeline, say), once each, in one order on all
    ranks.
    """
    everyone: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(ranks))
    return sorted({group for group in everyone if group is not None})


def cpu_group_of(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Return a group on the CPU of this rank's `ranks`; all ranks of the job call this together,
    and each belongs to one group.

    Only such groups can stand beside NCCL's. Where a job is bound to GPUs, torch lets ranks outside
    of a new group, even of one on the CPU, take part in a split of NCCL's communicator, but not
    those inside. NCCL waits until all ranks have come to as many splits. Here all of them are
    outside of as many groups; with a group for every two neighbours of a pipeline of three, its
    ends would be outside of more than its middle, and the job would stand still.
    """
    found: dist.ProcessGroup | None = None
    for members in all_groups(ranks):
        group = dist.new_group(list(members), backend="gloo", timeout=timeout)
        if members == tuple(ranks):
            found = group
    assert found is not None
    return found


def _new_group(pair: list[int], device: str, timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup
    if device == "cpu":
        group = dist.new_group(pair, backend="gloo", timeout=timeout)
        return group
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_THREAD_BLOCKS
    group = dist.new_group(pair, backend="nccl", timeout=timeout, pg_options=options)
    return group


class SendQueue:
    """Sends on one channel; tensors are kept until they have left."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._under_way: dict[Message, tuple[Handle, torch.Tensor]] = {}

    def send(self, message: Message, chunk: int, tensor: torch.Tensor) -> None:
        """Begin to send; `chunk` is this rank's that made the tensor."""
        for oldest, (work, _) in [*self._under_way.items()]:
            if not work.is_completed():
                break
            self._under_way.pop(oldest, None)
        tensor = tensor.detach().contiguous()
        transfer = transfer_of(MessageEnd.SEND, self.channel, message, chunk)
        self._under_way[message] = start(transfer, tensor, self.channel.way), tensor

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
        self._expected: deque[tuple[Message, int]] = deque()
        self._posted: deque[tuple[Message, Handle, torch.Tensor]] = deque()
        self._ahead = 0
        self._arrived: dict[Message, torch.Tensor] = {}

    def expect(self, messages: Iterable[tuple[Message, int]], *, post: bool = True) -> None:
        """Say what comes, each message with this rank's chunk that needs it.

        With `post` receives are posted ahead by themselves (on the CPU), otherwise when `post` is
        called or the message is taken.
        """
        self._expected.extend(messages)
        self._ahead = self.channel.way.receives_ahead if post else 0
        self._post_up_to(self._ahead)

    def post(self, message: Message) -> None:
        """Post receives until that of `message` is posted."""
        if self.channel.way.waits_for_sender:
            return
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
            if tensor.is_cuda:
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
        transfer = transfer_of(MessageEnd.RECEIVE, self.channel, message, chunk)
        with self.channel.way.receiving():
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            work = start(transfer, tensor, self.channel.way)
        self._posted.append((message, work, tensor))


def transfer_of(operation: MessageEnd, channel: Channel, message: Message, chunk: int) -> Transfer:
    """Return one end of a message of a channel."""
    return Transfer(
        operation=operation,
        direction="forward" if message.kind is ActionKind.FORWARD else "backward",
        peer=channel.peer,
        microbatch=message.microbatch,
        chunk=chunk,
    )


@lru_cache(maxsize=64)
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


@lru_cache(maxsize=64)
def most_under_way(plan: Plan, link: Link) -> int:
    """Return how many messages of a link are sent at most before one proves that they came.

    Rank 0 of 1F1B with P=2 does F0 F1 B0 F2 B1 …: gradient 0 proves that output 0 came, so two
    outputs are under way at most. Sends that a plan puts later make it no more.
    """
    proofs = proved_by(plan, link.sender)
    under_way: set[Message] = set()
    most = 0
    for action in plan.work_of(link.sender):
        needed, made = message_needed(plan.shape, action), message_made(plan.shape, action)
        if needed is not None:
            under_way -= set(proofs.get(needed, ()))
        if made is not None and link_of(plan.shape, made) == link:
            under_way.add(made)
            most = max(most, len(under_way))
    return most


class Mail:
    """All messages of this rank in one step whose order is known beforehand.

    `shape` and `dtype` are those of every message. What a stage hands to another one of the same
    rank (the turn of a V) stays here.
    """

    def __init__(self, channels: Channels, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._outboxes = {channel.link: SendQueue(channel) for channel in channels.outgoing()}
        self._inboxes = {
            channel.link: Inbox(channel, shape, dtype, channels.device)
            for channel in channels.incoming()
        }
        self._at_home: dict[Message, torch.Tensor] = {}
        self._channels = channels
        self._kind = tuple(shape), dtype
        self._proved: dict[Message, list[Message]] = {}

    def expect(self, plan: Plan) -> None:
        """Learn a step's messages; where the plan names its receives, they wait for `post`."""
        place = self._place = plan.shape
        self._proved = dict(proved_by(plan, self._channels.rank))
        for channel in self._channels.own:
            channel.way.reserve(self._room(plan, channel.link), *self._kind)
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
        end_step(self._channels)

    def _room(self, plan: Plan, link: Link) -> int:
        return most_under_way(plan, link)


def end_step(channels: Channels) -> None:
    """Tell all ways that this rank has received everything, then hear it of the others."""
    for channel in channels.incoming():
        channel.way.end_step()
    for channel in channels.outgoing():
        channel.way.end_step()
