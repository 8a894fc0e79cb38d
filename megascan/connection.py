"""Connections that end when their client leaves a request unfinished.

uvicorn waits without limit for the rest of a request, so that any client can hold as many
connections as there are. Give `Connection` to uvicorn's `Config` as `http`. It bounds the time for
the head of a request, from the first moment of a connection or the first byte of a later request.
An application that reads a body has to bound that itself (`PATIENCE_S`); when it answers without
having read the whole body, the connection ends.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megascan.listening import PATIENCE_S

_FAREWELL_S = 1.0
"""Time for a client that is still sending to read the answer."""


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, without connections of clients that never finish a request."""

    _ending: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop waiting when a request is complete; begin to wait when part of the next arrives."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """End the connection if the rest of the request's body is still missing."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(_FAREWELL_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a request."""
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
