"""A real server, asked by real clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from megascan.errors import ConfigError
from tests import ranks
from training.generation.request import Limits
from training.generation.stage import Stage
from training.serve import main as serve_main

from .conftest import Running, Serve


@pytest.fixture(scope="module")
def server(serve: Serve, chatty: Path) -> Running:
    """One rank, four rows."""
    return serve("--load-hf", chatty, "--inference-max-requests", 4)


@dataclass(frozen=True)
class Idle:
    """A connection that was used once."""

    connection: HTTPConnection
    socket: object
    since_s: float


def ask_for_health(connection: HTTPConnection) -> bytes:
    connection.request("GET", "/health")
    return connection.getresponse().read()


@pytest.fixture(scope="module")
def idle(server: Running) -> Iterator[Idle]:
    """A connection that rests while other tests run."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.connect()
        opened = connection.sock
        assert ask_for_health(connection) == b'{"status":"ok"}'
        yield Idle(connection, opened, time.monotonic())


@pytest.mark.usefixtures("idle")
def test_the_openai_client_works_unchanged(server: Running, models: dict[str, Any]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    assert name == "llama"
    expected = models["llama"]
    for prompt, tokens in zip(expected.prompts, expected.greedy, strict=True):
        answer = client.completions.create(
            model=name, prompt=prompt, max_tokens=20, temperature=0, logprobs=1
        )
        assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
        if 0 not in tokens:  # which ends a text here
            assert answer.usage.completion_tokens == 20
    parts = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "the cat"}], max_tokens=8, seed=3,
        stream=True, temperature=0.8,
    )  # fmt: skip
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    whole = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "the cat"}], max_tokens=8, seed=3,
        temperature=0.8, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert whole.choices[0].message.content == streamed
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    with pytest.raises(openai.BadRequestError, match="begin as user"):
        client.chat.completions.create(
            model=name, messages=[{"role": "assistant", "content": "no"}], max_tokens=8
        )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="others", prompt="a")


def test_a_client_that_hangs_up_frees_its_rows(server: Running) -> None:
    # One row would be finished before a busy machine has told the server that nobody listens.
    num_rows, length = 64, 110
    before = server.metric("generated_tokens_total")
    wish = {"prompt": "a", "max_tokens": length, "n": num_rows, "temperature": 5.0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=wish) as answer:
        next(answer.iter_lines())
    server.until("rows_running", lambda rows: rows == 0)
    server.until("rows_waiting", lambda rows: rows == 0)
    assert server.metric("generated_tokens_total") - before < num_rows * length
    assert server.metric('requests_total{outcome="cancelled"}') >= 1


