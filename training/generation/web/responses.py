"""Responses: JSON, errors in OpenAI's shape, streams of events, and clients that are gone.

A response is made while somebody listens on the connection. When the client goes first, the work is
cancelled, and with it the rows that it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from training.generation.service import EndedError

Made = TypeVar("Made")


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response whose body is `content` as JSON."""
    return Response(
        orjson.dumps(content),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


class RequestError(Exception):
    """One sentence for a client, with the status of the response."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the error as a response."""
        headers = {"retry-after": "1"} if self.status == 429 else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(), status=self.status, headers=headers)


_ENDED = RequestError("the server has ended; ask again later", status=503)


class GoneError(Exception):
    """The client has closed its connection."""


async def while_connected(receive: Receive, work: Awaitable[Made]) -> Made:
    """Await `work` as long as the client is there; raises GoneError when it is not."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one JSON object each, closed by ``[DONE]`` as OpenAI's clients expect."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[object], close: Callable[[], None]) -> None:
        """Hold what streams; `close` is called at the end, however it comes."""
        super().__init__()
        self._events = events
        self._close = close
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what comes until the end or until the client goes."""
        del scope
        try:
            with suppress(GoneError, OSError):
                await while_connected(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_part(send, b"data: " + orjson.dumps(event) + b"\n\n")
        except EndedError:
            await _send_part(send, b"data: " + orjson.dumps(_ENDED.body()) + b"\n\n")
        else:
            await _send_part(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def respond_while_connected(
    request: Request, work: Awaitable[Response], close: Callable[[], None]
) -> Response:
    """Give the response that `work` makes; `close` is called at the end, however it comes."""
    try:
        return await while_connected(request.receive, work)
    except GoneError:
        return Response(status_code=499)  # nobody reads it
    finally:
        close()
