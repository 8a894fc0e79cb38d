"""Where helpers come to: every pipeline rank listens, the first one of the job tells what it is.

    helper → rank 0 of the job       JOIN       ← DESCRIPTION: flags, addresses, its number
    helper → each rank it helps      HELLO      ← WELCOME: what that rank's stage is made of
    helper → stage 0                 READY      from its next step on it is counted with

No rank waits for a helper, and a helper that goes is forgotten.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from megascan.errors import InputError
from training.pipeline.frames import Connection, Frame, FrameKind, read_frame, write_frame

_MANNERS_S = 30.0
"""How long a stranger may take to say what it wants."""

Address = tuple[str, int]


class Reception:
    """Takes helpers in on one rank.

    `welcome` is what each helper is told of this rank's stage, `receive` gets what it sends with
    its number, `describe` answers who asks for the job with the number that it is given (on the
    rank where helpers meet the job; elsewhere None).
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
        """Numbers of the helpers that are connected."""
        return (number for number, known in list(self.connections.items()) if known.is_open)

    def send(self, number: int, frame: Frame) -> None:
        """Send a helper something; nothing happens where it is gone."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.send(frame)

    def dismiss(self, number: int) -> None:
        """End the connection to a helper."""
        connection = self.connections.pop(number, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Take no one in any more and let all go."""
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
        """Hear what a stranger wants; whoever says nothing sensible is left."""
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
    """The address under which the other ranks' hosts reach this one."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing: asks the routing table
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return "127.0.0.1"
