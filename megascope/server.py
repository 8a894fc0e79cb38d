"""The page and its questions: guarded, bounded, one sentence for whatever is wrong.

Everything lies under /scope/. The page's files need no token. A question is POST /scope/api/<name>
with a JSON object and the token, answered by JSON or by a stream of frames. The token comes to the
page in the fragment of the address, which no browser sends anywhere, and is erased there at once.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megascan.errors import ConfigError, MegaScanError
from megascan.listening import PATIENCE_S, Gate

_LOG = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page")
LARGEST_BODY = 1 << 23
_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data: blob:; base-uri 'none';"
     b" form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)  # fmt: skip

Answer: TypeAlias = Mapping[str, object] | bytes | AsyncIterator[bytes]


class Backend(Protocol):
    """What stands behind the page: a folder of recordings, or a model that generates."""

    async def answer(self, name: str, body: Mapping[str, Any]) -> Answer:
        """Answer a question; ConfigError for a wrong one, KeyError for an unknown name."""


class Guard:
    """Checks Host, Origin and token of a request before the application sees it."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str]) -> None:
        self._app = app
        self._gate = Gate(hosts, token, "open the address that was printed")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with 401 or 403."""
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        asks = "/api/" in scope["path"]
        refusal = self._gate.refusal(scope["headers"], asks_token=asks)
        if refusal is not None:
            await _error(refusal.reason, refusal.status)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)


def _error(text: str, status: int) -> Response:
    return JSONResponse({"error": text}, status_code=status)


def build_app(backend: Backend, *, token: str, hosts: Collection[str] = ()) -> ASGIApp:
    """Return the application; `hosts` are names of this server in addition to the loopback's."""

    async def ask(request: Request) -> Response:
        try:
            body = await _read_body(request)
            found = await backend.answer(request.path_params["name"], body)
        except KeyError:
            return _error("there is no such question", 404)
        except MegaScanError as error:
            return _error(str(error), 400)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            _LOG.exception("an answer failed")
            return _error("the server failed; its log says why", 500)
        return _response(found)

    app = Starlette(
        routes=[
            Route("/", lambda request: RedirectResponse("/scope/")),
            Route("/scope", lambda request: RedirectResponse("/scope/")),
            Route("/scope/api/{name}", ask, methods=["POST"]),
            Mount("/scope", StaticFiles(directory=PAGE, html=True)),
        ]
    )
    return Guard(app, token=token, hosts=hosts)


def _response(found: Answer) -> Response:
    if isinstance(found, bytes):
        return Response(found, media_type="application/octet-stream")
    if isinstance(found, Mapping):
        return JSONResponse(found)
    return StreamingResponse(found, media_type="application/octet-stream")


async def _read_body(request: Request) -> Mapping[str, Any]:
    parts, size = [], 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for part in request.stream():
                size += len(part)
                if size > LARGEST_BODY:
                    raise ConfigError(f"the body is larger than {LARGEST_BODY} bytes")
                parts.append(part)
    except TimeoutError:
        raise ConfigError(
            f"the body did not arrive within {PATIENCE_S:.0f} s; send it at once"
        ) from None
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise ConfigError("the body is no JSON") from error
    if not isinstance(body, dict):
        raise ConfigError("the body must be an object")
    return body


def address_of(listening: socket.socket, token: str) -> str:
    """Return the address to open, with the token in the fragment."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/scope/#token={token}"


_MOST_COLUMNS = 16
_LONGEST_NAME = 40


def to_parquet(body: Mapping[str, Any]) -> bytes:
    """Return the `columns` of a question as a Parquet file; ConfigError for what is no table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = body.get("columns")
    if not isinstance(columns, dict) or not 0 < len(columns) <= _MOST_COLUMNS:
        raise ConfigError(f"columns must be an object of 1 to {_MOST_COLUMNS} lists")
    for name, values in columns.items():
        is_flat = isinstance(values, list) and all(
            one is None or isinstance(one, int | float | str) for one in values
        )
        if not is_flat or len(name) > _LONGEST_NAME:
            raise ConfigError(f"column {name[:_LONGEST_NAME]!r} must be a list of numbers or texts")
    try:
        table = pa.table({name: pa.array(values) for name, values in columns.items()})
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ConfigError(f"the columns make no table ({str(error)[:100]})") from error
    content = io.BytesIO()
    pq.write_table(table, content)
    return content.getvalue()
