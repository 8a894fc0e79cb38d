"""What a pipeline and its helpers say to each other: frames over a socket, sent without waiting.

A process group ends when one member dies, and a helper may die at any time; so ranks talk to
helpers over plain TCP. A frame is a kind, the step and microbatch it belongs to, and bytes.

    connection ──┬── reader thread: each frame goes to `receive`
                 └── writer thread: frames leave in the order of `send`, which returns at once

A connection that breaks says so once, by `lost`, and swallows what is sent from then on.

Every pipeline rank listens for helpers; rank 0 of the job also tells what the job is:

    helper → rank 0 of the job       JOIN       ← DESCRIPTION: flags, addresses, its number
    helper → each rank it helps      HELLO      ← WELCOME: what that rank's stage is made of
    helper → stage 0                 READY      the next step counts on this helper

No rank waits for a helper, and a helper that leaves is forgotten.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
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
    """To rank 0 of the job: asks what the job is."""
    DESCRIPTION = 2
    """Answer to JOIN: the job's flags, addresses of ranks, the helper's number."""
    HELLO = 3
    """To each rank that the helper helps: the helper's number."""
    WELCOME = 4
    """Answer to HELLO: what the rank's stage is made of."""
    READY = 5
    STEP = 6
    """Which microbatches the helper runs forward in this step."""
    WEIGHTS = 7
    BATCH = 8
    """A microbatch of data, for the first stage."""
    INPUT = 9
    """The input of the receiving rank's stage."""
    DONE = 10
    """The helper's step is over; how long a forward of a stage took (median)."""


class Frame(NamedTuple):
    """One message between a rank and a helper."""

    kind: FrameKind
    body: bytes | bytearray | memoryview = b""
    step: int = 0
    microbatch: int = 0

    @classmethod
    def of(cls, kind: FrameKind, said: object, *, step: int = 0) -> Frame:
        """Make a frame whose body is `said` as JSON."""
        return cls(kind, json.dumps(said, default=str).encode(), step)

    def said(self) -> dict[str, object]:
        """Return the JSON object in the body; InputError where the body holds none."""
        try:
            found = json.loads(bytes(self.body))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError(f"a helper's {self.kind.name} is no JSON object; end who sent it")
        return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in host memory; a tensor on a GPU is copied."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().data


def tensor_of(
    body: bytes | bytearray | memoryview, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return bytes as a tensor on the CPU; InputError where their number does not fit `shape`."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if len(body) != size:
        raise InputError(f"a helper sent {len(body)} bytes where {size} were expected; end it")
    return torch.frombuffer(body, dtype=dtype).reshape(shape)


Receive = Callable[[Frame], None]


class Connection:
    """One end of a socket, with its own threads for reading and writing."""

    def __init__(self, end: socket.socket) -> None:
        self.is_open = True
        self._socket = end
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._lost: Callable[[], None] | None = None
        self._guard = threading.Lock()

    def start(self, receive: Receive, lost: Callable[[], None]) -> None:
        """Begin to read and write; `receive` and `lost` are called on threads of the connection."""
        self._lost = lost
        for run in (self._write, lambda: self._read(receive)):
            threading.Thread(target=run, daemon=True, name="helper-connection").start()

    def send(self, frame: Frame) -> None:
        """Send a frame after all earlier frames, without waiting."""
        if self.is_open:
            self._outgoing.put(frame)

    def close(self) -> None:
        """End the connection when all frames have left; `lost` is not called."""
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
            with suppress(OSError):  # wake the reader; the other end may have closed already
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            if self._lost is not None:
                self._lost()


def write_frame(end: socket.socket, frame: Frame) -> None:
    """Send one frame and wait until the system has taken it."""
    body = memoryview(frame.body)
    end.sendall(_HEADER.pack(frame.kind, frame.step, frame.microbatch, body.nbytes))
    if body.nbytes:
        end.sendall(body)


def read_frame(end: socket.socket) -> Frame:
    """Wait for one frame; EOFError where the other end has closed, ValueError for other bytes."""
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


_MANNERS_S = 30.0
"""How long a new connection may take to send its first frame."""

Address = tuple[str, int]


class Reception:
    """Lets helpers connect to one rank.

    `welcome` tells each helper what this rank's stage is made of. `receive` is called with a
    helper's number and each frame that the helper sends. `describe` returns what to tell a new
    helper of the job, given the helper's number; it is None except on rank 0 of the job.
    """

    def __init__(
        self,
        welcome: dict[str, object],
        receive: Callable[[int, Frame], None],
        *,
        port: int = 0,
    ) -> None:
        self.connections: dict[int, Connection] = {}
        self.describe: Callable[[int], dict[str, object]] | None = None
        self._welcome = welcome
        self._receive = receive
        self._num_joined = 0
        host = own_address()
        try:
            self._server = socket.create_server((host, port))
        except OSError as error:
            raise InputError(
                f"--fbd-port {port}: cannot listen on {host}:{port} ({error.strerror}); take "
                "another port, or 0 for any that is free"
            ) from None
        self.address: Address = (host, self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="helper-reception").start()

    def open_numbers(self) -> Iterator[int]:
        """Return the numbers of the helpers that are connected."""
        return (number for number, known in list(self.connections.items()) if known.is_open)

    def send(self, number: int, frame: Frame) -> None:
        """Send a frame to a helper; do nothing if the helper is gone."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.send(frame)

    def dismiss(self, number: int) -> None:
        """End the connection to a helper."""
        connection = self.connections.pop(number, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Accept no more helpers and dismiss all."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for number in list(self.connections):
            self.dismiss(number)

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._meet, args=(end,), daemon=True).start()

    def _meet(self, end: socket.socket) -> None:
        """Read the first frame of a new connection; close it unless it is a JOIN or HELLO."""
        end.settimeout(_MANNERS_S)
        with suppress(OSError, EOFError, ValueError, InputError, TypeError):
            frame = read_frame(end)
            if frame.kind is FrameKind.JOIN and self.describe is not None:
                number, self._num_joined = self._num_joined, self._num_joined + 1
                write_frame(end, Frame.of(FrameKind.DESCRIPTION, self.describe(number)))
            elif frame.kind is FrameKind.HELLO:
                number = int(str(frame.said().get("number")))
                connection = Connection(end)
                self.connections[number] = connection
                connection.send(Frame.of(FrameKind.WELCOME, self._welcome))
                connection.start(lambda frame: self._receive(number, frame), lambda: None)
                return
        end.close()


def own_address() -> str:
    """Return the address under which the other ranks' hosts reach this host."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing, only asks the routing table
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return "127.0.0.1"
