"""Which rows a batch holds, what each step computes for them, and in which order tokens stand.

Requests wait in the order in which they came. A request that gets a free slot joins the running
batch: every step computes one token of each row that generates and, in addition, up to
`max_prompt_tokens` tokens of prompts, oldest first. So a long prompt delays other rows only by
pieces and starves nobody.

Every rank has its own scheduler, which gets the same requests and the same chosen tokens; all
schedulers decide the same, and only requests and tokens must travel.

All tokens of a step go through the linear layers as one stream of shape (token, 1, hidden): first
one token of every row that generates, then pieces of prompts. Only attention must know which token
belongs to which row (`StepTokens`). An example with two rows that generate and a new prompt of 3:

    stream      a9  b4  c0 c1 c2
    positions    9   4   0  1  2
    decoding: slots 0, 1 with 10 and 5 tokens; one prompt piece: slot 2, tokens 0 to 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from megascan.arrays import Integers
from training.generation.request import Answer, FinishReason, Request, TokenScore
from training.generation.sampling import TokenChoice


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """The tokens of one row that a step computes, at positions `start` to `end` - 1."""

    slot: int
    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Rows of one token each: `(row,)` slots, and which cached places each row may see."""

    num_rows: int
    slots: slice | torch.Tensor
    length: int
    """Places of the longest row."""
    visible: torch.Tensor | None
    """Mask `(row, 1, 1, place)`, as booleans or as numbers that are added to scores; None when all
    rows see all `length` places."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Prompt pieces of equal start and length in neighbouring slots, computed together."""

    first_token: int
    num_rows: int
    num_tokens: int
    """Tokens of each row."""
    first_slot: int
    start: int
    visible: torch.Tensor | None
    """Mask `(token, place)`; None where the piece begins its row, so that a causal mask fits."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """One step's tokens, ready for the model of any stage."""

    tokens: torch.Tensor
    """Token ids `(1, token)`."""
    positions: torch.Tensor
    """Positions within rows `(1, token)`."""
    places: torch.Tensor
    """Places in the cache `(token,)`."""
    decoding: Decoding | None
    pieces: tuple[Piece, ...]


def lay_out(shares: Sequence[RowTokens], *, max_length: int, device: str) -> StepTokens:
    """Arrange the rows' tokens of a step, given in the order of the stream: single tokens first."""
    single = [share for share in shares if len(share.tokens) == 1]
    pieces = shares[len(single) :]
    numbers = torch.from_numpy(_numbers(single, pieces, max_length)).to(device)
    return StepTokens(
        tokens=numbers[0:1],
        positions=numbers[1:2],
        places=numbers[2],
        decoding=_decoding(single, device) if single else None,
        pieces=tuple(_pieces(pieces, len(single), device)),
    )


def _numbers(single: Sequence[RowTokens], pieces: Sequence[RowTokens], max_length: int) -> Integers:
    """Return tokens, positions and places in the cache `(3, token)`, single tokens first."""
    first = len(single)
    numbers = np.empty((3, first + sum(len(piece.tokens) for piece in pieces)), dtype=np.int64)
    numbers[0, :first] = [share.tokens[0] for share in single]
    numbers[1, :first] = [share.start for share in single]
    numbers[2, :first] = [share.slot * max_length + share.start for share in single]
    for piece in pieces:
        own = numbers[:, first : first + len(piece.tokens)]
        own[0] = piece.tokens
        own[1] = np.arange(piece.start, piece.end)
        own[2] = own[1] + piece.slot * max_length
        first += len(piece.tokens)
    return numbers


def _decoding(shares: Sequence[RowTokens], device: str) -> Decoding:
    slots = [share.slot for share in shares]
    ends = [share.end for share in shares]
    longest = max(ends)
    neighbours = slots == list(range(slots[0], slots[0] + len(slots)))
    visible = None
    if min(ends) != longest:
        limit = torch.tensor(ends, device=device)
        visible = torch.arange(longest, device=device) < limit[:, None]
        visible = visible[:, None, None]
    return Decoding(
        num_rows=len(shares),
        slots=slice(slots[0], slots[-1] + 1) if neighbours else torch.tensor(slots, device=device),
        length=longest,
        visible=visible,
    )


