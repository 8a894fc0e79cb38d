"""Attacks on the page's server: hosts, origins, tokens, bodies of any bytes."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from benchmarks.fuzz.hostile import NAMES, question
from megascan.connection import Connection
from megascan.listening import listen
from megascan.topology import Layout
from megascope.folder_page import FolderPage
from megascope.frames import decode, encode
from megascope.model_page import ModelPage
from megascope.recorder import data_file_name
from megascope.server import LARGEST_BODY, PAGE, build_app

TOKEN = "a-token-of-some-length"
ALLOWED = {"authorization": f"Bearer {TOKEN}"}


def write_recordings(folder: Path) -> None:
    header = {"kind": "run", "schema": 1, "rank": 0, "layout": Layout().to_json(),
              "model": {"num_layers": 2}, "first_iteration": 1, "is_continued": False}  # fmt: skip
    item = {"place": "residual", "reduction": "max", "gradient": False, "share": "whole",
            "width": 4, "layers": [1, 2], "microbatches": [0]}  # fmt: skip
    frames = [encode(header)]
    for iteration in (1, 2, 3):
        data = {"kind": "data", "iteration": iteration, "per_token": False, "items": [item]}
        import numpy as np

        frames.append(encode(data, {"0": np.full((2, 1, 1, 1, 1), float(iteration))}))
    (folder / data_file_name(0)).write_bytes(b"".join(frames))


def folder_client(folder: Path) -> httpx.AsyncClient:
    write_recordings(folder)
    return client_of(build_app(FolderPage(folder, lambda: ["all agreed"]), token=TOKEN))


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


class Answering:
    """A model's page whose session answers each command by one frame."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.page = ModelPage(
            {"model": "m", "num_layers": 2}, tell=self.tell, tokenize=lambda text: [1, 2],
            text_of=str, max_length=32, vocab_size=100,
        )  # fmt: skip
        self.answers = True

    def tell(self, command: str) -> None:
        self.told.append(json.loads(command))
        identifier = self.told[-1]["id"]
        if self.answers:
            self.page.deliver(identifier, encode({"kind": "step", "run": identifier}))
            self.page.deliver(identifier, None)

    def client(self) -> httpx.AsyncClient:
        return client_of(build_app(self.page, token=TOKEN))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (ALLOWED, 200),
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer \xe9\xe9"}, 401),
        (ALLOWED | {"host": "evil.example"}, 403),
        (ALLOWED | {"host": "127.0.0.1.evil.example"}, 403),
        (ALLOWED | {"host": "["}, 403),
        (ALLOWED | {"origin": "http://evil.example"}, 403),
        (ALLOWED | {"origin": "null"}, 403),
        (ALLOWED | {"origin": "http://["}, 403),
        (ALLOWED | {"origin": "http://127.0.0.1:8000"}, 200),
    ],
)
def test_who_may_ask(headers: dict[str, str], status: int, tmp_path: Path) -> None:
    async def ask() -> httpx.Response:
        async with folder_client(tmp_path) as client:
            raw = [(name, value.encode("latin-1")) for name, value in headers.items()]
            return await client.post("/scope/api/state", content=b"{}", headers=raw)

    found = asyncio.run(ask())
    assert found.status_code == status
    assert "default-src 'self'" in found.headers["content-security-policy"]
    if status != 200:
        assert set(found.json()) == {"error"}


def test_the_pages_files_are_open_and_small_and_complete(tmp_path: Path) -> None:
    async def read() -> list[httpx.Response]:
        async with folder_client(tmp_path) as client:
            names = ["", *(path.name for path in PAGE.iterdir())]
            return [await client.get(f"/scope/{name}") for name in names]

    found = asyncio.run(read())
    assert [one.status_code for one in found] == [200] * len(found)
    assert sum(len(one.content) for one in found) < 150_000
    imported = {word for path in PAGE.glob("*.js")
                for word in path.read_text().split('"') if word.startswith("./")}  # fmt: skip
    assert {name.removeprefix("./") for name in imported} <= {path.name for path in PAGE.iterdir()}


@pytest.mark.parametrize("path", ["/scope/../server.py", "/scope/%2e%2e/server.py", "/etc/passwd"])
def test_nothing_else_is_served(path: str, tmp_path: Path) -> None:
    async def read() -> httpx.Response:
        async with folder_client(tmp_path) as client:
            return await client.get(path)

    assert asyncio.run(read()).status_code == 404


