"""What stands before every endpoint: who may ask, from where, and that nobody sees a traceback."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from training.generation.web.responses import RequestError

_LOG = logging.getLogger(__name__)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# Says only whether the server runs; those who look after it ask without a token.
_OPEN_PATHS = frozenset({"/health"})
_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


class Guard:
    """Checks Host, Origin and token of a request before the application sees it.

    A page of another site can make a browser send requests here: its name resolved to a loopback
    address gives it away in Host, its own address in Origin. With a token, which such a page does
    not have, any Host will do: servers are known by many names.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._hosts = _LOOPBACK | set(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            self._check(scope)
        except RequestError as error:
            await error.response()(scope, receive, guarded)
            return
        try:
            await self._app(scope, receive, guarded)
        except Exception:  # answered by the application already
            _LOG.exception("an endpoint failed")

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if self._token is None and _name_of(host) not in self._hosts:
            raise RequestError(
                f"Host is {host[:100]!r}, which is no name of this server; ask by its own address",
                status=403,
            )
        if origin is not None and _place_of(origin) != host:
            raise RequestError(
                "Origin is another site's; pages of other sites may not ask this server", status=403
            )
        if self._token is None or scope["path"] in _OPEN_PATHS:
            return
        kind, _, given = headers.get(b"authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token):
            raise RequestError(
                "the token is missing or wrong; send Authorization: Bearer and the token",
                status=401,
                code="invalid_api_key",
            )


def _place_of(origin: str) -> str:
    """The host and port in an Origin header; empty when it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _name_of(host: str) -> str:
    """The name in a Host header, without its port; empty when it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
