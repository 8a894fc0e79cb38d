"""The endpoints over an engine that counts through the alphabet."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import CountingEngine

ClientOf = Callable[..., httpx.AsyncClient]


async def posted(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_completions_go_on_from_every_kind_of_prompt(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            for prompt, texts in (
                ("a", ["bcd"]),
                ([97], ["bcd"]),
                (["a", "b"], ["bcd", "cde"]),
                ([[97], [98, 99]], ["bcd", "def"]),
            ):
                found = await posted(client, prompt=prompt, max_tokens=3, temperature=0)
                assert [one["text"] for one in found["choices"]] == texts
                assert {one["finish_reason"] for one in found["choices"]} == {"length"}
                assert found["usage"]["completion_tokens"] == 3 * len(texts)

    run(work())


def test_n_choices_echo_and_log_probabilities(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            found = await posted(
                client, prompt="ab", max_tokens=2, n=2, echo=True, logprobs=2, seed=1
            )
            assert [one["text"] for one in found["choices"]] == ["abcd", "abcd"]
            logprobs = found["choices"][1]["logprobs"]
            assert logprobs["tokens"] == ["a", "b", "c", "d"]
            assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
            assert logprobs["top_logprobs"][1] == {"a": -1.0, "b": -1.0}
            assert logprobs["text_offset"] == [0, 1, 2, 3]
            assert found["usage"] == {
                "prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6
            }  # fmt: skip
            scored = await posted(client, prompt="ab", max_tokens=0, echo=True, logprobs=0)
            assert scored["choices"][0]["text"] == "ab"
            assert scored["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]

    run(work())


def test_every_end_that_the_model_declares_ends_an_answer_and_is_not_shown(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting, ends=(ord("e"), ord("x"))) as client:
            found = await posted(client, prompt=["b", "e", "w"], max_tokens=40)
            assert [one["text"] for one in found["choices"]] == ["cd", "fghijklmnopqrstuvw", ""]
            assert {one["finish_reason"] for one in found["choices"]} == {"stop"}

    run(work())


def test_a_stream_has_the_same_text_and_ends_with_usage_and_done(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            body = {"prompt": ["a", "b"], "max_tokens": 12, "stop": ["g", "mn"], "stream": True,
                    "stream_options": {"include_usage": True}, "echo": True,
                    "logprobs": 1}  # fmt: skip
            answer = await client.post("/v1/completions", json=body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line[6:] for line in answer.text.splitlines() if line]
            assert lines[-1] == "[DONE]"
            events = [json.loads(line) for line in lines[:-1]]
            assert events[-1]["choices"] == []
            assert events[-1]["usage"]["prompt_tokens"] == 2
            whole = await posted(
                client, **{key: body[key] for key in ("prompt", "max_tokens", "stop", "echo")}
            )
            for index, choice in enumerate(whole["choices"]):
                parts = [
                    one for event in events for one in event["choices"] if one["index"] == index
                ]
                assert "".join(part["text"] for part in parts) == choice["text"]
                assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
                    "stop"
                ]
            assert [one["text"] for one in whole["choices"]] == ["abcdef", "bcdef"]

    run(work())


def test_a_row_whose_stop_string_has_come_leaves_the_batch(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            await posted(client, prompt="a", max_tokens=60, stop="e")
            await posted(client, prompt="a", max_tokens=1)
            assert not counting.scheduler.rows

    run(work())


def test_a_client_that_hangs_up_frees_its_row_before_the_next_token(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    counting.goes_on = queue.SimpleQueue()

    async def work() -> None:
        async with client_of(counting) as client:
            for streams in (False, True):
                asking = asyncio.create_task(
                    client.post("/v1/completions", json={
                        "prompt": "a", "max_tokens": 60, "stream": streams})
                )  # fmt: skip
                goes_on = counting.goes_on
                assert goes_on is not None
                for _ in range(3):
                    goes_on.put(None)
                while not (
                    counting.scheduler.rows and counting.scheduler.rows[0].num_generated == 3
                ):
                    await asyncio.sleep(0.005)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                goes_on.put(None)  # the step that had begun
                while counting.scheduler.has_work:
                    await asyncio.sleep(0.005)

    run(work())


def test_requests_wait_in_turn_and_none_is_starved(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            ends: list[int] = []

            async def one(number: int) -> None:
                size = 1 + number * 7 % 40
                await posted(client, prompt="a" * size, max_tokens=1 + number % 17)
                ends.append(number)

            await asyncio.gather(*(one(number) for number in range(60)))
            assert sorted(ends) == list(range(60))
            # With four rows and answers of 17 tokens at most nobody is overtaken by many.
            assert max(place - number for place, number in enumerate(ends)) < 30

    run(work())


def test_too_many_open_rows_are_refused_with_429(client_of: ClientOf) -> None:
    engine = CountingEngine(max_waiting=3)

    async def work() -> None:
        async with client_of(engine) as client:
            answer = await client.post(
                "/v1/completions", json={"prompt": "a", "n": 4, "max_tokens": 2}
            )
            assert answer.status_code == 429
            assert "ask again later" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"

    run(work())
    engine.close()


def test_clients_hear_when_the_engine_ends(counting: CountingEngine, client_of: ClientOf) -> None:
    counting.goes_on = queue.SimpleQueue()

    async def work() -> None:
        async with client_of(counting) as client:
            body = {"prompt": "a", "max_tokens": 50}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while not counting.scheduler.has_work:
                await asyncio.sleep(0.005)
            counting.close()
            answer = await asking
            assert answer.status_code == 503
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            assert (await client.get("/health")).status_code == 503

    run(work())


def test_models_health_and_metrics(counting: CountingEngine, client_of: ClientOf) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            listed = (await client.get("/v1/models")).json()
            assert [one["id"] for one in listed["data"]] == ["letters"]
            assert (await client.get("/v1/models/letters")).json()["max_model_len"] == 64
            assert (await client.get("/v1/models/others")).status_code == 404
            assert (await client.get("/health")).json() == {"status": "ok"}
            await posted(client, prompt="a", max_tokens=4)
            text = (await client.get("/metrics")).text
            assert 'megascan_requests_total{outcome="finished"} 1\n' in text
            assert "megascan_generated_tokens_total 4\n" in text
            assert "megascan_first_token_seconds_count 1\n" in text
            assert "megascan_next_token_seconds_count 3\n" in text

    run(work())


def test_megatrons_own_way_to_ask(counting: CountingEngine, client_of: ClientOf) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            body = {"prompts": ["ab", "c"], "tokens_to_generate": 2, "logprobs": True, "top_k": 1}
            found = (await client.put("/api", json=body)).json()
            assert found["text"] == ["abcd", "cde"]
            assert found["segments"] == [["a", "b", "c", "d"], ["c", "d", "e"]]
            assert found["logprobs"] == [[-0.5] * 3, [-0.5] * 2]

    run(work())


@pytest.mark.parametrize(
    ("changed", "status", "part"),
    [
        ({"temperature": -1}, 400, "temperature is -1, but must be from 0.0 to 100.0"),
        ({"temperature": "hot"}, 400, "temperature is 'hot', but must be a number"),
        ({"top_p": 1.1}, 400, "top_p is 1.1"),
        ({"n": 0}, 400, "n is 0"),
        ({"n": True}, 400, "n is true, but must be a whole number"),
        ({"max_tokens": 64}, 400, "rows of this server have at most 64"),
        ({"max_tokens": -1}, 400, "max_tokens is -1"),
        ({"max_tokens": 0}, 400, "nothing is asked for"),
        ({"prompt": ""}, 400, "prompt must be"),
        ({"prompt": []}, 400, "prompt must be"),
        ({"prompt": [[]]}, 400, "prompt must be"),
        ({"prompt": [1.5]}, 400, "prompt must be"),
        ({"prompt": None}, 400, "prompt must be"),
        ({"prompt": [300]}, 400, "token id 300, but ids go from 0 to 256"),
        ({"prompt": "a" * 64}, 400, "has 64 tokens"),
        ({"prompt": ["a"] * 129}, 400, "at most 128 choices"),
        ({"stop": [""]}, 400, "stop must be"),
        ({"stop": ["a"] * 17}, 400, "at most 16"),
        ({"logprobs": 21}, 400, "logprobs is 21"),
        ({"logit_bias": {"3": 1}}, 400, "logit_bias is not supported"),
        ({"best_of": 3}, 400, "best_of is not supported"),
        ({"model": "others"}, 404, "the model 'others' is not here"),
        ({"seed": 2**63}, 400, "seed is"),
        ({"stream_options": {"x": 1}}, 400, "stream_options.x is not known"),
        ({"tempreature": 1}, 400, "tempreature is not known to this server"),
    ],
)
def test_a_wrong_field_is_named_in_one_sentence(
    counting: CountingEngine, client_of: ClientOf, changed: dict[str, Any], status: int, part: str
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            body = {"prompt": "a", "max_tokens": 2} | changed
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == status
            error = answer.json()["error"]
            assert part in error["message"]
            assert error["type"] == "invalid_request_error"

    run(work())


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "not JSON"),
        (b'{"prompt": "a"', 400, "not JSON"),
        (b"[1]", 400, "an array; send a JSON object"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"prompt": NaN}', 400, "not JSON"),
        (b'{"prompt": "' + b"a" * 9_000_000 + b'"}', 413, "larger than"),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    counting: CountingEngine, client_of: ClientOf, body: bytes, status: int, part: str
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            answer = await client.post("/v1/completions", content=body)
            assert answer.status_code == status
            assert part in answer.json()["error"]["message"]

    run(work())


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            missing = await client.get("/v2/nothing")
            assert missing.status_code == 404
            assert missing.json()["error"]["message"] == "GET /v2/nothing is not served here"
            assert (await client.get("/v1/completions")).status_code == 405
            chat = await client.post("/v1/chat/completions", json={"messages": []})
            assert "has no chat template" in chat.json()["error"]["message"]

    run(work())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1:9999"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example:8000"}, 403),
        ({"host": ""}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, 403),
        ({"host": "localhost:8000", "origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_may_not_ask(
    counting: CountingEngine, client_of: ClientOf, headers: dict[str, str], status: int
) -> None:
    async def work() -> None:
        async with client_of(counting) as client:
            answer = await client.get("/v1/models", headers=headers)
            assert answer.status_code == status, answer.text

    run(work())


def test_with_a_token_only_those_who_have_it_may_ask(
    counting: CountingEngine, client_of: ClientOf
) -> None:
    async def work() -> None:
        async with client_of(counting, token="s" * 20) as client:
            for header, status in (
                (None, 401), ("Bearer wrong", 401), (f"Basic {'s' * 20}", 401),
                ("Bearer \xe9", 401), (f"Bearer {'s' * 20}", 200), (f"bearer {'s' * 20}", 200),
            ):  # fmt: skip
                headers = {"host": "any.example"}
                given = {**headers, **({} if header is None else {"authorization": header})}
                encoded = {name: value.encode("latin-1") for name, value in given.items()}
                answer = await client.get("/v1/models", headers=encoded)  # type: ignore[arg-type]
                assert answer.status_code == status, header
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 401

    run(work())
