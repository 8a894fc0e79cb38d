"""Messages between two GPUs of one host by copy engines.

A receive of NCCL occupies multiprocessors from its launch until the message has come, and slows
whatever computes beside it. With copy engines nothing but events waits. The receiver has slots of
memory that the sender's process writes to:

    sender      wait until the slot is free ── copy into it ── record "there"   → token on the CPU
    receiver    token came ── wait for "there" ── copy out of it ── record "free"

All of that is launched on streams beside the compute. Waiting for an event that was never recorded
is waiting for nothing, so each end must know what the other one has launched. The receiver knows it
by the token; the sender by the plan, which says how many messages are under way at most before
another message proves that they were taken (`channels.most_under_way`). There are as many slots,
and a step ends with a token from the receiver: it has taken everything.

So nothing can stand still: a host waits for launches of the other host, never for a GPU, and what a
GPU waits for has been launched.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions


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
