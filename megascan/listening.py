"""Decide where a server listens and which requests it answers: port, token, host names.

    request ── Host ── Origin ── token ──► application
                │        │         └─ 401: missing or wrong
                │        └─ 403: a page of another site asks
                └─ 403: by a name that is not this server's

A page of another site can make a browser send requests to a server on the loopback. Host then has
the other site's name, which it resolves to a loopback address, or Origin has its address; and the
page has no token.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megascan.errors import ConfigError, InputError, MissingError, UsageError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names under which only this machine can ask."""
PATIENCE_S = 60.0
"""Seconds in which a client must have said all of a request."""
_SHORTEST_TOKEN = 16


def require_server() -> None:
    """Raise MissingError unless the packages that serve pages and endpoints are installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingError(
            f'the package {error.name} is not installed: pip install "megascan[serve]"'
        ) from error


def token_for(host: str, file: Path | None) -> str | None:
    """Read the token that those who ask must send; None for a server that was given no file.

    Raises UsageError where other machines may ask and there is no file, InputError for a file that
    holds no token.
    """
    if file is None:
        if host not in LOOPBACK:
            raise UsageError(
                f"--host {host} lets other machines ask: give --token-file, a file with a token "
                "that they must send"
            )
        return None
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the token in {file} ({error}); mend --token-file") from error
    if len(token) < _SHORTEST_TOKEN or len(token.split()) != 1:
        raise InputError(
            f"{file} must hold one word of at least {_SHORTEST_TOKEN} letters; write a random one"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port. Raises ConfigError if the port cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error}); choose another --port or --host"
        ) from error
    return listening


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered: the HTTP status, and a sentence."""

    status: int
    reason: str


@dataclass(frozen=True)
class Gate:
    """Who may ask a server.

    `names` are the host names that requests may use in addition to LOOPBACK, None for any name;
    `token` is the token that clients must send, None if no token is needed.
    """

    names: Collection[str] | None
    token: str | None
    token_hint: str = "send Authorization: Bearer and the token"
    """Words that tell clients how to send the token."""

    def refusal(
        self, headers: Iterable[tuple[bytes, bytes]], *, asks_token: bool = True
    ) -> Refusal | None:
        """Return why a request with these headers is refused; None if it may pass.

        `asks_token` is False for pages that need no token.
        """
        said = {name: value.decode("latin-1") for name, value in headers}
        host, origin = said.get(b"host", ""), said.get(b"origin")
        if self.names is not None and _name_of(host) not in LOOPBACK | set(self.names):
            return Refusal(
                403,
                f"Host is {host[:100]!r}, which is no name of this server; ask by its own address",
            )
        if origin is not None and _place_of(origin) != host:
            return Refusal(
                403, "Origin is another site's; pages of other sites may not ask this server"
            )
        if self.token is None or not asks_token:
            return None
        kind, _, given = said.get(b"authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        return Refusal(401, f"the token is missing or wrong; {self.token_hint}")


def _place_of(origin: str) -> str:
    """Return the host and port in an Origin header; "" if it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
