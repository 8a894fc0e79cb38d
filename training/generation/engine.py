"""The loop that generates: requests in, answers out, on every rank of a job.

    commands from rank 0  →  scheduler  →  one step of the model  →  tokens  →  scheduler  →  …

All ranks run the same loop. Where they differ, the difference lies in `Stage` (which layers) and in
`Exchange` (who speaks). What watches the loop is a `GenerationCallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from training.generation.exchange import NOTHING, Commands, Exchange
from training.generation.graphs import Recorder, ReplayedSteps
from training.generation.layout import lay_out
from training.generation.request import Answer, Limits, Request, TokenScore
from training.generation.sampling import Choice, choose
from training.generation.scheduler import Scheduler, Step, Target
from training.generation.stage import Stage


class GenerationCallback:
    """Moments in the life of an engine; all are told on the thread that computes."""

    def step(self, step: Step) -> AbstractContextManager[None]:
        """Surround the computation of one step, from the model's input to the chosen tokens."""
        del step
        return nullcontext()

    def answered(self, scheduler: Scheduler, answers: Sequence[Answer]) -> None:
        """Follow a step: what it has brought, and what the batch holds now."""
        del scheduler, answers

    @property
    def has_work(self) -> bool:
        """Return whether `work` has something to do, alike on all ranks."""
        return False

    def receive(self, aside: str) -> None:
        """Take an aside: what a client of the callback's own has sent to all ranks."""
        del aside

    def work(self) -> None:
        """Do one step of the callback's own, between two steps of the engine, on all ranks."""


Inbox = Callable[[bool], Commands]
"""Gives what has arrived; with True it waits until something has."""


