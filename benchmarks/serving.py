"""A server under load and under attack: `training.serve` as a process, asked over HTTP.

    python -m benchmarks.serving [--requests 10000] [--bodies 10000] [--tensor 1] [-o RESULT.md]

A small random Llama is served. First 64 clients at once ask for streams of mixed lengths, prompts
of 1 to 100 tokens and answers of 1 to 24, of which one in twenty is hung up on after its first
token; reported are times to the first token and to the end, and the memory of all ranks on the way.
Then come bodies made at random, bodies of 100 MB and halves of requests. At the end the server must
answer as at the beginning, with no row left in its batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import psutil

from benchmarks.jobs import ROOT, environment_line, publish, torchrun
from benchmarks.serving_bodies import request_of

_NUM_CLIENTS = 64
_NUM_IDS = 501
_QUESTION = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
_HALVES = (
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"pro',
    b"POST /v1/compl",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\nContent-Length: 2"
    b"\r\n\r\n{}",
)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers."""

    process: psutil.Popen
    url: str

    def memory_bytes(self) -> int:
        """Resident memory of all its processes."""
        members = [self.process, *self.process.children(recursive=True)]
        return sum(one.memory_info().rss for one in members)

    def metric(self, name: str) -> float:
        """The value of one of its metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(rf"^megascan_{name} (\S+)$", text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"the server has no metric {name}")
        return float(found[1])

    def answer(self) -> str:
        """What it says to a question whose answer never changes."""
        found = httpx.post(f"{self.url}/v1/completions", json=_QUESTION, timeout=60).json()
        return str(found["choices"][0]["text"])


@dataclass(kw_only=True)
class Load:
    """What many clients have seen."""

    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    num_hung_up: int = 0
    memory_bytes: list[int] = field(default_factory=list)
    duration_s: float = 0.0


def main() -> int:
    """Ask, attack and report; exit 1 when the server has failed or changed its answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder, serving(Path(folder) / "model", given.tensor) as server:
        before = server.answer()
        load = asyncio.run(ask_all(server, given.requests))
        statuses = asyncio.run(attack(server, given.bodies))
        large = send_large(server)
        for half in _HALVES * 25:
            send_half(server, half)
        rows, after = server.metric("rows_running"), server.answer()
    lines = page(given, load, statuses, large)
    is_well = after == before and rows == 0 and not any(one >= 500 for one in [*statuses, *large])
    lines += ["", f"Rows left in the batch: {rows:.0f}. The answer at the end is that at the "
              f"beginning: {'yes' if after == before else 'NO'}.", ""]  # fmt: skip
    publish("\n".join(lines), given.output)
    return 0 if is_well else 1


@contextmanager
def serving(model: Path, tensor: int) -> Iterator[Server]:
    """Serve a small random model as long as the block lasts."""
    make = [sys.executable, "scripts/lib/random_llama.py", str(model), str(_NUM_IDS)]
    subprocess.run(make, cwd=ROOT, check=True)
    words = [sys.executable, *torchrun(tensor), "-m", "training.serve", "--load-hf", str(model)]
    words += ["--tensor-model-parallel-size", str(tensor), "--distributed-backend", "gloo"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(_NUM_IDS - 1), "--port", "0"]
    process = psutil.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        line = next((one for one in process.stdout if one.startswith("serving ")), None)
        if line is None:
            raise SystemExit("the server has ended; see what it wrote")
        yield Server(process=process, url=line.split(" at ")[1].split("/v1")[0])
    finally:
        process.terminate()
        process.wait()


