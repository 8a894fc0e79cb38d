"""Responses: JSON by orjson, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.responses import Response


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
        """The error as OpenAI's clients read it."""
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
        """The error as a response."""
        headers = {"retry-after": "1"} if self.status == 429 else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(), status=self.status, headers=headers)