class Engine:
    """Generates for all requests of a job; one on every rank."""

    def __init__(
        self,
        stage: Stage,
        limits: Limits,
        callback: GenerationCallback | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Make an engine; with a recorder, steps of one token a row are replayed."""
        self.stage = stage
        self.limits = limits
        self._callback = callback or GenerationCallback()
        self._replay = None if recorder is None else ReplayedSteps(stage, limits, recorder)
        cache = stage.cache
        self.scheduler = Scheduler(
            num_slots=limits.num_rows,
            max_prompt_tokens=limits.max_prompt_tokens,
            move=lambda source, target, length: cache.move(
                source=source, target=target, length=length
            ),
        )
        sampling_rank = dist.get_process_group_ranks(
            parallel_state.get_pipeline_model_parallel_group()
        )[-1]
        # The first of its tensor-parallel ranks: rank 0's pipeline ends there.
        sampling_rank -= parallel_state.get_tensor_model_parallel_rank()
        self.is_sampling = dist.get_rank() == sampling_rank
        self.exchange = Exchange(sampling_rank)

    @property
    def cache_bytes(self) -> int:
        """Return the memory of this rank's keys and values."""
        return self.stage.cache.num_bytes

    def run(self, inbox: Inbox | None = None) -> Iterator[list[Answer]]:
        """Serve what the inbox of rank 0 brings, step by step, until its last command.

        Yields the answers of each step, on every rank; other ranks need no inbox.
        """
        while True:
            is_idle = not (self.scheduler.has_work or self._callback.has_work)
            own = NOTHING if inbox is None else inbox(is_idle)
            commands = self.exchange.share_commands(own)
            for request in commands.requests:
                self.scheduler.add(request)
            if commands.cancelled:
                self.scheduler.cancel(set(commands.cancelled))
                self._callback.answered(self.scheduler, ())
            if commands.is_last:
                return
            for aside in commands.asides:
                self._callback.receive(aside)
            self._callback.work()
            if self.scheduler.has_work:
                yield self._advance()

    @property
    def num_recorded(self) -> int:
        """Return of how many sizes steps can be replayed now."""
        return 0 if self._replay is None else self._replay.num_recorded

    def close(self) -> None:
        """Give back what the job's communicators wait for when they end: graphs that use them."""
        if self._replay is not None:
            self._replay.forget()

    def generate(self, requests: Iterable[Request]) -> Iterator[list[Answer]]:
        """Answer a given set of requests; every rank calls it, only rank 0's requests count."""
        pending = [Commands(requests=tuple(requests))]

        def inbox(waits: bool) -> Commands:
            if pending:
                return pending.pop()
            return Commands(is_last=True) if waits else NOTHING

        return self.run(inbox)

    def _advance(self) -> list[Answer]:
        step = self.scheduler.plan()
        with self._callback.step(step):
            scores = self._compute(step)
        answers = self.scheduler.record(step, scores)
        self._callback.answered(self.scheduler, answers)
        return answers

    @torch.inference_mode()
    def _compute(self, step: Step) -> list[TokenScore]:
        targets = step.targets
        if self._replay is not None and self._replay.takes(step):
            logits: torch.Tensor | None = self._replay.run(step.shares)
        else:
            logits = self._run(step)
        if not targets:
            return []
        table = None
        if logits is not None and self.is_sampling:
            table = tabulate(logits, targets, step.num_logprobs)
        num_columns = 1 if step.num_logprobs is None else 2 + 2 * step.num_logprobs
        table = self.exchange.share_scores(table, len(targets), num_columns)
        return [_score(row, target) for row, target in zip(table.tolist(), targets, strict=True)]

    def _run(self, step: Step) -> torch.Tensor | None:
        """Return the logits `(target, vocabulary)` of any step on the last stage."""
        stage = self.stage
        layout = lay_out(step.shares, max_length=self.limits.max_length, device=stage.device)
        # Without a target the last stage still has to take part: it computes one position.
        indices = [target.index for target in step.targets] or [0]
        wanted = None
        if len(indices) < layout.places.shape[0]:
            wanted = torch.tensor(indices, device=stage.device)
        return stage.run(layout, wanted)


def tabulate(
    logits: torch.Tensor, targets: Sequence[Target], num_logprobs: int | None
) -> torch.Tensor:
    """Choose and score all targets: `(target, column)` in float64, on the CPU.

    Columns: the token, its log probability, then the tokens of the best alternatives and their log
    probabilities. Without `num_logprobs` only the first.
    """
    tokens = _tokens(logits, targets)[:, None]
    if num_logprobs is None:
        return tokens.double().cpu()
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    columns = [tokens.double(), (logits.gather(1, tokens) - total).double()]
    if num_logprobs:
        best = logits.topk(num_logprobs, dim=-1)
        columns += [best.indices.double(), (best.values - total).double()]
    return torch.cat(columns, dim=1).cpu()


def _tokens(logits: torch.Tensor, targets: Sequence[Target]) -> torch.Tensor:
    """Return the token of each target: the given one, or one that is chosen."""
    choices: list[Choice] = [target.choice for target in targets if target.choice is not None]
    if len(choices) == len(targets):
        return choose(logits, choices)
    given = [target.given for target in targets]
    tokens = torch.tensor([token or 0 for token in given], device=logits.device)
    if choices:
        free = [index for index, token in enumerate(given) if token is None]
        rows = torch.tensor(free, device=logits.device)
        tokens[rows] = choose(logits[rows], choices)
    return tokens


def _score(row: Sequence[float], target: Target) -> TokenScore:
    """Return one target's score, with as many alternatives as its own request asked for."""
    wanted = target.row.request.num_logprobs
    if wanted is None or len(row) == 1:
        return TokenScore(token=int(row[0]), logprob=None)
    most = (len(row) - 2) // 2
    alternatives = zip(row[2 : 2 + wanted], row[2 + most : 2 + most + wanted], strict=True)
    return TokenScore(
        token=int(row[0]),
        logprob=row[1],
        alternatives=tuple((int(token), logprob) for token, logprob in alternatives),
    )
