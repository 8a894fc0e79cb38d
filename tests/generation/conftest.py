"""Small models with random weights, real servers, and an engine without a model."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import ranks
from training.data.tokenizers import ByteTokenizer
from training.generation.engine import Commands
from training.generation.request import Limits, TokenScore
from training.generation.scheduler import Scheduler
from training.generation.service import Metrics, Service
from training.generation.web.app import build_app
from training.generation.web.bodies import ChatTemplate, ServedModel

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("generating_ranks.py")
VOCAB = 203
NUM_TOKENS = 12
TINY = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
LLAMA = TINY | {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2Config", TINY | {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 96}),
    "llama": ("LlamaConfig", LLAMA),
    "qwen3": ("Qwen3Config", LLAMA | {"head_dim": 24, "tie_word_embeddings": True}),
    # Two ranks share the one group of keys.
    "mistral": ("MistralConfig", LLAMA | {"num_key_value_heads": 1, "sliding_window": None}),
    "mixtral": ("MixtralConfig", LLAMA | {"num_local_experts": 4}),
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin as user') }}{% endif %}"
    "assistant:"
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A Hugging Face folder, and what transformers makes of its prompts."""

    folder: Path
    prompts: list[list[int]]
    greedy: list[list[int]]
    exact: list[float]
    """Log probabilities of the first prompt's tokens from the second on, in float32."""
    rounded: list[float]
    """The same in bfloat16."""


def write_model(folder: Path, family: str) -> Expected:
    """A tiny model with random weights, norms and biases, and its greedy continuations."""
    transformers = pytest.importorskip("transformers")
    import torch

    from tests.weights import exaggerate

    name, fields = FAMILIES[family]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields))
    exaggerate(model)
    model.eval().save_pretrained(folder)
    prompts = [[(7 * row + 3 * place) % VOCAB for place in range(10)] for row in range(3)]
    ids = torch.tensor(prompts)
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )

    def scores() -> list[float]:
        with torch.no_grad():
            table = model(ids[:1]).logits[0, :-1].float().log_softmax(-1)
        found: list[float] = table.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    exact = scores()
    model.to(torch.bfloat16)
    return Expected(
        folder=folder, prompts=prompts, greedy=answer[:, 10:].tolist(), exact=exact,
        rounded=scores(),
    )  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    """A model of each family."""
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def chatty(models: dict[str, Expected]) -> Path:
    """The Llama model with a byte-level tokenizer that has a chat template."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds

    folder = models["llama"].folder
    library = Tokenizer(kinds.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 2]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    library.train_from_iterator(["the cat sat on the mat"], trainer)
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server that answers."""

    process: subprocess.Popen[str]
    url: str

    def metric(self, name: str) -> float:
        """The value of one metric."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = [line.split() for line in text.splitlines()]
        return next(float(parts[1]) for parts in lines if parts and parts[0] == f"megascan_{name}")

    def until(self, name: str, wanted: Callable[[float], bool]) -> float:
        """Wait until a metric is as wanted; the value it then has."""
        end = time.monotonic() + 60
        while not wanted(value := self.metric(name)):
            assert time.monotonic() < end, f"{name} stays {value}"
            time.sleep(0.02)
        return value


Serve = Callable[..., Running]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start `training.serve` and wait until it answers; all are ended afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: object, num_ranks: int = 1, own_launcher: bool = False) -> Running:
        words = ["-m", "training.serve", *map(str, flags), "--port", "0"]
        words += ["--distributed-backend", "gloo"]
        process = ranks.start(*words, num_ranks=num_ranks, own_launcher=own_launcher)
        started.append(process)
        assert process.stdout is not None
        heard = []
        for line in process.stdout:
            heard.append(line)
            if line.startswith("serving "):
                url = line.split(" at ")[1].split("/v1")[0]
                return Running(process=process, url=url)
        raise AssertionError("".join(heard))

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


LIMITS = Limits(num_rows=4, max_length=64, max_prompt_tokens=16)


class CountingEngine:
    """The scheduler and the service of a server; in place of a model the next token is one more."""

    def __init__(self, *, max_waiting: int = 64) -> None:
        self.metrics = Metrics(num_slots=LIMITS.num_rows)
        self.service = Service(self.metrics, max_waiting=max_waiting)
        self.scheduler = Scheduler(
            num_slots=LIMITS.num_rows,
            max_prompt_tokens=LIMITS.max_prompt_tokens,
            move=lambda source, target, length: None,
        )
        self.goes_on: queue.SimpleQueue[None] | None = None
        """Where it is set, one step is computed for each item."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            commands: Commands = self.service.inbox(not self.scheduler.has_work)
            for request in commands.requests:
                self.scheduler.add(request)
            self.scheduler.cancel(set(commands.cancelled))
            if commands.is_last:
                self.service.end()
                return
            if self.scheduler.has_work:
                if self.goes_on is not None:
                    self.goes_on.get()
                self._advance()

    def _advance(self) -> None:
        step = self.scheduler.plan()
        scores = []
        for target in step.targets:
            last = target.row.tokens[-1]
            token = 97 + (last - 96) % 26 if target.given is None else target.given
            wanted = target.row.request.num_logprobs
            scores.append(
                TokenScore(
                    token=token,
                    logprob=None if wanted is None else -0.5,
                    alternatives=tuple((97 + place, -1.0) for place in range(wanted or 0)),
                )
            )
        answers = self.scheduler.record(step, scores)
        self.metrics.answered(self.scheduler, answers)
        self.service.deliver(answers)

    def close(self) -> None:
        """End the thread."""
        self.service.stop()
        if self.goes_on is not None:
            self.goes_on.put(None)
        self._thread.join(10)


@pytest.fixture
def counting() -> Iterator[CountingEngine]:
    """An engine that counts through the alphabet."""
    engine = CountingEngine()
    yield engine
    engine.close()


class PlainBytes(ByteTokenizer):
    """Bytes that a chat template can be used with."""

    def tokenize_plainly(self, text: str) -> list[int]:
        """Text is nothing but text."""
        return self.tokenize(text)


@pytest.fixture
def client_of() -> Callable[..., httpx.AsyncClient]:
    """A client of the application over an engine, without a network."""

    def make(
        engine: CountingEngine,
        template: str | None = None,
        ends: tuple[int, ...] = (),
        **options: object,
    ) -> httpx.AsyncClient:
        tokenizer: Any = PlainBytes()
        model = ServedModel(
            name="letters", tokenizer=tokenizer, stop_ids=(tokenizer.eod, *ends), limits=LIMITS,
            service=engine.service,
            template=None if template is None else ChatTemplate(template, {}, tokenizer),
        )  # fmt: skip
        app = build_app(model, **options)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")

    return make