def test_half_a_request_harms_nobody(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for half in (
        b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"pro',
        b"POST /v1/compl",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(half)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200


def test_many_clients_at_once_all_get_what_each_gets_alone(server: Running) -> None:
    bodies = [
        {"prompt": "the cat sat"[: 1 + number % 11], "max_tokens": 1 + number * 5 % 30,
         "temperature": 0.9, "seed": number}
        for number in range(64)
    ]  # fmt: skip

    async def ask(together: bool) -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=200, limits=limits) as client:

            async def one(body: dict[str, Any]) -> str:
                answer = await client.post(f"{server.url}/v1/completions", json=body)
                return str(answer.json()["choices"][0]["text"])

            if together:
                return list(await asyncio.gather(*map(one, bodies)))
            return [await one(body) for body in bodies[::8]]

    together = asyncio.run(ask(together=True))
    assert together[::8] == asyncio.run(ask(together=False))


def test_lm_eval_measures_what_it_measures_with_transformers(
    server: Running, chatty: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: it is too heavy for dev")
    pytest.importorskip("transformers")
    rows = [
        {"q": "the cat sat on", "choices": ["the mat", "mat the", "cat"], "gold": number % 3}
        for number in range(4)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "toy", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "output_type": "multiple_choice", "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "toy.yaml").write_text(json.dumps(task))
    tokenizer = f"tokenizer={chatty},tokenizer_backend=huggingface"
    asked = f"model=llama,base_url={server.url}/v1/completions,{tokenizer},num_concurrent=2"
    found = [
        log_likelihoods(tmp_path, name, arguments)
        for name, arguments in (
            ("local-completions", asked), ("hf", f"pretrained={chatty},dtype=float32"),
        )
    ]  # fmt: skip
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def log_likelihoods(folder: Path, name: str, arguments: str) -> list[float]:
    """Of all choices of all questions, by one of lm-eval's models."""
    out = folder / name
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", name, "--model_args", arguments,
         "--tasks", "toy", "--include_path", str(folder), "--log_samples", "--output_path",
         str(out), "--device", "cpu"],
        cwd=folder, capture_output=True, text=True, timeout=250,
        env={**ranks.environment(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder),
             "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (samples,) = out.rglob("samples_*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda one: one["doc_id"])
    return [float(one[0]) for line in lines for one in line["filtered_resps"]]


@pytest.mark.distributed
def test_what_a_training_has_learnt_is_served_in_another_layout(
    serve: Serve, tmp_path: Path
) -> None:
    words = (
        "-m training.pretrain_gpt --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
        "--make-vocab-size-divisible-by 16 --num-layers 4 --hidden-size 64 --seq-length 32 "
        "--num-attention-heads 4 --micro-batch-size 4 --global-batch-size 4 --lr 5e-3 "
        "--num-workers 0 --distributed-backend gloo --train-iters 60 --eval-iters 0"
    )
    ranks.run(*words.split(), "--save", tmp_path / "counts", check=True)
    flags = ["--load", tmp_path / "counts", "--tensor-model-parallel-size", 2]
    server = serve(*flags, num_ranks=2, own_launcher=True)
    body = {"prompt": "1 2 3", "max_tokens": 10, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == " 4 5 6 7 8 9 10 11 12 13"
    assert answer["model"] == "counts"
    typed = ranks.run(
        "-m", "training.generate", "--load", tmp_path / "counts", "--max-tokens", "6",
        "--stop", " 15", "--distributed-backend", "gloo", stdin="1 2 3\nx\n10 11 12\n",
    )  # fmt: skip
    assert typed.stdout.splitlines() == [" 4 5 6 7 8 9", " 13 14"]
    assert "error: NullTokenizer takes integers" in typed.stderr
    heard = kill_in_mid_request(server, 1)
    assert '"message":"the server has ended; ask again later"' in heard


@pytest.mark.distributed
def test_a_listening_rank_that_is_killed_takes_the_job_with_it(
    serve: Serve, models: dict[str, Any]
) -> None:
    flags = ["--load-hf", models["gpt2"].folder, "--pipeline-model-parallel-size", 2]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", 200]
    kill_in_mid_request(serve(*flags, num_ranks=2, own_launcher=True), 0)


def kill_in_mid_request(server: Running, rank: int) -> str:
    """Kill one of two ranks while an answer is streamed; gives what the client has heard.

    The client must hear of it, and the launcher must end soon and say which rank it was.
    """
    pids = children_of(server.process.pid)
    assert len(pids) == 2
    body = {"prompt": "1 2 3", "max_tokens": 20, "n": 100, "stream": True}
    heard = ""
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer,
    ):
        for line in answer.iter_lines():
            if not heard:
                os.kill(pids[rank], signal.SIGKILL)
            heard += line
    assert heard
    assert "[DONE]" not in heard
    assert server.process.wait(9) == 1
    assert server.process.stdout is not None
    said = server.process.stdout.read()
    assert f"Signal 9 (SIGKILL) received by PID {pids[rank]}" in said, said
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=30)
    return heard


def children_of(parent: int) -> list[int]:
    """The ranks that a launcher has started, in order."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return sorted(int(child) for child in listed.split())


def test_a_signal_ends_the_server_in_order(serve: Serve, chatty: Path) -> None:
    server = serve("--load-hf", chatty)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert server.process.stdout is not None
    assert "Traceback" not in server.process.stdout.read()


def test_no_row_may_be_longer_than_a_sliding_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--load-hf", str(tmp_path), "--inference-max-seq-length", "65"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
    assert serve_main([*words, "--distributed-backend", "gloo"]) == 1
    assert "65, but the model has a sliding window of 64 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        ([], 2, "give either --load, a checkpoint, or --load-hf"),
        (["--load", "nowhere"], 1, "nowhere has no latest_checkpointed_iteration.txt"),
        (["--load-hf", "{model}", "--host", "0.0.0.0"], 2, "give --token-file"),
        (["--load-hf", "{model}", "--token-file", "/dev/null"], 1, "one word of at least 16"),
        (["--load-hf", "{model}", "--tensor-model-parallel-size", "2"], 1, "is not divisible"),
        (["--load-hf", "{model}", "--inference-max-requests", "0"], 1, "must be at least 1"),
        (["--load-hf", "{model}", "--port", "99999"], 1, "cannot listen on 127.0.0.1 port 99999"),
    ],
)
def test_a_wrong_start_is_said_in_one_sentence(
    chatty: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, part: str
) -> None:
    words = [flag.replace("{model}", str(chatty)) for flag in flags]
    assert serve_main([*words, "--distributed-backend", "gloo"]) == code
    said = capsys.readouterr().err
    assert part in said
    assert len(said.splitlines()) == 1


def test_a_cache_that_no_machine_has_is_said_in_one_sentence() -> None:
    layer = SimpleNamespace(
        layer_number=1, self_attention=SimpleNamespace(num_query_groups_per_partition=4)
    )
    model = SimpleNamespace(
        decoder=SimpleNamespace(layers=[layer]), config=SimpleNamespace(params_dtype=torch.float32)
    )
    stage: Any = SimpleNamespace(model=model, device="cpu")
    sizes: Any = SimpleNamespace(kv_channels=8)
    limits = Limits(num_rows=10**15, max_length=128, max_prompt_tokens=1)
    with pytest.raises(ConfigError, match=r"no memory for the keys .* --inference-max-requests"):
        Stage._take_cache(stage, sizes, limits, limits.num_rows)


def test_a_connection_outlives_what_clients_keep_idle(idle: Idle) -> None:
    """httpx lets go of a connection after 5 s."""
    time.sleep(max(0.0, idle.since_s + 5.5 - time.monotonic()))
    assert idle.connection.sock is idle.socket
    assert ask_for_health(idle.connection) == b'{"status":"ok"}'
    assert idle.connection.sock is idle.socket
