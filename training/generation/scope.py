"""MegaScope in the server: the model that the engine lends to it, and its page."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from megascope.interventions import TensorShares
from megascope.model_page import ModelPage
from megascope.server import address_of, build_app
from megascope.session import NUM_ALTERNATIVES, NextToken, Session
from training.generation.detokenizing import token_text
from training.generation.engine import GenerationCallback
from training.generation.request import Answer, Sampling
from training.generation.sampling import TokenChoice, choose
from training.generation.scheduler import RowTokens, Scheduler, Step, lay_out

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from training.generation.engine import Engine
    from training.generation.job import GenerationJob
    from training.generation.service import Service


class Lent:
    """One rank's model as `megascope.session.LentModel` wants it, while the batch goes on.

    MegaScope's tokens have a slot of the cache that no row of the batch ever gets.
    """

    def __init__(self, engine: Engine) -> None:
        from megatron.core import parallel_state

        self._engine = engine
        self.module: torch.nn.Module = engine.stage.model
        self.shares = TensorShares(
            rank=parallel_state.get_tensor_model_parallel_rank(),
            size=parallel_state.get_tensor_model_parallel_world_size(),
        )
        self.pp: int = parallel_state.get_pipeline_model_parallel_rank()
        self.num_stages: int = parallel_state.get_pipeline_model_parallel_world_size()
        self.max_length = engine.limits.max_length

    def compute(
        self, tokens: Sequence[int], start: int, *, temperature: float, draw: float
    ) -> NextToken:
        """Compute tokens from position `start` on; return the next token, the same on all ranks."""
        engine, stage = self._engine, self._engine.stage
        share = RowTokens(slot=engine.limits.num_rows, start=start, tokens=tuple(tokens))
        layout = lay_out([share], max_length=self.max_length, device=stage.device)
        logits = stage.run(layout, torch.tensor([len(tokens) - 1], device=stage.device))
        most = min(NUM_ALTERNATIVES, stage.vocab_size)
        table = None
        if logits is not None and engine.is_sampling:
            chosen = choose(
                logits, [TokenChoice(sampling=Sampling(temperature=temperature), draw=draw)]
            )
            logprobs = logits.float().log_softmax(-1)
            best = logprobs.topk(most, dim=-1)
            tokens_chosen = chosen[:, None]
            columns = [
                tokens_chosen, logprobs.gather(1, tokens_chosen), best.indices, best.values,
            ]  # fmt: skip
            table = torch.cat([column.double() for column in columns], dim=1).cpu()
            now = torch.tensor([[time.monotonic()]], dtype=torch.float64)
            table = torch.cat([table, now], dim=1)
        row = engine.exchange.share_scores(table, 1, 3 + 2 * most)[0].tolist()
        token, log_probability, *alternatives, chosen_at_s = row
        tokens_of, scores_of = alternatives[:most], alternatives[most:]
        return NextToken(
            token=int(token),
            log_probability=log_probability,
            alternatives=[
                (int(one), score) for one, score in zip(tokens_of, scores_of, strict=True)
            ],
            chosen_at_s=chosen_at_s,
        )

    def unembed(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states, on the last stage."""
        return self._engine.stage.unembed(states)

    def collect(self, content: bytes) -> list[bytes] | None:
        """Return every rank's bytes on rank 0, by rank; None on the others."""
        return self._engine.exchange.collect(content)

    def share(self, content: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        return self._engine.exchange.share(content)


class Looking(GenerationCallback):
    """Lets MegaScope work between the engine's steps; passes all calls on to an inner callback."""

    def __init__(self, job: GenerationJob, inner: GenerationCallback) -> None:
        self._job = job
        self._inner = inner
        self._session: Session | None = None
        self._page: ModelPage | None = None

    def attach(self, engine: Engine) -> None:
        """Begin when the engine is built; called on every rank."""
        tokenizer = self._job.tokenizer

        def text_of(token: int) -> str:
            if token >= tokenizer.vocab_size:
                return f"token_id:{token}"
            return token_text(tokenizer, token)

        self._session = Session(Lent(engine), self._send, self._job.vocab_size, text_of)

    def _send(self, identifier: int, frame: bytes | None) -> None:
        if self._page is not None:
            self._page.deliver(identifier, frame)

    def page(self, service: Service, token: str, name: str) -> ASGIApp:
        """Return the page's application, on rank 0."""
        job, sizes = self._job, self._job.sizes
        self._page = ModelPage(
            {
                "model": name, "num_layers": sizes.num_layers, "hidden_size": sizes.hidden_size,
                "num_heads": sizes.num_attention_heads, "tp": sizes.tensor_size,
                "pp": sizes.pipeline_size, "ffn_hidden_size": sizes.ffn_hidden_size,
            },
            tell=service.tell,
            tokenize=lambda text: list(job.tokenizer.tokenize(text)),
            text_of=lambda one: token_text(job.tokenizer, one),
            max_length=job.limits.max_length,
            vocab_size=job.vocab_size,
        )  # fmt: skip
        return build_app(self._page, token=token)

    def address(self, listening: socket.socket, token: str) -> str:
        """Return the address of the page, token included."""
        return address_of(listening, token)

    @property
    def has_work(self) -> bool:
        """Return whether a command waits or a run is under way."""
        return self._session is not None and self._session.has_work

    def receive(self, aside: str) -> None:
        """Take a command of the page; called on every rank."""
        if self._session is not None:
            self._session.receive(json.loads(aside))

    @torch.inference_mode()
    def work(self) -> None:
        """Compute one token of the run that is looked at, or answer a question."""
        if self._session is not None:
            self._session.work()

    def step(self, step: Step) -> AbstractContextManager[None]:
        """Take MegaScope's hooks out for a step of the engine; tell the inner callback."""
        if self._session is not None:
            self._session.look_away()
        return self._inner.step(step)

    def answered(self, scheduler: Scheduler, answers: Sequence[Answer]) -> None:
        """Pass answers on to the inner callback."""
        self._inner.answered(scheduler, answers)