def _pieces(shares: Sequence[RowTokens], first_token: int, device: str) -> list[Piece]:
    """Join neighbouring shares of equal start and length in consecutive slots into pieces."""

    def key_of_run(numbered: tuple[int, RowTokens]) -> tuple[int, int, int]:
        index, share = numbered
        # In consecutive slots, slot and index grow alike.
        return share.slot - index, share.start, share.end

    made = []
    for _, run in groupby(enumerate(shares), key_of_run):
        rows = [share for _, share in run]
        first = rows[0]
        made.append(
            Piece(
                first_token=first_token,
                num_rows=len(rows),
                num_tokens=len(first.tokens),
                first_slot=first.slot,
                start=first.start,
                visible=_visible(first, device) if first.start else None,
            )
        )
        first_token += len(rows) * len(first.tokens)
    return made


def _visible(share: RowTokens, device: str) -> torch.Tensor:
    """Return a mask `(token, place)` for the tokens of a piece that does not begin its row.

    On GPUs the mask is torch's named pattern: where heads share keys, torch's kernels that need no
    table of all scores take no other mask.
    """
    if device != "cpu":
        return causal_lower_right(len(share.tokens), share.end)
    ends = torch.arange(share.start, share.end)[:, None]
    return torch.arange(share.end) <= ends


@dataclass
class Row:
    """A request that has a slot in the cache."""

    request: Request
    tokens: list[int]
    """Tokens of the prompt, then the generated tokens."""
    random: np.random.Generator
    num_cached: int = 0
    """Number of tokens whose keys and values are in the cache."""

    @property
    def num_generated(self) -> int:
        """Return the number of tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """Return the tokens generated so far."""
        return self.tokens[len(self.request.prompt) :]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A token of the stream whose logits are needed, to choose the next token or to score it."""

    row: Row
    index: int
    """Index of the token in the stream."""
    given: int | None
    """The prompt's next token, which is only scored; None where a token is to be chosen."""
    choice: TokenChoice | None
    """How the next token is chosen; None where it is given."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step computes."""

    shares: tuple[RowTokens, ...]
    targets: tuple[Target, ...]
    num_logprobs: int | None
    """Number of alternatives to give for each target; None: no log probabilities at all."""
    num_prompt_tokens: int


@dataclass
class Scheduler:
    """The rows of a batch, the requests that wait, and the next step.

    `move(source, target, length)` copies the first `length` places of a slot to another slot.
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
        """Forget requests, whether they wait or run; ignore those that are over already."""
        self.waiting = deque(one for one in self.waiting if one.identifier not in identifiers)
        self._free([one for one in self.rows if one.request.identifier in identifiers])

    def plan(self) -> Step:
        """Give free slots to requests that wait, and return what the next step computes."""
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
        """Take in the scores of a step's targets; free the slots of rows that are over."""
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
        """Take rows out, and move the last rows into the gaps, so that slots stay contiguous."""
        is_over = [any(row is one for one in ended) for row in self.rows]
        num_left = is_over.count(False)
        gaps = [slot for slot in range(num_left) if is_over[slot]]
        behind = [slot for slot in range(num_left, len(self.rows)) if not is_over[slot]]
        for source, target in zip(behind, gaps, strict=True):
            self.rows[target] = self.rows[source]
            self.move(source, target, self.rows[target].num_cached)
        del self.rows[num_left:]


def _targets(row: Row, first: int, end: int) -> list[Target]:
    """Return the targets of a row's tokens up to position `end`; `first` is the stream index of the
    row's first token in this step.

    Logits at a position are for the next token. Logits at the last known token choose a token;
    logits at earlier tokens score the prompt, where that is asked for.
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
        choice = TokenChoice(
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
