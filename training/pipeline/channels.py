"""Messages between pipeline stages: one process group a channel, one way, in the sender's order.

Two ranks of a pipeline that hand tensors to each other have up to four channels: outputs forward
and gradients backward, either way where several chunks make the pipeline a ring. Each channel is a
process group of its own, so that no message waits for one of another channel, and the receiver
knows the order of its messages because it knows its sender's list of actions. What the hosts say
to each other beside it goes over a group of the whole pipeline on the CPU, by a tag a channel.

Sends return at once. On the CPU receives are posted ahead, a few a channel, and waited for when
they are used. Between GPUs of one host copy engines carry messages (`CopyWay`). Between hosts a
channel is an NCCL communicator of few thread blocks; a receive is a kernel that occupies them until
the message has come, so it is launched behind the compute that comes before it. Waiting holds up
the compute stream of a GPU, not the host.

**Copy engines.** A receive of NCCL occupies multiprocessors from its launch until the message has
come, and slows whatever computes beside it. With copy engines nothing but events waits. The
receiver has slots of memory that the sender's process writes to:

    sender      wait until the slot is free ── copy into it ── record "there"   → token on the CPU
    receiver    token came ── wait for "there" ── copy out of it ── record "free"

All of that is launched on streams beside the compute. Waiting for an event that was never recorded
is waiting for nothing, so each end must know what the other one has launched. The receiver knows it
by the token; the sender by the plan, which says how many messages are under way at most before
another message proves that they were taken (`most_under_way`). There are as many slots, and a step
ends with a token from the receiver: it has taken everything.

So nothing can stand still: a host waits for launches of the other host, never for a GPU, and what a
GPU waits for has been launched.
"""

from __future__ import annotations

import pickle
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from training.pipeline.plan import (
    ActionKind,
    Message,
    PipelineShape,
    Plan,
    message_made,
    message_needed,
)


class CopyEvent(Protocol):
    """A moment on a device that both processes know."""

    def record(self) -> None:
        """Set it to where the current stream is."""

    def wait(self) -> None:
        """Let the current stream wait for it."""

    def query(self) -> bool:
        """Tell whether it has come."""


class CopyDevice(Protocol):
    """Memory and events that another process of the host can open."""

    def slots(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for so many messages."""

    def event(self) -> CopyEvent:
        """Return an event that both processes can wait for."""

    def own_event(self) -> CopyEvent:
        """Return an event of this process."""

    def settle(self) -> None:
        """Wait until the device has done what it was given."""

    def offer(self, slots: torch.Tensor | None, events: Sequence[CopyEvent]) -> bytes:
        """Return what another process needs to open them."""

    def accept(self, offer: bytes) -> tuple[torch.Tensor | None, list[CopyEvent]]:
        """Open what another process offers."""

    def aside(self, reads: torch.Tensor | None = None) -> AbstractContextManager[object]:
        """Surround what runs on a second stream, once the current one has made `reads`."""


class CopyError(Exception):
    """These two processes cannot open each other's memory."""


@dataclass(frozen=True)
class Copied:
    """A copy that was launched."""

    event: CopyEvent

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self.event.wait()

    def is_completed(self) -> bool:
        """Tell whether it is done."""
        return self.event.query()


class Line:
    """Words from one process to another on the CPU, in order; each of the two makes one.

    `tag` tells them from those of other lines of the same group.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self._group = group
        self._peer = peer
        self._tag = tag

    def send(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to send; the tensor must stay until it has left."""
        work = dist.isend(tensor, self._peer, group=self._group, tag=self._tag)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor) -> None:
        """Wait for a tensor."""
        dist.recv(tensor, self._peer, group=self._group, tag=self._tag)

    def tell(self, said: bytes) -> None:
        """Send bytes of any number, and wait until they have left."""
        self.send(torch.tensor([len(said)])).wait()
        if said:
            self.send(torch.frombuffer(bytearray(said), dtype=torch.uint8)).wait()

    def hear(self) -> bytes:
        """Wait for bytes."""
        size = torch.empty(1, dtype=torch.int64)
        self.receive(size)
        content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            self.receive(content)
        return content.numpy().tobytes()


