"""Choosing tokens from logits, each row by its own rule and from its own seed.

A row draws one number between 0 and 1 for each of its tokens, from a generator that nothing else
uses. The token is the first whose cumulated probability exceeds the number: the same seed gives the
same text whatever other rows are in the batch, and however the model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.generation.request import Sampling

# The nucleus of top_p is looked for among this many most probable tokens before all are sorted.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True, kw_only=True)
class TokenChoice:
    """How the token at one position is chosen."""

    sampling: Sampling
    draw: float
    """The row's next number in [0, 1)."""
    generated: Sequence[int] = ()
    """Tokens that the row has generated so far, for the penalties."""


def choose(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """Choose a token for each row of `logits` `(row, token)`; return `(row,)`."""
    chosen = logits.argmax(dim=-1)
    special = [index for index, choice in enumerate(choices) if _needs_more(choice.sampling)]
    if special:
        rows = torch.tensor(special, device=logits.device)
        chosen[rows] = _draw(logits[rows].float(), [choices[index] for index in special])
    return chosen


def _needs_more(sampling: Sampling) -> bool:
    return sampling.temperature > 0 or sampling.has_penalties


def _draw(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """Choose by penalties and temperature; overwrites `logits`."""
    for row, choice in enumerate(choices):
        if choice.sampling.has_penalties and choice.generated:
            _punish(logits[row], choice)
    best = logits.argmax(dim=-1)
    temperatures = torch.tensor([choice.sampling.temperature for choice in choices])
    is_greedy = (temperatures == 0).to(logits.device)
    divisors = temperatures.where(temperatures > 0, 1.0).to(logits.device)
    logits = logits / divisors[:, None]
    _keep_top_k(logits, [choice.sampling.top_k for choice in choices])
    probabilities = torch.softmax(logits, dim=-1)
    for row, choice in enumerate(choices):
        if choice.sampling.top_p < 1 and choice.sampling.temperature > 0:
            _keep_nucleus(probabilities[row], choice.sampling.top_p)
    cumulated = probabilities.double().cumsum(dim=-1)
    draws = torch.tensor([choice.draw for choice in choices], dtype=torch.float64)
    wanted = draws.to(logits.device)[:, None] * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    return torch.where(is_greedy, best, drawn.clamp(max=logits.shape[-1] - 1))


def _punish(logits: torch.Tensor, choice: TokenChoice) -> None:
    """Subtract the penalties from the logits of one row, in place."""
    device = logits.device
    tokens, counts = torch.unique(torch.tensor(choice.generated, device=device), return_counts=True)
    sampling = choice.sampling
    logits[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _keep_top_k(logits: torch.Tensor, top_k: Sequence[int]) -> None:
    """Hide, in place, what is not among the `top_k` largest of each row.

    Logits equal to the smallest that is kept are kept as well.
    """
    size = logits.shape[-1]
    wanted = [min(count, size) for count in top_k]
    rows = [row for row, count in enumerate(wanted) if 0 < count < size]
    if not rows:
        return
    largest = logits[rows].topk(max(wanted[row] for row in rows), dim=-1).values
    for place, row in enumerate(rows):
        limit = largest[place, wanted[row] - 1]
        logits[row].masked_fill_(logits[row] < limit, float("-inf"))


def _keep_nucleus(probabilities: torch.Tensor, top_p: float) -> None:
    """Set to 0, in place, what lies outside the smallest set of tokens that reaches `top_p`.

    With probabilities 0.5, 0.3, 0.2 and `top_p` 0.6 the first two are kept: the first alone reaches
    only 0.5. Probabilities equal to the smallest that is kept are kept as well.
    """
    size = probabilities.shape[-1]
    largest = probabilities.topk(min(_NUCLEUS_GUESS, size)).values
    if float(largest.sum()) < top_p and len(largest) < size:
        largest = probabilities.sort(descending=True).values
    before = largest.double().cumsum(dim=-1) - largest
    num_kept = max(int((before < top_p).sum()), 1)
    limit = largest[num_kept - 1]
    probabilities.masked_fill_(probabilities < limit, 0.0)
