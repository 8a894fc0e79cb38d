"""What stands before every endpoint: who may ask, from where, and that nobody sees a traceback."""

from __future__ import annotations

import logging
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megascan.listening import Gate
from training.generation.web.responses import RequestError

_LOG = logging.getLogger(__name__)
# Says only whether the server runs; those who look after it ask without a token.
_OPEN_PATHS = frozenset({"/health"})
_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


class Guard:
    """Checks Host, Origin and token of a request before the application sees it.

    With a token, which a page of another site does not have, any Host will do: servers are known
    by many names.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._gate = Gate(hosts if token is None else None, token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        is_open = scope["path"] in _OPEN_PATHS
        refusal = self._gate.refusal(scope["headers"], asks_token=not is_open)
        if refusal is not None:
            code = "invalid_api_key" if refusal.status == 401 else None
            error = RequestError(refusal.reason, status=refusal.status, code=code)
            await error.response()(scope, receive, guarded)
            return
        try:
            await self._app(scope, receive, guarded)
        except Exception:  # answered by the application already
            _LOG.exception("an endpoint failed")