class CopyWay:
    """One way between two GPUs; the processes at its ends make one each.

    They talk on `line`, which nothing else uses.
    """

    receives_ahead = 0
    waits_for_sender = True

    def __init__(self, line: Line, device: CopyDevice, *, sends: bool) -> None:
        self._line = line
        self._device = device
        self._sends = sends
        self._slots: torch.Tensor | None = None
        self._there: list[CopyEvent] = []
        self._free: list[CopyEvent] = []
        self._count = 0
        self._told: list[tuple[dist.Work, torch.Tensor]] = []

    def reserve(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Have slots for so many messages; both ends call it alike, between steps.

        Raises CopyError on both ends where one cannot open the other's memory.
        """
        if self._slots is not None and len(self._slots) >= number and self._fits(shape, dtype):
            return
        self._device.settle()  # the slots that go may still be in use
        if self._sends:
            self._there = [self._device.event() for _ in range(number)]
            self._slots, self._free = self._accept()
            self._offer(None, self._there)
            self._agree(self._line.hear())
        else:
            self._free = [self._device.event() for _ in range(number)]
            self._slots = self._device.slots(number, shape, dtype)
            self._offer(self._slots, self._free)
            _, self._there = self._accept()
            self._line.tell(_OPENED)

    def receiving(self) -> AbstractContextManager[object]:
        """Return the stream on which receives begin and their memory is taken."""
        return self._device.aside()

    def send(self, tensor: torch.Tensor) -> Copied:
        """Copy a message into the next slot once the current stream has made it."""
        assert self._slots is not None
        slot = self._next_slot()
        with self._device.aside(tensor):
            self._free[slot].wait()
            self._slots[slot].copy_(tensor, non_blocking=True)
            self._there[slot].record()
            done = self._device.own_event()
        self._send_token()
        return Copied(done)

    def receive(self, tensor: torch.Tensor) -> Copied:
        """Wait for the sender's launch, then copy the next slot on the current stream."""
        assert self._slots is not None
        self._line.receive(_token())
        slot = self._next_slot()
        self._there[slot].wait()
        tensor.copy_(self._slots[slot], non_blocking=True)
        self._free[slot].record()
        return Copied(self._device.own_event())

    def end_step(self) -> None:
        """Have everything that was sent taken; the receiving end first, where a rank has both."""
        if self._sends:
            self._line.receive(_token())
        for work, _ in self._told:
            work.wait()
        self._told.clear()
        if not self._sends:
            self._send_token()
        self._count = 0

    def close(self) -> None:
        """Let go of the other end's memory and events; nothing is sent any more."""
        self._slots, self._there, self._free = None, [], []

    def _fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        slots = self._slots
        return slots is not None and slots.shape[1:] == tuple(shape) and slots.dtype == dtype

    def _next_slot(self) -> int:
        assert self._slots is not None
        self._count += 1
        return (self._count - 1) % len(self._slots)

    def _offer(self, slots: torch.Tensor | None, events: Sequence[CopyEvent]) -> None:
        """Tell the other end of memory and events; or of failure, and raise it here."""
        try:
            offer = self._device.offer(slots, events)
        except Exception as error:
            self._line.tell(b"")
            raise CopyError(str(error)) from error
        self._line.tell(offer)

    def _accept(self) -> tuple[torch.Tensor | None, list[CopyEvent]]:
        """Open what the other end offers; or tell it of failure, and raise it here."""
        offer = self._line.hear()
        self._agree(offer)
        try:
            return self._device.accept(offer)
        except Exception as error:
            self._line.tell(b"")
            raise CopyError(str(error)) from error

    def _agree(self, heard: bytes) -> None:
        if not heard:
            raise CopyError("the other end cannot open this one's memory")

    def _send_token(self) -> None:
        token = _token()
        self._told.append((self._line.send(token), token))


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


_OPENED = b"opened"


class Gpu:
    """The current GPU."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def slots(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for so many messages."""
        return torch.empty((number, *shape), dtype=dtype, device=self._device)

    def event(self) -> CopyEvent:
        """Return an event that both processes can wait for."""
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def own_event(self) -> CopyEvent:
        """Return an event of this process."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        torch.cuda.synchronize(self._device)

    def offer(self, slots: torch.Tensor | None, events: Sequence[CopyEvent]) -> bytes:
        """Return what another process needs to open them."""
        self.settle()  # an event must have been recorded before it is opened
        arguments = None if slots is None else reductions.reduce_tensor(slots)[1]  # type: ignore[no-untyped-call]
        handles = [cast(Any, event).ipc_handle() for event in events]
        return pickle.dumps((arguments, handles))

    def accept(self, offer: bytes) -> tuple[torch.Tensor | None, list[CopyEvent]]:
        """Open what another process offers, for the streams of this GPU."""
        arguments, handles = pickle.loads(offer)
        slots = None
        if arguments is not None:
            opened = list(arguments)
            opened[_DEVICE] = self._device.index
            slots = reductions.rebuild_cuda_tensor(*opened)  # type: ignore[no-untyped-call]
        kind: Any = torch.cuda.Event
        return slots, [kind.from_ipc_handle(self._device, handle) for handle in handles]

    @contextmanager
    def aside(self, reads: torch.Tensor | None = None) -> Iterator[None]:
        """Surround what runs on a second stream, once the current one has made `reads`."""
        if reads is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        if reads is not None:
            reads.record_stream(self._stream)


def device_for(device: str) -> Callable[[], CopyDevice] | None:
    """Return what opens this process's device for copies; None where a process group does."""
    return None if device == "cpu" else Gpu


_DEVICE = 6
"""Which argument of `rebuild_cuda_tensor` is the GPU whose streams are to use the memory."""

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
        self._open_device = device_for(device)
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
