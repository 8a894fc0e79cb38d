"""Messages between pipeline stages: one process group a channel, one way, in the sender's order.

Two ranks of a pipeline that hand tensors to each other have up to four channels: one for outputs
and one for gradients, both in either direction where several chunks make the pipeline a ring. Each
channel is a process group of its own, so that no message waits for a message of another channel.
The receiver knows the order of messages because it knows the sender's list of actions. Headers and
tokens of all channels go over CPU groups of the whole pipeline, where each channel has a tag.

Sends return at once. On the CPU receives are posted ahead, a few a channel, and waited for when
they are used. Between GPUs of one host copy engines carry messages (`copies.py`). Between hosts a
channel is an NCCL communicator of few thread blocks. An NCCL receive is a kernel that occupies
these thread blocks until the message has come, so it is launched behind earlier compute. Waiting
holds up the compute stream of a GPU, not the host.
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
"""Receives posted on a channel at a time: the message under way and the next one."""

MAX_THREAD_BLOCKS = 4
"""Thread blocks of a channel's NCCL kernels; a receive that waits occupies all of them."""


class MessageEnd(StrEnum):
    """The two ends of a message."""

    SEND = "send"
    RECEIVE = "recv"


@dataclass(frozen=True, order=True, kw_only=True)
class Link:
    """A direction between two ranks of a pipeline, for outputs (`forward`) or for gradients."""

    sender: int
    receiver: int
    forward: bool


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One end of a message: send or receive, the peer, and the work of this rank it belongs to."""

    operation: MessageEnd
    direction: str
    """``forward`` (an output) or ``backward`` (a gradient)."""
    peer: int
    """Global rank of the other end."""
    microbatch: int
    chunk: int
    """The chunk of this rank that made or needs the message."""


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until the message is through: the host on the CPU, the current stream on a GPU."""

    def is_completed(self) -> bool:
        """Return whether the message is through."""


