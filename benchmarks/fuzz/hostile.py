"""What a hostile client sends to MegaScope: questions of odd values, broken HTTP, any bytes.

Each depends on its number and the seed alone, so any of them can be made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.fuzz.damage import damaged

NAMES = ("state", "series", "table", "weights", "request", "parquet", "ask", "tokenize", "x")
VALUES: tuple[object, ...] = (
    None, True, -1, 0, 3, 1e308, 2**80, float("nan"), "residual", "rms", "x" * 300, [], [1, 2],
    [[1]], {}, {"a": [1]}, {"a": [[1]], "b": "x"}, "run", "attention", "lens", "\ud800", "\0",
    ["fc1"], [{"place": "fc1", "kind": "flip", "amount": 1}], [{"kind": "noise"}],
)  # fmt: skip
FIELDS = ("do", "run", "layer", "heads", "rows", "prompt", "max_tokens", "places", "reduction",
          "place", "iteration", "dp", "gradient", "text", "columns", "interventions", "every",
          "first", "layers", "reductions", "per_token", "temperature", "replace_from")  # fmt: skip
_STRIPS = ("residual", "fc1", "neurons", "query", "key", "value", "context", "qkv", "embedding")
_KINDS = ("noise", "scale_noise", "scale", "offset", "zero", "replace", "flip")
_AMOUNTS = (0, 1, -1, 1e-30, 3, 1000, 1e6, -1e6)
_REDUCTIONS = ("rms", "max", "mean", "zeros", "entropy", "pixels")


@dataclass(frozen=True)
class Message:
    """Bytes to a server."""

    content: bytes
    is_whole: bool
    """Whether it is a whole request of HTTP, which has to be answered."""
    hangs_up: bool = False
    """Whether the client goes without its answer."""


def question(draws: Random) -> bytes:
    """A body: fields with odd values, or broken JSON, or any bytes."""
    kind = draws.random()
    if kind < 0.1:
        return draws.randbytes(draws.randrange(60))
    body = {draws.choice(FIELDS): draws.choice(VALUES) for _ in range(draws.randrange(7))}
    content = bytearray(json.dumps(body).encode())
    if kind < 0.3:
        for _ in range(3):
            content[draws.randrange(len(content))] = draws.randrange(256)
    return bytes(content)


def command(draws: Random, newest: int) -> Mapping[str, object]:
    """A command to a model that a session mostly carries out; `newest` is the newest run's id."""
    run = max(0, newest - draws.choice((0, 0, 0, 1, 2, 9)))
    match draws.choice(("run", "run", "run", "attention", "lens", "pca")):
        case "run":
            return {
                "do": "run", "prompt": draws.sample(range(257), draws.choice((1, 3, 40))),
                "max_tokens": draws.choice((1, 2, 5)), "reduction": draws.choice(_REDUCTIONS),
                "places": draws.sample(_STRIPS, draws.randrange(4)),
                "temperature": draws.choice((0, 0.7, 100, 1e-320)), "seed": draws.randrange(9),
                "interventions": [change(draws) for _ in range(draws.choice((0, 1, 1, 3)))],
                **({"replace_from": run} if draws.random() < 0.7 else {}),
            }  # fmt: skip
        case "attention":
            return {
                "do": "attention", "run": run, "layer": draws.choice((1, 2, 3)),
                "heads": draws.choice(([], [0], [7, 7], [0, 3, 4000])),
                "rows": draws.choice(([], [0], [5, 5, 127])),
            }  # fmt: skip
        case kind:
            return {"do": kind, "run": run}


def change(draws: Random) -> dict[str, object]:
    """An intervention, sensible or not."""
    if draws.random() < 0.2:  # numbers that are not finite, mostly
        place = draws.choice(("fc1", "fc2", "qkv", "attention_out"))
        return {"place": place, "kind": "flip", "amount": 30, "bit": 30, "seed": draws.randrange(5)}
    return {
        "place": draws.choice((*_STRIPS, "attention_out", "fc2", "logits")),
        "kind": draws.choice(_KINDS), "amount": draws.choice(_AMOUNTS),
        "layers": draws.choice(([], [1], [2], [77])),
        "units": draws.choice(([], [0], [3, 3], [2**31])),
        "tokens": draws.choice(([], [0], [2, 500])), "seed": draws.randrange(5),
        **draws.choice(({}, {"first": 2}, {"last": 0}, {"bit": 30}, {"bit": 63})),
    }  # fmt: skip


def asked(name: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    """A whole request for an answer after which the server hangs up."""
    lines = [
        f"POST /scope/api/{name} HTTP/1.1", f"content-length: {len(body)}", "connection: close",
        *headers,
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def message(
    draws: Random, body: Callable[[Random], tuple[str, bytes]], own: Sequence[str]
) -> Message:
    """What a client sends: mostly questions with the right headers `own`, else attacks on HTTP."""
    name, content = body(draws)
    whole = asked(name, content, own)
    kind = draws.random()
    if kind < 0.7:
        return Message(whole, is_whole=True, hangs_up=kind < 0.05)
    if kind < 0.8:
        return Message(_with_wrong_headers(draws, name, content, own), is_whole=True)
    if kind < 0.83:
        return Message(_for_a_file(draws, own), is_whole=True)
    if kind < 0.86:
        return Message(draws.randbytes(draws.randrange(400)), is_whole=False)
    if kind < 0.9:
        return Message(_in_chunks(draws, name, content, own), is_whole=False)
    return Message(damaged(whole, False, draws), is_whole=False)


def _with_wrong_headers(draws: Random, name: str, content: bytes, own: Sequence[str]) -> bytes:
    host, allowed = own
    wrong = draws.choice((
        [host], [host, "authorization: Bearer x"], [host, "authorization: Bearer \xe9\xff"],
        [host, "authorization: Basic eA=="], ["host: evil.example", allowed],
        [host, allowed, "origin: http://evil.example"], [host, allowed, "origin: null"],
        [host, allowed, "origin: http://["], ["host: [", allowed],
    ))  # fmt: skip
    return asked(name, content, wrong)


def _for_a_file(draws: Random, own: Sequence[str]) -> bytes:
    method = draws.choice(("GET", "PUT", "HEAD", "OPTIONS", "TRACE", "BREW"))
    path = draws.choice((
        "/", "/scope", "/scope/", "/scope/main.js", "/scope/../server.py",
        "/scope/%2e%2e/server.py", "/scope//etc/passwd", "/scope/%00", "/scope/api/",
        "/scope/api/state", "/%ff", "/" + "a" * 5000,
    ))  # fmt: skip
    return "\r\n".join([f"{method} {path} HTTP/1.1", "connection: close", *own, "", ""]).encode()


def _in_chunks(draws: Random, name: str, content: bytes, own: Sequence[str]) -> bytes:
    head = "\r\n".join([
        f"POST /scope/api/{name} HTTP/1.1", "transfer-encoding: chunked", "connection: close",
        *own, "", "",
    ])  # fmt: skip
    size = draws.choice((f"{len(content):x}", "ffffffffffffffff", "-1", "zz", "0"))
    return head.encode() + f"{size}\r\n".encode() + content + draws.choice((b"\r\n0\r\n\r\n", b""))
