"""Bodies of requests made at random, for whoever wants to see that a server stands them."""

from __future__ import annotations

import json
import random

_VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 64, 1e9, -0.0, 0.5, 1.5, 2**63, -(2**70), 1e308, "", "a",
    "ab" * 40, "x" * 100_000, "\x00", "𝄞", "\ufffd\u202e", [], [1], ["a"], [[1, 2], [3]], [None],
    [["a"]], {}, {"a": 1}, {"include_usage": True}, {"include_usage": 1}, "letters", [257], [-1],
    [[]], [1.5], [True], [1] * 5000, ["a"] * 200, [{"role": "user", "content": "a"}],
    [{"role": "user", "content": [{"type": "text", "text": "b"}]}], [{"role": "user"}],
    [{"role": "none", "content": "a"}], [{"role": "user", "content": 3, "name": []}],
)  # fmt: skip
_NAMES = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "echo",
    "logprobs", "top_logprobs", "max_completion_tokens", "stream", "stream_options",
    "presence_penalty", "frequency_penalty", "model", "user", "suffix", "best_of", "logit_bias",
    "messages", "tools", "response_format", "prompts", "tokens_to_generate", "random_seed",
    "add_BOS", "zzz", "",
)  # fmt: skip
_WHOLE = (
    b"", b"[]", b"null", b"NaN", b"1e999", b'"a"', b"{", b"\xff\xfe{}", b"[" * 5000,
    b'{"a":' * 2000, b'{"prompt": "\\ud800"}', b'{"prompt": "a", "prompt": 1}',
)  # fmt: skip
_STARTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
    "/api": {"prompts": ["ab"], "tokens_to_generate": 2},
}


def request_of(draw: random.Random) -> tuple[str, str, bytes]:
    """Make a request: method, path and body.

    The body is mostly a good one with some fields changed, at times cut or overwritten.
    """
    path = draw.choice(list(_STARTS))
    method = "PUT" if path == "/api" else "POST"
    if draw.random() < 0.05:
        return method, path, draw.choice(_WHOLE)
    fields = dict(_STARTS[path])
    for _ in range(draw.randrange(4)):
        fields[draw.choice(_NAMES)] = draw.choice(_VALUES)
    body = bytearray(json.dumps(fields).encode())
    if draw.random() < 0.2:
        body = body[: draw.randrange(len(body) + 1)]
    for _ in range(draw.randrange(3) if draw.random() < 0.2 else 0):
        if body:
            body[draw.randrange(len(body))] = draw.randrange(256)
    return method, path, bytes(body)
