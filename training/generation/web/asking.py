"""What completions and chat have in common: from a body's fields to rows for the engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from training.data.tokenizers import Tokenizer
from training.generation.request import Limits, Request, Sampling
from training.generation.service import Service
from training.generation.web.chat_template import ChatTemplate
from training.generation.web.fields import Fields
from training.generation.web.responses import RequestError

MOST_CHOICES = 128
"""Choices of one request, over all its prompts."""
_MOST_STOPS = 16
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the endpoints know of the model that is served."""

    name: str
    tokenizer: Tokenizer
    limits: Limits
    service: Service
    template: ChatTemplate | None = None
    """Of the tokenizer; without one there is no chat."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The fields that both endpoints share."""

    sampling: Sampling
    num_choices: int
    stops: tuple[str, ...]
    streams: bool
    includes_usage: bool


def read_wish(fields: Fields, model: Model) -> Wish:
    """Read the shared fields; RequestError for the first that is out of range."""
    asked_for = fields.text("model", model.name)
    if asked_for != model.name:
        raise RequestError(
            f"the model {asked_for[:64]!r} is not here; this server has {model.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0, low=0.0, high=100.0),
        top_k=fields.integer("top_k", 0, low=0, high=1_000_000),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        seed=fields.integer("seed", secrets.randbits(62), low=0, high=_LARGEST_SEED),
    )
    streams = fields.switch("stream")
    options = fields.inner("stream_options")
    includes_usage = options.switch("include_usage")
    options.finish()
    fields.text("user", "")  # names the client's own user: nothing to be done
    fields.without_effect("logit_bias", {})
    return Wish(
        sampling=sampling,
        num_choices=fields.integer("n", 1, low=1, high=MOST_CHOICES),
        stops=fields.strings("stop", most=_MOST_STOPS),
        streams=streams,
        includes_usage=streams and includes_usage,
    )


def rows_of(
    prompt: tuple[int, ...],
    wish: Wish,
    model: Model,
    *,
    max_tokens: int | None,
    num_logprobs: int | None = None,
    scores_prompt: bool = False,
    param: str = "prompt",
) -> list[Request]:
    """The rows that one prompt asks for; without `max_tokens` up to the longest possible.

    Raises RequestError for a prompt that does not fit.
    """
    longest = model.limits.max_length
    if not prompt:
        raise RequestError(f"{param} has no tokens; send one at least", param=param)
    room = longest - len(prompt)
    if room < (1 if max_tokens is None else max_tokens):
        wanted = "" if max_tokens is None else f" and max_tokens {max_tokens}"
        raise RequestError(
            f"{param} has {len(prompt)} tokens{wanted}, but rows of this server have at most "
            f"{longest}; send less",
            param=param,
            code="context_length_exceeded",
        )
    return [
        Request(
            identifier=0,  # the service gives it
            prompt=prompt,
            max_tokens=room if max_tokens is None else max_tokens,
            sampling=choice_sampling(wish.sampling, choice),
            stop_ids=(model.tokenizer.eod,),
            num_logprobs=num_logprobs,
            scores_prompt=scores_prompt,
        )
        for choice in range(wish.num_choices)
    ]


def choice_sampling(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of a choice: the first has the seed itself, the others seeds made of it."""
    if choice == 0:
        return sampling
    made = np.random.SeedSequence([sampling.seed, choice]).generate_state(1, np.uint64)
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=int(made[0]) >> 1,
    )
