"""An end of a TCP stream that is never idle in either direction, for `benchmarks.wires`.

    python -m benchmarks.wire_stream listen 10.78.0.5 5201
    python -m benchmarks.wire_stream connect 10.78.0.5 5201

Each says `ready` once it listens or is connected, and goes on until it is ended.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence

CHUNK_BYTES = 256 << 10


def _send(connection: socket.socket) -> None:
    data = bytes(CHUNK_BYTES)
    while True:
        connection.sendall(data)


def _exchange(connection: socket.socket) -> None:
    """Send and receive until the other end is gone."""
    threading.Thread(target=_send, args=(connection,), daemon=True).start()
    while connection.recv(CHUNK_BYTES):
        pass


def main(arguments: Sequence[str]) -> int:
    """Be one end."""
    if len(arguments) != 3 or arguments[0] not in ("listen", "connect"):
        print(__doc__, file=sys.stderr)
        return 2
    address = arguments[1], int(arguments[2])
    if arguments[0] == "connect":
        connection = socket.create_connection(address)
        print("ready", flush=True)
    else:
        listening = socket.create_server(address)
        print("ready", flush=True)
        connection, _ = listening.accept()
    _exchange(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