def test_questions_about_a_folder(tmp_path: Path) -> None:
    async def ask() -> tuple[Any, ...]:
        async with folder_client(tmp_path) as client:

            async def post(name: str, **body: object) -> httpx.Response:
                return await client.post(f"/scope/api/{name}", json=body, headers=ALLOWED)

            key = {"place": "residual", "reduction": "max"}
            return (
                await post("state"),
                await post("series", **key),
                await post("table", **key, iteration=2),
                await post("table", **key, iteration=9),
                await post("request", places=["fc1"], first=1),
                await post("request", places=["eval"]),
                await post("nothing"),
                await post("weights"),
            )

    state, series, table, missing, request, wrong, unknown, weights = asyncio.run(ask())
    assert state.json()["iterations"] == [1, 2, 3] and state.json()["verdict"] == ["all agreed"]
    assert decode(series.content).arrays["values"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert decode(table.content).arrays["values"].ravel().tolist() == [2, 2]
    assert (missing.status_code, wrong.status_code, unknown.status_code) == (400, 400, 404)
    assert weights.status_code == 400
    assert request.json() == {
        "first": 5
    }  # the newest iteration is 3; the client's own is not heeded
    assert json.loads((tmp_path / "scope-request.json").read_text())["first"] == 5


def test_a_question_to_a_model_is_told_once_and_answered() -> None:
    async def ask() -> tuple[httpx.Response, list[Mapping[str, Any]]]:
        answering = Answering()
        async with answering.client() as client:
            body = {"do": "run", "prompt": [1, 2], "max_tokens": 3}
            found = await client.post("/scope/api/ask", json=body, headers=ALLOWED)
            return found, answering.told

    found, told = asyncio.run(ask())
    assert decode(found.content).header["kind"] == "step"
    assert [one["do"] for one in told] == ["run"] and told[0]["id"] == 1


def test_half_of_a_character_is_refused() -> None:
    async def ask() -> httpx.Response:
        async with Answering().client() as client:
            content = b'{"text": "a \\ud800"}'
            return await client.post("/scope/api/tokenize", content=content, headers=ALLOWED)

    found = asyncio.run(ask())
    assert found.status_code == 400 and "half of a character" in found.json()["error"]


def test_who_hangs_up_stops_the_model() -> None:
    async def hang_up() -> list[str]:
        answering = Answering()
        answering.answers = False
        stream = await answering.page.answer("ask", {"do": "run", "prompt": [1], "max_tokens": 30})
        waiting = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return [str(one["do"]) for one in answering.told]

    assert asyncio.run(hang_up()) == ["run", "stop"]


def test_a_large_body_is_refused(tmp_path: Path) -> None:
    async def ask() -> httpx.Response:
        async with folder_client(tmp_path) as client:
            content = b" " * (LARGEST_BODY + 1)
            return await client.post("/scope/api/state", content=content, headers=ALLOWED)

    assert asyncio.run(ask()).status_code == 400


@pytest.mark.parametrize("kind", ["folder", "model"])
def test_fuzzed_questions_end_in_a_sentence(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> dict[int, int]:
        counts: dict[int, int] = {}
        draws = random.Random(4)
        answering = Answering()
        opened = folder_client(tmp_path) if kind == "folder" else answering.client()
        async with opened as client:
            for _ in range(1000):
                name = draws.choice(NAMES)
                content = question(draws)
                found = await client.post(f"/scope/api/{name}", content=content, headers=ALLOWED)
                counts[found.status_code] = counts.get(found.status_code, 0) + 1
                if found.status_code >= 400:
                    assert set(found.json()) == {"error"}, content
        return counts

    counts = asyncio.run(ask())
    assert set(counts) <= {200, 400, 404} and counts[400] > 200, counts
    assert "Traceback" not in caplog.text
    if kind == "folder":
        names = {path.name for path in tmp_path.iterdir()}
        assert names <= {data_file_name(0), "scope-request.json"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The page of a model on a port, with a patience of a fifth of a second."""
    for place in ("megascan.connection.PATIENCE_S", "megascope.server.PATIENCE_S"):
        monkeypatch.setattr(place, 0.2)
    monkeypatch.setattr("megascan.connection._FAREWELL_S", 0.05)
    listening = listen("127.0.0.1", 0)
    app = build_app(Answering().page, token=TOKEN)
    config = uvicorn.Config(
        app, http=Connection, log_level="error", lifespan="off", ws="none", timeout_keep_alive=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    yield listening.getsockname()[:2]
    server.should_exit = True
    thread.join(10)


HEAD = b"POST /scope/api/state HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n" % (
    TOKEN.encode()
)


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD + b"Content-Length: 9\r\n\r\n{", b"400"),
        (HEAD + b"Content-Length: 2\r\n\r\n{}" + HEAD, b"200"),
    ],
    ids=["nothing", "half a head", "half a body", "half a second request"],
)
def test_unfinished_requests_end(sent: bytes, answered: bytes, served: tuple[str, int]) -> None:
    with socket.create_connection(served, timeout=5) as client:
        client.sendall(sent)
        heard = b""
        while part := client.recv(4096):
            heard += part
    assert heard.startswith(b"HTTP/1.1 " + answered) if answered else heard == b""
    assert (answered != b"400") or b"did not arrive" in heard


def test_a_connection_that_is_used_goes_on(served: tuple[str, int]) -> None:
    client = http.client.HTTPConnection(*served, timeout=5)
    client.connect()
    used = client.sock
    for _ in range(3):
        client.request("POST", "/scope/api/state", b"{}", ALLOWED)
        assert json.load(client.getresponse())["mode"] == "generation"
        time.sleep(0.3)  # longer than the patience, and nothing is begun
    assert client.sock is used
    client.close()