class Way(Protocol):
    """How messages go from one rank to another, in the order in which they are sent."""

    receives_ahead: int
    """How many receives are begun before they are used."""
    waits_for_sender: bool
    """Whether `receive` blocks until the sender is there, so that it must not be called early."""

    def receiving(self) -> AbstractContextManager[object]:
        """Return a context in which to take memory for a receive and begin it."""

    def reserve(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Make room for `number` messages under way; both ends call this alike, between steps."""

    def send(self, tensor: torch.Tensor) -> Handle:
        """Begin to send a tensor that the current stream makes."""

    def receive(self, tensor: torch.Tensor) -> Handle:
        """Begin to receive on the current stream."""

    def end_step(self) -> None:
        """Note that all messages of a step were received; both ends call this, receivers first."""

    def close(self) -> None:
        """Release memory that is shared with the other end; nothing is sent any more."""


class GroupWay:
    """Messages between two ranks by a process group of these two."""

    waits_for_sender = False

    def __init__(self, group: dist.ProcessGroup, peer: int, device: str) -> None:
        self._group = group
        self._peer = peer
        # On a GPU a posted receive is a kernel that spins. The first launch of any other kernel
        # waits for the spinning one, and the sender may be waiting for that launch.
        self.receives_ahead = RECEIVES_AHEAD if device == "cpu" else 0

    def receiving(self) -> AbstractContextManager[object]:
        """Return an empty context: receives begin on the current stream."""
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
    """Begin one end of a message; every message of a plan goes through this function."""
    return way.send(tensor) if transfer.operation is MessageEnd.SEND else way.receive(tensor)


def link_of(shape: PipelineShape, message: Message) -> Link:
    """Return the link of a message; sender and receiver are equal where it stays on one rank."""
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
    """Carries headers that name the next message; None where the order is known beforehand."""


class Channels:
    """The channels of this rank's pipeline; made once, by all ranks of the job together.

    `ranks` are the global ranks of this rank's pipeline; attribute `rank` is its place among them.
    Tensors lie on `device`. With `announces` each channel gets a line for headers. A rank that
    waits for a message longer than `timeout` ends the job.
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
                # All ranks of the job make every group, in one order: with
                # `use_local_synchronization` ranks that belong to different numbers of groups would
                # wait for each other for ever.
                pair = [pipeline[link.sender], pipeline[link.receiver]]
                group = _new_group(pair, device, timeout)
                if dist.get_rank() not in pair:
                    continue
                peer = pair[1] if dist.get_rank() == pair[0] else pair[0]
                token_line = None
                if tokens is not None and host_of[pair[0]] == host_of[pair[1]]:
                    token_line = Line(tokens, peer, tag)
                header_line = None if headers is None else Line(headers, peer, tag)
                way = self._way(link, group, token_line, peer)
                self.own.append(Channel(link=link, way=way, peer=peer, headers=header_line))

    def outgoing(self) -> Iterator[Channel]:
        """Return the channels on which this rank sends."""
        return (channel for channel in self.own if channel.link.sender == self.rank)

    def incoming(self) -> Iterator[Channel]:
        """Return the channels on which this rank receives."""
        return (channel for channel in self.own if channel.link.receiver == self.rank)

    def close(self) -> None:
        """Release the other ranks' memory; the job has ended."""
        for channel in self.own:
            channel.way.close()

    def _way(self, link: Link, group: dist.ProcessGroup, line: Line | None, peer: int) -> Way:
        """Return how messages travel on a link; both ends choose the same."""
        sends = link.sender == self.rank
        copy_way = None if line is None else self._copy_way(line, peer, sends=sends)
        if copy_way is not None:
            return copy_way
        if self.device != "cpu":
            self._connect(group, peer, sends=sends)
        return GroupWay(group, peer, self.device)

    def _copy_way(self, line: Line, peer: int, *, sends: bool) -> CopyWay | None:
        """Return a way by copy engines; None where one end cannot open the other's memory."""
        assert self._open_device is not None
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
            return None
        return way

    def _connect(self, group: dist.ProcessGroup, peer: int, *, sends: bool) -> None:
        """Exchange one element, so that NCCL connects the two ranks now.

        NCCL connects two ranks when they first talk. While training, ranks talk in different orders
        and could wait for each other for ever; here all ranks connect in one order.
        """
        element = torch.zeros(1, device=self.device)
        if sends:
            dist.send(element, peer, group=group)
        else:
            dist.recv(element, peer, group=group)
        torch.cuda.synchronize(self.device)


def _hosts() -> list[object]:
    """Return, by global rank, a key of the rank's host (its name and boot id)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    own = (platform.node(), boot.read_text(encoding="ascii") if boot.exists() else "")
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def all_groups(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the different `ranks` that the ranks of the job pass (their pipelines, say), sorted.

    All ranks of the job call this together and get the same list.
    """
    everyone: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(ranks))
    return sorted({group for group in everyone if group is not None})


