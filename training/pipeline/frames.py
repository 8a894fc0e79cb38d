"""What a pipeline and its helpers say to each other: frames over a socket, neither waiting.

A process group ends with its first member that dies, a helper may die at any time; so helpers are
talked to over plain TCP. A frame is a kind, the step and microbatch it belongs to, and bytes.

    connection ──┬── reader thread: each frame goes to `receive`
                 └── writer thread: frames leave in the order of `send`, which returns at once

A connection that breaks says so once, by `lost`, and swallows what is sent from then on.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import torch

from megascan.errors import InputError

_HEADER = struct.Struct("<BqqQ")
_LARGEST_BYTES = 1 << 40


class FrameKind(IntEnum):
    """What a frame is; helpers send JOIN, HELLO, READY, INPUT and DONE, ranks send the others."""

    JOIN = 1
    """To the meeting place: what is this job?"""
    DESCRIPTION = 2
    HELLO = 3
    """To each rank that is to be helped: the helper's number."""
    WELCOME = 4
    """What that rank's stage is made of."""
    READY = 5
    STEP = 6
    """Which microbatches the helper runs forward in this step."""
    WEIGHTS = 7
    BATCH = 8
    """A microbatch of data, for the first stage."""
    INPUT = 9
    """The input of the receiving rank's stage."""
    DONE = 10
    """The helper's step is over; how long a microbatch took."""
    SORRY = 11
    """A sentence: why this helper cannot help."""


class Frame(NamedTuple):
    """One thing said."""

    kind: FrameKind
    body: bytes | bytearray | memoryview = b""
    step: int = 0
    microbatch: int = 0

    @classmethod
    def of(cls, kind: FrameKind, said: object, *, step: int = 0) -> Frame:
        """Make a frame of something that JSON can say."""
        return cls(kind, json.dumps(said, default=str).encode(), step)

    def said(self) -> dict[str, object]:
        """Return what a frame of JSON says; InputError for what is none."""
        try:
            found = json.loads(bytes(self.body))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(f"a helper's {self.kind.name} is no JSON object; end who sent it")
        return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; from a GPU through a copy in host memory."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.cpu().numpy())


def tensor_of(
    body: bytes | bytearray | memoryview, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor on the CPU that these bytes are; InputError where their number differs."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if len(body) != size:
        raise InputError(f"a helper sent {len(body)} bytes where {size} were expected; end it")
    return torch.frombuffer(body, dtype=dtype).reshape(shape)


Receive = Callable[[Frame], None]


class Connection:
    """One end of a socket with a reader and a writer of its own."""

    def __init__(self, end: socket.socket) -> None:
        self.is_open = True
        self._socket = end
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._lost: Callable[[], None] | None = None
        self._guard = threading.Lock()

    def start(self, receive: Receive, lost: Callable[[], None]) -> None:
        """Begin to read and write; both callables are called from threads of the connection."""
        self._lost = lost
        for run in (self._write, lambda: self._read(receive)):
            threading.Thread(target=run, daemon=True, name="helper-connection").start()

    def send(self, frame: Frame) -> None:
        """Have a frame leave after those before it; never waits."""
        if self.is_open:
            self._outgoing.put(frame)

    def close(self) -> None:
        """End the connection once what was sent has left; `lost` is not called."""
        self._lost = None
        self._outgoing.put(None)

    def _read(self, receive: Receive) -> None:
        try:
            while True:
                receive(read_frame(self._socket))
        except (OSError, EOFError, ValueError, InputError):
            self._break()

    def _write(self) -> None:
        try:
            while (frame := self._outgoing.get()) is not None:
                write_frame(self._socket, frame)
        except OSError:
            pass
        self._break()

    def _break(self) -> None:
        with self._guard:
            was_open, self.is_open = self.is_open, False
        self._outgoing.put(None)
        if was_open:
            with suppress(OSError):  # wakes the reader; the other end may have closed already
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            if self._lost is not None:
                self._lost()


def write_frame(end: socket.socket, frame: Frame) -> None:
    """Send one frame and wait until it has been taken over."""
    body = memoryview(frame.body)
    end.sendall(_HEADER.pack(frame.kind, frame.step, frame.microbatch, body.nbytes))
    if body.nbytes:
        end.sendall(body)


def read_frame(end: socket.socket) -> Frame:
    """Wait for one frame; EOFError at the end, ValueError for what is no frame."""
    kind, step, microbatch, size = _HEADER.unpack(_read_exactly(end, _HEADER.size))
    if size > _LARGEST_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return Frame(FrameKind(kind), _read_exactly(end, size), step, microbatch)


def _read_exactly(end: socket.socket, size: int) -> bytearray:
    body = bytearray(size)
    view = memoryview(body)
    while view:
        got = end.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return body
