"""The application: who may ask, from where, and which path is answered by what."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megascan.listening import Gate
from training.generation.service import EndedError, RequestOutcome
from training.generation.web import chat, completions, megatron_api
from training.generation.web.bodies import RequestError, ServedModel, json_response

_LOG = logging.getLogger(__name__)
# /health says only whether the server runs; operators may ask it without a token.
_OPEN_PATHS = frozenset({"/health"})
_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


class Guard:
    """Checks Host, Origin and token of a request before the application sees it.

    With a token any Host is accepted: servers have many names, and a page of another site does not
    have the token.
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


__all__ = ["ServedModel", "build_app"]

_Endpoint = Callable[[Request, ServedModel], Awaitable[Response]]


def build_app(
    model: ServedModel, *, token: str | None = None, hosts: Collection[str] = ()
) -> ASGIApp:
    """Build the whole HTTP side; `hosts` are names of this server in addition to the loopback's."""
    started = int(time.time())

    async def models(request: Request) -> Response:
        del request
        return json_response({"object": "list", "data": [_described(model, started)]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != model.name:
            raise RequestError(
                f"the model {name[:64]!r} is not here; this server has {model.name!r}",
                status=404,
                code="model_not_found",
            )
        return json_response(_described(model, started))

    async def health(request: Request) -> Response:
        del request
        ended = model.service.is_ended
        return json_response({"status": "ended" if ended else "ok"}, status=503 if ended else 200)

    async def metrics(request: Request) -> Response:
        del request
        return PlainTextResponse(
            model.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    app = Starlette(
        routes=[
            Route("/v1/completions", _bound(completions.complete, model), methods=["POST"]),
            Route("/v1/chat/completions", _bound(chat.chat, model), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", one_model, methods=["GET"]),
            Route("/api", _bound(megatron_api.generate, model), methods=["PUT"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        exception_handlers={
            RequestError: _refused,
            EndedError: _ended,
            HTTPException: _not_found,
            Exception: _failed,
        },
    )
    return Guard(app, token=token, hosts=hosts)


def _bound(endpoint: _Endpoint, model: ServedModel) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request, model)
        except RequestError:
            model.service.metrics.count_request(RequestOutcome.REFUSED)
            raise

    return answer


async def _refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RequestError)
    return error.response()


async def _ended(request: Request, error: Exception) -> Response:
    """Answer a request whose engine has stopped meanwhile."""
    del request, error
    return RequestError("the server has ended; ask again later", status=503).response()


async def _failed(request: Request, error: Exception) -> Response:
    """Answer after an error in our code; starlette passes the error to the guard, to be logged."""
    del request, error
    return RequestError("the server failed; its log says why", status=500).response()


async def _not_found(request: Request, error: Exception) -> Response:
    """Answer for an unknown path or method, in the same shape as all errors."""
    assert isinstance(error, HTTPException)
    named = f"{request.method} {request.url.path[:100]}"
    return RequestError(f"{named} is not served here", status=error.status_code).response()


def _described(model: ServedModel, started: int) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "megascan",
        "max_model_len": model.limits.max_length,
    }
