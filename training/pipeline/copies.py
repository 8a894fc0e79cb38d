"""Messages between two GPUs of one host by copy engines.

A receive of NCCL occupies multiprocessors from its launch until the message has come, and slows
all other compute meanwhile. With copy engines nothing but events waits. The receiver has slots of
memory that the sender's process writes to:

    sender      wait until the slot is free ── copy into it ── record "there"   → token on the CPU
    receiver    token came ── wait for "there" ── copy out of it ── record "free"

All copies are launched on streams other than the compute stream. To wait for an event that was
never recorded is to wait for nothing, so each end must know what the other end has launched. The
receiver knows it by the token. The sender knows it by the plan, which says how many messages can be
under way before another message proves that they were taken (`channels.most_under_way`). There are
as many slots, and at the end of a step the receiver sends a token: it has taken everything.

So nothing can hang: a host waits for launches of the other host, never for a GPU, and what a GPU
waits for has been launched.
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
        """Set the event to where the current stream is."""

    def wait(self) -> None:
        """Let the current stream wait for the event."""

    def query(self) -> bool:
        """Return whether the event has come."""


class CopyDevice(Protocol):
    """Memory and events that another process of the host can open."""

    def slots(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for `number` messages."""

    def event(self) -> CopyEvent:
        """Return an event that both processes can wait for."""

    def own_event(self) -> CopyEvent:
        """Return an event of this process."""

    def settle(self) -> None:
        """Wait until the device is idle."""

    def offer(self, slots: torch.Tensor | None, events: Sequence[CopyEvent]) -> bytes:
        """Return what another process needs to open these slots and events."""

    def accept(self, offer: bytes) -> tuple[torch.Tensor | None, list[CopyEvent]]:
        """Open slots and events that another process offers."""

    def aside(self, reads: torch.Tensor | None = None) -> AbstractContextManager[object]:
        """Run what is inside on a second stream, once the current stream has made `reads`."""


class CopyError(Exception):
    """Two processes cannot open each other's memory."""


@dataclass(frozen=True)
class Copied:
    """A copy that was launched."""

    event: CopyEvent

    def wait(self) -> None:
        """Let the current stream wait for the copy."""
        self.event.wait()

    def is_completed(self) -> bool:
        """Return whether the copy is done."""
        return self.event.query()


class Line:
    """One end of an ordered line between two processes on the CPU; each process makes its end.

    `tag` keeps lines of the same group apart.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self._group = group
        self._peer = peer
        self._tag = tag

    def send(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to send; keep the tensor until the returned work is done."""
        work = dist.isend(tensor, self._peer, group=self._group, tag=self._tag)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor) -> None:
        """Wait for a tensor and write it into `tensor`."""
        dist.recv(tensor, self._peer, group=self._group, tag=self._tag)

    def tell(self, said: bytes) -> None:
        """Send any number of bytes, and wait until they have left."""
        self.send(torch.tensor([len(said)])).wait()
        if said:
            self.send(torch.frombuffer(bytearray(said), dtype=torch.uint8)).wait()

    def hear(self) -> bytes:
        """Wait for bytes that the other end tells, and return them."""
        size = torch.empty(1, dtype=torch.int64)
        self.receive(size)
        content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            self.receive(content)
        return content.numpy().tobytes()


class CopyWay:
    """One end of a way from one GPU to another; each of the two processes makes its end.

    The two ends talk on `line`, which nothing else uses.
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
        self._sent_tokens: list[tuple[dist.Work, torch.Tensor]] = []

    def reserve(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Make slots for `number` messages; both ends call this alike, between steps.

        Raises CopyError on both ends where one cannot open the other's memory.
        """
        if self._slots is not None and len(self._slots) >= number and self._fits(shape, dtype):
            return
        self._device.settle()  # the old slots may still be in use
        if self._sends:
            self._there = [self._device.event() for _ in range(number)]
            self._slots, self._free = self._accept()
            self._offer(None, self._there)
            self._check_opened(self._line.hear())
        else:
            self._free = [self._device.event() for _ in range(number)]
            self._slots = self._device.slots(number, shape, dtype)
            self._offer(self._slots, self._free)
            _, self._there = self._accept()
            self._line.tell(_OPENED)

    def receiving(self) -> AbstractContextManager[object]:
        """Return a context that runs on the second stream, for receives and their memory."""
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
        """Wait, on the sending end, until everything was taken; on the receiving end say so.

        A rank that receives and sends calls this on receiving ends first.
        """
        if self._sends:
            self._line.receive(_token())
        for work, _ in self._sent_tokens:
            work.wait()
        self._sent_tokens.clear()
        if not self._sends:
            self._send_token()
        self._count = 0

    def close(self) -> None:
        """Release the other end's memory and events; nothing is sent any more."""
        self._slots, self._there, self._free = None, [], []

    def _fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        slots = self._slots
        return slots is not None and slots.shape[1:] == tuple(shape) and slots.dtype == dtype

    def _next_slot(self) -> int:
        assert self._slots is not None
        slot = self._count % len(self._slots)
        self._count += 1
        return slot

    def _offer(self, slots: torch.Tensor | None, events: Sequence[CopyEvent]) -> None:
        """Offer slots and events to the other end; on failure tell it and raise CopyError."""
        try:
            offer = self._device.offer(slots, events)
        except Exception as error:
            self._line.tell(_FAILED)
            raise CopyError(str(error)) from error
        self._line.tell(offer)

    def _accept(self) -> tuple[torch.Tensor | None, list[CopyEvent]]:
        """Open what the other end offers; on failure tell it and raise CopyError."""
        offer = self._line.hear()
        self._check_opened(offer)
        try:
            return self._device.accept(offer)
        except Exception as error:
            self._line.tell(_FAILED)
            raise CopyError(str(error)) from error

    def _check_opened(self, heard: bytes) -> None:
        """Raise CopyError if the other end has told that it failed."""
        if heard == _FAILED:
            raise CopyError("the other end cannot open this one's memory")

    def _send_token(self) -> None:
        token = _token()
        self._sent_tokens.append((self._line.send(token), token))


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


_OPENED, _FAILED = b"opened", b""


class Gpu:
    """The current GPU."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def slots(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for `number` messages."""
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
        """Wait until the GPU is idle."""
        torch.cuda.synchronize(self._device)

    def offer(self, slots: torch.Tensor | None, events: Sequence[CopyEvent]) -> bytes:
        """Return what another process needs to open these slots and events."""
        self.settle()  # an event must have been recorded before it is opened
        arguments = None if slots is None else reductions.reduce_tensor(slots)[1]  # type: ignore[no-untyped-call]
        handles = [cast(Any, event).ipc_handle() for event in events]
        return pickle.dumps((arguments, handles))

    def accept(self, offer: bytes) -> tuple[torch.Tensor | None, list[CopyEvent]]:
        """Open slots and events that another process offers, for the streams of this GPU."""
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
        """Run what is inside on a second stream, once the current stream has made `reads`."""
        if reads is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        if reads is not None:
            reads.record_stream(self._stream)


def device_for(device: str) -> Callable[[], CopyDevice] | None:
    """Return what opens this process's device for copies; None on the CPU."""
    return None if device == "cpu" else Gpu


_DEVICE = 6
"""Position of the argument of `rebuild_cuda_tensor` that names the GPU to use the memory."""
