"""Which rows a batch holds and what each step computes for them.

Requests wait in the order in which they came. One that gets a free slot joins the running batch:
every step computes one token of each row that generates and, beside them, up to `max_prompt_tokens`
tokens of prompts, oldest first. So a long prompt delays the others by pieces and starves nobody.

Every rank keeps a scheduler of its own, fed with the same requests and the same chosen tokens; all
decide alike, and nothing but requests and tokens has to travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from training.generation.layout import RowTokens
from training.generation.request import Answer, FinishReason, Request, TokenScore
from training.generation.sampling import Choice


@dataclass
class Row:
    """A request that has a slot in the cache."""

    request: Request
    tokens: list[int]
    """Prompt and what was generated."""
    random: np.random.Generator
    num_cached: int = 0
    """Tokens whose keys and values are in the cache."""

    @property
    def num_generated(self) -> int:
        """Return the number of tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """Return the answer so far."""
        return self.tokens[len(self.request.prompt) :]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A position of the stream whose logits are needed, and what for."""

    row: Row
    index: int
    """In the stream."""
    given: int | None
    """The prompt's next token, which is only scored; None where a token is to be chosen."""
    choice: Choice | None
    """How it is chosen; None where it is given."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step computes."""

    shares: tuple[RowTokens, ...]
    targets: tuple[Target, ...]
    num_logprobs: int | None
    """Alternatives that are wanted beside each target; None: not even its own log probability."""
    num_prompt_tokens: int


@dataclass
class Scheduler:
    """The rows of a batch, those that wait, and the next step.

    `move` copies a slot's first places over another's: `move(source, target, length)`.
    """

    num_slots: int
    max_prompt_tokens: int
    move: Callable[[int, int, int], None]
    rows: list[Row] = field(default_factory=list)
    """Row i has slot i."""
    waiting: deque[Request] = field(default_factory=deque)

    @property
    def has_work(self) -> bool:
        """Return whether there is anything to compute."""
        return bool(self.rows or self.waiting)

    def add(self, request: Request) -> None:
        """Let a request wait for a slot."""
        self.waiting.append(request)

    def cancel(self, identifiers: set[int]) -> None:
        """Forget requests, in whatever state they are; unknown ones are over already."""
        self.waiting = deque(one for one in self.waiting if one.identifier not in identifiers)
        self._free([one for one in self.rows if one.request.identifier in identifiers])

    def plan(self) -> Step:
        """Give free slots to those that wait, and say what the next step computes."""
        while self.waiting and len(self.rows) < self.num_slots:
            request = self.waiting.popleft()
            generator = np.random.default_rng(request.sampling.seed)
            self.rows.append(Row(request=request, tokens=list(request.prompt), random=generator))
        budget = self.max_prompt_tokens
        planned: list[tuple[int, int]] = []
        for slot, row in enumerate(self.rows):
            size = len(row.tokens) - row.num_cached
            if row.num_generated == 0:
                size = min(size, budget)
                budget -= size
            if size:
                planned.append((slot, size))
        planned.sort(key=lambda pair: pair[1] > 1)  # single tokens come first in the stream
        return self._step(planned, self.max_prompt_tokens - budget)

    def _step(self, planned: Sequence[tuple[int, int]], num_prompt_tokens: int) -> Step:
        shares: list[RowTokens] = []
        targets: list[Target] = []
        num_logprobs: int | None = None
        first = 0
        for slot, size in planned:
            row = self.rows[slot]
            end = row.num_cached + size
            tokens = tuple(row.tokens[row.num_cached : end])
            shares.append(RowTokens(slot=slot, start=row.num_cached, tokens=tokens))
            own = _targets(row, first, end)
            targets += own
            if own and row.request.num_logprobs is not None:
                num_logprobs = max(num_logprobs or 0, row.request.num_logprobs)
            first += size
        return Step(
            shares=tuple(shares),
            targets=tuple(targets),
            num_logprobs=num_logprobs,
            num_prompt_tokens=num_prompt_tokens,
        )

    def record(self, step: Step, scores: Sequence[TokenScore]) -> list[Answer]:
        """Take in what came of the targets of a step; rows that are over free their slots."""
        for share in step.shares:
            self.rows[share.slot].num_cached = share.end
        scored: dict[int, list[TokenScore]] = {}
        chosen: dict[int, TokenScore] = {}
        for target, score in zip(step.targets, scores, strict=True):
            row, identifier = target.row, target.row.request.identifier
            if target.given is not None:
                scored.setdefault(identifier, []).append(score)
            elif target.choice is not None:
                row.tokens.append(score.token)
                chosen[identifier] = score
        answers = []
        ended = []
        for row in [self.rows[share.slot] for share in step.shares]:
            identifier = row.request.identifier
            reason = _finish_reason(row)
            prompt_scores = tuple(scored.get(identifier, ()))
            token = chosen.get(identifier)
            if token is None and not prompt_scores and reason is None:
                continue
            answers.append(
                Answer(
                    identifier=identifier,
                    prompt_scores=prompt_scores,
                    token=token,
                    finish_reason=reason,
                )
            )
            if reason is not None:
                ended.append(row)
        self._free(ended)
        return answers

    def _free(self, ended: Sequence[Row]) -> None:
        """Take rows out; rows behind the slots that are still needed move into the gaps."""
        is_over = [any(row is one for one in ended) for row in self.rows]
        num_left = is_over.count(False)
        gaps = [slot for slot in range(num_left) if is_over[slot]]
        behind = [slot for slot in range(num_left, len(self.rows)) if not is_over[slot]]
        for source, target in zip(behind, gaps, strict=True):
            self.rows[target] = self.rows[source]
            self.move(source, target, self.rows[target].num_cached)
        del self.rows[num_left:]


def _targets(row: Row, first: int, end: int) -> list[Target]:
    """Return the positions of a row's share whose logits are needed; `first` is its place in the
    stream.

    Logits at a position tell the next token: those at the last one choose, those before it, in a
    prompt that is to be scored, belong to tokens that are known.
    """
    request, known = row.request, len(row.tokens)
    targets = []
    if request.scores_prompt and row.num_generated == 0:
        targets = [
            Target(
                row=row,
                index=first + position - row.num_cached,
                given=row.tokens[position + 1],
                choice=None,
            )
            for position in range(row.num_cached, min(end, known - 1))
        ]
    if end == known and request.max_tokens:
        choice = Choice(
            sampling=request.sampling,
            draw=float(row.random.random()),
            generated=row.generated if request.sampling.has_penalties else (),
        )
        index = first + end - 1 - row.num_cached
        targets.append(Target(row=row, index=index, given=None, choice=choice))
    return targets


def _finish_reason(row: Row) -> FinishReason | None:
    if row.num_cached < len(row.request.prompt):
        return None
    if row.num_generated and row.tokens[-1] in row.request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if row.num_generated >= row.request.max_tokens else None
