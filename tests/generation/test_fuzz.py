"""Bodies made at random: whatever comes, the answer is an answer or a refusal in one sentence."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from benchmarks.serving_bodies import request_of

from .conftest import TEMPLATE, CountingEngine

NUM_BODIES = 1_500
ClientOf = Callable[..., httpx.AsyncClient]


def check_refusal(answer: httpx.Response) -> None:
    message = answer.json()["error"]["message"]
    assert message
    assert "\n" not in message


def test_no_body_ends_in_a_server_error(counting: CountingEngine, client_of: ClientOf) -> None:
    draw = random.Random(13)
    seen: Counter[int] = Counter()

    async def work() -> None:
        async with client_of(counting, template=TEMPLATE) as client:
            for _ in range(NUM_BODIES):
                method, path, body = request_of(draw)
                answer = await client.request(method, path, content=body)
                seen[answer.status_code] += 1
                assert answer.status_code in (200, 400, 404), (body, answer.text)
                if answer.status_code != 200:
                    check_refusal(answer)
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.json()["choices"][0]["text"] == "bc"

    asyncio.run(work())
    assert seen[200] > NUM_BODIES / 20
    assert seen[400] > NUM_BODIES / 20
    assert not counting.scheduler.has_work


def test_a_body_of_100_mb_is_refused_before_it_has_been_read(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    num_sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(100):
            num_sent += 1
            yield b" " * 1_000_000

    async def work() -> None:
        async with client_of(counting) as client:
            answer = await client.post("/v1/completions", content=body())
            assert answer.status_code == 413
            check_refusal(answer)

    asyncio.run(work())
    assert num_sent < 15


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "["}, {"Host": ""}, {"Origin": "http://["}, {"Origin": "\xff"}, {"Origin": "null"},
        {"Host": "[::1", "Origin": "http://[::1"},
    ],
)  # fmt: skip
def test_malformed_headers_are_refused(
    headers: dict[str, str], counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = await client.get("/v1/models", headers=raw)  # type: ignore[arg-type]
            assert answer.status_code == 403
            check_refusal(answer)

    asyncio.run(work())