def cpu_group_of(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Return a CPU group of this rank's `ranks`; all ranks of the job call this together, and each
    rank belongs to one group.

    Next to NCCL only groups that divide the ranks like this work. Where a job is bound to GPUs,
    torch lets ranks outside of a new group, even of a CPU group, take part in a split of NCCL's
    communicator, but not ranks inside. NCCL waits until all ranks have come to equally many splits.
    Here every rank is outside of equally many groups. With a group for every two neighbours of a
    pipeline of three, its end ranks would be outside of more groups than its middle rank, and the
    job would hang.
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
        """Begin to send a tensor that this rank's `chunk` made."""
        for oldest, (work, _) in [*self._under_way.items()]:
            if not work.is_completed():
                break
            self._under_way.pop(oldest, None)
        tensor = tensor.detach().contiguous()
        transfer = transfer_of(MessageEnd.SEND, self.channel, message, chunk)
        self._under_way[message] = start(transfer, tensor, self.channel.way), tensor

    def settle(self, message: Message) -> None:
        """Release a sent message whose arrival another message proves; gloo does not report it."""
        sent = self._under_way.pop(message, None)
        if sent is not None:
            sent[0].wait()

    def drain(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._under_way.values():
            work.wait()
        self._under_way.clear()


class Inbox:
    """Receives on one channel, in the order given to `expect`."""

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
        """Learn what comes: messages in order, each with the chunk of this rank that needs it.

        With `post` the next receives are posted ahead (on the CPU); otherwise a receive is posted
        when method `post` is called or the message is taken.
        """
        self._expected.extend(messages)
        self._ahead = self.channel.way.receives_ahead if post else 0
        self._post_up_to(self._ahead)

    def post(self, message: Message) -> None:
        """Post receives up to and including the receive of `message`."""
        if self.channel.way.waits_for_sender:
            return
        while self._expected and message not in self._known():
            self._post_next()

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor; keep earlier messages until they are asked for.

        On a GPU the current stream waits, not the host.
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
    """Return this rank's end of a message on a channel."""
    return Transfer(
        operation=operation,
        direction="forward" if message.kind is ActionKind.FORWARD else "backward",
        peer=channel.peer,
        microbatch=message.microbatch,
        chunk=chunk,
    )


@lru_cache(maxsize=64)
def proved_by(plan: Plan, rank: int) -> dict[Message, list[Message]]:
    """Return, by message that a rank receives, the sent messages whose arrival it proves.

    Every rank works through its list in order, so a rank that sends a message has received all that
    its work up to there needed. Rank 1 of 1F1B with P=3 does F0 F1 B0 F2 B1 …: gradient 0 proves to
    rank 0 that outputs 0 and 1 came, output 2 proves to rank 2 that gradient 0 came. Each sent
    message is listed once, with the first proof.
    """
    shape = plan.shape
    found: dict[Message, list[Message]] = {}
    for other in range(shape.num_ranks):
        if other == rank:
            continue
        had: list[Message] = []
        for action in plan.work_of(other):
            needed, made = message_needed(shape, action), message_made(shape, action)
            if needed is not None and link_of(shape, needed).sender == rank:
                had.append(needed)
            if made is not None and shape.rank_of(made.stage) == rank:
                found[made], had = had, []
    return found


@lru_cache(maxsize=64)
def most_under_way(plan: Plan, link: Link) -> int:
    """Return the most messages of a link that are sent and not yet proved to have come.

    Rank 0 of 1F1B with P=2 does F0 F1 B0 F2 B1 …: gradient 0 proves that output 0 came, so at most
    two outputs are under way. A plan that names later sends does not raise the number.
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

    Every message has `shape` and `dtype`. A message between two stages of the same rank (the turn
    of a V) is kept here and not sent.
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
        """Learn a step's messages; where the plan names receives, each waits for `post`."""
        self._pipeline = plan.shape
        self._proved = dict(proved_by(plan, self._channels.rank))
        for channel in self._channels.own:
            channel.way.reserve(self._room(plan, channel.link), *self._kind)
        for link, inbox in self._inboxes.items():
            messages = plan.messages(link.sender, link.receiver, forward=link.forward)
            known = [(message, self._pipeline.chunk_of(message.stage)) for message in messages]
            inbox.expect(known, post=not plan.names_transfers)

    def send(self, link: Link, message: Message, chunk: int, tensor: torch.Tensor) -> None:
        """Begin to send a tensor that this rank's `chunk` made."""
        if link.sender == link.receiver:
            self._at_home[message] = tensor.detach()
        else:
            self._outboxes[link].send(message, chunk, tensor)

    def post(self, link: Link, message: Message) -> None:
        """Post the receive of a message."""
        self._inboxes[link].post(message)

    def take(self, link: Link, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor."""
        if link.sender == link.receiver:
            return self._at_home.pop(message)
        tensor = self._inboxes[link].take(message)
        for sent in self._proved.pop(message, ()):
            self._outboxes[link_of(self._pipeline, sent)].settle(sent)
        return tensor

    def drain(self) -> None:
        """Wait until all messages have left, then end the step on all ways."""
        for outbox in self._outboxes.values():
            outbox.drain()
        end_step(self._channels)

    def _room(self, plan: Plan, link: Link) -> int:
        return most_under_way(plan, link)


def end_step(channels: Channels) -> None:
    """Tell all senders that this rank has received everything; then hear so from receivers."""
    for channel in channels.incoming():
        channel.way.end_step()
    for channel in channels.outgoing():
        channel.way.end_step()
