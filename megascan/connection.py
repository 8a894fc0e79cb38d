"""Connections that end when their client leaves a request unfinished.

uvicorn waits as long as it takes for the rest of a request, so that anybody who may connect can
hold as many connections as there are. Give `Connection` to its `Config` as `http`. What is read
here is the head of a request, from the first moment of a connection or the first byte of a later
request; whoever reads a body has to bound that itself (`PATIENCE_S`), and when it has answered
without having all of it, the connection ends.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megascan.listening import PATIENCE_S

_FAREWELL_S = 1.0
"""In which a client that is still sending can read what it was answered."""


class Connection(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, for clients that say what they want."""

    _ending: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Wait no more when a request is there; begin to when a part of the next one is."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """End the connection when the rest of the request's body would have to be waited for."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(_FAREWELL_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._ending is None:
            self._ending = self.loop.call_later(PATIENCE_S, self.transport.close)

    def _forget(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
