"""Serve /metrics for Prometheus and /healthz for whoever keeps the watch alive.

GET /metrics    the newest values, text format
GET /healthz    200 while the watch looks at its files, 503 when it has not for a minute
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from megascan.errors import ConfigError
from megascan.watch.metrics import Gauges, exposition

MOST_SILENT_S = 60.0
"""A watch that has not looked for so long is stuck; a verdict takes seconds."""
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Pulse:
    """When the watch last looked."""

    beaten: float = field(default_factory=time.monotonic)

    def beat(self) -> None:
        """Say that it does."""
        self.beaten = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Return whether the watch has looked lately."""
        return time.monotonic() - self.beaten < MOST_SILENT_S


class Endpoint:
    """An HTTP server on a thread. Raises ConfigError for a port that cannot be had."""

    def __init__(self, host: str, port: int, gauges: Gauges, pulse: Pulse) -> None:
        exposition(gauges)  # without the library, say so now

        class Handler(_Handler):
            pages: ClassVar[dict[str, Callable[[], tuple[HTTPStatus, bytes]]]] = {
                "/metrics": lambda: (HTTPStatus.OK, exposition(gauges)),
                "/healthz": lambda: _health(pulse),
            }

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--prometheus: cannot listen on {host}:{port} ({reason}); choose another port"
            ) from error
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away before it was answered: it asks again."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _health(pulse: Pulse) -> tuple[HTTPStatus, bytes]:
    if pulse.is_alive:
        return HTTPStatus.OK, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, b"the watch has not looked at its files for a minute\n"


class _Handler(BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, Callable[[], tuple[HTTPStatus, bytes]]]] = {}
    timeout = 10  # a client that says nothing does not hold a thread

    def do_GET(self) -> None:
        """Answer one request."""
        page = self.pages.get(self.path.partition("?")[0])
        status, body = page() if page else (HTTPStatus.NOT_FOUND, b"/metrics or /healthz\n")
        self.send_response(status)
        self.send_header("Content-Type", _TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing: a scrape every few seconds is no news."""
