"""What the engine is asked and what it answers, in token ids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a row has ended, in the words of OpenAI's interface."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the model's probabilities.

    Temperature 0 takes the most probable token. Otherwise the logits are divided by the
    temperature; the `top_k` most probable tokens are kept (0: all), and among them the smallest set
    whose probabilities reach `top_p`; from this set one token is drawn. Before that, penalties are
    subtracted from the logits of tokens that the row has already generated: `presence_penalty`
    once, `frequency_penalty` as often as the token occurs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    @property
    def has_penalties(self) -> bool:
        """Return whether tokens that were generated already are penalized."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One row that is to be generated."""

    identifier: int
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """Most tokens to generate; with 0 only the prompt is read."""
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the row; the one that does is the last token of the answer."""
    num_logprobs: int | None = None
    """How many alternatives to give for each token, next to the log probability of the token
    itself; None: no log probabilities."""
    scores_prompt: bool = False
    """Whether the prompt's tokens get scores too."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a job may hold at a time."""

    num_rows: int
    """Rows that generate side by side."""
    max_length: int
    """Most tokens of a row, prompt and answer together."""
    max_prompt_tokens: int
    """Most prompt tokens of one step."""


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """One token with its log probability under the model, before temperature and penalties."""

    token: int
    logprob: float | None
    """None where no log probability was asked for, and for the first token of a prompt."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The most probable tokens and their log probabilities, best first."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one step has brought for one request."""

    identifier: int
    prompt_scores: tuple[TokenScore, ...] = ()
    """Scores of the prompt's next tokens, in order, where the request asks for them."""
    token: TokenScore | None = None
    """A generated token; None while the prompt is still being read."""
    finish_reason: FinishReason | None = None
    """Set in the last answer to a request."""
