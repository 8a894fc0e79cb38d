"""Bodies made at random: whatever comes, the answer is an answer or a refusal in one sentence."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable

import httpx

from .conftest import CountingEngine

NUM_BODIES = 1_000
VALUES = (
    None, True, False, 0, 1, -1, 2, 7, 64, 1e9, -0.0, 0.5, 1.5, 2**63, -(2**70), 1e308, "", "a",
    "ab" * 40, "\x00", "𝄞", [], [1], ["a"], [[1, 2], [3]], [None], [["a"]], {}, {"a": 1},
    {"include_usage": True}, [{"role": "user", "content": "a"}], "letters", [257], [-1], [[]],
)  # fmt: skip
NAMES = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "echo",
    "logprobs", "stream", "stream_options", "presence_penalty", "frequency_penalty", "model",
    "user", "suffix", "best_of", "logit_bias", "messages", "prompts",
    "tokens_to_generate", "random_seed", "zzz",
)  # fmt: skip


def body_of(random_: random.Random) -> bytes:
    """A body: mostly a request with some fields changed, at times cut or overwritten."""
    fields: dict[str, object] = {"prompt": "ab", "max_tokens": 2}
    for _ in range(random_.randrange(4)):
        fields[random_.choice(NAMES)] = random_.choice(VALUES)
    body = bytearray(json.dumps(fields).encode())
    if random_.random() < 0.2:
        body = body[: random_.randrange(len(body) + 1)]
    for _ in range(random_.randrange(3) if random_.random() < 0.2 else 0):
        if body:
            body[random_.randrange(len(body))] = random_.randrange(256)
    return bytes(body)


def test_no_body_ends_in_a_server_error(
    counting: CountingEngine, client_of: Callable[..., httpx.AsyncClient]
) -> None:
    random_ = random.Random(13)
    seen: dict[int, int] = {}

    async def work() -> None:
        async with client_of(counting) as client:
            for number in range(NUM_BODIES):
                path, method = ("/api", "PUT") if number % 5 == 0 else ("/v1/completions", "POST")
                body = body_of(random_)
                answer = await client.request(method, path, content=body)
                seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                assert answer.status_code in (200, 400, 404), (body, answer.text)
                if answer.status_code != 200:
                    message = answer.json()["error"]["message"]
                    assert message
                    assert "\n" not in message
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.json()["choices"][0]["text"] == "bc"

    asyncio.run(work())
    assert seen[200] > NUM_BODIES / 20
    assert seen[400] > NUM_BODIES / 20
    assert not counting.scheduler.has_work