async def ask_all(server: Server, num_requests: int) -> Load:
    """Let 64 clients ask, each one request after the other, until all are answered."""
    load = Load()
    numbers = iter(range(num_requests))
    began = time.perf_counter()
    limits = httpx.Limits(max_connections=_NUM_CLIENTS)
    async with httpx.AsyncClient(timeout=600, limits=limits, base_url=server.url) as client:

        async def ask_on() -> None:
            for number in numbers:
                if number % max(num_requests // 10, 1) == 0:
                    load.memory_bytes.append(server.memory_bytes())
                await ask(client, random.Random(number), load, hangs_up=number % 20 == 7)

        await asyncio.gather(*(ask_on() for _ in range(_NUM_CLIENTS)))
    load.memory_bytes.append(server.memory_bytes())
    load.duration_s = time.perf_counter() - began
    return load


async def ask(client: httpx.AsyncClient, draw: random.Random, load: Load, hangs_up: bool) -> None:
    """Ask for one stream and note when its tokens come."""
    num_tokens = draw.randint(1, 24)
    body = {
        "prompt": [draw.randrange(_NUM_IDS - 1) for _ in range(draw.randint(1, 100))],
        "max_tokens": num_tokens, "temperature": 1.0, "seed": draw.randrange(1000), "stream": True,
    }  # fmt: skip
    began = time.perf_counter()
    first = None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"refused with {answer.status_code}: {await answer.aread()!r}")
        async for line in answer.aiter_lines():
            if first is None and line:
                first = time.perf_counter() - began
                if hangs_up:
                    load.num_hung_up += 1
                    return
    assert first is not None
    total = time.perf_counter() - began
    load.first_token_s.append(first)
    load.total_s.append(total)
    load.per_token_s.append((total - first) / max(num_tokens - 1, 1))


async def attack(server: Server, num_bodies: int) -> Counter[int]:
    """Send bodies made at random; how often each status came back."""
    draw, statuses = random.Random(13), Counter[int]()
    async with httpx.AsyncClient(timeout=600, base_url=server.url) as client:
        for _ in range(num_bodies):
            method, path, body = request_of(draw)
            answer = await client.request(method, path, content=body)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                print(f"{answer.status_code} for {method} {path} {body[:300]!r}", file=sys.stderr)
    return statuses


def send_large(server: Server) -> Counter[int]:
    """Send bodies of 100 MB; 0 stands for a connection that was closed on the way."""
    statuses = Counter[int]()
    for _ in range(5):
        try:
            answer = httpx.post(
                f"{server.url}/v1/completions", content=b'{"prompt": "' + b"1 " * 50_000_000,
                timeout=600,
            )  # fmt: skip
            statuses[answer.status_code] += 1
        except httpx.HTTPError:
            statuses[0] += 1
    return statuses


def send_half(server: Server, half: bytes) -> None:
    """Open a connection, send a beginning, and go."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(half)


def page(
    given: argparse.Namespace, load: Load, statuses: Counter[int], large: Counter[int]
) -> list[str]:
    """The result as lines."""
    lines = [
        "# Serving under load and under attack", "", environment_line("cpu"), "",
        f"`python -m benchmarks.serving --requests {given.requests} --bodies {given.bodies} "
        f"--tensor {given.tensor}`", "",
        f"{given.requests} streams by {_NUM_CLIENTS} clients at once in {load.duration_s:.0f} s, "
        f"{load.num_hung_up} of them hung up on; 32 rows in the batch.", "",
        "| | median | 95 % | 99 % | longest |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, values in (
        ("first token (ms)", load.first_token_s), ("whole answer (ms)", load.total_s),
        ("each next token (ms)", load.per_token_s),
    ):  # fmt: skip
        shown = (*np.percentile(values, (50, 95, 99)), max(values))
        lines.append(f"| {name} | {' | '.join(f'{1e3 * value:.1f}' for value in shown)} |")
    memory = ", ".join(f"{size / 1e6:.0f}" for size in load.memory_bytes)
    counted = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    lines += ["", f"Resident memory of all processes at each tenth of the requests (MB): {memory}.",
              "", f"{given.bodies} random bodies were answered with {counted}. Five bodies of 100 "
              f"MB: {dict(large)} (0: connection closed). {25 * len(_HALVES)} halves of requests.",
              ]  # fmt: skip
    return lines


if __name__ == "__main__":
    sys.exit(main())
